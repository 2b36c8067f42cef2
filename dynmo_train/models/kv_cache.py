"""Incremental decoding: a causal model, or one stage of it, with the keys and values of earlier tokens.

Shapes in names: B sequences, T new tokens, S all tokens so far, C active tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention.key_values import KVCache
from .attention.latent_attention import LatentAttention
from .attention.positions import Rotary, RotaryKey
from .attention.self_attention import CosSin, SelfAttention
from .families.multi_token import is_prediction
from .layer_list import ItemSpec, ModelFamily, output_of
from .layers.linear import PrunableLinear
from .layers.softcap import soft_cap
from .layers.sparse_formats import DENSE
from .techniques.early_exit import EXITED, ActiveTokens, Exit, active_tokens
from .techniques.mixture_of_depths import RoutedBlock
from .vocabulary.embedding import Embedding
from .vocabulary.head import Head


@dataclass
class DecodingCache:
    """State of the decoded sequences.

    Attributes:
        capacity: maximum number of tokens; None is the decoder's.
        padding: int64 ``[B]``, number of padding tokens at the start of each sequence; None means none.
        tokens: number of tokens so far.
        by_item: item name -> its cache: keys and values, for items with token selection a list by sequence.
    """

    capacity: int | None = None
    padding: torch.Tensor | None = None
    tokens: int = 0
    by_item: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _TokenPositions:
    """Positions ``[B, T]`` of new tokens, the mask of keys (None: all earlier ones), and the rotations."""

    positions_BT: torch.Tensor
    past: int | torch.Tensor
    mask: torch.Tensor | None
    cos_sin: Mapping[RotaryKey, CosSin]


class Decoder:
    """Runs a model or one of its stages in evaluation mode, token by token.

    Args:
        family: the whole model.
        modules: item name -> module, of all items or of those of a stage.
        max_tokens: maximum number of tokens of a sequence.
        items: the items of the stage; None means all.
    """

    def __init__(
        self,
        family: ModelFamily,
        modules: Mapping[str, nn.Module],
        max_tokens: int,
        items: Sequence[ItemSpec] | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        # Further predictions have losses alone.
        self.items = tuple(item for item in (family.items if items is None else items) if not is_prediction(item))
        # In evaluation mode, routers use their causal rule. The rules of training read all tokens of a sample.
        self.modules = {item.name: modules[item.name].eval() for item in self.items}
        self._rotaries = rotaries_of(self.modules.values())

    @torch.inference_mode()
    def read(self, ids_BT: torch.Tensor, cache: DecodingCache) -> torch.Tensor:
        """Process token ids after the cached ones; returns the logits of the last token, ``[B, V]`` float32.

        Later items skip tokens that exit.

        Args:
            ids_BT: int64 token ids, ``[B, T]``.
            cache: of all items; grows by T tokens.
        """
        exited_BT = torch.zeros(ids_BT.shape, device=ids_BT.device)
        return self.run(ids_BT, exited_BT, cache)[0]

    @torch.inference_mode()
    def run(self, x: torch.Tensor, exited_BT: torch.Tensor, cache: DecodingCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the stage's items on new tokens.

        Args:
            x: token ids ``[B, T]`` in the first stage, else the stream ``[B, T, D]``.
            exited_BT: ``[B, T]``, 1 where a token has exited before this stage.
            cache: of this stage; grows by T tokens.

        Returns:
            The stream or, from the last stage, logits ``[B, V]``; and ``exited_BT`` after the stage.
        """
        places = self._places(x, cache)
        for item in self.items:
            module = self.modules[item.name]
            if isinstance(module, Embedding):
                x = module.embed(x, past=places.past)
            elif isinstance(module, Head):
                x = last_logits(module, x)
            elif EXITED in item.reads:
                x, exited_BT = self._read_active(item, x, exited_BT, places.positions_BT, cache)
            elif type(module) in (SelfAttention, LatentAttention) and isinstance(module, SelfAttention):
                kv_cache = cache.by_item.setdefault(item.name, KVCache(cache.capacity or self.max_tokens))
                x = module.extend_into(x, kv_cache, places.mask, rotation_of(module, places.cos_sin))
            else:
                before = x
                x, cache.by_item[item.name] = _extend(module, x, cache.by_item.get(item.name), places.positions_BT)
                exited_BT = _after_exit(module, before, x, exited_BT)
        cache.tokens += places.positions_BT.shape[1]
        return x, exited_BT

    def _places(self, x: torch.Tensor, cache: DecodingCache) -> _TokenPositions:
        new, past, device = x.shape[1], cache.tokens, x.device
        steps_T = torch.arange(past, past + new, device=device)
        positions: int | torch.Tensor = past
        mask = None
        # Several new tokens after cached ones need a mask of their own: torch aligns ``is_causal`` to the first key.
        if past and new > 1:
            mask = torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)
        if cache.padding is None:
            positions_BT = steps_T.expand(x.shape[0], new)
        else:
            padding_B1 = cache.padding.to(device)[:, None]
            positions = positions_BT = (steps_T - padding_B1).clamp(min=0)
            key_mask_BS = torch.arange(past + new, device=device) >= padding_B1
            causal_TS = torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)
            # A padding token attends to itself: a softmax over no key is NaN.
            itself_TS = F.pad(torch.eye(new, dtype=torch.bool, device=device), (past, 0))
            mask = ((key_mask_BS[:, None] & causal_TS) | itself_TS)[:, None] if new > 1 else key_mask_BS[:, None, None]
        weight = next(iter(next(iter(self.modules.values())).parameters()))
        cos_sin = {key: each.cos_sin(positions, new, device, weight.dtype) for key, each in self._rotaries.items()}
        return _TokenPositions(positions_BT=positions_BT, past=positions, mask=mask, cos_sin=cos_sin)

    def _read_active(
        self,
        item: ItemSpec,
        x_BTD: torch.Tensor,
        exited_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        cache: DecodingCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one item on the active tokens, by sequence, because the lengths of their caches differ."""
        past = cache.by_item.setdefault(item.name, [None] * len(x_BTD))
        module = self.modules[item.name]
        attention = module if isinstance(module, SelfAttention) and getattr(module, "propagates", False) else None
        rows, exited_rows = [], []
        for number, (x_1TD, exited_1T) in enumerate(zip(x_BTD.split(1), exited_BT.split(1), strict=True)):
            if bool((exited_1T == 0).any()):
                selected = active_tokens(exited_1T)
                x_1CD = selected.take(x_1TD)
                places = selected.take(positions_BT[number : number + 1])
                if attention is not None:
                    y_1CD, past[number] = attention.of_selected(
                        x_1TD, selected.index_BC, past=past[number], positions=positions_BT[number : number + 1]
                    )
                else:
                    y_1CD, past[number] = _extend(module, x_1CD, past[number], places)
                leaves_1C = _after_exit(module, x_1CD, y_1CD, torch.zeros_like(places, dtype=exited_1T.dtype))
                x_1TD = selected.put(x_1TD, y_1CD)
                exited_1T = exited_1T.scatter_add(1, selected.index_BC, leaves_1C)
            elif attention is not None:
                # No query is active: the keys and values alone are needed.
                _, past[number] = attention.extend(x_1TD, past[number], positions_BT[number : number + 1])
            rows.append(x_1TD)
            exited_rows.append(exited_1T)
        return torch.cat(rows), torch.cat(exited_rows)


def rotaries_of(modules: Iterable[nn.Module]) -> dict[RotaryKey, Rotary]:
    """The different rotations of the attentions among ``modules``: most models have one, some one for local layers."""
    found = (module.rotary for module in modules if isinstance(module, SelfAttention))
    return {rotary.key: rotary for rotary in found if rotary is not None}


def rotation_of(attention: SelfAttention, cos_sin: Mapping[RotaryKey, CosSin]) -> CosSin | None:
    """The rotation of an attention; None without rotary positions.

    Args:
        attention: the attention.
        cos_sin: the rotations of all attentions.
    """
    return None if attention.rotary is None else cos_sin[attention.rotary.key]


def store_by_columns(module: nn.Module) -> None:
    """Store dense weights ``[O, I]`` in column-major order; shapes and values are unchanged.

    The product with one token reads every weight once. On CPU this is a third faster by columns than by rows (22
    against 16 GB/s on a 2-core AMD EPYC, widths 768 to 3,072). A head that shares the word table's memory gets a copy.
    """
    for child in module.modules():
        # A packed weight stays packed: it is faster than one by rows.
        if not isinstance(child, Head | PrunableLinear) or child.packed is not None:
            continue
        if isinstance(child, Head) or child.form == DENSE:
            child.weight.data = child.weight.data.t().contiguous().t()


def is_ragged_safe(family: ModelFamily) -> bool:
    """Whether sequences of different lengths may share a batch: no item selects tokens."""
    items = (item for item in family.items if not is_prediction(item))
    return all(item.kind != "layer" and EXITED not in (*item.reads, *item.side) for item in items)


def rotation_switch(family: ModelFamily) -> int | None:
    """Tokens beyond which LongRoPE rotates all keys by other frequencies; None where keys keep their rotation."""
    scaling = family.manifest().get("rotary_scaling")
    if not isinstance(scaling, Mapping) or scaling["rope_type"] != "longrope":
        return None
    return int(scaling["original_max_position_embeddings"])


def last_logits(head: Head, x_BTD: torch.Tensor) -> torch.Tensor:
    """Logits of the last token, float32 ``[B, V]``; where the vocabulary is sharded, gathered on every rank.

    Args:
        head: the model's head.
        x_BTD: the residual stream, ``[B, T, D]``.
    """
    if head.region is None:
        return head.logits(x_BTD[:, -1:])[:, 0].float()
    weight_VD, bias_V, _ = head.local_rows()
    rows = head.weight.shape[0]
    own_BV = x_BTD.new_zeros(len(x_BTD), rows, dtype=torch.float32)
    own_BV[:, : len(weight_VD)] = soft_cap(
        F.linear(head.features(x_BTD[:, -1]), weight_VD, bias_V).float(), head.softcap
    )
    # Each row is nonzero on one rank, so the sum over ranks is exact.
    whole_VB = own_BV.new_zeros(rows * head.region.size, len(x_BTD))
    whole_VB[head.region.rank * rows : (head.region.rank + 1) * rows] = own_BV.t()
    return head.region.all_reduce(whole_VB)[: head.vocabulary].t().contiguous()


def _extend(module: nn.Module, x_BTD: torch.Tensor, past: Any, positions_BT: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Run an item on new tokens; returns its output and its cache of all tokens."""
    if isinstance(module, SelfAttention | RoutedBlock):
        extended: tuple[torch.Tensor, Any] = module.extend(x_BTD, past, positions_BT)
        return extended
    run = module.plain if isinstance(module, ActiveTokens) else module
    y_BTD: torch.Tensor = output_of(run(x_BTD))
    return y_BTD, None


def _after_exit(
    module: nn.Module, before_BTD: torch.Tensor, after_BTD: torch.Tensor, exited_BT: torch.Tensor
) -> torch.Tensor:
    """``exited_BT`` with the tokens that exit at the item's exit, where it has one."""
    exit_ = module._modules.get("exit")
    if not isinstance(exit_, Exit):
        return exited_BT
    leaves_BT: torch.Tensor = exit_(before_BTD, after_BTD, None, exited_BT == 0)[0]
    return exited_BT + leaves_BT.to(exited_BT.dtype)
