"""Killed at any moment, a save or a conversion leaves either nothing or something whole."""

import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynmo_ckpt.console import progress
from dynmo_ckpt.verify import full_findings
from dynmo_train.checkpoint import find_checkpoint, remove_stale_staging

UNIT = Path(__file__).parents[1] / "unit"
KILLS = int(os.environ.get("DYNMO_TEST_KILLS", "6"))
SAVES = """
import runpy, sys
from pathlib import Path
from dynmo_train.checkpoint import prune
build = runpy.run_path(sys.argv[1])
for step in range(int(sys.argv[3]), 10_000):
    build["save"](Path(sys.argv[2]), step)
    prune(Path(sys.argv[2]), 2)
    print(step, flush=True)
"""


def start(program, *args):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def is_whole(directory):
    with progress("test", 0, "MB") as tick:
        return list(full_findings(directory, tick)) == []


def test_the_latest_save_can_always_be_loaded(tmp_path):
    rng = random.Random(0)
    step = 1
    for _ in range(max(2, KILLS // 3)):
        process = start(SAVES, UNIT / "train_checkpoint" / "build.py", tmp_path, step)
        process.stdout.readline()
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.communicate()
        found = find_checkpoint(tmp_path)
        assert is_whole(found)
        named = tmp_path / (tmp_path / "LATEST").read_text().strip()
        assert found == named
        step = int(named.name.removeprefix("step-")) + 1
        remove_stale_staging(tmp_path)
        assert all(is_whole(child) for child in tmp_path.iterdir() if child.is_dir())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_merge_is_there_whole_or_not_at_all(tmp_path, sent):
    build = runpy.run_path(str(UNIT / "ckpt" / "build.py"))
    m = build["model"](hidden_size=128, ffn_hidden_size=512, vocab_size=4000, padded_vocab_size=4096)
    p = build["parameters"](m)
    build["save"](tmp_path / "in", p | build["optimizer_state"](p), m, tp=2)
    rng = random.Random(int(sent))
    target = tmp_path / "out"
    for _ in range(KILLS):
        process = start("from dynmo_ckpt.cli import main; main()", "merge", tmp_path / "in", target, "--overwrite")
        time.sleep(0.15 + rng.random() * 0.45)
        process.send_signal(sent)
        process.communicate(timeout=30)
        assert not target.exists() or is_whole(target)
        if sent is not signal.SIGKILL:
            assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
