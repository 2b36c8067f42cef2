"""Conversions give the bytes that transformers' own converters gave.

The digests came about once, outside this suite: the checkpoints below, written by ``legacy_build.py`` and
``legacy_families.py`` with the values of ``golden.py``, went through transformers 4.46.3, whose converters are the last
that work (``convert_megatron_gpt2_checkpoint.py``, ``convert_megatron_bert_checkpoint.py``, and
``checkpoint_reshaping_and_interoperability.py`` both ways; ``torch.load`` was allowed to unpickle, and Megatron's
rule of padding the vocabulary stood in for it). Left out of theirs: causal masks, the second copy of the tied head,
rows of the vocabulary's padding (which they fill with copies of the last row, and leave in BERT), and the copy of the
embedding for the head where there is one stage. Checkpoint version 0 on two tensor ranks is not among them: there the
converter mixes queries, keys and values up; our output for it must be that of the other versions all the same.

``MERGED`` is the digest of what Megatron's own ``tools/merge_mp_partitions.py`` made of the same checkpoints of two and
of four tensor ranks (the copy that Optimus-CC ships; that of Megatron-LM 2.6 stops at an error before it saves), on a
CPU, in float16. Left out are rows of the vocabulary's padding. To several pipeline stages that tool gives each of them
all of the embedding and the last norm, which is not right; all other tensors of its output are ours.
"""

import argparse
import json
import sys
from types import ModuleType

import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from tests.unit.dynmo_ckpt import families, golden, legacy_families, legacy_gpt, native_checkpoints

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 40,
}
CONFIG |= {"n_positions": 12, "vocab_size": 29, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
GPT2 = "2116c847e51db9447637dcfd9185f4a3ed9a7ee371680950ecd52d74c0ff9ef0"

BERT = "8f0e290aad4236b365c6e2165197f5927ba0c904489973b008776e336a531833"
MEGATRON = {
    (1, 1): "2a888b79a2d93649e7f55734775f8f7f9a89fe3d398f20a473d637d57ff57389",
    (2, 1): "01a3de8bf11ab802b2244a4cfec6c1166100811fc8ea0b8ad9165548e7741aee",
    (2, 3): "4bffcae04ce911edbf2620843cb84dbdb1d3a678c40009301e52b08b90127e2d",
}
MERGED = "01ff86d55cc9c3e2eff1220f294ef203dd4ea2a260b7b39fb5c612d5987a1b59"


def convert(*arguments):
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)


def exact(parameters):
    return golden.values({name: value.shape for name, value in parameters.items()})


@pytest.fixture
def megatron(monkeypatch):
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = legacy_gpt.ModelType


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_convert_legacy_gpt_to_hf_equals_golden_digest(tmp_path, megatron, version, tp):
    m = native_checkpoints.model()
    legacy_gpt.save(tmp_path / "in", exact(native_checkpoints.parameters(m)), m, version=version, tp=tp)
    convert(tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert golden.digest(load_file(tmp_path / "out" / "model.safetensors")) == GPT2


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_convert_legacy_bert_to_hf_equals_golden_digest(tmp_path, version):
    m = families.bert()
    p = exact(families.parameters(m))
    legacy_families.save(tmp_path / "in", p, m, stages=[(range(3), range(0))], version=version)
    convert(tmp_path / "in", tmp_path / "out", "--to", "hf")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: value for name, value in tensors.items() if not name.startswith("cls.predictions.decoder.")}
    assert golden.digest(expected) == BERT


def gpt2_shapes(h, f):
    """Names and shapes of transformers' GPT-2 of three layers."""
    shapes = {"wte.weight": (29, h), "wpe.weight": (12, h), "ln_f.weight": (h,), "ln_f.bias": (h,)}
    for i in range(3):
        shapes |= {f"h.{i}.{norm}.{kind}": (h,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        for name, rows, columns in (
            ("attn.c_attn", h, 3 * h),
            ("attn.c_proj", h, h),
            ("mlp.c_fc", h, f),
            ("mlp.c_proj", f, h),
        ):
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value.numpy()


def to_megatron(tp, pp):
    sizes = ("--tp", tp, "--pp", pp, "--make-vocab-size-divisible-by", 8)
    return "--to", "legacy", *sizes, "--checkpoint-version", "3.0"


def megatrons_tensors(directory):
    """Name, behind its rank's folder -> the value, without the rows of padding."""
    found = {}
    for path in directory.rglob("model_optim_rng.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path)
        assert state["checkpoint_version"] == 3.0
        rank = int(path.parent.name[8:10])
        for name, value in flat(state["model"]):
            rows = max(0, 29 - rank * len(value)) if "word_embeddings" in name else len(value)
            found[f"{path.parent.name}/{name}"] = value[:rows]
    return found


@pytest.mark.parametrize(("tp", "pp"), MEGATRON)
def test_convert_hf_gpt2_to_legacy_equals_golden_digest(tmp_path, tp, pp):
    (tmp_path / "in").mkdir()
    save_file(golden.values(gpt2_shapes(16, 40)), tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(CONFIG))
    convert(tmp_path / "in", tmp_path / "out", *to_megatron(tp, pp))
    assert golden.digest(megatrons_tensors(tmp_path / "out")) == MEGATRON[tp, pp]


@pytest.mark.parametrize("tp", [2, 4])
def test_merge_of_megatron_equals_golden_files(tmp_path, megatron, tp):
    m = native_checkpoints.model()
    legacy_gpt.save(tmp_path / "in", exact(native_checkpoints.parameters(m)), m, version=3.0, tp=tp)
    convert(tmp_path / "in", tmp_path / "out", *to_megatron(1, 1), "--dtype", "fp16")
    assert golden.digest(megatrons_tensors(tmp_path / "out")) == MERGED
