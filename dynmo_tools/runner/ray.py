"""Tasks on a Ray cluster: one remote call per task, with the same manifest and markers as local tasks.

Ray restarts a task whose worker or node is lost. This is safe: a task writes temporary files and renames them at its
end. An error of the task itself is returned as a value and stops the run. Ray workers start in a folder of Ray; each
task changes to the folder of the command, which all nodes must share.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._common.document import is_count
from .._common.errors import DynmoError, MissingExtraError, UsageError
from .task import Phase, Report, TaskFailedError, WorkerDiedError, run_task
from .task_manifest import Job

PROBE_S = 10.0
MAX_RETRIES = 3
"""Maximum restarts of a task after the loss of its worker."""


def _run_remote(folder: Path, job: Job, phase: Phase, index: int) -> tuple[str, Any, int]:
    """Run a task in ``folder`` on the node that Ray chose; errors are returned as values."""
    try:
        with working_directory(folder):
            return "done", run_task(job, phase, index, lambda _documents, _size: None), 0
    except DynmoError as error:
        return "error", str(error), error.exit_code


@contextlib.contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """Change the working directory; a Ray worker runs one task at a time.

    Raises:
        UsageError: this node cannot open the folder.
    """
    before = os.getcwd()
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"{folder}: a node of the Ray cluster cannot open this folder ({error.strerror}); "
            "all nodes must share it, with inputs, output and work folder"
        ) from error
    try:
        yield
    finally:
        os.chdir(before)


def connect(ray: Any, workers: int) -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, or start a local one.

    Args:
        ray: the module ``ray``.
        workers: CPU cores of a local cluster, which runs one task per core; no effect on an existing cluster.

    Raises:
        DynmoError: no cluster responds at the address, or it refuses this version of Ray or Python.
    """
    address = os.environ.get("RAY_ADDRESS")
    here = {} if address else {"num_cpus": workers, "include_dashboard": False}
    try:
        if address:
            probe(address)
        # The output of remote processes would mix with the progress lines; errors are returned as values.
        ray.init(log_to_driver=False, **here)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if not address:
            raise DynmoError(f"Ray cannot start on this machine: {reason}") from error
        raise DynmoError(
            f"RAY_ADDRESS {address}: cannot connect to a Ray cluster: {reason}; "
            "start one with 'ray start --head', or unset RAY_ADDRESS to use this machine" + _token_hint()
        ) from error


def _token_hint() -> str:
    """The remedy for a missing token: Ray sends none to an explicit address unless its mode is set."""
    if os.environ.get("RAY_AUTH_MODE"):
        return ""
    return "; for a cluster with token authentication set RAY_AUTH_MODE=token"


def probe(address: str) -> None:
    """Connect to ``HOST:PORT`` once and disconnect: Ray retries for minutes if nothing listens there."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and is_count(port):
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()


def run_ray(
    job: Job, phase: Phase, indices: Sequence[int], workers: int, report: Report
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run tasks on the cluster of ``RAY_ADDRESS``, or on a local one with ``workers`` processes.

    At most two tasks per worker are submitted at a time; ``report`` is called after each task.

    Args:
        job: the job; its manifest must be stored.
        phase: phase of the tasks.
        indices: numbers of the tasks within the phase, from 0.
        workers: processes of a local cluster; minimum number of workers that an existing cluster is assumed to have.
        report: receives the numbers of documents and bytes of each completed task.

    Yields:
        The number and the marker of each task, in the order of completion.

    Raises:
        DynmoError: see ``connect``.
        MissingExtraError: Ray is not installed.
        TaskFailedError: a task failed.
        WorkerDiedError: a task lost its worker more than ``MAX_RETRIES`` times.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    # Later phases, and later steps of a pipeline, use the connection of the first one.
    if not ray.is_initialized():
        connect(ray, workers)
    remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_run_remote)
    folder = Path.cwd()
    # Two: the next task is at the worker when one ends, and few tasks are in progress when one fails.
    limit = 2 * max(workers, int(ray.cluster_resources().get("CPU", 1)))
    pending = list(reversed(indices))
    running: dict[Any, int] = {}
    while pending or running:
        while pending and len(running) < limit:
            index = pending.pop()
            running[remote.remote(folder, job, phase, index)] = index
        ready, _ = ray.wait(list(running))
        index = running.pop(ready[0])
        try:
            kind, value, exit_code = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            raise TaskFailedError(f"task {phase.name}-{index:05d} failed on the Ray cluster:\n{error}", 1) from error
        except ray.exceptions.RayError as error:
            raise WorkerDiedError.of(phase, index, type(error).__name__) from error
        # An exception would be a RayTaskError with a remote traceback, and would lose the exit code.
        if kind == "error":
            raise TaskFailedError(value, exit_code)
        report(value["tally"]["documents_in"], value["tally"]["bytes_in"])
        yield index, value
