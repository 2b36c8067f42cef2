"""The batch of one step, which data loading passes to the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..parallel.context_parallel import cut_chunks
from ..parallel.process_groups import World, sum_over_replicas

LOSS_MASK = "loss_mask"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one step, of all data-parallel replicas or of one.

    Attributes:
        inputs: tensors by the names in ``ItemSpec.inputs``, each ``[replicas * microbatches * B, ...]`` on CPU, or
            ``[microbatches * B, ...]`` of one replica; token ids and labels are int64, attention masks are bool.
        first_microbatch: index of the first microbatch, counted over the run: samples before it / micro-batch size.
        step: step of the run; it seeds random numbers.
        microbatches: microbatches per replica; None where all steps of the run have the same number.
        tokens: tokens per sample, where sequence-length warm-up changes them; None where all samples are equally long.
        replica: number of the replica whose samples these are; None for those of all replicas.
        context: context-parallel rank whose tokens these are; None for all tokens.
        problem: why these samples cannot be used; only this replica knows, and all ranks end together after the step.
        position: where a stream of documents continues after these samples, for a checkpoint; None for indexed data.
    """

    inputs: Mapping[str, torch.Tensor]
    first_microbatch: int
    step: int
    microbatches: int | None = None
    tokens: int | None = None
    replica: int | None = None
    context: int | None = None
    problem: str | None = None
    position: Mapping[str, Any] | None = None

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which a GPU copies asynchronously."""
        return replace(self, inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()})

    def of_replica(self, replica: int, replicas: int, microbatches: int) -> Batch:
        """The contiguous shard of one replica; a batch that is one already is returned as it is.

        Args:
            replica: data-parallel rank.
            replicas: number of data-parallel ranks; divides the number of samples.
            microbatches: microbatches of a replica.
        """
        if self.replica is not None:
            return self
        return replace(
            self,
            inputs={name: tensor.chunk(replicas)[replica] for name, tensor in self.inputs.items()},
            first_microbatch=self.first_microbatch + replica * microbatches,
            replica=replica,
        )

    def of_context(self, rank: int, size: int, microbatches: int) -> Batch:
        """The tokens of one context-parallel rank; all inputs are ``[samples, T]``.

        ``loss_mask`` becomes the weights of the tokens in the mean of their microbatch, times the number of ranks:
        only the whole samples have the number of tokens that count.

        Args:
            rank: context-parallel rank.
            size: number of context-parallel ranks; 1 changes nothing.
            microbatches: microbatches of these samples, which are one replica's.
        """
        if size == 1 or self.context is not None:
            return self
        inputs = dict(self.inputs)
        if LOSS_MASK in inputs:
            inputs[LOSS_MASK] = size * _token_weights(inputs[LOSS_MASK], microbatches)
        inputs = {name: cut_chunks(each, 1, rank, size) for name, each in inputs.items()}
        return replace(self, inputs=inputs, context=rank)

    def of_process(self, world: World, microbatches: int) -> Batch:
        """The part of one process: its replica's samples, and its context-parallel rank's tokens.

        Args:
            world: processes of the run.
            microbatches: microbatches of a replica.
        """
        local = self.of_replica(world.replica, world.dims.replicas, microbatches)
        return local.of_context(world.context_rank, world.dims.context, microbatches)

    def weighed_over_step(self, world: World, microbatches: int) -> Batch:
        """``loss_mask`` as weights by which the loss is the mean over all tokens that count in the step.

        The pipeline adds the losses of all microbatches of all processes, over their number: so each token has that
        number over the number of tokens. Equal on all processes; a collective over the replicas.

        Args:
            world: processes of the run.
            microbatches: microbatches of a process, whose part this batch is.
        """
        if LOSS_MASK not in self.inputs:
            return self
        # Of a context-parallel rank these are weights in a microbatch already: those that count are above 0.
        counts_NT = self.inputs[LOSS_MASK] > 0
        (count,) = sum_over_replicas(world, counts_NT.sum().to(torch.float64)[None]).tolist()
        weights_NT = counts_NT.float() * (microbatches * world.dims.data / max(count, 1.0))
        return replace(self, inputs={**self.inputs, LOSS_MASK: weights_NT})


def _token_weights(mask_NT: torch.Tensor, microbatches: int) -> torch.Tensor:
    """Weights of tokens in the mean of their microbatch, float32 ``[N, T]``; 0 where no token of it counts."""
    mask_MR = mask_NT.reshape(microbatches, -1).float()
    return (mask_MR / mask_MR.sum(1, keepdim=True).clamp(min=1.0)).view_as(mask_NT)
