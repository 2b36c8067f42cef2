"""The processes of a run: ranks, process groups, and collectives of JSON documents and small tensors.

One frozen :class:`World` is passed wherever processes communicate; there is no global state. Ranks count along the
tensor axis first, then data, then pipeline; for 2 x 2 x 2::

    rank        0  1  2  3  4  5  6  7
    tensor      0  1  0  1  0  1  0  1
    data        0  0  1  1  0  0  1  1
    pipeline    0  0  0  0  1  1  1  1

After pipeline ranks are released, ranks of the run differ from torch's global ranks: point-to-point operations use
``World.global_rank``.
"""

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
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from .._common.errors import DynmoError, UsageError
from ..launch.worker import GENERATION_VARIABLE
from .dims import Coordinates, ParallelDims


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of one process, one per axis; None where a group has one member.

    torch's stages need a group of one process, too: ``pipeline`` is None only without an initialized world.

    Attributes:
        world: All processes of the run; None is torch's default group.
        pipeline: Ranks that differ from this one in the pipeline axis only.
        tensor: Ranks that differ from this one in the tensor axis only.
        data: Ranks that differ from this one in the data axis only.
        model: Ranks of one replica (pipeline and tensor).
        context: Ranks that share the tokens of a sample.
        expert: Ranks that share the experts of a layer.
        expert_data: Ranks that have the same experts as this one.
        shard: Ranks over which ZeRO shards a parameter.
        shard_copies: Ranks that have the same rows of it as this one.
        expert_shard: Ranks over which ZeRO shards a parameter of an expert.
        expert_shard_copies: Ranks that have the same rows of it as this one.
        vocabulary: Ranks of ``pipeline``, once for each kind of message of a sharded vocabulary; empty without.
    """

    world: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_data: dist.ProcessGroup | None = None
    shard: dist.ProcessGroup | None = None
    shard_copies: dist.ProcessGroup | None = None
    expert_shard: dist.ProcessGroup | None = None
    expert_shard_copies: dist.ProcessGroup | None = None
    vocabulary: tuple[dist.ProcessGroup, ...] = ()


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, from the view of one of them.

    Attributes:
        rank: Rank of this process in the run.
        size: Number of processes.
        device: Device of this process.
        host: Name of this machine.
        dims: Parallel dimensions.
        groups: Process groups of this process.
        members: torch's global rank of each rank, after pipeline ranks were released; empty before.
        workers: Worker id of each pipeline rank, after pipeline ranks were released; empty before.
        timeout_s: Timeout of collectives, in seconds.
    """

    rank: int
    size: int
    device: torch.device
    host: str
    dims: ParallelDims
    groups: Groups = Groups()
    members: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    timeout_s: float = 600.0

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes the run directory and starts the planner."""
        return self.rank == 0

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this process."""
        return self.dims.coordinates(self.rank)

    @property
    def pipeline_rank(self) -> int:
        """Pipeline rank of this process."""
        return self.coordinates.pipeline

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process, context-parallel ranks counted."""
        return self.coordinates.data

    @property
    def replica(self) -> int:
        """Replica of this process: whose samples it reads."""
        return self.data_rank // self.dims.context

    @property
    def context_rank(self) -> int:
        """Context-parallel rank of this process: which tokens of the samples it has."""
        return self.data_rank % self.dims.context

    @property
    def tensor_rank(self) -> int:
        """Tensor-parallel rank of this process."""
        return self.coordinates.tensor

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """Worker id of each pipeline rank: its pipeline rank at the start of the run."""
        return self.workers or tuple(range(self.dims.pipeline))

    def global_rank(self, rank: int) -> int:
        """Return torch's global rank of a rank of the run."""
        return self.members[rank] if self.members else rank

    def peer(self, pipeline_rank: int) -> int:
        """Return the rank of the run at ``pipeline_rank``, with this process's data and tensor ranks."""
        return self.dims.rank_of(pipeline=pipeline_rank, data=self.data_rank, tensor=self.tensor_rank)


def check_device(name: str, processes: int = 1) -> None:
    """Check that ``--device cuda`` has a device for each of this machine's processes.

    Args:
        name: Value of ``--device``.
        processes: Number of processes on this machine.

    Raises:
        UsageError: It has not.
    """
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
    """Initialize torch.distributed from the launcher's environment, or for a single process.

    Args:
        device_name: ``cpu``, ``cuda`` or ``auto`` (CUDA where there is a device for each local process).
        timeout_s: Timeout of collectives, in seconds.
        dims: Parallel dimensions; None is one pipeline of all processes.

    Raises:
        UsageError: ``dims`` do not match the number of processes, or a process has no CUDA device or no valid rank.
        DynmoError: rank 0 cannot be reached, or waits for other ranks in vain.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < size:
        # Also a rank of a node that was started without the options of the run that it should join.
        raise UsageError(f"RANK={rank}: must be below WORLD_SIZE={size}; start all nodes with the same options")
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_size else "cpu"
    check_device(device_name, local_size)
    device = torch.device("cuda", local_rank) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Both: JSON documents, counts and losses are CPU tensors on GPU machines, too, so that NCCL is not needed for them.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    # A single process without a launcher needs no port, which another run on this machine could have taken.
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        try:
            store = _store_of_generation(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        except dist.DistError as error:
            raise DynmoError(_describe_connection(rank, timeout_s, error)) from error
    world = World(rank=rank, size=size, device=device, host=socket.gethostname(), dims=ParallelDims(pipeline=size))
    return set_parallel_dims(world, dims or world.dims, timeout_s)


def _describe_connection(rank: int, timeout_s: float, error: Exception) -> str:
    """Why this rank has no connection to the store of rank 0, whose address a launcher states."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    place = f"MASTER_ADDR={host} and MASTER_PORT={port}"
    try:
        socket.getaddrinfo(host, port)
    except OSError as unresolved:
        return f"rank {rank}: {place}: the name has no address ({unresolved.strerror}); give that of rank 0's host"
    reason = str(error).splitlines()[0]
    if isinstance(error, dist.DistStoreError):
        return f"rank {rank}: not all ranks joined at {place}: {reason}"
    if rank == 0:
        return f"rank 0 cannot open the store at {place}: {reason}; give a free port of this host"
    return f"rank {rank} cannot reach rank 0 at {place} within {timeout_s:g} s: {reason}"


def _store_of_generation(timeout: timedelta) -> Store | None:
    """The store of ranks that continue without others; None before, where torch connects to it.

    Its prefix is new: the same keys with a former one have the addresses of connections that are closed.
    """
    generation = os.environ.get(GENERATION_VARIABLE)
    if generation is None:
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(f"generation-{generation}", store)


def set_parallel_dims(world: World, dims: ParallelDims, timeout_s: float = 600.0) -> World:
    """Return the world with other parallel dimensions and new process groups; a collective.

    Args:
        world: Processes of the run.
        dims: Parallel dimensions.
        timeout_s: Timeout of collectives, in seconds.

    Raises:
        UsageError: ``dims`` do not match the number of processes.
    """
    if dims.size != world.size:
        raise UsageError(f"{dims} need {dims.size} processes; the run has {world.size}")
    groups = _make_groups(dims, world.rank, timedelta(seconds=timeout_s))
    return replace(world, dims=dims, groups=groups, timeout_s=timeout_s)


def _make_groups(dims: ParallelDims, rank: int, timeout: timedelta) -> Groups:
    """Create the groups of ``rank``; every process creates its own, axis by axis."""
    own = dims.coordinates(rank)
    group = group_factory({tuple(range(dims.size)): dist.group.WORLD}, timeout)
    experts = dims.expert_ranks(rank)
    same_experts = dims.ranks(pipeline=own.pipeline, tensor=own.tensor)[own.data % dims.expert :: dims.expert]
    return Groups(
        pipeline=group(dims.ranks(data=own.data, tensor=own.tensor), alone=True),
        tensor=group(dims.ranks(pipeline=own.pipeline, data=own.data)),
        data=group(dims.ranks(pipeline=own.pipeline, tensor=own.tensor)),
        model=group(dims.ranks(data=own.data)),
        context=group(dims.context_ranks(rank)),
        expert=group(experts),
        expert_data=group(same_experts),
        shard=group(dims.shard_ranks(rank)),
        shard_copies=group(dims.shard_copies(rank)),
        expert_shard=group(dims.shard_ranks(rank, expert_local=True)),
        expert_shard_copies=group(dims.shard_copies(rank, expert_local=True)),
    )


VOCABULARY_MESSAGES = 7


def with_vocabulary_groups(world: World) -> World:
    """Return the world with the groups of a sharded output layer; every process of a pipeline calls this."""
    ranks = [world.global_rank(world.peer(rank)) for rank in range(world.dims.pipeline)]
    return replace(world, groups=replace(world.groups, vocabulary=vocabulary_groups(ranks)))


def vocabulary_groups(ranks: Sequence[int], timeout: timedelta | None = None) -> tuple[dist.ProcessGroup, ...]:
    """Create one group of these global ranks for each kind of message of a sharded output layer.

    Args:
        ranks: Global ranks, which all call this.
        timeout: Timeout of the messages; None is torch's.
    """
    return tuple(
        dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True) for _ in range(VOCABULARY_MESSAGES)
    )


class GroupFactory(Protocol):
    """Creates the group of some global ranks; None for one rank, unless ``alone``."""

    def __call__(self, ranks: Sequence[int], *, alone: bool = False) -> dist.ProcessGroup | None:
        """Return the group of ``ranks``, the same object for the same ranks."""


def group_factory(made: dict[tuple[int, ...], dist.ProcessGroup | None], timeout: timedelta) -> GroupFactory:
    """Return a function that creates groups, which only their members call.

    Args:
        made: Groups that exist already, by their global ranks; new ones are added.
        timeout: Timeout of collectives.
    """

    def group(ranks: Sequence[int], *, alone: bool = False) -> dist.ProcessGroup | None:
        members = tuple(ranks)
        if len(members) == 1 and not alone:
            return None
        # Local synchronization: only members take part, so that each process creates just its own groups. Two axes with
        # the same ranks share one group.
        if members not in made:
            made[members] = dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
        return made[members]

    return group


def destroy_world() -> None:
    """Destroy the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather_objects(world: World, document: Any) -> list[Any]:
    """Return the JSON documents of all ranks, in rank order, on every rank; a collective."""
    # JSON, not torch's all_gather_object, which unpickles what it receives. An all-gather needs equal shapes, so that
    # all buffers have the longest length.
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
    """Return rank 0's JSON document on every rank; a collective. Documents of other ranks are ignored."""
    payload = json.dumps(document).encode() if world.is_rank0 else b""
    source, group = world.global_rank(0), world.groups.world
    length = torch.tensor([len(payload)], dtype=torch.int64)
    dist.broadcast(length, src=source, group=group)
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if world.is_rank0:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(buffer, src=source, group=group)
    return json.loads(buffer.numpy().tobytes())


def sum_over(group: dist.ProcessGroup | None, values: torch.Tensor) -> torch.Tensor:
    """Sum ``values``, of any shape, over a group in place and return it; None is a group of this process only."""
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)
    return values


def gather_over(group: dist.ProcessGroup | None, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the ``values`` of each rank of a group, of one shape, in rank order.

    Args:
        group: Process group; None is a group of this process only.
        values: This rank's tensor, of any shape; the same shape and dtype on every rank.
    """
    if group is None:
        return [values]
    parts = list(values.new_empty((dist.get_world_size(group), *values.shape)).unbind())
    dist.all_gather(parts, values, group=group)
    return parts


def sum_over_pipeline(world: World, values: torch.Tensor) -> torch.Tensor:
    """Sum ``values``, a CPU tensor of any shape, over the pipeline ranks in place and return it.

    Exact where all ranks but one contribute zero to each element.
    """
    return sum_over(world.groups.pipeline, values)


def sum_over_model(world: World, counts: torch.Tensor) -> torch.Tensor:
    """Sum ``counts``, integers of any shape, over the ranks of one replica in place and return them."""
    return sum_over(world.groups.model, counts)


def sum_over_replicas(world: World, value: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``value``, a CPU tensor of any shape, over the replicas.

    An all-reduce may add in an order that depends on the group; this one depends on the number of replicas only.
    """
    return torch.stack(gather_over(world.groups.data, value)).sum(dim=0)


def all_agree(world: World, ok: bool) -> bool:
    """Whether ``ok`` is true on every rank; a collective."""
    flag = torch.tensor([1 if ok else 0], dtype=torch.int64)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=world.groups.world)
    return bool(flag.item())
