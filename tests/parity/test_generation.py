"""Greedy text of ``dynmo-train generate`` equals that of transformers, from native and Hugging Face checkpoints."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from dynmo_train._common.errors import DynmoError
from dynmo_train.cli import app
from dynmo_train.evaluation.forward_engine import ForwardEngine
from dynmo_train.evaluation.sampling import Sampling
from dynmo_train.evaluation.token_generator import GenerationRequest, StopCondition, TokenGenerator
from dynmo_train.models.layer_list import BoundaryShape
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.trainer.checkpoint import load_checkpoint
from tests.levels import complete_but
from tests.parity.test_decoder_shapes import models_of
from tests.unit.dynmo_ckpt import native_checkpoints

PROMPTS = ("the cat sat", "größer than", "the dog and the log on the mat")
NEW_TOKENS = 24


def train_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 3, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a model of random weights as ``native`` on two stages and as ``hf``, and its tokenizer."""
    from dynmo_ckpt.cli import app as ckpt

    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer()
    size = tokenizer.get_vocab_size()
    m = native_checkpoints.model(vocab_size=size, padded_vocab_size=size + 4, max_position_embeddings=64)
    p = native_checkpoints.parameters(m, seed=2)
    # Larger weights, so that greedy text does not repeat one token, and no two logits are close.
    for name, value in p.items():
        if name.endswith(("qkv.weight", "dense.weight", "fc2.weight")):
            value *= 2
    p["embedding.word.weight"] *= 4
    p["embedding.position.weight"] *= 6
    files = {"tokenizer/tokenizer.json": tokenizer.to_str().encode()}
    native_checkpoints.save(folder / "native", p, m, partition=native_checkpoints.even_stages(m, 2), files=files)
    done = CliRunner().invoke(ckpt, ["convert", str(folder / "native"), str(folder / "hf"), "--to", "hf"])
    assert done.exit_code == 0, done.output
    return folder, tokenizer


def generate(*arguments):
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options = ["--max-new-tokens", str(NEW_TOKENS), "--device", "cpu", "--format", "json", *map(str, arguments)]
    return CliRunner().invoke(app, ["generate", *words, *options])


@pytest.fixture(scope="module")
def expected(exported):
    """The continuations by transformers."""
    from transformers import GPT2LMHeadModel

    folder, tokenizer = exported
    model = GPT2LMHeadModel.from_pretrained(folder / "hf").eval()
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=end,
            pad_token_id=end,
        )
        new = out[0, ids.shape[1] :].tolist()
        assert len(set(new)) > 4, "a text that repeats one token tests little"
        texts.append(tokenizer.decode(out[0].tolist())[len(prompt) :])
    return texts


def test_generate_from_native_checkpoint_equals_transformers(exported, expected):
    done = generate("--load", exported[0] / "native")
    assert done.exit_code == 0, done.output
    assert [each["completion"] for each in json.loads(done.stdout)] == expected


@pytest.mark.complete
def test_generate_from_hugging_face_equals_transformers(exported, expected, tmp_path):
    options = ("--load", exported[0] / "hf", "--cache-dir", tmp_path / "cache")
    done = generate(*options)
    assert done.exit_code == 0, done.output
    assert [each["completion"] for each in json.loads(done.stdout)] == expected
    assert "dynmo-ckpt converted it into" in done.stderr
    again = generate(*options)
    assert (again.stdout, again.stderr) == (done.stdout, "")
    weights = exported[0] / "hf" / "model.safetensors"
    os.utime(weights, (1, 1))
    assert generate(*options).stdout == done.stdout
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.complete
def test_cached_conversion_that_is_damaged_is_repeated(exported, tmp_path):
    native = load_checkpoint.convert_to_native(exported[0] / "hf", tmp_path)
    shard = next(native.rglob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert load_checkpoint.convert_to_native(exported[0] / "hf", tmp_path) == native
    assert shard.read_bytes() == whole


@pytest.mark.complete
def test_cached_conversion_of_another_version_is_not_reused(exported, tmp_path, monkeypatch):
    """An older release may map keys differently, so its conversions stay unused."""
    digest = load_checkpoint.converter_digest(load_checkpoint.program_path("dynmo-ckpt"))
    assert re.fullmatch(r"[0-9a-f]{16}", digest)
    native = load_checkpoint.convert_to_native(exported[0] / "hf", tmp_path)
    assert load_checkpoint.convert_to_native(exported[0] / "hf", tmp_path) == native
    monkeypatch.setattr(load_checkpoint, "converter_digest", lambda program: "0" * 16)
    assert load_checkpoint.convert_to_native(exported[0] / "hf", tmp_path) != native


@pytest.mark.complete
def test_load_hugging_face_without_dynmo_ckpt_is_refused(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(load_checkpoint, "program_path", lambda name: None)
    done = generate("--load", exported[0] / "hf", "--cache-dir", tmp_path)
    assert isinstance(done.exception, DynmoError)
    assert done.exception.exit_code == 2
    assert "pip install 'dynmo-toolkit[ckpt]'" in str(done.exception)


@pytest.mark.complete
def test_streamed_samples_are_those_of_the_same_seed_without_stream(exported):
    words = ["--load", str(exported[0] / "native"), "--device", "cpu", "--max-new-tokens", "8", "--temperature", "2"]
    words += ["--prompt", "the cat", "--prompt", "the cat", "--seed", "3"]
    plain = CliRunner().invoke(app, ["generate", *words])
    streamed = CliRunner().invoke(app, ["generate", *words, "--stream"])
    assert (plain.exit_code, streamed.exit_code) == (0, 0), streamed.output
    assert streamed.stdout == plain.stdout
    first, second = plain.stdout.split("---\n")
    assert first != second


@pytest.mark.parametrize("recompute", complete_but([False, True], False))
def test_text_that_grows_beyond_the_training_length_of_longrope(recompute):
    """All keys then have other frequencies; a shorter text of the same batch keeps its own."""
    family, modules, theirs = models_of("Phi3 beyond its training")
    trained = family.shape.rotary_scaling["original_max_position_embeddings"]
    world = World(rank=0, size=1, device=torch.device("cpu"), host="here", dims=ParallelDims())
    boundary = BoundaryShape.hidden(batch=1, tokens=1, width=family.shape.hidden_size)
    generator = TokenGenerator(
        ForwardEngine(family, modules, uniform_partition(family.items, 1), world, boundary),
        max_tokens=family.shape.max_position_embeddings,
        sampling=Sampling(),
        stop_condition=StopCondition(eod=None),
        recompute=recompute,
    )
    numbers = torch.Generator().manual_seed(4)
    lengths = (trained - 4, trained - 4, 3, trained, trained + 6)
    prompts = [torch.randint(family.shape.vocab_size, (length,), generator=numbers) for length in lengths]
    requests = [GenerationRequest(ids=tuple(each.tolist()), max_new_tokens=9, seed=0) for each in prompts]
    for prompt, found in zip(prompts, generator.generate(requests, 8), strict=True):
        ids = prompt[None]
        with torch.no_grad():
            for _ in range(9):
                ids = torch.cat([ids, theirs(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert list(found.ids) == ids[0, len(prompt) :].tolist(), len(prompt)
