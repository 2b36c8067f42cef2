"""The command line of ``dynmo-train``: help, options, errors and their exit codes."""

from __future__ import annotations

import json

import pytest
import torch

from dynmo_train.config import option_specs
from tests.tables import table

pytestmark = pytest.mark.complete

SMALL = {
    "--num-layers": "2",
    "--hidden-size": "8",
    "--num-attention-heads": "2",
    "--seq-length": "4",
    "--vocab-size": "10",
    "--micro-batch-size": "1",
    "--train-iters": "3",
    "--lr": "0.1",
    "--data-path": "corpus",
}


def words(*, without="", **changes):
    given = SMALL | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return [word for name, value in given.items() if name != without for word in (name, value)]


def test_pretrain_help_all_names_every_option(train):
    code, out, err = train("pretrain", "gpt", "--help-all")
    assert (code, err) == (0, "")
    printed = set(out.replace("--[no-]", "--").split())
    assert [spec.flag for spec in option_specs().values() if spec.is_flag and spec.flag not in printed] == []
    assert "--family" not in printed


@table("command", [[], ["pretrain"], ["launch"]])
def test_train_group_without_command_shows_help(train, command):
    _, out, err = train(*command)
    assert "Usage: dynmo-train" in out + err


FILES = {"unknown.toml": "num_layer = 3\n", "heads.toml": "[model]\nnum_attention_heads = 3\n[optimizer]\nmin_lr = 1\n"}
CONFLICTS = words(num_attention_heads="3", min_lr="1")
HEADS = words(without="--num-attention-heads", min_lr="0.01", config="heads.toml")


@table(
    ("arguments", "message"),
    [
        (["--num-layers", "2"], "--hidden-size: is required: Hidden size of the transformer. [missing]"),
        (CONFLICTS, "--hidden-size: is 8; must be a multiple of --num-attention-heads 3"),
        (CONFLICTS, "--min-lr: "),
        (HEADS, "is 8; must be a multiple of --num-attention-heads 3"),
        (["--config", "unknown.toml"], "did you mean num_layers?"),
        (words(without="--vocab-size", tokenizer_model="t.json"), "no tokenizer at"),
    ],
)
def test_pretrain_invalid_options_are_refused(train, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    code, out, err = train("pretrain", "gpt", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dynmo-train: error: ")
    assert message in err
    assert "Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} == FILES.keys()
    assert ("--min-lr" in err) == (arguments is CONFLICTS)


def test_pretrain_invalid_world_size_is_refused(train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    code, _, err = train("pretrain", "gpt", *words())
    assert code == 2
    assert "WORLD_SIZE" in err


def test_launch_nested_launch_is_refused(train):
    code, _, err = train("launch", "local", "--nproc", "2", "--", "launch", "local")
    assert code == 2
    assert "launch cannot start another launch" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("command", [("pretrain", "gpt", *words()), ("tune-sparse", "--hidden-size", "32")])
def test_train_missing_cuda_device_is_refused(train, command):
    code, out, err = train(*command, "--device", "cuda")
    assert (code, out) == (2, "")
    assert err.startswith("dynmo-train: error: --device cuda: torch ")
    assert err.endswith("use --device cpu\n")


def test_tune_sparse_writes_a_readable_table(train, tmp_path):
    from dynmo_train.dynamics.tuning import read_sparse_table

    path = tmp_path / "table.json"
    code, out, err = train(
        "tune-sparse", "--hidden-size", "32", "--rows", "16", "--output", str(path), "--format", "json"
    )
    assert code == 0, err
    table = json.loads(out)["thresholds"]
    assert table == read_sparse_table(path)
    shapes = ("96x32", "32x32", "128x32", "32x128")
    rules = ("csr", "block", "block16")
    assert set(table) == {*rules, *(f"{rule} {shape}" for rule in rules for shape in shapes)}
    assert {each["rule"] for each in json.loads(out)["measured"]} == set(rules)
    assert table["csr"] == max(value for rule, value in table.items() if rule.startswith("csr "))
