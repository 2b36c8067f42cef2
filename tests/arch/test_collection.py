"""Every test module of the repository is collected by the ordinary run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def collected_modules(*arguments: str) -> set[str]:
    """Paths, relative to the root, of the modules from which ``pytest --collect-only`` collects at least one test."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}


def modules_of_this_run(session: pytest.Session) -> set[str] | None:
    """The same of the run that this test is part of, without a second collection; None where it runs less than all."""
    whole = {(ROOT / argument).resolve() for argument in session.config.args} <= {ROOT, ROOT / "tests"}
    if not whole or session.config.getoption("keyword") or session.config.getoption("markexpr"):
        return None
    return {item.path.relative_to(ROOT).as_posix() for item in session.items}


def test_collection_of_the_repository_includes_every_test_module(request):
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*test_*.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    modules = {name for name in tracked.stdout.splitlines() if Path(name).name.startswith("test_")}
    assert len(modules) > 150
    assert modules - (modules_of_this_run(request.session) or collected_modules()) == set()
