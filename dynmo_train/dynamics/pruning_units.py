"""Units of pruning, each with a score: single weights, two of four, tiles, blocks, attention heads, MLP columns.

A unit is pruned as a whole. Its score is a function of its own weights, so the worker that holds them computes it;
``pruning.py`` finds the lowest scores over all workers.

Shapes in names: O and I rows and columns of a weight, i.e. output and input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal

import torch
from torch import nn

from ..models.attention.latent_attention import LatentAttention
from ..models.attention.self_attention import SelfAttention
from ..models.layers.feed_forward import FeedForward
from ..models.layers.linear import PrunableLinear
from ..models.layers.sparse_formats import BLOCK_SIZE

Mode = Literal["unstructured", "2:4", "2:4-transposable", "block", "structured"]
Scope = Literal["global", "layer"]
TWO_OF_FOUR = ("2:4", "2:4-transposable")


@dataclass(frozen=True, kw_only=True)
class PruningRule:
    """What is pruned, and among which units the lowest scores are sought.

    Attributes:
        mode: ``unstructured`` (single weights), ``2:4`` (the two smallest of four in a row), ``2:4-transposable`` (two
            of four in each row and each column of a tile of 4 x 4), ``block`` (``block_size`` x ``block_size`` weights)
            or ``structured`` (heads, or key-value groups with their heads, and MLP columns).
        scope: over the whole model (``global``) or in each weight matrix (``layer``).
        block_size: rows and columns of a block.
    """

    mode: Mode = "unstructured"
    scope: Scope = "global"
    block_size: int = BLOCK_SIZE

    def share(self, sparsity: float) -> float:
        """The fraction of units to prune for a sparsity: a pruned group of four or tile loses half of its weights."""
        return min(1.0, 2 * sparsity) if self.mode in TWO_OF_FOUR else sparsity


SINGLE_WEIGHTS = PruningRule()


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of one weight, or of the weights of one sublayer.

    Attributes:
        layers: the layers whose weights the units consist of.
        kind: ``weights``, ``heads`` or ``columns``; scores are compared within a kind.
        scores: float32 ``[units]``, nonnegative.
        prune: from a boolean tensor ``[units]``, true where a unit is kept, to the masks of the layers.
        keeps_strongest: whether the unit of the highest score is never pruned.
    """

    layers: tuple[PrunableLinear, ...]
    kind: str
    scores: torch.Tensor
    prune: Callable[[torch.Tensor], list[tuple[PrunableLinear, torch.Tensor]]]
    keeps_strongest: bool = False


def units_of(module: nn.Module, rule: PruningRule) -> Iterator[Units]:
    """The units of an item, in module order."""
    if rule.mode == "structured":
        for part in module.modules():
            # Products of pruned layers have fewer heads; a relative bias, tied over the layers, has a column for each.
            if isinstance(part, SelfAttention) and part.relative is None:
                yield _heads(part)
            elif isinstance(part, FeedForward):
                yield _columns(part)
        return
    for part in module.modules():
        if isinstance(part, PrunableLinear):
            if rule.mode == "block":
                yield _blocks(part, rule.block_size)
            else:
                yield {"unstructured": _weights, "2:4": _fours, "2:4-transposable": _tiles}[rule.mode](part)


def single_weights(layer: PrunableLinear, own: torch.Tensor) -> Units:
    """Every weight of ``own``, the layer's weight ``[O, I]`` or the rows of it that this process holds."""
    weight = own.detach()
    return Units(
        layers=(layer,),
        kind="weights",
        scores=weight.abs().view(-1),
        prune=lambda keep: [(layer, keep.view_as(weight))],
    )


def _weights(layer: PrunableLinear) -> Units:
    return single_weights(layer, layer.weight)


def _fours(layer: PrunableLinear) -> Units:
    """Groups of four in a row, with the sum of the two smallest magnitudes as the score.

    The last ``I % 4`` weights of a row belong to no group and are never pruned.
    """
    weight = layer.weight.detach()
    outputs, inputs = weight.shape
    whole = inputs - inputs % 4
    groups = weight[:, :whole].reshape(-1, 4).abs()
    # Stable: of equal magnitudes the first is pruned, on every device.
    order = groups.argsort(dim=1, stable=True)

    def prune(keep: torch.Tensor) -> list[tuple[PrunableLinear, torch.Tensor]]:
        mask = torch.ones_like(groups, dtype=torch.bool).scatter(1, order[:, :2], keep[:, None].expand(-1, 2))
        full_mask = torch.ones_like(weight, dtype=torch.bool)
        full_mask[:, :whole] = mask.view(outputs, whole)
        return [(layer, full_mask)]

    return Units(layers=(layer,), kind="weights", scores=groups.gather(1, order[:, :2]).sum(1), prune=prune)


def transposable_masks() -> torch.Tensor:
    """The 90 masks of a 4 x 4 tile with two kept weights in each row and each column, float32 ``[90, 16]``."""
    rows = [torch.tensor([float(place in chosen) for place in range(4)]) for chosen in combinations(range(4), 2)]
    tiles = (torch.stack(each) for each in product(rows, repeat=4))
    return torch.stack([tile.view(16) for tile in tiles if bool((tile.sum(0) == 2).all())])


def _tiles(layer: PrunableLinear) -> Units:
    """Tiles of 4 x 4 weights under the transposable mask that keeps the largest sum of magnitudes.

    Exact: all 90 masks are compared (Hubara et al. 2021, arXiv:2102.08124, find them by min-cost flow). The score is
    the sum of the magnitudes that the mask prunes. Rows and columns beyond a multiple of four are never pruned.
    """
    weight = layer.weight.detach()
    rows, columns = (size - size % 4 for size in weight.shape)
    tiles = weight[:rows, :columns].reshape(rows // 4, 4, columns // 4, 4).transpose(1, 2)
    masks = transposable_masks().to(weight.device)
    # Sums of pruned magnitudes: never negative, unlike a difference of sums.
    pruned, best = (tiles.reshape(-1, 16).abs().float() @ (1.0 - masks).t()).min(dim=1)

    def prune(keep: torch.Tensor) -> list[tuple[PrunableLinear, torch.Tensor]]:
        chosen = masks[best].bool() | keep[:, None]
        full_mask = torch.ones_like(weight, dtype=torch.bool)
        full_mask[:rows, :columns] = chosen.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)
        return [(layer, full_mask)]

    return Units(layers=(layer,), kind="weights", scores=pruned, prune=prune)


def _blocks(layer: PrunableLinear, size: int) -> Units:
    """Blocks of ``size`` x ``size`` weights, scored by mean magnitude; blocks at the edges may be smaller."""
    weight = layer.weight.detach()
    outputs, inputs = weight.shape
    row = torch.arange(outputs, device=weight.device) // size
    column = torch.arange(inputs, device=weight.device) // size
    across = -(-inputs // size)
    number_OI = row[:, None] * across + column[None, :]
    count = -(-outputs // size) * across
    sums = torch.zeros(count, device=weight.device).index_add(0, number_OI.view(-1), weight.abs().view(-1))
    sizes = torch.bincount(number_OI.view(-1), minlength=count)
    return Units(layers=(layer,), kind="weights", scores=sums / sizes, prune=lambda keep: [(layer, keep[number_OI])])


def _root_mean_square(squares: torch.Tensor, count: int) -> torch.Tensor:
    return (squares / count).sqrt()


def _heads(attention: SelfAttention) -> Units:
    """Key-value groups with their query heads: rows of ``qkv`` and columns of ``dense``, scored by root mean square.

    With a latent, single heads: rows of ``query_up`` and ``kv_up``.
    """
    dense = attention.dense.weight.detach()
    if isinstance(attention, LatentAttention):
        latent, columns = attention.latent, attention.latent.v_head_dim
        first = {attention.query_up: latent.key_width, attention.kv_up: latent.qk_head_dim + columns}
    else:
        first = {attention.qkv: (attention.queries_per_group + 2) * attention.head_width}
        columns = attention.queries_per_group * attention.head_width
    squares = dense.square().sum(0).view(-1, columns).sum(1)
    for layer, rows in first.items():
        weight = layer.weight.detach()
        squares = squares + weight.square().view(-1, rows * weight.shape[1]).sum(1)

    def prune(keep: torch.Tensor) -> list[tuple[PrunableLinear, torch.Tensor]]:
        # Copies: an expanded mask has one element per row, and is not writable.
        masks = [
            (layer, keep.repeat_interleave(rows)[:, None].expand_as(layer.weight).clone())
            for layer, rows in first.items()
        ]
        return [*masks, (attention.dense, keep.repeat_interleave(columns)[None, :].expand_as(dense).clone())]

    # Means, so that heads of all layers compare. The strongest one stays: a sublayer without heads has no product.
    count = sum(rows * layer.weight.shape[1] for layer, rows in first.items()) + columns * dense.shape[0]
    layers = (*first, attention.dense)
    scores = _root_mean_square(squares, count)
    return Units(layers=layers, kind="heads", scores=scores, prune=prune, keeps_strongest=True)


def _columns(mlp: FeedForward) -> Units:
    """MLP columns: a row of the first matrix (of ``gate`` and ``up``) and a column of the last, scored together."""
    first = [mlp.gate, mlp.up] if mlp.gated else [mlp.fc1]
    last = mlp.fc2.weight.detach()
    squares = torch.stack([layer.weight.detach().square().sum(1) for layer in first]).sum(0) + last.square().sum(0)

    def prune(keep: torch.Tensor) -> list[tuple[PrunableLinear, torch.Tensor]]:
        masks = [(layer, keep[:, None].expand_as(layer.weight).clone()) for layer in first]
        return [*masks, (mlp.fc2, keep[None, :].expand_as(last).clone())]

    count = sum(layer.weight.shape[1] for layer in first) + last.shape[0]
    scores = _root_mean_square(squares, count)
    return Units(layers=(*first, mlp.fc2), kind="columns", scores=scores, prune=prune, keeps_strongest=True)
