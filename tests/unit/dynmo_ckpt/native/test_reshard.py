"""Any topology to any other and back: the same tensors, and the trainer's reader agrees."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from dynmo_ckpt._common.console import Format
from dynmo_ckpt.converters.native import plan_native_export
from dynmo_ckpt.formats.choices import WriteOptions
from dynmo_ckpt.io.errors import UnsupportedError
from dynmo_ckpt.native.checkpoint import open_native
from dynmo_ckpt.native.reshard import layer_counts, partition_from_counts
from dynmo_ckpt.operations.write import WriteSettings, write_export
from dynmo_train.formats.checkpoint import open_checkpoint
from tests.unit.dynmo_ckpt import native_checkpoints

SETTINGS = WriteSettings(jobs=1, verify=True, overwrite=False, plan_only=False, format=Format.JSON)


def write(source, target, partition, **topology):
    options = WriteOptions(with_optimizer=True, **topology)
    write_export(source, target, plan_native_export(open_native(source), options, partition), SETTINGS)
    return open_native(target).manifest


def random_topology(rng, m):
    """Tensor ranks, virtual stages, and layers a stage; stages may be empty."""
    workers, virtual = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    cuts = np.sort(rng.integers(0, m["num_layers"] + 1, workers * virtual - 1))
    counts = np.diff([0, *cuts, m["num_layers"]]).tolist()
    return {
        "partition": partition_from_counts(counts, m),
        "tp": int(rng.choice([1, 2, 4])),
        "vpp": virtual,
    }


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory where the system has one: file-system speed is not tested."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as name:
        yield Path(name)


@pytest.mark.parametrize("seed", range(8))
def test_plan_native_random_topologies_round_trip(memory_path, seed, capsys):
    """25 chains of topologies a seed, 200 in all; at the end the files are byte for byte those of the beginning."""
    rng = np.random.default_rng(seed)
    m = native_checkpoints.model(num_layers=2, hidden_size=8, ffn_hidden_size=12, vocab_size=9, padded_vocab_size=12)
    p = native_checkpoints.parameters(m)
    tensors = p | native_checkpoints.masks(p) | (native_checkpoints.optimizer_state(p) if seed == 0 else {})
    native_checkpoints.save(memory_path / "in", tensors, m, tp=2)
    start = write(memory_path / "in", memory_path / "0", partition=partition_from_counts([2], m))
    for i in range(25):
        topology = random_topology(rng, m)
        manifest = write(memory_path / str(i), memory_path / str(i + 1), **topology)
        assert manifest["topology"]["partition"] == topology["partition"]
    loaded = open_checkpoint(memory_path / "25").load(tensors)
    # The input is one of an older version, with rows of padding; no output has them.
    tensors = native_checkpoints.true_rows(m["vocab_size"], tensors)
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in tensors.items())
    end = write(memory_path / "25", memory_path / "end", partition=partition_from_counts([2], m))
    shards = {name: entry for name, entry in start["files"].items() if name.endswith(".safetensors")}
    assert shards == {name: entry for name, entry in end["files"].items() if name.endswith(".safetensors")}
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["sgd", "muon", "adafactor"])
def test_plan_native_keeps_the_state_of_every_optimizer(tmp_path, kind, capsys):
    m = native_checkpoints.model(num_layers=2, hidden_size=8, ffn_hidden_size=12, vocab_size=9, padded_vocab_size=12)
    p = native_checkpoints.true_rows(m["vocab_size"], native_checkpoints.parameters(m))
    tensors = p | native_checkpoints.optimizer_state(p, kind)
    native_checkpoints.save(tmp_path / "in", tensors, m, optimizer=kind)
    manifest = write(tmp_path / "in", tmp_path / "cut", partition=partition_from_counts([1, 1], m), tp=2)
    assert manifest["optimizer"]["type"] == kind
    splits = {name: manifest["tensors"][name]["split_dim"] for name in tensors}
    key = "col_var" if kind == "adafactor" else "momentum_buffer"
    assert splits[f"layers.0.mlp.fc2.weight.{key}"] == 1
    assert splits[f"layers.0.mlp.fc1.weight.{key}"] == (None if kind == "adafactor" else 0)
    write(tmp_path / "cut", tmp_path / "out", partition=partition_from_counts([2], m))
    loaded = open_checkpoint(tmp_path / "out").load(tensors)
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in tensors.items())
    capsys.readouterr()


def test_plan_native_places_layers_by_partition(tmp_path, capsys):
    m = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "in", native_checkpoints.parameters(m), m)
    partition = partition_from_counts([1, 0, 1, 1], m)
    manifest = write(tmp_path / "in", tmp_path / "out", partition=partition, vpp=2, tp=2)
    capsys.readouterr()

    def files(name):
        return [shard["file"] for shard in manifest["tensors"][name]["shards"]]

    assert files("layers.0.mlp.fc1.weight") == ["model-p000-t00.safetensors", "model-p000-t01.safetensors"]
    assert files("layers.1.mlp.norm.weight") == ["model-p000-t00.safetensors"]
    assert files("layers.2.attention.dense.weight") == ["model-p001-t00.safetensors", "model-p001-t01.safetensors"]
    assert manifest["tensors"]["layers.2.attention.dense.weight"]["split_dim"] == 1
    assert manifest["topology"]["pipeline_parallel_size"] == 2
    assert manifest["topology"]["world_size"] == 4


def test_layer_counts_and_partition_of_counts():
    m = native_checkpoints.model()
    assert layer_counts(7, 3, None) == [3, 2, 2]
    assert layer_counts(1, 3, None) == [1, 0, 0]
    assert layer_counts(3, 3, "0, 2,1") == [0, 2, 1]
    assert partition_from_counts([2, 1], m) == [["embedding", "layers.0", "layers.1"], ["layers.2", "head"]]


@pytest.mark.parametrize(("ranks", "field"), [(3, "num_attention_heads 4"), (8, "num_attention_heads 4")])
def test_plan_native_indivisible_sizes_are_refused(tmp_path, ranks, field):
    m = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "in", native_checkpoints.parameters(m), m)
    with pytest.raises(UnsupportedError, match=field):
        write(tmp_path / "in", tmp_path / "out", partition=partition_from_counts([3], m), tp=ranks)
    assert not (tmp_path / "out").exists()
