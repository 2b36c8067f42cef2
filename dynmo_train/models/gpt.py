"""GPT-2/3: learned positions, pre-normalisation, tanh GELU, tied embeddings (Radford et al. 2019, section 2.3).

Shapes in names: B samples, T tokens, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.seeding import stable_seed
from ..parallel.tensor import TensorRegion, token_losses
from .items import ItemSpec
from .linear import PrunableLinear

WORD = "embedding.word.weight"
HEAD = "head.weight"
SPLIT_DIMS = {
    "word.weight": 0,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "dense.weight": 1,
    "fc1.weight": 0,
    "fc1.bias": 0,
    "fc2.weight": 1,
    "head.weight": 0,
}


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """Everything that fixes a GPT's arithmetic. Widths in elements, dropouts as probabilities."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size: int
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    tied_embeddings: bool = True
    seed: int = 1234


class Embedding(nn.Module):
    """Token and position tables: ids ``[B, T]`` to ``[B, T, D]``."""

    def __init__(self, shape: GptShape, device: torch.device) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.padded_vocab_size, shape.hidden_size, device=device)
        self.position = nn.Embedding(shape.max_position_embeddings, shape.hidden_size, device=device)
        self.dropout = shape.hidden_dropout

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Look up and add; positions count from 0."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        return F.dropout(self.word(ids_BT) + self.position(positions_T), self.dropout, self.training)


class Attention(nn.Module):
    """``x + dense(causal attention(norm(x)))``; the rows of ``qkv`` are grouped by head, ``[H, 3, K]``."""

    def __init__(self, shape: GptShape, device: torch.device) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads, self.head_width = shape.num_attention_heads, width // shape.num_attention_heads
        self.norm = nn.LayerNorm(width, eps=shape.layernorm_epsilon, device=device)
        self.qkv = PrunableLinear(width, 3 * width, device)
        self.dense = PrunableLinear(width, width, device)
        self.dropout, self.attention_dropout = shape.hidden_dropout, shape.attention_dropout

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Apply the sublayer with its residual."""
        qkv_BTE = self.qkv(self.norm(x_BTD))
        qkv = qkv_BTE.view(*qkv_BTE.shape[:2], -1, 3, self.head_width)
        q_BHTK, k_BHTK, v_BHTK = (part.transpose(1, 2) for part in qkv.unbind(3))
        dropout = self.attention_dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        y_BTD = self.dense(y_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + F.dropout(y_BTD, self.dropout, self.training)


class Mlp(nn.Module):
    """``x + fc2(gelu(fc1(norm(x))))``."""

    def __init__(self, shape: GptShape, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.layernorm_epsilon, device=device)
        self.fc1 = PrunableLinear(shape.hidden_size, shape.ffn_hidden_size, device)
        self.fc2 = PrunableLinear(shape.ffn_hidden_size, shape.hidden_size, device)
        self.dropout = shape.hidden_dropout

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Apply the sublayer with its residual."""
        y_BTD = self.fc2(F.gelu(self.fc1(self.norm(x_BTD)), approximate="tanh"))
        return x_BTD + F.dropout(y_BTD, self.dropout, self.training)


class Head(nn.Module):
    """Final normalisation and projection on the vocabulary; the loss is computed here, so that its cost is the head's.

    The weight is this item's own copy of the word table where embeddings are tied: their gradients are added once a
    step, wherever the two items live. Rows that only pad the vocabulary never enter the product.
    """

    def __init__(self, shape: GptShape, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.layernorm_epsilon, device=device)
        self.weight = nn.Parameter(torch.empty(shape.padded_vocab_size, shape.hidden_size, device=device))
        self.region: TensorRegion | None = None
        self.vocab_size = shape.vocab_size

    def logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to ``[B, T, V]`` with V the true vocabulary."""
        return F.linear(self.norm(x_BTD), self.weight[: self.vocab_size])

    def forward(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the microbatch, a scalar."""
        if self.region is not None:
            losses = token_losses(self.norm(x_BTD), self.weight, None, labels_BT, self.vocab_size, self.region)
            return losses.mean()
        logits = self.logits(x_BTD).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels_BT.reshape(-1))


class Gpt:
    """The GPT family over one shape; satisfies ``items.ModelFamily``."""

    def __init__(self, shape: GptShape) -> None:
        self.shape = shape

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``; every item may begin a stage but those that hold the ends."""
        items = [ItemSpec(name="embedding", layer="embedding", kind="embedding", cut_before=True)]
        for index in range(self.shape.num_layers):
            layer = f"layers.{index}"
            parts = ("attention", "mlp")
            items += [ItemSpec(name=f"{layer}.{kind}", layer=layer, kind=kind, cut_before=True) for kind in parts]
        tied_to = "embedding" if self.shape.tied_embeddings else None
        items.append(ItemSpec(name="head", layer="head", kind="head", cut_before=True, tied_to=tied_to))
        return tuple(items)

    @property
    def ties(self) -> Mapping[str, str]:
        """The head's weight is a copy of the word table, unless embeddings are untied."""
        return {HEAD: WORD} if self.shape.tied_embeddings else {}

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        kind = name.rpartition(".")[2]
        builders = {"embedding": Embedding, "attention": Attention, "mlp": Mlp, "head": Head}
        module: nn.Module = builders[kind](self.shape, device)
        if device.type != "meta":
            self._initialise(name, module)
        return module

    def _initialise(self, name: str, module: nn.Module) -> None:
        """Normal; matrices that end a residual branch scaled by 1/sqrt(2 layers) (GPT-2, section 2.3)."""
        std = self.shape.init_method_std
        ending_std = std / math.sqrt(2 * self.shape.num_layers)
        for child, parameter in module.named_parameters():
            if parameter.dim() < 2:
                continue
            full = f"{name}.{child}"
            owner = self.ties.get(full, full)
            generator = torch.Generator().manual_seed(stable_seed(self.shape.seed, "initial", owner))
            ends_branch = child in ("dense.weight", "fc2.weight")
            drawn = torch.randn(parameter.shape, generator=generator) * (ending_std if ends_branch else std)
            with torch.no_grad():
                parameter.copy_(drawn)

    def split_dim(self, parameter: str) -> int | None:
        """Heads, MLP width and vocabulary are cut; norms, positions and the biases of a branch's end are not."""
        return SPLIT_DIMS.get(".".join(parameter.split(".")[-2:]))

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""
        shape = self.shape
        return {
            "family": "gpt",
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "max_position_embeddings": shape.max_position_embeddings,
            "vocab_size": shape.vocab_size,
            "padded_vocab_size": shape.padded_vocab_size,
            "layernorm_epsilon": shape.layernorm_epsilon,
            "activation": "gelu_tanh",
            "tied_embeddings": shape.tied_embeddings,
        }
