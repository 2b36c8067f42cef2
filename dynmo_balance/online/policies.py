"""The policies: pure functions from the numbers of a decision to whether to move.

``regret`` is the ski-rental rule (Karlin, Manasse, Rudolph and Sleator 1988, "Competitive snoopy caching"): the cost of
keeping the partition accumulates, and the move is made when this cost exceeds the cost of the move. So no change of the
model costs much more than twice the offline optimum. The regret is measured out of sample (``online.regret``), less its
standard error.

Measured totals over the offline optimum are in ``tests/benchmarks/plan_results.md``, for six techniques and for noise
alone; ``tests/unit/dynmo_balance/online/test_policies.py`` keeps them close. A new threshold has to be better there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from .baseline import Baseline
from .regret import RegretState
from .rollback import Deliveries
from .window_selection import WindowSelection

MIN_STEPS = 8
"""Minimum number of measured steps before a gain decides."""


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
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
        expert_moves: number of experts that move.
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
    expert_moves: int = 0

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
        margin: share of the pause at which ``regret`` moves. Of 0.2 to 1, none was better on all recorded traces.
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
        deliveries: what the moves so far delivered.
        baseline: what they cost against never moving.
    """

    regret_state: RegretState = field(default_factory=RegretState)
    window_selection: WindowSelection = field(default_factory=WindowSelection)
    blocked: tuple[tuple[tuple[int, ...], int], ...] = ()
    deliveries: Deliveries = field(default_factory=Deliveries)
    baseline: Baseline = field(default_factory=Baseline)

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
class PolicyDecision:
    """Whether to move, and the reason in one sentence with its numbers."""

    move: bool
    reason: str


def _gain_text(inputs: PolicyInputs) -> str:
    return (
        f"step {inputs.current_step_ns / 1e6:.2f} -> {inputs.proposed_step_ns / 1e6:.2f} ms"
        f" ({inputs.gain_fraction:+.1%} gain), {inputs.moves} items{_experts_text(inputs)} to move,"
        f" pause {inputs.pause_ns / 1e6:.0f} ms"
    )


def _experts_text(inputs: PolicyInputs) -> str:
    return f" and {inputs.expert_moves} experts" if inputs.expert_moves else ""


def never(inputs: PolicyInputs, settings: PolicySettings, state: PolicyState) -> tuple[PolicyDecision, PolicyState]:
    """Keep the active partition."""
    return PolicyDecision(move=False, reason=f"policy never: {_gain_text(inputs)}"), state


def always(inputs: PolicyInputs, settings: PolicySettings, state: PolicyState) -> tuple[PolicyDecision, PolicyState]:
    """Move whenever the balancer's partition differs."""
    is_move = inputs.moves + inputs.expert_moves > 0
    return PolicyDecision(move=is_move, reason=f"policy always: {_gain_text(inputs)}"), state


def threshold(inputs: PolicyInputs, settings: PolicySettings, state: PolicyState) -> tuple[PolicyDecision, PolicyState]:
    """Move if the gain is large enough and, over the horizon, exceeds the pause."""
    text = _gain_text(inputs)
    if inputs.moves + inputs.expert_moves == 0:
        return PolicyDecision(move=False, reason=f"the active partition is the balancer's: {text}"), state
    if inputs.gain_fraction < settings.min_gain:
        return PolicyDecision(move=False, reason=f"gain below {settings.min_gain:.1%}: {text}"), state
    saved = inputs.gain_ns * inputs.horizon_steps
    if saved <= inputs.pause_ns:
        reason = f"gain over the horizon {saved / 1e6:.0f} ms, less than the pause: {text}"
        return PolicyDecision(move=False, reason=reason), state
    steps = -(-inputs.pause_ns // inputs.gain_ns) if inputs.gain_ns > 0 else 0
    return PolicyDecision(move=True, reason=f"breaks even after {steps} step{'' if steps == 1 else 's'}: {text}"), state


def regret(inputs: PolicyInputs, settings: PolicySettings, state: PolicyState) -> tuple[PolicyDecision, PolicyState]:
    """Move if the regret, less its standard error, exceeds the pause.

    The regret is reset when the plan is applied, not here, because a plan may be refused. If the profile announces
    the next cost change, the regret expected until then decides now. Otherwise a gain that breaks even three times
    within the horizon does.
    """
    text = _gain_text(inputs)
    if inputs.moves == 0:
        return PolicyDecision(move=False, reason=f"the active partition is the forecast optimum: {text}"), state
    regret_ns, needed = inputs.regret_ns, settings.margin * inputs.pause_ns
    until_event = regret_ns / max(1, inputs.regret_steps) * inputs.horizon_steps
    # After an announced change the regret starts at 0, and waiting for it would waste part of a known time. Twice the
    # pause leaves room for the error of the first few measured steps.
    if inputs.next_event_known and until_event > 2 * inputs.pause_ns:
        reason = f"breaks even twice before the next event in {inputs.horizon_steps} steps: {text}"
        return PolicyDecision(move=True, reason=reason), state
    if (
        inputs.regret_steps >= MIN_STEPS
        and regret_ns / inputs.regret_steps * inputs.horizon_steps > 3 * inputs.pause_ns
    ):
        reason = f"breaks even three times within {inputs.horizon_steps} steps: {text}"
        return PolicyDecision(move=True, reason=reason), state
    regret_text = f"regret {max(0.0, regret_ns) / 1e6:.0f} ms of {inputs.regret_steps} steps"
    if regret_ns <= needed:
        return PolicyDecision(move=False, reason=f"{regret_text} does not exceed {needed / 1e6:.0f} ms: {text}"), state
    return PolicyDecision(move=True, reason=f"{regret_text} exceeds {needed / 1e6:.0f} ms: {text}"), state


POLICIES: Mapping[str, Callable[[PolicyInputs, PolicySettings, PolicyState], tuple[PolicyDecision, PolicyState]]] = {
    "never": never,
    "always": always,
    "threshold": threshold,
    "regret": regret,
}
