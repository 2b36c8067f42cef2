"""Reads the name maps of ``maps/`` and applies them: every tensor is mapped, or the conversion is refused. Pure.

A row of a table links a tensor of ours, or a part of one along an axis, with one of theirs, or a part of one; so rows
of query, key and value that others keep apart, and gate and up that others keep together, are data like any name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import groupby
from typing import Any

from .._common.document import parse_json
from ..errors import UnsupportedError
from ..tensors.views import Tensor, concatenate
from .axes import Axes, expand, parse_axes, stored_shape

Part = tuple[str, str]
Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One row: names and layouts on both sides.

    Attributes:
        ours, theirs: the names, ``{i}`` for a layer's number, ``{j}`` for an expert's.
        our_axes, their_axes: the layouts.
        our_part, their_part: an axis and the name of a size: the link covers the next so many entries of that side's
            tensor along the axis, in the order of the rows.
        split: the axis that tensor parallelism cuts; empty where every rank holds all.
        when: a feature that the model must have.
        shared: theirs is written even where ours is a tie, for they keep a copy.
        our_begin, their_begin: where the part begins along its axis; filled in for a model.
    """

    ours: str
    theirs: str
    our_axes: Axes
    their_axes: Axes
    our_part: Part | None = None
    their_part: Part | None = None
    split: str = ""
    when: str = ""
    shared: bool = False
    our_begin: int = 0
    their_begin: int = 0


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """A table of ``maps/``."""

    links: tuple[Link, ...]
    prefix: str
    ignored: tuple[str, ...]
    copies: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """A foreign name of another release as the table writes it."""
        for old, new in self.aliases:
            name = name.replace(old, new)
        return name

    def for_model(self, model: Mapping[str, Any]) -> list[Link]:
        """The links of a model, in layer order."""
        known = features(model)
        rows = [link for link in self.links if not link.when or link.when in known]
        result: list[Link] = []
        for stack, group in groupby(rows, _stack):
            members = list(group)
            if not stack:
                result += members
                continue
            layers = model.get("num_decoder_layers", 0) if stack == "decoder" else model["num_layers"]
            for i in range(layers):
                for experts, inner in groupby(members, lambda link: "{j}" in link.ours):
                    listed = list(inner)
                    count = model.get("num_experts", 0) if experts else 1
                    result += [_numbered(link, i, j) for j in range(count) for link in listed]
        return result

    def ignored_names(self, num_layers: int) -> set[str]:
        """Foreign names that may be there and hold nothing to convert."""
        return {name.replace("{i}", str(i)) for name in self.ignored for i in range(max(1, num_layers))}


def _stack(link: Link) -> str:
    if "{i}" not in link.ours:
        return ""
    return "decoder" if link.ours.startswith("decoder.") else "encoder"


def _numbered(link: Link, i: int, j: int) -> Link:
    def put(name: str) -> str:
        return name.replace("{i}", str(i)).replace("{j}", str(j))

    return replace(link, ours=put(link.ours), theirs=put(link.theirs))


def features(model: Mapping[str, Any]) -> set[str]:
    """Words that rows of a table may ask for with ``when``."""
    positions = model.get("position_embedding", "rotary" if model["family"] == "llama" else "learned")
    found = {positions, "experts" if model.get("num_experts") else "dense"}
    found |= {"tokentypes"} if model.get("num_tokentypes") else set()
    found |= {"binary", "pooler"} if model.get("binary_head") else set()
    return found | ({model["task_head"], "pooler"} if model.get("task_head") else {"language"})


def model_ties(model: Mapping[str, Any]) -> dict[str, str]:
    """The ties of a model of ours, from its sizes."""
    if model["family"] != "t5":
        if model.get("task_head"):
            return {}
        return {"head.weight": "embedding.word.weight"} if model["tied_embeddings"] else {}
    word, position = "encoder.embedding.word.weight", "encoder.embedding.position.weight"
    ties = {"decoder.embedding.word.weight": word}
    if model["tied_embeddings"]:
        ties["head.weight"] = word
    if model.get("position_embedding", "learned") == "learned":
        ties["decoder.embedding.position.weight"] = position
    else:
        for side, layers in (("encoder", model["num_layers"]), ("decoder", model["num_decoder_layers"])):
            table = f"{side}.layers.0.attention.relative.weight"
            ties |= {table.replace(".0.", f".{i}.", 1): table for i in range(1, layers)}
    return ties


def load_map(name: str, variant: str = "") -> NameMap:
    """The table ``maps/NAME.json``; ``variant`` chooses among layouts that the table names by a word."""
    document = parse_json(resources.files(__package__).joinpath(f"{name}.json").read_bytes())
    prefix = document["prefix"]
    words = document["variants"][variant] if variant else {}

    def part(row: Mapping[str, Any], side: str) -> Part | None:
        return (row[side][0], row[side][1]) if side in row else None

    links = tuple(
        Link(
            ours=row["ours"],
            theirs=(prefix if row.get("prefixed", True) else "") + row["theirs"],
            our_axes=parse_axes(row["our_axes"]),
            their_axes=parse_axes(words.get(row["their_axes"], row["their_axes"])),
            our_part=part(row, "our_part"),
            their_part=part(row, "their_part"),
            split=row.get("split", ""),
            when=row.get("when", ""),
            shared=row.get("shared", False),
        )
        for row in document["tensors"]
    )
    return NameMap(
        links=links,
        prefix=prefix,
        ignored=tuple(prefix + name for name in document["ignored"]),
        copies=tuple((copy, original) for copy, original in document.get("copies", ())),
        aliases=tuple((old, new) for old, new in document.get("aliases", ())),
    )


def axis_sizes(model: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """Sizes of the maps' axes and parts; ``v`` is ``vocab_size``: the true one, or the padded one of the other side.

    A group is a key-value head: it has ``q`` query heads, one key and one value, ``t`` rows of heads in all.
    """
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads", heads)
    width = model.get("head_dim", model["hidden_size"] // heads)
    return {
        "v": vocab_size,
        "s": model["max_position_embeddings"],
        "h": model["hidden_size"],
        "o": model["hidden_size"],
        "f": model["ffn_hidden_size"],
        "g": groups,
        "q": heads // groups,
        "t": heads // groups + 2,
        "d": width,
        "w": width // 2,
        "b": 2,
        "x": 2,
        "p": 2,
        "one": 1,
        "two": 2,
        "types": model.get("num_tokentypes", 0),
        "e": model.get("num_experts", 0),
        "r": model.get("relative_buckets", 32),
        "classes": model.get("num_classes", 1),
    }


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A tensor under its new name: content with one dimension an axis, and the shape it is stored under."""

    name: str
    source_name: str
    content: Tensor
    shape: tuple[int, ...]
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class EqualPair:
    """Two foreign tensors that must be equal; ``ours`` is the tied name, empty where both are copies on their side."""

    ours: str
    what: str
    one: Tensor
    other: Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What both directions of a conversion share: the links of the model, and the axes' sizes on either side."""

    name_map: NameMap
    links: tuple[Link, ...]
    ignored: frozenset[str]
    our_sizes: Sizes
    their_sizes: Sizes


def layout_of(name_map: NameMap, model: Mapping[str, Any], *, their_rows: int | None = None) -> Layout:
    """The layout for a model; ``their_rows`` of the vocabulary, padding included, are on the other side."""
    sizes = axis_sizes(model, model["vocab_size"])
    theirs = sizes if their_rows is None else axis_sizes(model, their_rows)
    return Layout(
        name_map=name_map,
        links=tuple(_placed(name_map.for_model(model), sizes)),
        ignored=frozenset(name_map.ignored_names(max(model["num_layers"], model.get("num_decoder_layers", 0)))),
        our_sizes=sizes,
        their_sizes=theirs,
    )


def _placed(links: Iterable[Link], sizes: Sizes) -> Iterator[Link]:
    """The links with the places of their parts: each behind the one before it on the same tensor."""
    filled: dict[tuple[str, str], int] = {}
    for link in links:
        begins = []
        for side, name, part in (("ours", link.ours, link.our_part), ("theirs", link.theirs, link.their_part)):
            begins.append(filled.get((side, name), 0))
            filled[side, name] = begins[-1] + (sizes[part[1]] if part else 0)
        yield replace(link, our_begin=begins[0], their_begin=begins[1])


def to_theirs(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    ties: Mapping[str, str],
    masks: Mapping[str, Tensor] | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> list[Mapped]:
    """Map our tensors to the foreign names and layouts of one tensor rank.

    The vocabulary is padded as theirs is; a tied name is left out unless they keep a copy.

    Raises:
        UnsupportedError: a tensor that no link maps, a link whose tensor is missing, or a shape that does not fit.
    """
    links = [link for link in layout.links if link.ours not in ties or link.shared]
    refuse_unmatched({link.ours for link in links if link.ours not in ties}, set(tensors))
    result = []
    for name, group in _by(links, "theirs"):
        sources = [ties.get(link.ours, link.ours) for link in group]
        out = partial(_outwards, layout, rank=rank, ranks=ranks)
        content = _joined([out(link, tensors[n]) for link, n in zip(group, sources, strict=True)], group[0], "theirs")
        found = [masks.get(n) for n in sources] if masks else [None]
        mask = None
        if any(each is not None for each in found):
            present = [(link, each) for link, each in zip(group, found, strict=True) if each is not None]
            if len(present) != len(group):
                raise UnsupportedError(f"{name}: is made of {', '.join(sources)}, of which only some have a mask")
            mask = _joined([out(link, each) for link, each in present], group[0], "theirs")
        local = _local(_whole(layout.their_sizes, group[0].their_part, group[0].our_part), group[0], ranks)
        shape = stored_shape(group[0].their_axes, local)
        result.append(Mapped(name=name, source_name=sources[0], content=content, shape=shape, mask=mask))
    return result


def _outwards(layout: Layout, link: Link, tensor: Tensor, *, rank: int, ranks: int) -> Tensor:
    """What a link covers of our tensor, on one tensor rank, in their layout."""
    axes = _flat(link.our_axes)
    sizes = _whole(layout.our_sizes, link.our_part, link.their_part)
    part = expand(tensor, link.our_axes, sizes, link.ours, finer=True)
    if link.our_part:
        size = layout.our_sizes[link.our_part[1]]
        part = part.narrow(axes.index(link.our_part[0]), link.our_begin, link.our_begin + size)
    theirs = _flat(link.their_axes)
    part = _with_rows(_moved(part, axes, theirs, link.theirs), theirs, layout.our_sizes, layout.their_sizes)
    if link.split and ranks > 1:
        step = layout.their_sizes[link.split] // ranks
        part = part.narrow(theirs.index(link.split), rank * step, (rank + 1) * step)
    return part


def to_ours(
    layout: Layout, tensors: Mapping[str, Sequence[Tensor]], ties: Mapping[str, str]
) -> tuple[list[Mapped], list[EqualPair]]:
    """Map foreign tensors, each given for all tensor ranks, to our names and layouts, without the vocabulary's padding.

    Returns:
        Our tensors, and pairs of foreign ones that must be equal: copies of tied tensors.

    Raises:
        UnsupportedError: as :func:`to_theirs`.
    """
    name_map, links = layout.name_map, layout.links
    optional = {link.theirs for link in links} | {copy for copy, _ in name_map.copies} | layout.ignored
    named = {name if name in optional else name_map.prefix + name: value for name, value in tensors.items()}
    stored = [link for link in links if link.ours not in ties]
    wanted = {link.theirs for link in stored}
    refuse_unmatched(wanted, set(named) - (optional - wanted))
    result = []
    for name, group in _by(stored, "ours"):
        parts = [_inwards(layout, link, named[link.theirs]) for link in group]
        shape = stored_shape(group[0].our_axes, _whole(layout.our_sizes, group[0].our_part, group[0].their_part))
        content = _joined(parts, group[0], "ours")
        result.append(Mapped(name=name, source_name=group[0].theirs, content=content, shape=shape))
    return result, _equal_pairs(layout, named, ties)


def _inwards(layout: Layout, link: Link, ranks: Sequence[Tensor]) -> Tensor:
    """What a link covers of their tensor, all tensor ranks put together, in our layout."""
    axes, ours = _flat(link.their_axes), _flat(link.our_axes)
    sizes = _local(_whole(layout.their_sizes, link.their_part, link.our_part), link, len(ranks))
    parts = []
    for tensor in ranks if link.split else ranks[:1]:
        part = expand(tensor, link.their_axes, sizes, link.theirs)
        if link.their_part:
            size = layout.their_sizes[link.their_part[1]]
            part = part.narrow(axes.index(link.their_part[0]), link.their_begin, link.their_begin + size)
        parts.append(_moved(part, axes, ours, link.ours))
    joined = parts[0] if len(parts) == 1 else concatenate(parts, ours.index(link.split))
    return _with_rows(joined, ours, layout.their_sizes, layout.our_sizes)


def _equal_pairs(layout: Layout, named: Mapping[str, Sequence[Tensor]], ties: Mapping[str, str]) -> list[EqualPair]:
    names = {link.ours: link.theirs for link in layout.links}
    copies = [
        *((ours, names[ours], names[target]) for ours, target in ties.items() if ours in names and target in names),
        *(("", copy, original) for copy, original in layout.name_map.copies),
    ]
    return [
        EqualPair(ours=ours, what=f"{copy} and {original}", one=one, other=other)
        for ours, copy, original in copies
        if copy in named and original in named
        for one, other in zip(named[copy], named[original], strict=True)
    ]


def _whole(sizes: Sizes, mine: Part | None, other: Part | None) -> dict[str, int]:
    """Sizes of the axes of a side's whole tensor: where only the other side is in parts, that axis is a part here."""
    return {**sizes, other[0]: sizes[other[1]]} if other is not None and mine is None else dict(sizes)


def _local(sizes: Sizes, link: Link, ranks: int) -> dict[str, int]:
    return {**sizes, link.split: sizes[link.split] // ranks} if link.split else dict(sizes)


def _moved(tensor: Tensor, source: list[str], target: list[str], name: str) -> Tensor:
    """``tensor`` with its axes in the target's order."""
    if sorted(source) != sorted(target):
        raise UnsupportedError(f"{name}: the axes {source} and {target} are not the same")
    return tensor.permute([source.index(axis) for axis in target])


def _with_rows(tensor: Tensor, axes: list[str], source_sizes: Sizes, target_sizes: Sizes) -> Tensor:
    """``tensor`` with the rows of the vocabulary that the target has: rows of padding cut off, or added as zeros."""
    old, new = source_sizes["v"], target_sizes["v"]
    if "v" not in axes or old == new:
        return tensor
    dim = axes.index("v")
    return tensor.narrow(dim, 0, new) if new < old else tensor.padded(dim, new)


def _joined(parts: list[Tensor], link: Link, side: str) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    part, axes = (link.our_part, link.our_axes) if side == "ours" else (link.their_part, link.their_axes)
    if part is None:
        raise UnsupportedError(f"{getattr(link, side)}: two rows of the map, and no axis to join them")
    return concatenate(parts, _flat(axes).index(part[0]))


def _flat(axes: Axes) -> list[str]:
    return [axis for group in axes for axis in group]


def _by(links: Iterable[Link], side: str) -> list[tuple[str, list[Link]]]:
    groups: dict[str, list[Link]] = {}
    for link in links:
        groups.setdefault(getattr(link, side), []).append(link)
    return list(groups.items())


def refuse_unmatched(wanted: set[str], found: set[str]) -> None:
    """Raise ``UnsupportedError`` where names are left over or missing."""
    for names, what in ((found - wanted, "no rule of the map takes"), (wanted - found, "the input lacks")):
        if names:
            shown = ", ".join(sorted(names)[:5])
            raise UnsupportedError(f"{what} {len(names)} tensors: {shown}{', ...' if len(names) > 5 else ''}")
