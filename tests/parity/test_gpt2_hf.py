"""A native checkpoint and its Hugging Face export compute the same logits."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from tests.unit.dynmo_ckpt import native_checkpoints


def layer_norm(x, p, name, eps):
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)


def linear(x, p, name):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def attention(x_BTD, p, name, heads):
    batch, length, width = x_BTD.shape
    qkv = linear(x_BTD, p, f"{name}.qkv").reshape(batch, length, heads, 3, width // heads)
    q, k, v = (qkv[:, :, :, i].transpose(1, 2) for i in range(3))
    scores = q @ k.transpose(-1, -2) / (width // heads) ** 0.5
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return linear(mixed.transpose(1, 2).reshape(batch, length, width), p, f"{name}.dense")


def forward(p, m, tokens_BT):
    """Logits over the true vocabulary, from the definition of the model."""
    approximate = "tanh" if m["activation"] == "gelu_tanh" else "none"
    eps = m["layernorm_epsilon"]
    x = p["embedding.word.weight"][tokens_BT] + p["embedding.position.weight"][: tokens_BT.shape[1]]
    for i in range(m["num_layers"]):
        a, b = f"layers.{i}.attention", f"layers.{i}.mlp"
        x = x + attention(layer_norm(x, p, f"{a}.norm", eps), p, a, m["num_attention_heads"])
        inner = F.gelu(linear(layer_norm(x, p, f"{b}.norm", eps), p, f"{b}.fc1"), approximate=approximate)
        x = x + linear(inner, p, f"{b}.fc2")
    head = p["embedding.word.weight"] if m["tied_embeddings"] else p["head.weight"]
    return (layer_norm(x, p, "head.norm", eps) @ head.T)[..., : m["vocab_size"]]


def export(source, target, *options):
    from dynmo_ckpt.cli import app

    done = CliRunner().invoke(app, ["convert", str(source), str(target), "--to", "hf", "--format", "json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def difference(directory, p, m):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    loaded, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert isinstance(loaded, GPT2LMHeadModel)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.randint(
        m["vocab_size"], (2, m["max_position_embeddings"]), generator=torch.Generator().manual_seed(3)
    )
    with torch.no_grad():
        theirs = loaded.eval()(tokens).logits
    assert theirs.shape[-1] == m["vocab_size"]
    ours = forward({name: torch.from_numpy(value) for name, value in p.items()}, m, tokens)
    assert ours.std() > 0.1
    return (theirs - ours).abs().max().item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize(("stages", "tp"), [(1, 1), (2, 2), (4, 4)])
def test_convert_to_hf_logits_equal_transformers(tmp_path, tied, activation, stages, tp):
    m = native_checkpoints.model(tied_embeddings=tied, activation=activation)
    p = native_checkpoints.parameters(m)
    tensors = p | native_checkpoints.optimizer_state(p)
    native_checkpoints.save(tmp_path / "in", tensors, m, partition=native_checkpoints.even_stages(m, stages), tp=tp)
    export(tmp_path / "in", tmp_path / "out")
    assert difference(tmp_path / "out", p, m) < 5e-6


def test_convert_to_hf_pruned_weights_are_zero(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    masks = native_checkpoints.masks(p)
    native_checkpoints.save(tmp_path / "in", p | masks, m, tp=2)
    export(tmp_path / "in", tmp_path / "out")
    pruned = {name: np.where(masks[f"{name}.mask"], v, 0) if f"{name}.mask" in masks else v for name, v in p.items()}
    assert difference(tmp_path / "out", pruned, m) < 5e-6


def test_convert_to_hf_in_several_files_opens_in_transformers(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    native_checkpoints.save(tmp_path / "in", p, m)
    export(tmp_path / "in", tmp_path / "out", "--max-shard-size", "8kb")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert difference(tmp_path / "out", p, m) < 5e-6


def test_convert_to_hf_copies_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 3, trainer)
    size = tokenizer.get_vocab_size()
    m = native_checkpoints.model(vocab_size=size, padded_vocab_size=size + 3)
    p = native_checkpoints.parameters(m)
    files = {"tokenizer/tokenizer.json": tokenizer.to_str().encode()}
    native_checkpoints.save(tmp_path / "in", p, m, files=files)
    export(tmp_path / "in", tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the dog sat, größer"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(tokenizer.encode(text).ids) == text
    assert loaded.eos_token == "<|endoftext|>"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>") == loaded.eos_token_id
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == files["tokenizer/tokenizer.json"]


def test_convert_to_hf_names_and_shapes_equal_transformers(tmp_path):
    from safetensors.numpy import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    m = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "in", native_checkpoints.parameters(m), m)
    export(tmp_path / "in", tmp_path / "out")
    config = GPT2Config(n_embd=16, n_head=4, n_layer=3, n_inner=40, n_positions=12, vocab_size=29)
    expected = {name: tuple(value.shape) for name, value in GPT2LMHeadModel(config).named_parameters()}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.shape for name, value in written.items()} == expected


@pytest.mark.parametrize("changes", [{}, {"activation": "gelu"}, {"tied_embeddings": False}])
def test_verify_with_hf_logits_compares_both_models(tmp_path, changes):
    from dynmo_ckpt.cli import app

    m = native_checkpoints.model(**changes)
    p = native_checkpoints.parameters(m)
    native_checkpoints.save(tmp_path / "in", p | native_checkpoints.masks(p), m, tp=2)
    export(tmp_path / "in", tmp_path / "out")
    command = ["verify", str(tmp_path / "in"), "--hf-logits", str(tmp_path / "out"), "--format", "json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    logits = json.loads(done.stdout)["logits"]
    assert logits["max_abs"] < 5e-6
    assert logits["same_best_tokens"]
    p["layers.0.attention.qkv.bias"][0] += 1
    native_checkpoints.save(tmp_path / "other", p | native_checkpoints.masks(p), m)
    command[1] = str(tmp_path / "other")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "logits differ by" in json.loads(done.stdout)["findings"][0]
