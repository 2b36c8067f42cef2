"""Compare two commits by what a user can see: training bits, outputs, verdicts, plans, checkpoints, scripts, help.

    python tests/compare_commits.py OLD NEW [--area runs --area plans ...] [--count N] [--records DIR] [--accepted FILE]
    python tests/compare_commits.py record COMMIT -o DIR [--inputs DIR]     # keep what a commit shows
    python tests/compare_commits.py compare DIR DIR                         # compare two such folders

OLD, NEW and COMMIT are commits, or paths of folders (with a slash). Exits with 0 if all is equal, 1 if something
differs, 2 for a wrong use. Only the four commands, formats and documents of a tree are used, never its modules, so
that commits with other modules can be compared. `tests/equality/inputs.py` makes the inputs once for both; a record
keeps them, so that ``record NEW -o new --inputs old`` gives a later commit the same ones.

Processor time of one tree (2026-11-28, two cores of a busy machine, so only processor time is given):

| area | keys | seconds |
|---|---|---|
| help | 196 | 10 |
| dry_runs | 15 of `--count 5` | 2 |
| plans | 1,000 | 95 |
| verdicts | 1,851 | 297 |
| checkpoints | 76 of `--count 9` | 30 |
| documents | 24 of six of dynmo_tools, 21 of four of dynmo_train | 41, 141 |
| runs | 200 | 428 |
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.equality.areas import AREAS  # noqa: E402 - the root has to be on the path
from tests.equality.inputs import make  # noqa: E402
from tests.equality.records import Record, compare, read_accepted, read_record  # noqa: E402
from tests.equality.trees import MissingCommitError, Tree, checkout  # noqa: E402


def print_progress(text: str) -> None:
    """Print progress on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def make_inputs(folder: Path, old: Path, areas: Sequence[str], given: argparse.Namespace) -> None:
    """Make the inputs of areas in a folder.

    Args:
        folder: of all inputs; areas that it has already are left as they are.
        old: tree whose documents and scripts are executed.
        areas: names.
        given: the options of the command line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for area in areas:
        if not (folder / f"{area}.json").exists():
            print_progress(f"{area}: make inputs")
            made = make(area, folder, old, count=given.count, only=given.only, scripts=given.scripts)
            (folder / f"{area}.json").write_text(json.dumps(made, indent=1), encoding="utf-8")


def digest_of_inputs(folder: Path, area: str) -> str:
    """A digest of the inputs of an area: of their list and of their files."""
    found = hashlib.sha256((folder / f"{area}.json").read_bytes())
    for path in sorted((folder / area).rglob("*")) if (folder / area).exists() else ():
        if path.is_file():
            found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def record(root: Path, inputs: Path, output: Path, areas: Sequence[str], jobs: int) -> None:
    """Execute the inputs in a tree and write a record of each area.

    Args:
        root: the tree.
        inputs: of ``make_inputs``.
        output: folder of the records.
        areas: names.
        jobs: number of commands at the same time.
    """
    output.mkdir(parents=True, exist_ok=True)
    for area in areas:
        begin, before = time.monotonic(), os.times()
        with tempfile.TemporaryDirectory(prefix="dynmo-equality-") as place:
            tree = Tree(root, Path(place), jobs)
            found = Record(area=area, inputs=digest_of_inputs(inputs, area))
            try:
                AREAS[area](tree, inputs, json.loads((inputs / f"{area}.json").read_text(encoding="utf-8")), found)
                found.write(output)
            finally:
                tree.close()
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        print_progress(
            f"{area}: {len(found.values)} keys, {time.monotonic() - begin:.0f} s, {spent:.0f} s of processor time"
        )


def compare_records(old: Path, new: Path, areas: Sequence[str] | None, accepted: Path | None) -> int:
    """Compare the records of two folders; the exit code."""
    both = {path.stem for path in old.glob("*.jsonl")} & {path.stem for path in new.glob("*.jsonl")}
    chosen = [area for area in AREAS if area in both and (not areas or area in areas)]
    missing = sorted(set(areas or ()) - set(chosen))
    if missing or not chosen:
        print_progress(
            f"error: {old} and {new} have no records of {', '.join(missing) or 'one area'}; write them with 'record'"
        )
        return 2
    patterns = read_accepted(accepted)
    differ = False
    for area in chosen:
        found = compare(read_record(old / f"{area}.jsonl"), read_record(new / f"{area}.jsonl"), patterns)
        differ |= bool(found.differences)
        text = "".join(f"{line}\n" for line in found.report())
        sys.stdout.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stdout.flush()
    return int(differ)


def compare_commits(given: argparse.Namespace, place: Path) -> int:
    """Record both commits and compare them; the exit code."""
    areas, records = given.area or list(AREAS), given.records or place / "records"
    if given.records and records.exists() and any(records.iterdir()):
        print_progress(f"error: --records {records}: must be empty or absent")
        return 2
    trees = {name: checkout(commit, place / name) for name, commit in (("old", given.old), ("new", given.new))}
    make_inputs(records / "inputs", trees["old"], areas, given)
    for name, root in trees.items():
        print_progress(f"{name}: {getattr(given, name)}")
        record(root, records / "inputs", records / name, areas, given.jobs)
    return compare_records(records / "old", records / "new", areas, given.accepted)


def record_commit(given: argparse.Namespace, place: Path) -> int:
    """Record one commit; the exit code."""
    areas = given.area or list(AREAS)
    root = checkout(given.commit, place / "tree")
    if given.inputs:
        lacking = [area for area in areas if not (given.inputs / "inputs" / f"{area}.json").exists()]
        if lacking:
            print_progress(
                f"error: --inputs {given.inputs}: has no inputs of {', '.join(lacking)}; choose areas with --area"
            )
            return 2
        shutil.copytree(given.inputs / "inputs", given.output / "inputs", dirs_exist_ok=True)
    make_inputs(given.output / "inputs", root, areas, given)
    record(root, given.output / "inputs", given.output, areas, given.jobs)
    return 0


def _parser(*, command: str) -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="compare_commits.py", description=lines[0])
    parser.add_argument("--area", action="append", choices=list(AREAS), help="compare this area; repeatable")
    if command != "compare":
        parser.add_argument("--count", type=int, help="number of runs, plans, cases, ... of an area")
        parser.add_argument(
            "--only", metavar="PATTERN", help="names of the runs, plans, cases, ... of an area, such as '17*'"
        )
        parser.add_argument("--scripts", type=Path, help="folder of more scripts for dry runs")
        parser.add_argument("--jobs", type=int, default=2, help="commands at the same time")
    if command != "record":
        parser.add_argument("--accepted", type=Path, help="intended differences: lines 'AREA KEY: reason'")
    if command == "record":
        parser.add_argument("commit")
        parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
        parser.add_argument("--inputs", type=Path, help="folder of an earlier record whose inputs are used")
    elif command == "compare":
        parser.add_argument("old", type=Path)
        parser.add_argument("new", type=Path)
    else:
        parser.add_argument("old")
        parser.add_argument("new")
        parser.add_argument("--records", type=Path, help="keep inputs and records in this folder")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command line; the exit code."""
    command = words[0] if words[:1] and words[0] in ("record", "compare") else "commits"
    given: Any = _parser(command=command).parse_args(words[command != "commits" :])
    if command == "compare":
        return compare_records(given.old, given.new, given.area, given.accepted)
    if (given.count is not None and given.count < 1) or given.jobs < 1:
        print_progress("error: --count and --jobs must be at least 1")
        return 2
    with tempfile.TemporaryDirectory(prefix="dynmo-equality-") as place:
        try:
            return (record_commit if command == "record" else compare_commits)(given, Path(place))
        except (MissingCommitError, ValueError) as error:
            print_progress(f"error: {error}")
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
