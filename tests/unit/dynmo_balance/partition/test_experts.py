"""Expert placement: never worse than EPLB, bounds that hold, the fewest moves, and expert plans as documents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.partition.experts import (
    EVEN,
    FREE,
    ExpertProblem,
    assign,
    contiguous,
    fits,
    loads_of,
    lower_bound,
    moves,
    place,
    relabel,
    reshare,
)
from tests.unit.dynmo_balance.partition.eplb import eplb, eplb_load


def random_tokens(generator: np.random.Generator, experts: int) -> tuple[int, ...]:
    """Tokens of a skewed router: a power law or a Dirichlet draw."""
    if generator.random() < 0.5:
        shares = 1 / np.arange(1, experts + 1) ** generator.uniform(0, 1.6)
        shares = generator.permutation(shares / shares.sum())
    else:
        shares = generator.dirichlet(np.full(experts, generator.uniform(0.2, 3)))
    return tuple(int(n) for n in generator.multinomial(int(generator.integers(100, 65_536)), shares))


def opponent(*arguments) -> list[list[int]]:
    """EPLB's placement as a run can have it: the tokens of an expert are split over ranks, not over slots."""
    return [sorted(set(each)) for each in eplb(*arguments)]


def check(problem: ExpertProblem, ranks) -> None:
    """Every expert has its tokens, and every rank at most its slots, each with another expert."""
    assert fits(problem, ranks)
    assert all(len({expert for expert, _ in each}) == len(each) for each in ranks)
    sums = [0] * len(problem.tokens)
    for each in ranks:
        for expert, tokens in each:
            assert tokens >= 0
            sums[expert] += tokens
    assert tuple(sums) == problem.tokens


@pytest.mark.parametrize("shares", [EVEN, FREE])
def test_place_500_random_traces_is_never_worse_than_eplb(shares):
    generator = np.random.default_rng(7)
    for _ in range(500):
        ranks = int(generator.integers(2, 9))
        slots = int(generator.integers(1, 9))
        experts = int(generator.integers(max(1, ranks * slots // 4), ranks * slots + 1))
        problem = ExpertProblem(tokens=random_tokens(generator, experts), ranks=ranks, slots=slots, shares=shares)
        found = place(problem)
        check(problem, found.ranks)
        other = opponent(problem.tokens, ranks * slots, 1, 1, ranks)
        assert lower_bound(problem) <= found.max_tokens <= eplb_load(problem.tokens, other)
        for expert in range(experts if shares == EVEN else 0):
            parts = [tokens for each in found.ranks for at, tokens in each if at == expert]
            assert max(parts) - min(parts) <= 1
        if shares == FREE and ranks * slots >= experts + ranks - 1:
            assert found.is_optimal
            assert found.max_tokens == -(-sum(problem.tokens) // ranks)


def test_place_hierarchical_random_traces_is_never_worse_than_eplb():
    generator = np.random.default_rng(8)
    for _ in range(60):
        tokens = random_tokens(generator, 32)
        problem = ExpertProblem(tokens=tokens, ranks=8, slots=5, shares=EVEN, nodes=2, groups=4)
        found = place(problem)
        check(problem, found.ranks)
        for node in (found.ranks[:4], found.ranks[4:]):
            assert len({expert // 8 for each in node for expert, _ in each}) == 2
        assert found.max_tokens <= eplb_load(tokens, opponent(tokens, 40, 4, 2, 8))


def test_lower_bound_small_problems_is_at_most_every_placement():
    generator = np.random.default_rng(9)
    reached = 0
    for _ in range(40):
        tokens = tuple(int(n) for n in generator.integers(0, 40, 6))
        problem = ExpertProblem(tokens=tokens, ranks=3, slots=2)
        best = min(
            max(sum(tokens[e] for e in order[at : at + 2]) for at in (0, 2, 4))
            for order in itertools.permutations(range(6))
        )
        assert lower_bound(problem) <= best <= place(problem).max_tokens
        reached += place(problem).max_tokens == best
    assert reached == 40


def test_reshare_moves_tokens_over_a_chain_of_replicas():
    problem = ExpertProblem(tokens=(90, 0, 0), ranks=3, slots=2)
    ranks = (((0, 90), (1, 0)), ((0, 0), (1, 0)), ((1, 0), (2, 0)))
    assert loads_of(reshare(problem, ranks)) == (45, 45, 0)
    chain = ExpertProblem(tokens=(60, 60, 0), ranks=3, slots=2)
    assert loads_of(reshare(chain, (((0, 60),), ((0, 0), (1, 60)), ((1, 0), (2, 0))))) == (40, 40, 40)


def test_place_balanced_current_placement_moves_nothing():
    problem = ExpertProblem(tokens=(5,) * 16, ranks=4, slots=4)
    current = tuple(reversed(contiguous(problem)))
    assert moves(current, place(problem, current).ranks) == []


def test_relabel_permuted_ranks_moves_nothing():
    problem = ExpertProblem(tokens=tuple(range(12)), ranks=4, slots=3)
    start = contiguous(problem)
    permuted = (start[2], start[0], start[3], start[1])
    assert relabel(permuted, start) == start
    assert len(moves(start, permuted)) == 12


def test_assign_random_matrices_has_the_least_sum():
    generator = np.random.default_rng(3)
    for _ in range(50):
        costs = generator.integers(-9, 9, (5, 5)).tolist()
        found = assign(costs)
        assert sorted(found) == list(range(5))
        best = min(sum(costs[r][c] for r, c in enumerate(p)) for p in itertools.permutations(range(5)))
        assert sum(costs[row][column] for row, column in enumerate(found)) == best


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 1}, "hold 4 experts; the layer has 8"),
        ({"nodes": 3}, "not a multiple of 3 nodes"),
        ({"groups": 3, "nodes": 2}, "3 groups"),
    ],
)
def test_problem_that_does_not_fit_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        ExpertProblem(**{"tokens": (1,) * 8, "ranks": 4, "slots": 2} | change)
