"""Reads the name maps of ``maps/`` and applies them: every tensor is mapped, or the conversion is refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from .faults import UnsupportedError
from .formats._document import parse_json
from .patterns import Axes, parse_axes, rearrange
from .views import Tensor


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One tensor's name and layout on both sides."""

    ours: str
    theirs: str
    our_axes: Axes
    their_axes: Axes


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """A table of ``maps/``: rules with ``{i}`` for a layer's number, and foreign names that hold no weights."""

    rules: tuple[Rule, ...]
    prefix: str
    ignored: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """A foreign name of another release as the table writes it."""
        for old, new in self.aliases:
            name = name.replace(old, new)
        return name

    def for_layers(self, num_layers: int) -> list[Rule]:
        """The rules of a model of ``num_layers`` layers, in layer order."""
        before: list[Rule] = []
        blocks: list[Rule] = []
        after: list[Rule] = []
        for rule in self.rules:
            if "{i}" in rule.ours:
                blocks.append(rule)
            else:
                (after if blocks else before).append(rule)
        numbered = [
            Rule(
                ours=rule.ours.replace("{i}", str(i)),
                theirs=rule.theirs.replace("{i}", str(i)),
                our_axes=rule.our_axes,
                their_axes=rule.their_axes,
            )
            for i in range(num_layers)
            for rule in blocks
        ]
        return [*before, *numbered, *after]

    def ignored_names(self, num_layers: int) -> set[str]:
        """Foreign names that may be there and hold nothing to convert."""
        return {name.replace("{i}", str(i)) for name in self.ignored for i in range(num_layers)}


def load_map(name: str, variant: str = "") -> NameMap:
    """The table ``maps/NAME.json``; ``variant`` chooses among layouts that the table names by a word."""
    document = parse_json(resources.files(__package__).joinpath("maps", f"{name}.json").read_bytes())
    prefix = document["prefix"]
    words = document["variants"][variant] if variant else {}
    rules = tuple(
        Rule(
            ours=row["ours"],
            theirs=(prefix if row.get("prefixed", True) else "") + row["theirs"],
            our_axes=parse_axes(row["our_axes"]),
            their_axes=parse_axes(words.get(row["their_axes"], row["their_axes"])),
        )
        for row in document["tensors"]
    )
    return NameMap(
        rules=rules,
        prefix=prefix,
        ignored=tuple(prefix + name for name in document["ignored"]),
        aliases=tuple((old, new) for old, new in document.get("aliases", ())),
    )


def axis_sizes(model: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """Sizes of the maps' axes for a GPT; ``v`` is ``vocab_size``, the padded or the true one as the side asks."""
    heads = model["num_attention_heads"]
    return {
        "v": vocab_size,
        "s": model["max_position_embeddings"],
        "h": model["hidden_size"],
        "f": model["ffn_hidden_size"],
        "n": heads,
        "t": 3,
        "d": model["hidden_size"] // heads,
    }


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A tensor under its new name: content with one dimension an axis, and the shape it is stored under."""

    name: str
    source_name: str
    content: Tensor
    shape: tuple[int, ...]


def to_theirs(
    name_map: NameMap, model: Mapping[str, Any], tensors: Mapping[str, Tensor], tied: Mapping[str, str]
) -> list[Mapped]:
    """Map our tensors to the foreign names and layouts; the vocabulary's padding is cut off, tied names are left out.

    Raises:
        UnsupportedError: a tensor that no rule maps, a rule whose tensor is missing, or a shape that does not fit.
    """
    sizes = axis_sizes(model, model["padded_vocab_size"])
    target_sizes = axis_sizes(model, model["vocab_size"])
    rules = [rule for rule in name_map.for_layers(model["num_layers"]) if rule.ours not in tied]
    _refuse_unmatched({rule.ours for rule in rules}, set(tensors))
    result = []
    for rule in rules:
        tensor = tensors[rule.ours]
        content, shape = rearrange(tensor, rule.our_axes, rule.their_axes, sizes, target_sizes, rule.ours)
        result.append(Mapped(name=rule.theirs, source_name=rule.ours, content=content, shape=shape))
    return result


def to_ours(
    name_map: NameMap, model: Mapping[str, Any], tensors: Mapping[str, Tensor], tied: Mapping[str, str]
) -> list[Mapped]:
    """Map foreign tensors to our names and layouts; the vocabulary is padded with zeros.

    A foreign copy of a tied tensor is left out; names may lack the map's prefix, as those of a bare model do.

    Raises:
        UnsupportedError: as :func:`to_theirs`.
    """
    sizes = axis_sizes(model, model["vocab_size"])
    target_sizes = axis_sizes(model, model["padded_vocab_size"])
    rules = name_map.for_layers(model["num_layers"])
    known = {rule.theirs for rule in rules} | name_map.ignored_names(model["num_layers"])
    named = {name if name in known else name_map.prefix + name: tensor for name, tensor in tensors.items()}
    skipped = name_map.ignored_names(model["num_layers"]) | {rule.theirs for rule in rules if rule.ours in tied}
    rules = [rule for rule in rules if rule.ours not in tied]
    _refuse_unmatched({rule.theirs for rule in rules}, set(named) - skipped)
    result = []
    for rule in rules:
        content, shape = rearrange(named[rule.theirs], rule.their_axes, rule.our_axes, sizes, target_sizes, rule.theirs)
        result.append(Mapped(name=rule.ours, source_name=rule.theirs, content=content, shape=shape))
    return result


def _refuse_unmatched(wanted: set[str], found: set[str]) -> None:
    for names, what in ((found - wanted, "no rule of the map takes"), (wanted - found, "the input lacks")):
        if names:
            shown = ", ".join(sorted(names)[:5])
            raise UnsupportedError(f"{what} {len(names)} tensors: {shown}{', ...' if len(names) > 5 else ''}")
