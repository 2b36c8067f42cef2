"""S and T of a sharded output layer between the operations of a schedule."""

from __future__ import annotations

import random

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train._common.vocabulary_order import (
    LEAD,
    MAX_PENDING,
    Operation,
    gpipe_order,
    one_f_one_b_order,
    with_shard_passes,
)
from tests.tables import table

# The operations of ``zero-bubble`` on two ranks, for four microbatches, as torch makes them.
ZERO_BUBBLE = ("0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3")


def parsed(line):
    return [Operation(int(word[0]), word[1], int(word[2:])) for word in line.split()]


def words(operations):
    return " ".join(f"{one.kind}{one.microbatch}" for one in operations)


ORDERS = {
    "gpipe": (gpipe_order(3, 5), 3),
    "1f1b": (one_f_one_b_order(4, 9), 4),
    "1f1b of fewer microbatches than stages": (one_f_one_b_order(4, 2), 4),
    "1f1b of many": (one_f_one_b_order(4, 200), 4),
    "zero-bubble": ([parsed(line) for line in ZERO_BUBBLE], 2),
    "one rank": (one_f_one_b_order(1, 3), 1),
}


def executed(placed, num_stages, seed):
    """Run the orders with random times; returns the operations in the order of their ends."""
    generator = random.Random(seed)
    done, log = [0] * len(placed), []
    microbatches = 1 + max(one.microbatch for row in placed for one in row)
    finished = set()
    lookups = any(one.kind == "E" for row in placed for one in row)
    is_split = any(one.kind == "W" and one.stage == 0 for row in placed for one in row)

    def ready(rank, one):
        stage, kind, m = one
        last = num_stages - 1
        rows = [("E", each, m) for each in range(len(placed))] if lookups else []
        needs = {
            "F": [(stage - 1, "F", m)] if stage else rows,
            "W": [(stage, "B", m)],
            "S": [(last, "F", m)],
            "T": [(last, "B", m), ("S", rank, m)],
            # The rows of three microbatches before have been received: their memory is free.
            "E": [(0, "F", m - LEAD)] if m >= LEAD else [],
            "G": [(0, "W" if is_split else "B", m)],
        }.get(kind)
        if needs is None:
            above = [(stage + 1, "B", m)] if stage < last else [("S", each, m) for each in range(len(placed))]
            needs = [(stage, "F", m), *above]
        return all(need in finished for need in needs)

    while any(at < len(row) for at, row in zip(done, placed, strict=True)):
        able = [rank for rank, row in enumerate(placed) if done[rank] < len(row) and ready(rank, row[done[rank]])]
        assert able, "the ranks wait for one another"
        rank = generator.choice(able)
        one = placed[rank][done[rank]]
        done[rank] += 1
        finished.add(
            (one.kind, rank, one.microbatch)
            if one.kind in "SE"
            else (one.stage, "B" if one.kind == "I" else one.kind, one.microbatch)
        )
        log.append((rank, one))
    assert microbatches
    return log


@table("lookups", [False, True])
@table("name", ORDERS)
def test_passes_never_deadlock_whatever_the_times_are(name, lookups):
    order, num_stages = ORDERS[name]
    placed = with_shard_passes(order, num_stages, lookups=lookups)
    for seed in range(5):
        log = executed(placed, num_stages, seed)
        assert len(log) == sum(len(row) for row in placed)


@pytest.mark.parametrize("name", ORDERS)
def test_passes_are_added_once_per_microbatch_and_rank(name):
    order, num_stages = ORDERS[name]
    for row, plain in zip(with_shard_passes(order, num_stages), order, strict=True):
        assert [one for one in row if one.kind not in "ST"] == list(plain)
        microbatches = 1 + max(one.microbatch for one in plain)
        for kind in "ST":
            assert [one.microbatch for one in row if one.kind == kind] == list(range(microbatches))


@pytest.mark.parametrize("name", ORDERS)
def test_lookups_are_added_between_the_others_in_their_order(name):
    """No operation waits for E or G: ``dynmo-plan`` simulates the order without them."""
    order, num_stages = ORDERS[name]
    without = with_shard_passes(order, num_stages)
    for row, plain in zip(with_shard_passes(order, num_stages, lookups=True), without, strict=True):
        assert [one for one in row if one.kind not in "EG"] == plain
        microbatches = 1 + max(one.microbatch for one in plain)
        for kind in "EG":
            assert [one.microbatch for one in row if one.kind == kind] == list(range(microbatches))


def test_lookups_are_ahead_of_the_first_stage():
    placed = with_shard_passes(one_f_one_b_order(2, 5), 2, lookups=True)
    assert words(one for one in placed[0] if one.kind in "EFG") == "E0 E1 E2 F0 E3 F1 E4 F2 G0 F3 G1 F4 G2 G3 G4"


def test_last_stage_computes_ahead_while_other_ranks_compute_their_shards():
    placed = with_shard_passes(one_f_one_b_order(3, 6), 3)
    assert words(placed[2]) == "F0 S0 F1 S1 B0 T0 F2 S2 B1 T1 F3 S3 B2 T2 F4 S4 B3 T3 F5 S5 B4 T4 B5 T5"


def test_one_f_one_b_holds_one_more_microbatch():
    order = one_f_one_b_order(4, 9)
    ahead = [next(at for at, one in enumerate(row) if one.kind == "B") for row in order]
    assert ahead == [5, 4, 3, 2]


def test_pending_exponentials_are_bounded():
    """T is preferred to the stage once two microbatches wait for it."""
    for row in with_shard_passes(one_f_one_b_order(4, 64), 4):
        pending = peak = 0
        for one in row:
            pending += (one.kind == "S") - (one.kind == "T")
            peak = max(peak, pending)
        # One more for the microbatch whose gradient is not known yet.
        assert peak <= MAX_PENDING + 1


def test_order_that_cannot_run_is_refused():
    order = [[Operation(0, "B", 0), Operation(0, "F", 0)]]
    with pytest.raises(UsageError, match=r"cannot run with --vocabulary-parallel: 0B0 wait for one another"):
        with_shard_passes(order, 1)
