"""Torch's distributed checkpoints (DCP: ``.metadata`` and ``*.distcp``), read without executing the pickle.

::

    .metadata  --open_dcp-->  tensors by full name  --plain_names-->  core, titan or hf

    core   Megatron-core: common.pt has its arguments            --> megatron.read.assemble,
                                                                     megatron.read_core_decoder
    titan  torchtitan and Meta's Llama, with a config.json       --> assemble.from_map, read_titan_optimizer
    hf     transformers, with a config.json                      --> assemble.from_map

``.metadata`` pickles a ``Metadata`` object: for each tensor its size and chunks, and for each chunk a file, an offset
and a length. There the file has what ``torch.save`` wrote for the chunk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .._common.document import (
    is_count,
    short_repr,
)
from .._common.errors import UsageError
from ..formats.choices import ReadOptions, WriteOptions
from ..huggingface.files import WRAPPERS, read_config, read_generation_config, without_wrappers
from ..huggingface.models import ARCHITECTURES
from ..huggingface.source_config import source_of
from ..huggingface.tokenizer import carried_files
from ..io.errors import CorruptError, NoOptimizerStateError, UnsupportedError, short_name, short_names
from ..io.files import read_file, read_tracker
from ..io.safetensors import DTYPE_BYTES
from ..megatron.arguments import read_args
from ..megatron.check_places import check_iteration
from ..megatron.config_args import config_args
from ..megatron.core_decoder import OUTPUT, WORD, is_decoder
from ..megatron.core_names import EXTRA_STATE, legacy_names
from ..megatron.read import (
    LAYER_NAME,
    OUTPUT_LAYER,
    STATE_KINDS,
    WORD_TABLE,
    MegatronCheckpoint,
    RankMetadata,
    assemble,
    assemble_state,
    with_state,
)
from ..megatron.read_core_buckets import REMEDY, flat_state, is_flat, read_flat
from ..megatron.read_core_decoder import assemble_decoder, assemble_decoder_state
from ..megatron.read_decoder_buckets import read_flat_decoder
from ..megatron.training_progress import read_progress
from ..megatron.write_core import plan_core
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan
from ..tensors.views import Piece, Tensor
from ..torch_save.pickles import MAX_PICKLE_BYTES, GlobalName, OpaquePickle, TensorRef, load_pickle
from ..torch_save.reader import TorchFile, open_torch
from .assemble import from_map, from_megatron, model_from_config, state_decisions
from .read_titan_optimizer import with_optimizer_state
from .registry import MEGATRON_OPTIONS, CheckpointFormat
from .titan_models import titan_tensors

METADATA, COMMON = ".metadata", "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
# The number of one of several optimizers.
CHAINED = re.compile(r"^chained_\d{1,6}\.")
GROUPS_OBJECT = re.compile(r"(?:chained_\d{1,6}\.)?optimizer\.distributed\.dp_group_idx_\d{1,6}\.optimizer/shard_0_1")
TRACKER = "latest_checkpointed_iteration.txt"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "bool": "BOOL",
    "uint8": "U8",
}
# Prefixes of the float32 weights, by release of Megatron-core.
MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
MOMENTS = {kind: f"optimizer.state.{kind}." for kind in STATE_KINDS[1:]}
# The name of the word embedding, which every model has, shows the naming scheme of all names.
ANCHORS = {
    "embedding.word_embeddings.weight": "core",
    "tok_embeddings.weight": "titan",
    "model.embed_tokens.weight": "hf",
    "embed_tokens.weight": "hf",
    "transformer.wte.weight": "hf",
    "wte.weight": "hf",
}
OPTIMIZER_NAME = re.compile(r"(.*\.)?optim(izer)?\.")


@dataclass(frozen=True, kw_only=True)
class DistributedCheckpoint:
    """The contents of a directory.

    Attributes:
        directory: the directory with ``.metadata``.
        tensors: by full name.
        common: the contents of Megatron-core's ``common.pt``; empty where there is none.
        other: names of entries that are not tensors.
        common_file: the file of ``common``.
        places: for each of ``other`` its place in the files, where it has one.
    """

    directory: Path
    tensors: Mapping[str, Tensor]
    common: Mapping[str, Any]
    other: tuple[str, ...]
    common_file: TorchFile | None = None
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def object(self, name: str) -> TorchFile:
        """An entry that is not a tensor; Megatron-core stores a list of one object with ``torch.save``.

        Raises:
            UnsafePickleError: it refers to more than plain data.
            CorruptError: it has no place in the files, or is not what ``torch.save`` wrote.
        """
        if name not in self.places:
            raise CorruptError(f"{self.directory / METADATA}: no file is recorded for {short_name(name)}")
        return _stored_file(self.directory, name, self.places[name])

    def number(self, value: Any) -> int | float | None:
        """A number in ``common``, stored as a number or as a tensor of one element; None for anything else."""
        if self.common_file is not None:
            return self.common_file.number(value)
        return value if isinstance(value, int | float) else None


def is_dcp(path: Path) -> bool:
    """Whether ``path`` is a distributed checkpoint, or a Megatron-core run whose latest iteration is one."""
    return (path / METADATA).is_file() or any((path / name / METADATA).is_file() for name in _iterations(path))


def _iterations(path: Path) -> list[str]:
    tracker = path / TRACKER
    if not tracker.is_file():
        return []
    text = read_tracker(tracker).strip()
    return ["release"] if text == "release" else [f"iter_{int(text):07d}"] if is_count(text) else []


def open_dcp(path: Path, step: int | None) -> DistributedCheckpoint:
    """Index a distributed checkpoint; no tensor's bytes are read.

    Raises:
        UnsafePickleError: the metadata refers to more than plain data.
        CorruptError: files are missing or contradict the metadata.
        UnsupportedError: transformed (for example compressed) bytes, or a tensor that is not dense.
        UsageError: the step is missing.
    """
    directory = _directory(path, step)
    source = str(directory / METADATA)
    try:
        tree = load_pickle(read_file(directory / METADATA, MAX_PICKLE_BYTES), source)
    except OSError as error:
        raise CorruptError(f"{source}: cannot be read: {error.strerror}") from error
    entries, places = _fields(tree, source)
    originals = _original_shapes(tree)
    locations = {(index["fqn"], _sizes(index.get("offset"))): info for index, info in places}
    tensors, other = {}, []
    for name, entry in entries.items():
        kind = entry.type.name if isinstance(entry, OpaquePickle) else ""
        if kind != "TensorStorageMetadata":
            other.append(name)
        elif EXTRA_STATE not in name:
            tensor = _tensor(directory, name, entry.attributes, locations)
            tensors[name] = _with_original_shape(f"{source}: {short_name(name)}", tensor, originals.get(name))
    placed = {name: locations[name, None] for name in other if (name, None) in locations}
    found = DistributedCheckpoint(directory=directory, tensors=tensors, common={}, other=tuple(other), places=placed)
    file = open_torch(directory / COMMON) if (directory / COMMON).is_file() else None
    tree = None if file is None else file.tree
    if file is None and COMMON_OBJECT in placed:
        # Since 2026, Megatron-core stores what was in common.pt as an object like others.
        file = found.object(COMMON_OBJECT)
        tree = file.tree[0] if isinstance(file.tree, list) and len(file.tree) == 1 else file.tree
    return replace(found, common=tree if isinstance(tree, dict) else {}, common_file=file)


def _directory(path: Path, step: int | None) -> Path:
    if (path / METADATA).is_file():
        if step is not None:
            raise UsageError(f"{path}: has one checkpoint; --step selects an iteration of a run directory")
        return path
    name = _iterations(path)[0] if step is None else f"iter_{step:07d}"
    if not (path / name / METADATA).is_file():
        raise UsageError(f"{path / name}: is missing, or has no {METADATA}; choose another --step")
    return path / name


def _fields(tree: Any, source: str) -> tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The entries by name, and for each chunk its index and its place in the files."""
    metadata = tree.attributes if isinstance(tree, OpaquePickle) else {}
    entries, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise CorruptError(f"{source}: not the metadata of a distributed checkpoint")
    # `storage_data` is a dictionary with objects as keys: `MetadataIndex` to `_StorageInfo`.
    pairs = [
        (k.attributes, v.attributes)
        for k, v in places.items()
        if isinstance(k, OpaquePickle) and isinstance(v, OpaquePickle)
    ]
    names = [*entries, *(index.get("fqn") for index, _ in pairs)]
    if len(pairs) != len(places) or not all(isinstance(name, str) for name in names):
        raise CorruptError(f"{source}: storage_data has entries that are not places of chunks")
    return entries, pairs


def _tensor(
    directory: Path, name: str, entry: Mapping[str, Any], locations: Mapping[tuple[Any, Any], Mapping[str, Any]]
) -> Tensor:
    """One tensor, assembled from its chunks."""
    source = f"{directory / METADATA}: {short_name(name)}"
    shape, chunks = _sizes(entry.get("size")), entry.get("chunks")
    dtype = _dtype(entry.get("properties"))
    if shape is None or not isinstance(chunks, list) or dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"{source}: not a dense tensor of a supported type")
    pieces: list[Piece] = []
    for chunk in chunks:
        fields = chunk.attributes if isinstance(chunk, OpaquePickle) else {}
        begin, extents = _sizes(fields.get("offsets")), _sizes(fields.get("sizes"))
        if begin is None or extents is None or not len(begin) == len(extents) == len(shape):
            raise CorruptError(f"{source}: a chunk has no valid offsets and sizes")
        if any(b + n > size for b, n, size in zip(begin, extents, shape, strict=True)):
            raise CorruptError(f"{source}: a chunk exceeds the shape {list(shape)}")
        # The offset of a `MetadataIndex` is optional: without it, the tensor has one chunk.
        info = locations.get((name, begin), locations.get((name, None)))
        if info is None:
            raise CorruptError(f"{source}: no file is recorded for the chunk at {list(begin)}")
        part = _stored(directory, name, info)
        if part.shape != extents or part.dtype != dtype:
            raise CorruptError(
                f"{source}: the file has {part.dtype} {list(part.shape)}, expected {dtype} {list(extents)}"
            )
        pieces += [Piece(begin, piece.view) for piece in part.pieces]
    tensor = Tensor(dtype, shape, tuple(pieces))
    # is_covered compares numbers of elements only: an overlap could hide a gap of the same size.
    if not tensor.is_covered or _overlap(pieces):
        raise CorruptError(f"{source}: its chunks must cover the tensor exactly once")
    return tensor


def _original_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors that Megatron-core stores flattened, by name."""
    data = tree.attributes.get("mcore_data") if isinstance(tree, OpaquePickle) else None
    shapes = {
        name: _sizes(each.get("nd_reformulated_orig_global_shape"))
        for name, each in (data.items() if isinstance(data, dict) else ())
        if isinstance(name, str) and isinstance(each, dict)
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _with_original_shape(source: str, tensor: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """A tensor of ``fully_sharded_model_space`` in its own shape.

    Before 0.14, Megatron-core stores such a tensor ``[X, Y]``, of which each rank has ``[x, y]``, as
    ``[X/x, Y/y, x*y]``: a grid of the ranks' parts, each flat.
    """
    if shape is None:
        return tensor
    grid, flat = tensor.shape[:-1], tensor.shape[-1]
    part = [size // cells if cells else 0 for size, cells in zip(shape, grid, strict=False)]
    is_grid = len(grid) == len(shape) and [p * g for p, g in zip(part, grid, strict=True)] == list(shape)
    if not is_grid or math.prod(part) != flat:
        raise CorruptError(f"{source}: a flat tensor {list(tensor.shape)} cannot have the shape {list(shape)}")
    whole = tensor.unflatten(len(shape), part)
    # [X/x, Y/y, x, y] -> [X/x, x, Y/y, y] -> [X, Y]
    whole = whole.permute([at for dim in range(len(shape)) for at in (dim, len(shape) + dim)])
    for dim in range(len(shape)):
        whole = whole.flatten(dim)
    return whole


def _overlap(pieces: list[Piece]) -> bool:
    """Whether two chunks overlap. Chunks are few, so every pair that overlaps in the first dimension is compared."""
    spans = [
        [(b, b + n) for b, n in zip(piece.begin, piece.view.shape, strict=True)] for piece in pieces if piece.view.shape
    ]
    ordered = sorted(spans)
    for at, one in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if other[0][0] >= one[0][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True)):
                return True
    return False


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, tuple | list) and all(isinstance(n, int) and n >= 0 for n in value):
        return tuple(value)
    return None


def _dtype(properties: Any) -> str:
    """The type: torch pickles ``TensorProperties`` as a tuple whose first element is the dtype."""
    fields = properties.attributes if isinstance(properties, OpaquePickle) else {}
    state = fields.get("state", (fields.get("dtype"),))
    name = state[0] if isinstance(state, tuple) and state else None
    return DTYPES.get(name.name, "") if isinstance(name, GlobalName) and name.module == "torch" else ""


def _stored(directory: Path, name: str, info: Mapping[str, Any]) -> Tensor:
    """The tensor that ``torch.save`` wrote at a place of a file."""
    file = _stored_file(directory, name, info)
    if not isinstance(file.tree, TensorRef):
        raise CorruptError(f"{file.path}: {short_name(name)}: a {type(file.tree).__name__} in place of a tensor")
    return file.tensor(file.tree, name)


def _stored_file(directory: Path, name: str, info: Mapping[str, Any]) -> TorchFile:
    """What ``torch.save`` wrote at a place of a file."""
    source = f"{directory / METADATA}: {short_name(name)}"
    path, begin, length = info.get("relative_path"), info.get("offset"), info.get("length")
    # The path is from an untrusted file and must not lead out of the directory.
    if not isinstance(path, str) or "/" in path or path in ("", ".", "..") or path.startswith("."):
        raise CorruptError(
            f"{source}: is stored in {short_repr(path)}; it must be a plain file name in the same directory"
        )
    if info.get("transform_descriptors"):
        raise UnsupportedError(
            f"{source}: was transformed by {short_repr(info['transform_descriptors'])}; only plain bytes are supported"
        )
    if not isinstance(begin, int) or not isinstance(length, int):
        raise CorruptError(f"{source}: offset {short_repr(begin)} and length {short_repr(length)} must be integers")
    return open_torch(directory / path, begin, length)


def plain_names(tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """The naming scheme of a state dict (``core``, ``titan``, ``hf``), and its weights without prefixes of wrappers.

    Optimizer tensors are left out.

    Args:
        tensors: the tensors of the state dict by name, of any shape; shapes do not change.

    Raises:
        UnsupportedError: no word embedding has a known name.
    """
    named = {name: tensor for name, tensor in tensors.items() if not OPTIMIZER_NAME.match(name)}
    named = without_wrappers(named)
    found = [(name, anchor) for anchor in ANCHORS for name in named if name == anchor or name.endswith(f".{anchor}")]
    if not found:
        raise UnsupportedError(
            f"state dict of an unknown model: it must have one of {', '.join(ANCHORS)}; it has "
            f"{short_names(sorted(named))}"
        )
    # The shortest prefix: `model.embed_tokens.weight` also ends with the anchor `embed_tokens.weight`, and then
    # `model.` would be taken for the name of a wrapper.
    table, anchor = min(found, key=lambda pair: len(pair[0]) - len(pair[1]))
    outer = table.removesuffix(anchor)
    inner = {name.removeprefix(outer): tensor for name, tensor in named.items()}
    return ANCHORS[anchor], inner


def read_dcp(path: Path, options: ReadOptions) -> tuple[NativeCheckpoint, list[str]]:
    """Open a distributed checkpoint of Megatron-core, transformers or torchtitan.

    Raises:
        UsageError: a state dict with transformers' or Meta's names, and no ``config.json``; or the step is missing.
        CorruptError: files are missing or contradict the metadata.
        UnsupportedError: transformed bytes, an unknown model, or tensors that the map does not have.
        NoOptimizerStateError: the optimizer state was requested, and there is none.
        UnsafePickleError: a pickle refers to more than plain data.
    """
    found = open_dcp(path, options.step)
    kind, tensors = plain_names(found.tensors)
    if kind == "core":
        return from_megatron(_core(found, tensors, options), path, found.directory, options)
    if options.with_optimizer:
        if not any(map(OPTIMIZER_NAME.match, (*found.tensors, *found.other))):
            raise NoOptimizerStateError(
                f"{found.directory}: has no optimizer state; convert the weights alone with --no-optimizer"
            )
        if kind != "titan":
            raise UnsupportedError(
                f"{found.directory}: optimizer state is read from checkpoints of Megatron-core and torchtitan only; "
                "convert the weights alone with --no-optimizer"
            )
    config = _config(found.directory, options)
    name = "" if kind == "titan" else _map_of(config, found.directory)
    model = model_from_config(config, (options.config or found.directory) / "config.json", options)
    # Without one next to the configuration: that of a conversion from a Hugging Face directory.
    places = (options.config or found.directory, found.directory / "tokenizer")
    generation = next(filter(None, map(read_generation_config, places)), None)
    source, run_id = source_of(config, generation), path.resolve().name
    drop = options.drop
    if kind != "titan":
        return from_map(found.directory, model, name, tensors, drop, run_id=run_id, source=source, untie=options.untie)
    titan, tensors = titan_tensors(found.directory, model, tensors, drop)
    checkpoint, remarks = from_map(
        found.directory,
        model,
        titan.map,
        tensors,
        drop,
        run_id=run_id,
        source=source,
        variant=titan.variant,
        untie=options.untie,
    )
    if options.with_optimizer:
        checkpoint = with_optimizer_state(found, checkpoint, titan, drop, WRAPPERS)
    return checkpoint, remarks


def _config(directory: Path, options: ReadOptions) -> Mapping[str, Any]:
    if options.config is not None:
        return read_config(options.config)
    if not (directory / "config.json").is_file():
        raise UsageError(
            f"{directory}: a state dict does not record the numbers of heads and positions; give --config, a directory "
            "with the model's config.json of transformers"
        )
    return read_config(directory)


def _map_of(config: Mapping[str, Any], directory: Path) -> str:
    known = ARCHITECTURES.get(str(config.get("model_type")))
    if known is None:
        raise UnsupportedError(
            f"{directory}: model_type {short_repr(config.get('model_type'))} is unknown; choose from "
            f"{', '.join(ARCHITECTURES)}"
        )
    return known.map


def _core(found: DistributedCheckpoint, tensors: Mapping[str, Tensor], options: ReadOptions) -> MegatronCheckpoint:
    """Megatron-core's tensors are not split: they make one stage on one tensor-parallel rank."""
    args = read_args(found.common, str(found.directory)) or config_args(options, found.directory)
    number = found.common.get("iteration", 0)
    step = number if isinstance(number, int) else 0
    check_iteration(found.directory, step)
    progress = read_progress(found.common, args, step, found.number)
    # Version 3.0, because Megatron-core has its order of query, key and value rows.
    facts = RankMetadata(path=found.directory, args=args, version=3.0, step=step, progress=progress)
    is_own = is_decoder(tensors, args)
    if not options.with_optimizer:
        return assemble_decoder(facts, tensors, options) if is_own else assemble(facts, *_stage(tensors), options)
    if not any(CHAINED.sub("", name).startswith("optimizer.") for name in (*found.tensors, *found.other)):
        raise NoOptimizerStateError(
            f"{found.directory}: has no optimizer state; convert the weights alone with --no-optimizer"
        )
    state: dict[str, tuple[list[dict[str, list[Tensor]]], Mapping[str, int]]] = {}
    if is_flat([*found.tensors, *found.other]):
        flats = [flat_state(found.directory, found.tensors, found.other, found.object, number) for number in range(2)]
        if is_own:
            tables = {name: tensors[name] for name in (WORD, OUTPUT) if name in tensors}
            kinds = read_flat_decoder(flats, assemble_decoder(facts, tensors, options), tables, args)
            return with_state(facts, kinds, _steps(found), options)
        stages, layers = _stage(tensors)
        tables = {name: ranks[0] for name, ranks in stages[0].items() if name in (WORD_TABLE, OUTPUT_LAYER)}
        parts = read_flat(flats[0], assemble(facts, stages, layers, options), tables, args)
        state = {kind: (each, layers) for kind, each in parts.items()}
        return assemble_state(facts, state, _steps(found), options, (stages, layers))
    by_name = _state_by_name(found, tensors)
    if is_own:
        return assemble_decoder_state(facts, tensors, by_name, _steps(found), options)
    return assemble_state(facts, {kind: _stage(part) for kind, part in by_name.items()}, _steps(found), options)


def _state_by_name(found: DistributedCheckpoint, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer state of each kind by the name of the weight.

    Args:
        found: the checkpoint.
        weights: by name.

    Raises:
        UnsupportedError: there is no state of a kind, or it is not float32.
    """
    # Of several optimizers, such as that of the experts, some releases number the names.
    stored = {CHAINED.sub("", name): tensor for name, tensor in found.tensors.items()}
    state = {}
    for kind in STATE_KINDS:
        prefixes = MASTERS if kind == "master" else (MOMENTS[kind],)
        part = {n.removeprefix(p): t for p in prefixes for n, t in stored.items() if n.startswith(p)}
        # A run in float32 has no masters: the weights themselves are the float32 parameters of Adam.
        if kind == "master" and not part and any(name.startswith(MOMENTS["exp_avg"]) for name in stored):
            part = dict(weights)
        if not part or any(tensor.dtype != "F32" for tensor in part.values()):
            raise UnsupportedError(f"{found.directory}: has no float32 {kind} of each weight; {REMEDY}")
        state[kind] = part
    return state


def _stage(tensors: Mapping[str, Tensor]) -> tuple[list[dict[str, list[Tensor]]], dict[str, int]]:
    named = legacy_names(tensors)
    numbers = [int(match[2]) for name in named if (match := LAYER_NAME.match(name))]
    return [{name: [tensor] for name, tensor in named.items()}], {"encoder": max(numbers, default=-1) + 1, "decoder": 0}


def _steps(found: DistributedCheckpoint) -> set[int]:
    """Numbers of optimizer steps that are recorded: Megatron-core has one, next to the parameter groups."""
    optimizer: Any = found.common.get("optimizer")
    recorded = []
    # Several optimizers are numbered.
    several = isinstance(optimizer, dict) and optimizer and all(isinstance(key, int) for key in optimizer)
    for each in optimizer.values() if several else (optimizer,):
        inner = each.get("optimizer", each) if isinstance(each, dict) else {}
        state = inner.get("state", {}) if isinstance(inner, dict) else {}
        recorded += [state.get("common_step")] if isinstance(state, dict) else []
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        recorded += [g.get("step") for g in (groups if isinstance(groups, list) else ()) if isinstance(g, dict)]
    steps = {int(number) for number in map(found.number, recorded) if number is not None}
    # The flat forms have the parameter groups of each model-parallel rank as an object.
    for name in found.other:
        if GROUPS_OBJECT.fullmatch(name):
            file = found.object(name)
            tree = file.tree[0] if isinstance(file.tree, list) and len(file.tree) == 1 else None
            listed = tree.get("param_groups") if isinstance(tree, dict) else None
            numbers = [file.number(g.get("step")) for g in listed or () if isinstance(g, dict)]
            steps |= {int(number) for number in numbers if number is not None}
    iteration = found.common.get("iteration")
    return steps or ({iteration} if isinstance(iteration, int) else set())


def write_core(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan a distributed checkpoint as Megatron-core writes it.

    Raises:
        UnsupportedError: a family other than GPT and Llama, or a tensor without a map.
    """
    files, small = plan_core(checkpoint, dtype=options.dtype, with_optimizer=options.with_optimizer)
    small |= carried_files(checkpoint, options.tokenizer, f"iter_{checkpoint.manifest['step']:07d}")
    return ExportPlan(files=tuple(files), small_files=small, decisions=state_decisions(checkpoint, options))


TORCH_DCP = CheckpointFormat(
    name="dcp",
    description="torch.distributed.checkpoint: Megatron-core, torchtitan, transformers; written as Megatron-core does",
    marker=".metadata",
    detect=is_dcp,
    read=read_dcp,
    write=write_core,
    stores_optimizer=True,
    has_steps=True,
    options=MEGATRON_OPTIONS,
)
