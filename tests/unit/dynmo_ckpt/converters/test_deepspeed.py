"""Checkpoints written by DeepSpeed, compared with its ``zero_to_fp32`` and its engine.

``fixtures/deepspeed/`` holds them; ``write_deepspeed_fixtures.py`` made them, and each ``.json`` names the version.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynmo_ckpt.converters.deepspeed import open_deepspeed
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.operations.reference_model import load_array
from tests.paths import extract

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
CASES = sorted(path.stem for path in FIXTURES.glob("*.json"))
WITHOUT_NAMES = "zero0-fp32-pipeline"
KINDS = {"exp_avg": ".exp_avg", "exp_avg_sq": ".exp_avg_sq", "master": ""}
WITH = ReadOptions(with_optimizer=True)


@pytest.fixture
def unpacked(tmp_path):
    """Unpacks a checkpoint of DeepSpeed; returns its directory and its description."""

    def unpack(name):
        with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
            extract(archive, tmp_path)
        return tmp_path, json.loads((FIXTURES / f"{name}.json").read_text())

    return unpack


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, dtype=np.float32).tobytes()).hexdigest()


def theirs(directory):
    """DeepSpeed's name of each native weight; version 3.0 has the native row order."""
    found = open_deepspeed(directory, WITH)
    return {item.name: item.source_name for item in found.tensors}


def test_fixtures_cover_every_zero_stage_and_type():
    cases = [json.loads((FIXTURES / f"{name}.json").read_text())["case"] for name in CASES]
    assert {(case["stage"], case["precision"]) for case in cases} >= {
        (stage, precision) for stage in (1, 2, 3) for precision in ("fp16", "bf16")
    }


@pytest.mark.parametrize("name", [name for name in CASES if name != WITHOUT_NAMES])
def test_open_deepspeed_weights_and_state_equal_deepspeed(unpacked, name):
    directory, about = unpacked(name)
    # DeepSpeed's digests cover all rows of its embedding; DynMo has the true rows only, unless the vocabulary size is
    # as large.
    padded = open_deepspeed(directory, WITH).model["padded_vocab_size"]
    checkpoint, _ = open_checkpoint(directory, options=replace(WITH, vocab_size=padded))
    names = theirs(directory)
    found = {
        names[name]: {kind: digest(load_array(checkpoint, name + suffix)) for kind, suffix in KINDS.items()}
        for name in checkpoint.names("parameter")
    }
    if about["weights"]:
        assert {name: state["master"] for name, state in found.items()} == about["weights"]
    if about["live"]:
        assert found == about["live"]
    assert sorted(set(checkpoint.manifest["optimizer"]["steps"].values())) == about["updates"]


@pytest.mark.parametrize("name", CASES)
def test_open_deepspeed_without_optimizer_has_stored_types(unpacked, name):
    directory, about = unpacked(name)
    checkpoint, _ = open_checkpoint(directory)
    assert checkpoint.manifest["optimizer"] is None
    halves = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
    expected = "F32" if about["case"]["stage"] == 3 else halves[about["case"]["precision"]]
    assert {checkpoint.tensors[name].dtype for name in checkpoint.names("parameter")} == {expected}


def test_open_deepspeed_truncated_shard_without_state_is_read(unpacked):
    directory, _ = unpacked("zero1-fp16")
    shard = min(directory.glob("*/*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert open_checkpoint(directory)[0].weights()
    with pytest.raises(CorruptError, match="optim_states"):
        open_checkpoint(directory, options=WITH)


def test_open_deepspeed_pipeline_state_without_zero_is_refused(unpacked):
    directory, _ = unpacked(WITHOUT_NAMES)
    with pytest.raises(UnsupportedError, match="--no-optimizer"):
        open_checkpoint(directory, options=WITH)


@pytest.mark.parametrize("name", ["zero1-fp16", "zero0-fp16", "zero3-fp32"])
def test_open_deepspeed_keeps_training_progress(unpacked, name):
    directory, about = unpacked(name)
    manifest = open_checkpoint(directory, options=WITH)[0].manifest
    assert (manifest["step"], manifest["consumed_train_samples"], manifest["rng"]["seed"]) == (3, 12, 1234)
    assert (manifest["x_scheduler"]["num_steps"], manifest["x_scheduler"]["lr_decay_style"]) == (12, "constant")
    assert manifest["x_adam"] == {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    scale = manifest.get("x_progress", {}).get("loss_scale")
    assert scale == ({"scale": 256, "clean_steps": 3, "overflows_left": 2} if name == "zero1-fp16" else scale)
    assert (scale is None) is (about["case"]["precision"] == "fp32")


def test_open_deepspeed_unknown_zero_stage_is_refused(unpacked):
    directory, _ = unpacked("zero1-fp32")
    shard = next(directory.glob("*/zero_pp_rank_0_*"))
    with zipfile.ZipFile(shard) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("/data.pkl"))
    at = entries[name].index(b"K\x01", entries[name].index(b"ZeroStageEnum"))
    entries[name] = entries[name][:at] + b"K\x09" + entries[name][at + 2 :]
    with zipfile.ZipFile(shard, "w") as archive:
        for entry, payload in entries.items():
            archive.writestr(entry, payload)
    with pytest.raises(UnsupportedError, match="ZeRO stage is 9"):
        open_checkpoint(directory, options=WITH)
