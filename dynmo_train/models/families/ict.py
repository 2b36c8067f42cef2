"""The inverse cloze task with two BERT towers: one embeds queries, one embeds blocks of text.

Lee et al. 2019 (arXiv:1906.00300, section 4), as Megatron trains it: a query is a sentence of a block, and its own
block must have the highest score of the batch. The query tower comes first in the layer list:

    query ─▶ query.embedding ─▶ query.layers.* ─▶ query.pooler ─▶ query_embedding [B, P] ──────┐ crosses the stages
    block ─▶ context.embedding ─▶ context.layers.* ─────────────────────────────────▶ head ─▶ loss

Shapes in names: B samples, N samples of all replicas, T tokens, D model width, P width of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from ...config.extensions import FamilySpec
from ...parallel.collectives import ReplicaGather
from ..layer_list import LOSS, BoundaryShape, ItemOutput, ItemSpec, parameters_of
from ..layers.linear import PrunableLinear
from ..vocabulary.embedding import Embedding
from .bert import EncoderFamily, EncoderShape
from .family import Builders

if TYPE_CHECKING:
    from ...config import Config

QUERY, CONTEXT, EMBEDDED = "query", "context", "query_embedding"
POOLER, HEAD_ITEM = "query.pooler", "head"


@dataclass(frozen=True, kw_only=True)
class IctShape(EncoderShape):
    """Sizes of a pair of towers.

    Attributes:
        num_layers: blocks of each tower.
        projection_size: width P of a text embedding; 0 means D, without a projection.
        shared_towers: whether both towers share their weights: each of the second is tied to the first's.
        scaled_scores: whether scores are divided by the square root of D.
        top_k: the accuracies to report: the percentage of queries whose block is among the k best.
    """

    projection_size: int = 0
    shared_towers: bool = False
    scaled_scores: bool = False
    top_k: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run."""
        return super().from_config(
            config,
            projection_size=config.ict.biencoder_projection_dim,
            shared_towers=config.ict.biencoder_shared_query_context_model,
            scaled_scores=config.ict.retriever_score_scaling,
            top_k=config.ict.top_k,
            **own,
        )

    @property
    def metrics(self) -> tuple[tuple[str, int], ...]:
        """What the head reports."""
        return tuple((f"top{k}_acc", 1) for k in self.top_k)


class TowerEmbedding(Embedding):
    """BERT's embedding with token type 0: the towers have one segment."""

    def forward(self, ids_BT: torch.Tensor, types_BT: torch.Tensor | None = None) -> torch.Tensor:
        """``ids_BT``, int64 ``[B, T]``, to ``[B, T, D]``; ``types_BT`` is 0 everywhere by default."""
        return super().forward(ids_BT, torch.zeros_like(ids_BT) if types_BT is None else types_BT)


class Pooler(nn.Module):
    """The end of a tower: final normalization of the first token, and a projection where the model has it."""

    def __init__(self, shape: IctShape, norm: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.norm = norm
        width = shape.projection_size
        self.projection = PrunableLinear(shape.hidden_size, width, device) if width else None

    def embed(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The text embeddings, ``[B, P]``, from the stream ``x_BTD`` ``[B, T, D]``."""
        first_BD: torch.Tensor = self.norm(x_BTD[:, 0])
        return first_BD if self.projection is None else self.projection(first_BD)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """``embed`` of the stream ``x_BTD`` ``[B, T, D]``."""
        return self.embed(x_BTD)


class RetrievalHead(Pooler):
    """The end of the context tower, and the loss over the queries and blocks of all data-parallel replicas.

    ``replicas`` gathers the embeddings of the replicas; None where there is one. Every replica computes the same loss.
    """

    def __init__(self, shape: IctShape, norm: nn.Module, device: torch.device) -> None:
        super().__init__(shape, norm, device)
        self.scale = 1.0 / math.sqrt(shape.hidden_size) if shape.scaled_scores else 1.0
        self.top_k = shape.top_k
        self.replicas: ReplicaGather | None = None

    def scores(self, context_BTD: torch.Tensor, query_BP: torch.Tensor) -> torch.Tensor:
        """Inner products of queries (rows) and blocks (columns) of all replicas, ``[N, N]`` in float32.

        Args:
            context_BTD: the context tower's stream of this replica's blocks, ``[B, T, D]``.
            query_BP: embeddings of this replica's queries, ``[B, P]``.
        """
        context_BP = self.embed(context_BTD)
        # The other blocks of the batch are the negatives: more replicas give each query more of them.
        if self.replicas is not None:
            query_BP, context_BP = self.replicas.gather(query_BP), self.replicas.gather(context_BP)
        return query_BP.float() @ context_BP.float().t() * self.scale

    def forward(self, context_BTD: torch.Tensor, query_BP: torch.Tensor) -> ItemOutput:  # type: ignore[override] # a loss
        """The mean cross-entropy over the queries; accuracies in percent as metrics.

        Args:
            context_BTD: the context tower's stream of this replica's blocks, ``[B, T, D]``.
            query_BP: embeddings of this replica's queries, ``[B, P]``.

        Returns:
            The loss, a float32 scalar, and the metrics ``topK_acc``, scalars in percent.
        """
        scores_NN = self.scores(context_BTD, query_BP)
        # Queries and blocks are gathered in the same order, so the block of query ``n`` is column ``n``.
        labels = torch.arange(len(scores_NN), device=scores_NN.device)
        # Strictly greater, so that a block of equal score does not count against the query's own.
        better = (scores_NN > scores_NN.diagonal()[:, None]).sum(1)
        metrics = {f"top{k}_acc": 100.0 * (better < k).float().mean() for k in self.top_k}
        return ItemOutput(output=F.cross_entropy(scores_NN, labels), metrics=metrics)


class Ict(EncoderFamily[IctShape]):
    """The two towers; satisfies ``layer_list.ModelFamily``."""

    name = "ict"

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """The query's tower with its pooler, then the blocks' tower with the head."""
        return (*self._tower(QUERY), self._pooler(), *self._tower(CONTEXT), self._head())

    def _tower(self, tower: str) -> list[ItemSpec]:
        common: dict[str, Any] = {"cut_before": True, "writes": tower}

        def tied_to(rest: str) -> str | None:
            return f"{QUERY}.{rest}" if self.shape.shared_towers and tower == CONTEXT else None

        name = f"{tower}.embedding"
        items = [
            ItemSpec(
                name=name,
                layer=name,
                kind="embedding",
                reads=(),
                inputs=(f"{tower}_ids",),
                tied_to=tied_to("embedding"),
                **common,
            )
        ]
        for index in range(self.shape.num_layers):
            layer = f"{tower}.layers.{index}"
            for kind, inputs in (("attention", (f"{tower}_attention_mask",)), ("mlp", ())):
                items.append(
                    ItemSpec(
                        name=f"{layer}.{kind}",
                        layer=layer,
                        kind=kind,
                        reads=(tower,),
                        inputs=inputs,
                        tied_to=tied_to(f"layers.{index}.{kind}"),
                        **common,
                    )
                )
        return items

    def _pooler(self) -> ItemSpec:
        # Part of the last layer: a stage of its own would have almost no work. Next in the list, so that only the
        # embedding [B, P] and not the stream [B, T, D] of the queries crosses the stages of the other tower.
        last = f"{QUERY}.layers.{self.shape.num_layers - 1}"
        return ItemSpec(name=POOLER, layer=last, kind="layer", cut_before=True, reads=(QUERY,), writes=EMBEDDED)

    def _head(self) -> ItemSpec:
        return ItemSpec(
            name=HEAD_ITEM,
            layer=HEAD_ITEM,
            kind="head",
            cut_before=True,
            tied_to=POOLER if self.shape.shared_towers else None,
            reads=(CONTEXT, EMBEDDED),
            writes=LOSS,
            metrics=self.shape.metrics,
        )

    @property
    def ties(self) -> Mapping[str, str]:
        """With shared towers every weight of the second is tied to the first's."""
        return self._ties

    @cached_property
    def _ties(self) -> dict[str, str]:
        if not self.shape.shared_towers:
            return {}
        ties: dict[str, str] = {}
        for item in (spec.name for spec in self.items if spec.tied_to is not None):
            owner = POOLER if item == HEAD_ITEM else QUERY + item.removeprefix(CONTEXT)
            for name in parameters_of(item, self._module(item, torch.device("meta"))):
                ties[name] = owner + name.removeprefix(item)
        return ties

    def builders(self, name: str) -> Builders:
        """BERT's blocks, and the ends of the towers."""
        shape = self.shape
        return {
            **super().builders(name),
            "embedding": lambda device: TowerEmbedding(**self.embedding_options(device)),
            "pooler": lambda device: Pooler(shape, self.norm(device), device),
            "head": lambda device: RetrievalHead(shape, self.norm(device), device),
        }

    def _module(self, name: str, device: torch.device) -> nn.Module:
        return self.builders(name)[name.rpartition(".")[2]](device)

    def own_manifest(self) -> dict[str, object]:
        """The towers, and how wide their embeddings are."""
        shape = self.shape
        return {
            "num_layers": shape.num_layers,
            "num_tokentypes": shape.num_tokentypes,
            "projection_size": shape.projection_size,
            "shared_towers": shape.shared_towers,
        }


def bert_parameter(name: str) -> str | None:
    """The parameter of a BERT that one of a tower may begin as; None for the projections, which a BERT has not."""
    tower, _, rest = name.partition(".")
    if tower == HEAD_ITEM or name.startswith(POOLER):
        own = name.removeprefix(POOLER).removeprefix(HEAD_ITEM)
        return None if own.startswith(".projection.") else HEAD_ITEM + own
    return rest


def _boundary(config: Config) -> BoundaryShape:
    model, batch = config.model, config.training.micro_batch_size
    stream = (batch, model.seq_length, model.hidden_size)
    embedded = (batch, config.ict.biencoder_projection_dim or model.hidden_size)
    return BoundaryShape(shapes={QUERY: stream, EMBEDDED: embedded, CONTEXT: stream, LOSS: ()})


FAMILY = FamilySpec(
    from_config=lambda config: Ict(IctShape.from_config(config)),
    from_manifest=lambda model: Ict(IctShape.from_manifest(model)),
    boundary=_boundary,
    like="ict",
)
