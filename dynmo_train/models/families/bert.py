"""BERT as Megatron trains it: pre-normalization, masked language modeling, and sentence-order prediction.

Devlin et al. 2018 (arXiv:1810.04805), Shoeybi et al. 2019 (arXiv:1909.08053, section 5.3).
Shapes in names: B samples, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..layer_list import ItemOutput, ItemSpec
from ..layers.linear import PrunableLinear
from ..vocabulary.head import Head
from .family import Builders, Family, ModelDims, chain_items

if TYPE_CHECKING:
    from ...config import Config


@dataclass(frozen=True, kw_only=True)
class EncoderShape(ModelDims):
    """Sizes with one number of blocks, ``num_layers``, and ``num_tokentypes`` token types (0: no table)."""

    num_layers: int
    num_tokentypes: int = 2


EncoderS = TypeVar("EncoderS", bound=EncoderShape)


@dataclass(frozen=True, kw_only=True)
class BertShape(EncoderShape):
    """Sizes of a BERT.

    ``binary_head`` is whether sentence order is predicted from the pooled first token.
    """

    binary_head: bool = True

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run."""
        binary = not config.model.bert_no_binary_head
        return super().from_config(config, binary_head=binary, num_tokentypes=2 if binary else 0, **own)


# Positions of masked tokens per sample are padded to a multiple of this.
MASKED_MULTIPLE = 8


class BertHead(Head):
    """Final normalization, the masked-language-model head, and the sentence-order head where the model has it."""

    def __init__(self, shape: BertShape, device: torch.device) -> None:
        width, eps = shape.hidden_size, shape.layernorm_epsilon
        super().__init__(
            width=width,
            rows=shape.padded_vocab_size,
            vocabulary=shape.vocab_size,
            norm=nn.LayerNorm(width, eps=eps, device=device),
            bias=True,
            device=device,
        )
        # Masked tokens of the fullest sample of the step, rounded up; None where no batch was announced.
        self.most_masked: int | None = None
        self.dense = PrunableLinear(width, width, device)
        self.dense_norm = nn.LayerNorm(width, eps=eps, device=device)
        self.pooler = PrunableLinear(width, width, device) if shape.binary_head else None
        self.binary = PrunableLinear(width, 2, device) if shape.binary_head else None

    def features(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The input of the vocabulary projection, ``[B, T, D]``, from the residual stream ``x_BTD`` ``[B, T, D]``."""
        words_BTD: torch.Tensor = self.dense_norm(F.gelu(self.dense(self.norm(x_BTD))))
        return words_BTD

    def order_logits(self, x_BTD: torch.Tensor) -> torch.Tensor | None:
        """Sentence-order logits ``[B, 2]``; None without that head.

        Args:
            x_BTD: the normalized stream, ``[B, T, D]``; only its first token is read.
        """
        if self.pooler is None or self.binary is None:
            return None
        logits_B2: torch.Tensor = self.binary(torch.tanh(self.pooler(x_BTD[:, 0])))
        return logits_B2

    def forward(  # type: ignore[override] # two losses
        self,
        x_BTD: torch.Tensor,
        labels_BT: torch.Tensor,
        counts_BT: torch.Tensor,
        order_B: torch.Tensor | None = None,
    ) -> ItemOutput:
        """The sum of both losses, and each as a metric.

        Args:
            x_BTD: the last layer's output, ``[B, T, D]``; with sequence parallelism this rank's tokens.
            labels_BT: int64 ``[B, T]``, original token ids; read where ``counts_BT`` is 1.
            counts_BT: int64 ``[B, T]``, 1 where a token was masked.
            order_B: int64 ``[B]``, 1 where the segments are swapped; None leaves out this loss.

        Returns:
            The sum of both mean losses, a float32 scalar; metrics ``lm_loss`` and ``sop_loss``, scalars.
        """
        # With sequence parallelism ``x_BTD`` may have this rank's tokens only; positions in ``counts_BT`` count all
        # tokens. So the masked tokens are selected before the projection on a single tensor-parallel rank only.
        if self.region is None:
            words = super().forward(*self._counted(x_BTD, labels_BT, counts_BT))
            order_B2 = self.order_logits(self.norm(x_BTD[:, :1]))
        else:
            words = super().forward(x_BTD, labels_BT, counts_BT)
            order_B2 = self.order_logits(self.norm(x_BTD))
        if order_B2 is None or order_B is None:
            return ItemOutput(output=words, metrics={"lm_loss": words})
        order = F.cross_entropy(order_B2.float(), order_B)
        return ItemOutput(output=words + order, metrics={"lm_loss": words, "sop_loss": order})

    def prepare_batch(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Find out how many tokens of a sample are masked at most.

        Args:
            inputs: Batch of a step by name, ``[samples, T]`` on the CPU; ``loss_mask`` is 1 where a token is masked.
        """
        most = int(inputs["loss_mask"].sum(1).max())
        # Multiples: few shapes over a run, for kernels that are chosen or compiled by shape.
        self.most_masked = min(max(1, -(-most // MASKED_MULTIPLE)) * MASKED_MULTIPLE, inputs["loss_mask"].shape[1])

    def _counted(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor, counts_BT: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The masked tokens: the other six of seven need no projection to the vocabulary."""
        if self.most_masked is not None:
            # A number of tokens that the host knows: counting them on the device would wait for it.
            order_BT = counts_BT.argsort(dim=1, descending=True, stable=True)
            index_BC = order_BT[:, : self.most_masked]
            x_BCD = x_BTD.gather(1, index_BC[..., None].expand(-1, -1, x_BTD.shape[-1]))
            return x_BCD, labels_BT.gather(1, index_BC), counts_BT.gather(1, index_BC)
        counted = counts_BT.reshape(-1).nonzero()[:, 0]
        if not len(counted):
            # One token with count 0: the loss is 0, and every weight of the head still gets a gradient.
            return x_BTD[:, :1], labels_BT[:, :1], counts_BT[:, :1]
        x_ND = x_BTD.flatten(0, 1).index_select(0, counted)
        labels, counts = (each.reshape(-1).index_select(0, counted) for each in (labels_BT, counts_BT))
        return x_ND[None], labels[None], counts[None]


class EncoderFamily(Family[EncoderS]):
    """A family of bidirectional blocks with token types and one number of blocks per stack."""

    def num_layers_at(self, item: str) -> int:
        """All stacks have the same number of blocks."""
        return self.shape.num_layers

    def embedding_options(self, device: torch.device) -> dict[str, Any]:
        """Adds token types."""
        return {**super().embedding_options(device), "tokentypes": self.shape.num_tokentypes}

    def attention_options(self, device: torch.device) -> dict[str, Any]:
        """Bidirectional attention."""
        return {**super().attention_options(device), "causal": False}


class Bert(EncoderFamily[BertShape]):
    """The BERT family; satisfies ``layer_list.ModelFamily``."""

    name = "bert"

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``."""
        binary = self.shape.binary_head
        return chain_items(
            self.shape.num_layers,
            tied=True,
            embedding_inputs=("ids", "types") if self.shape.num_tokentypes else ("ids",),
            attention_inputs=("attention_mask",),
            head_inputs=("labels", "loss_mask", "order") if binary else ("labels", "loss_mask"),
            head_metrics=(("lm_loss", 1), ("sop_loss", 1)) if binary else (("lm_loss", 1),),
        )

    def builders(self, name: str) -> Builders:
        """The head with two losses."""
        return {**super().builders(name), "head": lambda device: BertHead(self.shape, device)}

    def own_manifest(self) -> dict[str, object]:
        """Blocks, token types and the second head."""
        shape = self.shape
        return {
            "num_layers": shape.num_layers,
            "num_tokentypes": shape.num_tokentypes,
            "binary_head": shape.binary_head,
        }
