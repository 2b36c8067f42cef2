"""What signals and the clock ask of a run, at one process."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dynmo_train.cli import app, pretrain
from dynmo_train.cli.common import ignore_signals_until_training
from dynmo_train.trainer.signals import BoundarySignals, DistributedSignalHandler

ALONE = SimpleNamespace(size=1)


def test_signals_take_effect_at_the_boundary_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with DistributedSignalHandler(None) as signal_handler:
        assert signal_handler.at_boundary(ALONE) == BoundarySignals()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal_handler.at_boundary(ALONE) == BoundarySignals(save=True)
        assert signal_handler.at_boundary(ALONE) == BoundarySignals()
        assert signal_handler.at_boundary(ALONE, relaunch=True) == BoundarySignals(exit=True, relaunch=True)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signal_handler.at_boundary(ALONE) == BoundarySignals(exit=True, relaunch=True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal_handler.at_boundary(ALONE) == BoundarySignals(exit=True, exit_code=143)
        with pytest.raises(SystemExit) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.value.code == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_ctrl_c_exits_at_the_boundary_and_a_second_one_immediately(capfd):
    before = signal.getsignal(signal.SIGINT)
    with DistributedSignalHandler(None, launched=False) as signal_handler:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal_handler.at_boundary(ALONE) == BoundarySignals(exit=True, exit_code=130)
        with pytest.raises(SystemExit) as stop:
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.value.code == 130
    assert signal.getsignal(signal.SIGINT) == before
    assert capfd.readouterr().err == (
        "interrupted: finishing the step and saving; Ctrl-C again exits now, without saving\n"
    )


def test_ctrl_c_is_ignored_in_a_background_command():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DistributedSignalHandler(None) as signal_handler:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal_handler.at_boundary(ALONE) == BoundarySignals()
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigusr1_is_ignored_before_and_after_training():
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    with ignore_signals_until_training():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        with DistributedSignalHandler(None) as signal_handler:
            assert signal_handler.at_boundary(ALONE) == BoundarySignals()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signal_handler.at_boundary(ALONE) == BoundarySignals(save=True)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == before


def test_pretrain_ignores_sigusr1_before_training(monkeypatch):
    handlers = []
    monkeypatch.setattr(pretrain, "need_torch", lambda: handlers.append(signal.getsignal(signal.SIGUSR1)))
    CliRunner().invoke(app, ["pretrain", "gpt", "--train-iters", "1"])
    assert handlers == [signal.SIG_IGN]


def test_launched_worker_ignores_a_repeated_sigterm():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with DistributedSignalHandler(None, launched=True) as signal_handler:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal_handler.at_boundary(ALONE) == BoundarySignals(exit=True, exit_code=143)
        os.kill(os.getpid(), signal.SIGTERM)  # while the last checkpoint is being written
    finally:
        for number, handler in before.items():  # a launcher's worker ignores both from then on
            signal.signal(number, handler)


def test_time_limit_ends_the_run():
    clock = iter([0.0, 59.0, 60.0, 61.0])
    signal_handler = DistributedSignalHandler(60.0, now=lambda: next(clock))
    assert [signal_handler.at_boundary(ALONE).exit for _ in range(3)] == [False, False, True]
