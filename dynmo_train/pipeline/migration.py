"""Two-phase migration of items between pipeline ranks: announce, send, verify, commit.

::

    source                      all ranks                              target
    export(item)        ->  announcements gathered, checked    ->  memory reserved
    blocks + CRC-32     ->  sent point to point                ->  blocks + CRC-32
                            checksums compared: all agree?
    drop(item)          <-  yes: commit; no: MoveError         ->  load_state(item)

Invariants:

* No rank changes its items before all ranks have verified what they received. A failure before that drops the received
  blocks and leaves the old partition active.
* Large tensors are sent from and received into their own memory; small ones are concatenated to blocks. Both sides
  divide the announced list of tensors in the same way, so that only the list is announced.
* Peak memory of a rank is its old items plus the received ones, whose blocks become the memory of the new items.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .._common.errors import DynmoError
from ..models.layer_list import expert_biases_of, masks_of, parameters_of
from ..optim.item_state import REFERENCE, ItemState, is_memory
from ..optim.item_store import ItemStore
from ..parallel.process_groups import World, all_agree, all_gather_objects
from .partition import Move, Partition, moves_between

# Smaller tensors are concatenated to blocks.
LARGE_BYTES = 1 << 16
Entry = Mapping[str, Any]
Arriving = dict[str, list[tuple[list[Entry], torch.Tensor]]]


class MoveError(DynmoError):
    """A migration that was not committed; the old partition is still active."""


@dataclass(frozen=True, kw_only=True)
class MoveReport:
    """A committed migration.

    Attributes:
        moves: The items that changed their pipeline rank.
        bytes_by_item: Bytes of each moved item.
        duration_ns: From announcement to commit, on this rank.
    """

    moves: tuple[Move, ...]
    bytes_by_item: dict[str, int]
    duration_ns: int

    @property
    def total_bytes(self) -> int:
        """Bytes moved between pipeline ranks."""
        return sum(self.bytes_by_item.values())


def _announcement_problem(announcement: dict[str, Any], store: ItemStore) -> str | None:
    """Return what is wrong with the announced tensors of an item; None where they match the item built here."""
    item = announcement["item"]
    names = [entry["name"] for entry in announcement["tensors"]]
    if len(set(names)) < len(names):
        return f"{item}: a tensor is announced twice"
    module = store.blueprint(item)
    whole = parameters_of(item, module)
    expected = {
        name: list(store.sharding.local_rows(name, parameter.detach()).shape) for name, parameter in whole.items()
    }
    announced = {entry["name"]: entry["shape"] for entry in announcement["tensors"]}
    biases = {name: list(bias.shape) for name, bias in expert_biases_of(item, module).items()}
    for name, shape in (expected | biases).items():
        if announced.get(name) != shape:
            return f"{name}: announced as {announced.get(name)}, the model has {shape}"
    allowed = {f"{name}.mask" for name in masks_of(item, module)}
    state = {name: store.optimizers.state_shapes(name, tuple(shape)) for name, shape in expected.items()}
    allowed |= {f"{name}.{key}" for name, keys in state.items() for key in keys}
    allowed |= {f"{name}.{REFERENCE}" for name in (*expected, *biases)}
    unknown = {name for name in set(announced) - set(expected) - set(biases) - allowed if not is_memory(item, name)}
    if unknown:
        return f"{item}: announced tensors that the model does not have: {', '.join(sorted(unknown))}"
    for name in announcement["steps"]:
        if name not in state:
            return f"{item}: optimizer state of {name} is announced, a parameter that the model does not have"
        for key, expected_shape in state[name].items():
            found = announced.get(f"{name}.{key}")
            if found != list(expected_shape):
                return f"{name}.{key}: announced as {found}, the optimizer has {list(expected_shape)}"
    return None


def move_items(store: ItemStore, before: Partition, after: Partition, world: World) -> MoveReport:
    """Move items between pipeline ranks to reach the partition ``after``. A collective: all ranks commit, or none.

    Args:
        store: Local items.
        before: Active partition.
        after: Partition to reach.
        world: Processes of the run.

    Returns:
        The moves, their bytes, and the duration in ns on this rank.

    Raises:
        MoveError: On every rank, where an announcement or a checksum is wrong; the old partition stays active.
    """
    started = time.perf_counter_ns()
    moves = moves_between(before, after)
    # Live tensors, not copies: nothing updates them until the commit, and a failed move leaves them as they are.
    leaving = {move.item: store.export(move.item) for move in moves if move.source == world.pipeline_rank}
    offered = [
        {"item": item, "tensors": entries_of(state.tensors), "steps": dict(state.steps)}
        for item, state in leaving.items()
    ]
    # Data- and tensor-parallel ranks of a pipeline rank have other parts: each exchanges with its own peers only.
    gathered = all_gather_objects(world, offered)
    offers = [gathered[world.peer(rank)] for rank in range(world.dims.pipeline)]
    announced = {one["item"]: one for of_rank in offers for one in of_rank}
    _check_announcements(moves, offers, announced, store, world)
    arriving = _reserve(moves, announced, world)
    sent, received = _exchange(moves, leaving, announced, arriving, world)
    crcs = all_gather_objects(world, {"crc32": sent})
    expected = {
        item: crc for worker in range(world.dims.pipeline) for item, crc in crcs[world.peer(worker)]["crc32"].items()
    }
    _check_outcome(store, after, received, expected, world)

    # From here on all ranks commit. Items that leave are dropped first, so that their memory is free for the others.
    for move in moves:
        if move.source == world.pipeline_rank:
            store.drop(move.item)
    for item, blocks in arriving.items():
        tensors = {name: each for piece, block in blocks for name, each in tensors_in(piece, block).items()}
        store.load_state(item, ItemState(tensors=tensors, steps=announced[item]["steps"]), owned=True)
    store.reorder(after.items_of_rank(world.pipeline_rank))
    sizes = {item: sum(entry["bytes"] for entry in one["tensors"]) for item, one in announced.items()}
    return MoveReport(moves=tuple(moves), bytes_by_item=sizes, duration_ns=time.perf_counter_ns() - started)


def _check_announcements(
    moves: Sequence[Move],
    offers: Sequence[Sequence[dict[str, Any]]],
    announced: dict[str, dict[str, Any]],
    store: ItemStore,
    world: World,
) -> None:
    """Phase one: every moved item is announced once, by its rank, with the tensors of the model."""
    problem: str | None = None
    for move in moves:
        sources = [rank for rank, of_rank in enumerate(offers) for one in of_rank if one["item"] == move.item]
        if sources != [move.source]:
            problem = f"{move.item}: announced by pipeline ranks {sources}, must be announced by {move.source}"
        elif move.target == world.pipeline_rank:
            problem = problem or _announcement_problem(announced[move.item], store)
    _raise_if_any(problem, world, "announcement")


def _reserve(moves: Sequence[Move], announced: dict[str, dict[str, Any]], world: World) -> Arriving:
    """Allocate memory for what this rank receives; no rank sends before all have allocated theirs."""
    arriving: Arriving = {}
    problem: str | None = None
    for move in moves:
        if move.target == world.pipeline_rank:
            entries = announced[move.item]["tensors"]
            try:
                arriving[move.item] = [
                    (piece, torch.empty(size_of(piece), dtype=torch.uint8, device=world.device))
                    for piece in pieces_of(entries)
                ]
            # Not raised here: the other ranks are in the collective below, and would wait for this one.
            except (RuntimeError, MemoryError) as error:
                first = str(error).partition("\n")[0]
                size = f"{size_of(entries):,} bytes for {move.item}"
                problem = f"pipeline rank {world.pipeline_rank} cannot allocate {size}: {first}"
                break
    _raise_if_any(problem, world, "reservation")
    return arriving


def _exchange(
    moves: Sequence[Move],
    leaving: Mapping[str, ItemState],
    announced: Mapping[str, Mapping[str, Any]],
    arriving: Arriving,
    world: World,
) -> tuple[dict[str, int], dict[str, int]]:
    """Send and receive concurrently; return the CRC-32 of each item sent, and of each item received."""
    group = world.groups.pipeline
    operations: list[dist.P2POp] = []
    outgoing: list[tuple[str, torch.Tensor]] = []
    incoming: list[tuple[str, torch.Tensor, int]] = []
    for move in moves:
        if move.source == world.pipeline_rank:
            target = world.global_rank(world.peer(move.target))
            for piece in pieces_of(announced[move.item]["tensors"]):
                block = to_send(piece, leaving[move.item].tensors)
                outgoing.append((move.item, block))
                operations.append(dist.P2POp(dist.isend, block, target, group))
        elif move.target == world.pipeline_rank:
            source = world.global_rank(world.peer(move.source))
            for _, block in arriving[move.item]:
                incoming.append((move.item, block, len(operations)))
                operations.append(dist.P2POp(dist.irecv, block, source, group))
    works = dist.batch_isend_irecv(operations) if operations else []
    each = len(works) == len(operations)  # NCCL returns one work for all operations
    if not each:
        _wait(works)
    # Checksums are computed while the transfers run: sends only read their blocks, and each receive is awaited alone.
    # An item may have no tensor, such as an embedding without its table.
    sent = {move.item: 0 for move in moves if move.source == world.pipeline_rank}
    for item, block in outgoing:
        sent[item] = crc_after(block, sent[item])
    received = {move.item: 0 for move in moves if move.target == world.pipeline_rank}
    for item, block, number in incoming:
        if each:
            works[number].wait()
        received[item] = crc_after(block, received[item])
    arrived = {number for _, _, number in incoming}  # a second wait on a gloo receive waits for another message
    _wait([work for number, work in enumerate(works) if number not in arrived] if each else [])
    return sent, received


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _check_outcome(
    store: ItemStore, after: Partition, received: Mapping[str, int], expected: Mapping[str, int], world: World
) -> None:
    """Phase two: received items have the checksums of the sent ones, and each rank has all items of the partition."""
    problem: str | None = None
    for item, crc in received.items():
        if crc != expected[item]:
            problem = f"{item}: received with CRC-32 {crc:08x}, sent with {expected[item]:08x}"
    expected_items = set(after.items_of_rank(world.pipeline_rank))
    missing = expected_items - set(store.modules) - set(received)
    if problem is None and missing:
        problem = f"pipeline rank {world.pipeline_rank} would lack {', '.join(sorted(missing))}"
    _raise_if_any(problem, world, "verification")


def _raise_if_any(problem: str | None, world: World, phase: str) -> None:
    # One integer where all is well, which is the usual case; texts are gathered only after a failure.
    if all_agree(world, problem is None):
        return
    problems = [each for each in all_gather_objects(world, problem) if each]
    raise MoveError(f"{phase} of the move failed; the old partition stays active: {'; '.join(problems)}")


def entries_of(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return the announcement of an item's tensors: name, dtype, shape and bytes of each, in order.

    Args:
        tensors: Name -> tensor, of any shape and dtype.
    """
    return [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": tensor.numel() * tensor.element_size(),
        }
        for name, tensor in tensors.items()
    ]


def pieces_of(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Divide announced tensors into the pieces that are sent: each large one alone, runs of small ones together.

    Example: tensors of 70,000, 8, 16 and 70,000 bytes are three pieces; the second one has 24 bytes.
    """
    pieces: list[list[Entry]] = []
    open_piece = False
    for entry in entries:
        small = entry["bytes"] < LARGE_BYTES
        if small and open_piece:
            pieces[-1].append(entry)
        else:
            pieces.append([entry])
        open_piece = small
    return pieces


def size_of(piece: Sequence[Entry]) -> int:
    """Return the bytes of a piece."""
    return sum(int(entry["bytes"]) for entry in piece)


def to_send(piece: Sequence[Entry], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the bytes of a piece, uint8 ``[bytes]``: a view of a single contiguous tensor, else a copy.

    Args:
        piece: Announced entries.
        tensors: Name -> tensor of the item, of any shape and dtype.
    """
    raw = [tensors[entry["name"]].detach().contiguous().reshape(-1).view(torch.uint8) for entry in piece]
    return raw[0] if len(raw) == 1 else torch.cat(raw)


def tensors_in(piece: Sequence[Entry], block: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a received piece, each with its own memory.

    Args:
        piece: Announced entries.
        block: Received bytes, uint8 ``[bytes]``.

    Returns:
        Name -> tensor in the announced dtype and shape; the only tensor of a piece is a view of ``block``.
    """
    tensors: dict[str, torch.Tensor] = {}
    begin = 0
    for entry in piece:
        part = block[begin : begin + entry["bytes"]]
        begin += entry["bytes"]
        # A view would keep the whole block alive, and its offset may be unaligned for the dtype.
        owned = part if len(piece) == 1 else part.clone()
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        tensors[entry["name"]] = owned.view(dtype).reshape(entry["shape"])
    return tensors


def crc_after(block: torch.Tensor, crc: int) -> int:
    """Continue the CRC-32 ``crc`` with the bytes of ``block``, uint8 ``[bytes]``."""
    return zlib.crc32(block.cpu().numpy().data, crc)
