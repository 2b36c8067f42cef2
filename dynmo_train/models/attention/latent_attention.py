"""Multi-head latent attention: keys and values are products of one narrow latent per token (DeepSeek-V2, section 2.1).

Liu et al. 2024 (arXiv:2405.04434), equations 37 to 47::

    x ─▶ norm ─┬─▶ query_down ─▶ norm ─▶ query_up ─▶ q = [unrotated | rotated] of each head
               └─▶ kv_down ─┬─ latent ─▶ norm ─▶ kv_up ─▶ [k unrotated | v] of each head
                            └─ one rotated key, the same for all heads

A cache of earlier tokens has the latent and the rotated key alone. One new token then attends to the latents: the
matrices of keys and values are multiplied into its query and its output instead ("absorbed").

The heads of queries, keys and values are padded to one width K, which serves everything that reads keys
``[B, H, S, K]``: kernels, windows, documents, context parallelism, selected tokens. Zeros add nothing to a score.

Shapes in names: B samples, T tokens, S keys, D model width, H heads, K padded width of a head, N unrotated, R rotated
width of queries and keys, V width of values, C width of the latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.linear import PrunableLinear
from ..layers.norms import RmsNorm
from .key_values import KeysValues, KVCache
from .positions import Rotary
from .rotary_scaling import yarn_magnitude
from .self_attention import CosSin, SelfAttention
from .varlen import window_mask

if TYPE_CHECKING:
    from ...config import Config

EPSILON = 1e-6
"""Of the norms of the latents, in every published model: not the one of the model's other norms."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of multi-head latent attention, under the names of Megatron-LM's options, which a manifest has too.

    Attributes:
        q_lora_rank: width of the latent of the queries; None means that they are one product of the stream.
        kv_lora_rank: width C of the latent of keys and values.
        qk_head_dim: unrotated width N of queries and keys.
        qk_pos_emb_head_dim: rotated width R of queries and keys, even.
        v_head_dim: width V of the values of a head.
        rotary_interleaved: whether elements 2i and 2i + 1 are a plane; else i and i + R / 2 are.
    """

    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rotary_interleaved: bool = True

    @property
    def key_width(self) -> int:
        """Width of the queries and keys of a head, N + R."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def padded_width(self) -> int:
        """Common width K of queries, keys and values."""
        return max(self.key_width, self.v_head_dim)

    def scale(self, scaling: Mapping[str, Any] | None) -> float:
        """The factor on the scores: ``(N + R)^-0.5``, times the square of YaRN's magnitude for ``mscale_all_dim``.

        Args:
            scaling: the rotary scaling of the model, or None.
        """
        scale: float = self.key_width**-0.5
        of_all = None if scaling is None else scaling.get("mscale_all_dim")
        return scale * yarn_magnitude(float(scaling["factor"]), of_all) ** 2 if scaling and of_all else scale

    def manifest(self) -> dict[str, object]:
        """The fields of a manifest's ``model`` object."""
        query = {} if self.q_lora_rank is None else {"q_lora_rank": self.q_lora_rank}
        names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_interleaved")
        return {**query, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_config(cls, config: Config) -> LatentShape | None:
        """The sizes of a run; None where it has another attention."""
        model = config.model
        if not model.multi_latent_attention:
            return None
        return cls(
            q_lora_rank=model.q_lora_rank,
            kv_lora_rank=model.kv_lora_rank,
            qk_head_dim=model.qk_head_dim,
            qk_pos_emb_head_dim=model.qk_pos_emb_head_dim,
            v_head_dim=model.v_head_dim,
            rotary_interleaved=model.rotary_interleaved,
        )

    @classmethod
    def of_manifest(cls, model: Mapping[str, Any]) -> LatentShape | None:
        """The sizes of a manifest's ``model`` object; None where it has another attention."""
        if model.get("kv_lora_rank") is None:
            return None
        return cls(
            q_lora_rank=model.get("q_lora_rank"),
            kv_lora_rank=model["kv_lora_rank"],
            qk_head_dim=model["qk_head_dim"],
            qk_pos_emb_head_dim=model["qk_pos_emb_head_dim"],
            v_head_dim=model["v_head_dim"],
            rotary_interleaved=model.get("rotary_interleaved", True),
        )


class LatentAttention(SelfAttention):
    """``x + dense(attention(norm(x)))`` with keys and values of a latent; causal.

    Args:
        latent: sizes.
        width: model width D.
        heads: heads H.
        norm: normalization before the sublayer.
        device: where the parameters are created.
        rotary: rotates R elements of queries and keys.
        scale: factor on the scores.
        bias: whether ``dense`` has a bias.
        down_bias: whether the products that give latents have biases.
        options: further arguments of ``SelfAttention``.
    """

    def __init__(
        self,
        *,
        latent: LatentShape,
        width: int,
        heads: int,
        norm: nn.Module,
        device: torch.device,
        rotary: Rotary,
        scale: float,
        bias: bool = False,
        down_bias: bool = False,
        **options: Any,
    ) -> None:
        # Without heads: this class has layers of its own in place of ``qkv``.
        super().__init__(
            width=width,
            heads=1,
            norm=norm,
            device=torch.device("meta"),
            head_width=latent.padded_width,
            rotary=rotary,
            scale=scale,
            **options,
        )
        del self.qkv
        self.latent = latent
        self.query_down: PrunableLinear | None = None
        self.query_latent_norm: nn.Module | None = None
        inner = width
        if latent.q_lora_rank is not None:
            inner = latent.q_lora_rank
            self.query_down = PrunableLinear(width, inner, device, bias=down_bias)
            self.query_latent_norm = RmsNorm(inner, eps=EPSILON, device=device)
        self.query_up = PrunableLinear(inner, heads * latent.key_width, device, bias=False)
        self.kv_down = PrunableLinear(width, latent.kv_lora_rank + latent.qk_pos_emb_head_dim, device, bias=down_bias)
        self.kv_latent_norm = RmsNorm(latent.kv_lora_rank, eps=EPSILON, device=device)
        rows = latent.qk_head_dim + latent.v_head_dim
        self.kv_up = PrunableLinear(latent.kv_lora_rank, heads * rows, device, bias=False)
        self.dense = PrunableLinear(heads * latent.v_head_dim, width, device, bias=bias)

    def _compress(
        self, x_BTD: torch.Tensor, past: int | torch.Tensor, cos_sin: CosSin | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[B, H, T, N + R]``, and latents with the rotated key ``[B, 1, T, C + R]``."""
        latent = self.latent
        x_BTD = self.norm(x_BTD)
        query = x_BTD
        if self.query_down is not None and self.query_latent_norm is not None:
            query = self.query_latent_norm(self.query_down(x_BTD))
        rows_BTR = self.query_up(query)
        B, T, _ = rows_BTR.shape  # of all tokens, where the stream is cut along them
        q_BHTK = rows_BTR.view(B, T, -1, latent.key_width).transpose(1, 2)
        latent_BTC, key_BTR = self.kv_down(x_BTD).split([latent.kv_lora_rank, latent.qk_pos_emb_head_dim], dim=-1)
        shared = torch.cat([self.kv_latent_norm(latent_BTC), key_BTR], dim=-1)
        # Here and not in ``kv_up``: the rotated key, too, is read by the heads of all tensor-parallel ranks.
        shared = shared if self.kv_up.enter is None else self.kv_up.enter(shared)
        latent_B1TC, key_B1TR = shared[:, None].split([latent.kv_lora_rank, latent.qk_pos_emb_head_dim], dim=-1)
        plain_BHTN, rotated_BHTR = q_BHTK.split([latent.qk_head_dim, latent.qk_pos_emb_head_dim], dim=-1)
        if latent.rotary_interleaved:
            rotated_BHTR, key_B1TR = (
                each.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for each in (rotated_BHTR, key_B1TR)
            )
        if cos_sin is None:
            cos_sin = self._rotation(rotated_BHTR, past)
        rotated_BHTR, key_B1TR = Rotary.apply_rotary(rotated_BHTR, key_B1TR, cos_sin)
        return torch.cat([plain_BHTN, rotated_BHTR], dim=-1), torch.cat([latent_B1TC, key_B1TR], dim=-1)

    def _expand(self, shared_B1SC: torch.Tensor) -> KeysValues:
        """Keys and values of all heads, ``[B, H, S, K]`` each, of latents with the rotated key."""
        latent = self.latent
        latent_BSC, key_B1SR = shared_B1SC[:, 0, :, : latent.kv_lora_rank], shared_B1SC[..., latent.kv_lora_rank :]
        rows_BSR = self.kv_up.product(latent_BSC)
        B, S, _ = rows_BSR.shape
        rows = rows_BSR.view(B, S, -1, latent.qk_head_dim + latent.v_head_dim).transpose(1, 2)
        k_BHSN, v_BHSV = rows.split([latent.qk_head_dim, latent.v_head_dim], dim=-1)
        k_BHSK = torch.cat([k_BHSN, key_B1SR.expand(-1, k_BHSN.shape[1], -1, -1)], dim=-1)
        return self._padded(k_BHSK), self._padded(v_BHSV)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.latent.padded_width - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def project(
        self, x_BTD: torch.Tensor, past: int | torch.Tensor = 0, cos_sin: CosSin | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, ``[B, H, T, K]`` each; see :meth:`SelfAttention.project`.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            past: position of the first token; for tokens that are not consecutive their positions, int64 ``[B, T]``.
            cos_sin: precomputed rotation; ``past`` is then ignored.
        """
        q_BHTK, shared_B1TC = self._compress(x_BTD, past, cos_sin)
        return self._padded(q_BHTK), *self._expand(shared_B1TC)

    def _rotation(self, q_BHTR: torch.Tensor, past: int | torch.Tensor) -> CosSin:
        tokens, device, dtype = q_BHTR.shape[2], q_BHTR.device, q_BHTR.dtype
        if self.rotary is None:
            raise ValueError("multi-head latent attention has rotary positions")
        if self.context is not None and not isinstance(past, torch.Tensor):
            cosine, sine = self.rotary.cos_sin(0, tokens * self.context.size, device, dtype)
            return self.context.cut(cosine, 0), self.context.cut(sine, 0)
        return self.rotary.cos_sin(past, tokens, device, dtype)

    def output(self, heads_BTR: torch.Tensor) -> torch.Tensor:
        """The sublayer's output ``[B, T, D]`` of the padded heads' outputs ``heads_BTR`` ``[B, T, H*K]``."""
        if self.latent.padded_width > self.latent.v_head_dim:
            heads = heads_BTR.unflatten(-1, (-1, self.latent.padded_width))
            heads_BTR = heads[..., : self.latent.v_head_dim].flatten(-2)
        return super().output(heads_BTR)

    def extend_into(
        self, x_BTD: torch.Tensor, kv_cache: KVCache, mask: torch.Tensor | None, cos_sin: CosSin | None
    ) -> torch.Tensor:
        """Process new tokens after those in ``kv_cache``, which gets their latents.

        Args:
            x_BTD: the residual stream of the new tokens, ``[B, T, D]``.
            kv_cache: latents of the tokens before, ``[B, 1, S, C + R]``, in place of keys.
            mask: bool ``[..., T, S]``; None is causal for several new tokens in an empty cache, else all.
            cos_sin: rotation of the new tokens.

        Returns:
            The residual stream of the new tokens after the sublayer, ``[B, T, D]``.
        """
        q_BHTK, shared_B1TC = self._compress(x_BTD, kv_cache.used, cos_sin)
        tokens = q_BHTK.shape[2]
        shared_B1SC, _ = kv_cache.extend(shared_B1TC, shared_B1TC[..., :0])
        keys = shared_B1SC.shape[2]
        causal = mask is None and tokens > 1
        if self.window is not None and keys > self.window:
            band_TS = window_mask(tokens, keys, self.window, q_BHTK.device)
            mask, causal = band_TS if mask is None else mask & band_TS, False
        if tokens < keys and self.kv_up.is_dense and self.kv_up.float8 is None:
            return x_BTD + super().output(self._absorbed(q_BHTK, shared_B1SC, mask))
        k_BHSK, v_BHSK = self._expand(shared_B1SC)
        return x_BTD + self.attend(self._padded(q_BHTK), k_BHSK, v_BHSK, mask, causal)

    def _absorbed(self, q_BHTK: torch.Tensor, shared_B1SC: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The heads' outputs ``[B, T, H*V]``, whose keys are the latents themselves (DeepSeek-V2, section 2.1.2)."""
        latent = self.latent
        rows_HRC = self.kv_up.weight.view(-1, latent.qk_head_dim + latent.v_head_dim, latent.kv_lora_rank)
        keys_HNC, values_HVC = rows_HRC.split([latent.qk_head_dim, latent.v_head_dim], dim=1)
        plain_BHTN, rotated_BHTR = q_BHTK.split([latent.qk_head_dim, latent.qk_pos_emb_head_dim], dim=-1)
        q_BHTC = torch.cat([torch.einsum("bhtn,hnc->bhtc", plain_BHTN, keys_HNC), rotated_BHTR], dim=-1)
        heads = q_BHTC.shape[1]
        mixed_BHTC = F.scaled_dot_product_attention(
            q_BHTC,
            shared_B1SC.expand(-1, heads, -1, -1),
            shared_B1SC[..., : latent.kv_lora_rank].expand(-1, heads, -1, -1),
            attn_mask=mask,
            scale=self.scale,
        )
        return torch.einsum("bhtc,hvc->bthv", mixed_BHTC, values_HVC).flatten(2)
