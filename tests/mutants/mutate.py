"""Check of the checks: apply named faults to a copy of the project and see that the ordinary tests catch each of them.

``mutants.toml`` is the table. A mutant replaces one piece of text in one file and names the tests that must fail::

    table ──> copy of the tree, one text replaced ──> pytest on the named tests ──> caught by TEST in N s
                                                                              └──> survived: a hole in the tests

Before that the same tests run on an unchanged copy, so that a test that fails anyway catches nothing.

    python tests/mutants/mutate.py                     # all; prints one line a mutant
    python tests/mutants/mutate.py tied-gradient crc   # those whose name contains one of the words

Exit code 0: all were caught; 1: some survived, or their tests could not run; 2: usage.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TABLE = FOLDER / "mutants.toml"
TIMEOUT_S = 900
FAILED, PASSED = 1, 0  # exit codes of pytest; any other one means that the tests did not run


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A named fault: in ``file`` the text ``old``, which occurs once, becomes ``new``; ``tests`` must fail then.

    ``quick`` mutants run in each ordinary test run. ``claim`` is the claim of the README that the fault disproves.
    """

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    quick: bool = False
    claim: str = ""

    @property
    def package(self) -> str:
        """The package that has the fault."""
        return self.file.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tests of a mutant did: the first one that failed, or why none could."""

    mutant: Mutant
    is_caught: bool
    caught_by: str
    seconds: float


def read_table(path: Path = TABLE) -> list[Mutant]:
    """The mutants of the table, in its order."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def problems_of(mutant: Mutant) -> list[str]:
    """Why a mutant cannot be applied to this tree; empty where it can."""
    path = ROOT / mutant.file
    if not path.is_file():
        return [f"{mutant.name}: {mutant.file} does not exist"]
    found = path.read_text(encoding="utf-8").count(mutant.old)
    problems = [] if found == 1 else [f"{mutant.name}: its text occurs {found} times in {mutant.file}, not once"]
    if mutant.old == mutant.new:
        problems.append(f"{mutant.name}: changes nothing")
    missing = [name for name in mutant.tests if not (ROOT / name.partition("::")[0]).is_file()]
    return [*problems, *(f"{mutant.name}: no test file {name}" for name in missing)]


def copy_tree(target: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run pytest on the copy in ``tree``, up to the first failure; its exit code and output."""
    # The copy comes first on the path of each process that the tests start, before an editable installation.
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if (ROOT.parent / "shared" / "data").is_dir():
        variables.setdefault("DYNMO_SHARED_DATA", str(ROOT.parent / "shared" / "data"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return FAILED, f"FAILED {tests[0]}::no end within {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def run_mutant(mutant: Mutant) -> Outcome:
    """Apply a mutant to a copy and run its tests."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        path = tree / mutant.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        started = time.perf_counter()
        code, output = run_tests(tree, mutant.tests)
        seconds = time.perf_counter() - started
    if code == FAILED:
        first = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
        return Outcome(
            mutant=mutant, is_caught=True, caught_by=first[1] if first else "a failing test", seconds=seconds
        )
    why = "survived" if code == PASSED else f"tests did not run (pytest's exit code {code}):\n{output[-2000:]}"
    return Outcome(mutant=mutant, is_caught=False, caught_by=why, seconds=seconds)


def failing_before(tests: Iterable[tuple[str, ...]]) -> list[str]:
    """The tests, of those named, that fail on an unchanged copy."""
    failing = []
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for names in sorted(set(tests)):
            code, output = run_tests(tree, names)
            if code != PASSED:
                failing.append(f"{' '.join(names)}: exit code {code} without any fault\n{output[-2000:]}")
    return failing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    parser = argparse.ArgumentParser(description="See that the tests catch the named faults of mutants.toml.")
    parser.add_argument("names", nargs="*", help="run the mutants whose name contains one of these; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--skip-baseline", action="store_true", help="do not run the tests without any fault first")
    options = parser.parse_args(arguments)
    mutants = [m for m in read_table() if not options.names or any(word in m.name for word in options.names)]
    if not mutants:
        parser.error(f"no mutant has {' or '.join(options.names)} in its name")
    problems = [problem for mutant in mutants for problem in problems_of(mutant)]
    if not problems and not options.skip_baseline:
        problems = failing_before(mutant.tests for mutant in mutants)
    if problems:
        print("\n".join(problems), file=sys.stderr)  # noqa: T201 - a script
        return 1
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(run_mutant, mutants):
            outcomes.append(outcome)
            verdict = "caught" if outcome.is_caught else "NOT CAUGHT"
            print(  # noqa: T201 - a script
                f"{verdict}: {outcome.mutant.name} | {outcome.caught_by} | {outcome.seconds:.1f} s", flush=True
            )
    caught = sum(outcome.is_caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} mutants caught")  # noqa: T201 - a script
    return 0 if all(outcome.is_caught for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
