"""Two-phase moves of whole items between workers: announce, send, verify, commit.

Nothing of the old partition is touched before every worker has said that what it received is whole; a failure before
that drops what was received and leaves the old partition in place.

The tensors of an item travel as one block of bytes, checked by CRC-32. At its highest a worker holds, beside its items,
the blocks that it sends and those that it receives.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import DynmoError
from ..models.items import masks_of, parameters_of
from ..optim.adamw import MOMENTS
from ..optim.items import REFERENCE, HeldItems, ItemState, is_memory
from ..parallel.world import World, all_agree, gather_documents
from ..pipeline.partition import Move, Partition, moves_between

Fault = Callable[[str, torch.Tensor], None]


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


def _block_of(state: ItemState) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """The header of an item's tensors (names, dtypes, shapes, bytes) and their bytes in the same order, on CPU."""
    header: list[dict[str, Any]] = []
    parts: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    for name, tensor in state.tensors.items():
        raw = tensor.detach().contiguous().to("cpu").reshape(-1).view(torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        header.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "bytes": raw.nbytes})
        parts.append(raw)
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)
    return header, torch.from_numpy(joined)


def _state_of(announcement: dict[str, Any], block: torch.Tensor) -> ItemState:
    tensors: dict[str, torch.Tensor] = {}
    begin = 0
    for entry in announcement["tensors"]:
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        part = block[begin : begin + entry["bytes"]].clone()
        tensors[entry["name"]] = part.view(dtype).reshape(entry["shape"])
        begin += entry["bytes"]
    return ItemState(tensors=tensors, steps=announcement["steps"])


def _announcement_problem(announcement: dict[str, Any], held: HeldItems) -> str | None:
    """What is wrong with the announced tensors of an item, against the item as this worker would build it."""
    item = announcement["item"]
    names = [entry["name"] for entry in announcement["tensors"]]
    if len(set(names)) < len(names):
        return f"{item}: a tensor is announced twice"
    module = held.blueprint(item)
    whole = parameters_of(item, module)
    wanted = {name: list(held.own_rows(name, parameter.detach()).shape) for name, parameter in whole.items()}
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


def move_items(
    held: HeldItems, before: Partition, after: Partition, world: World, fault: Fault | None = None
) -> MoveReport:
    """Move whole items so that the workers hold those of ``after``. Called by every worker; all commit, or none does.

    Args:
        fault: for tests: may alter a received block (item name, bytes) before it is verified.

    Raises:
        MoveError: on every worker, where anything was not as announced; the old partition stays in place.
    """
    started = time.perf_counter_ns()
    moves = moves_between(before, after)
    blocks: dict[str, torch.Tensor] = {}
    offered: list[dict[str, Any]] = []
    for move in moves:
        if move.source == world.worker:
            state = held.export(move.item)
            header, blocks[move.item] = _block_of(state)
            crc = zlib.crc32(blocks[move.item].numpy().data)
            offered.append({"item": move.item, "tensors": header, "steps": dict(state.steps), "crc32": crc})

    told = gather_documents(world, offered)
    everyone = [told[world.peer(worker)] for worker in range(world.dims.pipeline)]
    announced = {one["item"]: one for offers in everyone for one in offers}
    _check_announcements(moves, everyone, announced, held, world)
    received = _reserve(moves, announced, world)
    _send(moves, blocks, received, world)
    staged, problem = _verify(received, announced, fault)
    _check_outcome(held, after, staged, problem, world)

    for move in moves:
        if move.source == world.worker:
            held.drop(move.item)
    for item, state in staged.items():
        held.adopt(item, state)
    held.reorder(tuple(name for stage in after.stages_of_worker(world.worker) for name in after.stages[stage]))
    sizes = {item: sum(entry["bytes"] for entry in one["tensors"]) for item, one in announced.items()}
    return MoveReport(moves=tuple(moves), bytes_by_item=sizes, duration_ns=time.perf_counter_ns() - started)


def _check_announcements(
    moves: Sequence[Move],
    everyone: Sequence[Sequence[dict[str, Any]]],
    announced: dict[str, dict[str, Any]],
    held: HeldItems,
    world: World,
) -> None:
    """Phase one: every moved item is announced once, by the worker that holds it, as the model has it."""
    problem: str | None = None
    for move in moves:
        sources = [worker for worker, offers in enumerate(everyone) for one in offers if one["item"] == move.item]
        if sources != [move.source]:
            problem = f"{move.item}: announced by workers {sources}, held by {move.source}"
        elif move.target == world.worker:
            problem = problem or _announcement_problem(announced[move.item], held)
    _raise_if_any(problem, world, "announcement")


def _reserve(moves: Sequence[Move], announced: dict[str, dict[str, Any]], world: World) -> dict[str, torch.Tensor]:
    """Memory for all that this worker is to receive; nobody sends before all workers have theirs."""
    received: dict[str, torch.Tensor] = {}
    problem: str | None = None
    for move in moves:
        if move.target == world.worker:
            size = sum(entry["bytes"] for entry in announced[move.item]["tensors"])
            try:
                received[move.item] = torch.empty(size, dtype=torch.uint8, device=world.device)
            except (RuntimeError, MemoryError) as error:
                first = str(error).partition("\n")[0]
                problem = f"worker {world.worker} has no {size} bytes for {move.item}: {first}"
                break
    _raise_if_any(problem, world, "reservation")
    return received


def _send(
    moves: Sequence[Move], blocks: dict[str, torch.Tensor], received: dict[str, torch.Tensor], world: World
) -> None:
    """Send and receive at once; what is received is on CPU afterwards."""
    group = world.groups.pipeline
    operations: list[dist.P2POp] = []
    for move in moves:
        if move.source == world.worker:
            target = world.started_as(world.peer(move.target))
            operations.append(dist.P2POp(dist.isend, blocks[move.item].to(world.device), target, group))
        elif move.target == world.worker:
            source = world.started_as(world.peer(move.source))
            operations.append(dist.P2POp(dist.irecv, received[move.item], source, group))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    received.update({item: block.to("cpu") for item, block in received.items()})


def _verify(
    received: dict[str, torch.Tensor], announced: dict[str, dict[str, Any]], fault: Fault | None
) -> tuple[dict[str, ItemState], str | None]:
    staged: dict[str, ItemState] = {}
    for item, block in received.items():
        if fault is not None:
            fault(item, block)
        crc = zlib.crc32(block.numpy().data)
        if crc != announced[item]["crc32"]:
            return {}, f"{item}: arrived with CRC-32 {crc:08x}, was sent with {announced[item]['crc32']:08x}"
        staged[item] = _state_of(announced[item], block)
    return staged, None


def _check_outcome(
    held: HeldItems, after: Partition, staged: dict[str, ItemState], problem: str | None, world: World
) -> None:
    """Phase two: what each worker would hold is exactly what the new partition gives it, and nobody has a complaint."""
    wanted = {name for stage in after.stages_of_worker(world.worker) for name in after.stages[stage]}
    missing = wanted - set(held.modules) - set(staged)
    if problem is None and missing:
        problem = f"worker {world.worker} would lack {', '.join(sorted(missing))}"
    _raise_if_any(problem, world, "verification")


def _raise_if_any(problem: str | None, world: World, phase: str) -> None:
    if all_agree(world, problem is None):
        return
    told = [each for each in gather_documents(world, problem) if each]
    raise MoveError(f"{phase} of the move failed, the old partition stays: {'; '.join(told)}")
