"""Whether the last move kept its promise: measured step times before and after it against the plan's prediction."""

from __future__ import annotations

from dataclasses import dataclass

from .formats.plan import Plan
from .state import RunState

DISAPPOINTING = 0.5
"""A move that realises less than this share of its predicted gain doubles the price of the next."""
LEAST_HARM = 0.02
"""A move is taken back only where steps became longer by this share and by more than their noise."""
WAIT_STEPS = 200
"""After a roll-back nothing is tried for so many steps."""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """What the last move teaches: a factor on the price of moves, and whether to go back."""

    penalty: float = 1.0
    roll_back: bool = False
    wait_until: int | None = None
    reason: str = ""


def feedback_of(state: RunState, base: Plan) -> Feedback:
    """Compare the mean step before the move to the plan in force with the mean after it.

    Nothing is concluded until there are as many records after the move as before it, or when the model changed
    between the two.
    """
    if base.balancer == "manual":
        return Feedback(wait_until=base.read_to_step + WAIT_STEPS)
    before, after = state.before_move, state.first_after
    predicted = base.predicted.gain_fraction if base.predicted is not None else None
    if before is None or predicted is None or base.action != "move" or len(after) < min(8, state.window_size):
        return Feedback()
    mean = sum(after) / len(after)
    realised = 1 - mean / before.mean_ns
    error = before.error_ns + (sum((t - mean) ** 2 for t in after) / len(after) / len(after)) ** 0.5
    harm = mean - before.mean_ns
    if harm > LEAST_HARM * before.mean_ns and harm > 3 * error:
        reason = (
            f"rolling back plan {base.plan_id}: predicted {predicted:+.1%}, steps went from {before.mean_ns / 1e6:.2f}"
            f" to {mean / 1e6:.2f} ms"
        )
        return Feedback(penalty=2.0, roll_back=True, reason=reason)
    certain = realised + 3 * error / before.mean_ns
    return Feedback(penalty=2.0 if certain < DISAPPOINTING * predicted else 1.0)
