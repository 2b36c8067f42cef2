"""Fuzzes every parser of the project in child processes, and prints what was found.

bin/fuzz                                             every target, 10,000 executions each
bin/fuzz --target 'ckpt.*' --minutes 10 --parallel 2
bin/fuzz --target train.formats.plan.read_plan --engine atheris --executions 100000
bin/fuzz --replay fuzz-defects/TARGET/error-0123456789.input
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TextIO

from tests.fuzz.engines import ENGINES, Done, Task, has_atheris, instrument
from tests.fuzz.execution import Defect, Executor, Limits, Page, limited
from tests.fuzz.target import quiet
from tests.fuzz.targets import load_targets

# The first task of each target is short, so that defects that are easy to find are found early.
FIRST_EXECUTIONS = 200
TASK_EXECUTIONS = 1000
POLL_S = 0.5
# A parser that waits, for example for a FIFO, uses no processor time.
WAIT_S = 120.0
EXIT_DEFECTS = 1
EXIT_USAGE = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a campaign runs.

    Attributes:
        targets: names.
        executions: of each target; None: until the deadline.
        deadline: of ``time.monotonic``; None: no limit.
        seed: of all inputs.
        engine: a key of ``ENGINES``.
        parallel: number of child processes.
        limits: of an execution.
        output: folder of inputs that show defects.
        module: where the targets are registered.
    """

    targets: tuple[str, ...]
    executions: int | None
    deadline: float | None
    seed: int
    engine: str
    parallel: int
    limits: Limits
    output: Path
    module: str = "tests.fuzz.targets"


@dataclass
class Row:
    """Results of a target; ``seconds`` of processor time."""

    executions: int = 0
    seconds: float = 0.0
    defects: dict[str, Path] = field(default_factory=dict)


def _memory_folder() -> Path:
    """A new folder on a memory file system, where there is one."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="dynmo-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))


def _work(connection: Connection, folder: Path, engine: str, limits: Limits, module: str) -> None:
    """A child process: executes the tasks that it receives."""
    executors: dict[str, Executor] = {}
    page = Page(folder / "page")

    def executor_of(name: str) -> Executor:
        if name not in executors:
            made = Executor(load_targets(module)[name], folder / name, limits)
            made.warm_up()
            executors[name] = made
        return executors[name]

    while True:
        task: Task | None = connection.recv()
        if task is None:
            return
        if engine == "atheris":
            with instrument():
                executor = executor_of(task.target)
        else:
            executor = executor_of(task.target)
        ENGINES[engine](task, executor, page, limits, connection.send)


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Child:
    """A child process and its task."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._options, self._folder = options, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.page = Page(folder / "page")
        self.task: Task | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        options = self._options
        arguments = (other, self._folder, options.engine, options.limits, options.module)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        other.close()
        self._mark = (-1, 0.0, 0.0)

    def give(self, task: Task) -> None:
        """Start a task."""
        self.task = task
        self.page.write(0, b"")
        self._mark = (-1, 0.0, 0.0)
        if not self.process.is_alive():
            self.connection.close()
            self._start()
        self.connection.send(task)

    def is_stuck(self) -> bool:
        """Whether the execution that runs has used its time twice; signals do not end loops in C."""
        count, used, now = self.page.count, _processor_seconds(self.process.pid or 0), time.monotonic()
        # Before the first execution the child imports the target.
        if count != self._mark[0] or not self.page.data:
            self._mark = (count, used, now)
            return False
        return used - self._mark[1] > 2 * self._options.limits.seconds + 1 or now - self._mark[2] > WAIT_S

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def restart(self) -> None:
        """Replace a process that ended or is stuck."""
        self.stop()
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        self.page = Page(self._folder / "page")
        self._start()


def tasks(options: Options) -> Iterator[Task]:
    """The tasks in turn of the targets, so that a campaign that ends early has fuzzed each of them."""
    begin = 0
    while options.executions is None or begin < options.executions:
        size = FIRST_EXECUTIONS if begin == 0 else TASK_EXECUTIONS
        size = 20 * TASK_EXECUTIONS if options.engine == "atheris" else size  # it learns within a task
        end = begin + size if options.executions is None else min(begin + size, options.executions)
        for name in options.targets:
            if options.deadline is not None and time.monotonic() > options.deadline:
                return
            yield Task(target=name, begin=begin, end=end, seed=options.seed)
        begin = end


def show(text: str, *, file: TextIO | None = None) -> None:
    """Write a line at once: a campaign is read while it runs."""
    stream = file or sys.stdout
    stream.write(text + "\n")
    stream.flush()


class Campaign:
    """Gives tasks to child processes, and collects the results."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows = {name: Row() for name in options.targets}

    def run(self) -> None:
        """Run all tasks."""
        folder = _memory_folder()
        waiting: list[Task] = []
        source = tasks(self.options)
        children = [Child(self.options, folder / str(number)) for number in range(self.options.parallel)]
        try:
            while True:
                for child in children:
                    if child.task is None and (task := waiting.pop() if waiting else next(source, None)) is not None:
                        child.give(task)
                busy = [child for child in children if child.task is not None]
                if not busy:
                    return
                ready = wait([child.connection for child in busy], POLL_S)
                for child in busy:
                    if child.connection in ready:
                        waiting += self._receive(child)
                    elif child.is_stuck():
                        waiting += self._lost(child, "hang", "the process did not return")
        finally:
            for child in children:
                child.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def _receive(self, child: Child) -> list[Task]:
        """One message of a child; returns the remaining part of its task if it ended instead."""
        try:
            message = child.connection.recv()
        except (EOFError, ConnectionResetError):
            child.process.join()
            return self._lost(child, "crash", f"the process ended with {child.process.exitcode}")
        assert child.task is not None
        if isinstance(message, Done):
            row = self.rows[child.task.target]
            row.executions += message.executions
            row.seconds += message.seconds
            child.task = None
            if self.options.engine == "atheris":  # libFuzzer ends its process
                child.restart()
        else:
            self.add(message)
        return []

    def _lost(self, child: Child, kind: str, how: str) -> list[Task]:
        """Report the execution of a child that is lost, and replace it."""
        task, count, data = child.task, child.page.count, child.page.data
        assert task is not None
        row = self.rows[task.target]
        if not data and count == 0:
            child.stop()
            raise SystemExit(f"fuzz: error: {task.target}: its seeds cannot be read: {how}")
        self.add(Defect(target=task.target, kind=kind, place=f"{kind}: {how}", detail=how, data=data))
        row.executions += count + 1
        child.restart()
        child.task = None
        remaining = Task(target=task.target, begin=task.begin + count + 1, end=task.end, seed=task.seed)
        return [remaining] if remaining.begin < remaining.end else []

    def add(self, defect: Defect) -> None:
        """Save the input of a new defect."""
        row = self.rows[defect.target]
        if defect.place in row.defects:
            return
        name = f"{defect.kind}-{hashlib.sha256(defect.data).hexdigest()[:10]}"
        path = self.options.output / defect.target / f"{name}.input"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(defect.data)
        path.with_suffix(".txt").write_text(defect.detail, encoding="utf-8", errors="backslashreplace")
        row.defects[defect.place] = path
        show(f"{defect.target}: {defect.kind}: {defect.place}\n  {path}")


def table(rows: dict[str, Row]) -> str:
    """The results as a table in Markdown."""
    lines = ["| target | executions | per second | defects |", "|---|--:|--:|--:|"]
    for name, row in sorted(rows.items()):
        rate = f"{row.executions / row.seconds:,.0f}" if row.seconds else ""
        lines.append(f"| {name} | {row.executions:,} | {rate} | {len(row.defects)} |")
    total = sum(row.executions for row in rows.values())
    seconds = sum(row.seconds for row in rows.values())
    rate = f"{total / seconds:,.0f}" if seconds else ""
    lines.append(f"| all {len(rows)} | {total:,} | {rate} | {sum(len(row.defects) for row in rows.values())} |")
    return "\n".join(lines)


def replay(path: Path, target: str | None, limits: Limits, module: str = "tests.fuzz.targets") -> Defect | None:
    """Execute a saved input again; its folder names the target.

    Returns:
        The defect that it still shows; None without one.
    """
    name = target or path.resolve().parent.name
    targets = load_targets(module)
    if name not in targets:
        raise SystemExit(f"fuzz: error: {path}: its folder names no target; give --target")
    folder = _memory_folder()
    try:
        executor = Executor(targets[name], folder, limits)
        executor.warm_up()
        with quiet(), limited(limits):
            return executor.execute(path.read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def select(patterns: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """The names that match a pattern, such as ``ckpt.*``; all of them without patterns."""
    given = list(patterns)
    for pattern in given:
        if not fnmatch.filter(names, pattern):
            sys.stderr.write(f"fuzz: error: --target {pattern}: matches no target; --list lists them\n")
            raise SystemExit(2)
    return tuple(name for name in names if not given or any(fnmatch.fnmatch(name, pattern) for pattern in given))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", default=[], metavar="PATTERN", help="targets; default: all")
    parser.add_argument("--executions", type=int, help="executions of each target (default: 10000, or by --minutes)")
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--seed", type=int, default=1, help="of all inputs (default: 1)")
    parser.add_argument("--engine", choices=ENGINES, default="mutations")
    parser.add_argument("--parallel", type=int, default=1, help="child processes (default: 1)")
    parser.add_argument("--seconds", type=float, default=Limits.seconds, help="processor time of one execution")
    parser.add_argument("--memory-mib", type=int, default=Limits.memory_bytes >> 20, help="memory of one execution")
    parser.add_argument("--output", type=Path, default=Path("fuzz-defects"), help="folder of inputs with defects")
    parser.add_argument("--replay", type=Path, action="append", default=[], metavar="FILE", help="execute it again")
    parser.add_argument("--list", action="store_true", help="list the targets")
    parser.add_argument("--module", default="tests.fuzz.targets", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    for name in ("executions", "minutes", "parallel", "seconds", "memory_mib"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be above 0")
    if options.engine == "atheris" and not has_atheris():
        parser.error("--engine atheris: atheris is not installed; run: pip install 'dynmo-toolkit[fuzz]'")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 with defects."""
    given = _parse(words)
    limits = Limits(seconds=given.seconds, memory_bytes=given.memory_mib << 20)
    if given.replay:
        found = [replay(path, given.target[0] if given.target else None, limits, given.module) for path in given.replay]
        for path, defect in zip(given.replay, found, strict=True):
            show(f"{path}: {'no defect' if defect is None else f'{defect.kind}: {defect.place}'}")
            if defect is not None:
                show(defect.detail)
        return EXIT_DEFECTS if any(found) else 0
    names = select(given.target, list(load_targets(given.module)))
    if given.list:
        show("\n".join(names))
        return 0
    is_default = given.executions is None and given.minutes is None
    options = Options(
        targets=names,
        executions=10_000 if is_default else given.executions,
        deadline=None if given.minutes is None else time.monotonic() + 60 * given.minutes,
        seed=given.seed,
        engine=given.engine,
        parallel=given.parallel,
        limits=limits,
        output=given.output,
        module=given.module,
    )
    campaign = Campaign(options)
    try:
        campaign.run()
    except KeyboardInterrupt:
        show("interrupted", file=sys.stderr)
    show(table(campaign.rows))
    return EXIT_DEFECTS if any(row.defects for row in campaign.rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
