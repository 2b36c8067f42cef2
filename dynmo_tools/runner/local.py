"""Local executors: tasks in this process, or in a pool of spawned processes.

An executor yields (index, marker) for each completed task, in any order; the result of a task does not depend on it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from .._common.errors import DynmoError
from .task import Phase, Report, TaskFailedError, WorkerDiedError, run_task
from .task_manifest import Job


def run_inline(job: Job, phase: Phase, indices: Sequence[int], report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run tasks in sequence in this process.

    Args:
        job: the job; its manifest must be stored.
        phase: phase of the tasks.
        indices: numbers of the tasks within the phase, from 0.
        report: receives the numbers of documents and bytes that were read.

    Yields:
        The number and the marker of each task, once it is complete.

    Raises:
        DynmoError: a task failed.
    """
    for index in indices:
        yield index, run_task(job, phase, index, report)


def worker_main(connection: Connection, job: Job) -> None:
    """Main loop of a worker: receive a task, run it, send the result; None stops it."""
    # orjson imports it at its first call, and aborts with a traceback of its own if the signal comes there.
    import numpy  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops its workers with SIGTERM
    signal.signal(signal.SIGTERM, _stop)

    def report(documents: int, size: int) -> None:
        """Send the numbers of ``documents`` and bytes (``size``) that were read."""
        connection.send(("progress", documents, size))

    while (task := connection.recv()) is not None:
        phase, index = task
        try:
            connection.send(("done", index, run_task(job, phase, index, report)))
        except DynmoError as error:
            connection.send(("error", str(error), error.exit_code))
        except Exception:  # noqa: BLE001 - the parent must receive any error
            # The text, not the exception: one of another package may not survive pickling.
            connection.send(("crash", traceback.format_exc(), 1))


def _stop(_signum: int, _frame: object) -> None:
    raise SystemExit(143)


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    index: int | None = None


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Spawned processes that run the tasks of a job, across its phases. They start with the first tasks.

    Spawned, not forked: the parent may run threads (progress bars, tokenizers).

    Args:
        job: the job.
        size: maximum number of processes.
    """

    def __init__(self, job: Job, size: int) -> None:
        self.job, self._size = job, size
        self._workers: list[_Worker] = []

    def __exit__(self, *_: object) -> None:
        """Stop the processes; busy ones are terminated."""
        _stop_workers(self._workers)
        self._workers = []

    def run(self, phase: Phase, indices: Sequence[int], report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run tasks of a phase.

        Args:
            phase: phase of the tasks.
            indices: numbers of the tasks within the phase, from 0.
            report: receives the numbers of documents and bytes that were read.

        Yields:
            The number and the marker of each task, in the order of completion.

        Raises:
            WorkerDiedError: a worker died; the message has its task.
            TaskFailedError: a task failed.
        """
        # Reversed, because ``pop`` takes from the end: tasks start in their order.
        queue = list(reversed(indices))
        while len(self._workers) < min(self._size, len(queue)):
            self._workers.append(_start_worker(self.job))
        for worker in self._workers:
            _send_next_task(worker, phase, queue)
        while any(worker.index is not None for worker in self._workers):
            busy = {worker.connection: worker for worker in self._workers if worker.index is not None}
            for ready in wait(list(busy)):
                worker = busy[ready]  # type: ignore[index]
                ended = _receive_message(worker, phase, report)
                if ended is not None:
                    yield ended
                    _send_next_task(worker, phase, queue)


def _start_worker(job: Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # A daemon is terminated when its parent exits, so no worker outlives a failed run.
    process = context.Process(target=worker_main, args=(theirs, job), daemon=True)
    with _hidden_main_module():
        process.start()
    # With this end closed, recv raises EOFError when the worker dies; otherwise it would wait forever.
    theirs.close()
    return _Worker(process, ours)


@contextlib.contextmanager
def _hidden_main_module() -> Iterator[None]:
    """Hide the main module: a spawned process would import it, and the complete command line with it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _send_next_task(worker: _Worker, phase: Phase, queue: list[int]) -> None:
    # One task at a time, when the worker asks: a slow task then delays only itself.
    worker.index = queue.pop() if queue else None
    if worker.index is not None:
        with contextlib.suppress(ConnectionError):  # a dead worker is detected by _receive_message
            worker.connection.send((phase, worker.index))


def _receive_message(worker: _Worker, phase: Phase, report: Report) -> tuple[int, dict[str, Any]] | None:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionError) as error:
        worker.process.join(timeout=5)
        raise WorkerDiedError.of(phase, worker.index, f"exit code {worker.process.exitcode}") from error
    if message[0] == "progress":
        report(message[1], message[2])
        return None
    if message[0] == "done":
        return message[1], message[2]
    if message[0] == "error":
        raise TaskFailedError(message[1], message[2])
    raise TaskFailedError(f"task {phase.name}-{worker.index:05d} failed:\n{message[1]}", message[2])


def _stop_workers(pool: Sequence[_Worker]) -> None:
    for worker in pool:
        if worker.index is not None:
            worker.process.terminate()
        else:
            with contextlib.suppress(ConnectionError):
                worker.connection.send(None)
    for worker in pool:
        # SIGTERM raises SystemExit in the worker, which deletes its temporary files; that takes a moment.
        worker.process.join(timeout=5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
