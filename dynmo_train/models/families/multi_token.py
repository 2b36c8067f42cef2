"""Multi-token prediction: a layer after the last block that predicts one token further (DeepSeek-V3, section 2.2).

DeepSeek-AI 2024 (arXiv:2412.19437), equations 21 to 25. Depth k, from 0, joins the state of each position with the
embedding of the token k + 1 places ahead, and predicts the next one with the head of the model::

    mtp.0  hidden ─▶ final norm ─▶ norm ─┐
                     embedding ─▶ norm ──┴▶ projection ─▶ attention ─▶ MLP ─▶ norm ─┬▶ head ─▶ loss
    mtp.1                  state of mtp.0 ─▶ norm ─┐                                │
                           embedding ─▶ norm ──────┴▶ projection ─▶ ...  ◀──────────┘

Each depth is an item of the layer list. It has copies of the word table, of the head's weight and, at depth 0, of the
final norm, tied to their owners as a head is to the word table. The last depth returns the stream of the model itself,
where the gradient of its loss enters::

    items    layers.N.mlp   mtp.0                    mtp.1                             head
    reads    hidden         hidden                   hidden, prediction                hidden
    writes   hidden         prediction (its state)   hidden (as it was, with a loss)   loss

With context parallelism the tokens ahead may be another rank's: labels are gathered, which are small.

Shapes in names: B samples, T tokens of this rank, S tokens of all context-parallel ranks, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...parallel.context_parallel import ContextRegion
from ..layer_list import HIDDEN, ItemOutput, ItemSpec, output_of
from ..vocabulary.embedding import Embedding
from ..vocabulary.head import Head

PREDICTION = "prediction"
PREFIX = "mtp"
LOSS_METRIC = "mtp_loss"


def is_prediction(item: ItemSpec) -> bool:
    """Whether an item is a depth of multi-token prediction, which only training runs."""
    return item.layer.startswith(f"{PREFIX}.")


def prediction_items(
    depths: int, *, tied_to: str, inputs: tuple[str, ...], metrics: tuple[tuple[str, int], ...]
) -> tuple[ItemSpec, ...]:
    """The items between the last block and the head.

    Args:
        depths: number of further tokens.
        tied_to: the item that owns the head's weight.
        inputs: names of the batch tensors that they read.
        metrics: names and lengths of the metrics of their MLPs.
    """
    return tuple(
        ItemSpec(
            name=f"{PREFIX}.{depth}",
            layer=f"{PREFIX}.{depth}",
            kind="layer",
            cut_before=True,
            tied_to=tied_to,
            reads=((HIDDEN,) if depth == 0 else (HIDDEN, PREDICTION) if depth == depths - 1 else (PREDICTION,)),
            writes=HIDDEN if depth == depths - 1 else PREDICTION,
            inputs=inputs,
            metrics=((LOSS_METRIC, 1), *metrics),
        )
        for depth in range(depths)
    )


def prediction_ties(depths: int, word: str, head: str, final_norm: tuple[str, ...]) -> Mapping[str, str]:
    """Copies that the depths have -> their owners.

    Args:
        depths: number of further tokens.
        word: the word table.
        head: the owner of the head's weight.
        final_norm: parameters of the head's normalization.
    """
    ties: dict[str, str] = {}
    for depth in range(depths):
        item = f"{PREFIX}.{depth}"
        ties |= {f"{item}.embedding.word.weight": word, f"{item}.head.weight": head}
    if depths:
        ties |= {f"{PREFIX}.0.final_norm.{name.rpartition('.')[2]}": name for name in final_norm}
    return ties


class PredictionLayer(nn.Module):
    """One depth: a block on the projected pair of the state before and the embedding of a later token.

    Args:
        depth: k, from 0.
        depths: number of further tokens.
        loss_scale: weight of the mean over the depths of their losses.
        final_norm: copy of the model's final normalization at depth 0; else None.
        norms: normalizations of the embedding and of the state before.
        embedding: copy of the word table.
        attention: the block's attention.
        mlp: the block's MLP, dense or with experts.
        head: the head, with a normalization of this depth's own.
        width: model width D.
        device: where the projection is created.
    """

    def __init__(
        self,
        *,
        depth: int,
        depths: int,
        loss_scale: float,
        final_norm: nn.Module | None,
        norms: tuple[nn.Module, nn.Module],
        embedding: Embedding,
        attention: nn.Module,
        mlp: nn.Module,
        head: Head,
        width: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.depth, self.is_last, self.weight_of_loss = depth, depth == depths - 1, loss_scale / depths
        self.final_norm = final_norm
        self.embedding_norm, self.hidden_norm = norms
        self.embedding, self.attention, self.mlp, self.head = embedding, attention, mlp, head
        self.projection = nn.Linear(2 * width, width, bias=False, device=device)
        self.context: ContextRegion | None = None  # set by ``join_context``
        self.reads_mask = False
        self.metrics: tuple[tuple[str, int], ...] = ()

    def forward(self, x_BTD: torch.Tensor, *arguments: torch.Tensor) -> ItemOutput:
        """Compute the loss of this depth in training; evaluation passes the stream on.

        Args:
            x_BTD: the residual stream of the model, or the state of the depth before, ``[B, T, D]``.
            *arguments: that state, where the first one is the stream and this is not the first depth; int64 labels
                ``[B, T]``, the next token of each position; the mask of counted labels, where ``reads_mask``; and
                further inputs of the attention.

        Returns:
            The last depth: the stream ``x_BTD`` itself; others: their state ``[B, T, D]``. The loss ``mtp``.
        """
        before_BTD = x_BTD
        if self.is_last and self.depth:
            before_BTD, *rest = arguments
        else:
            rest = list(arguments)
        if not self.training:
            zeros = {name: x_BTD.new_zeros((size,) if size > 1 else ()).float() for name, size in self.metrics}
            return ItemOutput(x_BTD, metrics=zeros)
        labels_BT, *rest = rest
        counts_BT = torch.ones_like(labels_BT)
        if self.reads_mask:
            counts_BT, *rest = rest
        if self.final_norm is not None:
            before_BTD = self.final_norm(before_BTD)
        ids_BT, next_BT, counts_BT = tokens_ahead(labels_BT, counts_BT, self.depth, self.context)
        tokens_BTD = self.embedding.embed(ids_BT)
        pair = torch.cat([self.embedding_norm(tokens_BTD), self.hidden_norm(before_BTD)], dim=-1)
        inner = self.mlp(self.attention(self.projection(pair), *rest))
        y_BTD = output_of(inner)
        loss: torch.Tensor = self.head(y_BTD, next_BT, counts_BT)
        others = inner if isinstance(inner, ItemOutput) else ItemOutput(y_BTD)
        return ItemOutput(
            output=x_BTD if self.is_last else self.head.features(y_BTD),
            metrics={LOSS_METRIC: loss, **others.metrics},
            losses={"mtp": loss * self.weight_of_loss, **others.losses},
        )


def tokens_ahead(
    labels_BT: torch.Tensor, counts_BT: torch.Tensor, depth: int, context: ContextRegion | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids that a depth joins and predicts, and the counts or, with context parallelism, weights of the latter.

    Args:
        labels_BT: int64 ``[B, T]``, the next token of each position, of a microbatch.
        counts_BT: ``[B, T]``, whether it counts, or its weight.
        depth: k, from 0.
        context: ranks that share the tokens; None where there is one.
    """
    further = depth + 1
    if context is None:
        return ahead(labels_BT, depth), ahead(labels_BT, further), ahead(counts_BT, further)
    labels_BS, counts_BS = context.gather_tokens(labels_BT), ahead(context.gather_tokens(counts_BT), further)
    if not (context.weighs_steps and counts_BS.is_floating_point()):
        # Weights of the mean over all tokens, times the number of ranks: the step takes the mean over the ranks.
        counts_BS = (counts_BS > 0).float()
        counts_BS = context.size * counts_BS / counts_BS.sum().clamp(min=1.0)
    ids, following, weights = (
        context.cut(each, 1) for each in (ahead(labels_BS, depth), ahead(labels_BS, further), counts_BS)
    )
    return ids, following, weights


def ahead(values_BT: torch.Tensor, places: int) -> torch.Tensor:
    """The values of the positions ``places`` ahead, ``[B, T]``; 0 behind the last one, where no token is known.

    Args:
        values_BT: ids or counts.
        places: number of positions, from 0.
    """
    if places == 0:
        return values_BT
    shifted = torch.zeros_like(values_BT)
    shifted[:, :-places] = values_BT[:, places:]
    return shifted
