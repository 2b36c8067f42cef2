"""Where the modules of a Hugging Face model have the projections of our adapters.

Most decoders have a module for each projection. Some have several in one, so that one adapter updates them together::

    q, v of rank r                        one module of rank 2r
    A_q [r, I], A_v [r, I]                A = A_q | A_v       [2r, I], rows one after the other
    B_q [Q, r], B_v [V, r]                B = B_q  0          [Q + K + V, 2r]
                                              0    0
                                              0    B_v

The scale alpha / rank stays the same with ``n`` times alpha for ``n`` times the rank, which PEFT reads by module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._common.errors import UsageError
from ...config.schema import GATED_ACTIVATIONS
from ...models.lora import LoraSettings

Modules = Mapping[str, tuple[str, ...]]
QKV = ("q_proj", "k_proj", "v_proj")
GPT2_FIELDS = {"position_embedding": "learned", "normalization": "layernorm", "norm_placement": "pre"}
GPT2_ABSENT = ("sliding_window", "num_experts", "qk_norm", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, kw_only=True)
class PeftLayout:
    """The modules of an architecture.

    Attributes:
        layers: path of the list of layers.
        modules: path of a module in a layer -> projections that are its rows, in their order.
        by_path: whether ``target_modules`` has paths; else last names, which suffice where they are unique.
        transposed: whether weights are ``[I, O]`` (GPT-2's Conv1D).
    """

    layers: str = "model.layers"
    modules: Modules
    by_path: bool = False
    transposed: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)


SEPARATE: Modules = {
    **{f"self_attn.{name}": (name,) for name in (*QKV, "o_proj")},
    **{f"mlp.{name}": (name,) for name in ("gate_proj", "up_proj", "down_proj")},
}
PHI3: Modules = {
    "self_attn.qkv_proj": QKV,
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
GPT2: Modules = {
    "attn.c_attn": QKV,
    "attn.c_proj": ("o_proj",),
    "mlp.c_fc": ("fc1",),
    "mlp.c_proj": ("down_proj",),
}


def layout_of(model: Mapping[str, Any], source: Mapping[str, Any] | None) -> PeftLayout:
    """The layout of the architecture that ``dynmo-ckpt convert --to hf`` writes for a model.

    Args:
        model: ``model`` of a manifest.
        source: ``source`` of the manifest: the configuration that the model was read from, or None.

    Raises:
        UsageError: no architecture of transformers has these adapters.
    """
    if model["activation"] not in GATED_ACTIVATIONS:
        is_plain = all(model.get(name, value) == value for name, value in GPT2_FIELDS.items())
        if model["family"] != "gpt" or not is_plain or any(model.get(name) for name in GPT2_ABSENT):
            raise UsageError(
                f"a {model['family']} with an MLP that is not gated has no modules for its adapters in transformers,"
                " unless it is a GPT-2; use --merge"
            )
        return PeftLayout(layers="transformer.h", modules=GPT2, by_path=True, transposed=True, rows=_rows(model))
    config = (source or {}).get("config") or {}
    scaling = (model.get("rotary_scaling") or {}).get("rope_type")
    is_phi = model.get("rotary_fraction", 1.0) != 1.0 or scaling == "longrope" or config.get("model_type") == "phi3"
    return PeftLayout(modules=PHI3 if is_phi else SEPARATE, rows=_rows(model))


def _rows(model: Mapping[str, Any]) -> dict[str, int]:
    """The output features of each projection that shares a module."""
    heads, inner = model["num_attention_heads"], model["ffn_hidden_size"]
    width = model.get("head_dim") or model["hidden_size"] // heads
    groups = (model.get("num_key_value_heads") or heads) * width
    return {"q_proj": heads * width, "k_proj": groups, "v_proj": groups, "gate_proj": inner, "up_proj": inner}


def peft_tensors(
    layout: PeftLayout, settings: LoraSettings, layer: int, adapters: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The tensors of a layer's adapters by the names of PEFT.

    Args:
        layout: modules of the architecture.
        settings: the adapters.
        layer: number of the layer.
        adapters: projection -> ``lora_A`` ``[r, I]`` and ``lora_B`` ``[O, r]``.
    """
    tensors = {}
    for module, projections in layout.modules.items():
        targets = [name for name in projections if name in settings.targets]
        if not targets:
            continue
        name = f"base_model.model.{layout.layers}.{layer}.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.cat([adapters[each]["lora_A"] for each in targets])
        tensors[f"{name}.lora_B.weight"] = _blocks(layout, projections, targets, adapters)
    return tensors


def _blocks(
    layout: PeftLayout,
    projections: Sequence[str],
    targets: Sequence[str],
    adapters: Mapping[str, Mapping[str, torch.Tensor]],
) -> torch.Tensor:
    """The matrices B of a module on the diagonal, with rows of zeros for projections without an adapter."""
    if len(projections) == 1:
        return adapters[targets[0]]["lora_B"].contiguous()
    some = adapters[targets[0]]["lora_B"]
    rank = some.shape[1]
    whole = some.new_zeros(sum(layout.rows[each] for each in projections), rank * len(targets))
    row = 0
    for each in projections:
        if each in targets:
            column = rank * targets.index(each)
            whole[row : row + layout.rows[each], column : column + rank] = adapters[each]["lora_B"]
        row += layout.rows[each]
    return whole


def peft_config(layout: PeftLayout, settings: LoraSettings, base_model: str | None) -> dict[str, Any]:
    """The contents of ``adapter_config.json``.

    Args:
        layout: modules of the architecture.
        settings: the adapters.
        base_model: name or path of the base model, or None.
    """
    used = {name: [each for each in own if each in settings.targets] for name, own in layout.modules.items()}
    used = {name if layout.by_path else name.rpartition(".")[2]: own for name, own in used.items() if own}
    ranks = {name: settings.rank * len(own) for name, own in used.items() if len(own) > 1}
    alphas = {name: settings.alpha * len(own) for name, own in used.items() if len(own) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0,
        "target_modules": list(used),
        "bias": "none",
        "fan_in_fan_out": layout.transposed,
        "inference_mode": True,
    }
