"""Two-phase migration of experts between the ranks that share them: weights and optimizer state move whole.

::

    source                        all ranks                                    target
    export(item), its experts ->  announcements gathered, checked          ->  memory reserved
    blocks + CRC-32           ->  sent point to point                      ->  blocks + CRC-32
                                  checksums compared: all agree?
    item without its experts  <-  yes: place, load_state; no: MoveError    ->  item with its experts

An expert that is on several ranks moves with its owner; the copies get its weights before the next step
(``optim/expert_replicas.py``), and so cost no transfer here.

No rank changes its items before all ranks have verified what they received. Placements are stored for all items, also
those of other pipeline ranks, so that a layer which moves there later finds its experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..models.layer_list import ItemSpec
from ..models.sharding import expert_of
from ..optim.item_sharding import ItemSharding
from ..optim.item_state import ItemState
from ..optim.item_store import ItemStore
from ..parallel.expert_chunks import Hosts, hosts_of_ranks
from ..parallel.expert_parallel import TokenDispatcher
from ..parallel.process_groups import World, all_agree, all_gather_objects
from .migration import MoveError, crc_after, entries_of, pieces_of, size_of, tensors_in, to_send

METRIC = "expert_tokens"
Placements = Mapping[str, Sequence[int | Sequence[int]]]
"""Item -> rank of each expert, or its ranks with the preferred owner first."""
Arriving = dict[tuple[str, int], list[tuple[list[Mapping[str, Any]], torch.Tensor]]]


@dataclass(frozen=True, kw_only=True)
class ExpertMove:
    """One expert that changes its rank in the expert-parallel group."""

    item: str
    expert: int
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class ExpertMoveReport:
    """A committed migration of experts.

    Attributes:
        num_moves: Experts that changed their owner, over all items.
        num_copies: Copies that ranks got, over all items.
        num_bytes: Bytes sent by all ranks.
        duration_ns: From announcement to commit, on this rank.
    """

    num_moves: int
    num_copies: int
    num_bytes: int
    duration_ns: int


def experts_by_item(items: Sequence[ItemSpec]) -> dict[str, int]:
    """The number of experts of each item that has some, in list order."""
    return {item.name: length for item in items for name, length in item.metrics if name == METRIC}


def sharded_experts(sharding: ItemSharding) -> dict[str, int]:
    """:func:`experts_by_item` where replicas share the experts; empty where each has all of them."""
    return {} if sharding.dispatcher is None else experts_by_item(sharding.family.items)


def placements_of(sharding: ItemSharding) -> dict[str, tuple[Hosts, ...]]:
    """The ranks that have each expert, by item, where ranks share experts; empty where each has all."""
    dispatcher = sharding.dispatcher
    counts = sharded_experts(sharding)
    return {} if dispatcher is None else {item: dispatcher.hosts_of(item, n) for item, n in counts.items()}


def move_experts(store: ItemStore, placements: Placements, world: World) -> ExpertMoveReport:
    """Move experts between the ranks of this process's expert-parallel group. A collective of all ranks.

    Args:
        store: Local items.
        placements: Item -> rank of each expert, or its ranks; items of other pipeline ranks are only noted.
        world: Processes of the run.

    Returns:
        What moved, the same on all ranks but for the duration.

    Raises:
        MoveError: On every rank, where an announcement or a checksum is wrong; the old placement stays active.
    """
    started = time.perf_counter_ns()
    dispatcher = store.sharding.dispatcher
    new_ranks = {
        item: [(on,) if isinstance(on, int) else tuple(on) for on in ranks] for item, ranks in placements.items()
    }
    _raise_if_any(_placement_problem(store, dispatcher, new_ranks), world, "check")
    if dispatcher is None:  # unreachable after the check; for the type checker
        return ExpertMoveReport(num_moves=0, num_copies=0, num_bytes=0, duration_ns=0)
    counts = experts_by_item(store.family.items)
    former = {item: dispatcher.hosts_of(item, counts[item]) for item in new_ranks}
    hosts = {item: hosts_of_ranks([on[0] for on in former[item]], ranks) for item, ranks in new_ranks.items()}
    all_moves = [
        ExpertMove(item=item, expert=expert, source=before[0], target=after[0])
        for item, placed in hosts.items()
        for expert, (before, after) in enumerate(zip(former[item], placed, strict=True))
        if before[0] != after[0]
    ]
    num_copies = sum(
        len(set(after[1:]) - set(before))
        for item, placed in hosts.items()
        for before, after in zip(former[item], placed, strict=True)
    )
    moves = [move for move in all_moves if move.item in store.modules]
    states = {item: store.export(item) for item in hosts if hosts[item] != former[item] and item in store.modules}
    leaving = {
        (move.item, move.expert): _of_expert(states[move.item], move.expert)
        for move in moves
        if move.source == dispatcher.rank
    }
    offers = _gather(dispatcher, {key: (entries_of(one.tensors), one.steps) for key, one in leaving.items()})
    announced = {key: offer for of_rank in offers for key, offer in of_rank.items()}
    problem = next(
        (
            f"{move.item}: expert {move.expert} is not announced by rank {move.source}"
            for move in moves
            if (move.item, move.expert) not in offers[move.source] or not announced[move.item, move.expert][0]
        ),
        None,
    )
    _raise_if_any(problem, world, "announcement")
    arriving = _reserve(moves, announced, dispatcher, world)
    sent, received = _exchange(moves, leaving, announced, arriving, dispatcher)
    expected = {key: crc for of_rank in _gather(dispatcher, sent) for key, crc in of_rank.items()}
    problem = next(
        (
            f"{item}: expert {expert} received with CRC-32 {crc:08x}, sent with {expected[item, expert]:08x}"
            for (item, expert), crc in received.items()
            if crc != expected[item, expert]
        ),
        None,
    )
    _raise_if_any(problem, world, "verification")

    # From here on all ranks commit.
    for item, placed in hosts.items():
        dispatcher.place(item, placed)
    for item, state in states.items():
        store.load_state(item, _joined(item, state, leaving, announced, arriving), owned=True)
    num_bytes = sum(size_of(entries) for entries, _ in announced.values())
    # Other pipeline ranks and dispatchers moved other bytes; tensor-parallel ranks have parts of the same experts.
    total = sum(all_gather_objects(world, num_bytes if dispatcher.rank == 0 else 0))
    return ExpertMoveReport(
        num_moves=len(all_moves),
        num_copies=num_copies,
        num_bytes=total,
        duration_ns=time.perf_counter_ns() - started,
    )


def _placement_problem(
    store: ItemStore, dispatcher: TokenDispatcher | None, placements: Mapping[str, Sequence[Sequence[int]]]
) -> str | None:
    counts = experts_by_item(store.family.items)
    if dispatcher is None:
        return "every replica has all experts"
    for item, ranks in placements.items():
        if len(ranks) != counts.get(item):
            return f"{item}: a rank for each of {len(ranks)} experts; the item has {counts.get(item, 0)}"
        if (problem := dispatcher.problem_of(item, ranks)) is not None:
            return problem
    return None


def _of_expert(state: ItemState, expert: int) -> ItemState:
    """The tensors and update counts of one expert."""
    return ItemState(
        tensors={name: tensor for name, tensor in state.tensors.items() if expert_of(name) == expert},
        steps={name: steps for name, steps in state.steps.items() if expert_of(name) == expert},
    )


def _joined(
    item: str,
    state: ItemState,
    leaving: Mapping[tuple[str, int], ItemState],
    announced: Mapping[tuple[str, int], tuple[list[Any], Mapping[str, int]]],
    arriving: Arriving,
) -> ItemState:
    """The state of an item without the experts that leave, and with those that arrive."""
    left = {expert for of_item, expert in leaving if of_item == item}
    tensors = {name: tensor for name, tensor in state.tensors.items() if expert_of(name) not in left}
    steps = {name: count for name, count in state.steps.items() if expert_of(name) not in left}
    for key, blocks in arriving.items():
        if key[0] == item:
            tensors |= {name: each for piece, block in blocks for name, each in tensors_in(piece, block).items()}
            steps |= announced[key][1]
    return ItemState(tensors=tensors, steps=steps)


def _gather(dispatcher: TokenDispatcher, value: Any) -> list[Any]:
    """The value of each rank of the expert-parallel group; a collective."""
    gathered: list[Any] = [None] * dispatcher.size
    dist.all_gather_object(gathered, value, group=dispatcher.group)
    return gathered


def _reserve(
    moves: Sequence[ExpertMove],
    announced: Mapping[tuple[str, int], tuple[list[Any], Mapping[str, int]]],
    dispatcher: TokenDispatcher,
    world: World,
) -> Arriving:
    """Allocate memory for what this rank receives; no rank sends before all have allocated theirs."""
    arriving: Arriving = {}
    problem: str | None = None
    for move in moves:
        if move.target == dispatcher.rank:
            key = (move.item, move.expert)
            entries = announced[key][0]
            try:
                arriving[key] = [
                    (piece, torch.empty(size_of(piece), dtype=torch.uint8, device=world.device))
                    for piece in pieces_of(entries)
                ]
            # Not raised here: the other ranks are in the collective below, and would wait for this one.
            except (RuntimeError, MemoryError) as error:
                first = str(error).partition("\n")[0]
                problem = f"cannot allocate {size_of(entries):,} bytes for expert {move.expert} of {move.item}: {first}"
                break
    _raise_if_any(problem, world, "reservation")
    return arriving


def _exchange(
    moves: Sequence[ExpertMove],
    leaving: Mapping[tuple[str, int], ItemState],
    announced: Mapping[tuple[str, int], tuple[list[Any], Mapping[str, int]]],
    arriving: Arriving,
    dispatcher: TokenDispatcher,
) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """Send and receive concurrently; return the CRC-32 of each expert sent, and of each expert received."""
    group = dispatcher.group
    operations: list[dist.P2POp] = []
    outgoing: list[tuple[tuple[str, int], torch.Tensor]] = []
    for move in moves:
        key = (move.item, move.expert)
        if move.source == dispatcher.rank:
            target = dist.get_global_rank(group, move.target)
            for piece in pieces_of(announced[key][0]):
                block = to_send(piece, leaving[key].tensors)
                outgoing.append((key, block))
                operations.append(dist.P2POp(dist.isend, block, target, group))
        elif move.target == dispatcher.rank:
            source = dist.get_global_rank(group, move.source)
            operations += [dist.P2POp(dist.irecv, block, source, group) for _, block in arriving[key]]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    sent: dict[tuple[str, int], int] = {}
    for key, block in outgoing:
        sent[key] = crc_after(block, sent.get(key, 0))
    received: dict[tuple[str, int], int] = {}
    for key, blocks in arriving.items():
        for _, block in blocks:
            received[key] = crc_after(block, received.get(key, 0))
    return sent, received


def _raise_if_any(problem: str | None, world: World, phase: str) -> None:
    if all_agree(world, problem is None):
        return
    problems = dict.fromkeys(each for each in all_gather_objects(world, problem) if each)
    raise MoveError(f"{phase} of the move of experts failed; the old placement stays active: {'; '.join(problems)}")
