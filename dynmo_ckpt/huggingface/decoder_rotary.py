"""Rotary positions of transformers' decoders: base, scaling and rotated share, both ways. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._common.document import finite_number, short_repr
from ..io.errors import CorruptError, UnsupportedError, short_names

Config = Mapping[str, Any]
LISTS = ("short_factor", "long_factor")
# Fields of each type of rotary scaling: those that it must have, and those that it may have.
ROTARY_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "longrope": ((*LISTS, "factor", "original_max_position_embeddings"), ("attention_factor",)),
}
TRAINED = "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class RotaryRules:
    """What an architecture reads.

    Attributes:
        types: types of scaling that it accepts.
        fraction: whether it rotates a share of each head of ``partial_rotary_factor``.
        default: the scaling of a configuration without one.
        renamed: second names of types.
        local_base: key of the base of sliding layers, where these have parameters of their own.
    """

    types: Sequence[str] = tuple(each for each in ROTARY_FIELDS if each != "longrope")
    fraction: bool = False
    default: Mapping[str, Any] | None = None
    renamed: Mapping[str, str] | None = None
    local_base: str = "rope_local_base_freq"


def rotary_fields(config: Config, positions: int, rules: RotaryRules) -> dict[str, Any]:
    """The ``rotary_base``, ``rotary_scaling`` and ``rotary_fraction`` of a model.

    Args:
        config: a configuration with the defaults of transformers.
        positions: its number of positions.
        rules: of the architecture.

    Raises:
        CorruptError: an invalid or contradictory value.
        UnsupportedError: a scaling that the architecture or DynMo does not implement.
    """
    found = [config[name] for name in ("rope_scaling", "rope_parameters") if config[name]] or [rules.default or {}]
    if any(not isinstance(each, dict) for each in found):
        raise CorruptError("config.json: rope_scaling and rope_parameters must be objects")
    rope: dict[str, Any] = {}
    for each in found:
        # Older releases of transformers write `type`.
        named = ({"rope_type": each["type"]} if "type" in each else {}) | each
        differing = sorted(key for key in rope.keys() & named.keys() if rope[key] != named[key])
        if differing:
            raise CorruptError(f"config.json: rope_scaling and rope_parameters have different {short_names(differing)}")
        rope |= named
    rope.pop("type", None)
    fraction = rope.pop("partial_rotary_factor", config["partial_rotary_factor"])
    if fraction is None and config.get("rotary_dim"):
        fraction = _positive(config["rotary_dim"], "rotary_dim") / config["head_dim"]
    if not rules.fraction and fraction not in (None, 1):
        raise UnsupportedError(
            f"partial_rotary_factor = {short_repr(fraction)}: transformers ignores it for this model_type and rotates "
            "complete heads, other programs do not; state 1 in a copy of config.json where that is meant"
        )
    if fraction is not None and not 0 < _positive(fraction, "partial_rotary_factor") <= 1:
        raise CorruptError(f"config.json: partial_rotary_factor must be at most 1, found {short_repr(fraction)}")
    base = rope.pop("rope_theta", config["rope_theta"])
    scaling = _scaling_of_config(rope, config, positions, rules)
    return {"rotary_base": base, "rotary_scaling": scaling, "rotary_fraction": 1.0 if fraction is None else fraction}


def local_rotary_fields(config: Config, positions: int, rules: RotaryRules) -> dict[str, Any]:
    """As :func:`rotary_fields`, of a Gemma 3 or OLMo 3, which have other parameters in sliding layers.

    Args:
        config: a configuration with the defaults of transformers.
        positions: its number of positions.
        rules: of the architecture.

    Raises:
        CorruptError: an invalid or contradictory value.
        UnsupportedError: a scaling that the architecture or DynMo does not implement.
    """
    stated = config["rope_parameters"] or {}
    if not isinstance(stated, dict) or stated.keys() - {FULL, SLIDING}:
        raise UnsupportedError(
            f"rope_parameters {short_repr(stated)}: must have the parameters of {FULL} and {SLIDING} layers"
        )
    full, local = ({**(stated.get(name) or {})} for name in (FULL, SLIDING))
    full |= config["rope_scaling"] or {}
    local.setdefault("rope_theta", config[rules.local_base])
    # For parameters of layer types, transformers reads the number of trained positions in them alone.
    own = {**config, "rope_scaling": None, TRAINED: None}
    fields = rotary_fields({**own, "rope_parameters": full}, positions, rules)
    of_local = rotary_fields({**own, "rope_parameters": local}, positions, rules)
    if of_local == fields:
        return fields
    if of_local["rotary_scaling"] is not None:
        raise UnsupportedError("rope_parameters.sliding_attention: DynMo scales the rotation of full_attention only")
    return {**fields, "local_rotary_base": of_local["rotary_base"]}


def rotary_config(own: Mapping[str, Any], model: Config, rules: RotaryRules) -> dict[str, Any]:
    """The keys of a configuration.

    Args:
        own: the fields of the model, with defaults.
        model: the ``model`` of a manifest.
        rules: of the architecture.

    Raises:
        UnsupportedError: the architecture has no such scaling.
    """
    base, scaling = float(own["rotary_base"]), _scaling_of_model(own["rotary_scaling"], model)
    kind = "default" if scaling is None else scaling["rope_type"]
    if kind not in rules.types:
        raise UnsupportedError(f"rotary scaling {kind}: the architecture has {', '.join(rules.types)} only")
    fraction = {"partial_rotary_factor": own["rotary_fraction"]} if rules.fraction else {}
    # transformers reads the first two before release 5, the third since then.
    config = {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": base, **fraction},
        **fraction,
    }
    if kind == "longrope" and scaling is not None:
        config[TRAINED] = scaling[TRAINED]
    return config


def local_rotary_config(own: Mapping[str, Any], model: Config, rules: RotaryRules) -> dict[str, Any]:
    """As :func:`rotary_config`, of a Gemma 3 or OLMo 3.

    Args:
        own: the fields of the model, with defaults.
        model: the ``model`` of a manifest.
        rules: of the architecture.

    Raises:
        UnsupportedError: the architecture has no such scaling.
    """
    config = rotary_config(own, model, rules)
    full, base = config["rope_parameters"], own["local_rotary_base"]
    local = full if base is None else {"rope_type": "default", "rope_theta": float(base)}
    config["rope_parameters"] = {FULL: full, SLIDING: local}
    # OLMo 3 has no key for another base of sliding layers.
    return config if rules.local_base == "rope_theta" else {**config, rules.local_base: local["rope_theta"]}


def _scaling_of_config(
    rope: dict[str, Any], config: Config, positions: int, rules: RotaryRules
) -> dict[str, Any] | None:
    """The scaling as a manifest has it, from the parameters of a configuration without base and fraction."""
    kind = rope.pop("rope_type", "default")
    kind = (rules.renamed or {}).get(str(kind), kind)
    if not isinstance(kind, str) or kind not in rules.types:
        raise UnsupportedError(f"rope_type {short_repr(kind)}: must be one of {', '.join(rules.types)}")
    if kind in ("llama3", "yarn", "dynamic", "longrope"):
        rope.setdefault(TRAINED, positions)
        if config[TRAINED] is not None:
            rope[TRAINED] = config[TRAINED]
    required, optional = ROTARY_FIELDS[kind]
    # transformers writes the optional fields as null where they are not given.
    rope = {name: value for name, value in rope.items() if name not in optional or value is not None}
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = positions / _positive(rope[TRAINED], TRAINED)
    if kind == "dynamic" and rope[TRAINED] != positions:
        raise UnsupportedError(
            f"rope_type dynamic: {TRAINED} must be max_position_embeddings {positions}, which transformers"
            " reads instead"
        )
    unlike = sorted((set(required) - rope.keys()) | (rope.keys() - {*required, *optional}))
    if unlike:
        raise UnsupportedError(f"rope_type {kind}: missing or unknown fields: {short_names(unlike)}")
    for name, value in rope.items():
        numbers = value if name in LISTS and isinstance(value, list) else [value]
        if name == "truncate" and isinstance(value, bool):
            continue
        if not numbers:
            raise CorruptError(f"config.json: {name} of rope_scaling is empty")
        for number in numbers:
            _positive(number, name)
    return None if kind == "default" else {"rope_type": kind, **rope}


def _positive(value: Any, name: str) -> float:
    number = None if isinstance(value, bool) else finite_number(value)
    if number is None or number <= 0:
        raise CorruptError(
            f"config.json: the fields of rope_scaling must be positive numbers, found {short_repr({name: value})}"
        )
    return number


def _scaling_of_model(scaling: Config | None, model: Config) -> dict[str, Any] | None:
    """The scaling as transformers has it, whose ``dynamic`` reads the number of positions."""
    if scaling is None or scaling.get("rope_type") != "dynamic":
        return None if scaling is None else dict(scaling)
    trained, positions = scaling[TRAINED], model["max_position_embeddings"]
    if trained != positions:
        raise UnsupportedError(
            f"rotary scaling dynamic: transformers computes from max_position_embeddings {positions}; the model was"
            f" trained with {trained} positions"
        )
    return {name: value for name, value in scaling.items() if name != TRAINED}
