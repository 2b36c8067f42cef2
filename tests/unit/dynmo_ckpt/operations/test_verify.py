"""Any one altered bit of a checkpoint's directory is found."""

import json
import random
import shutil
from itertools import product

import pytest

from dynmo_ckpt._common.console import progress
from dynmo_ckpt.native.checkpoint import latest_problems
from dynmo_ckpt.operations.verify import full_findings
from tests.unit.dynmo_ckpt import native_checkpoints


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny checkpoint with masks, optimizer state and a tokenizer file."""
    m = native_checkpoints.model(num_layers=1, hidden_size=4, num_attention_heads=2, ffn_hidden_size=6)
    m |= {"max_position_embeddings": 2, "vocab_size": 3, "padded_vocab_size": 4}
    p = native_checkpoints.parameters(m)
    target = tmp_path_factory.mktemp("flip") / "step-00000008"
    tensors = p | native_checkpoints.masks(p) | native_checkpoints.optimizer_state(p)
    native_checkpoints.save(target, tensors, m, files={"tokenizer/tokenizer.json": b"{}", "conversion.json": b"{}\n"})
    return target


def findings(directory):
    with progress("test", 0, "MB") as tick:
        return list(full_findings(directory, tick))


def test_verify_intact_checkpoint_has_no_findings_in_its_own_directory(directory, tmp_path):
    assert findings(directory) == []
    copied = shutil.copytree(directory, tmp_path / "step-00000009")
    assert "the manifest is of step 8" in " ".join(findings(copied))


def test_verify_every_altered_bit_is_found(directory):
    """Both ends of each file, and positions that a generator of a fixed seed chooses: all eight bits of each."""
    positions = random.Random(11)
    files = {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
    kinds = {path.name.partition("-")[0] for path in files}
    assert kinds == {"manifest.json", "model", "optimizer", "tokenizer.json", "conversion.json"}
    undetected = []
    for path, payload in files.items():
        inner = range(1, len(payload) - 1)
        chosen = {0, len(payload) - 1, *positions.sample(inner, min(len(inner), 9))}
        for at, bit in product(sorted(chosen), range(8)):
            path.write_bytes(payload[:at] + bytes([payload[at] ^ 1 << bit]) + payload[at + 1 :])
            if not findings(directory):
                undetected.append((path.name, at, bit))
        path.write_bytes(payload)
    assert undetected == []
    assert findings(directory) == []


def test_verify_every_altered_bit_of_latest_is_found(directory, tmp_path):
    """``LATEST`` is outside the directory of the step, and names it."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(directory, folder / directory.name)
    latest = f"{directory.name}\n".encode()
    (folder / "LATEST").write_bytes(latest)
    assert latest_problems(folder) == []
    for at, bit in product(range(len(latest)), range(8)):
        (folder / "LATEST").write_bytes(latest[:at] + bytes([latest[at] ^ 1 << bit]) + latest[at + 1 :])
        assert latest_problems(folder), (at, bit)


def test_verify_file_of_another_length_is_found(directory):
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        payload = path.read_bytes()
        for other in (payload[:-1], payload + b" ", b""):
            path.write_bytes(other)
            assert findings(directory)
        path.write_bytes(payload)


def test_verify_unlisted_tensor_is_found(directory, tmp_path):
    target = tmp_path / "step-00000008"
    shutil.copytree(directory, target)
    document = json.loads((target / "manifest.json").read_bytes())
    del document["tensors"]["head.norm.bias.exp_avg"]
    (target / "manifest.json").write_bytes(native_checkpoints.sealed(document))
    assert any("head.norm.bias.exp_avg: the manifest does not name it" in finding for finding in findings(target))
