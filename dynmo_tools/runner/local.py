"""Where tasks run: in this process, or in spawned processes of this machine.

An executor yields (index, marker) of each task as it ends, in any order; what a task computes does not depend on it.
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
    """Run the tasks one after the other in this process."""
    for index in indices:
        yield index, run_task(job, phase, index, report)


def _worker_main(connection: Connection, job: Job) -> None:
    """The life of a worker: take a task, run it, answer; None ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends its workers with SIGTERM
    signal.signal(signal.SIGTERM, _stop)

    def report(documents: int, size: int) -> None:
        connection.send(("progress", documents, size))

    while (task := connection.recv()) is not None:
        phase, index = task
        try:
            connection.send(("done", index, run_task(job, phase, index, report)))
        except DynmoError as error:
            connection.send(("error", str(error), error.exit_code))
        except Exception:  # noqa: BLE001 - whatever it is, the parent must hear of it
            connection.send(("crash", traceback.format_exc(), 1))


def _stop(_signum: int, _frame: object) -> None:
    raise SystemExit(143)


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    index: int | None = None


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Spawned processes that run the tasks of a job's phases, and live from one phase to the next.

    Spawned, not forked: the parent may run threads (progress bars, tokenizers). They start when there is work for them.

    Args:
        job: whose tasks they run.
        size: the number of processes at most.
    """

    def __init__(self, job: Job, size: int) -> None:
        self.job, self._size = job, size
        self._workers: list[_Worker] = []

    def __exit__(self, *_: object) -> None:
        """End the processes, at once where they are at work."""
        _stop_workers(self._workers)
        self._workers = []

    def run(self, phase: Phase, indices: Sequence[int], report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the tasks of a phase; a dead worker ends the run, naming its task."""
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
    process = context.Process(target=_worker_main, args=(theirs, job), daemon=True)
    with _hidden_main_module():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextlib.contextmanager
def _hidden_main_module() -> Iterator[None]:
    """Hide the program's main module: a spawned process would import it, and the whole command line with it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _send_next_task(worker: _Worker, phase: Phase, queue: list[int]) -> None:
    worker.index = queue.pop() if queue else None
    if worker.index is not None:
        with contextlib.suppress(ConnectionError):  # a dead worker is noticed when it is heard
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
        worker.process.join(timeout=5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
