"""Every form of optimizer state that Megatron-core writes, as its own code writes it, against what it had in memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.reading import Reader, open_sources
from dynmo_ckpt.maps.name_map import layout_of, load_map, to_foreign
from dynmo_ckpt.tensors.copy_plan import OutputTensor, sources
from dynmo_ckpt.tensors.tiled_copy import panels
from tests.distributed.ports import free_port
from tests.parity import megatron_optimizer
from tests.paths import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
KINDS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# fully_sharded_bucket_space is absent: 0.12 cannot save it where a rank has several parts of a bucket.
# kind, model, tensor size, data-parallel size, elements of a bucket (0: one bucket)
CASES = [
    ("plain", "gpt", 1, 1, 0),
    ("plain", "llama", 2, 1, 0),
    ("fully_reshardable", "gpt", 1, 2, 0),
    ("dp_reshardable", "gpt", 1, 2, 2000),
    ("dp_reshardable", "llama", 2, 1, 0),
    ("dp_zero_gather_scatter", "llama", 1, 2, 0),
    ("fully_sharded_model_space", "gpt", 1, 2, 0),
    ("fully_sharded_model_space", "llama", 2, 1, 0),
]


def run_megatron(kind, model, directory, tensor, data, bucket):
    port, world = free_port(), tensor * data
    words = [sys.executable, megatron_optimizer.__file__, kind, model, directory, tensor, bucket]
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


def in_memory(directory, tensor, data):
    """For each tensor rank the state by Megatron's name of the parameter, joined from the data-parallel ranks."""
    found = []
    for rank in range(tensor):
        joined = {}
        for replica in range(data):
            part = torch.load(f"{directory}.state-{replica * tensor + rank}", weights_only=False)
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


def legacy(name):
    """Megatron-core's name of a parameter in the names of legacy Megatron."""
    parts = {"linear_proj": "dense", "linear_qkv": "query_key_value", "linear_fc1": "dense_h_to_4h"}
    parts |= {"linear_fc2": "dense_4h_to_h", "pre_mlp_layernorm": "post_attention_layernorm"}
    words = [parts.get(word, word) for word in name.split(".")]
    words[0] = "encoder" if words[0] == "decoder" else words[0]
    return ".".join(["language_model", *words])


@pytest.mark.parametrize(("kind", "model", "tensor", "data", "bucket"), CASES)
def test_state_is_that_of_megatrons_memory(tmp_path, kind, model, tensor, data, bucket):
    core = pytest.importorskip("megatron.core", reason="megatron-core is not installed (an optional peer)")
    pytest.importorskip("psutil", reason="psutil is not installed, which Megatron-core needs to save")
    version = tuple(int(part) for part in core.__version__.split(".")[:2])
    if kind.startswith("fully_sharded") and version >= (0, 14):
        pytest.skip(f"megatron-core {core.__version__} writes no {kind}; releases before 0.14 do")
    if kind in ("fully_reshardable", "dp_reshardable") and version < (0, 14):
        pytest.skip(f"megatron-core {core.__version__} writes no {kind}; releases since 0.14 do")
    directory = tmp_path / "saved"
    run_megatron(kind, model, directory, tensor, data, bucket)
    found, _ = open_checkpoint(directory, options=ReadOptions(with_optimizer=True))
    assert set(found.manifest["optimizer"]["steps"].values()) == {megatron_optimizer.STEPS}
    m = found.manifest["model"]
    layout = layout_of(load_map(f"legacy_{m['family']}", "2"), m, foreign_vocab_size=m["padded_vocab_size"])
    expected = in_memory(directory, tensor, data)
    names = found.names("parameter")
    for rank in range(tensor):
        for ours, theirs in KINDS.items():
            stored = {name: found.tensors[name if ours == "master" else f"{name}.{ours}"] for name in names}
            mapped = to_foreign(layout, stored, found.manifest["ties"], rank=rank, ranks=tensor)
            values = {each.name: array(each.content).reshape(-1) for each in mapped}
            reference = {legacy(name): state[theirs].numpy() for name, state in expected[rank].items()}
            assert values.keys() == reference.keys()
            assert not [name for name in reference if not np.array_equal(values[name], reference[name])], (ours, rank)
            assert not any(np.isnan(value).any() for value in reference.values())
