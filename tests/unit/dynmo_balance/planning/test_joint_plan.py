"""Layers and experts in one plan, against each of the two alone."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from dynmo_balance.formats.plan import EXPERTS_KEY, Migration, Plan, Stage
from dynmo_balance.planning.joint_plan import (
    ExpertChoice,
    JointOptions,
    max_tokens,
    pause_of,
    placement_in_order,
    transfer_of,
    weigh_experts,
    with_experts,
)
from dynmo_balance.planning.plan_builder import propose
from dynmo_balance.simulation.simulator import predict
from tests.tables import table
from tests.unit.dynmo_balance.problems import make_chain, make_problem

OPTIONS = JointOptions(
    balancer="exact", objective="auto", horizon_steps=100, base_pause_ns=1000, penalty=1.0, bandwidth=10**9
)


def plan_of(problem, boundaries):
    stages = tuple(
        Stage(stage=at, worker=at, items=problem.chain.names[begin:end])
        for at, (begin, end) in enumerate(pairwise(boundaries))
    )
    return Plan(
        plan_id=0,
        run_id="r",
        base_plan_id=None,
        read_to_step=0,
        action="move",
        apply_at_step=None,
        balancer="initial",
        schedule=problem.schedule,
        virtual_stages_per_worker=1,
        stages=stages,
        released_workers=(),
        predicted=None,
        optimality=None,
        migration=Migration(),
        reason="r",
    )


def choice_of(problem, item, tokens, after, size=1000):
    return ExpertChoice(
        item=problem.chain.names[item], tokens=tokens, before=(0, 0, 1, 1), after=after, expert_bytes=size
    )


def costs(seed):
    """A random problem of 8 items on 3 workers, a base, and experts of some items that may be balanced."""
    rng = random.Random(seed)
    problem = make_problem(make_chain([rng.randint(100, 900) for _ in range(8)]), 3, microbatches=6)
    cuts = sorted(rng.sample(range(1, 8), 2))
    choices = [
        choice_of(problem, item, (80, 60, 30, 10), (0, 1, 1, 0), rng.choice((0, 10, 10_000)))
        for item in rng.sample(range(8), 3)
    ]
    return problem, plan_of(problem, (0, *cuts, 8)), choices


def step_and_pause(problem, base, choices, options=OPTIONS):
    """Step and pause of the best partition for these placements, and of the base's."""
    best = propose(with_experts(problem, choices), "exact", owner=base.owner, base_pause_ns=options.base_pause_ns)
    stay = predict(with_experts(problem, choices), base.boundaries).step_ns
    transfer = transfer_of(choices, options.bandwidth).pause_ns
    pause = transfer + options.base_pause_ns if choices else 0
    return (best.timeline.step_ns, pause_of(best, choices, options)), (stay, pause)


@table("seed", range(40))
def test_joint_plan_is_never_worse_than_one_kind_of_moves(seed):
    problem, base, choices = costs(seed)
    layers = propose(problem, "exact", owner=base.owner, base_pause_ns=1000)
    found, chosen = weigh_experts(problem, layers, base, choices, OPTIONS)
    cost = 100 * found.timeline.step_ns + pause_of(found, chosen, OPTIONS)
    candidates = [*step_and_pause(problem, base, choices), *step_and_pause(problem, base, ())]
    if chosen:
        assert cost <= min(100 * step + pause for step, pause in candidates)
        # Each of them is needed: without it the cost is larger.
        for fewer in combinations(chosen, len(chosen) - 1):
            other = with_experts(problem, fewer)
            without = predict(other, found.solution.boundaries).step_ns
            moved = (found.migration.pause_ns or (1000 if fewer else 0)) + transfer_of(fewer, 10**9).pause_ns
            assert 100 * without + moved > cost
    else:
        assert found is layers


def test_joint_plans_of_random_problems_move_both():
    kinds = set()
    for seed in range(40):
        problem, base, choices = costs(seed)
        layers = propose(problem, "exact", owner=base.owner, base_pause_ns=1000)
        found, chosen = weigh_experts(problem, layers, base, choices, OPTIONS)
        kinds.add((bool(found.migration.moves), len(chosen)))
    assert {(True, 2), (True, 3), (False, 3)} <= kinds


def test_even_experts_change_which_layers_move():
    """With the skew both stages are equal; without it, the first one should receive a layer."""
    problem = make_problem(make_chain([500, 100, 500, 200, 200, 400, 300]), 2, microbatches=16)
    base = plan_of(problem, (0, 3, 7))
    choices = [choice_of(problem, at, (50, 50, 0, 0), (0, 1, 0, 1), 0) for at in (0, 2)]
    layers = propose(problem, "exact", owner=base.owner, base_pause_ns=0)
    assert layers.migration.moves == ()
    found, chosen = weigh_experts(problem, layers, base, choices, OPTIONS)
    assert len(chosen) == 2
    assert {move.to_worker for move in found.migration.moves} == {0}


def test_transfer_counts_both_directions_at_once():
    problem, _, _ = costs(0)
    choice = choice_of(problem, 0, (4, 3, 2, 1), (0, 1, 0, 1))
    moves = transfer_of([choice], 10**6)
    assert (moves.moves, moves.bytes, moves.max_rank_bytes, moves.pause_ns) == (2, 2000, 1000, 10**6)
    assert transfer_of([choice], None).pause_ns == 0


def test_placement_in_order_fills_ranks_one_after_another():
    assert placement_in_order(6, 3) == (0, 0, 1, 1, 2, 2)
    assert max_tokens((5, 1, 2, 2, 9, 0), placement_in_order(6, 3)) == 9
    assert EXPERTS_KEY.startswith("x_")
