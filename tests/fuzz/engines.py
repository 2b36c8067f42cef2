"""Where inputs come from: seeded mutations, hypothesis, or the coverage-guided atheris (libFuzzer).

Each engine is a function that executes the executions ``begin`` to ``end`` of a target in this process, and is
deterministic: the same seed, target and numbers give the same inputs. atheris also learns from the executions before,
so that its inputs depend on the size of a task.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.execution import Defect, Executions, Executor, Limits, Page, limited
from tests.fuzz.mutations import MAX_BYTES, mutate
from tests.fuzz.target import quiet


@dataclass(frozen=True, kw_only=True)
class Task:
    """Executions ``begin`` to ``end`` of a target."""

    target: str
    begin: int
    end: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Done:
    """A task has ended: its number of executions, and the processor time in seconds that they took."""

    executions: int
    seconds: float


Report = Callable[[Defect | Done], None]
Engine = Callable[[Task, Executor, Page, Limits, Report], None]


def _finish(executions: Executions, started: float, report: Report) -> None:
    report(Done(executions=executions.count, seconds=time.process_time() - started))


def mutated(task: Task, executor: Executor) -> Iterator[bytes]:
    """The inputs of a task; the first executions of a target are its seeds."""
    for number in range(task.begin, task.end):
        if number < len(executor.corpus):
            yield executor.corpus[number]
        else:
            yield mutate(executor.corpus, random.Random(f"{task.seed} {task.target} {number}"))


def run_mutations(task: Task, executor: Executor, page: Page, limits: Limits, report: Report) -> None:
    """Mutations by a seeded generator: the fastest engine."""
    executions, started = Executions(executor, page, report), time.process_time()
    with quiet(), limited(limits):
        for data in mutated(task, executor):
            executions.run(data)
    _finish(executions, started, report)


def run_hypothesis(task: Task, executor: Executor, page: Page, limits: Limits, report: Report) -> None:
    """The same mutations, whose choices hypothesis makes, and any bytes."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    executions, started = Executions(executor, page, report), time.process_time()
    source = st.randoms(use_true_random=False).map(lambda numbers: mutate(executor.corpus, numbers))

    @seed(zlib.crc32(f"{task.seed} {task.target} {task.begin}".encode()))
    @settings(
        max_examples=task.end - task.begin,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(source, source, source, st.binary(max_size=200)))
    def test(data: bytes) -> None:
        executions.run(data)

    with quiet(), limited(limits):
        test()
    _finish(executions, started, report)


def run_atheris(task: Task, executor: Executor, page: Page, limits: Limits, report: Report) -> None:
    """libFuzzer, guided by the coverage of the project's packages; ends the process, as libFuzzer does."""
    import atheris

    executions, started = Executions(executor, page, report), time.process_time()

    def one_input(data: bytes) -> None:
        # Only here: libFuzzer's own memory grows with its corpus, and an allocation of its that fails ends the process.
        with limited(limits):
            executions.run(data)
        if executions.count >= task.end - task.begin:
            _finish(executions, started, report)
            os._exit(0)

    def mutator(data: bytes, max_size: int, number: int) -> bytes:
        if number % 3 == 0:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(executor.corpus, random.Random(number), data or executor.corpus[0])[:max_size]

    folder = Path(f"{executor.folder}-corpus")
    folder.mkdir()
    for number, seed in enumerate(executor.corpus):
        (folder / f"{number:06d}").write_bytes(seed)
    options = [f"-seed={(task.seed * 1000003 + task.begin) % (1 << 31) + 1}", f"-max_len={MAX_BYTES}", "-verbosity=0"]
    # The limits are this project's: libFuzzer's would end the process. A timeout of 0 is over at once for atheris.
    options += ["-timeout=1000000", "-rss_limit_mb=0", "-handle_xfsz=0", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *options, str(folder)], one_input, custom_mutator=mutator)
    with quiet():
        atheris.Fuzz()


def has_atheris() -> bool:
    """Whether atheris is installed."""
    return importlib.util.find_spec("atheris") is not None


def instrument() -> Any:
    """A context in which imports of the project's packages are instrumented for atheris."""
    import atheris

    names = ["dynmo_balance", "dynmo_ckpt", "dynmo_tools", "dynmo_train"]
    return atheris.instrument_imports(include=names, enable_loader_override=False)


ENGINES: dict[str, Engine] = {"mutations": run_mutations, "hypothesis": run_hypothesis, "atheris": run_atheris}
