"""The command line of ``dynmo-train``: help, options, errors and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from dynmo_train.config import option_specs

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


def train(*arguments, cwd=None, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "dynmo_train", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_pretrain_help_all_names_every_option():
    code, out, err = train("pretrain", "gpt", "--help-all")
    assert (code, err) == (0, "")
    printed = set(out.replace("--[no-]", "--").split())
    assert [spec.flag for spec in option_specs().values() if spec.is_flag and spec.flag not in printed] == []
    assert "--family" not in printed


@pytest.mark.parametrize("command", [[], ["pretrain"], ["launch"]])
def test_train_group_without_command_shows_help(command):
    _, out, err = train(*command)
    assert "Usage: dynmo-train" in out + err


def test_pretrain_missing_options_are_all_reported():
    code, out, err = train("pretrain", "gpt", "--num-layers", "2")
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == "dynmo-train: error: the configuration: 7 problems"
    assert "--hidden-size: is required: Hidden size of the transformer. [missing]" in err


def test_pretrain_conflicts_are_all_reported():
    code, _, err = train("pretrain", "gpt", *words(num_attention_heads="3", min_lr="1"))
    assert code == 2
    assert [line.split(":")[0].strip() for line in err.splitlines()[1:]] == ["--hidden-size", "--min-lr"]


def test_pretrain_file_sets_missing_options(tmp_path):
    (tmp_path / "c.toml").write_text("[model]\nnum_attention_heads = 3\n[optimizer]\nmin_lr = 1\n")
    rest = words(without="--num-attention-heads", min_lr="0.01", config="c.toml")
    code, _, err = train("pretrain", "gpt", *rest, cwd=tmp_path)
    assert code == 2
    assert "is 8; must be a multiple of --num-attention-heads 3" in err
    assert "--min-lr" not in err


def test_pretrain_unknown_key_of_a_file_is_refused(tmp_path):
    (tmp_path / "c.toml").write_text("num_layer = 3\n")
    code, _, err = train("pretrain", "gpt", "--config", "c.toml", cwd=tmp_path)
    assert code == 2
    assert "did you mean num_layers?" in err


def test_pretrain_text_for_a_number_is_refused():
    code, _, err = train("pretrain", "gpt", "--num-layers", "two")
    assert code == 2
    assert "--num-layers" in err


def test_pretrain_missing_tokenizer_is_refused(tmp_path):
    rest = words(without="--vocab-size", tokenizer_model=str(tmp_path / "t.json"))
    code, _, err = train("pretrain", "gpt", *rest)
    assert code == 2
    assert "no tokenizer at" in err


def test_pretrain_invalid_world_size_is_refused():
    code, _, err = train("pretrain", "gpt", *words(), WORLD_SIZE="two")
    assert code == 2
    assert "WORLD_SIZE" in err


def test_launch_nested_launch_is_refused():
    code, _, err = train("launch", "local", "--nproc", "2", "--", "launch", "local")
    assert code == 2
    assert "launch cannot start another launch" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("command", [("pretrain", "gpt", *words()), ("tune-sparse", "--hidden-size", "32")])
def test_train_missing_cuda_device_is_refused(command):
    code, out, err = train(*command, "--device", "cuda")
    assert (code, out) == (2, "")
    assert err.startswith("dynmo-train: error: --device cuda: torch ")
    assert err.endswith("use --device cpu\n")


@pytest.mark.distributed
def test_launch_usage_error_is_printed_once(tmp_path):
    code, out, err = train("launch", "local", "--nproc", "2", "--log-dir", str(tmp_path), "--", "pretrain", "gpt")
    assert (code, out) == (2, "")
    assert err.count("the configuration: 8 problems") == 1
    assert err.startswith("dynmo-train: error: ")


def test_tune_sparse_writes_a_readable_table(tmp_path):
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
