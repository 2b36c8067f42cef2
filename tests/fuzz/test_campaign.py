"""``bin/fuzz`` finds planted defects of each kind, saves inputs that show them again, and is deterministic."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.fuzz.campaign import EXIT_DEFECTS, EXIT_USAGE
from tests.paths import ROOT

pytestmark = pytest.mark.complete

KINDS = {"key-error": "error", "loop": "hang", "loop-in-c": "hang", "allocation": "memory", "crash": "crash"}


def fuzz(*words):
    command = [sys.executable, "-m", "tests.fuzz.campaign", "--module", "tests.fuzz.planted", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", KINDS)
def test_planted_defect_is_found_and_replayed(tmp_path, name):
    done = fuzz("--target", name, "--executions", 4, "--seconds", 0.3, "--output", tmp_path)
    assert done.returncode == EXIT_DEFECTS, done.stderr
    assert f"{name}: {KINDS[name]}: " in done.stdout
    (saved,) = (tmp_path / name).glob("*.input")
    assert saved.name.startswith(KINDS[name])
    if KINDS[name] in ("error", "memory"):
        again = fuzz("--replay", saved)
        assert again.returncode == EXIT_DEFECTS
        assert f"{saved}: {KINDS[name]}: " in again.stdout


def test_engine_hypothesis_finds_a_planted_defect(tmp_path):
    done = fuzz("--target", "key-error", "--engine", "hypothesis", "--executions", 20, "--output", tmp_path)
    assert "key-error: error: KeyError tests/fuzz/planted.py:_key_error" in done.stdout


def test_sound_parser_has_no_defect(tmp_path):
    done = fuzz("--target", "sound", "--executions", 1500, "--parallel", 2, "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\| sound \| 1,500 \| [\d,]+ \| 0 \|", done.stdout)
    assert not any(tmp_path.iterdir())


def test_two_campaigns_with_a_seed_save_the_same_inputs(tmp_path):
    for number in (1, 2):
        fuzz("--target", "key-error", "--executions", 3, "--seed", 7, "--output", tmp_path / str(number))
    first, second = ([path.name for path in sorted((tmp_path / n).rglob("*.input"))] for n in ("1", "2"))
    assert first == second != []


def test_unknown_target_is_refused():
    done = fuzz("--target", "none.*")
    assert done.returncode == 2
    assert "--target none.*: matches no target" in done.stderr


def test_number_of_executions_below_one_is_refused():
    done = fuzz("--executions", 0)
    assert done.returncode == EXIT_USAGE
    assert "--executions 0: must be above 0" in done.stderr
