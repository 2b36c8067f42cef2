"""Damaged inputs of every parser: it returns or raises a documented error, in bounded time and memory.

A short run of each target of ``targets/``; ``bin/fuzz`` is the long one. ``DYNMO_FUZZ_EXAMPLES`` sets the number of
executions of each target. ``regressions/TARGET/`` has inputs that once showed a defect.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.engines import Done, Task, has_atheris, run_hypothesis, run_mutations
from tests.fuzz.execution import Executor, Limits, Page, limited
from tests.fuzz.parsers import EXEMPT, parsers
from tests.fuzz.target import quiet
from tests.fuzz.targets import load_targets
from tests.tables import table

EXAMPLES = int(os.environ.get("DYNMO_FUZZ_EXAMPLES", "20"))
TARGETS = load_targets()
REGRESSIONS = Path(__file__).parent / "regressions"
LIMITS = Limits(seconds=10.0, memory_bytes=512 << 20)


@table("name", TARGETS)
def test_parser_of_damaged_input_raises_only_documented_errors(name, tmp_path):
    if "parquet" in name:
        pytest.importorskip("pyarrow", reason="needs the extra parquet")
    executor = Executor(TARGETS[name], tmp_path, LIMITS)
    executor.warm_up()
    with quiet():
        accepted = []
        for seed in executor.corpus:
            try:
                executor.target.run(seed, executor.folder)
            except Exception as error:
                if not executor.target.is_documented(error):
                    raise
            else:
                accepted.append(seed)
    assert accepted, "no seed is valid, so that mutations reach no rule behind the first"
    messages = []
    for engine, count in ((run_mutations, EXAMPLES + len(executor.corpus)), (run_hypothesis, EXAMPLES)):
        task = Task(target=executor.target.name, begin=0, end=count, seed=0)
        engine(task, executor, Page(tmp_path / "page"), LIMITS, messages.append)
    assert [f"{defect.place}\n{defect.detail}" for defect in messages if not isinstance(defect, Done)] == []


@table("name", sorted(path.name for path in REGRESSIONS.iterdir()))
def test_input_that_once_showed_a_defect_raises_a_documented_error(name, tmp_path):
    made = Executor(TARGETS[name], tmp_path, LIMITS)
    made.warm_up()
    with quiet(), limited(LIMITS):
        found = [made.execute(path.read_bytes()) for path in sorted((REGRESSIONS / name).glob("*.input"))]
    assert found
    assert [defect.detail for defect in found if defect is not None] == []


def test_every_parser_has_a_target_or_a_reason():
    known = set(parsers())
    covered = {reader for target in TARGETS.values() for reader in target.readers}
    assert sorted(known - covered - EXEMPT.keys()) == [], "add a target, or an entry of EXEMPT with a reason"
    assert sorted(EXEMPT.keys() - known) == []
    assert sorted(EXEMPT.keys() & covered) == []


@pytest.mark.skipif(not has_atheris(), reason="needs the extra fuzz")
def test_atheris_executes_a_target(tmp_path):
    from tests.fuzz import campaign

    words = ["--engine", "atheris", "--target", "tools.io.jsonl.parse_line", "--executions", "200"]
    assert campaign.main([*words, "--output", str(tmp_path)]) == 0
