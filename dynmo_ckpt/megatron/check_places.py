"""Checks that the files of a checkpoint lie where they were written: what each records about its ranks and stage.

Names of directories are the only order of ranks, and a directory can be renamed or copied to another place. The facts:

* ``args.rank``, with the parallel sizes, is the rank that saved the file;
* the seeds of the CUDA generators contain the pipeline and the tensor-parallel rank;
* the first stage has the embedding, the last one the final norm;
* ``args`` have the sizes of the grid and the number of layers, and files the iteration of their directory.

A rank or a seed is a fact only where those of all files are different and fill the grid: conversion programs write the
same ones to all files.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..io.errors import CorruptError, short_names
from ..io.files import open_file
from ..torch_save.pickles import TensorRef
from ..torch_save.reader import TorchFile
from .rng_state import PER_STAGE, PER_TENSOR_RANK

Place = tuple[int, int, int]
"""Tensor-parallel, pipeline and expert-parallel rank."""
ITERATION = re.compile(r"(?:iter_|global_step)(\d{1,12})")
TRACKER, EXPERT_TRACKER = "model-parallel-rng", "expert-parallel-rng"
BEFORE_EXPERT_RANKS = 1024  # added to the seed of the generator of experts
# At the end of the state of a CUDA generator, of every release of torch.
SEED_AND_OFFSET = struct.Struct("<QQ")


def check_ranks(files: Mapping[Place, TorchFile]) -> None:
    """Check each file against the place that it records.

    Args:
        files: by the place that the name of the directory states.

    Raises:
        CorruptError: a file records another place.
    """
    sizes = tuple(1 + max(place[at] for place in files) for at in range(3))
    recorded = {
        "args.rank": {place: _place_of_rank(file, sizes) for place, file in files.items()},
        "seeds of its random states": {place: _place_of_seeds(file) for place, file in files.items()},
    }
    for source, places in recorded.items():
        if len(files) == 1 or set(places.values()) != set(files):
            continue
        for place, own in places.items():
            if own is not None and own != place:
                raise CorruptError(
                    f"{files[place].path}: was saved by tensor-parallel rank {own[0]}, pipeline rank {own[1]}"
                    f"{f', expert-parallel rank {own[2]}' if sizes[2] > 1 else ''} ({source}); directories of "
                    "ranks were exchanged or renamed"
                )


def check_grid(directory: Path, args: Mapping[str, Any], tensor_ranks: int, rows: int, is_complete: bool) -> None:
    """Check that no rank is missing behind the last one that is there.

    Arguments alone do not show that: conversion programs may keep those of their input.

    Args:
        directory: of the iteration.
        args: the arguments of a file; may be empty.
        tensor_ranks: number of tensor-parallel ranks that are there.
        rows: number of rows of the word table that they have.
        is_complete: the last stage has the final norm.

    Raises:
        CorruptError: ranks are missing.
    """
    tensor = args.get("tensor_model_parallel_size", args.get("model_parallel_size"))
    padded, stages = args.get("padded_vocab_size"), args.get("pipeline_model_parallel_size")
    if type(tensor) is int and tensor > tensor_ranks and type(padded) is int and rows != padded:
        absent = short_names(f"mp_rank_{rank:02d}" for rank in range(tensor_ranks, tensor))
        raise CorruptError(
            f"{directory}: has {tensor_ranks} of {tensor} tensor-parallel ranks, with {rows} of {padded} rows of the "
            f"vocabulary; {absent} missing; copy the whole checkpoint"
        )
    if not is_complete and type(stages) is int and stages > 1:
        raise CorruptError(
            f"{directory}: its last stage has no final norm; of {stages} pipeline ranks the last ones are missing; "
            "copy the whole checkpoint"
        )


def check_stages(path: Path, stages: Sequence[Iterable[str]], word: str, layer: re.Pattern[str], norm: str) -> None:
    """Check that the embedding is on the first stage, and the final norm on the last one with layers of its stack.

    Args:
        path: for messages.
        stages: names of the tensors of each stage, in layer order.
        word: name of the word table.
        layer: matches the names of layers; its group 1, if there is one, is the stack.
        norm: end of the name of the final norm of a stack.

    Raises:
        CorruptError: another order.
    """
    named = [set(stage) for stage in stages]
    first = next((at for at, names in enumerate(named) if word in names), 0)
    if first:
        raise CorruptError(f"{path}: stage {first} has the embedding, which is on stage 0; stages were exchanged")
    last: dict[str, int] = {}
    for at, names in enumerate(named):
        last |= {match[0].split(".layers.")[0]: at for name in names if (match := layer.match(name))}
    for at, names in enumerate(named):
        for stack, end in last.items():
            if at < end and any(name.startswith(f"{stack}.{norm}") for name in names):
                raise CorruptError(
                    f"{path}: stage {at} has the final norm, and stage {end} layers after it; stages were exchanged"
                )


def check_iteration(directory: Path, iteration: int) -> None:
    """Check the iteration of a file against the name of its directory.

    Raises:
        CorruptError: another one.
    """
    match = ITERATION.fullmatch(directory.resolve().name)
    if match and iteration and int(match[1]) != iteration:
        raise CorruptError(
            f"{directory}: its files are of iteration {iteration}; rename the directory, or copy the files of "
            f"iteration {int(match[1])}"
        )


def _place_of_rank(file: TorchFile, sizes: Sequence[int]) -> Place | None:
    """The place of ``args.rank``: ranks are numbered by tensor, then data with expert, then pipeline rank."""
    args = file.tree.get("args") if isinstance(file.tree, dict) else None
    values = getattr(args, "attributes", {})
    rank, world = values.get("rank"), values.get("world_size")
    if type(rank) is not int or type(world) is not int or rank < 0 or world % sizes[1] or world < sizes[1]:
        return None
    per_stage = world // sizes[1]
    return rank % per_stage % sizes[0], rank // per_stage, rank % per_stage // sizes[0]


def _place_of_seeds(file: TorchFile) -> Place | None:
    """The place of the seeds: the seed of a stage is larger by 100 than that of the one before."""
    tree = file.tree if isinstance(file.tree, dict) else {}
    state = tree.get("rng_state", tree)
    state = state[0] if isinstance(state, list) and state else state
    trackers = state.get("rng_tracker_states") if isinstance(state, dict) else None
    own = _seed(file, state.get("cuda_rng_state")) if isinstance(state, dict) else None
    parallel = _seed(file, trackers.get(TRACKER)) if isinstance(trackers, dict) else None
    seed = getattr(tree.get("args"), "attributes", {}).get("seed")
    if own is None or parallel is None or type(seed) is not int or (own - seed) % PER_STAGE:
        return None
    tensor = parallel - own - PER_TENSOR_RANK
    expert = _seed(file, trackers.get(EXPERT_TRACKER)) if isinstance(trackers, dict) else None
    number = 0 if expert is None else (expert - own - BEFORE_EXPERT_RANKS - tensor) // PER_STAGE
    return tensor, (own - seed) // PER_STAGE, number


def _seed(file: TorchFile, state: Any) -> int | None:
    """The seed in the state of a CUDA generator."""
    if not isinstance(state, TensorRef) or state.storage.dtype != "U8" or len(state.shape) != 1:
        return None
    size = state.shape[0]
    if size < SEED_AND_OFFSET.size:
        return None
    file.tensor(state, "a random state")  # checks that it lies within its storage
    with open_file(file.path) as handle:
        handle.seek(file.storages[state.storage.key].offset + state.start + size - SEED_AND_OFFSET.size)
        return int(SEED_AND_OFFSET.unpack(handle.read(SEED_AND_OFFSET.size))[0])
