"""Every form of optimizer state that Megatron-core writes, as its own code writes it, against what it had in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.reading import Reader, open_sources
from dynmo_ckpt.maps.name_map import layout_of, load_map, to_foreign
from dynmo_ckpt.operations.reference_model import load_array
from dynmo_ckpt.tensors.copy_plan import OutputTensor, sources
from dynmo_ckpt.tensors.tiled_copy import panels
from tests.distributed.ports import free_port
from tests.parity import megatron_optimizer
from tests.parity.megatron_families import SIZES, VOCABULARY
from tests.paths import ROOT

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(600)]
KINDS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# fully_sharded_bucket_space is absent: 0.12 cannot save it where a rank has several parts of a bucket.
# kind, model, sizes: tensor, expert, data, stages; elements of a bucket (0: one bucket)
CASES = [
    ("plain", "gpt", (1, 1, 1, 1), 0),
    ("plain", "llama", (2, 1, 1, 1), 0),
    ("plain", "gpt-oss/te", (1, 1, 1, 1), 0),
    ("fully_reshardable", "gpt", (1, 1, 2, 1), 0),
    ("fully_reshardable", "qwen3/local", (2, 1, 1, 1), 0),
    ("fully_reshardable", "qwen3-moe/te", (1, 2, 2, 1), 0),
    ("fully_reshardable", "deepseek-v3-mtp/te", (1, 1, 2, 1), 0),
    ("dp_reshardable", "gpt", (1, 1, 2, 1), 2000),
    ("dp_reshardable", "llama", (2, 1, 1, 1), 0),
    ("dp_reshardable", "qwen2/local", (2, 1, 1, 1), 0),
    ("dp_reshardable", "qwen3/local", (1, 1, 2, 1), 2000),
    ("dp_reshardable", "gpt-oss/te", (1, 1, 2, 1), 0),
    ("dp_reshardable", "qwen3-moe/te", (1, 2, 2, 1), 0),
    ("dp_reshardable", "qwen3/local", (1, 1, 1, 3), 0),
    ("dp_zero_gather_scatter", "qwen2/local", (1, 1, 2, 3), 0),
    ("dp_reshardable", "mixtral/local", (1, 2, 2, 3), 0),
    ("dp_reshardable", "deepseek-v3-mtp/te", (1, 1, 1, 1), 3000),
    ("dp_zero_gather_scatter", "llama", (1, 1, 2, 1), 0),
    ("dp_zero_gather_scatter", "mixtral/local", (1, 2, 2, 1), 0),
    ("fully_sharded_model_space", "gpt", (1, 1, 2, 1), 0),
    ("fully_sharded_model_space", "llama", (2, 1, 1, 1), 0),
]
# What is written is loaded by an optimizer of one process.
WRITTEN = ["gpt", "llama", "qwen3/local", "qwen3-moe/te", "deepseek-v3-mtp/te", "gpt-oss/te"]


def run_megatron(command, kind, model, directory, sizes=(1, 1, 1, 1), bucket=0):
    tensor, experts, data, stages = sizes
    port, world = free_port(), tensor * data * stages
    words = [
        sys.executable,
        megatron_optimizer.__file__,
        command,
        kind,
        model,
        directory,
        *map(str, (tensor, experts, stages, bucket)),
    ]
    running = []
    for rank in range(world):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        running.append(
            subprocess.Popen(
                list(map(str, words)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0] * world, "\n".join(outputs)[-3000:]


def array(tensor):
    output = OutputTensor(key="", shape=tensor.shape, content=tensor)
    with open_sources(sources([output])) as files:
        parts = [panel.reshape(-1).copy() for panel in panels(output, Reader(files))]
    return np.concatenate(parts).view(np.float32).reshape(tensor.shape)


def in_memory(directory, tensor, experts, data, stages):
    """For each tensor rank the state by Megatron's name of the parameter, joined from the data-parallel ranks."""
    found = []
    for rank in range(tensor):
        joined = {}
        parts = [{} for _ in range(data)]
        for number in range(data * stages):
            part = torch.load(f"{directory}.state-{number * tensor + rank}", weights_only=False)
            parts[number % data] |= part
        if experts > 1:  # one rank has each part of the experts, and all together have the other parameters
            own = [{n: v for n, v in part.items() if ".local_experts." in n} for part in parts]
            parts = [{n: v for n, v in part.items() if ".local_experts." not in n} for part in parts]
            parts.append(with_all_experts(own))
        for part in parts:
            for name, (state, begin, shape) in part.items():
                whole = joined.setdefault(name, {kind: torch.full((int(np.prod(shape)),), torch.nan) for kind in state})
                for kind, values in state.items():
                    whole[kind][begin : begin + values.numel()] = values
                joined[name] = whole
            shapes = {name: shape for name, (_, _, shape) in part.items()}
            for name, shape in shapes.items():
                joined[name]["shape"] = shape
        found.append(joined)
    return found


def of_map(joined, known):
    """The state of a decoder by the names of the map: experts as one tensor, norms under a linear layer's name."""
    spellings = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    spellings |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    spellings |= {f"{x}_layernorm.": f"linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    experts = {}
    found = {}
    for name, state in joined.items():
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        match = re.fullmatch(r"(.+\.experts)\.local_experts\.(\d+)(\..+)", name)
        if match:
            experts.setdefault(f"{match[1]}.experts{match[3]}", {})[int(match[2])] = state
            continue
        for old, new in spellings.items():
            name = name.replace(old, new) if name not in known else name
        found[name] = state
    for name, each in experts.items():
        kinds = KINDS.values()
        found[name] = {kind: torch.cat([each[i][kind] for i in range(len(each))]) for kind in kinds}
    return found


def with_all_experts(ranks):
    """The state of expert-parallel ranks as that of one; other parameters are equal on all of them."""
    found = {}
    for number, state in enumerate(ranks):
        for name, value in state.items():
            match = re.fullmatch(r"(.+\.local_experts\.)(\d+)(\..+)", name)
            count = sum(f"{match[1]}{i}{match[3]}" in state for i in range(100)) if match else 0
            known = f"{match[1]}{int(match[2]) + number * count}{match[3]}" if match else name
            found.setdefault(known, value)
    return found


def legacy(name):
    """Megatron-core's name of a parameter in the names of legacy Megatron."""
    parts = {"linear_proj": "dense", "linear_qkv": "query_key_value", "linear_fc1": "dense_h_to_4h"}
    parts |= {"linear_fc2": "dense_4h_to_h", "pre_mlp_layernorm": "post_attention_layernorm"}
    words = [parts.get(word, word) for word in name.split(".")]
    words[0] = "encoder" if words[0] == "decoder" else words[0]
    return ".".join(["language_model", *words])


def without_padding(state, name, kind, model, rank=0):
    """The rows of the true vocabulary, of a family that has more; others are whole."""
    rows = state[kind].numel() // SIZES["width"]
    is_padded = "/" in model and name in ("embedding.word_embeddings.weight", "output_layer.weight")
    return state[kind][: (VOCABULARY - rank * rows) * SIZES["width"]] if is_padded else state[kind]


def core_version():
    core = pytest.importorskip("megatron.core", reason="megatron-core is not installed (an optional peer)")
    pytest.importorskip("psutil", reason="psutil is not installed, which Megatron-core needs to save")
    return tuple(int(part) for part in core.__version__.split(".")[:2])


@pytest.mark.parametrize("model", WRITTEN)
def test_megatron_loads_the_state_that_is_written(tmp_path, model):
    """Also through the native form; Megatron-core's optimizers, distributed or not, then have what there was."""
    if core_version() < (0, 14):
        pytest.skip("releases of megatron-core before 0.14 know no fully_reshardable")
    run_megatron("save", "fully_reshardable", model, tmp_path / "saved")
    for source, target, form in (("saved", "native", "native"), ("native", "back", "dcp")):
        words = ["convert", str(tmp_path / source), str(tmp_path / target), "--to", form, "--with-optimizer"]
        done = CliRunner().invoke(app, [*words, "--dtype", "bf16"] if form == "dcp" else words)
        assert done.exit_code == 0, done.exception or done.output
    (folder,) = (path.parent for path in (tmp_path / "back").glob("iter_*/.metadata"))
    saved = in_memory(tmp_path / "saved", 1, 1, 1, 1)[0]
    for kind in ("fully_reshardable", "plain"):
        run_megatron("load", kind, model, folder)
        assert_equal_state(saved, in_memory(folder, 1, 1, 1, 1)[0], model)


def assert_equal_state(saved, loaded, model):
    assert saved.keys() == loaded.keys()
    for name, state in saved.items():
        for kind in KINDS.values():
            assert torch.equal(*(without_padding(each, name, kind, model) for each in (state, loaded[name]))), (
                name,
                kind,
            )
            assert state[kind].count_nonzero() > state[kind].numel() // 2, (name, kind)


@pytest.mark.parametrize(("kind", "model", "sizes", "bucket"), CASES)
def test_state_is_that_of_megatrons_memory(tmp_path, kind, model, sizes, bucket):
    version, tensor, stages = core_version(), sizes[0], sizes[3]
    if kind.startswith("fully_sharded") and version >= (0, 14):
        pytest.skip(f"megatron-core {version} writes no {kind}; releases before 0.14 do")
    if kind in ("fully_reshardable", "dp_reshardable") and version < (0, 14):
        pytest.skip(f"megatron-core {version} writes no {kind}; releases since 0.14 do")
    directory = tmp_path / "saved"
    run_megatron("save", kind, model, directory, sizes, bucket)
    if "/" in model:
        # Each rank's own state dict has the weights that Megatron-core's distributed form has.
        ranks, whole = open_checkpoint(tmp_path / "saved.ranks")[0], open_checkpoint(directory)[0]
        assert ranks.manifest["model"] == whole.manifest["model"]
        assert ranks.weights().keys() == whole.weights().keys()
        for name in whole.weights():
            assert np.array_equal(load_array(ranks, name), load_array(whole, name)), name
    found, _ = open_checkpoint(directory, options=ReadOptions(with_optimizer=True))
    assert set(found.manifest["optimizer"]["steps"].values()) == {megatron_optimizer.STEPS}
    m = found.manifest["model"]
    name_map = load_map("core_decoder") if "/" in model else load_map(f"legacy_{m['family']}", "2")
    layout = layout_of(name_map, m, foreign_vocab_size=m["padded_vocab_size"])
    expected = in_memory(directory, *sizes)
    names = found.names("parameter")
    buffers = {name: found.tensors[name] for name in found.names("buffer")}
    for rank in range(tensor):
        for ours, theirs in KINDS.items():
            stored = {name: found.tensors[name if ours == "master" else f"{name}.{ours}"] for name in names}
            mapped = to_foreign(layout, stored | buffers, found.manifest["ties"], rank=rank, ranks=tensor)
            values = {each.name: array(each.content).reshape(-1) for each in mapped if each.source_name not in buffers}
            if "/" in model:
                own = of_map(expected[rank], values)
                if stages > 1 and found.manifest["model"]["tied_embeddings"]:
                    own.pop("output_layer.weight")  # the copy of the last stage
                reference = {name: without_padding(own[name], name, theirs, model, rank).numpy() for name in own}
                values = {name: value[: len(reference[name])] for name, value in values.items()}
            else:
                reference = {legacy(name): state[theirs].numpy() for name, state in expected[rank].items()}
            assert values.keys() == reference.keys()
            assert not [name for name in reference if not np.array_equal(values[name], reference[name])], (ours, rank)
            assert not any(np.isnan(value).any() for value in reference.values())
