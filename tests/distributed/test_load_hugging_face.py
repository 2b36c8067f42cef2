"""``--load`` of a foreign checkpoint: its weights, from the first step, the same on any number of workers."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from tests.distributed.whole_runs import arguments, figures, lines, run_command, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed]


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


def test_training_starts_from_hugging_face_weights(before):
    from dynmo_ckpt.cli import app

    folder, data = before
    edited = json.loads((folder / "hf" / "config.json").read_text()) | {"eos_token_id": [2, 4], "attn_pdrop": 0.25}
    (folder / "hf" / "config.json").write_text(json.dumps(edited))
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
    manifest = json.loads(next((folder / "two" / "checkpoints").glob("step-*/manifest.json")).read_text())
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert manifest["source"]["config"] == config
    done = CliRunner().invoke(app, ["convert", str(folder / "two"), str(folder / "again"), "--to", "hf"])
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "again" / "config.json").read_text()) == config


def test_finetune_from_a_megatron_checkpoint_starts_at_step_1(before):
    """Without ``--finetune`` it resumes (``tests/parity/test_resume_elsewhere.py``); with it, only weights count."""
    from dynmo_ckpt.cli import app

    folder, data = before
    command = ["convert", str(folder / "run"), str(folder / "megatron"), "--to", "legacy", "--pp", "2"]
    assert CliRunner().invoke(app, command).exit_code == 0
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
            "--finetune",
            train_iters="3",
        )
        for name in ("megatron", "hf")
    }
    assert "is a Megatron checkpoint; dynmo-ckpt converted it" in talk["megatron"]
    assert figures(folder / "of megatron") == figures(folder / "of hf")


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        ("nothing", {"hidden-size": "48"}, "is a checkpoint of another model: hidden_size is 32 there and 48 here"),
        ("config.json", {}, "{hf}: dynmo-ckpt cannot convert it: {hf}/config.json: model_type 'bert'"),
    ],
)
def test_unusable_hugging_face_model_is_one_error(before, tmp_path, spoil, options, words):
    folder, data = before
    source = shutil.copytree(folder / "hf", tmp_path / "hf")
    if spoil == "config.json":
        (source / spoil).write_text('{"model_type": "bert"}')
    command = arguments(
        data, tmp_path / "run", "--load", str(source), "--cache-dir", str(tmp_path / "cache"), **options
    )
    (first, talk), (second, silence) = run_workers(run_command, 2, command, joins=False)
    assert (first, second) == (2, 2), talk
    assert words.replace("{hf}", str(source)) in talk
    assert "Traceback" not in talk + silence
    assert "error" not in silence
    assert not (tmp_path / "run").exists()
