"""When a better partition is worth its move: pure functions from the numbers of a decision to a verdict.

``regret`` is the ski-rental rule: what staying has cost so far is added up, and the move is made when that outweighs
what the move costs. So no change of the model costs much more than twice what hindsight would have paid for it. The
gain that it adds up is measured out of sample (``crossfit``) and counted only as far as it is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers that a decision rests on.

    Attributes:
        step: of the decision.
        current_step_ns, proposed_step_ns: simulated with the same costs.
        certain_gain_ns: lower confidence bound of what a step gains, out of sample; None where it was not measured.
        pause_ns: what the migration is expected to cost, with the penalty for earlier disappointments.
        horizon_steps: for how many steps the proposal is expected to hold.
        next_event_known: whether that is because the profile said when the costs change next.
        moves: how many items move.
    """

    step: int
    current_step_ns: int
    proposed_step_ns: int
    certain_gain_ns: float | None = None
    pause_ns: int
    horizon_steps: int
    next_event_known: bool = False
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
class Settings:
    """The thresholds of the policies."""

    min_gain: float = 0.02
    dead_band: float = 0.005
    margin: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a policy carries from one decision to the next; a move or another plan in force starts it anew."""

    regret_ns: float = 0.0
    considered_step: int | None = None


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


def never(evidence: Evidence, settings: Settings, memory: Memory) -> tuple[Verdict, Memory]:
    """Keep what is in force."""
    return Verdict(move=False, reason=f"policy never: {_gain_text(evidence)}"), memory


def always(evidence: Evidence, settings: Settings, memory: Memory) -> tuple[Verdict, Memory]:
    """Take the balancer's answer whenever it differs."""
    return Verdict(move=evidence.moves > 0, reason=f"policy always: {_gain_text(evidence)}"), memory


def threshold(evidence: Evidence, settings: Settings, memory: Memory) -> tuple[Verdict, Memory]:
    """Move when the gain is large enough and, over the horizon, outweighs the pause."""
    text = _gain_text(evidence)
    if evidence.moves == 0:
        return Verdict(move=False, reason=f"the partition in force is the balancer's answer: {text}"), memory
    if evidence.gain_fraction < settings.min_gain:
        return Verdict(move=False, reason=f"gain below {settings.min_gain:.1%}: {text}"), memory
    saved = evidence.gain_ns * evidence.horizon_steps
    if saved <= evidence.pause_ns:
        reason = f"{evidence.horizon_steps} steps would save {saved / 1e6:.0f} ms, less than the pause: {text}"
        return Verdict(move=False, reason=reason), memory
    steps = -(-evidence.pause_ns // evidence.gain_ns) if evidence.gain_ns > 0 else 0
    return Verdict(move=True, reason=f"pays within {steps} steps: {text}"), memory


def regret(evidence: Evidence, settings: Settings, memory: Memory) -> tuple[Verdict, Memory]:
    """Move when the certain gain missed so far outweighs the pause.

    Where the profile says when the costs change next, the gain until then decides at once.
    """
    text = _gain_text(evidence)
    gain = evidence.certain_gain_ns or 0.0
    since = 0 if memory.considered_step is None else max(0, evidence.step - memory.considered_step)
    if evidence.moves == 0 or gain < settings.dead_band * evidence.current_step_ns:
        told = f"certain gain {gain / 1e6:.2f} ms is within {settings.dead_band:.1%}: {text}"
        return Verdict(move=False, reason=told), replace(memory, considered_step=evidence.step)
    total = memory.regret_ns + since * gain
    later = Memory(regret_ns=total, considered_step=evidence.step)
    if evidence.next_event_known and gain * evidence.horizon_steps > 2 * evidence.pause_ns:
        reason = f"pays twice before the next event in {evidence.horizon_steps} steps: {text}"
        return Verdict(move=True, reason=reason), Memory(considered_step=evidence.step)
    needed = settings.margin * evidence.pause_ns
    if total <= needed:
        return Verdict(move=False, reason=f"regret {total / 1e6:.0f} of {needed / 1e6:.0f} ms: {text}"), later
    reason = f"regret {total / 1e6:.0f} ms outweighs {needed / 1e6:.0f} ms: {text}"
    return Verdict(move=True, reason=reason), Memory(considered_step=evidence.step)


POLICIES: Mapping[str, Callable[[Evidence, Settings, Memory], tuple[Verdict, Memory]]] = {
    "never": never,
    "always": always,
    "threshold": threshold,
    "regret": regret,
}
