"""One value that says which processes there are, passed wherever it is needed, and how they agree."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a pipeline, as one of them sees it. Worker ``w`` of the pipeline is rank ``w``."""

    rank: int
    size: int
    device: torch.device
    host: str

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run directory and starts the planner."""
        return self.rank == 0


def join_world(device_name: str, timeout_s: float = 600.0) -> World:
    """Join the processes that a launcher started (its environment says how many), or be the only one.

    Args:
        device_name: ``cpu``, ``cuda`` or ``auto`` (CUDA where there is a device for each local process).
        timeout_s: how long a collective may wait for a process before the run fails.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_size else "cpu"
    device = torch.device("cuda", local_rank) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    return World(rank=rank, size=size, device=device, host=socket.gethostname())


def leave_world() -> None:
    """Leave cleanly; harmless where no world was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_documents(world: World, document: Any) -> list[Any]:
    """Every process's JSON document, in order of rank, at every process."""
    payload = json.dumps(document).encode()
    length = torch.tensor([len(payload)], dtype=torch.int64)
    lengths = [torch.zeros_like(length) for _ in range(world.size)]
    dist.all_gather(lengths, length)
    longest = max(int(each) for each in lengths)
    buffer = torch.zeros(longest, dtype=torch.uint8)
    buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffers = [torch.zeros_like(buffer) for _ in range(world.size)]
    dist.all_gather(buffers, buffer)
    return [json.loads(each[: int(n)].numpy().tobytes()) for each, n in zip(buffers, lengths, strict=True)]


def broadcast_document(world: World, document: Any) -> Any:
    """Rank 0's JSON document at every process; what the others pass is ignored."""
    payload = json.dumps(document).encode() if world.is_first else b""
    length = torch.tensor([len(payload)], dtype=torch.int64)
    dist.broadcast(length, src=0)
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if world.is_first:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return json.loads(buffer.numpy().tobytes())


def sum_over_world(values: torch.Tensor) -> torch.Tensor:
    """The sum over all processes of a CPU tensor, in place; exact where all but one contribute zero."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def all_agree(ok: bool) -> bool:
    """Whether every process says yes."""
    flag = torch.tensor([1 if ok else 0], dtype=torch.int64)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
