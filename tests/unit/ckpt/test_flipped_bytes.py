"""Any one altered byte of a checkpoint's directory is found."""

import runpy
from pathlib import Path

import pytest

from dynmo_ckpt.console import progress
from dynmo_ckpt.verify import full_findings

build = runpy.run_path(str(Path(__file__).with_name("build.py")))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny checkpoint with masks, optimizer state and a tokenizer file."""
    m = build["model"](num_layers=1, hidden_size=4, num_attention_heads=2, ffn_hidden_size=6)
    m |= {"max_position_embeddings": 2, "vocab_size": 3, "padded_vocab_size": 4}
    p = build["parameters"](m)
    target = tmp_path_factory.mktemp("flip") / "step-00000001"
    tensors = p | build["masks"](p) | build["optimizer_state"](p)
    build["save"](target, tensors, m, files={"tokenizer/tokenizer.json": b"{}"})
    return target


def findings(directory):
    with progress("test", 0, "MB") as tick:
        return list(full_findings(directory, tick))


def test_nothing_is_found_where_nothing_is_wrong(directory):
    assert findings(directory) == []


def test_every_altered_byte_is_found(directory):
    missed = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        payload = path.read_bytes()
        stride = max(1, len(payload) // 60)
        for at in [*range(0, len(payload), stride), len(payload) - 1]:
            path.write_bytes(payload[:at] + bytes([payload[at] ^ (1 << at % 8)]) + payload[at + 1 :])
            if not findings(directory):
                missed.append((path.name, at))
        path.write_bytes(payload)
    assert missed == []
    assert findings(directory) == []


def test_a_longer_and_a_shorter_file_are_found(directory):
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        payload = path.read_bytes()
        for other in (payload[:-1], payload + b" ", b""):
            path.write_bytes(other)
            assert findings(directory)
        path.write_bytes(payload)


def test_a_tensor_that_the_manifest_does_not_name_is_found(directory, tmp_path):
    import json
    import shutil

    target = tmp_path / "step-00000001"
    shutil.copytree(directory, target)
    document = json.loads((target / "manifest.json").read_bytes())
    del document["tensors"]["head.norm.bias.exp_avg"]
    (target / "manifest.json").write_bytes(build["sealed"](document))
    assert any("head.norm.bias.exp_avg: the manifest names it nowhere" in finding for finding in findings(target))
