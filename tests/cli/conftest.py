"""Commands that run in the test's process, and the runs and checkpoints that they read."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.cli.cli_files import EVENTS
from tests.paths import CONTRACTS
from tests.unit.dynmo_ckpt import native_checkpoints


def in_process(main, name, monkeypatch, capture):
    """A function that runs a command in this process: exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capture.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def plan(monkeypatch, capfd):
    """Runs ``dynmo-plan`` in this process: exit code, stdout, stderr."""
    from dynmo_balance import cli

    return in_process(cli.main, "dynmo-plan", monkeypatch, capfd)


@pytest.fixture
def prep(monkeypatch, capsys):
    """Runs ``dynmo-prep`` in this process: exit code, stdout, stderr."""
    from dynmo_tools import cli

    return in_process(cli.main, "dynmo-prep", monkeypatch, capsys)


@pytest.fixture
def train(monkeypatch, capfd):
    """Runs ``dynmo-train`` in this process: exit code, stdout, stderr."""
    from dynmo_train import cli

    return in_process(cli.main, "dynmo-train", monkeypatch, capfd)


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with a profile and its initial plan."""
    (tmp_path / "plans").mkdir()
    shutil.copy(EVENTS, tmp_path / "profile.jsonl")
    shutil.copy(CONTRACTS / "plan/valid/initial.json", tmp_path / "plans/plan-000000.json")
    return tmp_path


@pytest.fixture
def run_of(tmp_path):
    """A profile of a run with two stages a worker, with the schedule that is asked for."""

    def make(schedule):
        records = [json.loads(line) for line in EVENTS.read_text().splitlines()]
        path = tmp_path / "profile.jsonl"
        changes = {"schedule": schedule, "virtual_stages_per_worker": 2}
        lines = (json.dumps({**r, **changes} if r["record"] == "header" else r) + "\n" for r in records)
        path.write_text("".join(lines))
        return path

    return make


@pytest.fixture
def ckpt(monkeypatch, capsys):
    """Runs ``dynmo-ckpt`` in this process as the console script does; checks its exit code."""
    from dynmo_ckpt import cli

    def run(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["dynmo-ckpt", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        done = capsys.readouterr()
        assert (stop.value.code or 0) == code, done.out + done.err
        return SimpleNamespace(stdout=done.out, stderr=done.err)

    return run


@pytest.fixture
def native(tmp_path):
    """A native checkpoint on two stages and two tensor ranks; its directory, model and parameters."""
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    # Rows of padding are zero in what is written, as in no checkpoint of ours.
    p["embedding.word.weight"][m["vocab_size"] :] = 0
    native_checkpoints.save(tmp_path / "native", p | native_checkpoints.optimizer_state(p), m, tp=2)
    return tmp_path / "native", m, p


@pytest.fixture
def legacy_save(monkeypatch):
    """The writer of legacy checkpoints, with a module under Megatron's name for the enumeration that it pickles."""
    from tests.unit.dynmo_ckpt import legacy_gpt  # here, for the other commands are also tested without torch

    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = legacy_gpt.ModelType
    return legacy_gpt.save
