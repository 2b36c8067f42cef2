"""Copies of experts in plans of layers and experts: loads, owners, transfers in each step, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_balance.planning.expert_copies import CopyCosts, loads_on, owned, with_copies, without_copies
from dynmo_balance.planning.joint_plan import (
    ExpertChoice,
    JointOptions,
    copies_ns,
    limit_copies,
    ranks_without_memory,
    transfer_of,
    weigh_experts,
)
from dynmo_balance.planning.plan_builder import propose
from tests.unit.dynmo_balance.planning.test_joint_plan import plan_of
from tests.unit.dynmo_balance.problems import make_chain, make_problem

HOT = (90, 4, 4, 2)
IN_ORDER = (0, 0, 1, 1)
COPIED = ((0, 1), 0, 1, 1)


def costs(bandwidth=None, slots=3, **counts):
    counts = counts or {"a": 10}
    return CopyCosts(
        ranks=2,
        slots=slots,
        weight_bytes=2,
        param_count=counts,
        state_bytes=dict.fromkeys(counts, 160),
        bandwidth=bandwidth,
    )


def test_tokens_of_a_copied_expert_are_split_evenly():
    assert loads_on((7, 4, 4, 2), ((1, 0), 0, 1, 1)) == {0: 3 + 4, 1: 4 + 4 + 2}


def test_hot_expert_is_copied_where_copies_are_free():
    after = with_copies("a", HOT, IN_ORDER, costs(), 1000)
    assert sorted(after[0]) == [0, 1]
    assert max(loads_on(HOT, after).values()) == 50


@pytest.mark.parametrize(("bandwidth", "is_copied"), [(10**12, True), (10**6, False)])
def test_hot_expert_is_copied_where_the_transfer_takes_less_than_it_saves(bandwidth, is_copied):
    """A copy saves 0.4 of 100 us, and transfers 100 bytes: 0.1 ns, or 100 us."""
    after = with_copies("a", HOT, IN_ORDER, costs(bandwidth), 100_000)
    assert any(isinstance(placed, tuple) for placed in after) is is_copied


def test_owner_remains_and_lost_experts_go_to_the_rank_that_owns_fewest():
    ranks = (((0, 1), (1, 1), (2, 1)), ((0, 1), (1, 1), (3, 1)))
    assert owned(ranks, (1, 1, 1, 0)) == ((1, 0), (1, 0), 0, 1)


def test_transfer_of_copies_is_that_of_the_rank_with_the_most():
    """Rank 1 owns one copied expert and has a copy of another one: 2 x 10 x (2 + 8) bytes."""
    assert costs(10**9).copies_ns("a", ((0, 1), (1, 0), 1, 0)) == 200
    assert costs(None).copies_ns("a", ((0, 1), (1, 0), 1, 0)) == 0


def test_memory_counts_owners_sums_and_copies():
    """Rank 1 owns one expert more than its part of two, and has a copy: 160 + 3 x 40 + 100 bytes."""
    assert costs().rank_bytes({"a": ((0, 1), 1, 1, 1)}) == [-160 + 1 * 40, 160 + 3 * 40 + 100]


def test_rank_without_copies_keeps_what_it_owns():
    assert without_copies(((0, 1), (1, 0), 1, 0), 1) == (0, (1, 0), 1, 0)


def choice_of(item, after=COPIED, before=IN_ORDER):
    return ExpertChoice(item=item, tokens=HOT, before=before, after=after, expert_bytes=1000)


def joint(**changes):
    options = JointOptions(
        balancer="exact", objective="auto", horizon_steps=100, base_pause_ns=1000, penalty=1.0, bandwidth=10**9
    )
    return replace(options, **changes)


def problem_of(memory=None):
    problem = make_problem(make_chain([900_000, 100_000, 500_000, 400_000]), 2, microbatches=16)
    slots = tuple(replace(slot, memory_bytes=memory) for slot in problem.slots)
    return replace(problem, slots=slots)


def test_copies_do_not_count_as_moves():
    moves = transfer_of([choice_of("a", ((1, 0), 0, 1, 1))], 10**9)
    assert (moves.moves, moves.copies) == (1, 0)
    moves = transfer_of([choice_of("a")], 10**9)
    assert (moves.moves, moves.bytes, moves.copies) == (0, 0, 1)


def layers_of(problem, base):
    return propose(problem, "exact", owner=base.owner, base_pause_ns=1000)


@pytest.mark.parametrize(("bandwidth", "is_chosen"), [(10**9, True), (10, False)])
def test_joint_plan_weighs_the_transfers_of_copies_in_every_step(bandwidth, is_chosen):
    problem = problem_of()
    base, item = plan_of(problem, (0, 2, 4)), problem.chain.names[0]
    options = joint(copies=costs(bandwidth, **{item: 10}))
    found, chosen = weigh_experts(problem, layers_of(problem, base), base, [choice_of(item)], options)
    assert [choice.after for choice in chosen] == ([COPIED] if is_chosen else [])
    assert copies_ns(found.stages, base, chosen, options.copies) == (100 if is_chosen else 0)


def test_transfers_of_one_worker_add_up_and_those_of_two_overlap():
    problem = problem_of()
    base, names = plan_of(problem, (0, 2, 4)), problem.chain.names
    prices = costs(10**9, **dict.fromkeys(names, 10))
    one, both, three = ([choice_of(names[at]) for at in each] for each in ((0,), (0, 2), (0, 1, 2)))
    assert [copies_ns(base.stages, base, each, prices) for each in (one, both, three)] == [100, 100, 200]


def test_rank_whose_memory_would_be_exceeded_gets_no_copies():
    problem = problem_of()
    base, item = plan_of(problem, (0, 2, 4)), problem.chain.names[0]
    prices = costs(**{item: 10})
    proposal = layers_of(problem, base)
    peak = proposal.timeline.peak_memory_bytes[0]
    # Sums of two experts take 80 bytes on each rank, a copy 100.
    for spare, needed in ((180, []), (179, [(0, 1, peak + 180, peak + 179)])):
        limited = replace(proposal, problem=problem_of(peak + spare))
        chosen = (choice_of(item),)
        assert ranks_without_memory(limited, base, chosen, prices) == needed
        assert limit_copies(limited, base, chosen, prices) == (() if needed else chosen)


def test_copies_on_other_ranks_remain_where_one_rank_is_full():
    problem = problem_of()
    base, item = plan_of(problem, (0, 2, 4)), problem.chain.names[0]
    # Rank 1 owns three experts and has a copy; rank 0 has two copies.
    choice = choice_of(item, ((1, 0), (0, 1), (1, 0), 1), before=(1, 0, 1, 1))
    prices = costs(slots=4, **{item: 10})
    proposal = layers_of(problem, base)
    peak = proposal.timeline.peak_memory_bytes[0]
    limited = replace(proposal, problem=problem_of(peak + 300))
    (limited_choice,) = limit_copies(limited, base, (choice,), prices)
    assert limited_choice.after == ((1, 0), 0, (1, 0), 1)


def test_joint_plan_without_memory_for_copies_has_none():
    problem = problem_of()
    base, item = plan_of(problem, (0, 2, 4)), problem.chain.names[0]
    options = joint(copies=costs(**{item: 10}))
    for spare, number in ((180, 1), (179, 0)):
        peaks = layers_of(problem, base).timeline.peak_memory_bytes
        limited = problem_of(max(peaks) + spare)
        _, chosen = weigh_experts(limited, layers_of(limited, base), base, [choice_of(item)], options)
        assert len(chosen) == number
