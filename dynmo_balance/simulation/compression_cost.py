"""The effect of gradient compression on a step: bytes on the links, and the time to compress and decompress.

A gradient ``[N, D]`` between stages becomes factors of ``(N + D) * rank`` float32 numbers. The gradients of an item's
matrices, each ``D`` wide, become ``(parameters / D + matrices * D) * rank`` numbers. One product of rank ``r`` with a
matrix takes as long as its ``2 N D r`` operations or as reading the matrix, whichever is longer. Compression takes
two products, and a third one with error feedback; decompression takes one (PowerSGD: Vogels et al. 2019, arXiv
1905.13727).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .._common.errors import UsageError
from ..costs.devices import Device
from ..formats.profile import Header, Item
from ..partition.problem import PartitionProblem
from ..schedules.registry import Kind, Order
from .shard_passes import shards_of_workers
from .simulator import Communication, StageCosts, Timeline, run, stage_costs

FACTOR_BYTES = 4
"""``dynmo-train`` computes and sends factors in float32, whatever the dtype of the model."""
MATRICES = {"attention": 2, "cross_attention": 3, "mlp": 2, "layer": 4}
"""Matrices of an item by kind, in a GPT block; a profile does not record the third one of a gated MLP."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The compression of a run; the default is none.

    Attributes:
        rows: samples times tokens of a microbatch.
        columns: the hidden size of the model.
        device: the device that computes the factors.
        boundary_rank: rank of gradients between stages; None sends them uncompressed.
        epilogue_only: compress only the gradients after a worker's last forward pass.
        feedback: whether the compression error is kept and added to the next gradient.
        replica_rank: rank of gradients between replicas; None reduces them uncompressed.
        replica_workers: the number of workers, from the first, that compress between replicas; None is all.
        fuse_ties: reduce tied weights over replicas and copies in one all-reduce.
    """

    rows: int
    columns: int
    device: Device
    boundary_rank: int | None = None
    epilogue_only: bool = False
    feedback: bool = False
    replica_rank: int | None = None
    replica_workers: int | None = None
    fuse_ties: bool = False

    def product_ns(self, rows: int, columns: int, rank: int, *, moves: int = 1) -> float:
        """The time in ns of a product of rank ``rank`` with a float32 matrix.

        Args:
            rows, columns: of the matrix.
            rank: of the product.
            moves: how often the matrix is read or written.
        """
        # The roofline: at low ranks the matrix is read for few operations, so memory is the limit on most devices.
        products = self.device.product_ns(2 * rows * columns * rank, "float32")
        return max(products, self.device.touch_ns(moves * rows * columns * FACTOR_BYTES))

    def compress_ns(self, rows: int, columns: int, rank: int) -> int:
        """The time in ns to compute the factors of rank ``rank`` of a matrix ``[rows, columns]``."""
        feedback_ns = self.product_ns(rows, columns, rank, moves=2) if self.feedback else 0.0
        return round(2 * self.product_ns(rows, columns, rank) + feedback_ns)

    def decompress_ns(self, rows: int, columns: int, rank: int) -> int:
        """The time in ns to compute a matrix ``[rows, columns]`` from its factors of rank ``rank``."""
        return round(self.product_ns(rows, columns, rank))

    def compresses_replicas(self, worker: int) -> bool:
        """Whether the worker at this position compresses between its replicas."""
        return self.replica_rank is not None and (self.replica_workers is None or worker < self.replica_workers)

    def replica_bytes(self, item: Item, without: int = 0) -> int:
        """Bytes that the replicas of an item reduce as factors; ``without`` parameters are reduced elsewhere."""
        parameters = max(0, item.param_count - without)
        matrices = MATRICES.get(item.kind, 1)
        rank = min(self.replica_rank or 0, self.columns)
        # The trainer reduces a gradient uncompressed where its factors are not smaller.
        return min(item.gradient_bytes, (parameters // self.columns + matrices * self.columns) * rank * FACTOR_BYTES)

    def replica_ns(self, item: Item, without: int = 0) -> int:
        """The time in ns to compress and decompress an item's gradients; ``without`` parameters are left out."""
        rows, rank = max(0, item.param_count - without) // self.columns, min(self.replica_rank or 0, self.columns)
        made = self.compress_ns(rows, self.columns, rank)
        return made + self.decompress_ns(rows, self.columns, rank)


def no_compression(header: Header, device: Device) -> Compression:
    """The ``Compression`` of a profile's sizes that compresses nothing yet."""
    rows = header.micro_batch_size * header.model.sequence_length // header.context_parallel_size
    return Compression(rows=rows, columns=header.model.hidden_size, device=device)


def factor_bytes(compression: Compression) -> int:
    """Bytes of the factors of one gradient between stages; 0 if it is sent uncompressed."""
    rows, columns = compression.rows, compression.columns
    return (rows + columns) * min(compression.boundary_rank or 0, rows, columns) * FACTOR_BYTES


def compressed_microbatches(problem: PartitionProblem, order: Order, *, epilogue_only: bool) -> list[frozenset[int]]:
    """For each stage, the microbatches whose gradient it sends back as factors.

    The epilogue consists of those that the receiving worker executes after its last forward pass.
    """
    every = frozenset(range(problem.microbatches))
    behind: dict[int, set[int]] = {}
    for operations in order:
        last = max((at for at, one in enumerate(operations) if one.kind is Kind.FORWARD), default=-1)
        for at, one in enumerate(operations):
            if at > last and one.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                behind.setdefault(one.stage, set()).add(one.microbatch)
    result: list[frozenset[int]] = [frozenset()]
    for stage in range(1, problem.num_stages):
        # Stages on the same worker exchange tensors in its memory, so nothing is compressed between them.
        apart = problem.slot(stage).worker != problem.slot(stage - 1).worker
        chosen = frozenset(behind.get(stage - 1, ())) if epilogue_only else every
        result.append(chosen if apart else frozenset())
    return result


def compressed_costs(
    problem: PartitionProblem, boundaries: Sequence[int], costs: Sequence[StageCosts], compression: Compression
) -> tuple[StageCosts, ...]:
    """The costs of the stages with compressed gradients between them.

    Args:
        problem: chain, workers and schedule.
        boundaries: ``[stages + 1]`` item positions.
        costs: of each stage, without compression.
        compression: of the gradients between stages.

    Raises:
        UsageError: the factors are not smaller than the gradient.
    """
    rank = compression.boundary_rank
    if rank is None:
        return tuple(costs)
    rows, columns = compression.rows, compression.columns
    # The rank of a matrix is at most its smaller dimension.
    rank = min(rank, rows, columns)
    size = factor_bytes(compression)
    compressed = compressed_microbatches(problem, problem.operations, epilogue_only=compression.epilogue_only)
    result = [costs[0]]
    for stage, (begin, _) in enumerate(pairwise(boundaries)):
        if not stage:
            continue
        whole = problem.chain.items[max(0, begin - 1)].boundary_bytes
        if compressed[stage] and size >= whole:
            raise UsageError(
                f"--inter-grad-comp-rank {rank}: the factors take {size:,} bytes, the gradient between stages only"
                f" {whole:,}; use a lower rank"
            )
        result.append(
            replace(
                costs[stage],
                compressed=compressed[stage],
                compressed_send_ns=problem.transfer_ns(size),
                compress_ns=compression.compress_ns(rows, columns, rank),
                decompress_ns=compression.decompress_ns(rows, columns, rank),
            )
        )
    return tuple(result)


def predict_compressed(
    problem: PartitionProblem,
    boundaries: Sequence[int],
    compression: Compression,
    overhead_ns: int = 0,
    communication: Communication = Communication.OVERLAPPED,
) -> Timeline:
    """Simulate one step of a partition whose gradients are compressed.

    Args:
        problem: chain, workers and schedule.
        boundaries: ``[stages + 1]`` item positions.
        compression: of the gradients between stages.
        overhead_ns: time in ns added to every operation.
        communication: what transfers block.

    Raises:
        UsageError: the factors are not smaller than the gradient.
    """
    costs = compressed_costs(problem, boundaries, stage_costs(problem, boundaries), compression)
    return run(problem.operations, costs, overhead_ns, communication, shards_of_workers(problem))
