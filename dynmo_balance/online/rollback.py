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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..costs.cost_window import SPEED_UNIT
from ..formats.plan import Plan
from ..formats.profile import Step
from ..partition.problem import PartitionProblem
from .regret import SpeedsOfPlan, Works, step_times, work_of
from .run_state import RunState

MIN_REALIZED_SHARE = 0.5
"""A move that realizes less than this share of its predicted gain doubles the cost of the next."""
MIN_HARM = 0.02
"""A move is rolled back only if steps became longer by this share and by more than their noise."""
WAIT_STEPS = 200
"""Number of steps after a rollback in which the partition is not proposed again."""
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
    """

    penalty: float = 1.0
    roll_back: bool = False
    blocked: tuple[int, ...] | None = None
    blocked_until: int = 0
    reason: str = ""


def evaluate_last_move(
    state: RunState, base: Plan, previous: Plan | None, problem: PartitionProblem, speeds_of: SpeedsOfPlan
) -> Feedback:
    """Compare the partition before the last move with the active one, on the costs since the move.

    There is no conclusion before the window is full of records after the move, or if the model changed between the
    two, items are not sampled, or the number of workers changed with the move.

    Args:
        state: of the run.
        base: the active plan.
        previous: the plan that was active before it, if known.
        problem: on the workers of ``base``; gives speeds and microbatches.
        speeds_of: speeds of the items' workers under a plan.
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
    works_before, works_after = _works(before, speeds_of), _works(after, speeds_of)
    if np.isnan(works_before).any() or np.isnan(works_after).any():
        return Feedback()
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
    # Harm that the model explains by changed costs needs no rollback: the balancer decides on the same costs.
    if float(harm.mean()) > limit and float(unexplained.mean()) > limit:
        mean = float(_times(after).mean())
        reason = (
            f"rolling back plan {base.plan_id}: predicted {predicted:+.1%}; steps take {mean / 1e6:.2f} ms and would"
            f" take {mean_staying / 1e6:.2f} ms under the plan before it"
        )
        return Feedback(penalty=2.0, roll_back=True, reason=reason)
    # In favor of the move by three standard errors: noise must not make the next move more expensive.
    realized = (3 * error - float(harm.mean())) / mean_staying
    return Feedback(penalty=2.0 if realized < MIN_REALIZED_SHARE * predicted else 1.0)


def _works(steps: Sequence[Step], speeds_of: SpeedsOfPlan) -> Works:
    rows = [work_of(step) * np.array(speeds_of(step.plan_id), dtype=np.float64) for step in steps]
    return np.asarray(np.array(rows) / SPEED_UNIT)


def _times(steps: Sequence[Step]) -> Works:
    return np.array([step.step_ns for step in steps], dtype=np.float64)


def _error(values: Works) -> float:
    """The standard error of the mean."""
    return float(values.std()) / math.sqrt(len(values))
