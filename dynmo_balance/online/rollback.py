"""Whether the last move realized its predicted gain: both partitions compared on the costs since the move.

Comparing step times before and after a move would blame the move for unrelated changes of the model. So the question
is how long the steps since the move would have taken under the *old* partition. The cost model answers it from the
item times measured since. What the model leaves out (transfers, optimizer, schedule) is calibrated on the steps
before::

    before the move   measured / modelled(old)  = r              factor for what the model leaves out
    since the move    staying  = r x modelled(old, new costs)    compared with measured
                      expected = r x modelled(new, new costs)    compared with measured

If steps are longer than ``staying``, the move did harm. Only if they are also longer than ``expected`` is the harm
outside the model and a reason for a rollback. Otherwise costs have changed, and the policy decides.

All of this is at the speeds that the move was decided with. A worker that starves by its load looks fast while it has
few layers, and slow again once the move has given it some: that change of speed is what was predicted wrong. So
moves that deliver less than half of what they promised are followed by a pause without moves, twice as long after each
failure (``Deliveries``). That holds for costs that change faster than the planner follows them, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..costs.cost_window import SPEED_UNIT, speed_ppm, speeds_of_items
from ..formats.plan import Plan
from ..partition.problem import PartitionProblem
from .regret import Works, step_times, work_of
from .run_state import Measured, RunState

MIN_REALIZED_SHARE = 0.5
"""A move that realizes less than this share of its predicted gain doubles the cost of the next."""
MIN_HARM = 0.02
"""A move is rolled back only if steps became longer by this share and by more than their noise."""
WAIT_STEPS = 200
"""Number of steps after a rollback in which the partition is not proposed again."""
HOLD_STEPS, MAX_DOUBLINGS = 25, 6
"""Steps without a move after one that did not deliver, and how often they double."""
MIN_RECORDS = 8
"""Records after a move before it is judged; in fewer, harm is hidden by noise."""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """The evaluation of the last move.

    Attributes:
        penalty: factor on the pause of the next move.
        roll_back: whether to return to the partition before the move.
        blocked: boundaries that are not proposed before step ``blocked_until``; None if there are none.
        blocked_until: see ``blocked``.
        reason: of a rollback, in one sentence.
        promised, delivered: gains of the last move: as predicted, and as measured on the costs since it, in favor of
            the move by three standard errors. None if there is no conclusion.
    """

    penalty: float = 1.0
    roll_back: bool = False
    blocked: tuple[int, ...] | None = None
    blocked_until: int = 0
    reason: str = ""
    promised: float | None = None
    delivered: float | None = None


@dataclass(frozen=True, kw_only=True)
class Deliveries:
    """What the moves so far delivered of what the model promised, and the pause that follows from it.

    Attributes:
        judged: the last plan that was judged; None before the first.
        failures: number of moves that did not deliver, less those that did since.
        hold_until: step before which nothing moves.
        model_changes: changes of the model when the pause began; another one ends it.
        reason: of the pause, in one sentence.
    """

    judged: int | None = None
    failures: int = 0
    hold_until: int = 0
    model_changes: int = 0
    reason: str = ""

    def after(self, feedback: Feedback, state: RunState, base: Plan) -> Deliveries:
        """The deliveries with the evaluation of the active plan, which counts once."""
        if feedback.promised is None or feedback.delivered is None or self.judged == base.plan_id:
            return self
        judged = replace(self, judged=base.plan_id)
        if feedback.delivered >= MIN_REALIZED_SHARE * feedback.promised:
            return replace(judged, failures=max(0, self.failures - 1))
        if feedback.roll_back and not self.failures:
            return replace(judged, failures=1)  # it returns, and its partition alone is blocked
        hold_until = state.last_step + (HOLD_STEPS << min(self.failures, MAX_DOUBLINGS))
        reason = (
            f"plan {base.plan_id} promised {feedback.promised:+.1%} and delivered {feedback.delivered:+.1%}:"
            f" nothing moves before step {hold_until}"
        )
        return replace(
            judged,
            failures=self.failures + 1,
            hold_until=hold_until,
            model_changes=state.model_changes,
            reason=reason,
        )

    def why_wait(self, state: RunState, base: Plan) -> str | None:
        """Why nothing moves now; None if something may."""
        if state.model_changes != self.model_changes:
            return None
        if state.last_step < self.hold_until:
            return self.reason
        is_judged = self.judged == base.plan_id or len(state.first_after) >= min(MIN_RECORDS, state.window_size)
        if self.failures and base.action == "move" and not is_judged:
            return f"earlier plans did not deliver, so plan {base.plan_id} is measured first"
        return None


def evaluate_last_move(state: RunState, base: Plan, previous: Plan | None, problem: PartitionProblem) -> Feedback:
    """Compare the partition before the last move with the active one, on the costs since the move.

    There is no conclusion before the window is full of records after the move, or if the model changed between the
    two, items are not sampled, or the number of workers changed with the move.

    Args:
        state: of the run.
        base: the active plan.
        previous: the plan that was active before it, if known.
        problem: on the workers of ``base``; gives workers and microbatches.
    """
    # A rollback is itself a move, and is not evaluated: that could move back and forth. It is recognized by its
    # balancer, as the planner stores nothing but its plans.
    if base.balancer == "manual":
        if previous is None or state.last_step >= base.read_to_step + WAIT_STEPS:
            return Feedback()
        return Feedback(penalty=2.0, blocked=previous.boundaries, blocked_until=base.read_to_step + WAIT_STEPS)
    predicted = base.predicted.gain_fraction if base.predicted is not None else None
    before, after = state.before_move, state.first_after
    enough = len(before) >= 2 and len(after) >= min(MIN_RECORDS, state.window_size)
    if base.action != "move" or predicted is None or previous is None or not enough:
        return Feedback()
    # Both partitions have to run on the same workers to be compared on the same costs.
    if previous.workers != base.workers or len(previous.stages) != len(base.stages):
        return Feedback()
    owners = {previous.plan_id: previous.owner, base.plan_id: base.owner}
    works_before, works_after = _works(before, owners), _works(after, owners)
    if np.isnan(works_before).any() or np.isnan(works_after).any():
        return Feedback()
    speeds = {worker.worker: speed_ppm(worker.relative_speed) for worker in before[-1].header.workers}
    slots = tuple(replace(slot, speed_ppm=speeds.get(slot.worker, slot.speed_ppm)) for slot in problem.slots)
    problem = replace(problem, slots=slots)
    # What the model leaves out, such as overhead and communication, is a factor measured before the move. It applies to
    # both partitions, so it cancels where they are compared.
    beyond_model = _times(before) / step_times(problem, works_before, previous.boundaries)
    ratio = float(beyond_model.mean())
    staying = ratio * step_times(problem, works_after, previous.boundaries)
    expected = ratio * step_times(problem, works_after, base.boundaries)
    harm, unexplained = _times(after) - staying, _times(after) - expected
    mean_staying = float(staying.mean())
    error = math.hypot(_error(harm), _error(beyond_model) * mean_staying / ratio)
    limit = max(MIN_HARM * mean_staying, 3 * error)
    # In favor of the move by three standard errors: noise must not make the next move more expensive.
    delivered = (3 * error - float(harm.mean())) / mean_staying
    # Harm that the model explains by changed costs needs no rollback: the balancer decides on the same costs.
    if float(harm.mean()) > limit and float(unexplained.mean()) > limit:
        mean = float(_times(after).mean())
        reason = (
            f"rolling back plan {base.plan_id}: predicted {predicted:+.1%}; steps take {mean / 1e6:.2f} ms and would"
            f" take {mean_staying / 1e6:.2f} ms under the plan before it"
        )
        return Feedback(penalty=2.0, roll_back=True, reason=reason, promised=predicted, delivered=delivered)
    penalty = 2.0 if delivered < MIN_REALIZED_SHARE * predicted else 1.0
    return Feedback(penalty=penalty, promised=predicted, delivered=delivered)


def _works(records: Sequence[Measured], owners: Mapping[int, dict[str, int]]) -> Works:
    """The work of each item in ns at normal speed, ``[records, items]``."""
    rows = []
    for record in records:
        speeds = speeds_of_items(record.header, owners.get(record.step.plan_id, {}))
        rows.append(work_of(record.step) * np.array(speeds, dtype=np.float64))
    return np.asarray(np.array(rows) / SPEED_UNIT)


def _times(records: Sequence[Measured]) -> Works:
    return np.array([record.step.step_ns for record in records], dtype=np.float64)


def _error(values: Works) -> float:
    """The standard error of the mean."""
    return float(values.std()) / math.sqrt(len(values))
