"""One value that says which processes there are, passed wherever it is needed, and how they agree."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from .._common.errors import UsageError
from .dims import Coordinates, ParallelDims


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups that one process is in, one an axis; None where the axis has one place.

    torch's stages want a group even of one process: ``pipeline`` is None only where no world was joined.

    Attributes:
        world: all processes of the run; None is torch's own group of those that were started.
        pipeline, tensor, data: the ranks that differ from this one along that axis alone.
        model: the ranks that hold one replica together (pipeline and tensor).
        expert: the ranks that share the experts of a layer.
        expert_data: the ranks that hold the same experts as this one.
    """

    world: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_data: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, as one of them sees it.

    Attributes:
        rank, size: among the processes of the run.
        dims: how they are laid out.
        groups: the process groups of this one.
        members: where workers have left, torch's rank of each process that stayed; empty while nobody has left.
        workers: the ids of the workers by pipeline position; empty while each one's id is its position.
    """

    rank: int
    size: int
    device: torch.device
    host: str
    dims: ParallelDims
    groups: Groups = Groups()
    members: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes the run directory and starts the planner."""
        return self.rank == 0

    @property
    def coordinates(self) -> Coordinates:
        """Where this process stands."""
        return self.dims.coordinates(self.rank)

    @property
    def pipeline_rank(self) -> int:
        """The pipeline position of this process."""
        return self.coordinates.pipeline

    @property
    def data_rank(self) -> int:
        """The data-parallel replica that this process belongs to."""
        return self.coordinates.data

    @property
    def tensor_rank(self) -> int:
        """The place of this process among those that share each matrix product."""
        return self.coordinates.tensor

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The id of the worker at each pipeline position: its own for life."""
        return self.workers or tuple(range(self.dims.pipeline))

    def global_rank(self, rank: int) -> int:
        """The rank by which torch knows a process of the run: the one that it was started with."""
        return self.members[rank] if self.members else rank

    def peer(self, worker: int) -> int:
        """The rank at pipeline position ``worker`` with this process's replica and shard."""
        return self.dims.rank_of(pipeline=worker, data=self.data_rank, tensor=self.tensor_rank)


def check_device(name: str, processes: int = 1) -> None:
    """Raise ``UsageError`` where ``--device cuda`` has not a device for each of this machine's processes."""
    if name.partition(":")[0] != "cuda":
        return
    if not torch.cuda.is_available():
        build = "has no CUDA support" if torch.version.cuda is None else "finds no CUDA device"
        raise UsageError(f"--device {name}: torch {torch.__version__} {build} here; use --device cpu")
    found = torch.cuda.device_count()
    if found < processes:
        raise UsageError(
            f"--device {name}: {processes} processes on this machine and {found} CUDA devices; start one process a"
            " device, or use --device cpu"
        )


def init_world(device_name: str, timeout_s: float = 600.0, dims: ParallelDims | None = None) -> World:
    """Join the processes that a launcher started (its environment says how many), or be the only one.

    Args:
        device_name: ``cpu``, ``cuda`` or ``auto`` (CUDA where there is a device for each local process).
        timeout_s: how long a collective may wait for a process before the run fails.
        dims: how the processes are laid out; None is one pipeline of all.

    Raises:
        UsageError: ``dims`` do not fit the number of processes, or a process has no CUDA device.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_size else "cpu"
    check_device(device_name, local_size)
    device = torch.device("cuda", local_rank) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    world = World(rank=rank, size=size, device=device, host=socket.gethostname(), dims=ParallelDims(pipeline=size))
    return set_parallel_dims(world, dims or world.dims, timeout_s)


def set_parallel_dims(world: World, dims: ParallelDims, timeout_s: float = 600.0) -> World:
    """The same processes along other axes, with groups of their own; every process calls this.

    Raises:
        UsageError: ``dims`` do not fit the number of processes.
    """
    if dims.size != world.size:
        raise UsageError(f"{dims} lays out {dims.size} processes; there are {world.size}")
    return replace(world, dims=dims, groups=_make_groups(dims, world.rank, timedelta(seconds=timeout_s)))


def _make_groups(dims: ParallelDims, rank: int, timeout: timedelta) -> Groups:
    """The groups of ``rank``. Every process makes its own, axis after axis."""
    own = dims.coordinates(rank)
    group = group_factory({tuple(range(dims.size)): dist.group.WORLD}, timeout)
    experts = dims.expert_ranks(rank)
    same_experts = dims.ranks(pipeline=own.pipeline, tensor=own.tensor)[own.data % dims.expert :: dims.expert]
    return Groups(
        pipeline=group(dims.ranks(data=own.data, tensor=own.tensor), alone=True),
        tensor=group(dims.ranks(pipeline=own.pipeline, data=own.data)),
        data=group(dims.ranks(pipeline=own.pipeline, tensor=own.tensor)),
        model=group(dims.ranks(data=own.data)),
        expert=group(experts),
        expert_data=group(same_experts),
    )


class MakeGroup(Protocol):
    """Makes the group of some ranks, as torch counts them; None where it would be of one, unless that is wished."""

    def __call__(self, ranks: Sequence[int], *, alone: bool = False) -> dist.ProcessGroup | None:
        """The same group for the same ranks."""


def group_factory(made: dict[tuple[int, ...], dist.ProcessGroup | None], timeout: timedelta) -> MakeGroup:
    """Makes groups whose members alone have to call; those in ``made`` are there already."""

    def group(ranks: Sequence[int], *, alone: bool = False) -> dist.ProcessGroup | None:
        members = tuple(ranks)
        if len(members) == 1 and not alone:
            return None
        if members not in made:
            made[members] = dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
        return made[members]

    return group


def destroy_world() -> None:
    """Leave cleanly; harmless where no world was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather_objects(world: World, document: Any) -> list[Any]:
    """Every process's JSON document, in order of rank, at every process."""
    payload = json.dumps(document).encode()
    length = torch.tensor([len(payload)], dtype=torch.int64)
    lengths = [torch.zeros_like(length) for _ in range(world.size)]
    dist.all_gather(lengths, length, group=world.groups.world)
    longest = max(int(each) for each in lengths)
    buffer = torch.zeros(longest, dtype=torch.uint8)
    buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffers = [torch.zeros_like(buffer) for _ in range(world.size)]
    dist.all_gather(buffers, buffer, group=world.groups.world)
    return [json.loads(each[: int(n)].numpy().tobytes()) for each, n in zip(buffers, lengths, strict=True)]


def broadcast_object(world: World, document: Any) -> Any:
    """Rank 0's JSON document at every process; what the others pass is ignored."""
    payload = json.dumps(document).encode() if world.is_rank0 else b""
    first, everyone = world.global_rank(0), world.groups.world
    length = torch.tensor([len(payload)], dtype=torch.int64)
    dist.broadcast(length, src=first, group=everyone)
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if world.is_rank0:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(buffer, src=first, group=everyone)
    return json.loads(buffer.numpy().tobytes())


def sum_over(group: dist.ProcessGroup | None, values: torch.Tensor) -> torch.Tensor:
    """The sum over a group of a tensor, in place; None is a group of this process alone."""
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)
    return values


def gather_over(group: dist.ProcessGroup | None, values: torch.Tensor) -> list[torch.Tensor]:
    """A group's tensors of one shape, in order of rank; None is a group of this process alone."""
    if group is None:
        return [values]
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group=group)
    return parts


def sum_over_pipeline(world: World, values: torch.Tensor) -> torch.Tensor:
    """The sum over the pipeline of a CPU tensor, in place; exact where all but one position contribute zero."""
    return sum_over(world.groups.pipeline, values)


def sum_over_model(world: World, counts: torch.Tensor) -> torch.Tensor:
    """The sum of integers over the processes that hold one replica, in place."""
    return sum_over(world.groups.model, counts)


def sum_over_replicas(world: World, value: torch.Tensor) -> torch.Tensor:
    """The sum of a CPU tensor over the replicas, added in their order: the same bits wherever a layer stands."""
    total = torch.zeros_like(value)
    for part in gather_over(world.groups.data, value):
        total += part
    return total


def all_agree(world: World, ok: bool) -> bool:
    """Whether every process says yes."""
    flag = torch.tensor([1 if ok else 0], dtype=torch.int64)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=world.groups.world)
    return bool(flag.item())
