"""Rotary positions of Megatron-core's decoders, from its arguments and to them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._common.document import finite_number, short_repr
from ..io.errors import UnsupportedError
from .arguments import number_of
from .model_sizes import MEGATRON_SCALING, unlike_llama3

Args = Mapping[str, Any]
# Of YaRN: field of a manifest, argument of latent attention, Megatron-core's default of it.
LATENT_YARN = (
    ("factor", "rotary_scaling_factor", 40.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("beta_fast", "beta_fast", 32.0),
    ("beta_slow", "beta_slow", 1.0),
)
# Of other attention; the factor has the argument of latent attention.
YARN = (LATENT_YARN[0], *((field, f"yarn_{name}", default) for field, name, default in LATENT_YARN[1:]))
# What Megatron-LM sets for ``--enable-gpt-oss``.
GPT_OSS_YARN: Args = {
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 131072,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": False,
}


def rotary_of_args(path: str, args: Args) -> dict[str, Any]:
    """The fields of a manifest's ``model``: base, scaling, and the rotated share of a head.

    Args:
        path: the checkpoint, for messages.
        args: its arguments.

    Raises:
        UnsupportedError: a scaling that DynMo does not have.
    """
    found: dict[str, Any] = {"rotary_base": number_of(path, args, "rotary_base") or 10000.0, "rotary_scaling": None}
    if args.get("multi_latent_attention"):
        # None is the default of its configuration.
        if (args.get("rope_type") or "yarn") == "yarn":
            found["rotary_scaling"] = _yarn(path, args, LATENT_YARN)
        elif args.get("mscale_all_dim") and (number_of(path, args, "rotary_scaling_factor") or 40) > 1:
            raise UnsupportedError(f"{path}: mscale_all_dim {args['mscale_all_dim']} with rope_type rope: must be 0")
        return found
    if args.get("enable_gpt_oss"):
        found["rotary_scaling"] = _yarn(path, GPT_OSS_YARN, YARN)
    elif args.get("position_embedding_type") == "yarn":
        found["rotary_scaling"] = _yarn(path, args, YARN)
    elif args.get("use_rope_scaling"):
        found["rotary_scaling"] = {**MEGATRON_SCALING, "factor": number_of(path, args, "rope_scaling_factor") or 8.0}
    elif (factor := number_of(path, args, "rotary_seq_len_interpolation_factor")) not in (None, 1.0):
        found["rotary_scaling"] = {"rope_type": "linear", "factor": factor}
    share = number_of(path, args, "rotary_percent")
    if share not in (None, 1.0):
        found["rotary_fraction"] = share
    return found


def _yarn(path: str, args: Args, names: tuple[tuple[str, str, float], ...]) -> dict[str, Any] | None:
    """YaRN; None where its factor is 1, which changes nothing."""
    scaling: dict[str, Any] = {"rope_type": "yarn"}
    for field, name, default in names:
        value = args.get(name)
        number = finite_number(default if value is None else value)
        if number is None or number <= 0:
            raise UnsupportedError(f"{path}: {name} = {short_repr(value)}: must be a positive number")
        scaling[field] = int(number) if isinstance(default, int) else float(number)
    one, other = (number_of(path, args, name) for name in ("mscale", "mscale_all_dim"))
    one, other = 1.0 if one is None else one, 0.0 if other is None else other
    if scaling["factor"] <= 1:
        return None
    if other:
        scaling["mscale_all_dim"] = other
    if one and other:
        scaling["mscale"] = one
    elif _magnitude(scaling["factor"], one, other) != _magnitude(scaling["factor"], 1.0, 0.0):
        scaling["attention_factor"] = _magnitude(scaling["factor"], one, other)
    if args.get("yarn_correction_range_round_to_int") is False and names is YARN:
        scaling["truncate"] = False
    return scaling


def _magnitude(factor: float, one: float, other: float) -> float:
    """The factor on cosine and sine; a weight of 0 gives 1."""
    return (0.1 * one * math.log(factor) + 1) / (0.1 * other * math.log(factor) + 1)


def rotary_args(model: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-LM.

    Args:
        model: the ``model`` of a manifest.
        own: its fields, with defaults.

    Raises:
        UnsupportedError: a scaling that Megatron-core does not have.
    """
    scaling, latent = own["rotary_scaling"], bool(model.get("kv_lora_rank"))
    kind = None if scaling is None else scaling["rope_type"]
    args: dict[str, Any] = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": own["rotary_base"],
        "rotary_percent": own["rotary_fraction"],
        "rotary_interleaved": False,
    }
    if latent:
        args["rope_type"] = "yarn" if kind == "yarn" else "rope"
    if kind == "yarn":
        return {**args, **_yarn_args(scaling, latent)}
    if kind is None:
        return args
    if latent or kind not in ("llama3", "linear"):
        raise UnsupportedError(
            f"Megatron-core: rotary scaling {kind} is unsupported, only {'yarn' if latent else 'llama3, linear, yarn'};"
            " use --to hf or native"
        )
    if kind == "linear":
        return {**args, "rotary_seq_len_interpolation_factor": scaling["factor"]}
    if unlike := unlike_llama3(scaling):
        raise UnsupportedError(
            f"Megatron-core: rotary scaling {short_repr(unlike)} is not supported, only {MEGATRON_SCALING}; use --to "
            "hf or native"
        )
    return {**args, "use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}


def _yarn_args(scaling: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    names = LATENT_YARN if latent else YARN
    one, other = scaling.get("mscale"), scaling.get("mscale_all_dim")
    factor, stated = float(scaling["factor"]), scaling.get("attention_factor")
    # Both weights are used together; one alone leaves the factor on cosine and sine as it is.
    weights = (one, other) if one and other else (1.0, 0.0)
    if other and not one:
        raise UnsupportedError(
            "rotary scaling yarn with mscale_all_dim and without mscale: Megatron-core has both only"
        )
    if stated is not None and not math.isclose(stated, _magnitude(factor, *weights), rel_tol=1e-9):
        if other or factor <= 1:
            raise UnsupportedError(f"rotary scaling attention_factor {stated}: Megatron-core computes it from mscale")
        weights = ((stated - 1) / (0.1 * math.log(factor)), 0.0)
    args = {name: scaling.get(field) or default for field, name, default in names}
    args |= {"mscale": weights[0], "mscale_all_dim": weights[1]}
    truncate = scaling.get("truncate", True)
    if latent and not truncate:
        raise UnsupportedError("rotary scaling yarn with truncate = False: Megatron-core's latent attention rounds")
    own = {"position_embedding_type": "yarn", "yarn_correction_range_round_to_int": truncate}
    return args if latent else {**args, **own}
