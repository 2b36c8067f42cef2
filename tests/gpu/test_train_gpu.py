"""The benchmark of one device, tried where there is none: the script alone, at sizes that mean nothing."""

from __future__ import annotations

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
