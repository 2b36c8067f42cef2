"""Multi-token prediction where word table and output layer are shards: a depth without its copies of the tables.

The shards look up the rows of the later tokens, and compute the losses of all depths together with that of the model:
the features of the depths travel to the head, which joins them to one stream of more samples::

    items    mtp.0                        mtp.1                          head
    reads    hidden, ahead.0              prediction.0, ahead.1          hidden, prediction.0, prediction.1
    writes   prediction.0 (features)      prediction.1                   features: [3 B, T, D], the model's first

So each shard multiplies its rows once by the tokens of all predictions, and has each row once.

Shapes in names: B samples, T tokens, N = B*T, D model width, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...parallel.context_parallel import ContextRegion
from ..layer_list import HIDDEN, BoundaryShape, ItemOutput, ItemSpec, output_of
from ..vocabulary.cross_entropy import token_weights
from ..vocabulary.vocabulary_shards import WORDS, FinalNorm, SummedEmbedding
from .multi_token import LOSS_METRIC, PREDICTION, PREFIX, PredictionLayer, ahead, is_prediction, tokens_ahead

AHEAD = "ahead"
# The value that the head writes: the normalized streams of the model and of the depths, ``[(1 + K) B, T, D]``.
FEATURES = "features"


def sharded_items(items: Sequence[ItemSpec]) -> tuple[ItemSpec, ...]:
    """The layer list with depths that read looked-up rows, and a head that joins their features.

    Args:
        items: a layer list with a head that only normalizes.

    Returns:
        ``items`` itself if it has no depth.
    """
    depths = [item for item in items if is_prediction(item)]
    if not depths:
        return tuple(items)
    head = items[-1]
    changed: dict[str, ItemSpec] = {
        head.name: replace(head, reads=(*head.reads, *map(prediction_of, range(len(depths)))), writes=FEATURES)
    }
    for depth, item in enumerate(depths):
        state = HIDDEN if depth == 0 else prediction_of(depth - 1)
        changed[item.name] = replace(
            item,
            reads=(state, ahead_of(depth)),
            writes=prediction_of(depth),
            # Labels and mask are those of the losses, which the shards compute.
            inputs=tuple(name for name in item.inputs if name not in ("labels", "loss_mask")),
            tied_to=None,
        )
    return tuple(changed.get(item.name, item) for item in items)


def ahead_of(depth: int) -> str:
    """Name of the rows of the later tokens that a depth reads."""
    return f"{AHEAD}.{depth}"


def prediction_of(depth: int) -> str:
    """Name of the features of a depth."""
    return f"{PREDICTION}.{depth}"


def prediction_item(depth: int) -> str:
    """Name of the item of a depth."""
    return f"{PREFIX}.{depth}"


def is_looked_up(name: str) -> bool:
    """Whether a value is rows of the word table that the shards have looked up."""
    return name == WORDS or is_ahead(name)


def is_ahead(name: str) -> bool:
    """Whether a value is the rows of later tokens, which a depth reads."""
    return name.startswith(f"{AHEAD}.")


def with_predictions(boundary: BoundaryShape, depths: int) -> BoundaryShape:
    """The boundary with the values of the depths, of which ``AHEAD`` crosses none.

    Args:
        boundary: shapes of the values of the model.
        depths: number of further tokens K.
    """
    samples, *rest = boundary.shapes[HIDDEN]
    names = (name_of(depth) for depth in range(depths) for name_of in (ahead_of, prediction_of))
    features = {FEATURES: ((1 + depths) * samples, *rest)} if depths else {}
    return replace(boundary, shapes={**boundary.shapes, **dict.fromkeys(names, boundary.shapes[HIDDEN]), **features})


class ShardedPrediction(nn.Module):
    """A depth that reads the rows of the later tokens, and gives its features to the head.

    Args:
        whole: the depth with its copies of the tables.
    """

    def __init__(self, whole: PredictionLayer) -> None:
        super().__init__()
        # In the order of the whole depth, in which the parameters of an item are numbered.
        self.final_norm = whole.final_norm
        self.embedding_norm, self.hidden_norm = whole.embedding_norm, whole.hidden_norm
        self.embedding, self.attention, self.mlp = SummedEmbedding(whole.embedding), whole.attention, whole.mlp
        self.head, self.projection = FinalNorm(whole.head), whole.projection
        self.metrics = tuple(metric for metric in whole.metrics if metric[0] != LOSS_METRIC)

    def forward(self, before_BTD: torch.Tensor, words_BTD: torch.Tensor, *arguments: torch.Tensor) -> ItemOutput:
        """Compute the features of this depth in training; evaluation passes the state on.

        Args:
            before_BTD: the residual stream of the model, or the features of the depth before, ``[B, T, D]``.
            words_BTD: rows of the word table of the later tokens, ``[B, T, D]``; with tensor parallelism zeros for
                those of other ranks. Not read in an evaluation.
            *arguments: further inputs of the attention.
        """
        if not self.training:
            zeros = {name: before_BTD.new_zeros((size,) if size > 1 else ()).float() for name, size in self.metrics}
            return ItemOutput(before_BTD, metrics=zeros)
        state_BTD = before_BTD if self.final_norm is None else self.final_norm(before_BTD)
        pair = torch.cat([self.embedding_norm(self.embedding.rows(words_BTD)), self.hidden_norm(state_BTD)], dim=-1)
        inner = self.mlp(self.attention(self.projection(pair), *arguments))
        features_BTD = self.head(output_of(inner))
        others = inner if isinstance(inner, ItemOutput) else ItemOutput(features_BTD)
        return ItemOutput(features_BTD, metrics=others.metrics, losses=others.losses)


PREDICTIONS = (PredictionLayer, ShardedPrediction)


class JoinedFeatures(FinalNorm):
    """The head of a model with depths: its features, and then those of the depths."""

    def forward(self, x_BTD: torch.Tensor, *further_BTD: torch.Tensor) -> torch.Tensor:
        """Features of all predictions, ``[(1 + K) B, T, D]``.

        Args:
            x_BTD: the residual stream of the model, ``[B, T, D]``.
            *further_BTD: features of each depth, ``[B, T, D]``; any values in an evaluation.
        """
        return torch.cat([super().forward(x_BTD), *further_BTD])


@dataclass(frozen=True, kw_only=True)
class PredictionTargets:
    """Tokens of a step that the depths read and predict.

    Attributes:
        ids: int64 token ids that each depth joins, ``[samples, T]``, on the host.
        labels: labels of each microbatch for all predictions, int64 ``[(1 + K) N]``.
        weights: weights in the mean of each prediction's loss, float32 ``[(1 + K) N]``.
    """

    ids: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        host_labels: torch.Tensor,
        labels: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor | None],
        depths: int,
        context: ContextRegion | None,
    ) -> PredictionTargets:
        """The tokens of all depths; with context parallelism a collective, and a copy to the host.

        Args:
            host_labels: labels of the step on the host, int64 ``[samples, T]``.
            labels: those of each microbatch on the device, int64 ``[B, T]``.
            masks: what counts in each microbatch, ``[B, T]``; None where all labels do.
            depths: number of further tokens K.
            context: ranks that share the tokens; None where there is one.
        """
        gathered: list[list[torch.Tensor]] = [[] for _ in range(depths)]
        all_labels, all_weights = [], []
        for of_labels, mask in zip(labels, masks, strict=True):
            joined, weights = [of_labels], [token_weights(of_labels, mask)]
            counts = torch.ones_like(of_labels) if mask is None else mask
            for depth in range(depths):
                read, following, counted = tokens_ahead(of_labels, counts, depth, context)
                gathered[depth].append(read)
                joined.append(following)
                weights.append(token_weights(following, counted))
            all_labels.append(torch.cat(joined).flatten())
            all_weights.append(torch.cat(weights))
        # Without other ranks' tokens there is nothing on the device to wait for.
        ids = (
            tuple(ahead(host_labels, depth) for depth in range(depths))
            if context is None
            else tuple(torch.cat(of_depth).cpu() for of_depth in gathered)
        )
        return cls(
            ids=ids,
            labels=tuple(all_labels),
            weights=tuple(all_weights),
        )
