"""Two-phase moves: received bytes equal sent ones, and a fault before the commit changes nothing."""

from __future__ import annotations

import pytest
import torch

import dynmo_train.pipeline.migration as transfer
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.migration import MoveError
from dynmo_train.pipeline.partition import frozen_prefix, moves_between
from tests.distributed.scenario import Scenario, batch_of, engine_of, fingerprint, merged, play
from tests.distributed.test_placement import NAMES, cut
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def corrupt_received_blocks() -> None:
    """Flip a bit of each block whose checksum this worker takes; a worker that only receives takes no others."""
    proper = transfer.crc_after

    def crc_of_corrupted(block: torch.Tensor, crc: int) -> int:
        block[len(block) // 2] ^= 1
        return proper(block, crc)

    transfer.crc_after = crc_of_corrupted


def try_move(world: World, fault: str):
    """Train 8 steps, fail to move, train 4 more steps; returns the error and the last losses."""
    engine = engine_of(Scenario(), world)
    for step in range(1, 9):
        engine.train_step(batch_of(step), sampled=False)
        engine.after_step(step)
    before = fingerprint(engine)
    if fault == "flipped bit" and world.rank == 1:
        corrupt_received_blocks()
    altered = {"announced twice": lambda offers: offers * 2, "announced by nobody": lambda _: []}.get(fault)
    if altered:
        proper = transfer.all_gather_objects
        transfer.all_gather_objects = lambda w, offers: proper(
            w, altered(offers) if isinstance(offers, list) else offers
        )
    if fault == "tensor left out" and world.rank == 0:
        proper_entries = transfer.entries_of
        transfer.entries_of = lambda tensors: proper_entries(tensors)[1:]
    try:
        engine.repartition(cut(2, 3))
        error = None
    except MoveError as caught:
        error = str(caught)
    assert fingerprint(engine) == before
    losses = []
    for step in range(9, 13):
        losses.append(engine.train_step(batch_of(step), sampled=False).loss)
        engine.after_step(step)
    return error, losses


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flipped bit", "CRC-32"),
        ("announced twice", "announced by pipeline ranks"),
        ("tensor left out", "the model has"),
        ("announced by nobody", "announced by pipeline ranks []"),
    ],
)
def test_move_that_fails_before_the_commit_leaves_the_partition(fault, message):
    results = run_workers(try_move, 2, fault)
    expected = run_workers(play, 1, Scenario())[0]["losses"][8:12]
    for error, losses in results:
        assert error is not None
        assert message in error
        assert losses == expected


def move_there_and_back(world: World):
    engine = engine_of(Scenario(), world)
    for step in range(1, 13):
        engine.train_step(batch_of(step), sampled=False)
        engine.after_step(step)
    first = fingerprint(engine)
    report = engine.repartition(cut(2, 2))
    away = fingerprint(engine)
    back = engine.repartition(cut(2, 5))
    assert fingerprint(engine) == first
    assert report.total_bytes == back.total_bytes
    assert [m.item for m in report.moves] == list(NAMES[2:5])
    return {"losses": [], "weights": away, "bytes": report.total_bytes}


def test_move_transfers_weights_masks_and_moments():
    """Weights, masks and moments of moved items keep their bytes, and the report has their sizes."""
    moved = merged(run_workers(move_there_and_back, 2))
    stayed = run_workers(fingerprint_alone, 1)[0]
    assert moved["weights"] == stayed["weights"]
    assert moved["bytes"] == sum(size for name, size in stayed["sizes"].items() if name.startswith(NAMES[2:5]))


def fingerprint_alone(world: World):
    engine = engine_of(Scenario(), world)
    for step in range(1, 13):
        engine.train_step(batch_of(step), sampled=False)
        engine.after_step(step)
    sizes = {
        name: tensor.numel() * tensor.element_size()
        for item in engine.local_names
        for name, tensor in engine.item_store.export(item).tensors.items()
    }
    return {"weights": fingerprint(engine), "sizes": sizes}


def test_moves_between_partitions_and_frozen_prefixes():
    moves = moves_between(cut(2, 5), cut(2, 3))
    assert [(m.item, m.source, m.target) for m in moves] == [(name, 0, 1) for name in NAMES[3:5]]
    assert frozen_prefix([["a", "b"], [], ["c", "d"]], ["a", "b", "c"]) == [2, 0, 1]
    assert frozen_prefix([["a", "b"], ["c"]], ["b", "c"]) == [0, 0]
