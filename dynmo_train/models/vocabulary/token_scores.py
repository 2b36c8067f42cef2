"""A causal model whose head returns the log-likelihood of each sample instead of one mean loss.

Shapes in names: B samples, T tokens, N tokens that count, P tokens of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from ...parallel.tensor_parallel import TensorRegion
from ..layer_list import ItemOutput, ItemSpec, ModelFamily
from ..layers.softcap import soft_cap_
from .head import Head

LOSSES, HITS = "losses", "hits"
# Tokens whose logits are in memory at a time.
CHUNK_TOKENS = 128


class ScoringHead(Head):
    """A model's head that returns, per sample, the sum of its tokens' losses and the number of correct predictions."""

    def __init__(self, head: Head) -> None:
        # Not ``Head.__init__``, which would allocate a second weight of the whole vocabulary.
        nn.Module.__init__(self)
        self.norm, self.weight, self.bias = head.norm, head.weight, head.bias
        self.vocabulary, self.scale, self.region = head.vocabulary, head.scale, head.region
        self.softcap = head.softcap

    def forward(  # type: ignore[override] # returns more than a loss
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor, counts_BT: torch.Tensor
    ) -> ItemOutput:
        """Score each sample over the tokens whose count is 1.

        A token is a hit where its logit is the greatest, of equal ones the first.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            labels_BT: int64 ids of the next tokens, ``[B, T]``.
            counts_BT: ``[B, T]``, 1 where a token counts, else 0.

        Returns:
            The sum of all losses, a float32 scalar; metrics ``losses`` (nats) and ``hits``, float64 ``[B]``.
        """
        counted_N = counts_BT.reshape(-1).nonzero()[:, 0]
        x_ND = x_BTD.flatten(0, 1).index_select(0, counted_N)
        labels_N = labels_BT.reshape(-1).index_select(0, counted_N)
        weight_VD, bias_V, first = self.local_rows()
        # One buffer for the logits of all chunks: allocation costs more than the product of a small model.
        buffer_PV = x_ND.new_empty(min(CHUNK_TOKENS, len(x_ND)), len(weight_VD))
        scored = []
        for x_PD, labels_P in zip(x_ND.split(CHUNK_TOKENS), labels_N.split(CHUNK_TOKENS), strict=True):
            logits_PV = buffer_PV[: len(x_PD)]
            torch.mm(self.features(x_PD), weight_VD.t(), out=logits_PV)
            if bias_V is not None:
                logits_PV += bias_V
            scored.append(_scores(soft_cap_(logits_PV.float(), self.softcap), labels_P, first, self.region))
        samples_N = counted_N // labels_BT.shape[1]
        metrics = {}
        for name, parts in zip((LOSSES, HITS), zip(*scored, strict=True), strict=True):
            sums_B = torch.zeros(len(labels_BT), dtype=torch.float64, device=x_BTD.device)
            metrics[name] = sums_B.index_add(0, samples_N, torch.cat(parts).double())
        return ItemOutput(metrics[LOSSES].sum().float(), metrics=metrics)


def _scores(
    logits_PV: torch.Tensor, labels_P: torch.Tensor, first: int, region: TensorRegion | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and hit of each token, ``[P]``; the logits are overwritten.

    Args:
        logits_PV: of this rank's real rows of the vocabulary.
        first: id of the first of them.
        region: the ranks that have the others; None where this one has all.
    """
    real = logits_PV.shape[1]
    local_P = labels_P - first
    here_P = (local_P >= 0) & (local_P < real)
    # The lowest value: a rank that has only padding takes part in the reductions below, and never wins them.
    nothing_P = logits_PV.new_full(labels_P.shape, torch.finfo(torch.float32).min)
    own_P = logits_PV.amax(1) if real else nothing_P.clone()
    best_P = own_P if region is None else region.all_reduce(own_P.clone(), dist.ReduceOp.MAX)
    picked_P = logits_PV.gather(1, local_P.masked_fill(~here_P, 0)[:, None])[:, 0] if real else nothing_P
    picked_P = picked_P.masked_fill(~here_P, torch.finfo(torch.float32).min)
    # The first of the greatest; only rows whose label is among them need the search.
    hits_P = picked_P == best_P
    for row in hits_P.nonzero()[:, 0].tolist() if real else []:
        hits_P[row] = int(logits_PV[row].argmax()) == int(local_P[row])
    sums_P = logits_PV.sub_(best_P[:, None]).exp_().sum(1)
    if region is None:
        return sums_P.log() + best_P - picked_P, hits_P
    # Of equal logits on several ranks the first rank's counts.
    ranks_P = torch.where(own_P == best_P, region.rank, region.size)
    hits_P &= region.all_reduce(ranks_P, dist.ReduceOp.MIN) == region.rank
    region.all_reduce(sums_P)
    region.all_reduce(picked_P, dist.ReduceOp.MAX)
    return sums_P.log() + best_P - picked_P, region.all_reduce(hits_P.long(), dist.ReduceOp.MAX) > 0


class ScoringFamily:
    """A causal family with a ``ScoringHead``; satisfies ``layer_list.ModelFamily``. Names are unchanged."""

    def __init__(self, base: ModelFamily) -> None:
        self.base = base

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """Those of the base; the head reads which tokens count as well."""
        *before, head = self.base.items
        return (*before, replace(head, inputs=("labels", "loss_mask")))

    @property
    def ties(self) -> Mapping[str, str]:
        """Those of the base."""
        return self.base.ties

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item."""
        module = self.base.build(name, device)
        return ScoringHead(module) if name == self.items[-1].name and isinstance(module, Head) else module

    def split_dim(self, parameter: str) -> int | None:
        """That of the base."""
        return self.base.split_dim(parameter)

    def manifest(self) -> dict[str, object]:
        """That of the base."""
        return self.base.manifest()
