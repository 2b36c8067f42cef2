"""Reads DeepSpeed's checkpoints: pipeline layer files, or one module's states for each tensor-parallel rank.

============  ==========================================  =================================================
ZeRO          weights                                     optimizer state
============  ==========================================  =================================================
none          16-bit, in the model's files                in the model's files, by position
1 and 2       16-bit, in the model's files                ``zero_pp_rank_*`` shards
3             float32, in the ``zero_pp_rank_*`` shards   the same shards
============  ==========================================  =================================================

A layer file ``layer_LL-model_TT-model_states.pt`` has one layer: the embedding first, then the blocks, then the final
norm and the head. A module under the names of transformers, as its Trainer and Accelerate save it, has a
``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._common.document import (
    is_count,
    short_repr,
)
from .._common.errors import UsageError
from ..formats.choices import ReadOptions, WriteOptions
from ..huggingface.files import read_config, read_generation_config
from ..huggingface.models import ARCHITECTURES
from ..huggingface.source_config import source_of
from ..huggingface.tokenizer import carried_files
from ..io.errors import CorruptError, NoOptimizerStateError, UnsupportedError, short_name, short_names
from ..io.files import read_tracker
from ..maps.name_map import load_map
from ..megatron.arguments import read_args
from ..megatron.check_places import check_iteration
from ..megatron.config_args import config_args
from ..megatron.read import (
    HEAD_COPY,
    LAYER_NAME,
    STATE_KINDS,
    MegatronCheckpoint,
    RankMetadata,
    assemble,
    assemble_state,
    flatten,
)
from ..megatron.read_optimizer import read_state
from ..megatron.training_progress import TrainingProgress, read_progress
from ..megatron.write_deepspeed import plan_deepspeed
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan
from ..tensors.views import Tensor
from ..torch_save.reader import TorchFile, open_torch
from .assemble import from_map, from_megatron, model_from_config, state_decisions
from .registry import MEGATRON_OPTIONS, CheckpointFormat
from .torch_dcp import ANCHORS, plain_names
from .zero import read_zero, shard_files, shard_state

# A pipeline without tensor parallelism has no "-model_TT" in the names of its layer files.
LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
# ZeRO 3 writes a model file for each data-parallel rank; that of rank 0 has everything that is read from it.
TRANSFORMERS_WORDS = tuple(anchor for anchor, kind in ANCHORS.items() if kind == "hf")
RANK_FILE = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_(\d+)_model_states\.pt")
LM = "language_model."


def is_deepspeed(path: Path) -> bool:
    """Whether ``path`` is a directory of DeepSpeed checkpoints, or one of its steps."""
    return path.is_dir() and ((path / "latest").is_file() or any(path.glob("*mp_rank_*_model_states.pt")))


def open_deepspeed(path: Path, options: ReadOptions) -> MegatronCheckpoint:
    """Index a Megatron-DeepSpeed checkpoint; the bytes of replicas alone are read, to compare them.

    Raises:
        UnsafePickleError: a file refers to more than plain data.
        CorruptError: missing files, or files that contradict each other.
        UnsupportedError: experts, or an unknown layer.
        NoOptimizerStateError: the optimizer state was requested, and there is none.
        UsageError: the step is missing, or the model needs an option.
    """
    directory = step_directory(path, options.step)
    ranks = _numbered(directory, RANK_FILE)
    if not ranks:
        raise CorruptError(f"{directory}: has no mp_rank_*_model_states.pt")
    first = open_torch(ranks[min(ranks)])
    tree = first.tree if isinstance(first.tree, dict) else {}
    args = read_args(tree, str(first.path)) or config_args(options, directory)
    if any(directory.glob("layer_*_expert_*")) or any(directory.glob("expert_*")):
        raise UnsupportedError(f"{directory}: experts (MoE) of DeepSpeed are not supported")
    number = tree.get("iteration", tree.get("global_steps", 0))
    # Megatron-DeepSpeed began after Megatron's version 3.0, so a file without a number has its order of rows. In legacy
    # Megatron such a file has the order of version 0.
    version = tree.get("checkpoint_version", 3.0)
    if not isinstance(number, int) or not isinstance(version, int | float):
        raise CorruptError(f"{first.path}: iteration {short_repr(number)}, checkpoint_version {short_repr(version)}")
    check_iteration(directory, number)
    layers = _layer_files(directory)
    progress = _progress(directory, first, args, number, with_optimizer=options.with_optimizer)
    facts = RankMetadata(path=first.path, args=args, version=float(version), step=number, progress=progress)
    # ZeRO 3 partitions the weights too: the module of the model file has placeholders without elements.
    zero3 = not layers and _is_empty(_tensors(first, "module"))
    stages: list[dict[str, list[Tensor]]] = []
    if not zero3:
        stages = _from_layers(directory, _open_layers(layers)) if layers else _from_modules(directory, ranks)
    if not zero3 and not options.with_optimizer:
        return assemble(facts, stages, _counts(stages), options)
    state, steps = _state(directory, layers, ranks)
    if options.with_optimizer:
        numbered = {kind: (found, _counts(found)) for kind, found in state.items()}
        return assemble_state(facts, numbered, steps, options, None if zero3 else (stages, _counts(stages)))
    found = assemble(facts, state["master"], _counts(state["master"]), options)
    return replace(found, remarks=[*found.remarks, "the weights are the float32 masters of ZeRO 3"])


def _progress(
    directory: Path, first: TorchFile, args: Mapping[str, Any], step: int, *, with_optimizer: bool
) -> TrainingProgress:
    """The progress in the first model file; with optimizer state also the loss scale, from the first shard."""
    shards = shard_files(directory) if with_optimizer else {}
    if not shards:
        return read_progress(first.tree, args, step, first.number)
    shard = open_torch(shards[min(shards)][min(shards[min(shards)])])
    return read_progress(first.tree, args, step, shard.number, shard_state(shard))


def _counts(stages: list[dict[str, list[Tensor]]]) -> dict[str, int]:
    """Number of layers of ``encoder`` and ``decoder``."""
    counts = {"encoder": 0, "decoder": 0}
    for name in {name for stage in stages for name in stage}:
        match = LAYER_NAME.match(name)
        if match:
            counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
    return counts


def _is_empty(tensors: Mapping[str, Tensor]) -> bool:
    return not tensors or any(0 in tensor.shape for tensor in tensors.values())


def _state(
    directory: Path, layers: Mapping[int, Mapping[int, Path]], ranks: Mapping[int, Path]
) -> tuple[dict[str, list[dict[str, list[Tensor]]]], set[int]]:
    """The optimizer state by kind, as the stages of a model; and the numbers of optimizer steps of the ranks."""
    shards = shard_files(directory)
    if not shards:
        return _state_without_zero(directory, layers, ranks)
    if set(shards) != set(ranks):
        raise CorruptError(
            f"{directory}: has optimizer shards of the model-parallel ranks {sorted(shards)}; the model files are of "
            f"the ranks {sorted(ranks)}"
        )
    states = {rank: read_zero(directory, shards[rank], open_torch(ranks[rank])) for rank in sorted(ranks)}
    steps = {each.steps for each in states.values()}
    result = {}
    for kind in STATE_KINDS:
        parts = [states[rank].tensors[kind] for rank in sorted(ranks)]
        if not layers:
            result[kind] = _single_stage(directory, [_unwrapped(part) for part in parts])
            continue
        # The model-parallel ranks of a pipeline rank are consecutive: each slice of `width` is one pipeline rank.
        width = 1 + max(rank for files in layers.values() for rank in files)
        workers = [_by_layer(directory, parts[at : at + width], layers) for at in range(0, len(parts), width)]
        merged = {number: found for worker in workers for number, found in worker.items()}
        result[kind] = _from_layers(directory, dict(sorted(merged.items())))
    return result, steps


def _state_without_zero(
    directory: Path, layers: Mapping[int, Mapping[int, Path]], ranks: Mapping[int, Path]
) -> tuple[dict[str, list[dict[str, list[Tensor]]]], set[int]]:
    """As :func:`_state`, from the model files, which have the optimizer state where there is no ZeRO."""
    files = [open_torch(ranks[rank]) for rank in sorted(ranks)]
    if not all(isinstance(file.tree, dict) and isinstance(file.tree.get("optimizer"), dict) for file in files):
        raise NoOptimizerStateError(
            f"{directory}: has no optimizer state; convert the weights alone with --no-optimizer"
        )
    if layers:
        raise UnsupportedError(
            f"{directory}: the optimizer state of a pipeline without ZeRO has no parameter names and cannot be mapped; "
            "convert the weights alone with --no-optimizer"
        )
    states = []
    for file in files:
        named = {_canonical(name): tensor for name, tensor in _unwrapped(_tensors(file, "module")).items()}
        states.append(read_state(file, [named]))
    result = {}
    for kind in STATE_KINDS:
        parts = [{name: tensor for (_, name), tensor in each.tensors[kind].items()} for each in states]
        result[kind] = _single_stage(directory, parts)
    return result, {each.steps for each in states}


def _unwrapped(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): tensor for name, tensor in part.items()}


def _by_layer(
    directory: Path, parts: Sequence[Mapping[str, Tensor]], layers: Mapping[int, Mapping[int, Path]]
) -> dict[int, list[dict[str, Tensor]]]:
    """The tensors of one pipeline rank, for each of its tensor-parallel ranks, by the number of the layer file.

    The tied embedding is on the first and on the last pipeline rank. The last one has a file for it only where an older
    DeepSpeed wrote it; its state counts as a layer after the last.
    """
    found: dict[int, list[dict[str, Tensor]]] = {}
    # The first file has the embedding. So the second one is the first block, which only the first pipeline rank has.
    first_block = sorted(layers)[1]
    is_first = any(name.startswith(f"{first_block}.") for part in parts for name in part)
    tied = min(layers) if is_first else max(layers) + 1
    for rank, part in enumerate(parts):
        for name, tensor in part.items():
            if name.startswith("tied_modules."):
                number, inner = tied, name.split(".", 2)[2]
            else:
                prefix, _, inner = name.partition(".")
                if not is_count(prefix) or int(prefix) not in layers:
                    raise CorruptError(f"{directory}: the optimizer has {short_name(name)}, which no layer file has")
                number = int(prefix)
            found.setdefault(number, [{} for _ in parts])[rank][inner] = tensor
    return found


def step_directory(path: Path, step: int | None) -> Path:
    """Directory of a step, by default of the one that ``latest`` names.

    Raises:
        UsageError: there is no such directory.
    """
    if step is None and not (path / "latest").is_file():
        return path
    name = f"global_step{step}" if step is not None else read_tracker(path / "latest").strip()
    if "/" in name or not (path / name).is_dir():
        raise UsageError(
            f"{path / name}: is missing; choose --step from {sorted(p.name for p in path.glob('global_step*'))}"
        )
    return path / name


def _numbered(directory: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    return {int(m[1]): child for child in directory.iterdir() if (m := pattern.fullmatch(child.name))}


def _layer_files(directory: Path) -> dict[int, dict[int, Path]]:
    """Files by layer and tensor-parallel rank; raises ``CorruptError`` where one is missing."""
    found: dict[int, dict[int, Path]] = {}
    for child in directory.iterdir():
        match = LAYER_FILE.fullmatch(child.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2] or 0)] = child
    ranks = {rank for files in found.values() for rank in files}
    for layer, files in found.items():
        missing = sorted(set(range(max(ranks) + 1)) - set(files))
        if missing:
            raise CorruptError(f"{directory}: layer {layer} has no files of the tensor-parallel ranks {missing}")
    return dict(sorted(found.items()))


def _open_layers(layers: Mapping[int, Mapping[int, Path]]) -> dict[int, list[dict[str, Tensor]]]:
    """The tensors of each layer, for each tensor-parallel rank."""
    return {
        number: [_tensors(open_torch(files[rank]), None) for rank in sorted(files)] for number, files in layers.items()
    }


def _from_layers(
    directory: Path, layers: Mapping[int, Sequence[Mapping[str, Tensor]]]
) -> list[dict[str, list[Tensor]]]:
    """One stage for each layer, with the tensors of all tensor-parallel ranks under the names of a complete model."""
    # The numbers of layer files also count functions without weights (a cast, a transpose), so they do not show what a
    # layer is. The names and shapes of its tensors do.
    stages, blocks, has_words = [], 0, False
    for number, parts in layers.items():
        if any(part.keys() != parts[0].keys() for part in parts):
            raise CorruptError(f"{directory}: layer {number}: the tensor-parallel ranks have different tensor names")
        names = set(parts[0])
        if "word_embeddings.weight" in names:
            # A second table is the copy of the tied embedding on the last stage, for the head.
            table = HEAD_COPY if has_words else f"{LM}embedding.word_embeddings.weight"
            renamed = {name: f"{LM}embedding.{name}" for name in names if not has_words}
            renamed |= {"word_embeddings.weight": table}
            has_words = True
        elif any(".query_key_value." in name for name in names):
            renamed = {name: f"{LM}encoder.layers.{blocks}.{name}" for name in names}
            blocks += 1
        # The final norm and an untied head both have a `weight`: a vector and a matrix.
        elif names in ({"weight", "bias"}, {"weight"}) and len(parts[0]["weight"].shape) == 1:
            renamed = {name: f"{LM}encoder.final_layernorm.{name}" for name in names}
        elif len(names) == 1 and len(next(iter(parts[0].values())).shape) == 2:
            renamed = dict.fromkeys(names, f"{LM}output_layer.weight")
        else:
            raise UnsupportedError(f"{directory}: layer {number} is not a layer of a GPT: {short_names(sorted(names))}")
        stages.append({_canonical(renamed[name]): [part[name] for part in parts] for name in renamed})
    return stages


def _from_modules(directory: Path, ranks: Mapping[int, Path]) -> list[dict[str, list[Tensor]]]:
    if set(ranks) != set(range(len(ranks))):
        raise CorruptError(
            f"{directory}: has the tensor-parallel ranks {sorted(ranks)}; they must be 0 to {len(ranks) - 1}"
        )
    return _single_stage(directory, [_unwrapped(_tensors(open_torch(ranks[rank]), "module")) for rank in sorted(ranks)])


def _single_stage(directory: Path, parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, list[Tensor]]]:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise CorruptError(f"{directory}: its tensor-parallel ranks have different tensor names")
    return [{_canonical(name): [part[name] for part in parts] for name in parts[0]}]


def _tensors(file: TorchFile, key: str | None) -> dict[str, Tensor]:
    tree: Any = file.tree
    if key is not None:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(tree, dict):
        raise CorruptError(f"{file.path}: has no {key or 'dictionary'}")
    return flatten(file, tree)


def _canonical(name: str) -> str:
    return load_map("legacy_gpt", "2").canonical(name)


def _read(path: Path, options: ReadOptions) -> tuple[NativeCheckpoint, list[str]]:
    found = read_transformers(path, options)
    if found is not None:
        return found
    return from_megatron(open_deepspeed(path, options), path, step_directory(path, options.step), options)


def read_transformers(path: Path, options: ReadOptions) -> tuple[NativeCheckpoint, list[str]] | None:
    """Open a checkpoint of a model of transformers, as its Trainer and Accelerate save it; None for another model.

    Raises:
        CorruptError: a file is missing or broken, or shapes contradict the configuration.
        UnsupportedError: optimizer state, several model-parallel ranks, or a model that is not implemented.
        UsageError: there is no ``config.json``.
    """
    directory = step_directory(path, options.step)
    ranks = _numbered(directory, RANK_FILE)
    if not ranks:
        return None
    model = open_torch(ranks[min(ranks)])
    shapes = model.tree.get("param_shapes") if isinstance(model.tree, dict) else None
    groups = [shapes] if isinstance(shapes, dict) else shapes if isinstance(shapes, list) else []
    names = [str(name) for group in groups if isinstance(group, dict) for name in group]
    module = _tensors(model, "module") if isinstance(model.tree, dict) and model.tree.get("module") else {}
    if not any(name.endswith(TRANSFORMERS_WORDS) for name in (*names, *module)):
        return None
    if options.with_optimizer:
        raise UnsupportedError(
            f"{directory}: the optimizer state of a model of transformers is not read; convert the weights alone with "
            "--no-optimizer"
        )
    if len(ranks) > 1:
        raise UnsupportedError(
            f"{directory}: has {len(ranks)} model-parallel ranks of a model of transformers, not one"
        )
    remarks = []
    if _is_empty(module):
        # ZeRO 3: the module has placeholders.
        module = dict(read_zero(directory, shard_files(directory).get(min(ranks), {}), model).tensors["master"])
        remarks.append("the weights are the float32 masters of ZeRO 3")
    _, tensors = plain_names(module)
    config, place = _config(path, directory, options)
    checkpoint, further = from_map(
        path,
        model_from_config(config, place / "config.json", options),
        ARCHITECTURES[config["model_type"]].map,
        tensors,
        options.drop,
        run_id=path.resolve().name,
        source=source_of(config, read_generation_config(place)),
        untie=options.untie,
    )
    return replace(checkpoint, is_renamed=True), [*remarks, *further]


def _config(path: Path, directory: Path, options: ReadOptions) -> tuple[Mapping[str, Any], Path]:
    """The configuration of a model of transformers, and its directory."""
    places = [options.config] if options.config is not None else [path, directory, directory.parent]
    place = next((each for each in places if (each / "config.json").is_file()), None)
    if place is None:
        raise UsageError(
            f"{path}: has a model of transformers and no config.json; give its directory with --config, as Accelerate "
            "does not save it"
        )
    return read_config(place), place


def write_deepspeed(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan a Megatron-DeepSpeed checkpoint with one pipeline stage.

    Raises:
        UnsupportedError: a family other than GPT and Llama, sizes that the ranks do not divide, or a tensor without a
            map.
        UsageError: weights of several types.
    """
    files, small = plan_deepspeed(
        checkpoint, tensor_parallel_size=options.tp, dtype=options.dtype, with_optimizer=options.with_optimizer
    )
    small |= carried_files(checkpoint, options.tokenizer, f"global_step{checkpoint.manifest['step']}")
    decisions = state_decisions(checkpoint, options) | {"tensor_parallel_size": options.tp}
    return ExportPlan(files=tuple(files), small_files=small, decisions=decisions)


DEEPSPEED = CheckpointFormat(
    name="deepspeed",
    description="Megatron-DeepSpeed, ZeRO 0 to 3 (GPT, Llama)",
    marker="latest, global_stepN",
    detect=is_deepspeed,
    read=_read,
    write=write_deepspeed,
    topology=("tp",),
    stores_optimizer=True,
    has_steps=True,
    options=MEGATRON_OPTIONS,
)
