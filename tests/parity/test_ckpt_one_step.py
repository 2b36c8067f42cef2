"""Every format that can be read, converted in one step to every format that can be written: the same tensors."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from dynmo_ckpt.cli import main
from dynmo_ckpt.converters import BUILTIN
from dynmo_ckpt.converters.registry import get_format, open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.operations.reference_model import load_array
from tests.unit.dynmo_ckpt import families, legacy_gpt, native_checkpoints
from tests.unit.dynmo_ckpt.converters import test_torch_dcp
from tests.unit.dynmo_ckpt.megatron import test_distributed

pytestmark = pytest.mark.complete

SOURCES = ("native", "hf", "hf bin", "legacy", "deepspeed", "core", "dcp of transformers", "torchtitan", "llama2c")


def call(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dynmo-ckpt", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code, args


def meta_names(m, p):
    """A Llama under Meta's names, with rotations of neighbouring pairs, as torchtitan saves it."""
    heads, groups, width = m["num_attention_heads"], m["num_key_value_heads"], m["head_dim"]
    state = {"tok_embeddings.weight": p["embedding.word.weight"][: m["vocab_size"]]}
    state |= {"norm.weight": p["head.norm.weight"], "output.weight": p["head.weight"][: m["vocab_size"]]}
    for i in range(m["num_layers"]):
        to, at = f"layers.{i}", f"layers.{i}"
        qkv = p[f"{at}.attention.qkv.weight"].reshape(groups, heads // groups + 2, width, -1)
        query, key, value = (part.reshape(-1, m["hidden_size"]) for part in (qkv[:, :-2], qkv[:, -2], qkv[:, -1]))
        state[f"{to}.attention.wq.weight"] = test_distributed.interleaved(query, heads)
        state[f"{to}.attention.wk.weight"] = test_distributed.interleaved(key, groups)
        state[f"{to}.attention.wv.weight"] = value
        state[f"{to}.attention.wo.weight"] = p[f"{at}.attention.dense.weight"]
        state[f"{to}.attention_norm.weight"] = p[f"{at}.attention.norm.weight"]
        state[f"{to}.ffn_norm.weight"] = p[f"{at}.mlp.norm.weight"]
        for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "fc2")):
            state[f"{to}.feed_forward.{theirs}.weight"] = p[f"{at}.mlp.{ours}.weight"]
    return state


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """One Llama (DeepSpeed: one GPT) in every format that is read; each with options of ``convert``."""
    root = tmp_path_factory.mktemp("inputs")
    m = families.llama(rotary_scaling=None, layernorm_epsilon=1e-5, rotary_base=10000.0, tied_embeddings=False)
    p = families.parameters(m)
    stages = [["embedding", *(f"layers.{i}" for i in range(m["num_layers"])), "head"]]
    native_checkpoints.save(root / "native", p, m, partition=stages, ties=families.ties(m))
    call("convert", root / "native", root / "hf", "--to", "hf")
    call("convert", root / "native", root / "legacy", "--to", "legacy")
    config = root / "hf" / "config.json"
    weights = {
        name: torch.from_numpy(np.array(value)) for name, value in load_safetensors(root / "hf" / "model.safetensors")
    }
    (root / "hf bin").mkdir()
    (root / "hf bin" / "config.json").write_bytes(config.read_bytes())
    torch.save(weights, root / "hf bin" / "pytorch_model.bin")
    save = test_torch_dcp.save
    save(root / "dcp of transformers", {name: value.numpy() for name, value in weights.items()})
    save(root / "torchtitan", meta_names(m, p))
    common = {"args": test_torch_dcp.arguments(m, **test_torch_dcp.of_llama(m)), "iteration": 2}
    save(root / "core", test_torch_dcp.core(m, p), common)
    (root / "llama2c").mkdir()
    test_distributed.save_llama2c(root / "llama2c" / "model.bin", m, p)
    gpt = native_checkpoints.model()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("megatron", "megatron.core", "megatron.core.enums"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["megatron.core.enums"].ModelType = legacy_gpt.ModelType
        test_distributed.save_deepspeed(root / "deepspeed", gpt, native_checkpoints.parameters(gpt), 2)
    return root


def load_safetensors(path):
    from safetensors.numpy import load_file

    return load_file(path).items()


# GGUF files are only written: their own tests compare them with what other programs read.
TARGETS = [name for name in BUILTIN if get_format(name).write and name != "gguf"]
# The deepspeed source is a GPT, for which torchtitan has no names.
PAIRS = [(source, target) for source in SOURCES for target in TARGETS if (source, target) != ("deepspeed", "titan")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_convert_any_to_any_keeps_all_tensors(inputs, tmp_path, source, target):
    path = inputs / source / "model.bin" if source == "llama2c" else inputs / source
    config = inputs / "hf" if source in ("dcp of transformers", "torchtitan") else None
    more = () if config is None else ("--config", config)
    call("convert", path, tmp_path / "out", "--to", target, *more)
    before, _ = open_checkpoint(path, options=ReadOptions(config=config))
    after, _ = open_checkpoint(tmp_path / "out", target)
    vocabulary = before.manifest["model"]["vocab_size"]
    assert before.weights()
    assert set(before.weights()) == set(after.weights())
    for name in before.weights():
        one, other = load_array(before, name), load_array(after, name)
        if name.endswith(("word.weight", "head.weight")):
            one, other = one[:vocabulary], other[:vocabulary]
        assert np.array_equal(one, other), name
    same = {"family", "num_layers", "hidden_size", "rotary_base", "layernorm_epsilon", "tied_embeddings"}
    models = [each.manifest["model"] for each in (before, after)]
    assert all(models[0].get(field) == models[1].get(field) for field in same)


def test_convert_inputs_cover_every_readable_format():
    """A format that is added to ``--from`` is added here."""
    kinds = {"dcp": {"core", "dcp of transformers"}, "titan": {"torchtitan"}, "hf": {"hf", "hf bin"}, "gguf": set()}
    listed = {name for known in BUILTIN for name in kinds.get(known, {known})}
    assert listed == set(SOURCES)


@pytest.mark.parametrize("source", ["hf", "dcp of transformers", "torchtitan", "llama2c", "legacy"])
def test_convert_optional_state_that_is_absent_converts_weights(inputs, tmp_path, capsys, source):
    path = inputs / source / "model.bin" if source == "llama2c" else inputs / source
    more = ("--config", inputs / "hf") if source in ("dcp of transformers", "torchtitan") else ()
    for target in ("native", "hf"):
        call("convert", path, tmp_path / target, "--to", target, "--with-optimizer-if-present", *more)
        assert open_checkpoint(tmp_path / target, target)[0].manifest["optimizer"] is None
