"""``--load`` of a foreign checkpoint: its weights, from the first step, the same on any number of workers."""

from __future__ import annotations

import shutil

import pytest
from typer.testing import CliRunner
from whole_runs import arguments, figures, lines, run_command, train, write_data
from workers import run_workers

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A folder with a run and its last checkpoint as a Hugging Face directory."""
    from dynmo_ckpt.cli import app

    folder = tmp_path_factory.mktemp("hf")
    data = write_data(folder / "x")
    train(data, folder / "run", 1, lr="1e-2", clip_grad="1")
    done = CliRunner().invoke(app, ["convert", str(folder / "run"), str(folder / "hf"), "--to", "hf"])
    assert done.exit_code == 0, done.output
    return folder, data


def test_training_starts_from_its_weights(before):
    folder, data = before
    load = ("--load", str(folder / "hf"), "--cache-dir", str(folder / "cache"))
    talk = train(data, folder / "one", 1, *load, train_iters="3")
    assert "the weights only; training starts from the first step" in talk
    assert talk.count("dynmo-ckpt converted it into") == 1
    talk = train(data, folder / "two", 2, *load, train_iters="3")
    assert "dynmo-ckpt converted it into" not in talk  # it lies in the cache
    assert figures(folder / "one") == figures(folder / "two")
    assert sorted(figures(folder / "one")) == [1, 2, 3]
    fresh, trained = figures(folder / "run")[1][0], figures(folder / "run")[24][0]
    assert fresh - trained > 0.4
    assert abs(figures(folder / "one")[1][0] - trained) < (fresh - trained) / 4
    assert lines(folder / "one" / "profile.jsonl")[0]["segment"] == 0


def test_a_legacy_megatron_checkpoint_begins_at_the_first_step(before):
    """Its own iteration is another program's: the data, the schedule and the optimizer begin anew."""
    from dynmo_ckpt.cli import app

    folder, data = before
    told = ["convert", str(folder / "run"), str(folder / "megatron"), "--to", "legacy", "--pp", "2"]
    assert CliRunner().invoke(app, told).exit_code == 0
    assert (folder / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "24"
    talk = {
        name: train(
            data,
            folder / f"of {name}",
            1,
            "--load",
            str(folder / name),
            "--cache-dir",
            str(folder / "cache"),
            train_iters="3",
        )
        for name in ("megatron", "hf")
    }
    assert "is a legacy Megatron checkpoint; dynmo-ckpt converted it" in talk["megatron"]
    assert figures(folder / "of megatron") == figures(folder / "of hf")


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        ("nothing", {"hidden-size": "48"}, "holds another model: hidden_size is 32 there and 48 here"),
        ("config.json", {}, "dynmo-ckpt cannot convert it: model_type 'bert'"),
    ],
)
def test_what_does_not_fit_is_one_error_of_the_first_worker(before, tmp_path, spoil, options, words):
    folder, data = before
    source = shutil.copytree(folder / "hf", tmp_path / "hf")
    if spoil == "config.json":
        (source / spoil).write_text('{"model_type": "bert"}')
    told = arguments(data, tmp_path / "run", "--load", str(source), "--cache-dir", str(tmp_path / "cache"), **options)
    (first, talk), (second, silence) = run_workers(run_command, 2, told, joins=False)
    assert (first, second) == (2, 2), talk
    assert words in talk
    assert "Traceback" not in talk + silence
    assert "error" not in silence
    assert not (tmp_path / "run").exists()
