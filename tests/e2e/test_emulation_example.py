"""The run at scale on few cores of the pipeline's guide: its command lines, exactly as printed."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.paths import ROOT

GUIDE = (ROOT / "dynmo_train" / "pipeline" / "README.md").read_text(encoding="utf-8")


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_emulation_example_runs_as_printed(tmp_path):
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.M | re.S)
    data = [line for line in blocks[0].splitlines() if line.startswith("dynmo-prep")]
    (emulation,) = [block for block in blocks if "--emulate" in block]
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*data, emulation])],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = tmp_path / "runs" / "emulated"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "plan_applied" in kinds
