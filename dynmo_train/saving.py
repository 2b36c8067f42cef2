"""A run's checkpoints: what the engine holds, to the native format and back, on any partition."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    RunFacts,
    build_manifest,
    commit,
    new_staging,
    prune,
    write_shard,
)
from .checkpoint.writer import dtype_name
from .engine import Engine
from .errors import DynmoError
from .models.items import ModelFamily, masks_of, parameters_of
from .models.sharding import whole_shape
from .optim.adamw import MOMENTS
from .optim.items import HeldItems, ItemState, parameter_of, role_of
from .parallel.world import all_agree, broadcast_document, gather_documents


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The facts of a run that a checkpoint states beside the engine's own.

    Attributes:
        data: what fixes the order of the samples, as in the manifest.
        tokenizer: the tokenizer's files to copy along, by their names in the checkpoint.
        keep: how many checkpoints to keep; None keeps all.
    """

    run_id: str
    step: int
    consumed_train_samples: int
    data: Mapping[str, Any]
    tokenizer: Mapping[str, Path]
    keep: int | None


def save(engine: Engine, checkpoints_dir: Path, run: SavedRun) -> Path:
    """Write a checkpoint of the state after ``run.step``; every worker calls this, and gets its directory.

    Raises:
        DynmoError: on every worker, where one of them could not write its part; the last checkpoint stays in place.
    """
    world = engine.world
    staging = Path(broadcast_document(world, str(new_staging(checkpoints_dir, run.step)) if world.is_first else None))
    states = {item: engine.held.export_whole(item) for item in engine.local_names}
    problem: str | None = None
    report: list[dict[str, Any]] = []
    try:
        # Replicas hold the same: the first one writes.
        if world.replica == 0:
            report = _write_part(engine, staging, states)
        if world.is_first and run.tokenizer:
            (staging / "tokenizer").mkdir()
            for name, path in run.tokenizer.items():
                shutil.copyfile(path, staging / "tokenizer" / name)
    except (OSError, DynmoError) as error:
        problem = f"rank {world.rank}: {error}"
    facts = _facts_of_part(engine, states) if world.replica == 0 else None
    told = gather_documents(world, {"problem": problem, "report": report, "facts": facts})
    if world.is_first:
        problem = "; ".join(one["problem"] for one in told if one["problem"]) or None
        problem = problem or _commit(engine, checkpoints_dir, staging, run, told)
    if not all_agree(problem is None):
        problem = broadcast_document(world, problem)
        raise DynmoError(f"the checkpoint of step {run.step} was not written: {problem}")
    return checkpoints_dir / f"step-{run.step:08d}"


def _write_part(engine: Engine, staging: Path, states: Mapping[str, ItemState]) -> list[dict[str, Any]]:
    report: list[dict[str, Any]] = []
    tied, held = engine.family.ties, engine.held
    for kind, roles in (("model", {"parameter", "mask"}), ("optimizer", {"optimizer"})):
        tensors = {
            name: tensor
            for state in states.values()
            for name, tensor in state.tensors.items()
            if role_of(name) in roles and held.counts(name) and parameter_of(name) not in tied
        }
        if not tensors:
            continue
        file = f"{kind}-p{engine.world.worker:03d}-t{engine.world.shard:02d}.safetensors"
        checksums = write_shard(staging, file, tensors)
        for name, tensor in tensors.items():
            shape, index = whole_shape(tensor.shape, held.split_dim(name), held.region)
            report.append(
                {
                    "name": name,
                    "dtype": dtype_name(tensor.dtype),
                    "shape": shape,
                    "role": role_of(name),
                    "file": file,
                    "key": name,
                    "index": index,
                    "crc32": checksums[name],
                }
            )
    return report


def _facts_of_part(engine: Engine, states: Mapping[str, ItemState]) -> dict[str, Any]:
    """What rank 0 cannot see of this process: optimizer steps, which parameters decay, pruned weights of its items."""
    tied = engine.family.ties
    pruned: dict[str, list[int]] = {}
    for item in engine.local_names:
        for name, layer in masks_of(item, engine.held.modules[item]).items():
            if layer.mask is not None and engine.held.counts(name):
                counts = pruned.setdefault(item, [0, 0])
                counts[0] += layer.mask.numel() - int(layer.mask.sum())
                counts[1] += layer.mask.numel()
    if engine.world.shard != 0:
        return {"steps": {}, "decay": [], "no_decay": [], "pruned": pruned}
    parameters = [(name, p.dim() >= 2) for _, name, p in engine.held.parameters() if name not in tied]
    return {
        "steps": {name: step for state in states.values() for name, step in state.steps.items() if name not in tied},
        "decay": [name for name, decays in parameters if decays],
        "no_decay": [name for name, decays in parameters if not decays],
        "pruned": pruned,
    }


def _commit(
    engine: Engine, checkpoints_dir: Path, staging: Path, run: SavedRun, told: list[dict[str, Any]]
) -> str | None:
    """Put the checkpoint in place; returns what went wrong, if anything."""
    facts = [one["facts"] for one in told if one["facts"] is not None]
    settings = engine.settings
    partition, dims = engine.partition, engine.world.dims
    sparsity = {}
    for item in (item.name for item in engine.family.items):
        counts = [fact["pruned"][item] for fact in facts if item in fact["pruned"]]
        if counts:
            sparsity[item] = sum(zeros for zeros, _ in counts) / sum(weights for _, weights in counts)
    pruning = {"sparsity": engine.pruning.sparsity, "sparsity_by_item": sparsity} if engine.pruning else None
    members = {name: [each for fact in facts for each in fact[name]] for name in ("decay", "no_decay")}
    rates = {"decay": settings.adamw.weight_decay, "no_decay": 0.0}
    groups = [{"name": name, "weight_decay": rates[name], "parameters": members[name]} for name in members]
    document = RunFacts(
        run_id=run.run_id,
        step=run.step,
        consumed_train_samples=run.consumed_train_samples,
        model=engine.family.manifest(),
        topology={
            "tensor_parallel_size": dims.tensor,
            "pipeline_parallel_size": dims.pipeline,
            "data_parallel_size": dims.data,
            "virtual_stages_per_worker": partition.virtual_stages,
            "schedule": settings.pipeline.schedule,
            "world_size": engine.world.size,
            "partition": partition.lists(),
        },
        dynamic={
            "frozen_items": list(engine.freezing.frozen),
            "pruning": pruning,
            "sparse_thresholds": {"csr": settings.sparse_threshold},
        },
        ties=engine.family.ties,
        optimizer={
            "type": "adamw",
            "steps": {name: step for fact in facts for name, step in fact["steps"].items()},
            "groups": groups,
        },
        data=run.data,
        rng={"scheme": "hash(seed,step,microbatch,item)", "seed": settings.pipeline.seed},
        extra={"x_progress": {"advanced": engine.advanced, "loss_scale": engine.scaler.state()}},
    )
    try:
        expected = [name for names in members.values() for name in names]
        manifest = build_manifest(
            document,
            [one["report"] for one in told],
            written_by=f"dynmo-train {__version__}",
            expected=expected,
        )
        commit(checkpoints_dir, run.step, staging, manifest)
        if run.keep is not None:
            prune(checkpoints_dir, run.keep)
    except (OSError, DynmoError) as error:
        return str(error)
    return None


def check_same_model(checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Raise ``CheckpointError`` where the checkpoint is of another model; names every difference."""
    stored, wanted = checkpoint.manifest["model"], family.manifest()
    differences = [
        f"{key} is {stored.get(key)!r} there and {value!r} here"
        for key, value in wanted.items()
        if stored.get(key) != value
    ]
    if differences:
        raise CheckpointError(f"{checkpoint.directory} holds another model: {'; '.join(differences)}")


def state_reader(checkpoint: Checkpoint, held: HeldItems, device: torch.device) -> Callable[[str], ItemState]:
    """Reads what this process holds of one item, and of nothing else, from a checkpoint of any layout."""
    steps: Mapping[str, int] = (checkpoint.manifest["optimizer"] or {"steps": {}})["steps"]

    def read(item: str) -> ItemState:
        module = held.blueprint(item)
        names = list(parameters_of(item, module))
        wanted = [*names, *(f"{name}.mask" for name in masks_of(item, module) if checkpoint.has(f"{name}.mask"))]
        trained = {name: steps[owner] for name in names if (owner := checkpoint.stored_name(name)) in steps}
        wanted += [f"{name}.{key}" for name in trained for key in MOMENTS]
        tensors = {name: held.own_slice(name, checkpoint.load([name])[name]).to(device) for name in wanted}
        return ItemState(tensors=tensors, steps=trained)

    return read
