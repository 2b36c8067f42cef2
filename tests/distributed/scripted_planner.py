"""A planner whose answers a test chooses.

In lockstep the trainer writes an ``ask`` to its profile at each boundary and waits for the plan of that boundary. So a
test has the trainer paused at a step that it names, whatever the speed of either, and signals, kills and requests
arrive there.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.distributed.whole_runs import lines
from tests.waiting import wait_for

SCRIPTED_PLANNER_OPTIONS = (
    *("--balance", "online", "--planner", "external"),
    *("--balance-lockstep", "--planner-timeout-s", "600"),
)


class ScriptedPlanner:
    """Answers the questions of a run in lockstep.

    Args:
        run: run directory; it may not exist yet.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._answered: set[tuple[int, int]] = set()
        self._read: tuple[int, list[dict]] = (0, [])

    def _records(self) -> list[dict]:
        profile = self.run / "profile.jsonl"
        size = profile.stat().st_size if profile.exists() else 0
        if size != self._read[0]:  # who asks every few milliseconds parses each state of the file once
            self._read = size, lines(profile)
        return self._read[1]

    def pending(self) -> tuple[int, int] | None:
        """Segment and step of the boundary at which the trainer waits now; None where it does not wait."""
        segment, waiting = -1, None
        for record in self._records():
            if record["record"] == "header":
                segment, waiting = record["segment"], None
            elif record["record"] == "plan_request":
                waiting = (segment, record["step"])
            elif record["record"] == "plan_result":
                waiting = None
        return waiting if waiting not in self._answered else None

    def skip_pending(self) -> None:
        """Leave the question unanswered at which an earlier process of the run was killed."""
        waiting = self.pending()
        if waiting is not None:
            self._answered.add(waiting)

    def wait_for_ask(self, step: int, *processes: subprocess.Popen[str]) -> None:
        """Return once the trainer waits at the boundary after ``step``."""

        def is_waiting() -> bool:
            waiting = self.pending()
            return waiting is not None and waiting[1] == step

        wait_for(is_waiting, f"question at step {step}", *processes)

    def active(self) -> dict:
        """The active plan: the last one that was taken, else the one that the segment began with."""
        plan_id = 0
        for record in self._records():
            if record["record"] == "plan_result" and record["result"] == "applied":
                plan_id = record["plan_id"]
        plans: dict[int, dict] = {}
        for path in (self.run / "plans").glob("plan-*.json"):
            with contextlib.suppress(ValueError):  # a test may have written garbage
                plans[int(path.stem[5:])] = json.loads(path.read_text())
        return plans[max([plan_id, *(number for number, plan in plans.items() if plan["balancer"] == "initial")])]

    def answer(self, stages: Sequence[Sequence[str]] | None = None, released: Sequence[int] = ()) -> int:
        """Write the plan of the boundary at which the trainer waits; the plan's number.

        Args:
            stages: items of each stage; the active partition stays without it.
            released: workers that leave; the stages are those of the others, in their order.
        """
        waiting = self.pending()
        assert waiting is not None, "the trainer does not wait"
        before = self.active()
        workers = [stage["worker"] for stage in before["stages"] if stage["worker"] not in released]
        plan = before | {"base_plan_id": before["plan_id"], "read_to_step": waiting[1], "reason": "manual"}
        plan |= {"balancer": "manual", "action": "keep" if stages is None else "move", "apply_at_step": None}
        plan["released_workers"] = list(released)
        if stages is not None:
            plan["stages"] = [
                {"stage": stage, "worker": worker, "items": list(items)}
                for stage, (worker, items) in enumerate(zip(workers, stages, strict=True))
            ]
        self._answered.add(waiting)
        return self.write(plan)

    def write(self, plan: dict | str) -> int:
        """Put a document, or any text, in the place of the next plan; its number."""
        number = 1 + max(int(path.stem[5:]) for path in (self.run / "plans").glob("plan-*.json"))
        text = plan if isinstance(plan, str) else json.dumps(plan | {"plan_id": number})
        temporary = self.run / "plans" / ".by-hand"
        temporary.write_text(text)
        temporary.rename(self.run / "plans" / f"plan-{number:06d}.json")
        return number

    def items(self) -> list[str]:
        """Names of all items of the model, in order."""
        return [name for stage in self.active()["stages"] for name in stage["items"]]

    def keep_until_end(self, *processes: subprocess.Popen[str]) -> None:
        """Answer every question by "keep" until one of the processes has ended."""

        def ended() -> bool:
            if self.pending() is not None:
                self.answer()
            return any(process.poll() is not None for process in processes)

        wait_for(ended, "end of the run")
