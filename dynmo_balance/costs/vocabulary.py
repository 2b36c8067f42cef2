"""Costs of a vocabulary that is split into shards on all workers (``--vocabulary-parallel`` of ``dynmo-train``).

Yeung et al., MLSys 2025 (arXiv 2411.05288), algorithm 2. Each worker has an even part of the shards, wherever the
layers are. Two passes per microbatch join forward and backward: S computes logits and the shards' parts of loss and
gradient, two products of the layer's size; T computes the gradient of the shards' rows, one product. Lookups in the
word table's rows are measured with S, the gradients of these rows with T: they move a row per token and run ahead of
the first stage, which waits for those of the first microbatch only::

    header.x_vocabulary  --> number and sizes of the shards ---------+
    step.x_vocabulary    --> ShardTimes (ItemCosts.vocabulary) ------+--> ShardCosts (Chain.vocabulary)
    device               --> analytic_times -------------------------+
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from .._common.document import short_repr
from .._common.errors import UsageError
from ..formats.profile import Header, Item, Step

SIZES = ("shards", "param_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
# Not in profiles of earlier versions, whose word table is in the first stage.
LATER_SIZES = ("lookup_bytes",)


@dataclass(frozen=True, kw_only=True)
class ShardTimes:
    """Times of all shards together in one microbatch, in ns, on a worker of normal speed.

    Attributes:
        forward_ns: of S.
        weight_ns: of T.
    """

    forward_ns: int
    weight_ns: int


@dataclass(frozen=True, kw_only=True)
class ShardCosts:
    """Costs of all shards together.

    Attributes:
        count: number of shards.
        forward_ns, weight_ns: times of S and T in one microbatch on a worker of normal speed.
        static_bytes: parameters, gradients and optimizer state.
        gradient_bytes: gradients alone, which replicas reduce.
        activation_bytes: what a microbatch stores from S to T.
        stream_bytes: the normalized stream of a microbatch, which the last stage sends to all workers.
        part_bytes: what each worker sends back for it.
        sums_bytes: what the last stage then sends to all workers.
        lookup_bytes: rows of the word table for a microbatch, which all workers send to the first stage, and whose
            gradient it sends back; 0 where the first stage has the table.
    """

    count: int
    forward_ns: int
    weight_ns: int
    static_bytes: int
    gradient_bytes: int
    activation_bytes: int
    stream_bytes: int
    part_bytes: int
    sums_bytes: int
    lookup_bytes: int = 0

    def share(self, total: int, worker: int, workers: int) -> int:
        """The part of a worker in a sum over all shards: shard ``k`` of ``n`` is on worker ``k * workers // n``.

        Args:
            total: of all shards.
            worker: index of the worker.
            workers: number of workers.
        """
        return total * self.count_on(worker, workers) // self.count

    def count_on(self, worker: int, workers: int) -> int:
        """The number of shards of the worker of index ``worker``, of ``workers``."""
        return sum(shard * workers // self.count == worker for shard in range(self.count))


def _sizes(header: Header) -> Mapping[str, int] | None:
    """The checked ``x_vocabulary`` of a header; None without shards.

    Raises:
        UsageError: a size is missing or not an integer of at least 0, or there is no shard.
    """
    stated = header.x_vocabulary
    if stated is None:
        return None
    values = {name: stated.get(name) for name in SIZES} | {name: stated.get(name, 0) for name in LATER_SIZES}
    if (
        any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in values.values())
        or not (values["shards"])
    ):
        raise UsageError(
            f"the header's x_vocabulary must have {', '.join(SIZES)}, integers of at least 0 and at least one shard; is"
            f" {short_repr(dict(stated))}"
        )
    return {name: value for name, value in values.items() if value is not None}


def measured_times(steps: Sequence[Step]) -> ShardTimes | None:
    """The median over records of the times of all shards; None where no record has any.

    A record counts with its median shard, so that shards on slow workers do not make the others look slow.

    Args:
        steps: records of a window.
    """
    found = []
    for step in steps:
        stated = step.x_vocabulary or {}
        columns = [_samples(stated.get(name)) for name in ("forward_ns", "backward_ns")]
        if all(columns):
            found.append([median_low(column) * len(column) for column in columns])
    if not found:
        return None
    forward, weight = (median_low(sorted(column)) for column in zip(*found, strict=True))
    return ShardTimes(forward_ns=forward, weight_ns=weight)


def _samples(values: Any) -> list[int]:
    """The sampled times of a list; empty for anything else."""
    if not isinstance(values, (list, tuple)):
        return []
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0]


def shard_costs(header: Header, times: ShardTimes | None) -> ShardCosts | None:
    """The costs of the shards of a profile's run; None where its output layer is whole.

    Args:
        header: of the profile.
        times: measured or computed; None counts as 0.

    Raises:
        UsageError: the header's ``x_vocabulary`` is invalid.
    """
    sizes = _sizes(header)
    if sizes is None:
        return None
    tokens = header.micro_batch_size * header.model.sequence_length // header.context_parallel_size
    stream = header.items[-1].boundary_bytes if len(header.items) == 1 else header.items[-2].boundary_bytes
    return ShardCosts(
        count=sizes["shards"],
        forward_ns=0 if times is None else times.forward_ns,
        weight_ns=0 if times is None else times.weight_ns,
        static_bytes=sizes["param_bytes"] + sizes["gradient_bytes"] + sizes["optimizer_bytes"],
        gradient_bytes=sizes["gradient_bytes"],
        activation_bytes=sizes["activation_bytes"],
        stream_bytes=stream,
        # Statistics and weighted rows in float32, the label's rows in the compute dtype.
        part_bytes=stream + tokens * (header.model.hidden_size + 3) * 4,
        sums_bytes=tokens * 4,
        lookup_bytes=sizes["lookup_bytes"],
    )


def in_shards(header: Header, work_ns: Sequence[int], count: int) -> tuple[tuple[Item, ...], ShardCosts] | None:
    """What a whole output layer would cost in ``count`` shards: the items without it, and the shards.

    Its three products have the same size (``analytic``): two are S, one is T. Norm and positions, which stay in the
    first and the last stage, are counted as if they moved too; they are small next to a vocabulary.

    Args:
        header: of the profile.
        work_ns: forward plus backward time of each item.
        count: number of shards.

    Returns:
        None where the vocabulary is in shards already, or the profile has no embedding or no output layer.
    """
    word, head = header.items[0], header.items[-1]
    if header.x_vocabulary is not None or (word.kind, head.kind) != ("embedding", "head") or not work_ns[-1]:
        return None
    tokens = header.micro_batch_size * header.model.sequence_length // header.context_parallel_size
    stream = header.items[-2].boundary_bytes
    shards = ShardCosts(
        count=count,
        forward_ns=work_ns[-1] - work_ns[-1] // 3,
        weight_ns=work_ns[-1] // 3,
        static_bytes=sum(each.param_bytes + each.gradient_bytes + each.optimizer_bytes for each in (word, head)),
        gradient_bytes=word.gradient_bytes + head.gradient_bytes,
        # Logits, and for each shard its part of every token in the type of the stream and in float32.
        activation_bytes=count * (stream + tokens * (header.model.hidden_size + 3) * 4),
        stream_bytes=stream,
        part_bytes=stream + tokens * (header.model.hidden_size + 3) * 4,
        sums_bytes=tokens * 4,
        lookup_bytes=stream,
    )
    first, last = (
        replace(each, param_count=0, param_bytes=0, gradient_bytes=0, optimizer_bytes=0) for each in (word, head)
    )
    return (first, *header.items[1:-1], last), shards
