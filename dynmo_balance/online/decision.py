"""One decision of the online planner: from the state of a run to a plan or none. No clock, no files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .._common.errors import DynmoError
from ..costs.cost_window import costs_for, speeds_of_items
from ..formats.plan import Plan
from ..formats.profile import Header
from ..partition.problem import Place, Problem, places_of
from ..partition.registry import best_of, certified, solve
from ..planning.migration import BASE_PAUSE_NS
from ..planning.plan_builder import Proposal, chain_of, holdings, keep_plan, present, propose, to_plan
from ..planning.repack import Packing, packings, released_plan
from ..simulation.simulator import predict
from .policies import POLICIES, Evidence, Memory, Settings, Verdict
from .regret import SpeedsOfPlan, foreseen, look, step_times
from .rollback import Feedback, feedback_of
from .run_state import RunState


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How to decide; the command's help says what each option means."""

    balancer: str = "exact"
    policy: str = "threshold"
    granularity: str | None = None
    objective: str = "auto"
    settings: Settings = field(default_factory=Settings)
    window: int = 8
    min_records: int = 3
    every: int = 5
    horizon: int = 200
    min_layers: int = 1
    memory_bytes: int | None = None
    lockstep: bool = False
    pack_to: int | None = None
    pack_keep: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now: a plan to write, or none; the line for the log; and what the policy remembers."""

    plan: Plan | None
    line: str
    memory: Memory


def problem_of(header: Header, state: RunState, base: Plan, options: WatchOptions) -> Problem | None:
    """What to partition now, on the workers that are left; None while items are not sampled."""
    costs = state.window.costs(speeds_of_items(header, base.owner))
    if costs is None:
        return None
    by_id = {place.worker: place for place in places_of(header, memory_bytes=options.memory_bytes)}
    places: tuple[Place, ...] = tuple(by_id[worker] for worker in base.workers)
    return Problem(
        chain=chain_of(header, costs_for(base.schedule, costs), options.granularity),
        places=places,
        schedule=base.schedule,
        microbatches=header.microbatches,
        virtual_stages=base.virtual_stages_per_worker,
        link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
        link_latency_ns=header.link.latency_ns if header.link else 0,
        min_units=options.min_layers,
        current=holdings(base, places, base.virtual_stages_per_worker, base.schedule),
    )


def speeds_by_plan(header: Header, base: Plan, previous: Plan | None) -> SpeedsOfPlan:
    """The speeds of the items' workers under the active plan and the one before it; older plans count as ``base``."""
    plans = [plan for plan in (previous, base) if plan is not None]
    speeds = {plan.plan_id: speeds_of_items(header, plan.owner) for plan in plans}
    return lambda plan_id: speeds.get(plan_id, speeds[base.plan_id])


def weigh(
    problem: Problem,
    base: Plan,
    state: RunState,
    options: WatchOptions,
    feedback: Feedback,
    memory: Memory,
    speeds_of: SpeedsOfPlan,
) -> tuple[Proposal, Evidence, Memory]:
    """What to go to, the numbers for and against it, and what the policy remembers."""
    pause_ns = BASE_PAUSE_NS if state.base_pause_ns is None else state.base_pause_ns
    works = state.trace.works(speeds_of)
    due = state.next_event_step
    horizon = options.horizon if due is None else min(options.horizon, due - state.last_step)
    if options.policy == "regret":
        seen, boundaries = look(memory.missed, problem, base.boundaries, state.trace, works, pause_ns, options.balancer)
        memory = replace(memory, missed=seen)
        proposal = _presented(problem, boundaries, base, state)
    else:
        proposal = propose(
            problem,
            options.balancer,
            objective=options.objective,
            owner=base.owner,
            base_pause_ns=state.base_pause_ns,
        )
    now_ns, then_ns = predict(problem, base.boundaries).step_ns, proposal.timeline.step_ns
    if options.policy == "threshold" and options.balancer == "exact" and problem.virtual_stages == 1:
        long = solve(problem, foreseen(works, 0)).boundaries
        views = memory.views.after(
            problem,
            state.trace,
            works,
            (proposal.solution.boundaries, long),
            window=options.window,
            min_gain=options.settings.min_gain,
            pause_ns=pause_ns,
        )
        memory = replace(memory, views=views)
        if views.prefers_long:
            proposal, horizon = _presented(problem, long, base, state), min(horizon, len(works))
            now_ns, then_ns = (round(step_times(problem, works, each).mean()) for each in (base.boundaries, long))
    penalty = 1.0 if options.policy == "regret" else feedback.penalty  # its gain is measured, not promised
    evidence = Evidence(
        step=state.last_step,
        current_step_ns=now_ns,
        proposed_step_ns=then_ns,
        missed_ns=memory.missed.certain_ns,
        missed_steps=memory.missed.steps,
        pause_ns=round((proposal.migration.pause_ns or 0) * penalty),
        horizon_steps=horizon,
        next_event_known=due is not None,
        moves=len(proposal.migration.moves),
    )
    return proposal, evidence, memory


def _presented(problem: Problem, boundaries: tuple[int, ...], base: Plan, state: RunState) -> Proposal:
    """A proposal with boundaries that do not come from the balancer."""
    solution = certified(problem, boundaries, best_of(problem))
    return present(problem, solution, owner=base.owner, base_pause_ns=state.base_pause_ns)


def packing_of(problem: Problem, options: WatchOptions) -> Packing | None:
    """The release of workers that the options ask for and the costs allow now; None where there is none."""
    if options.pack_to is None and options.pack_keep is None:
        return None
    keep = options.pack_keep if options.pack_keep is not None else 1e-9
    found = packings(problem, keep)
    count = max(found.balanced.workers, options.pack_to or 1)
    chosen = next((row for row in found.rows[count - 1 :] if row.step_ns is not None), None)
    if chosen is None or chosen.step_ns is None or chosen.workers >= len(problem.places):
        return None
    return Packing(workers=chosen.workers, kept=found.balanced_step_ns / chosen.step_ns)


def decide(
    state: RunState, base: Plan, options: WatchOptions, memory: Memory | None = None, previous: Plan | None = None
) -> Decision:
    """Weigh a move now; an ask is always answered with a plan, if need be to keep the partition.

    Args:
        state: of the run.
        base: the active plan.
        options: how to decide.
        memory: of the policy, from the decision before.
        previous: the plan that was in force before ``base``, to go back to if the last move disappointed.
    """
    header = state.header
    asked = state.asked
    read_to = max(state.last_step, asked or 0)
    run_id = header.run_id if header is not None else base.run_id
    memory = memory or Memory()

    def keep(reason: str, memory: Memory = memory) -> Decision:
        line = f"step {read_to}: keep plan {base.plan_id}: {reason}"
        if asked is None:
            return Decision(plan=None, line=line, memory=memory)
        plan = keep_plan(base, run_id=run_id, read_to_step=read_to, balancer=options.balancer, reason=reason)
        return Decision(plan=plan, line=line, memory=memory)

    def move(proposal: Proposal, balancer: str, reason: str, memory: Memory) -> Decision:
        # The evidence may be of the long view; a plan's gain compares both steps on the costs that it records.
        base_step_ns = predict(proposal.problem, base.boundaries).step_ns
        plan = to_plan(
            proposal,
            run_id=run_id,
            balancer=balancer,
            base=base,
            read_to_step=read_to,
            base_step_ns=base_step_ns,
            reason=reason,
        )
        return Decision(plan=plan, line=f"step {read_to}: move from plan {base.plan_id}: {reason}", memory=memory)

    if header is None or len(state.window) < options.min_records:
        return keep(f"{len(state.window)} of {options.min_records} step records since the last change of costs")
    problem = problem_of(header, state, base, options)
    if problem is None:
        return keep(f"{state.window.unsampled()} items are not sampled yet")
    speeds_of = speeds_by_plan(header, base, previous)
    feedback = feedback_of(state, base, previous, problem, speeds_of)
    if feedback.refused is not None:
        memory = memory.refusing(feedback.refused, feedback.refused_until)
    try:
        packing = packing_of(problem, options)
        if packing is not None:
            reference = "balanced"
            _, plan = released_plan(header, problem, base, packing, read_to, reference, state.base_pause_ns)
            return Decision(
                plan=plan,
                line=f"step {read_to}: release workers {list(plan.released_workers)}: {plan.reason}",
                memory=Memory(),
            )
        proposal, evidence, memory = weigh(problem, base, state, options, feedback, memory, speeds_of)
        if feedback.roll_back and previous is not None and options.policy != "always":
            back = certified(problem, previous.boundaries, best_of(problem))
            returned = present(problem, back, owner=base.owner, base_pause_ns=state.base_pause_ns)
            return move(returned, "manual", feedback.reason, Memory(refused=memory.refused))
    except DynmoError as error:
        return keep(f"no partition: {error}")
    refused_until = memory.refused_until(proposal.solution.boundaries)
    if state.last_step < refused_until:
        return keep(f"the partition was rolled back; not proposed again before step {refused_until}", memory)
    verdict, memory = verdict_of(evidence, options, memory)
    if not verdict.move:
        return keep(verdict.reason, memory)
    return move(proposal, options.balancer, verdict.reason, memory)


def verdict_of(evidence: Evidence, options: WatchOptions, memory: Memory) -> tuple[Verdict, Memory]:
    """The policy's verdict."""
    return POLICIES[options.policy](evidence, options.settings, memory)
