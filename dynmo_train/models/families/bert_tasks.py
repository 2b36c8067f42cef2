"""BERT with a classification or multiple-choice head instead of the masked-language-model head.

Shapes in names: B samples, R = B * choices rows, T tokens, D model width, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ...config.extensions import FamilySpec
from ...parallel.random_stream import item_dropout
from ..layer_list import ItemOutput, ItemSpec
from ..layers.linear import PrunableLinear
from .bert import Bert, BertShape
from .family import chain_items, initialise

TaskKind = Literal["classification", "multichoice"]
NO_LABEL = -1
HITS = "hits"


@dataclass(frozen=True, kw_only=True)
class TaskHead:
    """What the head predicts: one of ``num_classes`` classes per row, or which of a sample's rows is correct."""

    kind: TaskKind
    num_classes: int


class BertTaskHead(nn.Module):
    """Final normalization, pooler, dropout and output layer, as in Megatron's fine-tuned models."""

    classification: PrunableLinear | None
    multichoice: PrunableLinear | None

    def __init__(self, shape: BertShape, head: TaskHead, device: torch.device) -> None:
        super().__init__()
        width = shape.hidden_size
        self.norm = nn.LayerNorm(width, eps=shape.layernorm_epsilon, device=device)
        self.pooler = PrunableLinear(width, width, device)
        choice = head.kind == "multichoice"
        self.classification = None if choice else PrunableLinear(width, head.num_classes, device)
        self.multichoice = PrunableLinear(width, 1, device) if choice else None
        self.dropout, self.choices = shape.hidden_dropout, head.num_classes

    def logits(self, x_RTD: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, C]`` from the last layer's output ``x_RTD`` ``[R, T, D]``; the rows of a sample are consecutive.

        Raises:
            ValueError: the head has neither a classification nor a multiple-choice layer.
        """
        # Token 0 is [CLS].
        pooled_RD = torch.tanh(self.pooler(self.norm(x_RTD[:, 0])))
        pooled_RD = item_dropout(pooled_RD, self.dropout, self.training)
        if self.multichoice is not None:
            scores_RC: torch.Tensor = self.multichoice(pooled_RD)
            return scores_RC.view(-1, self.choices)
        if self.classification is None:
            raise ValueError("the head has no logits")
        logits_BC: torch.Tensor = self.classification(pooled_RD)
        return logits_BC

    def forward(self, x_RTD: torch.Tensor, labels_B: torch.Tensor) -> ItemOutput:
        """Mean cross-entropy over the samples with a label; accuracy and hits as metrics.

        Args:
            x_RTD: the last layer's output, ``[R, T, D]``.
            labels_B: int64 ``[B]``, class of each sample; ``NO_LABEL`` samples count for nothing.

        Returns:
            The loss, a float32 scalar; metrics ``accuracy``, a scalar, and ``hits``, float32 ``[B]``, 0 or 1.
        """
        logits_BC = self.logits(x_RTD).float()
        # Samples that only fill a batch have no label. ``reduction="mean"`` is NaN where no other is in a microbatch.
        counted = (labels_B != NO_LABEL).sum().clamp(min=1)
        loss = F.cross_entropy(logits_BC, labels_B, ignore_index=NO_LABEL, reduction="sum") / counted
        hits_B = (logits_BC.argmax(1) == labels_B).float()
        return ItemOutput(loss, metrics={"accuracy": hits_B.sum() / counted, HITS: hits_B})


class BertTask:
    """The BERT family with a task head; satisfies ``layer_list.ModelFamily``."""

    def __init__(self, shape: BertShape, head: TaskHead) -> None:
        self.shape, self.head, self._base = shape, head, Bert(shape)

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``."""
        return chain_items(
            self.shape.num_layers,
            tied=False,
            embedding_inputs=("ids", "types") if self.shape.num_tokentypes else ("ids",),
            attention_inputs=("attention_mask",),
            head_inputs=("labels",),
            head_metrics=(("accuracy", 1),),
        )

    @property
    def ties(self) -> Mapping[str, str]:
        """None: the head does not read the word table."""
        return {}

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        if name != "head":
            return self._base.build(name, device)
        module, std = BertTaskHead(self.shape, self.head, device), self.shape.init_method_std
        initialise(name, module, seed=self.shape.seed, std=std, ending_std=std, ties={}, vocabulary=0)
        return module

    def split_dim(self, parameter: str) -> int | None:
        """As BERT; every rank has the whole head."""
        return None if parameter.startswith("head.") else self._base.split_dim(parameter)

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""
        task = {"task_head": self.head.kind, "num_classes": self.head.num_classes}
        return {**self._base.manifest(), "binary_head": False, "tied_embeddings": False, **task}


def task_of_manifest(model: Mapping[str, Any]) -> TaskHead | None:
    """The task head that a manifest's ``model`` states; None for the masked-language-model head."""
    if "task_head" not in model:
        return None
    return TaskHead(kind=model["task_head"], num_classes=model["num_classes"])


def _from_manifest(model: Mapping[str, Any]) -> Bert | BertTask:
    shape, head = BertShape.from_manifest(model), task_of_manifest(model)
    return Bert(shape) if head is None else BertTask(shape, head)


FAMILY = FamilySpec(
    from_config=lambda config: Bert(BertShape.from_config(config)), from_manifest=_from_manifest, like="bert"
)
