"""Both levels of the suite: every test module is collected, and a module of the claims is there for a reason."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import suite
from tests.levels import IS_COMPLETE
from tests.mutants.mutate import read_table
from tests.paths import ROOT

TEST = re.compile(r"^ *(?:async )?def test_\w+", re.MULTILINE)
# Tests of the documents, of the structure and of the tests themselves: no fault of a package could name them. Those of
# a GPU skip without one.
EXEMPT = (
    *("tests/arch/", "tests/documents/", "tests/mutants/", "tests/equality/", "tests/gpu/"),
    "tests/distributed/test_workers.py",
)
NAME = re.compile(r"\btest_\w+\.py")


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def modules_of_tests() -> dict[str, str]:
    """Text of each test module by its path."""
    names = [name for name in tracked("*test_*.py") if Path(name).name.startswith("test_")]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names}


def never_collected(name: str, text: str, ignored_folders: list[str]) -> bool:
    folders = Path(name).parts[:-1]
    is_ignored = any(fnmatch.fnmatch(folder, pattern) for folder in folders for pattern in ignored_folders)
    return is_ignored or folders[:1] != ("tests",) or TEST.search(text) is None


def test_every_test_module_is_collected():
    ignored = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["norecursedirs"]
    modules = modules_of_tests()
    assert len(modules) > 150
    assert [name for name, text in modules.items() if never_collected(name, text, ignored)] == []


@pytest.mark.parametrize("name", ["tests/venv/test_a.py", "dynmo_train/test_a.py", "tests/.a/test_b.py"])
def test_module_that_is_never_collected_is_found(name):
    assert never_collected(name, "def test_a(): ...", [".*", "venv"])
    assert never_collected("tests/test_a.py", "def helper(): ...", [])
    assert not never_collected("tests/test_a.py", "def test_a(): ...", [".*", "venv"])


def test_module_of_the_claims_is_named_by_a_mutant_or_a_document():
    named = {test.partition("::")[0] for mutant in read_table() for test in mutant.tests}
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in tracked("README.md", "dynmo_*/README.md")]
    cited = {name for text in texts for name in NAME.findall(text)}
    claims = {name for name, text in modules_of_tests().items() if not IS_COMPLETE.search(text)}
    assert [n for n in sorted(claims - named) if not n.startswith(EXEMPT) and Path(n).name not in cited] == []


def test_mutant_is_caught_by_the_claims():
    complete = {name for name, text in modules_of_tests().items() if IS_COMPLETE.search(text)}
    named = {mutant.name: {test.partition("::")[0] for test in mutant.tests} for mutant in read_table()}
    assert {name for name, tests in named.items() if tests <= complete} == set()


ORPHAN = """
import os, time
if os.fork() == 0:
    while time.process_time() < 0.4:
        pass
"""


def test_processor_time_includes_processes_without_a_parent(tmp_path):
    script = "from tests.suite import *; become_subreaper(); print(run_counted({'a': [PYTHON, *sys.argv[1:]]}))"
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command = [sys.executable, "-c", script, str(tmp_path / "orphan.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert float(re.search(r"processor_s=([\d.]+)", done.stdout)[1]) > 0.35


@pytest.mark.parametrize(
    ("arguments", "processor_s", "code"),
    [([], suite.LIMIT_S - 1, 0), ([], suite.LIMIT_S + 1, 1), (["tests/unit"], suite.LIMIT_S + 1, 0)],
)
def test_claims_above_the_limit_of_processor_time_fail(monkeypatch, capsys, arguments, processor_s, code):
    result = suite.Result(name="tests", code=0, wall_s=900.0, processor_s=processor_s)
    monkeypatch.setattr(suite, "become_subreaper", lambda: None)
    monkeypatch.setattr(suite, "claims", lambda _: [result])
    assert suite.main(arguments) == code
    assert f"processor time in all: {processor_s} s" in capsys.readouterr().out


def test_complete_level_runs_every_step_and_fails_with_one(monkeypatch, capsys):
    ran = []
    for name in suite.STEPS:
        result = suite.Result(name=name, code=3 * (name == "mutants"), wall_s=1.0, processor_s=1.0)
        monkeypatch.setitem(suite.STEPS, name, lambda result=result: ran.append(result.name) or [result])
    monkeypatch.setattr(suite, "become_subreaper", lambda: None)
    assert suite.main(["--all"]) == 1
    assert ran == list(suite.STEPS)
    assert re.search(r"mutants +exit code 3", capsys.readouterr().out)
    assert suite.main(["--all", "--step", "faults", "--step", "fuzz"]) == 0
    assert ran[len(suite.STEPS) :] == ["faults", "fuzz"]
    assert suite.main(["--all", "--step", "none"]) == 2
    assert suite.main(["--step", "faults"]) == 2
    assert suite.main(["--all", "--step", "faults", "tests/unit"]) == 2
    assert ran[len(suite.STEPS) :] == ["faults", "fuzz"]


@pytest.mark.parametrize("script", ["bench", "fault-campaign", "fuzz", "quickstart", "test"])
def test_help_of_a_script_installs_nothing(tmp_path, script):
    environment = {"PATH": os.environ["PATH"], "DYNMO_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["bash", f"bin/{script}", "--help"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"bin/{script}" in done.stdout
    assert not (tmp_path / "venv").exists()
