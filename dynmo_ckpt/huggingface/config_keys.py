"""Accounts for every key of a ``config.json``: mapped, known to change no logit, or refused. Pure.

The table ``maps/config_keys.json`` has, for every ``model_type``:

* ``mapped``: keys that ``models`` reads, each with the value that transformers takes where the key is absent;
* ``aliases``: second names of mapped keys, which transformers reads as well;
* ``needs``: keys that change what is computed, with the values that our models compute;
* ``irrelevant``: keys that change no logit, under the reason.

A key that is nowhere in the table is refused, as a tensor is that no map takes: a setting that is dropped gives a model
that computes something else, and no message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

from .. import maps
from .._common.document import parse_json, short_repr
from ..errors import CorruptError, UnsupportedError

Config = Mapping[str, Any]


@cache
def key_table() -> Mapping[str, Any]:
    """The content of ``maps/config_keys.json``."""
    table: Mapping[str, Any] = parse_json(resources.files(maps).joinpath("config_keys.json").read_bytes())
    return table


def complete_config(config: Config, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The mapped keys of a configuration, with transformers' values for those that it does not have.

    Args:
        config: the content of a ``config.json``.
        ignored: shell patterns of keys that are left out without a check.

    Raises:
        CorruptError: a key and its second name have different values.
        UnsupportedError: an unknown ``model_type``, an unknown key, or a value that our models do not compute.
    """
    table = key_table()
    kind = table["model_types"].get(str(config.get("model_type")))
    if kind is None:
        raise UnsupportedError(
            f"model_type {short_repr(config.get('model_type'))}: known are {', '.join(table['model_types'])}"
        )
    mapped: Mapping[str, Any] = kind["mapped"]
    found = {key: value for key, value in config.items() if key in mapped or not matches(key, ignored)}
    for alias, name in kind.get("aliases", {}).items():
        if alias in found and found.setdefault(name, found[alias]) != found[alias]:
            raise CorruptError(
                f"config.json: {alias} {short_repr(found[alias])} and {name} {short_repr(found[name])} are "
                "the same setting"
            )
    needs = {**table["every"]["needs"], **kind["needs"]}
    for key, values in needs.items():
        if found.get(key, values[0]) not in values:
            raise UnsupportedError(f"{key} = {str(found[key])[:80]}: our model computes {key} = {values[0]} only")
    known = {*mapped, *needs, *kind.get("aliases", ()), *irrelevant_keys(table["every"]), *irrelevant_keys(kind)}
    unknown = sorted(set(found) - known)
    if unknown:
        raise UnsupportedError(
            f"config.json: no rule takes {', '.join(key[:80] for key in unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''}; "
            "a key that may change what the model computes is not dropped; --ignore-config KEY leaves it out"
        )
    return {**mapped, **{key: value for key, value in found.items() if key in mapped}}


def irrelevant_keys(kind: Mapping[str, Any]) -> dict[str, str]:
    """The keys that change no logit, each with the reason."""
    return {key: reason for reason, keys in kind["irrelevant"].items() for key in keys}


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a shell pattern fits ``key``."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)
