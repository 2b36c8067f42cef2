"""Reads the name maps of ``maps/*.json`` and applies them in both directions. Pure.

A row of a table, a ``NameRule``, connects a native tensor with a foreign one, or a part of a tensor along an axis::

    {"native": "layers.{i}.attention.qkv.weight", "native_axes": "(g t d) h", "native_part": ["t", "q"],
     "foreign": "layers.{i}.self_attn.q_proj.weight", "foreign_axes": "(g t d) h"}

reads: along axis ``t`` (heads of a group) the first ``q`` entries of ``qkv`` are the rows of ``q_proj``. So split or
fused query-key-value and gate-up matrices are data, as names are. Every tensor is mapped, or the conversion is refused:
a tensor that was left out silently would give a model that computes something else.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import groupby
from typing import Any

from .._common.document import parse_json
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
from ..tensors.views import Tensor, concatenate
from .axes import Axes, axis_sizes, expand, parse_axes, stored_shape
from .features import features

Part = tuple[str, str]
Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class NameRule:
    """One row of a table: names and layouts on both sides.

    Attributes:
        native: DynMo's name, with ``{i}`` for the layer number and ``{j}`` for the expert number.
        foreign: the other name.
        native_axes: the layout of the native tensor.
        foreign_axes: the layout of the foreign tensor.
        native_part: an axis and the name of a size: the link covers that number of entries of the native tensor along
            the axis, after those of the preceding links.
        foreign_part: the same for the foreign tensor. Several axes, such as ``e p``, are counted as one, the last
            fastest; the part is then one entry of each.
        foreign_inner: the axes that the foreign part consists of along its axis; empty where it has one axis, its own.
        split: the axis that tensor parallelism splits; empty where every rank has the complete tensor.
        when: a feature that the model must have.
        shared: the foreign tensor is written even where the native one is tied, because the format stores a copy.
        native_begin: begin of the native part along its axis; computed for a model.
        foreign_begin: begin of the foreign part along its axis; computed for a model.
    """

    native: str
    foreign: str
    native_axes: Axes
    foreign_axes: Axes
    native_part: Part | None = None
    foreign_part: Part | None = None
    foreign_inner: tuple[str, ...] = ()
    split: str = ""
    when: str = ""
    shared: bool = False
    native_begin: int = 0
    foreign_begin: int = 0


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """A table of ``maps/``.

    Attributes:
        links: the rows.
        prefix: optional prefix of the foreign names.
        ignored: foreign names that may be present and have nothing to convert.
        copies: pairs of a foreign tensor and the one of which it is a copy.
        aliases: pairs of a substring in names of other releases and its replacement.
        spellings: pairs of substrings that name the same tensors, as programs of one format name them.
        prediction_block: the begin of a block's foreign names, and what stands for it in a depth of multi-token
            prediction; None where files number these blocks after the last one.
    """

    links: tuple[NameRule, ...]
    prefix: str
    ignored: tuple[str, ...]
    copies: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    prediction_block: tuple[str, str] | None = None

    def canonical(self, name: str) -> str:
        """The name in this table of a foreign tensor that another release names differently."""
        for old, new in self.aliases:
            name = name.replace(old, new)
        return name

    def respelled(self, name: str, expected: Container[str]) -> str:
        """The spelling of a foreign name that is one of ``expected``; the name itself where none is."""
        found = [name]
        for one, other in self.spellings:
            pairs = ((one, other), (other, one))
            found += [each.replace(old, new) for each in found for old, new in pairs if old in each]
        return next((each for each in found if each in expected), name)

    def for_model(self, model: Mapping[str, Any]) -> list[NameRule]:
        """The links of a model in layer order, with layer and expert numbers filled in."""
        result: list[NameRule] = []
        further, layers = model.get("mtp_num_layers", 0), model["num_layers"]
        for stack, group in groupby(self.links, _stack):
            members = list(group)
            if not stack:
                known = features(model)
                result += [link for link in members if not link.when or link.when in known]
            elif stack == PREDICTION:
                first = layers if self.prediction_block is None else 0
                result += [_numbered(link, i, 0, first + i) for i in range(further) for link in members]
            else:
                for i in range(model.get("num_decoder_layers", 0) if stack == "decoder" else layers):
                    result += _of_block(members, model, i, i)
                # A depth of multi-token prediction has a block of the kind of the last one.
                as_block = [self._prediction_row(each) for each in members]
                for i in range(further if stack == "encoder" else 0):
                    result += _of_block(as_block, model, i, layers + i, number=i if self.prediction_block else None)
        return result

    def _prediction_row(self, row: NameRule) -> NameRule:
        begin, instead = self.prediction_block or ("", "")
        native = row.native.replace("layers.", "mtp.", 1)
        return replace(row, native=native, foreign=instead + row.foreign.removeprefix(begin))

    def ignored_names(self, num_layers: int) -> set[str]:
        """Foreign names that may be present and have nothing to convert, those of ``num_layers`` layers included."""
        return {name.replace("{i}", str(i)) for name in self.ignored for i in range(max(1, num_layers))}


PREDICTION = "mtp"


def _of_block(
    members: Sequence[NameRule], model: Mapping[str, Any], i: int, layer: int, number: int | None = None
) -> list[NameRule]:
    """The links of a block whose parts the model has.

    Args:
        members: the links of all blocks of a stack.
        model: the ``model`` of a manifest.
        i: number of the block in native names.
        layer: its number, counted over all blocks.
        number: its number in foreign names; None: ``layer``.
    """
    known = features(model, layer)
    rows = [link for link in members if not link.when or link.when in known]
    result: list[NameRule] = []
    for experts, inner in groupby(rows, lambda link: "{j}" in link.native):
        listed = list(inner)
        count = model.get("num_experts", 0) if experts else 1
        result += [_numbered(link, i, j, layer if number is None else number) for j in range(count) for link in listed]
    return result


def _stack(link: NameRule) -> str:
    if "{i}" not in link.native:
        return ""
    if link.native.startswith(f"{PREDICTION}."):
        return PREDICTION
    return "decoder" if link.native.startswith("decoder.") else "encoder"


def _numbered(link: NameRule, i: int, j: int, number: int) -> NameRule:
    def fill(name: str, at: int) -> str:
        return name.replace("{i}", str(at)).replace("{j}", str(j))

    return replace(link, native=fill(link.native, i), foreign=fill(link.foreign, number))


def model_ties(model: Mapping[str, Any]) -> dict[str, str]:
    """The tied tensors of a native model: name that is not stored -> name that is."""
    if model["family"] != "t5":
        if model.get("task_head"):
            return {}
        word = "embedding.word.weight"
        own = {"head.weight": word} if model["tied_embeddings"] else {}
        further = range(model.get("mtp_num_layers", 0))
        ties = {f"mtp.{k}.embedding.word.weight": word for k in further}
        ties |= {f"mtp.{k}.head.weight": own.get("head.weight", "head.weight") for k in further}
        return ties | ({"mtp.0.final_norm.weight": "head.norm.weight"} if further else {}) | own
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
    """The table ``maps/NAME.json``.

    Args:
        name: of the table.
        variant: selects one of the layouts that the table defines under ``variants``; empty: none.
    """
    document = _table(name)
    prefix = document["prefix"]
    # A table with variants names a layout instead of stating it: Megatron's versions differ in the order of the query,
    # key and value rows alone.
    layouts = document["variants"][variant] if variant else {}

    def part(row: Mapping[str, Any], side: str) -> Part | None:
        return (row[side][0], row[side][1]) if side in row else None

    links = tuple(
        NameRule(
            native=row["native"],
            foreign=(prefix if row.get("prefixed", True) else "") + row["foreign"],
            native_axes=parse_axes(row["native_axes"]),
            foreign_axes=parse_axes(layouts.get(row["foreign_axes"], row["foreign_axes"])),
            native_part=part(row, "native_part"),
            foreign_part=part(row, "foreign_part"),
            foreign_inner=tuple(row.get("foreign_inner", "").split()),
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
        spellings=tuple((one, other) for one, other in document.get("spellings", ())),
        prediction_block=(block[0], block[1]) if (block := document.get("prediction_block")) else None,
    )


def _table(name: str) -> dict[str, Any]:
    """The contents of ``maps/NAME.json``, with those of the table that it names in ``like``.

    Its rows replace those of the same native tensors, and others are added after those of the same part of a block.
    ``without`` has native tensors whose rows are left out, ``renamed`` substrings of foreign names.
    """
    own: dict[str, Any] = parse_json(resources.files(__package__).joinpath(f"{name}.json").read_bytes())
    if "like" not in own:
        return own
    base = _table(own["like"])
    rows = [
        _renamed(row, own.get("renamed", {})) for row in base["tensors"] if row["native"] not in own.get("without", ())
    ]
    for native, group in groupby(own["tensors"], lambda row: row["native"]):
        same = [at for at, row in enumerate(rows) if row["native"] == native]
        at = same[0] if same else _end_of_part(rows, native)
        rows[at : at + len(same)] = group
    return {**base, **own, "tensors": rows}


def _end_of_part(rows: Sequence[Mapping[str, Any]], native: str) -> int:
    """The place after the rows of the part of a block that a native tensor belongs to, or of its stack."""
    words = native.split(".")
    starts = (".".join(words[:3]), words[0], "layers.")
    return next(1 + max(found) for start in starts if (found := _places(rows, start)))


def _places(rows: Sequence[Mapping[str, Any]], start: str) -> list[int]:
    return [at for at, row in enumerate(rows) if row["native"].startswith(start)]


def _renamed(row: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    foreign = row["foreign"]
    for old, new in names.items():
        foreign = foreign.replace(old, new)
    return {**row, "foreign": foreign}


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """A tensor under its new name: ``content`` has one dimension per axis, ``shape`` is the stored shape."""

    name: str
    source_name: str
    content: Tensor
    shape: tuple[int, ...]
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class EqualPair:
    """Two foreign tensors that must be equal; ``native`` is the tied name, empty for foreign copies."""

    native: str
    what: str
    one: Tensor
    other: Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The links of a model, and the sizes of the axes on both sides."""

    name_map: NameMap
    links: tuple[NameRule, ...]
    ignored: frozenset[str]
    native_sizes: Sizes
    foreign_sizes: Sizes


def layout_of(name_map: NameMap, model: Mapping[str, Any], *, foreign_vocab_size: int | None = None) -> Layout:
    """The layout of a model.

    Args:
        name_map: the table.
        model: the ``model`` of a manifest.
        foreign_vocab_size: number of rows of the foreign vocabulary, with padding; None: the true number.
    """
    # DynMo stores the true vocabulary; padding belongs to a format and to its number of ranks.
    sizes = axis_sizes(model, model["vocab_size"])
    foreign = sizes if foreign_vocab_size is None else axis_sizes(model, foreign_vocab_size)
    return Layout(
        name_map=name_map,
        links=tuple(_with_begins(name_map.for_model(model), sizes)),
        ignored=frozenset(
            name_map.ignored_names(
                max(model["num_layers"] + model.get("mtp_num_layers", 0), model.get("num_decoder_layers", 0))
            )
        ),
        native_sizes=sizes,
        foreign_sizes=foreign,
    )


def _with_begins(links: Iterable[NameRule], sizes: Sizes) -> Iterator[NameRule]:
    """The links with the begins of their parts: each begins where the preceding link on the same tensor ends."""
    filled: dict[tuple[str, str], int] = {}
    for link in links:
        begins = []
        for side, name, part in (
            ("native", link.native, link.native_part),
            ("foreign", link.foreign, link.foreign_part),
        ):
            # A part is after those of the rows before it, so the order of rows in a table is that of q, k and v.
            begins.append(filled.get((side, name), 0))
            filled[side, name] = begins[-1] + (sizes[part[1]] if part else 0)
        yield replace(link, native_begin=begins[0], foreign_begin=begins[1])


def to_foreign(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    ties: Mapping[str, str],
    masks: Mapping[str, Tensor] | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> list[MappedTensor]:
    """Map native tensors to foreign names and layouts, for one tensor-parallel rank.

    Args:
        layout: of the model.
        tensors: the native tensors by name.
        ties: name that is not stored -> name that is. A tied tensor is left out unless the format stores a copy.
        masks: pruning masks by name of the weight.
        rank: the tensor-parallel rank.
        ranks: the tensor-parallel size.

    Raises:
        UnsupportedError: a tensor without a link, a link without its tensor, or a shape that does not fit the model.
    """
    links = [link for link in layout.links if link.native not in ties or link.shared]
    # Before anything is mapped: a tensor without a rule must not be lost.
    check_names_match({link.native for link in links if link.native not in ties}, set(tensors))
    result = []
    for name, group in _by(links, "foreign"):
        sources = [ties.get(link.native, link.native) for link in group]
        out = partial(_link_to_foreign, layout, rank=rank, ranks=ranks)
        content = _joined_foreign(
            [out(link, tensors[n]) for link, n in zip(group, sources, strict=True)], group[0], layout
        )
        found = [masks.get(n) for n in sources] if masks else [None]
        mask = None
        if any(each is not None for each in found):
            present = [(link, each) for link, each in zip(group, found, strict=True) if each is not None]
            if len(present) != len(group):
                raise UnsupportedError(
                    f"{name}: is fused from {short_names(sources)}; either all or none of them must have a mask"
                )
            mask = _joined_foreign([out(link, each) for link, each in present], group[0], layout)
        local = _local(
            _tensor_sizes(layout.foreign_sizes, group[0].foreign_part, group[0].native_part), group[0], ranks
        )
        shape = stored_shape(group[0].foreign_axes, local)
        result.append(MappedTensor(name=name, source_name=sources[0], content=content, shape=shape, mask=mask))
    return result


def _link_to_foreign(layout: Layout, link: NameRule, tensor: Tensor, *, rank: int, ranks: int) -> Tensor:
    """The part of a native tensor that a link covers, for one tensor-parallel rank, in the foreign layout."""
    axes = _flat(link.native_axes)
    sizes = _tensor_sizes(layout.native_sizes, link.native_part, link.foreign_part)
    part = expand(tensor, link.native_axes, sizes, link.native, finer=True)
    if link.native_part:
        size = layout.native_sizes[link.native_part[1]]
        part = part.narrow(axes.index(link.native_part[0]), link.native_begin, link.native_begin + size)
    foreign = _foreign_axes(link)
    # Padding before the split, because the ranks split the padded vocabulary into equal slices.
    part = _with_rows(_permuted(part, axes, foreign, link.foreign), foreign, layout.native_sizes, layout.foreign_sizes)
    if link.split and ranks > 1:
        step = layout.foreign_sizes[link.split] // ranks
        part = part.narrow(foreign.index(link.split), rank * step, (rank + 1) * step)
    for _ in link.foreign_inner[1:]:
        part = part.flatten(foreign.index(link.foreign_inner[0]))
    return part


def _foreign_axes(link: NameRule) -> list[str]:
    """The axes of the foreign side of a link, with those that its part consists of."""
    axes = _flat(link.foreign_axes)
    if link.foreign_part is None or not link.foreign_inner:
        return axes
    at = axes.index(link.foreign_part[0])
    return [*axes[:at], *link.foreign_inner, *axes[at + 1 :]]


def _joined_foreign(parts: list[Tensor], link: NameRule, layout: Layout) -> Tensor:
    """The foreign tensor of the parts of all its links, of which ``link`` is one."""
    counted = [] if link.foreign_part is None else link.foreign_part[0].split()
    if len(counted) < 2:
        return _concatenated(parts, link, "foreign")
    # The axes that are counted as one come first, are concatenated as one, and go back.
    axes = _flat(link.foreign_axes)
    order = [*counted, *(axis for axis in axes if axis not in counted)]
    first = [part.permute([axes.index(axis) for axis in order]) for part in parts]
    for _ in counted[1:]:
        first = [part.flatten(0) for part in first]
    joined = concatenate(first, 0).unflatten(0, [layout.foreign_sizes[axis] for axis in counted])
    return joined.permute([order.index(axis) for axis in axes])


def to_native(
    layout: Layout, tensors: Mapping[str, Sequence[Tensor]], ties: Mapping[str, str]
) -> tuple[list[MappedTensor], list[EqualPair]]:
    """Map foreign tensors to native names and layouts, without the padding of the vocabulary.

    Args:
        layout: of the model.
        tensors: for each foreign name the tensors of all tensor-parallel ranks, in rank order; each has the shape of
            its slice.
        ties: native name that is not stored -> name that is.

    Returns:
        The native tensors with their whole shapes, and pairs of foreign tensors that must be equal because the model
        ties them.

    Raises:
        CorruptError: a tensor is in the input with and without the prefix of the map.
        UnsupportedError: as :func:`to_foreign`.
    """
    name_map, links = layout.name_map, layout.links
    optional = {link.foreign for link in links} | {copy for copy, _ in name_map.copies} | layout.ignored
    named: dict[str, Sequence[Tensor]] = {}
    for name, ranks in tensors.items():
        # Some files lack the prefix. A name that has no rule with it either stays as the user knows it.
        prefixed = name_map.prefix + name
        known = prefixed if name not in optional and prefixed in optional else name
        if known in named:
            raise CorruptError(f"the input has {short_name(name)} with and without {name_map.prefix}")
        named[known] = ranks
    stored = [link for link in links if link.native not in ties]
    # Optional are tied tensors, copies, and buffers without weights; some files have them, others do not.
    expected = {link.foreign for link in stored}
    check_names_match(expected, set(named) - (optional - expected))
    result = []
    for name, group in _by(stored, "native"):
        parts = [_link_to_native(layout, link, named[link.foreign]) for link in group]
        shape = stored_shape(
            group[0].native_axes, _tensor_sizes(layout.native_sizes, group[0].native_part, group[0].foreign_part)
        )
        content = _concatenated(parts, group[0], "native")
        result.append(MappedTensor(name=name, source_name=group[0].foreign, content=content, shape=shape))
    return result, _equal_pairs(layout, named, ties)


def _link_to_native(layout: Layout, link: NameRule, ranks: Sequence[Tensor]) -> Tensor:
    """The part of a foreign tensor that a link covers, all tensor-parallel ranks concatenated, in the native layout."""
    axes, native = _flat(link.foreign_axes), _flat(link.native_axes)
    inner = dict(layout.native_sizes)
    if link.native_part:
        inner[link.native_part[0]] = inner[link.native_part[1]]
    sizes = _local(_tensor_sizes(layout.foreign_sizes, link.foreign_part, link.native_part), link, len(ranks))
    parts = []
    # Of a replicated tensor one rank is enough; megatron.read compares the others with it.
    for tensor in ranks if link.split else ranks[:1]:
        part = expand(tensor, link.foreign_axes, sizes, link.foreign)
        if link.foreign_part:
            size = layout.foreign_sizes[link.foreign_part[1]]
            part = _foreign_part(part, axes, layout.foreign_sizes, link, size)
            if link.foreign_inner:
                part = part.unflatten(axes.index(link.foreign_part[0]), [inner[axis] for axis in link.foreign_inner])
        parts.append(_permuted(part, _foreign_axes(link), native, link.native))
    joined = parts[0] if len(parts) == 1 else concatenate(parts, native.index(link.split))
    # After the ranks are concatenated: padding rows are at the end of the complete vocabulary, not of each slice.
    return _with_rows(joined, native, layout.foreign_sizes, layout.native_sizes)


def _foreign_part(tensor: Tensor, axes: list[str], sizes: Sizes, link: NameRule, size: int) -> Tensor:
    """The entries of a foreign tensor that a link covers: ``size`` along its axis, or one along each of several."""
    counted, at = (link.foreign_part or ("", ""))[0].split(), link.foreign_begin
    if len(counted) == 1:
        return tensor.narrow(axes.index(counted[0]), at, at + size)
    for axis in reversed(counted):
        at, place = divmod(at, sizes[axis])
        tensor = tensor.narrow(axes.index(axis), place, place + 1)
    return tensor


def _equal_pairs(layout: Layout, named: Mapping[str, Sequence[Tensor]], ties: Mapping[str, str]) -> list[EqualPair]:
    names = {link.native: link.foreign for link in layout.links}
    copies = [
        *(
            (native, names[native], names[target])
            for native, target in ties.items()
            if native in names and target in names
        ),
        *(("", copy, original) for copy, original in layout.name_map.copies),
    ]
    return [
        EqualPair(native=native, what=f"{short_name(copy)} and {short_name(original)}", one=one, other=other)
        for native, copy, original in copies
        if copy in named and original in named
        for one, other in zip(named[copy], named[original], strict=True)
    ]


def _tensor_sizes(sizes: Sizes, part: Part | None, other: Part | None) -> dict[str, int]:
    """Sizes of the axes of a complete tensor: an axis with parts on the other side alone has the part's size."""
    own = dict.fromkeys(other[0].split(), sizes[other[1]]) if other is not None and part is None else {}
    return {**sizes, **own}


def _local(sizes: Sizes, link: NameRule, ranks: int) -> dict[str, int]:
    return {**sizes, link.split: sizes[link.split] // ranks} if link.split else dict(sizes)


def _permuted(tensor: Tensor, source: list[str], target: list[str], name: str) -> Tensor:
    """``tensor`` with its axes in the order of ``target``."""
    if sorted(source) != sorted(target):
        raise UnsupportedError(f"{name}: the axes {source} and {target} differ")
    return tensor.permute([source.index(axis) for axis in target])


def _with_rows(tensor: Tensor, axes: list[str], source_sizes: Sizes, target_sizes: Sizes) -> Tensor:
    """``tensor`` with the number of vocabulary rows of the target: padding rows removed, or added as zeros."""
    old, new = source_sizes["v"], target_sizes["v"]
    if "v" not in axes or old == new:
        return tensor
    dim = axes.index("v")
    return tensor.narrow(dim, 0, new) if new < old else tensor.zero_pad(dim, new)


def _concatenated(parts: list[Tensor], link: NameRule, side: str) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    part, axes = (link.native_part, link.native_axes) if side == "native" else (link.foreign_part, link.foreign_axes)
    if part is None:
        raise UnsupportedError(
            f"{getattr(link, side)}: the map has two rows and no axis along which to concatenate them"
        )
    return concatenate(parts, _flat(axes).index(part[0]))


def _flat(axes: Axes) -> list[str]:
    return [axis for group in axes for axis in group]


def _by(links: Iterable[NameRule], side: str) -> list[tuple[str, list[NameRule]]]:
    groups: dict[str, list[NameRule]] = {}
    for link in links:
        groups.setdefault(getattr(link, side), []).append(link)
    return list(groups.items())


def check_names_match(expected: set[str], found: set[str]) -> None:
    """Check that two sets of tensor names are equal.

    Args:
        expected: the names that the map needs.
        found: the names of the input.

    Raises:
        UnsupportedError: a name is unknown or missing.
    """
    for names, what in ((found - expected, "the map has no rule for"), (expected - found, "the input lacks")):
        if names:
            adapters = any(".adapter.lora_" in name for name in names)
            remedy = "; merge the adapters first: dynmo-train export-adapter --merge" if adapters else ""
            raise UnsupportedError(f"{what} {len(names)} tensors: {short_names(sorted(names))}{remedy}")
