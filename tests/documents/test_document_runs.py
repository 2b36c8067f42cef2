"""Every block of command lines of a document, executed as it is printed: in order, in one empty folder.

``--all`` runs every document. The ordinary run takes those that changed since the parent commit, and a part of the
others that depends on the commit, so that each one comes up within some twenty commits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.documents.markdown import Block, blocks, documents
from tests.paths import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
LIMIT_S = 600
# What a cluster's front end would accept; a shim records its command line instead.
FILE_NAME = re.compile(r"# \w+\.py")
PARTS = 7
SUBMITTERS = ("sbatch", "bsub", "kubectl", "docker", "srun", "mpirun")


def runnable(text: str) -> list[Block]:
    return [block for block in blocks(text) if block.language == "bash" and block.reason is None]


def script(parts: list[Block]) -> str:
    """The blocks as one script, which prints the line of the document before each of them."""
    return "".join(f"echo '--- line {block.line}' >&2\n{block.text}" for block in parts)


def files(text: str) -> dict[str, str]:
    """Programs that a document shows: blocks of Python whose first line is the name of a file."""
    named = {block.text.partition("\n")[0]: block.text for block in blocks(text) if block.language == "python"}
    return {name.removeprefix("# "): program for name, program in named.items() if FILE_NAME.fullmatch(name)}


def run(
    parts: list[Block], folder: Path, programs: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    shims = folder / "shims"
    shims.mkdir()
    for name in SUBMITTERS:
        (shims / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {shims}/calls\n')
        (shims / name).chmod(0o755)
    work = folder / "work"
    work.mkdir()
    for name, program in programs.items():
        (work / name).write_text(program)
    paths = (str(shims), str(Path(sys.executable).parent), os.environ["PATH"])
    environment = os.environ | {"PATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script(parts)],
        cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def check_emulation(folder: Path) -> None:
    """The emulated run has all its steps, and moved layers."""
    run = folder / "runs" / "emulated"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "plan_applied" in kinds


def check_own_trainer(folder: Path) -> None:
    """The plan balances what the loop has measured: no large layer shares a stage with another one."""
    plan = json.loads((folder / "plan.json").read_text())
    assert [len([name for name in stage["items"] if int(name[-1]) < 4]) for stage in plan["stages"]] == [1, 1, 1, 1]
    steps = [json.loads(line) for line in (folder / "run" / "profile.jsonl").read_text().splitlines()][1:]
    work = [[sum(times) for times in zip(step["forward_ns"], step["backward_ns"], strict=True)] for step in steps[2:]]
    # Layers are nested in the step.
    assert all(sum(of_step) * 8 <= step["step_ns"] for of_step, step in zip(work, steps[2:], strict=True))
    # The first four have 64 times the products of the others; on a busy machine any one step may be delayed.
    shortest = [min(of_layer) for of_layer in zip(*work, strict=True)]
    assert min(shortest[:4]) > max(shortest[4:])


# What a document claims about its example, beyond that the commands succeed.
CHECKS = {"dynmo_train/pipeline/README.md": check_emulation, "dynmo_balance/inputs/README.md": check_own_trainer}
# The check depends on times of a few milliseconds, which other processes of the machine delay.
MEASURED, ATTEMPTS = ("dynmo_balance/inputs/README.md",), 3


# Documents whose commands print the same on every machine: every line of their output blocks is compared.
EXACT_OUTPUT = (
    "dynmo_balance/README.md",
    "dynmo_balance/planning/README.md",
    "dynmo_balance/simulation/README.md",
    "dynmo_balance/online/README.md",
    "dynmo_balance/analysis/README.md",
    "dynmo_balance/output/README.md",
)


def missing_output(text: str, output: str) -> list[str]:
    """Lines of the output blocks of a document that its commands do not print; ``...`` stands for other lines."""
    printed = set(output.splitlines())
    shown = [line for block in blocks(text) if block.language == "text" for line in block.text.splitlines()]
    return [line for line in shown if line not in ("", "...") and line not in printed]


def with_blocks() -> list[str]:
    return [name for name in documents() if runnable((ROOT / name).read_text(encoding="utf-8"))]


def selected(names: list[str], changed: set[str], commit: str) -> list[str]:
    """The documents that are run for a commit: those that changed, and one part of all of them."""
    part = int(commit, 16) % PARTS
    return [name for position, name in enumerate(sorted(names)) if name in changed or position % PARTS == part]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" not in metafunc.fixturenames:
        return
    names, commit = with_blocks(), git("rev-parse", "HEAD").strip()
    # A shallow clone has no parent commit, and a tree that was just created has no commit.
    if commit and not metafunc.config.getoption("all", default=False):
        names = selected(names, set(git("diff", "--name-only", "HEAD~1").splitlines()), commit)
    metafunc.parametrize("name", names)


def test_document_commands_run_as_printed(name, tmp_path, record_property):
    record_property("documents", name)
    text = (ROOT / name).read_text(encoding="utf-8")
    for attempt in range(1, ATTEMPTS + 1):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done = run(runnable(text), folder, files(text))
        assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-2500:]}"
        try:
            CHECKS.get(name, lambda _: None)(folder / "work")
        except AssertionError:
            if name not in MEASURED or attempt == ATTEMPTS:
                raise
        else:
            break
    if name in EXACT_OUTPUT:
        assert missing_output((ROOT / name).read_text(encoding="utf-8"), f"{done.stdout}\n{done.stderr}") == []


def test_output_that_commands_do_not_print_is_found():
    text = "```bash\necho one\n```\n\n```text\n...\none\ntwo\n```\n"
    assert missing_output(text, "one\n") == ["two"]


def test_failing_block_is_reported_with_its_line(tmp_path):
    parts = runnable("text\n\n```bash\ntrue\n```\n\n```bash\necho wrong >&2; false | cat\n```\n")
    done = run(parts, tmp_path)
    assert done.returncode != 0
    assert done.stderr.splitlines() == ["--- line 3", "--- line 7", "wrong"]


def test_submitters_are_recorded(tmp_path):
    done = run(runnable("```bash\nsbatch --nodes 2 job.sh\n```\n"), tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "shims" / "calls").read_text() == "sbatch --nodes 2 job.sh\n"


def test_changed_documents_and_one_part_of_all_are_selected():
    names = [f"{number:02}.md" for number in range(20)]
    parts = [selected(names, set(), f"{commit:040x}") for commit in range(100, 100 + PARTS)]
    assert sorted(name for part in parts for name in part) == names
    assert {len(part) for part in parts} == {2, 3}
    assert set(selected(names, {"05.md", "other.py"}, f"{100:040x}")) - set(parts[0]) == {"05.md"}


def test_documents_with_commands_are_many():
    assert len(with_blocks()) >= 12
