"""Reads legacy Megatron checkpoints (``iter_NNNNNNN/mp_rank_XX[_YYY]/model_optim_rng.pt``, versions 0 to 3.0).

GPT, BERT, T5 and Llama. What differs by version is the order of the rows of the query-key-value matrix; it and the
names are data, in ``maps/legacy_*.json``. Layers are counted stage by stage, so that uneven stages come out right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .._common.document import read_word, short_repr
from .._common.errors import UsageError
from ..errors import CorruptError, UnsupportedError
from ..maps.name_map import Layout, Mapped, NameMap, layout_of, load_map, model_ties, to_ours
from ..tensors.views import Tensor
from ..torch_save.pickles import TensorRef
from ..torch_save.reader import TorchFile, open_torch
from .arguments import checked_args, read_args
from .core_names import is_core, legacy_names
from .model_sizes import Args, family_of, model_of
from .read_distributed_optimizer import is_distributed, read_distributed
from .read_optimizer import OptimizerState, read_state
from .sparse import densified
from .training_progress import NOT_TOLD, Progress, read_progress

RANK_NAME = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
LAYER_NAME = re.compile(r"language_model\.(encoder|decoder)\.layers\.(\d+)\.")
KINDS = ("master", "exp_avg", "exp_avg_sq")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
MAX_DICT_DEPTH = 100
MAX_DICT_ENTRIES = 1_000_000
"""Of nested dictionaries together; a rank of a model with 100,000 layers has about as many tensors."""
HEAD_COPY = "word_embeddings_for_head.weight"
OUTPUT_LAYER = "language_model.output_layer.weight"
WORD_TABLE = "language_model.embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class LegacyOptions:
    """What a person adds where the files do not tell it; ``look_only``: copies are not compared, no bytes are read."""

    vocab_size: int | None = None
    num_attention_heads: int | None = None
    sparse: bool = False
    first_replica: bool = False
    untie: bool = False
    drop: tuple[str, ...] = ()
    ignore_config: tuple[str, ...] = ()
    with_optimizer: bool = False
    optimizer_if_present: bool = False
    config: Path | None = None
    look_only: bool = False


@dataclass(frozen=True, kw_only=True)
class LegacyCheckpoint:
    """A legacy checkpoint under our names: the model's sizes, tensors, ties, step, and remarks for a person."""

    model: Mapping[str, Any]
    tensors: list[Mapped]
    ties: Mapping[str, str]
    step: int
    remarks: list[str]
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    scratch: object = None
    optimizer: tuple[Mapped, ...] = ()
    optimizer_steps: int = 0
    weight_decay: float = 0.0
    progress: Progress = NOT_TOLD


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One rank's file: its tensors by canonical name for each virtual chunk."""

    path: Path
    chunks: Sequence[Mapping[str, Tensor]]
    args: Mapping[str, Any]
    version: float
    step: int
    state: OptimizerState | None = None
    progress: Progress = NOT_TOLD


def is_legacy(path: Path) -> bool:
    """Whether ``path`` is a legacy Megatron directory or one iteration of it."""
    return path.is_dir() and (
        (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_*.pt"))
    )


def find_iteration(path: Path, step: int | None) -> Path:
    """The directory with the ranks' directories; raises ``CorruptError`` or ``UsageError`` where there is none."""
    if any(path.glob("mp_rank_*")):
        return path
    tracker = path / "latest_checkpointed_iteration.txt"
    if step is None:
        if not tracker.is_file():
            raise CorruptError(f"{path}: has neither mp_rank_* nor latest_checkpointed_iteration.txt")
        text = read_word(tracker)
        if text != "release" and not text.isdecimal():
            raise CorruptError(f"{tracker}: says {text!r}; a number or 'release' is expected")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        name = f"iter_{step:07d}"
    if not (path / name).is_dir():
        raise UsageError(
            f"{path / name}: is not there; the iterations are {sorted(p.name for p in path.glob('iter_*'))}"
        )
    return path / name


def open_legacy(path: Path, step: int | None, options: LegacyOptions) -> LegacyCheckpoint:
    """Index a legacy GPT checkpoint of any tensor- and pipeline-parallel size; of the bytes, only replicas' are read.

    Raises:
        UnsafePickleError: a file asks for more than plain data.
        CorruptError: missing ranks, ranks that contradict each other, broken files.
        UnsupportedError: another family, or a variant that our model does not compute.
    """
    directory = find_iteration(path, step)
    grid = _read_ranks(directory, options.with_optimizer)
    first = grid[0][0]
    facts = RankFacts(path=first.path, args=first.args, version=first.version, step=first.step, progress=first.progress)
    if not options.with_optimizer:
        return assemble(facts, *_numbered_stages(grid), options)
    state = {}
    for kind in KINDS:
        moved = [[replace(rank, chunks=_state_chunks(rank, kind)) for rank in row] for row in grid]
        state[kind] = _numbered_stages(moved)
    steps = {rank.state.steps for row in grid for rank in row if rank.state is not None}
    return assemble_state(facts, state, steps, options, _numbered_stages(grid))


def assemble_state(
    facts: RankFacts,
    state: Mapping[str, tuple[list[dict[str, list[Tensor]]], Mapping[str, int]]],
    steps: set[int],
    options: LegacyOptions,
    weights: tuple[list[dict[str, list[Tensor]]], Mapping[str, int]] | None = None,
) -> LegacyCheckpoint:
    """As :func:`assemble`, from the optimizer's state: stages and layers by kind (``master`` and the moments).

    Where ``weights`` are given, the masters are compared with them: state knows its weights by position, and what is
    rounded to other weights was misplaced.

    Raises:
        CorruptError: ranks that did other numbers of updates, or masters that are not those of the weights.
        UsageError: options that change what tensors there are.
    """
    if options.drop or options.untie or options.sparse:
        raise UsageError("--with-optimizer takes a checkpoint as it is, without --drop, --untie and --sparse")
    if len(steps) != 1:
        raise CorruptError(f"{facts.path}: its ranks did {sorted(steps)} updates, where all must have done as many")
    kinds = {kind: assemble(facts, *state[kind], options) for kind in KINDS}
    if weights is not None:
        from ..tensors.equality import rounds_to

        for master, weight in zip(kinds["master"].tensors, assemble(facts, *weights, options).tensors, strict=True):
            if not rounds_to(master.content, weight.content):
                raise CorruptError(f"{facts.path}: {master.name}: its float32 master does not round to the weight")
    moments = tuple(
        replace(item, name=f"{item.name}.{kind}") for kind in ("exp_avg", "exp_avg_sq") for item in kinds[kind].tensors
    )
    told = facts.args.get("weight_decay", 0.01)
    decay = float(told) if isinstance(told, int | float) else 0.01
    remarks = [*kinds["master"].remarks, "the weights are the optimizer's float32 masters"]
    found = next(iter(steps))
    return replace(kinds["master"], optimizer=moments, optimizer_steps=found, remarks=remarks, weight_decay=decay)


def _state_chunks(rank: _Rank, kind: str) -> list[Mapping[str, Tensor]]:
    """The optimizer's tensors of one kind, in the place of the weights."""
    if rank.state is None:
        raise CorruptError(f"{rank.path}: holds no optimizer state")
    return [{name: rank.state.tensors[kind][chunk, name] for name in each} for chunk, each in enumerate(rank.chunks)]


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What the files say beside the tensors: one of them for messages, Megatron's arguments, version and iteration."""

    path: Path
    args: Mapping[str, Any]
    version: float
    step: int
    progress: Progress = NOT_TOLD


def assemble(
    facts: RankFacts, stages: list[dict[str, list[Tensor]]], layers: Mapping[str, int], options: LegacyOptions
) -> LegacyCheckpoint:
    """Put stages together under our names.

    Args:
        facts: what the files say beside the tensors.
        stages: in layer order, tensors of all tensor ranks by canonical name, layers numbered globally.
        layers: number of layers of ``encoder`` and ``decoder``.
        options: what a person adds.
    """
    merged: dict[str, list[Tensor]] = {}
    copies: list[tuple[str, Tensor, Tensor]] = []
    dropped: dict[str, None] = {}
    if options.untie:
        stages = [{OUTPUT_LAYER if name == HEAD_COPY else name: ranks for name, ranks in s.items()} for s in stages]
    for stage in stages:
        for name, ranks in stage.items():
            if any(fnmatchcase(name, pattern) for pattern in options.drop):
                dropped[name] = None
                continue
            original = merged.get(WORD_TABLE if name == HEAD_COPY else name)
            if original is not None:
                copies += [(f"{name} of two stages, tensor rank {r}", *two) for r, two in _pairs(original, ranks)]
            elif name == HEAD_COPY:
                raise CorruptError(f"{facts.path}: has {HEAD_COPY}, and no embedding in an earlier stage")
            else:
                merged[name] = ranks
    num_ranks = max((len(ranks) for ranks in merged.values()), default=1)
    dense = densified(str(facts.path), merged)
    merged = dense.tensors
    family = family_of(merged)
    args = checked_args(str(facts.path), family, facts.args, options.ignore_config)
    remarks = [*dense.remarks, *(f"{name}: left out, as --drop asks" for name in dropped)]
    given = {"vocab_size": options.vocab_size, "num_attention_heads": options.num_attention_heads}
    model = model_of(str(facts.path), family, args, merged, layers, num_ranks, given, remarks)
    if family == "llama":
        model["tied_embeddings"] = "language_model.output_layer.weight" not in merged
    ties = model_ties(model)
    variant = {0.0: "0", 1.0: "1"}.get(facts.version, "2")
    layout = layout_of(load_map(f"legacy_{family}", variant), model, their_rows=model["padded_vocab_size"])
    tensors, equal = to_ours(layout, merged, ties)
    if not options.look_only:
        copies += [(pair.what, pair.one, pair.other) for pair in equal]
        remarks += _compare_replicas(layout, merged, copies, options)
    return LegacyCheckpoint(
        model=model,
        tensors=tensors,
        ties=ties,
        step=facts.step,
        remarks=remarks,
        masks=_masks(layout, dense.masks) if options.sparse else {},
        scratch=dense.scratch,
        progress=facts.progress,
    )


def _masks(layout: Layout, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks of sparse weights under our names of the weights; their layout is that of the weight."""
    links = {link.theirs: link for link in layout.links}
    unlike = [name for name in masks if links[name].our_axes != links[name].their_axes]
    if unlike:
        raise UnsupportedError(f"masks of weights whose rows are in another order: {', '.join(unlike[:5])}")
    return {links[name].ours: mask for name, mask in masks.items()}


def _pairs(left: Sequence[Tensor], right: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    return enumerate(zip(left, right, strict=True))


def _read_ranks(directory: Path, with_optimizer: bool) -> list[list[_Rank]]:
    """All ranks' files, by tensor rank and then by stage."""
    found: dict[tuple[int, int], Path] = {}
    for child in directory.iterdir():
        match = RANK_NAME.fullmatch(child.name)
        if match and any((child / name).is_file() for name in MODEL_FILES):
            found[int(match[1]), int(match[2] or 0)] = child
    if not found:
        raise CorruptError(f"{directory}: has no mp_rank_* directory")
    tensor_ranks, stages = (1 + max(key[i] for key in found) for i in (0, 1))
    missing = [f"mp_rank_{t:02d}_{p:03d}" for t in range(tensor_ranks) for p in range(stages) if (t, p) not in found]
    if missing:
        raise CorruptError(f"{directory}: {len(missing)} of {tensor_ranks * stages} ranks are missing: {missing}")
    name_map = load_map("legacy_gpt", "2")
    grid = [[_read_rank(found[t, p], name_map, with_optimizer) for p in range(stages)] for t in range(tensor_ranks)]
    for rank in (rank for row in grid for rank in row):
        if (rank.version, len(rank.chunks), rank.step) != (grid[0][0].version, len(grid[0][0].chunks), grid[0][0].step):
            raise CorruptError(f"{rank.path}: version, chunks or iteration are not those of {grid[0][0].path}")
    return grid


def _read_rank(directory: Path, name_map: NameMap, with_optimizer: bool) -> _Rank:
    names = [name for name in MODEL_FILES if (directory / name).is_file()]
    file = open_torch(directory / names[0])
    tree = file.tree
    if not isinstance(tree, dict):
        raise CorruptError(f"{file.path}: holds no dictionary")
    keys = ["model"] if "model" in tree else sorted((k for k in tree if re.fullmatch(r"model\d+", str(k))), key=_number)
    if not keys:
        raise CorruptError(f"{file.path}: holds no model; it has {short_repr(sorted(map(str, tree)))}")
    chunks = []
    for key in keys:
        flat = flatten(file, tree[key])
        named = legacy_names(flat) if is_core(flat) else flat
        chunks.append({name_map.canonical(name): tensor for name, tensor in named.items()})
    known = read_args(tree, str(file.path))
    version, step = tree.get("checkpoint_version", 0), tree.get("iteration", tree.get("total_iters", 0))
    if not isinstance(version, int | float) or not isinstance(step, int):
        raise CorruptError(f"{file.path}: checkpoint_version {short_repr(version)}, iteration {short_repr(step)}")
    state = _read_state(file, chunks, known, step) if with_optimizer else None
    progress = read_progress(tree, known, step, file.number)
    return _Rank(
        path=file.path, chunks=chunks, args=known, version=float(version), step=step, state=state, progress=progress
    )


def _read_state(file: TorchFile, chunks: Sequence[Mapping[str, Tensor]], args: Args, step: int) -> OptimizerState:
    """The optimizer's state of a rank, in its own file or in those of the distributed optimizer."""
    if is_distributed(file.path.parent):
        return read_distributed(file, chunks, args, step)
    return read_state(file, chunks)


def _number(key: str) -> int:
    return int(key.removeprefix("model"))


def flatten(file: TorchFile, value: Any) -> dict[str, Tensor]:
    """Tensors of nested dictionaries by dotted name; extra states, which hold no weights, are left out.

    Raises:
        CorruptError: dictionaries nested deeper than ``MAX_DICT_DEPTH``, or more than ``MAX_DICT_ENTRIES`` entries; a
            pickle of a few bytes has both, where a dictionary contains itself or one dictionary many times.
    """
    found: dict[str, Tensor] = {}
    left, num_entries = [(0, "", value)], 0
    while left:  # the last one first, so that the order is that of the dictionaries: optimizer state goes by position
        depth, prefix, inner = left.pop()
        if isinstance(inner, TensorRef):
            found[prefix] = file.tensor(inner, prefix)
        elif isinstance(inner, dict):
            num_entries += len(inner)
            if depth > MAX_DICT_DEPTH or num_entries > MAX_DICT_ENTRIES:
                raise CorruptError(
                    f"{file.path}: dictionaries nested deeper than {MAX_DICT_DEPTH} levels or with more than "
                    f"{MAX_DICT_ENTRIES:,} entries, the limits"
                )
            named = [(_key_name(file, key), each) for key, each in inner.items() if isinstance(each, TensorRef | dict)]
            left += reversed(
                [
                    (depth + 1, f"{prefix}.{name}" if prefix else name, each)
                    for name, each in named
                    if not name.endswith("_extra_state")
                ]
            )
    return found


def _key_name(file: TorchFile, key: Any) -> str:
    if isinstance(key, str) or (isinstance(key, int) and key.bit_length() < 64):
        return str(key)
    raise CorruptError(f"{file.path}: a tensor's name must be a string, is a {type(key).__name__}")


def _numbered_stages(grid: list[list[_Rank]]) -> tuple[list[dict[str, list[Tensor]]], dict[str, int]]:
    """For each chunk of each stage, in layer order: tensors of all tensor ranks by name, layers numbered globally.

    Also the number of layers of ``encoder`` and ``decoder``.
    """
    chunks, stages = len(grid[0][0].chunks), len(grid[0])
    result = []
    counts = {"encoder": 0, "decoder": 0}
    for chunk in range(chunks):
        for stage in range(stages):
            ranks = [row[stage].chunks[chunk] for row in grid]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise CorruptError(f"{grid[0][stage].path}: its tensor ranks do not hold the same tensors")
            begins = dict(counts)
            for stack in counts:
                found = [match for name in ranks[0] if (match := LAYER_NAME.match(name)) and match[1] == stack]
                numbers = {int(match[2]) for match in found}
                if numbers != set(range(len(numbers))):
                    raise CorruptError(f"{grid[0][stage].path}: its layers are {sorted(numbers)}, not 0 and on")
                counts[stack] += len(numbers)

            def numbered(match: re.Match[str], begins: Mapping[str, int] = begins) -> str:
                return f"language_model.{match[1]}.layers.{int(match[2]) + begins[match[1]]}."

            result.append({LAYER_NAME.sub(numbered, name): [rank[name] for rank in ranks] for name in ranks[0]})
    return result, counts


def _compare_replicas(
    layout: Layout, merged: Mapping[str, list[Tensor]], copies: list[tuple[str, Tensor, Tensor]], options: LegacyOptions
) -> Iterator[str]:
    """What several ranks hold alike must be equal: replicated tensors, and copies of the embedding."""
    from ..tensors.equality import same_bytes  # loads numpy, which a look at the names has no need of

    for name in {link.theirs: None for link in layout.links if not link.split and link.theirs in merged}:
        for rank, part in enumerate(merged[name][1:], 1):
            copies.append((f"{name} of tensor ranks 0 and {rank}", merged[name][0], part))
    for what, one, other in copies:
        if not same_bytes(one, other):
            if options.first_replica:
                yield f"{what} differ; the first is taken"
                continue
            path = other.pieces[0].view.array.path
            raise CorruptError(
                f"{path}: {what} differ, where they must be equal; "
                "the checkpoint contradicts itself, and --replicas first takes the first of them"
            )
