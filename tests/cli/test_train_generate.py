"""A tiny run from its command line to its text: pretrain, then generate."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from dynmo_train._common.errors import DynmoError
from dynmo_train.cli import app
from tests.tables import table

pytestmark = pytest.mark.complete

WORDS = ["<|endoftext|>", *(f"w{number}" for number in range(15))]


def train(*arguments, cwd):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dynmo_train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment)
    return done.returncode, done.stdout, done.stderr


def generate(*arguments, text=None):
    """Exit code, standard output and error message of the command, in this process: it loads torch once."""
    outcome = CliRunner().invoke(app, ["generate", *map(str, arguments)], input=text)
    if isinstance(outcome.exception, DynmoError):
        return outcome.exception.exit_code, outcome.stdout, str(outcome.exception)
    return outcome.exit_code, outcome.stdout, outcome.stderr


def write_data(folder):
    """Documents that count: w0 w1 ... w14 w0 ..., 20 tokens and an end each."""
    documents = [[1 + (begin + at) % 15 for at in range(20)] + [0] for begin in range(40)]
    lengths = np.array([len(document) for document in documents], "<i4")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    count = len(documents)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    boundaries = np.arange(count + 1, dtype="<i8")
    (folder / "x.bin").write_bytes(np.concatenate(documents).astype("<u2").tobytes())
    (folder / "x.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())


def write_tokenizer(folder):
    import tokenizers

    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_data(folder)
    write_tokenizer(folder)
    options = {
        "--num-layers": 1,
        "--hidden-size": 32,
        "--num-attention-heads": 2,
        "--seq-length": 16,
        "--micro-batch-size": 8,
        "--train-iters": 60,
        "--lr": 0.02,
        "--data-path": "x",
        "--tokenizer-model": "tokenizer.json",
        "--split": "1",
        "--eval-iters": 0,
        "--run-dir": "run",
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
    }
    code, _, err = train("pretrain", "gpt", *(word for pair in options.items() for word in pair), cwd=folder)
    assert code == 0, err
    (folder / "talk").write_text(err)
    return folder


@pytest.fixture
def place(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def test_run_json_has_each_value_with_its_source(place):
    document = json.loads((place / "run" / "run.json").read_text())
    assert document["config"]["model"]["hidden_size"] == 32
    assert document["config_sources"]["model"]["hidden_size"] == "flag"
    assert document["config_sources"]["model"]["vocab_size"] == "derived"
    assert document["config"]["model"]["vocab_size"] == 16


def test_training_log_first_line_has_the_state_of_apex(place):
    assert (place / "talk").read_text().startswith("apex: ")


def test_generate_trained_model_continues_the_count(place):
    code, out, _ = generate("--load", "run", "--prompt", "w3 w4 w5", "--max-new-tokens", 4)
    assert (code, out) == (0, "w3 w4 w5 w6 w7 w8 w9\n")


def test_generate_prompts_from_file_or_standard_input(place):
    (place / "prompts.txt").write_text("w1 w2\n\nw7 w8\n")
    common = ("--load", "run/checkpoints", "--max-new-tokens", 2)
    code, out, _ = generate(*common, "--prompts", "prompts.txt")
    assert (code, out) == (0, "w1 w2 w3 w4\n---\nw7 w8 w9 w10\n")
    assert generate(*common, text="w1 w2\nw7 w8\n")[1] == out


def test_generate_damaged_optimizer_state_is_ignored(place):
    shutil.copytree("run", "damaged")
    damaged = next((place / "damaged").rglob("optimizer-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    code, out, err = generate("--load", "damaged", "--prompt", "w3 w4 w5", "--max-new-tokens", 4)
    assert (code, out) == (0, "w3 w4 w5 w6 w7 w8 w9\n"), err
    assert "warning" not in err


def test_generate_json_has_every_sample(place):
    options = ("--temperature", 3, "--num-samples", 3, "--max-new-tokens", 5, "--format", "json")
    code, out, _ = generate("--load", "run", "--prompt", "w1", *options)
    assert code == 0
    samples = json.loads(out)
    assert len({sample["completion"] for sample in samples}) > 1
    assert all(sample["prompt"] == "w1" and sample["prompt_tokens"] == 1 for sample in samples)
    assert all(sample["finish_reason"] == "end" or sample["completion_tokens"] == 5 for sample in samples)
    fewer = generate("--load", "run", "--prompt", "w1", *options, "--num-samples", 1)[1]
    assert json.loads(fewer) == samples[:1]


@table(
    ("arguments", "words"),
    [
        (("--load", "nowhere", "--prompt", "w1"), "no checkpoint here"),
        (("--load", "run", "--prompt", " ".join(["w1"] * 17)), "17 tokens; the model has 16 positions"),
        (("--load", "run", "--prompt", "w1", "--num-samples", "2"), "--num-samples 2: must be 1"),
        (("--load", "run", "--prompt", "w1", "--top-p", "-1"), "--top-p -1.0: must be in (0, 1]"),
        (("--load", "run", "--prompt", "w1", "--prompts", "prompts.txt"), "--prompt: cannot be combined"),
        (("--load", "run", "--prompts", "no.txt"), "cannot read the prompts"),
        (("--load", "run"), "no prompt"),
        (("--load", "run", "--prompt", "w1", "--tokenizer-model", "no.json"), "no tokenizer at"),
        (
            ("--load", "hf", "--prompt", "w1", "--cache-dir", "cache"),
            "hf: dynmo-ckpt cannot convert it: hf/config.json: model_type None",
        ),
        (("--load", "hf", "--prompt", "w1", "--cache-dir", "x.bin/y"), "cannot create the folder of conversions"),
    ],
)
def test_generate_invalid_input_is_refused_in_one_line(place, arguments, words):
    (place / "hf").mkdir(exist_ok=True)
    (place / "hf" / "config.json").write_text("{}")
    code, out, err = generate(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_generate_checkpoint_without_tokenizer_is_refused(place):
    bare = place / "bare"
    step = next((place / "run" / "checkpoints").glob("step-*"))
    shutil.copytree(step, bare / step.name, ignore=shutil.ignore_patterns("tokenizer"), dirs_exist_ok=True)
    code, _, err = generate("--load", "bare", "--prompt", "w1")
    assert code == 2
    assert "tokenizer" in err


def test_generate_runs_as_a_program(place):
    code, out, err = train("generate", "--load", "run", "--prompt", "w1 w2", "--max-new-tokens", 2, cwd=place)
    assert (code, out, err) == (0, "w1 w2 w3 w4\n", "")


@pytest.fixture(scope="module")
def with_exits(trained):
    """A run of two blocks, with an exit after the first; its tokens do not exit unless a threshold is given."""
    sizes = (
        "--num-layers",
        2,
        "--hidden-size",
        32,
        "--num-attention-heads",
        2,
        "--seq-length",
        16,
        "--micro-batch-size",
        8,
    )
    length = ("--train-iters", 40, "--lr", 0.01, "--hidden-dropout", 0, "--attention-dropout", 0)
    data = ("--data-path", "x", "--tokenizer-model", "tokenizer.json", "--split", "1", "--eval-iters", 0)
    exits = ("--early-exit-layers", 0, "--early-exit-threshold", 1, "--run-dir", "exits")
    code, _, err = train("pretrain", "gpt", *sizes, *length, *data, *exits, cwd=trained)
    assert code == 0, err
    return "exits"


PROMPTS = ("--prompt", "w3 w4 w5", "--prompt", "w9 w2 w14", "--prompt", "w7", "--max-new-tokens", 9)


def shares(*arguments):
    """Texts of the completions, and the shares of their exits."""
    code, out, err = generate("--load", "exits", *PROMPTS, "--format", "json", *arguments)
    assert code == 0, err
    found = json.loads(out)
    return [each["completion"] for each in found], found, err


def test_generate_verified_drafts_have_the_text_of_the_full_model(place, with_exits):
    full, plain, _ = shares()
    assert "exited_share" not in plain[0]
    for threshold, drafts in ((0, 3), (0.05, 6), (1, 6)):
        texts, found, err = shares(
            "--exit-key-values", "speculative", "--exit-threshold", threshold, "--draft-tokens", drafts
        )
        assert texts == full
        assert ("accepted drafts: " in err) == ("accepted_share" in found[0]) == (threshold < 1)
    assert shares("--exit-key-values", "speculative")[0] == full, "the threshold of the training"


@pytest.mark.parametrize("key_values", ["stored", "propagate", "skip", "exact"])
def test_generate_threshold_1_has_the_text_of_the_full_model(place, with_exits, key_values):
    texts, found, err = shares("--exit-threshold", 1, "--exit-key-values", key_values)
    assert texts == shares()[0]
    assert {(each["exited_share"], each["layers_per_token"]) for each in found} == {(0.0, 2.0)}
    assert "exited tokens: 0.000 of 27 | layers per token: 2.00 of 2" in err


@pytest.mark.parametrize("key_values", ["stored", "propagate", "skip", "exact"])
def test_generate_threshold_0_exits_at_the_first_exit(place, with_exits, key_values):
    _, found, err = shares("--exit-threshold", 0, "--exit-key-values", key_values)
    assert {(each["exited_share"], each["layers_per_token"]) for each in found} == {(1.0, 1.0)}
    assert "exited tokens: 1.000 of 27 | layers per token: 1.00 of 2" in err


def test_generate_verified_drafts_end_where_the_full_model_does(place, with_exits):
    options = (
        "--load",
        "exits",
        "--prompt",
        "w3 w4 w5",
        "--max-new-tokens",
        9,
        "--stop-token",
        "w8",
        "--format",
        "json",
    )
    [full] = json.loads(generate(*options)[1])
    [found] = json.loads(generate(*options, "--exit-key-values", "speculative", "--exit-threshold", 0)[1])
    names = ("completion", "completion_tokens", "finish_reason")
    assert [found[name] for name in names] == [full[name] for name in names]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", 1), "--exit-threshold: requires greedy decoding"),
        (("--recompute",), "--exit-threshold: cannot be combined with --recompute"),
    ],
)
def test_generate_with_exits_refuses_sampling_and_recomputation(place, with_exits, options, message):
    code, _, err = generate("--load", "exits", *PROMPTS, "--exit-threshold", 0.5, *options)
    assert code == 2
    assert message in err


def test_generate_exits_of_a_model_without_any_are_refused(place):
    code, _, err = generate("--load", "run", *PROMPTS, "--exit-threshold", 0.5)
    assert code == 2
    assert "the model has no early exits; train it with --early-exit-layers" in err
