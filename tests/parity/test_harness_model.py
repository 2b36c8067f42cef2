"""The harness's model of a checkpoint: log-likelihoods and texts of the harness's own model, on transformers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dynmo_train.parallel.process_groups import destroy_world
from tests.parity.test_decoder_shapes import SHAPES, models_of
from tests.parity.test_generation import train_tokenizer

pytestmark = pytest.mark.complete

NAMES = ("Llama", "Mistral", "Mixtral", "Qwen3", "Gemma", "Olmo2", "yarn")
TEXT = "the cat sat on the mat and the dog sat on the log. "
# No context is another one with its continuation but the last token: the harness shares their logits, and then reads
# those of the wrong tokens.
PAIRS = [
    ("the cat", " sat on the mat"),
    ("", "the dog"),
    ("the log sat on the ", "mat"),
    (TEXT * 8, " the dog"),
    ("the", " " + TEXT),
]
ROLLING = ["the cat sat", TEXT * 6, "x"]
PROMPTS = ["the cat", "the dog and the log on the mat", TEXT * 6]
OPTIONS = {"until": [" t", "zz"], "max_gen_toks": 12}


def requests(values):
    return [SimpleNamespace(args=value) for value in values]


def answers(model):
    generated = [(prompt, OPTIONS) for prompt in PROMPTS] + [(PROMPTS[0], {"until": ["q"], "max_gen_toks": 5})]
    return (
        model.loglikelihood(requests(PAIRS), disable_tqdm=True),
        model.loglikelihood_rolling(requests([(text,) for text in ROLLING]), disable_tqdm=True),
        model.generate_until(requests(generated), disable_tqdm=True),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_the_harness_on_transformers(tmp_path, name, monkeypatch):
    reason = "lm_eval is not installed (the extra lm-eval)"
    pytest.importorskip("lm_eval.api.model", reason=reason)
    hflm = pytest.importorskip("lm_eval.models.huggingface", reason=reason).HFLM
    from transformers import PreTrainedTokenizerFast

    from dynmo_ckpt.cli import app
    from dynmo_train.evaluation import harness_model

    tokenizer = train_tokenizer()
    size = tokenizer.get_vocab_size()
    monkeypatch.setitem(SHAPES, name, replace(SHAPES[name], vocab_size=size, padded_vocab_size=size))
    _, _, theirs = models_of(name)
    eod = tokenizer.token_to_id("<|endoftext|>")
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = eod
    theirs.config.bos_token_id = theirs.generation_config.bos_token_id = eod
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    theirs.save_pretrained(tmp_path / "hf")
    fast.save_pretrained(tmp_path / "hf")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "hf"), str(tmp_path / "native"), "--to", "native"])
    assert done.exit_code == 0, done.output
    mine = harness_model.register()(load=str(tmp_path / "native"), batch_size=2)
    reference = hflm(pretrained=theirs.eval(), tokenizer=fast, batch_size=2, max_length=mine.model.max_length)
    (found, rolling, texts), (expected, expected_rolling, expected_texts) = answers(mine), answers(reference)
    destroy_world()
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=2e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert rolling == pytest.approx(expected_rolling, abs=5e-3)
    assert texts == expected_texts
