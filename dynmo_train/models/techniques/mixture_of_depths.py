"""Mixture of depths: a router sends a fixed fraction of the tokens through a block; the others skip it at no cost.

Raposo et al. 2024, arXiv:2404.02258. Training selects the tokens of the highest router scores of each sample (section
3.3, expert-choice routing). That is not causal, so the scores are also trained to predict the selection (section 3.5, a
binary cross-entropy), and evaluation and generation select the tokens of positive score.

    x_BTD ─▶ router ─▶ scores_BT ─▶ select C tokens ─▶ attention, MLP on x_BCD ─▶ scatter back
        └──────────────────────── the other tokens ────────────────────────────────▶ x_BTD

Shapes in names: B samples, T tokens, C tokens that go through the block, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..experts.moe import MoeMlp
from ..layer_list import ItemOutput, output_of
from .token_select import TokenSelection, select_tokens, select_top, whole_tiles

METRICS = (("depth_share", 1), ("depth_agreement", 1))


@dataclass(frozen=True, kw_only=True)
class DepthSettings:
    """Which blocks are routed, and how many tokens they process.

    Attributes:
        capacity: fraction of a sample's tokens that go through a routed block, above 0 and at most 1.
        every: one of this many blocks is routed: with 2 the blocks 1, 3, 5, ...
        aux_weight: weight of the loss that trains the router to predict the selection causally.
    """

    capacity: float
    every: int
    aux_weight: float

    def routed(self, layer: int) -> bool:
        """Whether block ``layer`` (from 0) is routed."""
        return layer % self.every == self.every - 1

    def tokens(self, count: int) -> int:
        """The number of ``count`` tokens that go through a routed block in training."""
        return max(1, math.ceil(self.capacity * count))


class RoutedBlock(nn.Module):
    """A block behind a router: ``x + sigmoid(score) (block(x) - x)`` for the selected tokens, ``x`` for the others.

    Selected tokens attend to selected tokens only.

    Args:
        attention: the block's first sublayer; the router becomes its child, so that parameters keep their names.
        mlp: the second sublayer.
        settings: capacity and loss weight.
        width: model width D.
        device: where the router is created.
    """

    padded_devices = ("cuda",)

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, settings: DepthSettings, width: int, device: torch.device
    ) -> None:
        super().__init__()
        self.attention, self.mlp, self.settings = attention, mlp, settings
        attention.add_module("router", nn.Linear(width, 1, bias=False, device=device))

    def _scores(self, x_BTD: torch.Tensor) -> torch.Tensor:
        router = self.attention.get_submodule("router")
        scores_BT1: torch.Tensor = router(x_BTD)
        return scores_BT1[..., 0].float()

    def _through(self, selected: TokenSelection, x_BTD: torch.Tensor, scores_BT: torch.Tensor, y: Any) -> torch.Tensor:
        """The stream with the block's update of the selected tokens, weighted by their scores."""
        # The weight is what trains the router on the model's loss: the selection itself has no gradient.
        x_BCD = selected.take(x_BTD)
        weight_BC1 = selected.take(scores_BT).sigmoid()[..., None].to(x_BTD.dtype)
        return selected.put(x_BTD, x_BCD + weight_BC1 * (y - x_BCD))

    def _entries(self, count: int, scores_BT: torch.Tensor, *, masked: bool) -> int:
        """The entries of a sample for ``count`` selected tokens: whole tiles on CUDA, where padding changes nothing."""
        # Without a mask, only causal attention leaves the entries at the end out; experts would count them.
        is_hidden = masked or bool(getattr(self.attention, "causal", False))
        if scores_BT.device.type not in self.padded_devices or not is_hidden or isinstance(self.mlp, MoeMlp):
            return count
        return whole_tiles(len(scores_BT), count, scores_BT.shape[1])

    def _choose(self, scores_BT: torch.Tensor, real_BT: torch.Tensor, *, masked: bool) -> TokenSelection:
        """The tokens that go through: the highest scores in training, the positive scores in evaluation."""
        if not self.training:
            return select_tokens((scores_BT > 0) & real_BT)
        # A fixed number, so that the cost of a block does not depend on the scores.
        capacity = self.settings.tokens(scores_BT.shape[1])
        entries = self._entries(capacity, scores_BT, masked=masked)
        selected = select_top(scores_BT.masked_fill(~real_BT, -math.inf), capacity, entries)
        return replace(selected, real_BC=selected.real_BC & selected.take(real_BT))

    def forward(
        self,
        x_BTD: torch.Tensor,
        key_mask_BT: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
    ) -> ItemOutput:
        """Apply the block.

        Args:
            x_BTD: the residual stream ``[B, T, D]``; the active tokens only, where others have exited before.
            key_mask_BT: bool ``[B, T]``, true for tokens that may be attended to; None means all.
            positions: int64 ``[B, T]``, positions of these tokens in their samples; None means 0, 1, 2, ...
            real: bool ``[B, T]``, false for padding entries; None means that there are none.

        Returns:
            The stream ``[B, T, D]``; the weighted loss ``router``; the metrics ``METRICS`` and those of the MLP.
        """
        scores_BT = self._scores(x_BTD)
        real_BT = torch.ones_like(scores_BT, dtype=torch.bool) if real is None else real
        keep_BT = (scores_BT.detach() > 0) & real_BT
        selected = self._choose(scores_BT.detach(), real_BT, masked=key_mask_BT is not None)
        x_BCD = selected.take(x_BTD)
        key_mask_BC = None if key_mask_BT is None else selected.take(key_mask_BT).bool() & selected.real_BC
        places_BC = selected.index_BC if positions is None else selected.take(positions)
        inner = self.attention(x_BCD, key_mask_BC, positions=places_BC)
        # Without exits every entry is real in training; expert biases must not count the others.
        counted = {"real": selected.real_BC} if real is not None and isinstance(self.mlp, MoeMlp) else {}
        result = self.mlp(output_of(inner), **counted)
        output = self._through(selected, x_BTD, scores_BT, output_of(result))
        among_BT = torch.zeros_like(keep_BT).scatter(1, selected.index_BC, selected.real_BC)
        count = real_BT.sum().clamp(min=1)
        agreed_BT = (among_BT == keep_BT) & real_BT
        metrics = {"depth_share": among_BT.sum() / count, "depth_agreement": agreed_BT.sum() / count}
        losses: dict[str, torch.Tensor] = {}
        if self.training and torch.is_grad_enabled():
            # On the detached stream: this loss trains the router alone, not the model.
            router_BT = self._scores(x_BTD.detach())
            weight = None if real is None else real_BT.to(router_BT.dtype) * (real_BT.numel() / count)
            aux = F.binary_cross_entropy_with_logits(router_BT, among_BT.to(router_BT.dtype), weight)
            losses = {"router": self.settings.aux_weight * aux}
        if isinstance(result, ItemOutput):
            metrics, losses = {**result.metrics, **metrics}, {**result.losses, **losses}
        return ItemOutput(output, metrics=metrics, losses=losses)

    def extend(
        self, x_BTD: torch.Tensor, past: Sequence[Any] | None, positions_BT: torch.Tensor
    ) -> tuple[torch.Tensor, list[Any]]:
        """Process new tokens in generation: those of positive score go through the block.

        Args:
            x_BTD: the residual stream of the new tokens, ``[B, T, D]``.
            past: what this returned for the tokens before, one cache per sample; None where there are none.
            positions_BT: int64 ``[B, T]``, positions of the new tokens.

        Returns:
            The stream ``[B, T, D]``, and the caches of all tokens.
        """
        # By sample: each selects another number of tokens, so the lengths of the caches differ.
        rows, caches = [], []
        for sample, x_1TD in enumerate(x_BTD.split(1)):
            before = None if past is None else past[sample]
            scores_1T = self._scores(x_1TD)
            keep_1T = scores_1T > 0
            if bool(keep_1T.any()):
                selected = select_tokens(keep_1T)
                places = selected.take(positions_BT[sample : sample + 1])
                inner, before = self.attention.extend(selected.take(x_1TD), before, places)  # type: ignore[operator]
                x_1TD = self._through(selected, x_1TD, scores_1T, output_of(self.mlp(inner)))
            rows.append(x_1TD)
            caches.append(before)
        return torch.cat(rows), caches
