"""The live view of a run on two processes, from before its start to its end."""

from __future__ import annotations

import pytest

from tests.distributed.whole_runs import train, write_data
from tests.unit.dynmo_train.trainer.monitoring.pseudo_terminal import Terminal

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]


def test_live_view_follows_a_run_through_a_resume(tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    shown = Terminal("--every-s", "0.2", run, size=(120, 36))
    try:
        shown.wait_for("waiting for run.json")
        train(data, run, 2, exit_interval="12", save_interval="6")
        shown.wait_for("step 12 of 24 | running")
        shown.resize(80, 30)
        shown.wait_for("── Plans ".ljust(80, "─") + "\n")
        shown.wait_for("2 workers active")
        shown.wait_for("saved step-00000012")
        shown.drain()
        assert max(map(len, shown.display.lines)) <= 80
        train(data, run, 2, "--load", str(run), save_interval="6")
        code, output = shown.end()
        assert code == 0
        assert "\x1b[?1049l" in output
        assert "step 24 of 24 | done" in shown.display.lines[0]
    finally:
        shown.close()
