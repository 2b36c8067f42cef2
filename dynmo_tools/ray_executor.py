"""Tasks on a Ray cluster: one remote call a task, on the same plan and markers as everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from .errors import DynmoError, MissingExtraError
from .plan import Job
from .tasks import Phase, Report, TaskFailedError, WorkerDiedError, run_task


def _answer(job: Job, phase: Phase, index: int) -> tuple[str, Any, int]:
    """Run a task where Ray put it; errors come back as values."""
    try:
        return "done", run_task(job, phase, index, lambda _documents, _size: None), 0
    except DynmoError as error:
        return "error", str(error), error.exit_code


def run_ray(
    job: Job, phase: Phase, indices: Sequence[int], workers: int, report: Report
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run the tasks on the cluster of ``RAY_ADDRESS``, or on one of this machine with ``workers`` processes.

    At most two tasks a worker are handed out at a time; ``report`` hears of each when it is done.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    if not ray.is_initialized():
        here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, **here)
    remote = ray.remote(num_cpus=1, max_retries=0)(_answer)
    limit = 2 * max(workers, int(ray.cluster_resources().get("CPU", 1)))
    waiting = list(reversed(indices))
    running: dict[Any, int] = {}
    while waiting or running:
        while waiting and len(running) < limit:
            index = waiting.pop()
            running[remote.remote(job, phase, index)] = index
        ready, _ = ray.wait(list(running))
        index = running.pop(ready[0])
        try:
            kind, value, exit_code = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            raise WorkerDiedError.of(phase, index, type(error).__name__) from error
        if kind == "error":
            raise TaskFailedError(value, exit_code)
        report(value["tally"]["documents_in"], value["tally"]["bytes_in"])
        yield index, value
