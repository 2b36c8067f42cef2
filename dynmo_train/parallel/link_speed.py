"""Speed of links and devices: point-to-point and all-reduce times between ranks, matrix products, memory.

Times are the minimum of several runs: other load on a machine only adds to a time. Bandwidths are in bytes per second
of one direction. The bus bandwidth of an all-reduce is ``2 (n - 1) / n`` of its bytes over its time, as in nccl-tests:
on a ring it is what each link carries.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from .process_groups import World, all_gather_objects

SIZES = (1, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
CUDA_SIZES = (*SIZES, 1 << 26, 1 << 28)
REPEATS = 5
# Up to this number of ranks all pairs are measured; above it, the neighbors in the order of ranks.
MAX_RANKS_OF_ALL_PAIRS = 8


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """A message between two ranks.

    Attributes:
        here: rank of one end.
        there: rank of the other end.
        num_bytes: size of the message in bytes.
        ns: one-way time in nanoseconds.
    """

    here: int
    there: int
    num_bytes: int
    ns: int

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in bytes per second, the latency included."""
        return self.num_bytes / self.ns * 1e9


@dataclass(frozen=True, kw_only=True)
class ReduceTime:
    """An all-reduce over all ranks.

    Attributes:
        num_ranks: number of ranks.
        num_bytes: size of the tensor of each rank in bytes.
        ns: time in nanoseconds.
    """

    num_ranks: int
    num_bytes: int
    ns: int

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth in bytes per second."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.ns * 1e9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_way_ns(world: World, here: int, there: int, num_bytes: int, repeats: int = REPEATS) -> float:
    """The one-way time between two ranks by ping-pong, in nanoseconds. Every rank calls this.

    Args:
        world: process groups.
        here: global rank of one end.
        there: global rank of the other end.
        num_bytes: size of the message in bytes.
        repeats: number of measured round trips, after one warm-up.

    Returns:
        Half of the shortest round trip; meaningful on the two ranks only.
    """
    block = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    times: list[float] = []
    for _ in range(repeats + 1):
        # Both ends start together: waiting for the other one must not count as transfer.
        dist.barrier()
        begin = time.perf_counter_ns()
        if world.rank == here:
            dist.send(block, there)
            dist.recv(block, there)
        elif world.rank == there:
            dist.recv(block, here)
            dist.send(block, here)
        _synchronize(world.device)
        times.append((time.perf_counter_ns() - begin) / 2)
    return min(times[1:])


def pairs_of(num_ranks: int) -> list[tuple[int, int]]:
    """The pairs of ``num_ranks`` ranks that are measured: all pairs of few ranks, else neighbors in a ring."""
    if num_ranks <= MAX_RANKS_OF_ALL_PAIRS:
        return list(itertools.combinations(range(num_ranks), 2))
    return [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]


def measure_pairs(world: World, sizes: Sequence[int]) -> list[LinkTime]:
    """The one-way times of all pairs and sizes, on every rank; a collective."""
    own: list[dict[str, int]] = []
    for (here, there), size in itertools.product(pairs_of(world.size), sizes):
        ns = one_way_ns(world, world.global_rank(here), world.global_rank(there), size)
        if world.rank == here:
            own.append(asdict(LinkTime(here=here, there=there, num_bytes=size, ns=max(1, round(ns)))))
    return [LinkTime(**row) for rows in all_gather_objects(world, own) for row in rows]


def measure_all_reduce(world: World, sizes: Sequence[int], repeats: int = REPEATS) -> list[ReduceTime]:
    """Measure an all-reduce of float32 over all ranks; a collective.

    Args:
        world: all ranks.
        sizes: message sizes in bytes.
        repeats: measurements of each size after one that warms up; the shortest counts.

    Returns:
        The time of the slowest rank, for each size.
    """
    found = []
    for size in sizes:
        block = torch.zeros(max(1, size // 4), dtype=torch.float32, device=world.device)
        times = []
        for _ in range(repeats + 1):
            dist.barrier()
            begin = time.perf_counter_ns()
            dist.all_reduce(block)
            _synchronize(world.device)
            times.append(time.perf_counter_ns() - begin)
        slowest = max(all_gather_objects(world, min(times[1:])))
        found.append(ReduceTime(num_ranks=world.size, num_bytes=block.numel() * 4, ns=max(1, slowest)))
    return found


def bandwidth_without_latency(num_bytes: int, latency_ns: float, payload_ns: float) -> int:
    """Bandwidth in bytes per second from one-way times: ``latency_ns`` of one byte, ``payload_ns`` of ``num_bytes``.

    A disturbed latency measurement can take most of the payload's time. At least half of that time counts as transfer,
    so that the bandwidth is at most twice the measured one.
    """
    transfer_ns = max(payload_ns - latency_ns, payload_ns / 2, 1.0)
    return max(1, int(num_bytes / transfer_ns * 1e9))


def link_of(times: Iterable[LinkTime]) -> tuple[int, int] | None:
    """The slowest link of some pairs: bandwidth in bytes per second, and latency in nanoseconds.

    The latency is the time of the smallest message, the bandwidth that of the largest without the latency, as in the
    ``link`` of a profile. None without pairs.
    """
    by_pair: dict[tuple[int, int], list[LinkTime]] = {}
    for row in times:
        by_pair.setdefault((row.here, row.there), []).append(row)
    links = []
    for rows in by_pair.values():
        small, large = (pick(rows, key=lambda row: row.num_bytes) for pick in (min, max))
        links.append((bandwidth_without_latency(large.num_bytes, small.ns, large.ns), small.ns))
    return (min(bandwidth for bandwidth, _ in links), max(latency for _, latency in links)) if links else None


def _fastest_s(run: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return max(min(times[1:]), 1e-9)


def product_flops_per_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations per second of a product of two square matrices of ``size`` rows."""
    left = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _fastest_s(lambda: left @ left, device)


def memory_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that a copy of ``num_bytes`` reads and writes."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _fastest_s(lambda: target.copy_(source), device)


def device_speed(device: torch.device) -> dict[str, Any]:
    """Measured rates of a device, by the names of a device file of ``dynmo-plan``.

    Returns:
        ``name``, ``kind``, ``memory_bytes``, ``memory_bandwidth_bytes_per_s``, ``flops_per_s`` by dtype, and
        ``half_flops``: the size of a product, in operations, that reaches half of that rate; an assumption.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        found = torch.cuda.get_device_properties(device)
        name, memory = found.name, found.total_memory
    else:
        name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size, copied = (8192, 1 << 30) if is_cuda else (512, 1 << 26)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return {
        "name": name,
        "kind": device.type,
        "memory_bytes": memory,
        "memory_bandwidth_bytes_per_s": memory_bytes_per_s(device, copied),
        "flops_per_s": {dtype: product_flops_per_s(device, kind, size) for dtype, kind in dtypes.items()},
        "half_flops": 8e9 if is_cuda else 2e6,
    }
