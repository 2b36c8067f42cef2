"""Reads legacy Megatron checkpoints (``iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt``, versions 0 to 3.0).

GPT, BERT, T5 and Llama::

    find_iteration     the directory of one iteration
    _read_ranks        one _Rank per file: tensors by canonical name, for each virtual chunk     [tp][pp]
    _numbered_stages   chunks in layer order, layers numbered globally                           stages
    assemble           merges stages, checks arguments, derives the model's sizes,
                       maps names and row order (maps/legacy_*.json), compares replicas          MegatronCheckpoint
    assemble_state     the same for the float32 masters and Adam's moments, instead of the weights

The readers of DeepSpeed and of Megatron-core's distributed checkpoints produce the same stages and end in ``assemble``
too. Invariants:

* Layers are counted stage by stage, so that uneven stages get the right global numbers.
* What several tensor-parallel ranks or stages store must be equal, byte for byte; otherwise the checkpoint is refused.
* Optimizer state names its parameters by position alone. Therefore each float32 master, rounded to the type of the
  weight, must be equal to the weight: any other order is detected.
* The order of the rows of the query-key-value matrix depends on the version; it is data, in the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .._common.document import (
    finite_number,
    is_count,
    short_repr,
)
from .._common.errors import UsageError
from ..formats.checkpoint_rules import EXPERT_BIASES
from ..formats.choices import ReadOptions
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
from ..io.files import read_tracker
from ..maps.name_map import Layout, MappedTensor, NameMap, layout_of, load_map, model_ties, to_native
from ..tensors.views import Tensor
from ..torch_save.pickles import TensorRef
from ..torch_save.reader import TorchFile, open_torch
from .arguments import check_args, read_args
from .check_places import check_grid, check_iteration, check_ranks, check_stages
from .core_names import is_core, legacy_names
from .model_sizes import Args, family_of, model_of
from .read_distributed_optimizer import is_distributed, read_distributed
from .read_optimizer import OptimizerState, read_state
from .training_progress import UNKNOWN_PROGRESS, TrainingProgress, read_progress

RANK_NAME = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
LAYER_NAME = re.compile(r"language_model\.(encoder|decoder)\.layers\.(\d{1,9})\.")
STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
MEGATRON_WEIGHT_DECAY = 0.01  # Megatron's default
# The second name: with the distributed optimizer of April 2022 to May 2023, whose state has its own files.
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
MAX_DICT_DEPTH = 100
MAX_DICT_ENTRIES = 1_000_000
"""Limit of all nested dictionaries of a file; one rank of a model with 100,000 layers has about a million tensors."""
HEAD_COPY = "word_embeddings_for_head.weight"
OUTPUT_LAYER = "language_model.output_layer.weight"
WORD_TABLE = "language_model.embedding.word_embeddings.weight"
NORM = "final_layernorm."
ROW_OFFSETS = ".row_offsets"
Copy = tuple[str, Tensor, Tensor]
"""What is stored twice, in words, and both tensors."""


@dataclass(frozen=True, kw_only=True)
class MegatronCheckpoint:
    """A checkpoint of one of Megatron's formats under DynMo's names.

    Attributes:
        model: the ``model`` of a manifest.
        tensors: the parameters.
        ties: for each name that is not stored, the name that is.
        step: the iteration.
        remarks: remarks for the user.
        masks: pruning masks by name of the weight.
        scratch: keeps alive the directory with unpacked tensors.
        optimizer: Adam's moments, named ``PARAMETER.exp_avg`` and ``PARAMETER.exp_avg_sq``.
        optimizer_steps: number of optimizer steps done.
        weight_decay: of the parameters with two or more dimensions.
        progress: of the training run.
    """

    model: Mapping[str, Any]
    tensors: list[MappedTensor]
    ties: Mapping[str, str]
    step: int
    remarks: list[str]
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    scratch: object = None
    optimizer: tuple[MappedTensor, ...] = ()
    optimizer_steps: int = 0
    weight_decay: float = 0.0
    progress: TrainingProgress = UNKNOWN_PROGRESS


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The file of one rank; ``chunks`` has the tensors of each virtual chunk by canonical name."""

    path: Path
    chunks: Sequence[Mapping[str, Tensor]]
    args: Mapping[str, Any]
    version: float
    step: int
    state: OptimizerState | None = None
    progress: TrainingProgress = UNKNOWN_PROGRESS


def is_legacy(path: Path) -> bool:
    """Whether ``path`` is a legacy Megatron directory or one of its iterations."""
    return path.is_dir() and (
        (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_*.pt"))
    )


def find_iteration(path: Path, step: int | None) -> Path:
    """The directory of one iteration, which has the ranks' directories.

    Args:
        path: a run directory, or one iteration.
        step: the iteration; None: the one that ``latest_checkpointed_iteration.txt`` names.

    Raises:
        CorruptError: neither ranks nor a valid ``latest_checkpointed_iteration.txt``.
        UsageError: the iteration is missing.
    """
    if any(path.glob("mp_rank_*")):
        return path
    tracker = path / "latest_checkpointed_iteration.txt"
    if step is None:
        if not tracker.is_file():
            raise CorruptError(f"{path}: has neither mp_rank_* nor latest_checkpointed_iteration.txt")
        # `release` in place of a number: published or converted weights, without the state of a run.
        text = read_tracker(tracker).strip()
        if text != "release" and not is_count(text):
            raise CorruptError(f"{tracker}: {text!r} must be a number or 'release'")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        name = f"iter_{step:07d}"
    if not (path / name).is_dir():
        raise UsageError(f"{path / name}: is missing; choose --step from {sorted(p.name for p in path.glob('iter_*'))}")
    return path / name


def open_legacy(path: Path, options: ReadOptions, described: Args | None = None) -> MegatronCheckpoint:
    """Index a legacy checkpoint of any topology; the bytes of replicas alone are read, to compare them.

    Args:
        path: a run directory, or one iteration.
        options: how to read.
        described: the arguments of the model, for files that record none.

    Raises:
        UnsafePickleError: a file refers to more than plain data.
        CorruptError: missing ranks, ranks that contradict each other, broken files.
        UnsupportedError: another family, or a variant that DynMo's model does not compute.
        UsageError: the iteration is missing, or the model needs an option.
    """
    directory = find_iteration(path, options.step)
    grid = _read_ranks(directory, options.with_optimizer)
    first = grid[0][0]
    facts = RankMetadata(
        path=first.path,
        args=first.args or described or {},
        version=first.version,
        step=first.step,
        progress=first.progress,
    )
    if not options.with_optimizer:
        return assemble(facts, *_numbered_stages(grid), options)
    state = {}
    for kind in STATE_KINDS:
        ranks = [[replace(rank, chunks=_state_chunks(rank, kind)) for rank in row] for row in grid]
        state[kind] = _numbered_stages(ranks)
    steps = {rank.state.steps for row in grid for rank in row if rank.state is not None}
    return assemble_state(facts, state, steps, options, _numbered_stages(grid))


def assemble_state(
    facts: RankMetadata,
    state: Mapping[str, tuple[list[dict[str, list[Tensor]]], Mapping[str, int]]],
    steps: set[int],
    options: ReadOptions,
    weights: tuple[list[dict[str, list[Tensor]]], Mapping[str, int]] | None = None,
) -> MegatronCheckpoint:
    """As :func:`assemble`, from the optimizer state: the parameters are the float32 masters.

    Args:
        facts: what the files record apart from tensors.
        state: for each kind (``master`` and the moments) the stages and numbers of layers, as for :func:`assemble`;
            a tensor of state has the shape of its weight.
        steps: the numbers of optimizer steps that the ranks record.
        options: how to read.
        weights: the stored weights, as for :func:`assemble`, with which the masters are compared: optimizer state is
            stored by position, so a master that does not round to its weight belongs to another parameter.

    Raises:
        CorruptError: ranks with different numbers of steps, or masters that do not round to the weights.
        UsageError: options that change the set of tensors.
    """
    kinds = {kind: assemble(facts, *state[kind], options) for kind in STATE_KINDS}
    return with_state(facts, kinds, steps, options, None if weights is None else assemble(facts, *weights, options))


def with_state(
    facts: RankMetadata,
    kinds: Mapping[str, MegatronCheckpoint],
    steps: set[int],
    options: ReadOptions,
    weights: MegatronCheckpoint | None = None,
) -> MegatronCheckpoint:
    """The float32 masters as weights, with Adam's moments.

    Args:
        facts: what the files record apart from tensors.
        kinds: the state of each kind (``master`` and the moments) in place of the weights; buffers are those of the
            weights.
        steps: the numbers of optimizer steps that the ranks record.
        options: how to read.
        weights: the stored weights, with which the masters are compared; None: state is stored by name.

    Raises:
        CorruptError: ranks with different numbers of steps, or masters that do not round to the weights.
        UsageError: options that change the set of tensors.
    """
    # State is found by position, so the weights must be exactly those of the trained module.
    if options.drop or options.untie or options.sparse:
        raise UsageError("--with-optimizer: cannot be combined with --drop, --untie or --sparse")
    if len(steps) != 1:
        raise CorruptError(
            f"{facts.path}: its ranks did {sorted(steps)} optimizer steps; all must have the same number"
        )
    if weights is not None:
        from ..tensors.equality import rounds_to

        for master, weight in zip(kinds["master"].tensors, weights.tensors, strict=True):
            if not rounds_to(master.content, weight.content):
                raise CorruptError(f"{facts.path}: {master.name}: the float32 master does not round to the weight")
    moments = tuple(
        replace(item, name=f"{item.name}.{kind}")
        for kind in ("exp_avg", "exp_avg_sq")
        for item in kinds[kind].tensors
        if not item.name.endswith(EXPERT_BIASES)
    )
    recorded = finite_number(facts.args.get("weight_decay"))
    return replace(
        kinds["master"],
        optimizer=moments,
        optimizer_steps=next(iter(steps)),
        remarks=[*kinds["master"].remarks, "the weights are the float32 masters of the optimizer"],
        weight_decay=MEGATRON_WEIGHT_DECAY if recorded is None else recorded,
    )


def _state_chunks(rank: _Rank, kind: str) -> list[Mapping[str, Tensor]]:
    """The optimizer's tensors of one kind, in place of the weights."""
    if rank.state is None:
        raise CorruptError(f"{rank.path}: has no optimizer state")
    return [{name: rank.state.tensors[kind][chunk, name] for name in each} for chunk, each in enumerate(rank.chunks)]


@dataclass(frozen=True, kw_only=True)
class RankMetadata:
    """What the files record apart from tensors; ``path`` is one of the files, for messages."""

    path: Path
    args: Mapping[str, Any]
    version: float
    step: int
    progress: TrainingProgress = UNKNOWN_PROGRESS


def assemble(
    facts: RankMetadata, stages: list[dict[str, list[Tensor]]], layers: Mapping[str, int], options: ReadOptions
) -> MegatronCheckpoint:
    """Merge stages under DynMo's names.

    Args:
        facts: what the files record apart from tensors.
        stages: in layer order; for each canonical name, with global layer numbers, the tensors of all tensor-parallel
            ranks, in rank order. A split weight has the shape of its slice on each rank, a replicated one its whole
            shape.
        layers: number of layers of ``encoder`` and ``decoder``.
        options: how to read.

    Raises:
        CorruptError: replicas that differ.
        UnsupportedError: an argument or tensor without a rule.
        UsageError: the model needs an option.
    """
    merged: dict[str, list[Tensor]] = {}
    copies: list[Copy] = []
    dropped: dict[str, None] = {}
    # An untied model has its head under this name; the copy on the last stage then is a weight of its own.
    if options.untie:
        stages = [{OUTPUT_LAYER if name == HEAD_COPY else name: ranks for name, ranks in s.items()} for s in stages]
    for stage in stages:
        for name, ranks in stage.items():
            if any(fnmatchcase(name, pattern) for pattern in options.drop):
                dropped[name] = None
                continue
            # Two stages may have the same tensor: the first one of a T5's decoder the embedding, the last one a copy of
            # the word table for the head. Megatron keeps them equal by an all-reduce of their gradients, so a
            # difference is an error.
            original = merged.get(WORD_TABLE if name == HEAD_COPY else name)
            if original is not None:
                copies += [
                    (f"{short_name(name)} of two stages, tensor-parallel rank {r}", *two)
                    for r, two in _pairs(original, ranks)
                ]
            elif name == HEAD_COPY:
                raise CorruptError(f"{facts.path}: has {HEAD_COPY}, but no earlier stage has the embedding")
            else:
                merged[name] = ranks
    num_ranks = max((len(ranks) for ranks in merged.values()), default=1)
    dense = None
    if any(name.endswith(ROW_OFFSETS) for name in merged):
        from .sparse import densify  # imports numpy, which listing tensor names does not need

        dense = densify(str(facts.path), merged)
        merged = dense.tensors
    family = family_of(merged)
    args = check_args(str(facts.path), family, facts.args, options.ignore_config)
    remarks = [*(dense.remarks if dense else ()), *(f"{short_name(name)}: left out by --drop" for name in dropped)]
    given = {"vocab_size": options.vocab_size, "num_attention_heads": options.num_attention_heads}
    model = model_of(str(facts.path), family, args, merged, layers, num_ranks, given, remarks)
    if family == "llama":
        # What is stored decides, not the argument: an option may have renamed or dropped the head.
        model["tied_embeddings"] = OUTPUT_LAYER not in merged
    ties = model_ties(model)
    # Version 3.0 renamed arguments; its rows have the order of version 2.0.
    variant = {0.0: "0", 1.0: "1"}.get(facts.version, "2")
    layout = layout_of(load_map(f"legacy_{family}", variant), model, foreign_vocab_size=model["padded_vocab_size"])
    tensors, equal = to_native(layout, merged, ties)
    if not options.headers_only:
        copies += [(pair.what, pair.one, pair.other) for pair in equal]
        remarks += _compare_replicas(layout, merged, copies, options)
    return MegatronCheckpoint(
        model=model,
        tensors=tensors,
        ties=ties,
        step=facts.step,
        remarks=remarks,
        masks=_masks(layout, dense.masks) if dense and options.sparse else {},
        scratch=dense.scratch if dense else None,
        progress=facts.progress,
    )


def _masks(layout: Layout, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks of sparse weights by DynMo's name of the weight."""
    links = {link.foreign: link for link in layout.links}
    unlike = [name for name in masks if links[name].native_axes != links[name].foreign_axes]
    if unlike:
        raise UnsupportedError(f"masks of weights whose rows are reordered are not supported: {short_names(unlike)}")
    return {links[name].native: mask for name, mask in masks.items()}


def _pairs(left: Sequence[Tensor], right: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    return enumerate(zip(left, right, strict=True))


def _read_ranks(directory: Path, with_optimizer: bool) -> list[list[_Rank]]:
    """The files of all ranks: ``[tensor-parallel rank][pipeline stage]``."""
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
        raise CorruptError(
            f"{directory}: {len(missing)} of {tensor_ranks * stages} ranks are missing: {short_names(missing)}"
        )
    name_map = load_map("legacy_gpt", "2")
    files = {place: open_rank(child) for place, child in found.items()}
    check_ranks({(tensor, stage, 0): file for (tensor, stage), file in files.items()})
    grid = [[_read_rank(files[t, p], name_map, with_optimizer) for p in range(stages)] for t in range(tensor_ranks)]
    first = grid[0][0]
    check_iteration(directory, first.step)
    rows = sum(row[0].chunks[0][WORD_TABLE].shape[0] for row in grid if WORD_TABLE in row[0].chunks[0])
    is_complete = any(NORM in name for name in grid[0][-1].chunks[-1])
    check_grid(directory, first.args, tensor_ranks, rows, is_complete)
    # Megatron saves without an atomic rename. So a job that was killed leaves ranks of different iterations.
    for rank in (rank for row in grid for rank in row):
        if (rank.version, len(rank.chunks), rank.step) != (grid[0][0].version, len(grid[0][0].chunks), grid[0][0].step):
            raise CorruptError(
                f"{rank.path}: version, number of chunks and iteration must be those of {grid[0][0].path}"
            )
    return grid


def open_rank(directory: Path) -> TorchFile:
    """The file of a rank that has the model."""
    return open_torch(directory / next(name for name in MODEL_FILES if (directory / name).is_file()))


def _read_rank(file: TorchFile, name_map: NameMap, with_optimizer: bool) -> _Rank:
    chunks = []
    for flat in chunks_of_file(file):
        named = legacy_names(flat) if is_core(flat) else flat
        chunks.append({name_map.canonical(name): tensor for name, tensor in named.items()})
    tree = file.tree
    known, step = read_args(tree, str(file.path)), step_of(file)
    # Without a number: written before 2020-09-29, with the rows of version 0.
    version = tree.get("checkpoint_version", 0)
    if not isinstance(version, int | float):
        raise CorruptError(f"{file.path}: checkpoint_version {short_repr(version)} must be a number")
    state = _read_state(file, chunks, known, step) if with_optimizer else None
    progress = read_progress(tree, known, step, file.number)
    return _Rank(
        path=file.path, chunks=chunks, args=known, version=float(version), step=step, state=state, progress=progress
    )


def _read_state(file: TorchFile, chunks: Sequence[Mapping[str, Tensor]], args: Args, step: int) -> OptimizerState:
    """The optimizer state of a rank, from its own file or from those of the distributed optimizer."""
    if is_distributed(file.path.parent):
        return read_distributed(file, chunks, args, step)
    return read_state(file, chunks)


def chunks_of_file(file: TorchFile) -> list[dict[str, Tensor]]:
    """The tensors of each virtual chunk of a rank by dotted name, of any shape.

    Raises:
        CorruptError: the file has no model.
    """
    tree = file.tree
    if not isinstance(tree, dict):
        raise CorruptError(f"{file.path}: has no dictionary")
    # By number, because "model10" sorts before "model2".
    keys = (
        ["model"]
        if "model" in tree
        else sorted((k for k in tree if re.fullmatch(r"model\d{1,9}", str(k))), key=_number)
    )
    if not keys:
        raise CorruptError(f"{file.path}: has no key 'model'; it has {short_repr(sorted(map(str, tree)))}")
    return [flatten(file, tree[key]) for key in keys]


def step_of(file: TorchFile) -> int:
    """The iteration of the file of a rank; ``total_iters`` is its key of 2019.

    Raises:
        CorruptError: it must be an integer.
    """
    step = file.tree.get("iteration", file.tree.get("total_iters", 0))
    if not isinstance(step, int):
        raise CorruptError(f"{file.path}: iteration {short_repr(step)} must be a number")
    return step


def _number(key: str) -> int:
    return int(key.removeprefix("model"))


def flatten(file: TorchFile, value: Any) -> dict[str, Tensor]:
    """Tensors of nested dictionaries by dotted name; ``_extra_state`` entries, which have no weights, are left out.

    Raises:
        CorruptError: dictionaries nested deeper than ``MAX_DICT_DEPTH``, or more than ``MAX_DICT_ENTRIES`` entries. A
            pickle of a few bytes reaches both limits, by a dictionary that contains itself or one dictionary twice.
    """
    found: dict[str, Tensor] = {}
    pending, num_entries = [(0, "", value)], 0
    while pending:  # a stack, so that tensors keep the order of the dictionaries: optimizer state is by position
        depth, prefix, inner = pending.pop()
        if isinstance(inner, TensorRef):
            found[prefix] = file.tensor(inner, prefix)
        elif isinstance(inner, dict):
            num_entries += len(inner)
            if depth > MAX_DICT_DEPTH or num_entries > MAX_DICT_ENTRIES:
                raise CorruptError(
                    f"{file.path}: nested dictionaries must have at most {MAX_DICT_DEPTH} levels and "
                    f"{MAX_DICT_ENTRIES:,} entries"
                )
            named = [(_key_name(file, key), each) for key, each in inner.items() if isinstance(each, TensorRef | dict)]
            pending += reversed(
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
    """The chunks of all stages in layer order, with global layer numbers, and the number of layers of each stack.

    Virtual stages: chunk 0 of all stages comes before chunk 1 of any.
    """
    chunks, stages = len(grid[0][0].chunks), len(grid[0])
    result = []
    counts = {"encoder": 0, "decoder": 0}
    for chunk in range(chunks):
        for stage in range(stages):
            ranks = [row[stage].chunks[chunk] for row in grid]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise CorruptError(f"{grid[0][stage].path}: its tensor-parallel ranks have different tensor names")
            # Each stage numbers its layers from 0. The global number is the count of layers before it: a product of
            # stage and layers per stage would be wrong for uneven stages.
            begins = dict(counts)
            for stack in counts:
                found = [match for name in ranks[0] if (match := LAYER_NAME.match(name)) and match[1] == stack]
                numbers = {int(match[2]) for match in found}
                if numbers != set(range(len(numbers))):
                    raise CorruptError(
                        f"{grid[0][stage].path}: its layers are {short_repr(sorted(numbers))}; they must be numbered "
                        "from 0"
                    )
                counts[stack] += len(numbers)

            def numbered(match: re.Match[str], begins: Mapping[str, int] = begins) -> str:
                return f"language_model.{match[1]}.layers.{int(match[2]) + begins[match[1]]}."

            result.append({LAYER_NAME.sub(numbered, name): [rank[name] for rank in ranks] for name in ranks[0]})
    check_stages(grid[0][0].path, result, WORD_TABLE, LAYER_NAME, NORM)
    return result, counts


def _compare_replicas(
    layout: Layout, merged: Mapping[str, list[Tensor]], copies: list[Copy], options: ReadOptions
) -> Iterator[str]:
    """Compare replicated tensors and copies of the embedding; yields a remark for each difference that is permitted."""
    for name in {link.foreign: None for link in layout.links if not link.split and link.foreign in merged}:
        for rank, part in enumerate(merged[name][1:], 1):
            copies.append((f"{name} of tensor-parallel ranks 0 and {rank}", merged[name][0], part))
    yield from compare_copies(copies, options)


def compare_copies(copies: Sequence[Copy], options: ReadOptions) -> Iterator[str]:
    """Compare what is stored twice, of any shape; yields a remark for each difference that is permitted.

    Raises:
        CorruptError: a difference, unless the first replica is chosen.
    """
    from ..tensors.equality import equal_bytes  # imports numpy, which listing tensor names does not need

    for what, one, other in copies:
        if not equal_bytes(one, other):
            if options.first_replica:
                yield f"{what} differ; the first one is used"
                continue
            path = other.pieces[0].view.array.path
            raise CorruptError(
                f"{path}: {what} differ; replicas must be equal. The checkpoint contradicts itself; "
                "--replicas first uses the first replica"
            )
