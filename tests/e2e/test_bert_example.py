"""``bin/bert_example.sh`` with a smaller model: sample data, pruning, balancing and release of ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.complete

SCRIPT = Path(__file__).parents[2] / "bin" / "bert_example.sh"
SMALL = {
    "CORPUS_BYTES": "60000",
    "HIDDEN_SIZE": "16",
    "ATTENTION_HEADS": "2",
    "SEQ_LENGTH": "32",
    "MICRO_BATCH_SIZE": "2",
    "GLOBAL_BATCH_SIZE": "8",
    "TRAIN_ITERS": "14",
    "PACK_TO": "1",
}


def example(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **SMALL, "DYNMO_SETUP": "no", "DYNMO_BERT_DIR": str(folder)}
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.timeout(900)
def test_bert_example_prunes_balances_and_releases(tmp_path):
    done = example(tmp_path, "4", "diffusion_param", "2", "1", "--balance-lockstep", "--eval-iters", "0")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = tmp_path / "run"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "pruned"] == [2, 4, 6, 8, 10]
    assert [event["workers"] for event in events if event["kind"] == "released"] == [[1]]
    manifest = json.loads((run / "checkpoints" / "step-00000014" / "manifest.json").read_text())
    assert manifest["model"]["family"] == "bert"
    assert manifest["topology"]["pipeline_parallel_size"] == 1
    assert manifest["dynamic"]["pruning"]["sparsity"] == pytest.approx(0.9, abs=0.01)


def test_bert_example_invalid_size_is_refused(tmp_path):
    done = example(tmp_path, "24", "diffusion", "four", "1")
    assert done.returncode == 2
    assert "got four" in done.stderr
