"""The sums of a step over all processes: gradient norm, loss and metrics of items, in one vector on the device.

    rank's vector   [squares of each item | loss | metrics]       float64, zeros for what is not local
          |  gather over tensor-parallel ranks, add in rank order
          |  gather over replicas, add in rank order
          |  all-reduce over pipeline ranks                       all but one add zero to each element
          v
    whole vector    the same bits on every rank and for every partition

Each element has one place and one order of addition, whichever rank has the item. The collectives run on the device:
the host does not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..models.compiled import num_compiled_graphs
from ..models.layer_list import ItemSpec
from ..parallel.process_groups import World, gather_over, sum_over_pipeline


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What the host reads of a step.

    Attributes:
        loss: Mean loss over the tokens of the step.
        norm: Global L2 norm of the gradients before clipping; 0 without gradients.
        metrics: Item -> metric -> values, means over microbatches and replicas, in list order.
        compiled_graphs: Graphs that the pipeline ranks of a replica have compiled since the engine was built.
    """

    loss: float
    norm: float = 0.0
    metrics: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)
    compiled_graphs: int = 0


class StepSums:
    """Adds up the vectors of all ranks.

    Args:
        items: The layer list.
        world: Processes of the run.
        sharded: Whether replicas have different parts of each gradient (ZeRO).
        num_squares: Number of squares: of items, shards of the output layer, and sharded experts.
    """

    def __init__(self, items: Sequence[ItemSpec], world: World, *, sharded: bool, num_squares: int) -> None:
        self._num_squares = num_squares
        self._declared = [(item.name, name, length) for item in items for name, length in item.metrics]
        self._sharded = sharded
        self._graphs_before = num_compiled_graphs()
        self.world = world

    def add(
        self,
        loss: torch.Tensor,
        metrics: Mapping[str, Mapping[str, torch.Tensor]],
        squares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the whole vector; a collective, which does not wait for the device.

        Args:
            loss: This replica's part of the loss, a float64 scalar on the device; zero but on the last pipeline rank.
            metrics: Local item -> metric -> float64 values ``[n]``, means over the microbatches.
            squares: Squares of the gradients by ``ItemSquares``, float64 ``[squares]``; None in an evaluation.

        Returns:
            Float64 ``[1 + 1 + metrics]`` on the device: global norm, loss, metrics, and the number of compiled graphs.
        """
        device = loss.device
        # Without ZeRO the replicas have the same gradients: the first group that shares experts counts.
        counts = self._sharded or self.world.data_rank < self.world.dims.expert
        if squares is None or not counts:
            squares = torch.zeros(self._num_squares, dtype=torch.float64, device=device)
        values = [loss.reshape(1)]
        for item, name, length in self._declared:
            here = metrics.get(item, {}).get(name)
            values.append(torch.zeros(length, dtype=torch.float64, device=device) if here is None else here)
        values.append(loss.new_full((1,), num_compiled_graphs() - self._graphs_before))
        reported = torch.cat([value.reshape(-1) for value in values])
        # Tensor-parallel ranks have computed the same loss and metrics.
        if self.world.tensor_rank:
            reported = torch.zeros_like(reported)
        vector = torch.cat([squares, reported])
        # An all-reduce may add in an order that depends on the group; the sum of a gathered stack does not.
        for group in (self.world.groups.tensor, self.world.groups.data):
            if group is not None:
                vector = torch.stack(gather_over(group, vector)).sum(0)
        vector = sum_over_pipeline(self.world, vector)
        norm, reported = vector[: self._num_squares].sum().sqrt(), vector[self._num_squares :]
        # The parts of the loss add up to the mean; a metric is the mean of the replicas' values.
        means = reported[1:] / self.world.dims.data
        return torch.cat([norm.reshape(1), reported[:1], means])

    def read(self, values: Sequence[float]) -> Sums:
        """Return the parts of a vector of :meth:`add`, read to the host."""
        metrics: dict[str, dict[str, list[float]]] = {}
        begin = 2
        for item, name, length in self._declared:
            metrics.setdefault(item, {})[name] = list(values[begin : begin + length])
            begin += length
        return Sums(norm=values[0], loss=values[1], metrics=metrics, compiled_graphs=round(values[begin]))
