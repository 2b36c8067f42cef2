"""Killed at any call that touches files, a save or a conversion leaves either nothing or something whole.

A process counts the calls that it makes to the file system, in all its threads, and sends itself the signal at a drawn
count. ``DYNMO_TEST_KILLS`` is the number of draws.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from dynmo_ckpt._common.console import progress
from dynmo_ckpt.operations.verify import full_findings
from dynmo_train.formats.checkpoint import find_checkpoint, remove_stale_staging
from tests.paths import ROOT
from tests.unit.dynmo_ckpt import native_checkpoints

pytestmark = pytest.mark.complete

KILLS = int(os.environ.get("DYNMO_TEST_KILLS", "6"))

# Forked, so that what is imported once serves every run; nothing here has started a thread before.
DRIVER = """
import json, os, sys, threading
from pathlib import Path

def counted(work, number, at):
    "Run work() in a child that signals itself at the call number at; its exit code, and the calls of a whole run."
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(text or 0)
    calls, lock = [0], threading.Lock()

    def count(frame, event, function):
        if event == "c_call" and (function.__module__ == "posix" or type(function.__self__).__module__ == "_io"):
            with lock:
                calls[0] += 1
                due = calls[0] == at
            if due:
                os.kill(os.getpid(), number)

    code, nowhere = 1, os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        code = work()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.setprofile(None)
        os.write(writer, str(calls[0]).encode())
        os._exit(code)
"""

SAVES = (
    DRIVER
    + """
from dynmo_train.formats.checkpoint import prune
from tests.unit.dynmo_train.formats.checkpoint import small_run
folder, first, number, at = Path(sys.argv[1]), *map(int, sys.argv[2:])

def work():
    for step in range(first, first + 3):
        small_run.save(folder, step)
        prune(folder, 2)
    return 0

print(json.dumps(counted(work, number, at)))
"""
)

MERGES = (
    DRIVER
    + """
from dynmo_ckpt import cli
from dynmo_ckpt.operations import convert  # noqa
source, target, number, at = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
sys.argv = ["dynmo-ckpt", "merge", source, target, "--overwrite"]
print(json.dumps(counted(lambda: cli.main(), number, at)))
"""
)


def run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def is_whole(directory):
    with progress("test", 0, "MB") as tick:
        return list(full_findings(directory, tick)) == []


def test_save_killed_at_any_point_leaves_a_loadable_checkpoint(tmp_path):
    code, calls = run(SAVES, tmp_path / "whole", 1, signal.SIGKILL, 0)
    assert code == 0
    rng = random.Random(0)
    folder, step = tmp_path / "killed", 1
    for _ in range(max(2, KILLS // 3)):
        # Behind the first of three saves: there is always one to find.
        at = rng.randrange(calls // 3 + 10, calls - 5)
        assert run(SAVES, folder, step, signal.SIGKILL, at)[0] == -signal.SIGKILL
        found = find_checkpoint(folder)
        assert is_whole(found)
        named = folder / (folder / "LATEST").read_text().strip()
        assert found == named
        step = int(named.name.removeprefix("step-")) + 1
        remove_stale_staging(folder)
        assert all(is_whole(child) for child in folder.iterdir() if child.is_dir())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_merge_killed_at_any_point_is_complete_or_absent(tmp_path, sent):
    m = native_checkpoints.model(hidden_size=128, ffn_hidden_size=512, vocab_size=4000, padded_vocab_size=4096)
    p = native_checkpoints.parameters(m)
    native_checkpoints.save(tmp_path / "in", p | native_checkpoints.optimizer_state(p), m, tp=2)
    rng = random.Random(int(sent))
    target = tmp_path / "out"
    code, calls = run(MERGES, tmp_path / "in", target, sent, 0)
    assert code == 0
    assert is_whole(target)
    ended = {signal.SIGKILL: {-9}, signal.SIGTERM: {143, 0}, signal.SIGINT: {130, 0}}[sent]
    codes = set()
    for _ in range(KILLS):
        code, _ = run(MERGES, tmp_path / "in", target, sent, rng.randrange(1, calls * 9 // 10))
        codes.add(code)
        assert not target.exists() or is_whole(target)
        if sent is not signal.SIGKILL:
            assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert codes <= ended
    assert codes != {0}, "no signal has ended a merge"
