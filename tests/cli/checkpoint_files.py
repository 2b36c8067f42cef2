"""Files of checkpoints for the tests of addresses: a model of any size, and what a directory has."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

# They have the time of the command.
RECORDS = ("conversion.json", "manifest.json")
MARKERS = ("config.json", "manifest.json", ".metadata", "latest", "latest_checkpointed_iteration.txt")


def hub_directory(directory, num_bytes):
    """A GPT-2 of about this size, whose word embedding has most of it."""
    hidden = 512
    rows = num_bytes // (hidden * 4)
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": hidden, "n_positions": 8, "vocab_size": rows}
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (rows, hidden), "wpe.weight": (8, hidden), "ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    for name, shape in {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    for name in ("ln_1", "ln_2"):
        shapes |= {f"h.0.{name}.weight": (hidden,), f"h.0.{name}.bias": (hidden,)}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    tensors = {f"transformer.{name}": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


def files_of(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
