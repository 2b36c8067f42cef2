"""One rule for damaged checkpoints, and for a run that has lost its checkpoints."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from dynmo_train._common.document import envelope
from dynmo_train.config import config_of
from dynmo_train.formats.checkpoint import CheckpointError, find_damage, list_checkpoints
from dynmo_train.formats.run import write_run
from dynmo_train.trainer.checkpoint.load_checkpoint import checkpoint_to_load, first_valid_checkpoint, lost_step
from dynmo_train.trainer.setup import bert_checkpoint
from tests.tables import table
from tests.unit.dynmo_train.formats.checkpoint import small_run

ALONE = SimpleNamespace(is_rank0=True, rank=0, size=1, dims=SimpleNamespace(tensor=1))


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.setattr("dynmo_train.trainer.checkpoint.load_checkpoint.broadcast_object", lambda _world, value: value)
    monkeypatch.setattr(
        "dynmo_train.trainer.checkpoint.load_checkpoint.all_gather_objects", lambda _world, value: [value]
    )


def config(run, **more):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "vocab_size": 8}
    return config_of(**sizes, data_path="x", micro_batch_size=1, train_iters=9, lr=0.1, load=str(run), **more)


def shard(step_dir):
    return next(path for path in sorted(step_dir.iterdir()) if path.name.startswith("model-"))


def flip(path, at=-1):
    payload = bytearray(path.read_bytes())
    payload[at] ^= 1
    path.write_bytes(payload)


DAMAGE = {
    "truncated shard": lambda step: shard(step).write_bytes(shard(step).read_bytes()[:-1]),
    "flipped byte of a shard": lambda step: flip(shard(step)),
    "missing shard": lambda step: shard(step).unlink(),
    "truncated manifest": lambda step: (step / "manifest.json").write_bytes(b"{"),
    "flipped byte of the manifest": lambda step: flip(step / "manifest.json", 40),
    "missing manifest": lambda step: (step / "manifest.json").unlink(),
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2, 3):
        small_run.save(tmp_path / "checkpoints", step)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_checkpoint_falls_back_to_the_previous(run, capsys, damage):
    assert checkpoint_to_load(config(run), ALONE).directory.name == "step-00000003"
    newest = run / "checkpoints" / "step-00000003"
    DAMAGE[damage](newest)
    found = checkpoint_to_load(config(run), ALONE)
    assert found.directory.name == "step-00000002"
    [fault] = found.skipped_checkpoints
    assert str(newest) in fault
    err = capsys.readouterr().err
    assert fault in err
    assert "step-00000002 instead; dynmo-ckpt verify --level full lists the damage" in err
    DAMAGE[damage](run / "checkpoints" / "step-00000002")
    assert checkpoint_to_load(config(run), ALONE).directory.name == "step-00000001"
    DAMAGE[damage](run / "checkpoints" / "step-00000001")
    with pytest.raises(CheckpointError, match=r"no undamaged checkpoint; dynmo-ckpt verify lists") as error:
        checkpoint_to_load(config(run), ALONE)
    assert all(f"step-0000000{step}" in str(error.value) for step in (1, 2, 3))


@pytest.mark.parametrize("option", ["finetune", "no_load_optim"])
@pytest.mark.parametrize("change", [flip, lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_weights_of_a_checkpoint_with_damaged_optimizer_state_are_loaded(run, option, change):
    newest = run / "checkpoints" / "step-00000003"
    change(next(newest.glob("optimizer-*")))
    assert checkpoint_to_load(config(run), ALONE).directory.name == "step-00000002"
    found = checkpoint_to_load(config(run, **{option: True}), ALONE)
    assert (found.directory.name, found.skipped_checkpoints) == ("step-00000003", ())
    assert first_valid_checkpoint(ALONE, "x", [str(newest)], weights_only=True) == (newest, ())
    flip(shard(newest))
    assert checkpoint_to_load(config(run, **{option: True}), ALONE).directory.name == "step-00000002"


@pytest.mark.parametrize("change", [flip, lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_bert_load_with_damaged_optimizer_state_reads_the_weights(run, change):
    newest = run / "checkpoints" / "step-00000003"
    change(next(newest.glob("optimizer-*")))
    found = bert_checkpoint(config("none", bert_load=str(run)), ALONE)
    assert (found.directory.name, found.skipped_checkpoints) == ("step-00000003", ())
    flip(shard(newest))
    assert bert_checkpoint(config("none", bert_load=str(run)), ALONE).directory.name == "step-00000002"


def test_damaged_latest_falls_back_to_an_earlier_step(run):
    folder = run / "checkpoints"
    small_run.save(folder, 40)
    (folder / "LATEST").write_text("step-00000003\n")  # resumed from step 2, after steps up to 40
    names = [path.name for path in list_checkpoints(run)]
    assert names == ["step-00000003", "step-00000002", "step-00000001", "step-00000040"]
    DAMAGE["missing shard"](folder / "step-00000003")
    assert checkpoint_to_load(config(run), ALONE).directory.name == "step-00000002"
    for step in (1, 2):
        DAMAGE["missing shard"](folder / f"step-0000000{step}")
    assert checkpoint_to_load(config(run), ALONE).directory.name == "step-00000040"
    (folder / "LATEST").unlink()
    assert [path.name for path in list_checkpoints(run)] == ["step-00000040", *names[:-1]]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_step_directory_is_an_error(run, damage):
    DAMAGE[damage](run / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match="no undamaged checkpoint"):
        checkpoint_to_load(config(run / "checkpoints" / "step-00000003"), ALONE)


def test_damage_is_found_by_the_rank_that_reads_the_file(run):
    step = run / "checkpoints" / "step-00000003"
    flip(shard(step))
    found = [find_damage(step, part, 3) for part in range(3)]
    assert sum(map(bool, found)) == 1
    assert "the bytes were altered" in "".join(found)


def records(run, *, saved, steps=400):
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)))
    events = [{"kind": "checkpoint", "step": 100, "message": "saved"}] if saved else [{"kind": "planner", "step": 1}]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_missing_checkpoints_of_a_run_with_progress_are_an_error(run):
    records(run, saved=True)
    shutil.rmtree(run / "checkpoints")
    for again in (run / "checkpoints", run / "other"):
        with pytest.raises(CheckpointError, match=r"its logs have 400 steps and saved checkpoints: restore"):
            checkpoint_to_load(config(run), ALONE)
        again.mkdir()
    assert checkpoint_to_load(config(run, exit_on_missing_checkpoint=False), ALONE) is None


def test_run_that_never_saved_restarts_by_default(run):
    shutil.rmtree(run / "checkpoints")
    records(run, saved=False)
    assert lost_step(run) is None
    for own in ({"save": str(run)}, {"run_dir": f"{run}/."}):
        assert checkpoint_to_load(config(run, **own), ALONE) is None
        with pytest.raises(CheckpointError, match=r"has no checkpoint.* --no-exit-on-missing-checkpoint"):
            checkpoint_to_load(config(run, exit_on_missing_checkpoint=True, **own), ALONE)
    assert checkpoint_to_load(config(run / "nowhere", save=str(run / "nowhere")), ALONE) is None


@table("given", ["nowhere", "checkpoints/step-00000009", "."])
def test_checkpoint_that_was_given_and_is_not_there_is_an_error(tmp_path, given):
    """Only the run's own directory may lack one: a script with --save and --load starts, and continues later."""
    (tmp_path / "checkpoints").mkdir()
    place, own = tmp_path / given, {"save": str(tmp_path / "own")}
    with pytest.raises(CheckpointError, match=r"does not exist; give the path|has no checkpoint; give the path"):
        checkpoint_to_load(config(place, **own), ALONE)
    assert checkpoint_to_load(config(place, exit_on_missing_checkpoint=False, **own), ALONE) is None


def test_run_that_failed_at_its_first_save_restarts(run):
    """The metrics line of a step is written before its evaluation and its save, in which a run may fail."""
    shutil.rmtree(run / "checkpoints")
    records(run, saved=False)
    config_values = {"run": {"save_interval": 400}, "training": {"train_iters": 400}}
    sources = {concern: dict.fromkeys(values, "flag") for concern, values in config_values.items()}
    document = {
        **envelope("dynmo.run", 1, "test"),
        **{"run_id": "r", "segment": 0, "world_size": 1, "hosts": ["here"], "command_line": [], "versions": {}},
        **{"engine": {}, "config": config_values, "config_sources": sources},
    }
    write_run(run / "run.json", document)
    assert lost_step(run) is None
    assert checkpoint_to_load(config(run, save=str(run)), ALONE) is None
