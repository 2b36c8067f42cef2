"""WikiText perplexity and LAMBADA accuracy of ``dynmo-train evaluate`` equal those computed with transformers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from dynmo_train._common.errors import DynmoError
from dynmo_train.cli import app
from dynmo_train.evaluation.lambada import read_passages, split_passage
from dynmo_train.evaluation.wikitext import count_words, detokenize
from tests.paths import SHARED_DATA

pytestmark = pytest.mark.complete

POSITIONS, OVERLAP = 48, 16
ARTICLE = """
 = Robert the Builder =

 Robert ( born 1 @,@ 204 at N ) was a " builder " of walls . In the 1920s ' the walls ' of the well @-@ known
 town 's gate fell ; he wrote : " build again ! " , and [ as planned ] 3 @.@ 5 km of them stood .

 = = Later years = =

 His brothers ' houses , { two } of them , stayed . Why ? Nobody 's known it at 20 \N{DEGREE SIGN} C .
"""
PASSAGES = [
    'She took the hammer, and went to the old wall. "Build it again," she called to Robert',
    "he looked at the gate of the town and saw that somebody had broken the gate",
    "all of the houses stayed, two of them at the well-known well",
    "walls and walls and walls and",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a GPT-2 of random weights, its tokenizer, a text and some passages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("zeroshot")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([ARTICLE, *PASSAGES] * 2, trainer)
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=POSITIONS,
        n_embd=32,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    reference = GPT2LMHeadModel(config).eval()
    reference.save_pretrained(folder / "hf")
    tokenizer.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "wiki.tokens").write_text(ARTICLE * 6, encoding="utf-8")
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return folder, tokenizer, reference


def evaluate(model, task, data, *arguments):
    folder = model[0]
    options = [
        "--load",
        folder / "hf",
        "--cache-dir",
        folder / "cache",
        "--valid-data",
        folder / data,
        "--device",
        "cpu",
    ]
    words = ["evaluate", task, *map(str, [*options, *arguments]), "--format", "json", "--num-threads", "1"]
    done = CliRunner().invoke(app, words)
    if isinstance(done.exception, DynmoError):
        return done.exception.exit_code, str(done.exception)
    if done.exception and done.exit_code == 1:
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@torch.no_grad()
def losses_of(reference, tokens, length, step):
    """Sum of the losses of all targets, each scored in the first window that contains it."""
    total, scored = 0.0, 0
    for begin in range(0, len(tokens), step):
        ids = torch.tensor([tokens[begin : begin + length + 1]])
        targets = ids.shape[1] - 1
        if scored == len(tokens) - 1:
            return total
        logits = reference(ids[:, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").double()
        total += float(losses[scored - begin :].sum())
        scored = begin + targets
    return total


@pytest.mark.parametrize("step", [OVERLAP, POSITIONS])
def test_wikitext_perplexity_equals_transformers(model, step):
    found = evaluate(model, "wikitext", "wiki.tokens", "--overlapping-eval", step, "--micro-batch-size", 3)
    text = ARTICLE * 6
    tokens = model[1].encode(detokenize(text, "wikitext")).ids
    loss = losses_of(model[2], tokens, POSITIONS, step) / (len(tokens) - 1)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert (found["tokens"], found["original_words"]) == (len(tokens), count_words(text))
    ratio = (len(tokens) - 1) / (count_words(text) - 1)
    assert found["token_ratio"] == ratio
    assert found["adjusted_perplexity"] == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-5)


def test_detokenize_applies_every_rule():
    assert detokenize(ARTICLE, "wikitext").splitlines() == [
        "",
        "= Robert the Builder =",
        "",
        "Robert (born 1,204 at N) was a \"builder\" of walls. In the 1920s'the walls' of the well-known",
        'town\'s gate fell; he wrote: "build again!", and [as planned] 3.5 km of them stood .',
        "",
        "== Later years ==",
        "",
        "His brothers' houses, {two} of them, stayed. Why? Nobody's known it at 20\N{DEGREE SIGN}C .",
    ]
    assert detokenize("an N of s ' b", "wikitext") == "an 1 of s' b"
    assert detokenize("it is n't\n $ 100 # 1 's N b", "ptb") == "it isn't\n$100 #1's1 b"


@torch.no_grad()
def test_lambada_predictions_equal_transformers(model):
    folder, tokenizer, reference = model

    def predicts(read, answer):
        ids = torch.tensor([read + answer])
        predicted = reference(ids[:, :-1]).logits[0, len(read) - 1 :].argmax(-1)
        return predicted.tolist() == answer

    # Random weights are correct only on passages that end as the model continues them.
    words = ARTICLE.split()
    texts = list(PASSAGES)
    for end in range(2, len(words)):
        read = tokenizer.encode(" ".join(words[:end])).ids[:POSITIONS]
        predicted = int(reference(torch.tensor([read])).logits[0, -1].argmax())
        text = tokenizer.decode([*read, predicted])
        if tokenizer.encode(text).ids == [*read, predicted] and len(texts) < 6:
            texts.append(text)
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    for strict in (False, True):
        expected = []
        for text in texts:
            tokens = tokenizer.encode(text).ids
            if strict:
                context, word = split_passage(text)
                expected.append(predicts(tokenizer.encode(context).ids, tokenizer.encode(f" {word}").ids))
            else:
                expected.append(predicts(tokens[:-1], tokens[-1:]))
        out_file = folder / "items.jsonl"
        flags = ["--predictions", out_file, *(["--strict-lambada"] if strict else [])]
        found = evaluate(model, "lambada", "more.jsonl", *flags)
        correct = [json.loads(line)["correct"] for line in out_file.read_text().splitlines()]
        assert correct == expected
        assert found == {"correct": sum(expected), "items": 6, "accuracy": sum(expected) / 6}
        if not strict:
            assert expected[-2:] == [True, True]


@pytest.mark.parametrize(
    ("task", "data", "arguments", "words"),
    [
        ("wikitext", "no.txt", (), "cannot be read: no such file"),
        ("wikitext", "wiki.tokens", ("--seq-length", 999), "has 48 positions"),
        ("wikitext", "wiki.tokens", ("--overlapping-eval", 64), "must be at most 48, the tokens of a window"),
        ("wikitext", "wiki.tokens", ("--num-layers", 9), "--num-layers: is 9; must be 3, as in the checkpoint"),
        ("wikitext", "wiki.tokens", ("--tensor-model-parallel-size", 3), "must divide the number of processes, 1"),
        ("lambada", "wiki.tokens", (), "is not JSON"),
        ("lambada", "no.jsonl", (), "cannot be read"),
        ("lambada", "short.jsonl", (), 'an object with a "text" of two words'),
    ],
)
def test_evaluate_bad_input_prints_one_line(model, task, data, arguments, words):
    (model[0] / "short.jsonl").write_text(json.dumps({"text": "one"}))
    code, message = evaluate(model, task, data, *arguments)
    assert code == 2
    assert words in message, message


def test_evaluate_with_too_large_a_tokenizer_is_refused(model):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{number}": number for number in range(900)}, unk_token="w0")).save(
        str(model[0] / "large.json")
    )
    code, message = evaluate(model, "lambada", "lambada.jsonl", "--tokenizer-model", model[0] / "large.json")
    assert code == 2
    assert "has 900 ids; the model of" in message


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason=f"{SHARED_DATA}: the shared data is not next to the project")
def test_wikitext_word_and_token_counts_equal_published_ones():
    from dynmo_train.data.tokenizer import TokenizerFiles, open_tokenizer

    files = {"vocab.json": SHARED_DATA / "tok/gpt2-vocab.json", "merges.txt": SHARED_DATA / "tok/gpt2-merges.txt"}
    tokenizer = open_tokenizer(TokenizerFiles(kind="GPT2BPETokenizer", files=files))
    text = (SHARED_DATA / "eval/wikitext103/wiki.test.tokens").read_text(encoding="utf-8")
    tokens = tokenizer.encode(detokenize(text, "wikitext"))
    assert (count_words(text), len(tokens)) == (245_566, 270_330)
    assert (len(tokens) - 1) / (count_words(text) - 1) == 1.1008449901248143
    passages = read_passages(SHARED_DATA / "eval/lambada_test.jsonl")
    assert len(passages) == 5153
    assert sum(len(tokenizer.encode(" " + split_passage(text)[1])) > 1 for text in passages) == 1140
