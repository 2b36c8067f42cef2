"""The end of a step after its last operation: gradients and tied weights are reduced, then the optimizer runs.

::

    last operation --> all-reduce over replicas --> tied weights --> [barrier: gradient norm] --> optimizer --> step_ns
    of each worker     (end: reduced_ns)            (end: tied_ns)

* Data parallelism: a ring all-reduce of a worker's gradients after its last operation takes ``2 (D - 1) / D`` of
  their bytes over the bandwidth (Patarasuk and Yuan 2009). Nothing overlaps the backward pass: a gradient is complete
  only after the last microbatch.
* Tied weights: the two workers with a tied weight reduce its gradient between them, once both have theirs.
* Gradient clipping by the global norm is a barrier: no optimizer starts before all gradients are reduced.
* With compression, the replicas of a worker reduce factors instead of matrices. Fused tied weights take
  ``2 (n - 1) / n`` of the table, with n copies on all replicas, once all of them are available.
* The optimizer accesses parameters, gradients and state once: bytes over the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..formats.profile import Item
from ..partition.problem import PartitionProblem
from .compression_cost import Compression
from .simulator import Timeline


@dataclass(frozen=True, kw_only=True)
class TailOptions:
    """Rates of the end of a step, in bytes per second; None leaves a part out.

    Attributes:
        data_parallel: number of replicas.
        data_parallel_bandwidth: between replicas.
        memory_bandwidth: of the optimizer's memory accesses.
        barrier: whether all optimizers wait for the last reduction.
        compression: None if nothing is compressed.
    """

    data_parallel: int = 1
    data_parallel_bandwidth: int | None = None
    memory_bandwidth: int | None = None
    barrier: bool = True
    compression: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The ends of the parts on each worker, and the step, in ns from the start of the step."""

    reduced_ns: tuple[int, ...]
    tied_ns: tuple[int, ...]
    step_ns: int


def tail_of(problem: PartitionProblem, boundaries: Sequence[int], timeline: Timeline, options: TailOptions) -> Tail:
    """The end of the step.

    Args:
        problem: chain and workers.
        boundaries: ``[stages + 1]`` item positions.
        timeline: the simulated operations of the step.
        options: bandwidths in bytes per second, number of replicas and compression.
    """
    count = len(problem.slots)
    items, is_trained = problem.chain.items, problem.chain.is_trained
    gradient, touched = _shard_bytes(problem, options)
    worker_of: dict[str, int] = {}
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        for item, trained in zip(items[begin:end], is_trained[begin:end], strict=True):
            worker_of[item.name] = problem.positions[stage]
            # Each is read or written once per step, whatever the number of microbatches; frozen items are not.
            size = item.param_bytes + item.gradient_bytes + item.optimizer_bytes
            touched[problem.positions[stage]] += size * trained
    ends = list(timeline.ends_ns)
    replicas, fused = options.data_parallel, _fused_tables(items, options)
    for item, trained in zip(items, is_trained, strict=True):
        position = worker_of[item.name]
        size, made_ns = _reduced(item, fused.get(item.name, 0), position, options)
        gradient[position] += size * trained
        ends[position] += made_ns * trained
    if replicas > 1 and options.data_parallel_bandwidth:
        rate = replicas * options.data_parallel_bandwidth
        ends = [end + 2 * (replicas - 1) * size * 10**9 // rate for end, size in zip(ends, gradient, strict=True)]
    reduced = tuple(ends)
    for item in items:
        # After the all-reduce over replicas: the copies of a tied weight add gradients that are already reduced.
        other = worker_of.get(item.tied_to or "")
        own = worker_of[item.name]
        if other is None:
            continue
        if item.name in fused:
            # One exchange among all processes with a copy (Optimus-CC, arXiv 2301.09830, section 6): a reduce-scatter
            # and an all-gather move the table twice. A worker with both copies sends the pieces of both and gathers
            # one sum, which is three times the table. Gradients are float32 here.
            copies, item_workers = (2, 2 * replicas) if other != own else (3, replicas)
            rate = item_workers * (options.data_parallel_bandwidth or 0)
            both = max(ends[own], ends[other])
            both += copies * (item_workers - 1) * 4 * fused[item.name] * 10**9 // rate if rate else 0
            ends[own] = ends[other] = both
        elif other != own:
            # Both workers take part in the reduction, so both are free when it ends.
            both = max(ends[own], ends[other]) + problem.transfer_ns(item.gradient_bytes)
            ends[own] = ends[other] = both
    tied = tuple(ends)
    if options.barrier:
        ends = [max(ends)] * count
    if options.memory_bandwidth:
        pairs = zip(ends, touched, strict=True)
        ends = [end + size * 10**9 // options.memory_bandwidth for end, size in pairs]
    return Tail(reduced_ns=reduced, tied_ns=tied, step_ns=max(ends))


def _shard_bytes(problem: PartitionProblem, options: TailOptions) -> tuple[list[int], list[int]]:
    """For each worker the bytes of its shards of the output layer that replicas reduce and the optimizer touches.

    Shards are on all workers, whatever the partition of the items is.
    """
    shards, count = problem.chain.vocabulary, len(problem.slots)
    if shards is None:
        return [0] * count, [0] * count
    reduced = shards.gradient_bytes if options.data_parallel > 1 else 0
    return (
        [shards.share(reduced, worker, count) for worker in range(count)],
        [shards.share(shards.static_bytes, worker, count) for worker in range(count)],
    )


def reduced_bytes(problem: PartitionProblem, boundaries: Sequence[int], options: TailOptions) -> tuple[int, ...]:
    """Bytes that the replicas of each worker reduce, without fused tied tables.

    Args:
        problem: chain and workers.
        boundaries: ``[stages + 1]`` item positions.
        options: number of replicas and compression.

    Returns:
        one number per worker, in the order of their first stages; zeros with one replica.
    """
    fused = _fused_tables(problem.chain.items, options)
    sizes = [0] * len(problem.slots)
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        position = problem.positions[stage]
        for index in range(begin, end):
            item = problem.chain.items[index]
            size = _reduced(item, fused.get(item.name, 0), position, options)[0]
            sizes[position] += size * problem.chain.is_trained[index]
    return tuple(sizes)


def _fused_tables(items: Sequence[Item], options: TailOptions) -> dict[str, int]:
    """For each item with a fused tied table, the parameters of that table."""
    if options.compression is None or not options.compression.fuse_ties or options.data_parallel == 1:
        return {}
    sizes = {item.name: item.param_count for item in items}
    tables: dict[str, int] = {}
    for item in items:
        if item.tied_to in sizes:
            # The smaller of the two is the table: a head may have a norm next to it, an embedding also positions.
            table = min(sizes[item.name], sizes[item.tied_to or ""])
            tables[item.name] = tables[item.tied_to or ""] = table
    return tables


def _reduced(item: Item, elsewhere: int, worker: int, options: TailOptions) -> tuple[int, int]:
    """Bytes of an item that its replicas reduce, and the time of compression in ns; zeros without replicas.

    Args:
        item: the item.
        elsewhere: parameters of the item that are reduced separately.
        worker: position of its worker.
        options: rates and compression.
    """
    compression = options.compression
    if options.data_parallel == 1 or not item.param_count:
        return 0, 0
    if compression is None or not compression.compresses_replicas(worker):
        return item.gradient_bytes * max(0, item.param_count - elsewhere) // item.param_count, 0
    if elsewhere >= item.param_count:
        return 0, 0
    return compression.replica_bytes(item, elsewhere), compression.replica_ns(item, elsewhere)
