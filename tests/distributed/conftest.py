"""Distributed tests leave no process behind."""

from __future__ import annotations

import subprocess

import pytest


@pytest.fixture(autouse=True)
def _started_processes_end(monkeypatch):
    """Kill what a failed test has started; a launcher's workers end with their launcher."""
    started: list[subprocess.Popen] = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
