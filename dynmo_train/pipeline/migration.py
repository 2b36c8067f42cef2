"""Two-phase moves of whole items between workers: announce, send, verify, commit.

Nothing of the old partition is touched before every worker has said that what it received is whole; a failure before
that drops what was received and leaves the old partition in place.

Large tensors are sent straight from their own memory and received into it; small ones are joined in blocks. Sender and
receiver divide the same list of tensors in the same way, so that only the list is announced.

What travels is checked by CRC-32, by the sender while it sends and by the receiver as it arrives. At its highest a
worker holds, beside its items, what it receives, which becomes the items' own memory.
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
from ..models.layer_list import masks_of, parameters_of
from ..optim.adamw import MOMENTS
from ..optim.item_state import REFERENCE, ItemState, is_memory
from ..optim.item_store import ItemStore
from ..parallel.process_groups import World, all_agree, all_gather_objects
from .partition import Move, Partition, moves_between

# Tensors of at least this size travel from and into their own memory; smaller ones are joined.
LARGE_BYTES = 1 << 16
Entry = Mapping[str, Any]
Arriving = dict[str, list[tuple[list[Entry], torch.Tensor]]]


class MoveError(DynmoError):
    """A move that was not committed; the old partition is in place."""


@dataclass(frozen=True, kw_only=True)
class MoveReport:
    """What a committed move did.

    Attributes:
        moves: the items that changed worker.
        bytes_by_item: bytes of each moved item.
        duration_ns: from announcement to commit, on this worker.
    """

    moves: tuple[Move, ...]
    bytes_by_item: dict[str, int]
    duration_ns: int

    @property
    def total_bytes(self) -> int:
        """Bytes moved between workers."""
        return sum(self.bytes_by_item.values())


def _announcement_problem(announcement: dict[str, Any], store: ItemStore) -> str | None:
    """What is wrong with the announced tensors of an item, against the item as this worker would build it."""
    item = announcement["item"]
    names = [entry["name"] for entry in announcement["tensors"]]
    if len(set(names)) < len(names):
        return f"{item}: a tensor is announced twice"
    module = store.blueprint(item)
    whole = parameters_of(item, module)
    wanted = {
        name: list(store.sharding.local_rows(name, parameter.detach()).shape) for name, parameter in whole.items()
    }
    announced = {entry["name"]: entry["shape"] for entry in announcement["tensors"]}
    for name, shape in wanted.items():
        if announced.get(name) != shape:
            return f"{name}: announced as {announced.get(name)}, the model has {shape}"
    allowed = {f"{name}.mask" for name in masks_of(item, module)}
    allowed |= {f"{name}.{key}" for name in wanted for key in (*MOMENTS, REFERENCE)}
    unknown = {name for name in set(announced) - set(wanted) - allowed if not is_memory(item, name)}
    if unknown:
        return f"{item}: announced tensors that it does not have: {', '.join(sorted(unknown))}"
    if any(f"{name}.{key}" not in announced for name in announcement["steps"] for key in MOMENTS):
        return f"{item}: optimizer state is announced in part"
    return None


def move_items(store: ItemStore, before: Partition, after: Partition, world: World) -> MoveReport:
    """Move whole items so that the workers hold those of ``after``. Called by every worker; all commit, or none does.

    Raises:
        MoveError: on every worker, where anything was not as announced; the old partition stays in place.
    """
    started = time.perf_counter_ns()
    moves = moves_between(before, after)
    leaving = {move.item: store.export(move.item) for move in moves if move.source == world.pipeline_rank}
    offered = [
        {"item": item, "tensors": entries_of(state.tensors), "steps": dict(state.steps)}
        for item, state in leaving.items()
    ]
    told = all_gather_objects(world, offered)
    everyone = [told[world.peer(worker)] for worker in range(world.dims.pipeline)]
    announced = {one["item"]: one for offers in everyone for one in offers}
    _check_announcements(moves, everyone, announced, store, world)
    arriving = _reserve(moves, announced, world)
    sent, received = _exchange(moves, leaving, announced, arriving, world)
    crcs = all_gather_objects(world, {"crc32": sent})
    expected = {
        item: crc for worker in range(world.dims.pipeline) for item, crc in crcs[world.peer(worker)]["crc32"].items()
    }
    _check_outcome(store, after, received, expected, world)

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
    everyone: Sequence[Sequence[dict[str, Any]]],
    announced: dict[str, dict[str, Any]],
    store: ItemStore,
    world: World,
) -> None:
    """Phase one: every moved item is announced once, by the worker that holds it, as the model has it."""
    problem: str | None = None
    for move in moves:
        sources = [worker for worker, offers in enumerate(everyone) for one in offers if one["item"] == move.item]
        if sources != [move.source]:
            problem = f"{move.item}: announced by workers {sources}, held by {move.source}"
        elif move.target == world.pipeline_rank:
            problem = problem or _announcement_problem(announced[move.item], store)
    _raise_if_any(problem, world, "announcement")


def _reserve(moves: Sequence[Move], announced: dict[str, dict[str, Any]], world: World) -> Arriving:
    """Memory for all that this worker is to receive; nobody sends before all workers have theirs."""
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
            except (RuntimeError, MemoryError) as error:
                first = str(error).partition("\n")[0]
                problem = f"worker {world.pipeline_rank} has no {size_of(entries)} bytes for {move.item}: {first}"
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
    """Send and receive at once; the CRC-32 of each item that was sent, and of each that was received."""
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
    each = len(works) == len(operations)  # NCCL gives one work for all of them
    if not each:
        _wait(works)
    sent = {item: 0 for item, _ in outgoing}
    for item, block in outgoing:
        sent[item] = crc_after(block, sent[item])
    received = {item: 0 for item, _, _ in incoming}
    for item, block, number in incoming:
        if each:
            works[number].wait()
        received[item] = crc_after(block, received[item])
    arrived = {number for _, _, number in incoming}  # gloo would wait for another one
    _wait([work for number, work in enumerate(works) if number not in arrived] if each else [])
    return sent, received


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _check_outcome(
    store: ItemStore, after: Partition, received: Mapping[str, int], expected: Mapping[str, int], world: World
) -> None:
    """Phase two: what arrived is what was sent, and gives each worker exactly what the new partition does."""
    problem: str | None = None
    for item, crc in received.items():
        if crc != expected[item]:
            problem = f"{item}: arrived with CRC-32 {crc:08x}, was sent with {expected[item]:08x}"
    wanted = set(after.items_of_rank(world.pipeline_rank))
    missing = wanted - set(store.modules) - set(received)
    if problem is None and missing:
        problem = f"worker {world.pipeline_rank} would lack {', '.join(sorted(missing))}"
    _raise_if_any(problem, world, "verification")


def _raise_if_any(problem: str | None, world: World, phase: str) -> None:
    if all_agree(world, problem is None):
        return
    told = [each for each in all_gather_objects(world, problem) if each]
    raise MoveError(f"{phase} of the move failed, the old partition stays: {'; '.join(told)}")


def entries_of(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """What is announced of an item's tensors: name, dtype, shape and bytes of each, in order."""
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
    """The announced tensors in the pieces that travel: each large one alone, small ones in a row together.

    Worked: of 70,000, 8, 16 and 70,000 bytes the second piece has 24.
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
    """Bytes of a piece."""
    return sum(int(entry["bytes"]) for entry in piece)


def to_send(piece: Sequence[Entry], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a piece: those of the live tensor where there is one alone and contiguous, else a copy."""
    raw = [tensors[entry["name"]].detach().contiguous().reshape(-1).view(torch.uint8) for entry in piece]
    return raw[0] if len(raw) == 1 else torch.cat(raw)


def tensors_in(piece: Sequence[Entry], block: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a piece that arrived, each with memory of its own."""
    tensors: dict[str, torch.Tensor] = {}
    begin = 0
    for entry in piece:
        part = block[begin : begin + entry["bytes"]]
        begin += entry["bytes"]
        owned = part if len(piece) == 1 else part.clone()
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        tensors[entry["name"]] = owned.view(dtype).reshape(entry["shape"])
    return tensors


def crc_after(block: torch.Tensor, crc: int) -> int:
    """The CRC-32 of all that came before, whose own is ``crc``, and a block of bytes."""
    return zlib.crc32(block.cpu().numpy().data, crc)
