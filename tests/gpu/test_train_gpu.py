"""The benchmark of one device, tried where there is none: the script alone, at sizes that mean nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "train_gpu.py"


@pytest.mark.distributed
def test_train_gpu_script_on_a_cpu_prints_its_rows():
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--device", "cpu", "--repeats", "1", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "nanoGPT is left out" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ceiling: ")
    assert lines[-1].startswith("| ours | ")


@pytest.mark.distributed
def test_train_gpu_script_on_a_cpu_extrapolates_a_llama():
    command = [
        sys.executable,
        str(SCRIPT),
        "--shape",
        "tiny-llama",
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--steps",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:2] == "| "]
    assert [row[:2] for row in rows[1:3]] == [["ours, measured", "1"], ["ours, measured", "2"]]
    # At this size the noise of the machine can be more than a layer.
    assert rows[3][0] in ("ours, extrapolated", "ours, not extrapolated: the deeper model took less time")
    assert (rows[3][1], len(rows)) == ("8", 4)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("train_gpu")


def test_whole_step_adds_layers_to_the_measured_ones(script):
    assert script.whole_step_s({4: 1.4, 2: 1.0}, 32) == pytest.approx(7.0)
    assert script.whole_step_s({2: 1.0, 4: 0.9}, 32) is None


def test_train_gpu_operations_of_llama_8b_are_those_of_torchtitan(script):
    assert script.mfu_operations(script.SHAPES["llama-8B"]) == pytest.approx(5.79e10, rel=2e-3)
