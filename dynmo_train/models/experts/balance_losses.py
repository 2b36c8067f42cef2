"""Balance losses of a router, over a microbatch, over each sequence of it, or over the whole batch of a step.

All three are ``E sum_e f_e P_e``: f is the fraction of the slots that expert e has, P the mean probability of e over
the tokens of this microbatch. f has no gradient; the losses are 1 at balance. They differ in the tokens that f counts:

    aux_loss         the microbatch (Fedus et al. 2021, arXiv:2101.03961, section 2.2)
    seq_aux_loss     one sequence; the mean over the sequences (DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20)
    global_aux_loss  the microbatches of all replicas up to this one in the step (Qiu et al. 2025, arXiv:2501.11873)

The counts of the global loss, microbatch j of each replica::

    chosen_E of replica 0 ─┐
    chosen_E of replica 1 ─┴─ all-reduce ─▶ + sum of the microbatches before j ─▶ f, and the sum for microbatch j + 1

They are integers, kept by the index of the microbatch. So the loss is a function of the step and the microbatch,
whatever the schedule and the partition are: every schedule runs the forwards of a layer in the order of the
microbatches, and an error refuses another order. A recomputed forward finds its sum, and adds nothing.

Shapes in names: N tokens of a microbatch, E experts, C experts per token, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...parallel.context_parallel import ContextRegion, StartedSum
from .moe_dispatch import ends_by_expert

AUX, SEQUENCE, GLOBAL = "load_balancing", "seq_load_balancing", "global_load_balancing"


def count_slots(expert_NC: torch.Tensor, experts: int, sequences: int = 1) -> torch.Tensor:
    """The number of slots of each expert in each of ``sequences`` equal runs of tokens, int64 ``[B, E]``.

    Args:
        expert_NC: int64 experts of the tokens, sequence after sequence.
        experts: number of experts E.
        sequences: B.
    """
    place_BS = expert_NC.reshape(sequences, -1)
    if sequences > 1:
        place_BS = place_BS + torch.arange(sequences, device=place_BS.device)[:, None] * experts
    ends = ends_by_expert(place_BS.flatten().sort().values, sequences * experts).long()
    return ends.diff(prepend=ends.new_zeros(1)).view(sequences, experts)


class StepCounts:
    """Slots of each expert of a layer in the microbatches of a step.

    Attributes:
        group: ranks that have other tokens of the same layer: replicas, context-parallel ranks counted.
        microbatch: global index of the microbatch that the layer computes; None outside of a step.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.microbatch: int | None = None
        self._next = 0
        self._sums: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}

    def begin_step(self, first_microbatch: int) -> None:
        """Forget the last step; ``first_microbatch`` is the first one of this replica."""
        self.microbatch, self._next = None, first_microbatch
        self._sums.clear()
        self._chosen.clear()

    def record(self, chosen_E: torch.Tensor) -> None:
        """Record ``chosen_E``, int64 ``[E]``, of the current microbatch; a recomputation records the same ones."""
        if self.microbatch is not None:
            self._chosen[self.microbatch] = chosen_E

    def recorded(self, experts: int, device: torch.device) -> torch.Tensor:
        """The recorded choices of this replica's microbatches, int64 ``[E]``, with E ``experts``; on ``device``."""
        zeros_E = torch.zeros(experts, dtype=torch.int64, device=device)
        return torch.stack([zeros_E, *self._chosen.values()]).sum(0)

    def start_sum(self, chosen_E: torch.Tensor) -> RunningSum:
        """Start to add ``chosen_E``, int64 ``[E]``, of this microbatch to those of the microbatches before it.

        Raises:
            RuntimeError: a schedule runs the microbatches of a layer in another order, an error of the engine.
        """
        if self.microbatch is None or self.microbatch in self._sums:
            return RunningSum(self, self.microbatch, StartedSum(chosen_E, None))
        if self.microbatch != self._next:
            raise RuntimeError(f"microbatch {self.microbatch} is computed before microbatch {self._next}")
        self._next += 1
        return RunningSum(self, self.microbatch, StartedSum(chosen_E.clone(), self.group))

    def add(self, microbatch: int, chosen_E: torch.Tensor) -> torch.Tensor:
        """Return the sum up to ``microbatch``, whose choices of all replicas are ``chosen_E``, int64 ``[E]``."""
        if microbatch not in self._sums:
            before_E = self._sums.get(microbatch - 1)
            self._sums[microbatch] = chosen_E if before_E is None else before_E + chosen_E
        return self._sums[microbatch]


@dataclass(frozen=True)
class RunningSum:
    """A sum of a layer's choices that is on its way."""

    counts: StepCounts
    microbatch: int | None
    started: StartedSum

    def wait(self) -> torch.Tensor:
        """Return the sum over all microbatches up to this one, int64 ``[E]``; the device alone waits for it."""
        chosen_E = self.started.wait()
        return chosen_E if self.microbatch is None else self.counts.add(self.microbatch, chosen_E)


@dataclass(frozen=True)
class StartedLosses:
    """Balance losses whose counts are on their way.

    Attributes:
        counts: loss -> slots of each expert, int64 ``[E]`` or ``[B, E]``, and their number in a row; None: their sum.
        means: loss -> mean probability of each expert, of the same shape.
    """

    counts: Mapping[str, tuple[StartedSum | RunningSum, int | None]]
    means: Mapping[str, torch.Tensor]

    def finish(self) -> dict[str, torch.Tensor]:
        """Loss -> its value without a coefficient, a float32 scalar."""
        losses = {}
        for name, (started, slots) in self.counts.items():
            counts_BE, means_BE = started.wait(), self.means[name]
            shares_BE = counts_BE.float() / (counts_BE.sum(-1, keepdim=True) if slots is None else slots)
            by_sequence = means_BE.shape[-1] * (shares_BE * means_BE).sum(-1)
            losses[name] = by_sequence if by_sequence.dim() == 0 else by_sequence.mean()
        return losses


def start_losses(
    probabilities_NE: torch.Tensor,
    expert_NC: torch.Tensor,
    chosen_E: torch.Tensor,
    names: frozenset[str],
    *,
    sequences: int,
    context: ContextRegion | None,
    counts: StepCounts | None,
) -> StartedLosses:
    """Start to compute balance losses.

    Args:
        probabilities_NE: float32 distribution over the experts of each token, ``[N, E]``, with gradient.
        expert_NC: int64 experts ``[N, C]`` of the highest scores of each token, without biases and groups, as
            Megatron-LM and DeepSeek-V3 count them.
        chosen_E: int64 number of slots of each expert in ``expert_NC``, ``[E]``.
        names: losses to compute.
        sequences: number of sequences B of equal length in the microbatch.
        context: ranks that share the tokens of a sample: the fractions are those of all their tokens. The mean of the
            ranks' losses is then that of one process.
        counts: counts of the step, for the global loss; None counts this microbatch alone.
    """
    parts, slots = 1 if context is None else context.size, expert_NC.numel()
    started: dict[str, tuple[StartedSum | RunningSum, int | None]] = {}
    means: dict[str, torch.Tensor] = {}

    def shared(chosen: torch.Tensor) -> StartedSum:
        return StartedSum(chosen, None) if context is None else context.start_sum(chosen)

    if AUX in names:
        started[AUX] = shared(chosen_E), slots * parts
        means[AUX] = probabilities_NE.mean(0)
    if SEQUENCE in names:
        experts = probabilities_NE.shape[1]
        started[SEQUENCE] = shared(count_slots(expert_NC, experts, sequences)), slots // sequences * parts
        means[SEQUENCE] = probabilities_NE.unflatten(0, (sequences, -1)).mean(1)
    if GLOBAL in names:
        # Replicas may have different numbers of tokens, so the slots are counted.
        started[GLOBAL] = (StartedSum(chosen_E, None) if counts is None else counts.start_sum(chosen_E)), None
        means[GLOBAL] = means[AUX] if AUX in means else probabilities_NE.mean(0)
    return StartedLosses(started, means)
