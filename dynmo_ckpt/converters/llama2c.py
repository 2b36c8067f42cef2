"""Reads ``NAME.bin`` of llama2.c: seven int32 sizes, then concatenated float32 matrices, layers stacked.

Its rotary embedding pairs neighboring elements of a head, DynMo's an element with the one half a head further. So
``maps/llama2c.json`` reorders the rows of query and key; values and the output projection are not rotated.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..formats.choices import ReadOptions
from ..io.errors import CorruptError
from ..io.files import open_file
from ..io.safetensors import StoredArray
from ..native.checkpoint import NativeCheckpoint
from ..tensors.views import Tensor, as_tensor
from .assemble import from_map
from .registry import CheckpointFormat

# Seven int32.
HEADER_BYTES = 28
# The file has no magic number. In any other `.bin` file, one of the seven numbers is most likely above this limit.
MAX_SIZE = 1 << 24


def is_llama2c(path: Path) -> bool:
    """Whether a file looks like one of llama2.c."""
    return path.is_file() and path.suffix == ".bin"


def read_llama2c(path: Path, make_vocab_size_divisible_by: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The ``model`` of a manifest, and the matrices by llama2.c's names, with the layer number as suffix.

    Args:
        path: the file.
        make_vocab_size_divisible_by: the recorded padded vocabulary size is a multiple of this number of rows.

    Raises:
        CorruptError: the header has impossible sizes, or does not fit the file's size.
    """
    with open_file(path) as handle:
        header = handle.read(HEADER_BYTES)
    numbers = [int.from_bytes(header[i : i + 4], "little", signed=True) for i in range(0, HEADER_BYTES, 4)]
    hidden, inner, layers, heads, groups, signed_vocab, positions = numbers
    # llama2.c stores a negative vocabulary size where the output matrix is not tied to the embedding.
    vocab = abs(signed_vocab)
    sizes = (hidden, inner, layers, heads, groups, vocab, positions)
    if path.name.startswith("pytorch_model"):
        raise CorruptError(
            f"{path}: a weight file of a Hugging Face directory; give the directory, which has config.json too"
        )
    if len(header) < HEADER_BYTES or not all(0 < size < MAX_SIZE for size in sizes) or hidden % heads or heads % groups:
        raise CorruptError(f"{path}: not a file of llama2.c: its header has the sizes {numbers}")
    width = hidden // heads
    stacks: list[tuple[str, bool, tuple[int, ...]]] = [
        ("tok_embeddings", False, (vocab, hidden)),
        ("attention_norm", True, (hidden,)),
        ("wq", True, (hidden, hidden)),
        ("wk", True, (groups * width, hidden)),
        ("wv", True, (groups * width, hidden)),
        ("wo", True, (hidden, hidden)),
        ("ffn_norm", True, (hidden,)),
        ("w1", True, (inner, hidden)),
        ("w2", True, (hidden, inner)),
        ("w3", True, (inner, hidden)),
        ("norm", False, (hidden,)),
        # Two tables of cosines and sines, each for half of a head. The map ignores them: they follow from the sizes.
        ("freq_cis", False, (positions, width)),
        *([("output", False, (vocab, hidden))] if signed_vocab < 0 else []),
    ]
    # The only proof that this is a file of llama2.c. Before the tensors are listed: a header may state 2**31 layers.
    end = HEADER_BYTES + 4 * sum((layers if stacked else 1) * math.prod(shape) for _, stacked, shape in stacks)
    if end != path.stat().st_size:
        raise CorruptError(f"{path}: has {path.stat().st_size} bytes; its header requires {end}")
    tensors, at = {}, HEADER_BYTES
    for name, stacked, shape in stacks:
        for i in range(layers if stacked else 1):
            key = f"{name}.{i}" if stacked else name
            tensors[key] = as_tensor(StoredArray(path=path, key=key, dtype="F32", shape=shape, offset=at))
            at += 4 * math.prod(shape)
    model = {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "max_position_embeddings": positions,
        "vocab_size": vocab,
        "padded_vocab_size": -(-vocab // make_vocab_size_divisible_by) * make_vocab_size_divisible_by,
        # The file has neither epsilon nor rotary base: they are constants in llama2.c.
        "layernorm_epsilon": 1e-5,
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rotary",
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "tied_embeddings": signed_vocab > 0,
    }
    return model, tensors


def _read(path: Path, options: ReadOptions) -> tuple[NativeCheckpoint, list[str]]:
    model, tensors = read_llama2c(path, options.make_vocab_size_divisible_by)
    return from_map(path.parent, model, "llama2c", tensors, options.drop, run_id=path.stem)


LLAMA2C = CheckpointFormat(
    name="llama2c", description="file of llama2.c (Llama)", marker="NAME.bin", detect=is_llama2c, read=_read, options=()
)
