"""Requests for another number of workers: the run exits, and the launcher restarts it with that number.

A person or a scheduler writes ``requests/resize.json`` into the run directory. The launcher of node 0 writes a join
request where nodes wait to join. Rank 0 reads both; a valid request reaches the other ranks as ``relaunch`` of the
boundary signals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..._common.document import DocumentError, Problem
from ...formats.run import read_join_request, read_resize_request, refused_join_file

# A file that changed more recently may still be being written, and is not yet invalid.
UNCHANGED_S = 1.0


class ResizeRequests:
    """Reads ``requests/resize.json`` of a run.

    Args:
        requests: folder of the requests.
        problems_of: problems of continuing with a number of workers; empty where it is possible.
        log_event: appends a line to ``events.jsonl``.
    """

    def __init__(
        self, requests: Path, problems_of: Callable[[int], Sequence[Problem]], log_event: Callable[..., None]
    ) -> None:
        self._request, self._problems_of, self._log_event = requests / "resize.json", problems_of, log_event

    def is_pending(self, step: int, workers: int) -> bool:
        """Whether a number of workers other than ``workers`` is requested; an invalid request is logged and renamed.

        Args:
            step: number of completed steps, for the log.
            workers: current number of workers.
        """
        if not self._request.exists():
            return False
        try:
            requested = read_resize_request(self._request)
            problems = self._problems_of(requested) if requested != workers else ()
        except DocumentError as error:
            if not self._is_written():
                return False
            requested, problems = 0, error.problems
        if problems:
            self._rename("refused")
            reasons = "; ".join(map(str, problems))
            message = f"requests/resize.json is refused, training continues: {reasons}"
            self._log_event("resize_refused", message, step=step)
            return False
        if requested == workers:
            self._rename("taken")
            self._log_event("resize", f"the run has the {requested} requested workers", step=step, workers=requested)
            return False
        # The file stays: the launcher reads the number from it after this process has exited.
        message = f"restart with {requested} workers requested, the run has {workers}"
        self._log_event("resize", message, step=step, workers=requested)
        return True

    def _is_written(self) -> bool:
        try:
            return time.time() - self._request.stat().st_mtime > UNCHANGED_S
        except OSError:
            return False

    # Renamed, not removed: a person finds the request with its outcome, and no later boundary reads it again.
    def _rename(self, outcome: str) -> None:
        self._request.replace(self._request.with_name(f"resize.{outcome}.json"))


class JoinRequests:
    """Reads the join request of the launcher.

    Args:
        request: file of the request; None without a launcher.
        problems_of: problems of continuing with a number of workers; empty where it is possible.
        log_event: appends a line to ``events.jsonl``.
    """

    def __init__(
        self, request: Path | None, problems_of: Callable[[int], Sequence[Problem]], log_event: Callable[..., None]
    ) -> None:
        self._request, self._problems_of, self._log_event = request, problems_of, log_event

    def is_pending(self, step: int, processes: int) -> bool:
        """Whether nodes wait to join a run of ``processes``; a request that is not possible is logged once.

        Args:
            step: number of completed steps, for the log.
            processes: current number of processes.
        """
        if self._request is None or not self._request.exists():
            return False
        try:
            requested, workers = read_join_request(self._request)
            # Without a number of workers the command determines it, with which a round has run before.
            problems = self._problems_of(workers) if workers is not None else ()
        except DocumentError as error:
            self._request.unlink(missing_ok=True)
            requested, problems = 0, error.problems
        if problems:
            if requested:  # the launcher reads which number of processes is not possible
                self._request.replace(refused_join_file(self._request))
            reasons = "; ".join(map(str, problems))
            message = f"waiting nodes cannot join, training continues without them: {reasons}"
            self._log_event("resize_refused", message, step=step)
            return False
        message = f"restart with {requested} processes, because nodes join; the run has {processes}"
        self._log_event("join", message, step=step, processes=requested)
        return True
