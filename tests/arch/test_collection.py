"""Every test module of the repository is collected by the ordinary run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def collected_modules(*arguments: str) -> set[str]:
    """Paths, relative to the root, of the modules from which ``pytest --collect-only`` collects at least one test."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}


def test_collection_of_the_repository_includes_every_test_module():
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*test_*.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    modules = {name for name in tracked.stdout.splitlines() if Path(name).name.startswith("test_")}
    assert len(modules) > 150
    assert modules - collected_modules() == set()
