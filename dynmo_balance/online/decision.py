"""One decision of the online planner: from the state of a run to a plan or none. Pure: no clock, no files.

::

    RunState, base plan --problem_of--> PartitionProblem
                                             |  evaluate_last_move   penalty, rollback, blocked partition
                                             |  find_packing         release of workers, if it is enabled
                                             |  evaluate_move        proposal and Evidence
                                             |  add_experts          experts move, too, if it is enabled
                                             v  verdict_of           policy
                        Decision: plan or None, log line, PolicyState

Purity is what makes a restart harmless: the same records give the same decisions, so a planner that was killed repeats
the past ones and continues with the same state. The order above matters too: a rollback and a release are decided
before the policy, which compares gains and knows neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .._common.errors import DynmoError
from ..costs.cost_window import costs_for, speeds_of_items
from ..costs.expert_loads import mean_tokens
from ..formats.plan import Plan, expert_keys
from ..formats.profile import Header
from ..partition.balance import certify, solve_best
from ..partition.exact import solve
from ..partition.problem import PartitionProblem, WorkerSlot, worker_slots
from ..planning.expert_copies import copy_costs
from ..planning.joint_plan import (
    JointOptions,
    copies_ns,
    describe_missing_memory,
    expert_choices,
    experts_of_plan,
    pause_of,
    ranks_without_memory,
    weigh_experts,
)
from ..planning.migration import BASE_PAUSE_NS
from ..planning.plan_builder import Proposal, chain_of, current_spans, keep_plan, make_proposal, propose, to_plan
from ..planning.repack import Packing, make_release_plan, repack_table
from ..simulation.simulator import predict
from .policies import POLICIES, PolicyDecision, PolicyInputs, PolicySettings, PolicyState
from .regret import SpeedsOfPlan, forecast_work, step_times, update_regret
from .rollback import Feedback, evaluate_last_move
from .run_state import RunState

GUARDED = ("threshold", "regret")
"""Policies that may not lose more than the budget of ``baseline``; the others exist for comparison."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How to decide; the help of ``dynmo-plan watch`` describes each option.

    Attributes:
        balancer, policy, granularity, objective: names.
        settings: thresholds of the policies.
        window: number of step records that costs are the median of.
        min_records: minimum number of records after a cost change.
        every: steps between decisions.
        horizon: steps that a plan is expected to last.
        min_layers: minimum number of units per stage.
        memory_bytes: per worker; None is as in the profile.
        lockstep: whether to decide only on plan requests.
        pack_to: release workers down to this number.
        min_throughput_fraction: release workers while this share of the throughput is kept.
        experts: whether experts move to other ranks of their group, by the same plans.
    """

    balancer: str = "exact"
    policy: str = "threshold"
    granularity: str | None = None
    objective: str = "auto"
    settings: PolicySettings = field(default_factory=PolicySettings)
    window: int = 8
    min_records: int = 3
    every: int = 5
    horizon: int = 200
    min_layers: int = 1
    memory_bytes: int | None = None
    lockstep: bool = False
    pack_to: int | None = None
    min_throughput_fraction: float | None = None
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A plan to publish or None, the log line, and the state of the policy for the next decision."""

    plan: Plan | None
    line: str
    policy_state: PolicyState


def problem_of(header: Header, state: RunState, base: Plan, options: WatchOptions) -> PartitionProblem | None:
    """The problem to partition now, on the workers of the base plan; None while items are not sampled.

    Args:
        header: of the segment.
        state: of the run; its window has the costs.
        base: the active plan.
        options: granularity, memory limit in bytes and minimum number of units per stage.
    """
    costs = state.window.costs(speeds_of_items(header, base.owner))
    if costs is None:
        return None
    # The workers of the active plan and not of the header, which still lists released ones.
    by_id = {slot.worker: slot for slot in worker_slots(header, memory_bytes=options.memory_bytes)}
    slots: tuple[WorkerSlot, ...] = tuple(by_id[worker] for worker in base.workers)
    return PartitionProblem(
        chain=chain_of(header, costs_for(base.schedule, costs), options.granularity),
        slots=slots,
        schedule=base.schedule,
        microbatches=header.microbatches,
        virtual_stages=base.virtual_stages_per_worker,
        link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
        link_latency_ns=header.link.latency_ns if header.link else 0,
        min_units=options.min_layers,
        current=current_spans(base, slots, base.virtual_stages_per_worker, base.schedule),
    )


def speeds_by_plan(header: Header, base: Plan, previous: Plan | None) -> SpeedsOfPlan:
    """The speeds of the items' workers under the active plan and the one before it; older plans count as ``base``."""
    plans = [plan for plan in (previous, base) if plan is not None]
    speeds = {plan.plan_id: speeds_of_items(header, plan.owner) for plan in plans}
    return lambda plan_id: speeds.get(plan_id, speeds[base.plan_id])


def evaluate_move(
    problem: PartitionProblem,
    base: Plan,
    state: RunState,
    options: WatchOptions,
    feedback: Feedback,
    policy_state: PolicyState,
    speeds_of: SpeedsOfPlan,
) -> tuple[Proposal, PolicyInputs, PolicyState]:
    """The partition to move to, the inputs of the policy, and the new policy state.

    Args:
        problem: on the active workers.
        base: the active plan.
        state: of the run.
        options: how to decide.
        feedback: on the last move.
        policy_state: from the previous decision.
        speeds_of: speeds of the items' workers under a plan.
    """
    pause_ns = BASE_PAUSE_NS if state.base_pause_ns is None else state.base_pause_ns
    works = state.trace.works(speeds_of)
    baseline = policy_state.baseline.after(problem, base.boundaries, state.trace, works, pause_ns)
    policy_state = replace(policy_state, baseline=baseline)
    # A gain does not outlast the next change of costs, when a new partition is due anyway.
    due = state.next_event_step
    horizon = options.horizon if due is None else min(options.horizon, due - state.last_step)
    if options.policy == "regret":
        regret, boundaries = update_regret(
            policy_state.regret_state, problem, base.boundaries, state.trace, works, pause_ns, options.balancer
        )
        policy_state = replace(policy_state, regret_state=regret)
        proposal = _proposal_for(problem, boundaries, base, state)
    else:
        proposal = propose(
            problem,
            options.balancer,
            objective=options.objective,
            owner=base.owner,
            base_pause_ns=state.base_pause_ns,
        )
    now_ns, then_ns = predict(problem, base.boundaries).step_ns, proposal.timeline.step_ns
    # Only the exact solver takes other weights than the problem's costs, which the long window needs.
    if options.policy in ("threshold", "regret") and options.balancer == "exact" and problem.virtual_stages == 1:
        long_boundaries = solve(problem, forecast_work(works, 0)).boundaries
        window_selection = policy_state.window_selection.after(
            problem,
            state.trace,
            works,
            (proposal.solution.boundaries, long_boundaries),
            window=options.window,
            min_gain=options.settings.min_gain,
            pause_ns=pause_ns,
        )
        policy_state = replace(policy_state, window_selection=window_selection)
        if window_selection.uses_long:
            # Costs oscillate here, so a gain is expected for no longer than the past that it was measured on.
            proposal, horizon = _proposal_for(problem, long_boundaries, base, state), min(horizon, len(works))
            now_ns, then_ns = (
                round(step_times(problem, works, each).mean()) for each in (base.boundaries, long_boundaries)
            )
    penalty = 1.0 if options.policy == "regret" else feedback.penalty  # its gain is measured, not predicted
    inputs = PolicyInputs(
        step=state.last_step,
        current_step_ns=now_ns,
        proposed_step_ns=then_ns,
        regret_ns=policy_state.regret_state.confident_ns,
        regret_steps=policy_state.regret_state.steps,
        pause_ns=round((proposal.migration.pause_ns or 0) * penalty),
        horizon_steps=horizon,
        next_event_known=due is not None,
        moves=len(proposal.migration.moves),
    )
    return proposal, inputs, policy_state


def _proposal_for(problem: PartitionProblem, boundaries: tuple[int, ...], base: Plan, state: RunState) -> Proposal:
    """A proposal with boundaries that do not come from the balancer."""
    solution = certify(problem, boundaries, solve_best(problem))
    return make_proposal(problem, solution, owner=base.owner, base_pause_ns=state.base_pause_ns)


def add_experts(
    proposal: Proposal,
    inputs: PolicyInputs,
    problem: PartitionProblem,
    base: Plan,
    state: RunState,
    options: WatchOptions,
    penalty: float,
) -> tuple[Proposal, PolicyInputs, dict[str, Any] | None, str]:
    """The proposal with the experts that should move, too; unchanged where none should.

    Args:
        proposal, inputs: of the move of layers.
        problem: on the active workers, with the costs as measured.
        base: the active plan.
        state: of the run; it has the tokens of the experts.
        options: how to decide.
        penalty: factor on the pause.

    Returns:
        the proposal, the inputs of the policy, the key of the plan's experts (None keeps those of the base), and a
        sentence on ranks without memory for copies of experts, or nothing.
    """
    header = state.header
    if not options.experts or header is None or not state.counted:
        return proposal, inputs, None, ""
    bandwidth = header.replica_bandwidth or (None if header.link is None else header.link.bandwidth_bytes_per_s)
    copies = copy_costs(header, bandwidth)
    joint = JointOptions(
        balancer=options.balancer,
        objective=options.objective,
        horizon_steps=inputs.horizon_steps,
        base_pause_ns=state.base_pause_ns,
        penalty=penalty,
        bandwidth=bandwidth,
        copies=copies,
    )
    step_ns = {
        name: ns * problem.microbatches
        for name, ns in zip(problem.chain.names, problem.chain.costs.total_ns, strict=True)
    }
    tokens = mean_tokens(list(state.counted), header, "profile")
    choices = expert_choices(header, tokens, base, copies, step_ns)
    found, chosen = weigh_experts(problem, proposal, base, choices, joint)
    limits = describe_missing_memory(ranks_without_memory(found, base, choices, copies))
    if not chosen and found is proposal:
        return proposal, inputs, None, limits
    layers, moves = experts_of_plan(base, chosen, bandwidth)
    # The tokens are a mean over many steps, so that the gain needs no further test out of sample.
    inputs = replace(
        inputs,
        current_step_ns=predict(problem, base.boundaries).step_ns + copies_ns(base.stages, base, (), copies),
        proposed_step_ns=found.timeline.step_ns + copies_ns(found.stages, base, chosen, copies),
        pause_ns=round(pause_of(found, chosen, joint) * penalty),
        moves=len(found.migration.moves),
        # A plan may only take copies away, which moves nothing.
        expert_moves=max(moves.moves + moves.copies, len(chosen)),
    )
    return found, inputs, expert_keys(layers, moves), limits


def find_packing(problem: PartitionProblem, options: WatchOptions) -> Packing | None:
    """The release of workers that the options permit with the current costs; None if there is none."""
    if options.pack_to is None and options.min_throughput_fraction is None:
        return None
    # With ``pack_to`` alone, any throughput is accepted; the share must be above 0.
    keep = options.min_throughput_fraction if options.min_throughput_fraction is not None else 1e-9
    found = repack_table(problem, keep)
    count = max(found.balanced.workers, options.pack_to or 1)
    # ``rows[i]`` is the step on ``i + 1`` workers.
    chosen = next((row for row in found.rows[count - 1 :] if row.step_ns is not None), None)
    if chosen is None or chosen.step_ns is None or chosen.workers >= len(problem.slots):
        return None
    return Packing(workers=chosen.workers, throughput_fraction=found.balanced_step_ns / chosen.step_ns)


def decide(
    state: RunState,
    base: Plan,
    options: WatchOptions,
    policy_state: PolicyState | None = None,
    previous: Plan | None = None,
) -> Decision:
    """Decide on a move now; a plan request is always answered with a plan, if necessary with ``keep``.

    Args:
        state: of the run.
        base: the active plan.
        options: how to decide.
        policy_state: from the previous decision.
        previous: the plan that was active before ``base``, for a rollback if the last move did harm.
    """
    header = state.header
    request_step = state.requested_step
    read_to = max(state.last_step, request_step or 0)
    run_id = header.run_id if header is not None else base.run_id
    policy_state = policy_state or PolicyState()

    def keep(reason: str, policy_state: PolicyState = policy_state) -> Decision:
        line = f"step {read_to}: keep plan {base.plan_id}: {reason}"
        if request_step is None:
            return Decision(plan=None, line=line, policy_state=policy_state)
        plan = keep_plan(base, run_id=run_id, read_to_step=read_to, balancer=options.balancer, reason=reason)
        return Decision(plan=plan, line=line, policy_state=policy_state)

    def move(
        proposal: Proposal,
        balancer: str,
        reason: str,
        policy_state: PolicyState,
        *,
        experts: dict[str, Any] | None = None,
        measured: PartitionProblem | None = None,
    ) -> Decision:
        # The policy may use the long window; the gain of a plan compares both steps on the costs that it records.
        # Where experts move, those of the base are the measured ones.
        base_step_ns = predict(measured or proposal.problem, base.boundaries).step_ns
        plan = to_plan(
            proposal,
            run_id=run_id,
            balancer=balancer,
            base=base,
            read_to_step=read_to,
            base_step_ns=base_step_ns,
            reason=reason,
            experts=experts,
        )
        return Decision(
            plan=plan, line=f"step {read_to}: move from plan {base.plan_id}: {reason}", policy_state=policy_state
        )

    if header is None or not state.has_records(options.min_records):
        return keep(f"{len(state.window)} of {options.min_records} step records since the last cost change")
    problem = problem_of(header, state, base, options)
    if problem is None:
        return keep(f"{state.window.unsampled()} items are not sampled yet")
    speeds_of = speeds_by_plan(header, base, previous)
    feedback = evaluate_last_move(state, base, previous, problem)
    deliveries = policy_state.deliveries.after(feedback, state, base)
    policy_state = replace(policy_state, deliveries=deliveries)
    if feedback.blocked is not None:
        policy_state = policy_state.block(feedback.blocked, feedback.blocked_until)
    try:
        packing = find_packing(problem, options)
        if packing is not None:
            reference = "balanced"
            _, plan = make_release_plan(header, problem, base, packing, read_to, reference, state.base_pause_ns)
            return Decision(
                plan=plan,
                line=f"step {read_to}: release workers {list(plan.released_workers)}: {plan.reason}",
                # Regret and windows are those of another number of workers.
                policy_state=PolicyState(deliveries=deliveries),
            )
        proposal, inputs, policy_state = evaluate_move(problem, base, state, options, feedback, policy_state, speeds_of)
        proposal, inputs, experts, limits = add_experts(
            proposal, inputs, problem, base, state, options, feedback.penalty
        )
        target = _partition_to_return_to(feedback, previous, state, options, policy_state, inputs.pause_ns)
        if target is not None:
            # What was forecast led away from there.
            returned_state = PolicyState(
                blocked=policy_state.blocked, deliveries=deliveries, baseline=policy_state.baseline
            )
            return move(_proposal_for(problem, target[0], base, state), "manual", target[1], returned_state)
    except DynmoError as error:
        # An infeasible problem must not end the planner: the costs of the next steps may permit a partition again.
        return keep(f"no partition: {error}")
    if (waiting := _why_wait(proposal, base, state, options, policy_state)) is not None:
        return keep(waiting, policy_state)
    policy_decision, policy_state = apply_policy(inputs, options, policy_state, proposal.solution.boundaries)
    reason = "; ".join(filter(None, (policy_decision.reason, limits)))
    if not policy_decision.move:
        return keep(reason, policy_state)
    return move(proposal, options.balancer, reason, policy_state, experts=experts, measured=problem)


def _partition_to_return_to(
    feedback: Feedback,
    previous: Plan | None,
    state: RunState,
    options: WatchOptions,
    policy_state: PolicyState,
    pause_ns: int,
) -> tuple[tuple[int, ...], str] | None:
    """The boundaries of an earlier partition that costs less, and why; None if the policy decides."""
    if feedback.roll_back and previous is not None and options.policy != "always":
        return previous.boundaries, feedback.reason
    baseline = policy_state.baseline
    is_permitted = state.last_step >= policy_state.blocked_until(baseline.first)
    if options.policy in GUARDED and is_permitted and baseline.must_return(pause_ns):
        return baseline.first, baseline.return_reason(pause_ns)
    return None


def _why_wait(
    proposal: Proposal, base: Plan, state: RunState, options: WatchOptions, policy_state: PolicyState
) -> str | None:
    """Why a proposal has to wait, whatever the policy: what earlier moves delivered; None if it has not."""
    blocked_until = policy_state.blocked_until(proposal.solution.boundaries)
    if state.last_step < blocked_until:
        return f"the partition was rolled back; it is not proposed again before step {blocked_until}"
    return None if options.policy == "always" else policy_state.deliveries.why_wait(state, base)


def apply_policy(
    inputs: PolicyInputs, options: WatchOptions, policy_state: PolicyState, boundaries: tuple[int, ...] = ()
) -> tuple[PolicyDecision, PolicyState]:
    """Whether the policy moves layers to ``boundaries``, and its new state."""
    # Regret is that of forecasts; a move of experts, and one to the partition of the long past, has to break even over
    # the horizon.
    is_forecast = not inputs.expert_moves and not policy_state.window_selection.uses_long
    policy = "threshold" if options.policy == "regret" and not is_forecast else options.policy
    decision, policy_state = POLICIES[policy](inputs, options.settings, policy_state)
    if decision.move and inputs.moves and options.policy in GUARDED:
        staying = policy_state.baseline.why_stay(boundaries, inputs.pause_ns)
        decision = decision if staying is None else PolicyDecision(move=False, reason=staying)
    return decision, policy_state
