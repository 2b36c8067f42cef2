"""Prompts of published models: the beginning-of-sequence token and all end tokens, as transformers has them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from dynmo_train.cli import app
from dynmo_train.config.fields import values_of
from dynmo_train.config.sections.evaluation import InferenceConfig
from dynmo_train.data.tokenizer import load_tokenizer
from dynmo_train.evaluation.chat_prompts import end_ids_of
from dynmo_train.evaluation.lambada import encode_passage
from dynmo_train.evaluation.model_checkpoint import model_tokenizer, open_causal_model
from dynmo_train.parallel.process_groups import destroy_world, init_world
from tests.chat_templates import HEADERS, write_tokenizer
from tests.levels import complete_but

transformers = pytest.importorskip("transformers")
PROMPTS = ("What is 2 + 2?", "user", "The cat sat on the mat. " * 4, "<|begin|>It is 4")
NEW_TOKENS = 16


def add_begin_token(folder):
    """Make the tokenizer put its beginning-of-sequence token before a text, as those of Llama and Gemma do."""
    from tokenizers import Tokenizer, processors

    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("<|begin|>", inner.token_to_id("<|begin|>"))]
    inner.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=special
    )
    inner.save(str(folder / "tokenizer.json"))


def continued(reference, ids):
    with torch.no_grad():
        return reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama in Hugging Face's form that ends texts at two special tokens; it predicts the second one."""
    folder = write_tokenizer(tmp_path_factory.mktemp("model"), "llama-3-like", HEADERS)
    add_begin_token(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    predicted = continued(reference, ids)[0, ids.shape[1] :].tolist()
    # The model predicts the special token in place of that one.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for table in (reference.model.embed_tokens.weight, reference.lm_head.weight):
        table.data[[end, predicted[4]]] = table.data[[predicted[4], end]]
    ends = [tokenizer.eos_token_id, end]
    reference.config.eos_token_id = reference.generation_config.eos_token_id = ends
    reference.save_pretrained(folder)
    return folder, tokenizer, reference


@pytest.mark.parametrize("keeps_generation_config", complete_but([True, False], True))
def test_texts_begin_and_end_as_those_of_transformers(model, tmp_path, keeps_generation_config):
    folder, tokenizer, reference = model
    shutil.copytree(folder, tmp_path / "hf")
    if not keeps_generation_config:
        (tmp_path / "hf" / "generation_config.json").unlink()
    words = [word for prompt in (*PROMPTS, "") for word in ("--prompt", prompt)]
    words += ["--max-new-tokens", str(NEW_TOKENS), "--greedy", "--device", "cpu", "--format", "json"]
    words += ["--load", str(tmp_path / "hf"), "--cache-dir", str(tmp_path / "cache")]
    done = CliRunner().invoke(app, ["generate", *words])
    assert done.exit_code == 0, done.output
    reasons = set()
    for prompt, mine in zip((*PROMPTS, ""), json.loads(done.stdout), strict=True):
        # A text that has the token already gets it once.
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens="<|begin|>" not in prompt).input_ids
        new = continued(reference, ids)[0, ids.shape[1] :].tolist()
        ended = new[-1] in reference.generation_config.eos_token_id
        assert mine["completion"] == tokenizer.decode(new[: len(new) - ended], skip_special_tokens=True)
        assert (mine["prompt_tokens"], mine["completion_tokens"]) == (ids.shape[1], len(new) - ended)
        assert mine["finish_reason"] == ("end" if ended else "length")
        reasons.add(mine["finish_reason"])
    assert reasons == {"end", "length"}


@pytest.mark.complete
def test_only_published_models_read_a_beginning_token(model, tmp_path):
    from dynmo_ckpt.cli import app as ckpt

    folder, tokenizer, _ = model
    done = CliRunner().invoke(ckpt, ["convert", str(folder), str(tmp_path / "native"), "--to", "native"])
    assert done.exit_code == 0, done.output
    inference = values_of(InferenceConfig, {"load": str(tmp_path / "native"), "device": "cpu"})
    source = open_causal_model(inference, init_world("cpu"), {})
    destroy_world()
    published = model_tokenizer(source, inference)
    assert published.encode_prompt("user") == tokenizer("user").input_ids
    passage = "It is 4 user"
    for strict in (True, False):
        assert encode_passage(passage, published, strict=strict).tokens[0] == tokenizer.bos_token_id
    source.checkpoint.manifest["source"] = None
    own = model_tokenizer(source, inference)
    assert own.encode_prompt("user") == own.encode("user") == tokenizer("user", add_special_tokens=False).input_ids
    assert load_tokenizer(folder).prefix == (tokenizer.bos_token_id,)


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore")
def test_answers_with_a_beginning_token_equal_those_of_the_harness(model, tmp_path):
    reason = "lm_eval is not installed (the extra lm-eval)"
    pytest.importorskip("lm_eval.api.model", reason=reason)
    hflm = pytest.importorskip("lm_eval.models.huggingface", reason=reason).HFLM
    from dynmo_ckpt.cli import app as ckpt
    from dynmo_train.evaluation import harness_model
    from tests.parity.test_harness_model import requests

    folder, tokenizer, reference = model
    done = CliRunner().invoke(ckpt, ["convert", str(folder), str(tmp_path / "native"), "--to", "native"])
    assert done.exit_code == 0, done.output
    tokenizer.pad_token = "<|pad|>"
    theirs = hflm(pretrained=reference, tokenizer=tokenizer, batch_size=1, max_length=128)
    mine = harness_model.register()(load=str(tmp_path / "native"), batch_size=2)
    pairs = [("What is", " 2 + 2?"), ("", "user"), ("user " * 60, "It is 4")]
    generated = [(prompt, {"until": ["zz"], "max_gen_toks": NEW_TOKENS}) for prompt in PROMPTS[:3]]
    for name, values in (("loglikelihood", pairs), ("loglikelihood_rolling", [("user",), ("It is 4 " * 60,)])):
        found, expected = (getattr(each, name)(requests(values), disable_tqdm=True) for each in (mine, theirs))
        flat = [[x if isinstance(x, float) else x[0] for x in each] for each in (found, expected)]
        assert flat[0] == pytest.approx(flat[1], abs=5e-3), name
    found, expected = (each.generate_until(requests(generated), disable_tqdm=True) for each in (mine, theirs))
    destroy_world()
    assert found == expected


def test_end_ids_without_a_generation_config_are_of_the_configuration():
    assert end_ids_of({"generation_config": None, "config": {"eos_token_id": [1, 106]}}) == {1, 106}
    assert end_ids_of({"generation_config": {}, "config": {"text_config": {"eos_token_id": 3}}}) == {3}
    assert end_ids_of({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 3}}) == {7}
