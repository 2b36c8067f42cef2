"""Checks every key of a ``config.json``: it is mapped, changes no logit, or is refused. Pure.

The table ``maps/config_keys.json`` has, for each ``model_type``:

* ``mapped``: keys that ``models`` reads, each with the default of transformers;
* ``aliases``: second names of mapped keys, which transformers reads too;
* ``needs``: keys that change the computation, with the values that DynMo's models implement;
* ``irrelevant``: keys that change no logit, by reason;
* ``lacks``: values of keys that select a variant, with what DynMo's models lack for it;
* ``like``: a ``model_type`` whose keys it has, too; its own lists have precedence, and ``without`` leaves keys out.

``model_type_aliases`` has other names of a ``model_type``, whose code computes the same. ``refused`` has what DynMo's
models lack for others, and the nearest ``model_type``.

An unknown key is refused, as a tensor without a map is: a dropped setting would give a model that computes something
else, without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

from .. import maps
from .._common.document import parse_json, short_repr
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names

Config = Mapping[str, Any]
# The limit of the format (num_layers of a manifest).
MAX_LAYERS = 100_000


@cache
def key_table() -> Mapping[str, Any]:
    """The contents of ``maps/config_keys.json``; each ``model_type`` has all of its keys."""
    table: dict[str, Any] = parse_json(resources.files(maps).joinpath("config_keys.json").read_bytes())
    types: dict[str, Any] = {}
    for name, own in table["model_types"].items():
        # In the order of the table: a type is after the one whose keys it has.
        types[name] = _with_keys_of(types[own["like"]], own) if "like" in own else own
    return {**table, "model_types": types}


def _with_keys_of(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a ``model_type`` whose keys are those of ``base`` and its own."""
    merged: dict[str, Any] = {}
    stated = {key for name in ("mapped", "needs", "aliases") for key in own.get(name, ())}
    stated |= {*own.get("without", ()), *irrelevant_keys({"irrelevant": own.get("irrelevant", {})})}
    for name in ("mapped", "needs", "aliases"):
        left = {key: value for key, value in base.get(name, {}).items() if key not in stated}
        merged[name] = left | own.get(name, {})
    reasons = {reason: [key for key in keys if key not in stated] for reason, keys in base["irrelevant"].items()}
    for reason, keys in own.get("irrelevant", {}).items():
        reasons[reason] = [*reasons.get(reason, ()), *keys]
    return {**merged, "irrelevant": reasons}


def complete_config(config: Config, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The mapped keys of a configuration, with the defaults of transformers for missing ones.

    Args:
        config: the contents of a ``config.json``.
        ignored: shell patterns of keys that are not checked; mapped keys and their aliases are read nevertheless.

    Raises:
        CorruptError: a key and its alias have different values.
        UnsupportedError: an unknown ``model_type`` or key, or a value that DynMo's models do not implement.
    """
    table = key_table()
    kind = table["model_types"].get(str(config.get("model_type")))
    if kind is None:
        raise UnsupportedError(_unknown_type(config))
    for key, reasons in kind.get("lacks", {}).items():
        if (value := str(config.get(key))) in reasons:
            raise UnsupportedError(f"{key} {value}: DynMo's models lack {reasons[value]}")
    mapped: Mapping[str, Any] = kind["mapped"]
    aliases: Mapping[str, str] = kind.get("aliases", {})
    found = {
        key: value for key, value in config.items() if key in mapped or key in aliases or not matches(key, ignored)
    }
    for alias, name in aliases.items():
        if alias in found and found.setdefault(name, found[alias]) != found[alias]:
            raise CorruptError(
                f"config.json: {alias} {short_repr(found[alias])} and {name} {short_repr(found[name])} are the same "
                "setting; they must be equal"
            )
    # A missing key has the default of transformers, which is the first value of the list.
    needs = {**table["every"]["needs"], **kind["needs"]}
    for key, values in needs.items():
        if found.get(key, values[0]) not in values:
            raise UnsupportedError(f"{key} = {short_name(found[key])}: DynMo implements {key} = {values[0]} only")
    known = {*mapped, *needs, *aliases, *irrelevant_keys(table["every"]), *irrelevant_keys(kind)}
    unknown = sorted(set(found) - known)
    if unknown:
        raise UnsupportedError(
            f"config.json: no rule for {short_names(unknown)}; an unknown key may change what the model computes; "
            "--ignore-config KEY ignores it"
        )
    return {**mapped, **{key: value for key, value in found.items() if key in mapped}}


def with_known_type(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the usual name of its ``model_type``."""
    usual = key_table()["model_type_aliases"].get(str(config.get("model_type")))
    return config if usual is None else {**config, "model_type": usual}


def _unknown_type(config: Config) -> str:
    """The message for another ``model_type``: the nearest one, what it does not have, and the remedy."""
    types: Mapping[str, Mapping[str, Any]] = key_table()["model_types"]
    own = str(config.get("model_type"))
    refused: Mapping[str, Sequence[str]] = key_table()["refused"]
    if own in refused:
        lacks, near = refused[own]
        return f"model_type {own}: DynMo's models lack {lacks}; the nearest one that is supported is {near}"

    def likeness(name: str) -> tuple[int, float]:
        """Shared keys less keys without a rule; then the likeness of the names."""
        known = {*types[name]["mapped"], *types[name]["needs"], *types[name].get("aliases", ())}
        return len(known & set(config)) - len(_without_rule(config, name)), SequenceMatcher(None, own, name).ratio()

    nearest = max(types, key=likeness)
    keys = _without_rule(config, nearest)
    lacking = f", which has no rule for {short_names(keys)}" if keys else ""
    return (
        f"model_type {short_repr(config.get('model_type'))}: must be one of {', '.join(types)}; the nearest one is "
        f"{nearest}{lacking}. Where it computes the same, state it as model_type in a copy of the directory; another "
        "architecture is a table (dynmo_ckpt/maps/README.md)"
    )


def _without_rule(config: Config, name: str) -> list[str]:
    table = key_table()
    kind = table["model_types"][name]
    every = {*table["every"]["needs"], *irrelevant_keys(table["every"]), *irrelevant_keys(kind)}
    return sorted(set(config) - {*kind["mapped"], *kind["needs"], *kind.get("aliases", ()), *every})


def irrelevant_keys(kind: Mapping[str, Any]) -> dict[str, str]:
    """The keys that change no logit, each with its reason."""
    return {key: reason for reason, keys in kind["irrelevant"].items() for key in keys}


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether ``key`` matches one of the shell patterns."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def size(config: Config, field: str) -> int:
    """A size of a configuration.

    Args:
        config: the configuration.
        field: its key; the unit is that of the key (layers, heads, elements, tokens).

    Raises:
        CorruptError: the value is not a positive integer, or a number of layers beyond that of the format.
    """
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptError(f"config.json: {field} must be a positive integer, found {short_repr(value)}")
    # Before lists with an entry per layer are made of it.
    if field.endswith(("layers", "n_layer")) and value > MAX_LAYERS:
        raise CorruptError(f"config.json: {field} must be at most {MAX_LAYERS:,}, found {short_repr(value)}")
    return value


def experts_per_token(config: Config, experts: str) -> int:
    """The number of experts that a token chooses, ``num_experts_per_tok``.

    Args:
        config: the configuration.
        experts: key of the number of experts.

    Raises:
        CorruptError: it is not a positive integer, or above the number of experts.
    """
    chosen, count = size(config, "num_experts_per_tok"), size(config, experts)
    if chosen > count:
        raise CorruptError(f"config.json: num_experts_per_tok {chosen:,} is above {experts}, {count:,}")
    return chosen
