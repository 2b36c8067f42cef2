"""The models of torchtitan: which it computes, the table of each in ``maps/``, and the names of older releases. Pure.

torchtitan's checkpoints have weights alone; what a model computes is in its Python configuration. So each field of a
manifest's ``model`` must be one that torchtitan's model code can compute, or the conversion is refused by name.
Queries and keys have the order of rows of Meta (a rotation pairs neighbors) in a Llama, and that of transformers in a
Qwen3 and a GPT-OSS. In a DeepSeek both projects pair neighbors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from .. import maps
from .._common.document import parse_json
from ..huggingface.models import architecture_of_model
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
from ..maps.decoder_fields import decoder_fields
from ..maps.features import features
from ..tensors.views import Tensor

# The bias of balancing without a loss, which torchtitan stores for every model with experts by default.
BIAS = re.compile(r"layers\.\d{1,9}\.moe\.expert_bias_E")
# What torchtitan's trainer saves next to weights and optimizer; older releases have the step as a tensor.
RUN_STATE = ("train_state.", "lr_scheduler.", "dataloader.")
PREDICTION = "mtp_layers."
PREDICTION_ITEMS = "mtp."


@dataclass(frozen=True, kw_only=True)
class TitanModel:
    """One of torchtitan's models.

    Attributes:
        map: the table of ``maps/``.
        variant: of the table.
        fields: fields of a decoder that must have a value.
        scalings: types of rotary scaling.
        windows: whether layers may have sliding windows.
    """

    map: str
    variant: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    scalings: tuple[str, ...] = ("yarn",)
    windows: bool = False


_PLAIN: Mapping[str, Any] = {"attention_bias": "none", "mlp_bias": False}
MODELS: Mapping[str, TitanModel] = {
    "llama": TitanModel(map="titan", variant="neighbors", fields=_PLAIN, scalings=("llama3", "yarn")),
    "qwen3": TitanModel(map="titan", variant="halves", fields=_PLAIN),
    "qwen3_moe": TitanModel(map="titan", variant="halves", fields=_PLAIN),
    "deepseek_v3": TitanModel(map="titan_deepseek", fields=_PLAIN),
    "deepseek_v2": TitanModel(map="titan_deepseek", fields=_PLAIN),
    "gpt_oss": TitanModel(map="titan_gpt_oss", fields={"attention_bias": "all", "swiglu_alpha": 1.702}, windows=True),
}


# Models with the tensors of another one, which are read alone: Mistral's own files have Meta's names too.
SAME_TENSORS = {"mistral": "llama"}


def titan_model(model: Mapping[str, Any]) -> TitanModel:
    """The model of torchtitan that has the tensors of a model.

    Args:
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: torchtitan has no such model, or stores its rows in another order.
    """
    kind, _ = architecture_of_model(model)
    kind = SAME_TENSORS.get(kind, kind)
    if kind not in MODELS:
        raise UnsupportedError(f"torchtitan has no {kind}, only {', '.join(MODELS)}")
    if not model.get("rotary_interleaved", True):
        raise UnsupportedError(
            f"torchtitan: the rotation of its {kind} pairs neighbors; the model has rotary_interleaved = False"
        )
    return MODELS[kind]


def check_computed(model: Mapping[str, Any]) -> None:
    """Check that torchtitan computes what a model computes.

    Args:
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: it does not; the message has the field and a remedy.
    """
    kind, _ = architecture_of_model(model)
    if kind not in MODELS:
        raise UnsupportedError(
            f"torchtitan: a {kind} is not written under torchtitan's names, only {', '.join(MODELS)}; use --to hf"
        )
    found, own = titan_model(model), decoder_fields(model)
    unlike = {name: own[name] for name, value in found.fields.items() if own[name] != value}
    if not found.windows and model.get("sliding_window") is not None:
        unlike["sliding_window"] = model["sliding_window"]
    # torchtitan scores a group of experts by its best two, as DeepSeek-V3 does; V2 scores it by the best one.
    if kind == "deepseek_v2" and model.get("moe_router_num_groups"):
        unlike["moe_router_num_groups"] = model["moe_router_num_groups"]
    unlike |= _unlike_scaling(kind, own["rotary_scaling"], found)
    for name, value in unlike.items():
        raise UnsupportedError(f"torchtitan: its {kind} does not compute {name} = {value}; use --to hf")


def _unlike_scaling(kind: str, scaling: Mapping[str, Any] | None, found: TitanModel) -> dict[str, Any]:
    """The part of a rotary scaling that torchtitan does not compute.

    Its YaRN does not scale the rotation. A GPT-OSS multiplies the scores by the square of ``0.1 ln(factor) + 1``, a
    DeepSeek by that of ``0.1 mscale ln(factor) + 1``, and a Llama or a Qwen3 by nothing.
    """
    if scaling is None:
        return {}
    name = scaling["rope_type"]
    if name not in found.scalings:
        return {"rotary_scaling": name}
    if name != "yarn":
        return {}
    # torchtitan ignores such a YaRN, and transformers applies it.
    if scaling["factor"] < 1:
        return {"rotary_scaling": f"yarn with the factor {scaling['factor']}"}
    attention, scales = scaling.get("attention_factor"), (scaling.get("mscale"), scaling.get("mscale_all_dim"))
    if kind == "gpt_oss":
        is_computed = attention is None and not any(scales)
    elif found.map == "titan_deepseek":
        is_computed = attention is None and scales[0] == scales[1] is not None
    else:
        is_computed = attention == 1
    stated = {"attention_factor": attention, "mscale": scales[0], "mscale_all_dim": scales[1]}
    return {} if is_computed else {"rotary_scaling": f"yarn with {stated}"}


def current_names(tensors: Mapping[str, Tensor], found: TitanModel) -> dict[str, Tensor]:
    """The tensors under the names of the current release.

    Args:
        tensors: by name, of any shape.
        found: the model, of which a DeepSeek has a matrix of queries outside of ``qkv_linear``.

    Raises:
        CorruptError: a tensor is in the input under the names of two releases.
    """
    document = parse_json(resources.files(maps).joinpath("titan_names.json").read_bytes())
    listed = [*document["rules"], *(document["grouped"] if found.map != "titan_deepseek" else ())]
    rules = [(re.compile(pattern), new) for pattern, new in listed]

    def renamed(name: str) -> str:
        return next((match.expand(new) for rule, new in rules if (match := rule.fullmatch(name))), name)

    current: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        known = renamed(name)
        if known in current:
            raise CorruptError(f"the input has {short_name(known)} twice, under names of two releases")
        current[known] = tensor
    return current


def titan_tensors(
    directory: Path, model: Mapping[str, Any], found: Mapping[str, Tensor], drop: Sequence[str]
) -> tuple[TitanModel, dict[str, Tensor]]:
    """The model of a checkpoint, and its tensors under current names.

    A bias for balancing that is zero has no effect: it is left out where the model has none, and added where the model
    has one and torchtitan's balancing was switched off.

    Args:
        directory: the input, for messages.
        model: the ``model`` of a manifest.
        found: the tensors by name, of any shape.
        drop: shell patterns of names that the user leaves out.

    Raises:
        CorruptError: a tensor is in the input under the names of two releases.
        UnsupportedError: another model, such a bias that is not zero, or layers of multi-token prediction.
    """
    try:
        titan = titan_model(model)
    except UnsupportedError as error:
        raise UnsupportedError(f"{directory}: has torchtitan's tensor names; config.json: {error}") from error
    tensors = current_names({name: each for name, each in found.items() if not name.startswith(RUN_STATE)}, titan)
    dropped = {name for name in tensors if any(fnmatchcase(name, pattern) for pattern in drop)}
    further = [name for name in tensors if name.startswith(PREDICTION) and name not in dropped]
    if further:
        raise UnsupportedError(
            f"{short_names(sorted(further))}: torchtitan's multi-token prediction reads the hidden state before the "
            f"final norm, DeepSeek's behind it; convert the model without it: --drop '{PREDICTION}*'"
        )
    biases = [name for name in tensors if BIAS.fullmatch(name)]
    if model.get("moe_router_enable_expert_bias"):
        return titan, tensors if biases else tensors | zero_biases(model)
    for name in biases:
        if name not in dropped and not _is_zero(tensors[name]):
            raise UnsupportedError(
                f"{short_name(name)}: is not zero, and the model's router has no bias, so it would choose other "
                "experts; train with load_balance_coeff = None, or leave the bias out: --drop '*.expert_bias_E'"
            )
    return titan, {name: tensor for name, tensor in tensors.items() if name not in biases}


def _is_zero(tensor: Tensor) -> bool:
    from ..tensors.equality import equal_bytes  # imports numpy, which most checkpoints do not need

    return len(tensor.shape) == 1 and tensor.dtype == "F32" and equal_bytes(tensor, _zeros(tensor.shape[0]))


def zero_biases(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """The biases ``[experts]`` of a model that was trained without them, by name.

    Args:
        model: the ``model`` of a manifest.
    """
    layers = [i for i in range(model["num_layers"]) if "experts" in features(model, i)]
    return {f"layers.{i}.moe.expert_bias_E": _zeros(model["num_experts"]) for i in layers}


def _zeros(size: int) -> Tensor:
    import numpy as np

    from ..tensors.computed import constant_tensor

    return constant_tensor("expert_bias_E", np.zeros(size, np.float32))
