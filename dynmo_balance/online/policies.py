"""When a better partition is worth its move: pure functions from the numbers of a decision to a verdict.

``regret`` is the ski-rental rule: what staying has cost so far is added up, and the move is made when that outweighs
what the move costs. So no change of the model costs much more than twice what hindsight would have paid for it. What it
adds up is measured out of sample (``regret``) and counts less its standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from .regret import RegretState
from .window_selection import WindowSelection

FEWEST = 8
"""No gain decides before it was seen in so many steps."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers that a decision rests on.

    Attributes:
        step: of the decision.
        current_step_ns, proposed_step_ns: simulated with the same costs.
        regret_ns: what staying has cost in ``regret_steps`` steps, out of sample and less its standard error.
        pause_ns: what the migration is expected to cost, with the penalty for earlier disappointments.
        horizon_steps: for how many steps the proposal is expected to hold.
        next_event_known: whether that is because the profile said when the costs change next.
        moves: how many items move.
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
        """What a step is expected to gain."""
        return self.current_step_ns - self.proposed_step_ns

    @property
    def gain_fraction(self) -> float:
        """The gain as a share of the current step time."""
        return self.gain_ns / self.current_step_ns if self.current_step_ns else 0.0


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The thresholds of the policies."""

    min_gain: float = 0.02
    margin: float = 0.5


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What a policy carries from one decision to the next.

    Attributes:
        regret_state: what staying has missed.
        window_selection: the short and the long view of the past.
        blocked: boundaries that were rolled back, and the step before which they are not proposed again.
    """

    regret_state: RegretState = field(default_factory=RegretState)
    window_selection: WindowSelection = field(default_factory=WindowSelection)
    blocked: tuple[tuple[tuple[int, ...], int], ...] = ()

    def after_move(self) -> PolicyState:
        """The same at the beginning of another partition."""
        return replace(self, regret_state=self.regret_state.after_move())

    def block(self, boundaries: tuple[int, ...], until: int) -> PolicyState:
        """The same with boundaries that are not proposed before step ``until``."""
        others = tuple(entry for entry in self.blocked if entry[0] != boundaries)
        return replace(self, blocked=(*others, (boundaries, until)))

    def blocked_until(self, boundaries: tuple[int, ...]) -> int:
        """The step from which on these boundaries may be proposed; 0 where they were not rolled back."""
        return dict(self.blocked).get(boundaries, 0)


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


def never(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Keep what is in force."""
    return Verdict(move=False, reason=f"policy never: {_gain_text(evidence)}"), state


def always(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Take the balancer's answer whenever it differs."""
    return Verdict(move=evidence.moves > 0, reason=f"policy always: {_gain_text(evidence)}"), state


def threshold(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Move when the gain is large enough and, over the horizon, outweighs the pause."""
    text = _gain_text(evidence)
    if evidence.moves == 0:
        return Verdict(move=False, reason=f"the partition in force is the balancer's answer: {text}"), state
    if evidence.gain_fraction < settings.min_gain:
        return Verdict(move=False, reason=f"gain below {settings.min_gain:.1%}: {text}"), state
    saved = evidence.gain_ns * evidence.horizon_steps
    if saved <= evidence.pause_ns:
        reason = f"{evidence.horizon_steps} steps would save {saved / 1e6:.0f} ms, less than the pause: {text}"
        return Verdict(move=False, reason=reason), state
    steps = -(-evidence.pause_ns // evidence.gain_ns) if evidence.gain_ns > 0 else 0
    return Verdict(move=True, reason=f"pays within {steps} steps: {text}"), state


def regret(evidence: Evidence, settings: PolicySettings, state: PolicyState) -> tuple[Verdict, PolicyState]:
    """Move when what staying has certainly missed outweighs the pause.

    What was missed starts again at 0 when the plan is taken, not here: a plan may be refused.

    Where the profile says when the costs change next, what would be missed until then decides at once; where nobody
    says, a gain so large that it pays three times within the horizon does.
    """
    text = _gain_text(evidence)
    if evidence.moves == 0:
        return Verdict(move=False, reason=f"the partition in force is the one foreseen as best: {text}"), state
    regret_ns, needed = evidence.regret_ns, settings.margin * evidence.pause_ns
    until_event = regret_ns / max(1, evidence.regret_steps) * evidence.horizon_steps
    if evidence.next_event_known and until_event > 2 * evidence.pause_ns:
        reason = f"pays twice before the next event in {evidence.horizon_steps} steps: {text}"
        return Verdict(move=True, reason=reason), state
    if (
        evidence.regret_steps >= FEWEST
        and regret_ns / evidence.regret_steps * evidence.horizon_steps > 3 * evidence.pause_ns
    ):
        reason = f"pays three times within {evidence.horizon_steps} steps: {text}"
        return Verdict(move=True, reason=reason), state
    regret = f"regret {max(0.0, regret_ns) / 1e6:.0f} ms of {evidence.regret_steps} steps"
    if regret_ns <= needed:
        return Verdict(move=False, reason=f"{regret}, of {needed / 1e6:.0f} ms that a move asks for: {text}"), state
    return Verdict(move=True, reason=f"{regret} outweighs {needed / 1e6:.0f} ms: {text}"), state


POLICIES: Mapping[str, Callable[[Evidence, PolicySettings, PolicyState], tuple[Verdict, PolicyState]]] = {
    "never": never,
    "always": always,
    "threshold": threshold,
    "regret": regret,
}
