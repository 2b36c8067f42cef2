"""The samples of one training step: what a data loader hands to the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one step, as every process reads them.

    Attributes:
        inputs: tensors by the names that the items give, each ``[microbatches * B, ...]``.
        first_microbatch: the global index of the first microbatch: consumed samples before it over the microbatch size.
        step: of the run; seeds the random numbers.
        microbatches: the number in this batch; None where all steps of the run have the same number.
        tokens: the length of a sample, where the run's samples grow; None where all have the same length.
    """

    inputs: Mapping[str, torch.Tensor]
    first_microbatch: int
    step: int
    microbatches: int | None = None
    tokens: int | None = None

    def of_replica(self, replica: int, replicas: int, microbatches: int) -> Batch:
        """The samples of one of ``replicas``: a contiguous block of the step's, ``microbatches`` of them."""
        return replace(
            self,
            inputs={name: tensor.chunk(replicas)[replica] for name, tensor in self.inputs.items()},
            first_microbatch=self.first_microbatch + replica * microbatches,
        )
