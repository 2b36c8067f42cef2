"""The README's run at scale on few cores: its command lines, on two workers and four layers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "dynmo_train" / "README.md").read_text(encoding="utf-8")
SMALLER = {
    "--layers 24 --workers 8": "--layers 4 --workers 2",
    "--nproc 8": "--nproc 2",
    "--num-layers 24": "--num-layers 4",
    "--global-batch-size 32": "--global-batch-size 8",
    "--emulate-scale 10": "--emulate-scale 1",
}


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_readme_emulation_example_runs(tmp_path):
    lines = README[README.index("dynmo-prep sample-corpus --output data/corpus.jsonl") :].partition("\n```")[0]
    for written, small in SMALLER.items():
        assert lines.count(written) == 1
        lines = lines.replace(written, small)
    done = subprocess.run(
        ["bash", "-euc", f"{lines.rstrip()} --run-dir run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert "plan_applied" in kinds
