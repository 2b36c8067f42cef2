"""The policies: pure functions from the evidence of a decision to a verdict.

``regret`` is the ski-rental rule: the cost of keeping the partition accumulates, and the move is made when this cost
exceeds the cost of the move. So no change of the model costs much more than twice the offline optimum.
The regret is measured out of sample (``online.regret``), less its standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from .regret import RegretState
from .window_selection import WindowSelection

MIN_STEPS = 8
"""Minimum number of measured steps before a gain decides."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers that a decision is based on.

    Attributes:
        step: of the decision.
        current_step_ns, proposed_step_ns: simulated with the same costs.
        regret_ns: what keeping the partition has cost in ``regret_steps`` steps, out of sample, less its standard
            error.
        pause_ns: expected cost of the migration, with the penalty for moves that gained less than predicted.
        horizon_steps: the number of steps that the proposal is expected to last.
        next_event_known: whether the horizon ends at a cost change that the profile announced.
        moves: number of items that move.
    """

    step: int
    current_step_ns: int
    proposed_step_ns: int
    regret_ns: float = 0.0
    regret_steps: int = 0
    pause_ns: int
    horizon_steps: int
    next_event_known: bool = False
    moves: int

    @property
    def gain_ns(self) -> int:
        """The expected gain per step in ns."""
        return self.current_step_ns - self.proposed_step_ns

    @property
    def gain_fraction(self) -> float:
        """The gain as a share of the current step time."""
        return self.gain_ns / self.current_step_ns if self.current_step_ns else 0.0


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The thresholds of the policies.

    Attributes:
        min_gain: minimum gain of ``threshold``, as a share of the step time.
        margin: share of the pause at which ``regret`` moves.
    """

    min_gain: float = 0.02
    margin: float = 0.5


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """The state of a policy between decisions.

    Attributes:
        regret_state: of the policy ``regret``.
        window_selection: the short and the long window of ``threshold``.
        blocked: boundaries that were rolled back, and the step before which they are not proposed again.
    """

    regret_state: RegretState = field(default_factory=RegretState)
    window_selection: WindowSelection = field(default_factory=WindowSelection)
    blocked: tuple[tuple[tuple[int, ...], int], ...] = ()

    def after_move(self) -> PolicyState:
        """The state at the start of another partition."""
        return replace(self, regret_state=self.regret_state.after_move())

    def block(self, boundaries: tuple[int, ...], until: int) -> PolicyState:
        """The state with boundaries that are not proposed before step ``until``."""
        others = tuple(entry for entry in self.blocked if entry[0] != boundaries)
        return replace(self, blocked=(*others, (boundaries, until)))

    def blocked_until(self, boundaries: tuple[int, ...]) -> int:
        """The step from which these boundaries may be proposed; 0 if they were not rolled back."""
        return dict(self.blocked).get(boundaries, 0)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether to move, and the reason in one sentence with its numbers."""

    move: bool
    reason: str


def _gain_text(evidence: Evidence) -> str:
    return (
        f"step {evidence.current_step_ns / 1e6:.2f} -> {evidence.proposed_step_ns / 1e6:.2f} ms"
        f" ({evidence.gain_fraction:+.1%} gain), {evidence.moves} items to move, pause {evidence.pause_ns / 1e6:.0f} ms"
    )


def never(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Keep the active partition."""
    return Verdict(move=False, reason=f"policy never: {_gain_text(evidence)}"), state


def always(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Move whenever the balancer's partition differs."""
    return Verdict(move=evidence.moves > 0, reason=f"policy always: {_gain_text(evidence)}"), state


def threshold(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Move if the gain is large enough and, over the horizon, exceeds the pause."""
    text = _gain_text(evidence)
    if evidence.moves == 0:
        return Verdict(move=False, reason=f"the active partition is the balancer's: {text}"), state
    if evidence.gain_fraction < settings.min_gain:
        return Verdict(move=False, reason=f"gain below {settings.min_gain:.1%}: {text}"), state
    saved = evidence.gain_ns * evidence.horizon_steps
    if saved <= evidence.pause_ns:
        reason = f"gain over the horizon {saved / 1e6:.0f} ms, less than the pause: {text}"
        return Verdict(move=False, reason=reason), state
    steps = -(-evidence.pause_ns // evidence.gain_ns) if evidence.gain_ns > 0 else 0
    return Verdict(move=True, reason=f"breaks even after {steps} step{'' if steps == 1 else 's'}: {text}"), state


def regret(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Move if the regret, less its standard error, exceeds the pause.

    The regret is reset when the plan is applied, not here, because a plan may be refused. If the profile announces
    the next cost change, the regret expected until then decides now. Otherwise a gain that breaks even three times
    within the horizon does.
    """
    text = _gain_text(evidence)
    if evidence.moves == 0:
        return Verdict(move=False, reason=f"the active partition is the forecast optimum: {text}"), state
    regret_ns, needed = evidence.regret_ns, settings.margin * evidence.pause_ns
    until_event = regret_ns / max(1, evidence.regret_steps) * evidence.horizon_steps
    if evidence.next_event_known and until_event > 2 * evidence.pause_ns:
        reason = f"breaks even twice before the next event in {evidence.horizon_steps} steps: {text}"
        return Verdict(move=True, reason=reason), state
    if (
        evidence.regret_steps >= MIN_STEPS
        and regret_ns / evidence.regret_steps * evidence.horizon_steps > 3 * evidence.pause_ns
    ):
        reason = f"breaks even three times within {evidence.horizon_steps} steps: {text}"
        return Verdict(move=True, reason=reason), state
    regret_text = f"regret {max(0.0, regret_ns) / 1e6:.0f} ms of {evidence.regret_steps} steps"
    if regret_ns <= needed:
        return Verdict(move=False, reason=f"{regret_text} does not exceed {needed / 1e6:.0f} ms: {text}"), state
    return Verdict(move=True, reason=f"{regret_text} exceeds {needed / 1e6:.0f} ms: {text}"), state


POLICIES: Mapping[str, Callable[[Evidence, PolicySettings, PolicyState], tuple[Verdict, PolicyState]]] = {
    "never": never,
    "always": always,
    "threshold": threshold,
    "regret": regret,
}
