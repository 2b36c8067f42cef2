"""Growing again: a person or a scheduler asks for another number of workers, and the run ends to be started with it.

Rank 0 alone looks. What it finds good reaches the other processes with the wishes of the step boundary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..._common.document import DocumentError, Problem
from ...formats.run import read_grow_request

# A file that somebody is still writing is not yet a bad one.
SETTLED_S = 1.0


class ResizeRequests:
    """Looks after ``requests/grow.json`` of a run.

    Args:
        requests: the folder.
        problems_of: why the run cannot continue with that number of workers; empty where it can.
        log_event: writes a line in ``events.jsonl``.
    """

    def __init__(
        self, requests: Path, problems_of: Callable[[int], Sequence[Problem]], log_event: Callable[..., None]
    ) -> None:
        self._request, self._problems_of, self._log_event = requests / "grow.json", problems_of, log_event

    def asks(self, step: int, workers: int) -> bool:
        """Whether another number of workers than now is asked for; an invalid request is logged and put aside."""
        if not self._request.exists():
            return False
        try:
            wanted = read_grow_request(self._request)
            problems = self._problems_of(wanted) if wanted != workers else ()
        except DocumentError as error:
            if not self._has_settled():
                return False
            wanted, problems = 0, error.problems
        if problems:
            self._put_aside("refused")
            words = "; ".join(map(str, problems))
            self._log_event(
                "grow_refused", f"requests/grow.json cannot be done, training continues: {words}", step=step
            )
            return False
        if wanted == workers:
            self._put_aside("taken")
            self._log_event("grow", f"{wanted} workers were asked for, and are there", step=step, workers=wanted)
            return False
        self._log_event("grow", f"to be started again with {wanted} workers, has {workers}", step=step, workers=wanted)
        return True

    def _has_settled(self) -> bool:
        try:
            return time.time() - self._request.stat().st_mtime > SETTLED_S
        except OSError:
            return False

    def _put_aside(self, word: str) -> None:
        self._request.replace(self._request.with_name(f"grow.{word}.json"))
