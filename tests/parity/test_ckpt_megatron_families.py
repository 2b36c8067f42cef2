"""Decoders that Megatron-core saved have its logits in every other form, and it loads ours strictly, with the same."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.operations.reference_model import load_array, model_logits
from tests.parity import megatron_families
from tests.parity.megatron_families import STEP, TOKENS
from tests.paths import ROOT

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(600)]
ATOL = 1e-4
# Family, and the names of its checkpoint; the architecture of transformers that computes it, None where there is none.
CASES = {
    ("llama", "local"): "LlamaForCausalLM",
    ("llama", "single"): "LlamaForCausalLM",
    ("mixtral", "single"): "MixtralForCausalLM",
    ("qwen2", "local"): "Qwen2ForCausalLM",
    ("qwen3", "local"): "Qwen3ForCausalLM",
    ("mixtral", "local"): "MixtralForCausalLM",
    ("qwen3-moe", "te"): "Qwen3MoeForCausalLM",
    ("shared", "te"): None,
    ("deepseek-v2", "local"): "DeepseekV2ForCausalLM",
    ("deepseek-v3", "te"): "DeepseekV3ForCausalLM",
    ("deepseek-v3-yarn", "local"): "DeepseekV3ForCausalLM",
    ("deepseek-v3-mtp", "te"): "DeepseekV3ForCausalLM",
    ("gpt-oss", "te"): "GptOssForCausalLM",
}


def megatron(command, family, names, directory):
    """The logits of a model that Megatron-core saves to a directory or loads from it."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (an optional peer)")
    pytest.importorskip("psutil", reason="psutil is not installed, which Megatron-core needs to save")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, megatron_families.__file__, command, family, names, str(directory)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(f"{directory}.logits.npy")


def transformers_logits(directory, architecture):
    import transformers

    kind = getattr(transformers, architecture)
    model = kind.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits[0].numpy()


def convert(*words):
    done = CliRunner().invoke(app, ["convert", *map(str, words)])
    assert done.exit_code == 0, done.exception or done.output


@pytest.mark.parametrize(("family", "names"), CASES)
def test_both_directions_have_megatrons_logits(tmp_path, family, names):
    saved, architecture = tmp_path / "saved", CASES[family, names]
    saved.mkdir()
    expected = megatron("save", family, names, saved)
    found, _ = open_checkpoint(saved)
    assert np.abs(model_logits(found, np.array(TOKENS * 2))[0] - expected).max() < ATOL
    target = "native" if architecture is None else "hf"
    convert(saved, tmp_path / "out", "--to", target)
    if architecture is not None:
        assert np.abs(transformers_logits(tmp_path / "out", architecture) - expected).max() < ATOL
    convert(tmp_path / "out", tmp_path / "back", "--to", "dcp")
    (folder,) = (path.parent for path in (tmp_path / "back").glob("iter_*/.metadata"))
    assert np.abs(megatron("load", family, "te", folder) - expected).max() < ATOL
    again, _ = open_checkpoint(tmp_path / "back")
    assert set(again.weights()) == set(found.weights())
    assert all(np.array_equal(load_array(again, name), load_array(found, name)) for name in found.weights())
    assert found.manifest["step"] == STEP
