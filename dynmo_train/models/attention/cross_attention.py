"""The attention of a decoder to the output of an encoder.

Shapes in names: B samples, T tokens, S tokens of the memory, D model width, H heads, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.random_stream import item_dropout
from ..layers.linear import PrunableLinear
from .varlen import attend_sequences, has_kernel, padded_offsets, whole_offsets


class CrossAttention(nn.Module):
    """``x + dense(attention(query(norm(x)), key_value(memory)))``; the rows of ``key_value`` are ``[H, 2, K]``.

    Args:
        width: model width D.
        heads: heads H.
        norm: normalization before the sublayer; the memory is not normalized here.
        device: where the parameters are created.
        head_width: K; None means D / H.
        bias: whether the linear layers have biases.
        scaled: whether scores are divided by the square root of K (T5's are not).
        dropout: dropout probability of the output.
        attention_dropout: dropout probability of the attention weights.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        norm: nn.Module,
        device: torch.device,
        head_width: int | None = None,
        bias: bool = True,
        scaled: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_width = head_width or width // heads
        inner = heads * self.head_width
        self.norm = norm
        self.query = PrunableLinear(width, inner, device, bias=bias)
        self.key_value = PrunableLinear(width, 2 * inner, device, bias=bias)
        self.dense = PrunableLinear(inner, width, device, bias=bias)
        self.scale = None if scaled else 1.0
        self.dropout, self.attention_dropout = dropout, attention_dropout

    def forward(self, x_BTD: torch.Tensor, memory_BSD: torch.Tensor, key_mask_BS: torch.Tensor) -> torch.Tensor:
        """Apply the sublayer with its residual.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            memory_BSD: the encoder's output, ``[B, S, D]``.
            key_mask_BS: bool ``[B, S]``, true for memory tokens that may be attended to, the first ones of a sample.

        Returns:
            The residual stream after the sublayer, ``[B, T, D]``.
        """
        q_BHTK = self.query(self.norm(x_BTD)).unflatten(2, (-1, self.head_width)).transpose(1, 2)
        keys_values = self.key_value(memory_BSD).unflatten(2, (-1, 2, self.head_width))
        k_BHSK, v_BHSK = (part.transpose(1, 2) for part in keys_values.unbind(3))
        dropout = self.attention_dropout if self.training else 0.0
        if has_kernel(q_BHTK, dropout):
            B, _, T, _ = q_BHTK.shape
            offsets = whole_offsets(B, T, q_BHTK.device), padded_offsets(key_mask_BS)
            y_BTR = attend_sequences(q_BHTK, k_BHSK, v_BHSK, offsets, (T, key_mask_BS.shape[1]), scale=self.scale)
            return x_BTD + item_dropout(self.dense(y_BTR), self.dropout, self.training)
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BHSK, v_BHSK, attn_mask=key_mask_BS[:, None, None, :], dropout_p=dropout, scale=self.scale
        )
        return x_BTD + item_dropout(self.dense(y_BHTK.transpose(1, 2).flatten(2)), self.dropout, self.training)
