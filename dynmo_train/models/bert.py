"""BERT as Megatron trains it: pre-normalisation, masked words, and the order of two segments.

Devlin et al. 2018 (arXiv:1810.04805), Shoeybi et al. 2019 (arXiv:1909.08053, section 5.3).
Shapes in names: B samples, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.tensor import TensorRegion, token_losses
from .blocks import Embedding, Mlp, SelfAttention, mean_cross_entropy, mean_where_counted
from .chain import HEAD, WORD, build_item, chain_items
from .items import ItemSpec, Reported
from .items import split_dim as split_dim_of
from .linear import PrunableLinear


@dataclass(frozen=True, kw_only=True)
class BertShape:
    """Everything that fixes a BERT's arithmetic. Widths in elements, dropouts as probabilities.

    ``binary_head`` is whether the order of two segments is learned, from the pooled first token.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size: int
    num_tokentypes: int = 2
    binary_head: bool = True
    layernorm_epsilon: float = 1e-5
    activation: str = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    seed: int = 1234


class BertHead(nn.Module):
    """Final normalisation, the head of masked words, and where the model has it that of the segments' order."""

    def __init__(self, shape: BertShape, device: torch.device) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.layernorm_epsilon
        self.norm = nn.LayerNorm(width, eps=eps, device=device)
        self.dense = PrunableLinear(width, width, device)
        self.dense_norm = nn.LayerNorm(width, eps=eps, device=device)
        self.weight = nn.Parameter(torch.empty(shape.padded_vocab_size, width, device=device))
        self.bias = nn.Parameter(torch.zeros(shape.padded_vocab_size, device=device))
        self.pooler = PrunableLinear(width, width, device) if shape.binary_head else None
        self.binary = PrunableLinear(width, 2, device) if shape.binary_head else None
        self.vocabulary = shape.vocab_size
        self.region: TensorRegion | None = None

    def features(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the weight of the words, from the normalised stream: ``[B, T, D]``."""
        words_BTD: torch.Tensor = self.dense_norm(F.gelu(self.dense(x_BTD)))
        return words_BTD

    def order_logits(self, x_BTD: torch.Tensor) -> torch.Tensor | None:
        """Logits of the order, from the normalised stream: ``[B, 2]`` or None."""
        if self.pooler is None or self.binary is None:
            return None
        order_B2: torch.Tensor = self.binary(torch.tanh(self.pooler(x_BTD[:, 0])))
        return order_B2

    def logits(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the words, ``[B, T, V]``, and of the order, ``[B, 2]`` or None."""
        x_BTD = self.norm(x_BTD)
        weight_VD, bias_V = self.weight[: self.vocabulary], self.bias[: self.vocabulary]
        return F.linear(self.features(x_BTD), weight_VD, bias_V), self.order_logits(x_BTD)

    def forward(
        self,
        x_BTD: torch.Tensor,
        labels_BT: torch.Tensor,
        counts_BT: torch.Tensor,
        order_B: torch.Tensor | None = None,
    ) -> Reported:
        """The sum of both losses, each also as a figure.

        Args:
            x_BTD: the last layer's output.
            labels_BT: the true words; only those that count are read.
            counts_BT: 1 where a word was masked.
            order_B: 1 where the second segment came before the first.
        """
        if self.region is None:
            words_BTV, order_B2 = self.logits(x_BTD)
            words = mean_cross_entropy(words_BTV, labels_BT, counts_BT)
        else:
            x_BTD = self.norm(x_BTD)
            order_B2 = self.order_logits(x_BTD)
            words_BTD = self.features(x_BTD)
            losses = token_losses(words_BTD, self.weight, self.bias, labels_BT, self.vocabulary, self.region)
            words = mean_where_counted(losses, counts_BT)
        if order_B2 is None or order_B is None:
            return Reported(output=words, figures={"lm_loss": words})
        order = F.cross_entropy(order_B2.float(), order_B)
        return Reported(output=words + order, figures={"lm_loss": words, "sop_loss": order})


class Bert:
    """The BERT family over one shape; satisfies ``items.ModelFamily``."""

    def __init__(self, shape: BertShape) -> None:
        self.shape = shape

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``."""
        binary = self.shape.binary_head
        return chain_items(
            self.shape.num_layers,
            tied=True,
            embedding_inputs=("ids", "types") if self.shape.num_tokentypes else ("ids",),
            attention_inputs=("seen",),
            head_inputs=("labels", "counts", "order") if binary else ("labels", "counts"),
            head_figures=(("lm_loss", 1), ("sop_loss", 1)) if binary else (("lm_loss", 1),),
        )

    @property
    def ties(self) -> Mapping[str, str]:
        """The head's weight is a copy of the word table."""
        return {HEAD: WORD}

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        shape = self.shape
        return build_item(
            name,
            device,
            {
                "embedding": self._embedding,
                "attention": self._attention,
                "mlp": self._mlp,
                "head": lambda device: BertHead(shape, device),
            },
            seed=shape.seed,
            std=shape.init_method_std,
            ending_std=shape.init_method_std / math.sqrt(2 * shape.num_layers),
            ties=self.ties,
        )

    def _norm(self, device: torch.device) -> nn.Module:
        return nn.LayerNorm(self.shape.hidden_size, eps=self.shape.layernorm_epsilon, device=device)

    def _embedding(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return Embedding(
            vocabulary=shape.padded_vocab_size,
            width=shape.hidden_size,
            positions=shape.max_position_embeddings,
            tokentypes=shape.num_tokentypes,
            dropout=shape.hidden_dropout,
            device=device,
        )

    def _attention(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return SelfAttention(
            width=shape.hidden_size,
            heads=shape.num_attention_heads,
            norm=self._norm(device),
            causal=False,
            dropout=shape.hidden_dropout,
            attention_dropout=shape.attention_dropout,
            device=device,
        )

    def _mlp(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return Mlp(
            width=shape.hidden_size,
            inner=shape.ffn_hidden_size,
            activation=shape.activation,
            norm=self._norm(device),
            dropout=shape.hidden_dropout,
            device=device,
        )

    def split_dim(self, parameter: str) -> int | None:
        """Heads, MLP width and vocabulary are cut; what stands in the head before its last product is not."""
        return split_dim_of(parameter)

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""
        shape = self.shape
        return {
            "family": "bert",
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "max_position_embeddings": shape.max_position_embeddings,
            "vocab_size": shape.vocab_size,
            "padded_vocab_size": shape.padded_vocab_size,
            "layernorm_epsilon": shape.layernorm_epsilon,
            "activation": shape.activation,
            "num_tokentypes": shape.num_tokentypes,
            "binary_head": shape.binary_head,
            "tied_embeddings": True,
        }
