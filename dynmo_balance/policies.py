"""When a better partition is worth its move: pure functions from the numbers of a decision to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers that a decision rests on.

    Attributes:
        current_step_ns, proposed_step_ns: simulated with the same costs.
        pause_ns: what the migration is expected to cost.
        horizon_steps: for how many steps the proposal is expected to hold.
        moves: how many items move.
    """

    current_step_ns: int
    proposed_step_ns: int
    pause_ns: int
    horizon_steps: int
    moves: int

    @property
    def gain_ns(self) -> int:
        """What a step is expected to gain."""
        return self.current_step_ns - self.proposed_step_ns

    @property
    def gain_fraction(self) -> float:
        """The gain as a share of the current step time."""
        return self.gain_ns / self.current_step_ns if self.current_step_ns else 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether to move, and why in one sentence with its numbers."""

    move: bool
    reason: str


def _gain_text(evidence: Evidence) -> str:
    return (
        f"step {evidence.current_step_ns / 1e6:.2f} -> {evidence.proposed_step_ns / 1e6:.2f} ms"
        f" ({evidence.gain_fraction:+.1%} gain), {evidence.moves} items to move, pause {evidence.pause_ns / 1e6:.0f} ms"
    )


def never(evidence: Evidence, min_gain: float) -> Verdict:
    """Keep what is in force."""
    return Verdict(move=False, reason=f"policy never: {_gain_text(evidence)}")


def always(evidence: Evidence, min_gain: float) -> Verdict:
    """Take the balancer's answer whenever it differs."""
    return Verdict(move=evidence.moves > 0, reason=f"policy always: {_gain_text(evidence)}")


def threshold(evidence: Evidence, min_gain: float) -> Verdict:
    """Move when the gain is large enough and, over the horizon, outweighs the pause."""
    text = _gain_text(evidence)
    if evidence.moves == 0:
        return Verdict(move=False, reason=f"the partition in force is the balancer's answer: {text}")
    if evidence.gain_fraction < min_gain:
        return Verdict(move=False, reason=f"gain below {min_gain:.1%}: {text}")
    saved = evidence.gain_ns * evidence.horizon_steps
    if saved <= evidence.pause_ns:
        return Verdict(
            move=False,
            reason=f"{evidence.horizon_steps} steps would save {saved / 1e6:.0f} ms, less than the pause: {text}",
        )
    return Verdict(move=True, reason=f"pays within {-(-evidence.pause_ns // evidence.gain_ns)} steps: {text}")


POLICIES: Mapping[str, Callable[[Evidence, float], Verdict]] = {
    "never": never,
    "always": always,
    "threshold": threshold,
}
