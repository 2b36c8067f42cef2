"""The update of the experts' biases after a step: balance without an auxiliary loss.

Wang et al. 2024 (arXiv:2408.15664), algorithm 1: ``b_e += u sign(mean(n) - n_e)``, with n the choices of a whole step.

    microbatches of this replica      StepCounts.recorded      int64 [E] per layer
    all replicas                      all-reduce               exact: integers
    ItemStore.step                    bias_E += ...            on the device; nothing where the step is skipped

A bias is not a parameter: it has no gradient, takes no part in the gradient norm, and no optimizer updates it. That of
a router without gradients, as below adapters, never changes: adapters are stored without the biases of their base.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ..models.experts.moe import MoeMlp
from ..parallel.process_groups import sum_over


@torch.no_grad()
def update_expert_biases(
    items: Iterable[nn.Module], group: dist.ProcessGroup | None, skip: torch.Tensor | None
) -> None:
    """Update the biases of the local layers by the choices of the step; a collective over the replicas.

    Args:
        items: local items, in the same order on all replicas.
        group: ranks that have other tokens of the step; None with one.
        skip: float32 scalar on the device, 1 where the optimizer skips the step, else 0; None skips none.
    """
    layers = [part for item in items for part in item.modules() if isinstance(part, MoeMlp)]
    trained = [layer for layer in layers if layer.router.weight.requires_grad]
    biased = [(layer, bias_E) for layer in trained if (bias_E := layer.expert_bias) is not None]
    if not biased:
        return
    # Of all layers at once: one collective in a step.
    counts_LE = torch.stack([layer.counts.recorded(len(bias_E), bias_E.device) for layer, bias_E in biased])
    counts_LE = sum_over(group, counts_LE)
    # In integers: a mean of float32 would round, and a load at the mean must not change its bias.
    signs_LE = (counts_LE.sum(1, keepdim=True) - counts_LE.shape[1] * counts_LE).sign()
    for (layer, bias_E), signs_E in zip(biased, signs_LE, strict=True):
        change_E = signs_E * layer.moe.router.bias_update_rate
        bias_E.add_(change_E if skip is None else change_E * (1 - skip))
