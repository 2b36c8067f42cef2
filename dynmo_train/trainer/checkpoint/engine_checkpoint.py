"""Writes the state of the engine to a native checkpoint, and reads it back on any partition.

Writing, on every rank::

    ItemStore.export_unsharded(item)       with ZeRO the shards are gathered on the replicas that write
      | _shard_files                       model-*, optimizer-*: the first replica of each shard writes
      | _compression_memory_files          memory-*: every rank writes its own
      v
    PendingSave.write                      shard files with CRC-32 of each tensor, in a staging folder
      | all_gather_objects                   names, shapes, checksums
      v
    rank 0: build_manifest -> commit       the folder is renamed, LATEST is replaced, old checkpoints are pruned

A reader finds either the old or the new checkpoint: until the rename, nothing of the new one is visible.

Reading: ``state_reader`` loads one item at a time. Each tensor is stored under the name of its layer with its global
shape and the range of each shard. A rank reads the ranges that its own shard overlaps, so that the stored layout does
not have to match.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..._common.document import short_repr
from ..._common.errors import DynmoError
from ...dynamics.pruning import GradualPruning
from ...formats.checkpoint import (
    Checkpoint,
    CheckpointError,
    RunMetadata,
    build_manifest,
    commit,
    new_staging,
    prune,
    write_shard,
)
from ...formats.checkpoint.writer import dtype_name
from ...models.families.vocabulary_family import stored_ties
from ...models.layer_list import ModelFamily, expert_biases_of, masks_of, parameters_of, vocabulary_rows
from ...models.lora import compare_adapters, is_adapter
from ...models.registry import CAUSAL, family_of_manifest, named_as
from ...models.sharding import whole_shape
from ...optim.item_state import REFERENCE, ItemState, has_own_shape, has_token_rows, is_memory, parameter_of, role_of
from ...optim.item_store import ItemStore
from ...optim.lr_schedule import WeightDecay
from ...optim.optimizers.adamw import AdamWSettings
from ...optim.optimizers.protocol import OptimizerSettings
from ...optim.optimizers.registry import option_of_type
from ...optim.scheduler_state import FIELD as SCHEDULER
from ...optim.scheduler_state import scheduler_state
from ...parallel.process_groups import World, all_agree, all_gather_objects, broadcast_object
from ..engine import Engine
from .metadata import CheckpointMetadata
from .model_keys import FORMER_VALUES, RECORDS, TRAINING_KEYS, remedy_of


@dataclass(frozen=True, kw_only=True)
class _ShardFile:
    """One shard file of this rank: its tensors and their manifest entries without the checksums."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    entries: Sequence[Mapping[str, Any]]


class HostBuffers:
    """Reusable host memory for copies of tensors, since the first touch of fresh memory takes longer than a copy.

    Attributes:
        tensors: name -> buffer on the CPU.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host.

        Args:
            name: name of the buffer.
            tensor: any shape, dtype and device.

        Returns:
            A tensor on the CPU with the same shape and dtype, valid until the next copy under this name.
        """
        buffer = self.tensors.get(name)
        if buffer is None or not _fits(buffer, tensor):
            buffer = self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        # The buffer of a word table has the rows of the padding, which are not stored.
        rows = buffer[: tensor.shape[0]] if buffer.shape != tensor.shape else buffer
        return rows.copy_(tensor.detach())

    def allocate(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate and touch buffers by name."""
        for name, (shape, dtype) in shapes.items():
            # ``zeros`` of a large tensor only reserves pages; writing maps them.
            self.tensors.setdefault(name, torch.zeros(shape, dtype=dtype).fill_(0))

    def free_others(self, names: Collection[str]) -> None:
        """Free the buffers of all other names, such as those of layers that have moved away."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}


def _fits(buffer: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``buffer`` has the dtype of ``tensor``, and its shape or more rows."""
    if buffer.dtype != tensor.dtype or buffer.dim() != tensor.dim():
        return False
    is_larger = buffer.dim() > 0 and buffer.shape[0] > tensor.shape[0] and buffer.shape[1:] == tensor.shape[1:]
    return buffer.shape == tensor.shape or is_larger


class PendingSave:
    """A save in progress: started at a step boundary, written, possibly in a thread, and then committed.

    Every rank creates one at the same boundary, and calls ``advance`` and ``finish`` at the same later boundaries.

    Args:
        engine: engine of this rank.
        checkpoints_dir: folder of the checkpoints.
        metadata: contents that the engine does not know.
        buffers: host memory to which the state is copied first, so that training can continue while it is written;
            None writes the live tensors.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoints_dir: Path,
        metadata: CheckpointMetadata,
        *,
        buffers: HostBuffers | None = None,
    ) -> None:
        self.metadata, self._world, self._checkpoints = metadata, engine.world, checkpoints_dir
        world = engine.world
        self._problem: str | None = None
        staging = None
        if world.is_rank0:
            try:
                staging = str(new_staging(checkpoints_dir, metadata.step))
            except OSError as error:
                self._problem = f"rank {world.rank}: {error}"
        # None on all ranks where rank 0 has failed: they continue to ``finish``, which raises on all of them.
        staging = broadcast_object(world, staging)
        self._staging = None if staging is None else Path(staging)
        # On every replica: with ZeRO the export is a collective, also for those that write nothing.
        states = {item: engine.item_store.export_unsharded(item) for item in engine.local_names}
        # Replicas are equal except for the experts that are sharded over them: the first replicas write.
        is_writer = world.data_rank < world.dims.expert
        self._files = _shard_files(engine, states, moments=metadata.moments, buffers=buffers) if is_writer else []
        if metadata.moments:
            self._files += _compression_memory_files(world, states, buffers=buffers)
        if buffers is not None:
            buffers.free_others({name for file in self._files for name in file.tensors})
        gathered = all_gather_objects(world, _rank_metadata(engine, states) if is_writer else None)
        by_rank = [one for one in gathered if one is not None]
        # Now, not when the files are written: the engine trains on in an asynchronous save.
        self._run_metadata = _run_metadata(engine, metadata, by_rank) if world.is_rank0 else None
        # Every parameter must be in a report: a rank that skips one would make an incomplete checkpoint.
        self._members = list(dict.fromkeys(name for one in by_rank for group in GROUPS for name in one[group]))
        self._report: list[dict[str, Any]] = []
        self._thread: threading.Thread | None = None
        self._is_gathered = False

    def write(self) -> None:
        """Write the shard files of this rank."""
        if self._staging is None:
            return
        try:
            for file in self._files:
                checksums = write_shard(self._staging, file.name, file.tensors)
                self._report += [{**entry, "crc32": checksums[entry["key"]]} for entry in file.entries]
            for name, path in self.metadata.tokenizer.items() if self._world.is_rank0 else ():
                target = self._staging / "tokenizer" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        # Kept, not raised: this may be a thread, and the other ranks wait in the collectives of ``finish``.
        except (OSError, DynmoError) as error:
            self._problem = f"rank {self._world.rank}: {error}"
        # With ZeRO these are the last references to the gathered tensors.
        self._files = []

    def write_async(self) -> None:
        """Write the shard files in a thread."""
        self._thread = threading.Thread(target=self.write, name="checkpoint")
        self._thread.start()

    def join_threads(self) -> None:
        """Wait for the thread of this rank, without collectives: other ranks may be gone."""
        if self._thread is not None:
            self._thread.join()

    def advance(self) -> bool:
        """Advance at a boundary without waiting; whether ``finish`` has nothing left to wait for.

        Once all ranks have written their shards, rank 0 commits the checkpoint in a thread too.
        """
        # Reduced first: the gather below is a collective, which all ranks must start at the same boundary.
        if not all_agree(self._world, self._thread is None or not self._thread.is_alive()):
            return False
        if self._is_gathered:
            return True
        self._gather()
        return False

    def finish(self) -> Path:
        """Wait until the checkpoint is written and in place; its directory.

        Raises:
            DynmoError: on every rank, if a rank could not write its shards. The previous checkpoint stays in place,
                and the files of this one are removed.
        """
        # Up to two threads one after the other: this rank's writes, and on rank 0 the commit that ``_gather`` starts.
        for gathered in (self._is_gathered, True):
            if self._thread is not None:
                self._thread.join()
            if not gathered:
                self._gather()
        if not all_agree(self._world, self._problem is None):
            problem = broadcast_object(self._world, self._problem)
            if self._world.is_rank0 and self._staging is not None:
                shutil.rmtree(self._staging, ignore_errors=True)
            raise DynmoError(f"the checkpoint of step {self.metadata.step} was not written: {problem}")
        return self._checkpoints / f"step-{self.metadata.step:08d}"

    def _gather(self) -> None:
        """Gather the reports of all ranks on rank 0, which commits the checkpoint in a thread."""
        gathered = all_gather_objects(self._world, {"problem": self._problem, "report": self._report})
        self._is_gathered, self._thread = True, None
        run_metadata = self._run_metadata
        if run_metadata is None:
            # Rank 0 reports for all: ``finish`` broadcasts its text.
            self._problem = None
            return
        self._problem = "; ".join(one["problem"] for one in gathered if one["problem"]) or None
        staging = self._staging
        if self._problem is None and staging is not None:

            def commit_in_thread() -> None:
                self._problem = self._commit(staging, run_metadata, [one["report"] for one in gathered])

            self._thread = threading.Thread(target=commit_in_thread, name="checkpoint")
            self._thread.start()

    def _commit(
        self, staging: Path, run_metadata: RunMetadata, reports: Sequence[Sequence[Mapping[str, Any]]]
    ) -> str | None:
        """Put the checkpoint in place; the error, if any."""
        try:
            written_by = f"dynmo-train {__version__}"
            manifest = build_manifest(run_metadata, reports, written_by=written_by, expected=self._members)
            commit(self._checkpoints, self.metadata.step, staging, manifest)
        except (OSError, DynmoError) as error:
            return str(error)
        if self.metadata.keep is not None:
            # The new checkpoint is in place: what cannot be removed now is removed after the next save.
            with contextlib.suppress(OSError):
                prune(self._checkpoints, self.metadata.keep)
        return None


def save(engine: Engine, checkpoints_dir: Path, metadata: CheckpointMetadata) -> Path:
    """Write a checkpoint of the current state. Every rank calls this.

    Args:
        engine: engine of this rank.
        checkpoints_dir: folder of the checkpoints.
        metadata: contents that the engine does not know.

    Returns:
        The directory of the checkpoint.

    Raises:
        DynmoError: on every rank, if a rank could not write its shards. The previous checkpoint stays in place.
    """
    pending = PendingSave(engine, checkpoints_dir, metadata)
    pending.write()
    return pending.finish()


def host_buffer_shapes(engine: Engine) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of the tensors that this rank copies for a checkpoint of the current state, by name.

    With ZeRO these are full tensors on the replicas that write, and none on the others. Nothing is gathered here.
    """
    is_writer = engine.world.data_rank < engine.world.dims.expert
    shapes = {}
    for item in engine.local_names:
        whole = parameters_of(item, engine.item_store.blueprint(item))
        for name, tensor in engine.item_store.export(item).tensors.items():
            if is_memory(item, name):
                shapes[name] = tensor.shape, tensor.dtype
            elif is_writer and _is_stored(engine, name):
                shape = tensor.shape if has_own_shape(name) else whole[parameter_of(name)].shape
                shapes[name] = shape, tensor.dtype
    return shapes


def _is_stored(engine: Engine, name: str) -> bool:
    """Whether a writing rank stores a tensor of a local item; a tied weight is stored by its owner only."""
    return engine.item_store.sharding.is_stored(name) and parameter_of(name) not in engine.family.ties


def _shard_files(
    engine: Engine, states: Mapping[str, ItemState], *, moments: bool, buffers: HostBuffers | None
) -> list[_ShardFile]:
    """The shard files that this rank writes."""
    store = engine.item_store
    files = []
    # Two kinds of files: ``--finetune``, ``evaluate`` and ``generate`` check and read the weights only.
    for kind, roles in (("model", {"parameter", "mask", "buffer"}), ("optimizer", {"optimizer"})):
        tensors = {
            name: tensor
            for item, state in states.items()
            for name, tensor in state.tensors.items()
            if role_of(name) in roles and _is_stored(engine, name) and not is_memory(item, name)
        }
        if not tensors or (kind == "optimizer" and not moments):
            continue
        place = f"p{engine.world.pipeline_rank:03d}-t{engine.world.tensor_rank:02d}"
        if store.sharding.dispatcher is not None:
            place += f"-e{store.sharding.dispatcher.rank:02d}"
        file = f"{kind}-{place}.safetensors"
        entries = []
        vocabulary = vocabulary_rows(engine.family)
        for name, tensor in list(tensors.items()):
            shape, index = whole_shape(tensor.shape, store.sharding.split_dim(name), store.sharding.region)
            shard = store.sharding.stored_rows(name)
            if has_token_rows(name):
                # Padding depends on the tensor-parallel size and is not stored: a rank that has only padding writes
                # no shard of this tensor.
                first = 0 if shard is None else shard.begin
                begin, end = (min(first + row, vocabulary) for row in index[0])
                shape[0], index[0] = vocabulary, [begin, end]
                tensors[name] = tensor[: end - begin]
                if begin == end:
                    del tensors[name]
                    continue
            stored = store.sharding.stored_name(name)
            entry = {"name": stored, "dtype": dtype_name(tensor.dtype), "shape": shape, "role": role_of(name)}
            entries.append({**entry, "file": file, "key": name, "index": index})
        if buffers is not None:
            tensors = {name: buffers.copy(name, tensor) for name, tensor in tensors.items()}
        files.append(_ShardFile(name=file, tensors=tensors, entries=entries))
    return files


def _compression_memory_files(
    world: World, states: Mapping[str, ItemState], *, buffers: HostBuffers | None
) -> list[_ShardFile]:
    """The file of the compression's memories, of which each rank has its own row of every tensor."""
    tensors = {
        name: tensor.detach() if buffers is None else buffers.copy(name, tensor)
        for item, state in states.items()
        for name, tensor in state.tensors.items()
        if is_memory(item, name)
    }
    if not tensors:
        return []
    at, processes = _rank_in_stage(world), world.dims.data * world.dims.tensor
    file = f"memory-p{world.pipeline_rank:03d}-d{world.data_rank:03d}-t{world.tensor_rank:02d}.safetensors"
    entries = []
    for name, tensor in tensors.items():
        index = [[at, at + 1], *([0, size] for size in tensor.shape[1:])]
        entry = {"name": name, "dtype": dtype_name(tensor.dtype), "shape": [processes, *tensor.shape[1:]]}
        entries.append({**entry, "role": role_of(name), "file": file, "key": name, "index": index})
    return [_ShardFile(name=file, tensors=tensors, entries=entries)]


def _rank_in_stage(world: World) -> int:
    """Index of this rank among the data- and tensor-parallel ranks of its pipeline rank."""
    return world.data_rank * world.dims.tensor + world.tensor_rank


def _rank_metadata(engine: Engine, states: Mapping[str, ItemState]) -> dict[str, Any]:
    """What rank 0 needs from this rank: optimizer steps, parameters with weight decay, numbers of pruned weights."""
    tied, sharding = engine.family.ties, engine.item_store.sharding
    pruned: dict[str, list[int]] = {}
    for item in engine.local_names:
        for name, layer in masks_of(item, engine.item_store.modules[item]).items():
            if layer.mask is not None and sharding.is_writer(name):
                counts = pruned.setdefault(item, [0, 0])
                counts[0] += layer.mask.numel() - int(layer.mask.sum())
                counts[1] += layer.mask.numel()
    # Tensor-parallel ranks have the same parameters and steps, but each its own slice of a mask.
    if engine.world.tensor_rank != 0:
        return {"steps": {}, "decay": [], "no_decay": [], "pruned": pruned}
    named = [
        (sharding.stored_name(name), name, p)
        for _, name, p in engine.item_store.parameters()
        if name not in tied and sharding.is_stored(name)
    ]
    steps = {name: step for state in states.values() for name, step in state.steps.items()}
    return {
        "steps": {stored: steps[name] for stored, name, _ in named if name in steps},
        "decay": [stored for stored, _, p in named if p.dim() >= 2],
        "no_decay": [stored for stored, _, p in named if p.dim() < 2],
        "pruned": pruned,
    }


def progress_manifest(engine: Engine, metadata: CheckpointMetadata) -> dict[str, Any]:
    """The fields of a manifest from which a run continues, without those of tensors; the same on every rank."""
    found = _run_metadata(engine, metadata, by_rank=())
    return {
        "step": found.step,
        "consumed_train_samples": found.consumed_train_samples,
        "topology": found.topology,
        "dynamic": found.dynamic,
        "optimizer": found.optimizer,
        "source": found.source,
        **found.extra,
    }


def _adam_fields(optimizer: OptimizerSettings) -> dict[str, Any]:
    """Adam's hyperparameters, which ``dynmo-ckpt`` converts; none for other optimizers."""
    if not isinstance(optimizer, AdamWSettings):
        return {}
    return {"x_adam": {"beta1": optimizer.beta1, "beta2": optimizer.beta2, "eps": optimizer.eps}}


def _run_metadata(engine: Engine, metadata: CheckpointMetadata, by_rank: Sequence[Mapping[str, Any]]) -> RunMetadata:
    """The manifest without its tensors, from ``metadata`` and the ``_rank_metadata`` of all writing ranks."""
    settings = engine.settings
    partition, dims = engine.partition, engine.world.dims
    sparsity = {}
    for item in (item.name for item in engine.family.items):
        counts = [one["pruned"][item] for one in by_rank if item in one["pruned"]]
        if counts:
            sparsity[item] = sum(zeros for zeros, _ in counts) / sum(weights for _, weights in counts)
    technique = engine.techniques.find(GradualPruning)
    pruning = {"sparsity": technique.sparsity, "sparsity_by_item": sparsity} if technique is not None else None
    members = {name: list(dict.fromkeys(each for one in by_rank for each in one[name])) for name in GROUPS}
    rates = {"decay": engine.weight_decay, "no_decay": 0.0}
    groups = [{"name": name, "weight_decay": rates[name], "parameters": members[name]} for name in members]
    decay = settings.optimizer.weight_decay
    constant_decay = WeightDecay(start=decay, end=decay, style="constant", steps=0)
    return RunMetadata(
        run_id=metadata.run_id,
        step=metadata.step,
        consumed_train_samples=metadata.consumed_train_samples,
        model=engine.family.manifest(),
        topology={
            "tensor_parallel_size": dims.tensor,
            "pipeline_parallel_size": dims.pipeline,
            "data_parallel_size": dims.data,
            "expert_parallel_size": dims.expert,
            "virtual_stages_per_worker": partition.virtual_stages,
            "schedule": settings.pipeline.schedule,
            "world_size": engine.world.size,
            "partition": [list(stage) for stage in partition.stages],
        },
        dynamic={
            "frozen_items": list(engine.techniques.frozen_items),
            "pruning": pruning,
            "sparse_thresholds": dict(settings.sparse.thresholds),
        },
        ties={} if metadata.base else stored_ties(engine.family),
        optimizer={
            "type": settings.optimizer.STORED_TYPE,
            "steps": {name: step for one in by_rank for name, step in one["steps"].items()},
            "groups": groups,
        }
        if metadata.moments
        else None,
        data=metadata.data,
        source=metadata.source,
        rng={"scheme": "hash(seed,step,microbatch,item)", "seed": settings.pipeline.seed},
        # ``dynmo-ckpt`` converts these fields to and from Megatron's training state.
        extra={
            "x_consumed_valid_samples": metadata.consumed_valid_samples,
            **{f"x_{name}": value for name in EXTRA if (value := getattr(metadata, name))},
            **_adam_fields(settings.optimizer),
            SCHEDULER: scheduler_state(settings.rate, settings.weight_decay or constant_decay, engine.advanced_samples),
            "x_progress": {
                "advanced_samples": engine.advanced_samples,
                "loss_scale": engine.scaler.state(),
                "techniques": engine.techniques.state_dict(),
                **({} if engine.replica_workers is None else {"replica_workers": engine.replica_workers}),
            },
        },
    )


GROUPS = ("decay", "no_decay")
# Fields of the metadata that a manifest has only where they are not empty.
EXTRA = ("data_position", "class_names", "loss_spikes", "options", "base")


def check_same_model(
    checkpoint: Checkpoint, family: ModelFamily, *, resumes: bool = True, may_change: Collection[str] = ()
) -> None:
    """Check that a checkpoint is of the model of this run.

    Args:
        checkpoint: checkpoint to load.
        family: model of this run.
        resumes: whether the run resumes training, so that the loss coefficients of experts must match too. They may
            differ for a run that loads only weights, and for a converted checkpoint without optimizer state.
        may_change: keys that may differ, since they do not change weights.

    Raises:
        CheckpointError: the models differ; the message lists every difference.
    """
    stored = named_as(checkpoint.manifest["model"], str(family.manifest()["family"]))
    resumes = resumes and checkpoint.manifest.get("optimizer") is not None
    ignored = {*RECORDS, *may_change, *(() if resumes else TRAINING_KEYS)}
    expected, differences = compare_adapters(stored, family.manifest(), resumes=resumes)
    differences += [
        f"{key} is {short_repr(stored.get(key))} there and {value!r} here{remedy_of(key, stored)}"
        for key, value in expected.items()
        if stored.get(key, FORMER_VALUES.get(key)) != value and key not in ignored
    ]
    if stored["family"] in CAUSAL:
        # What a run's model does not have it does not state. Its weights would be left out without a message.
        described = family_of_manifest(stored).manifest()
        differences += [
            f"{key} is {short_repr(value)} there and not here"
            for key, value in described.items()
            if key not in expected and not key.startswith("x_") and key not in ignored
        ]
    if differences:
        raise CheckpointError(f"{checkpoint.directory} is a checkpoint of another model: {'; '.join(differences)}")


def check_same_optimizer(checkpoint: Checkpoint, settings: OptimizerSettings) -> None:
    """Check that the optimizer state of a checkpoint, if it has any, is that of this run's optimizer.

    Raises:
        CheckpointError: it is of another optimizer.
    """
    stored = (checkpoint.manifest["optimizer"] or {}).get("type", "none")
    if stored not in ("none", settings.STORED_TYPE):
        there, here = option_of_type(stored), option_of_type(settings.STORED_TYPE)
        raise CheckpointError(
            f"{checkpoint.directory} has the optimizer state of --optimizer {there}, this run has --optimizer {here}:"
            f" give --optimizer {there}, or --no-load-optim to continue without optimizer state"
        )


def state_reader(
    checkpoint: Checkpoint, store: ItemStore, world: World, *, moments: bool = True
) -> Callable[[str], ItemState]:
    """A function that reads the local shard of one item from a checkpoint of any layout.

    The memories of the compression belong to a rank. They are read if the data- and tensor-parallel sizes are those
    of the checkpoint; otherwise the compression starts without.

    Args:
        checkpoint: checkpoint to read.
        store: item store of this rank.
        world: process groups of this rank.
        moments: whether optimizer state and memories of the compression are read.

    Returns:
        Item name -> state of the item, on the device of this rank.
    """
    device, topology = world.device, checkpoint.manifest["topology"]
    sizes = topology["data_parallel_size"], topology["tensor_parallel_size"]
    # An error-feedback memory is what one rank has not sent yet: it has no meaning for ranks of another layout.
    memories_fit = moments and sizes == (world.dims.data, world.dims.tensor)
    memories = checkpoint.names("buffer") if memories_fit else []
    rank = _rank_in_stage(world)
    optimizer = checkpoint.manifest["optimizer"] if moments else None
    steps: Mapping[str, int] = (optimizer or {"steps": {}})["steps"]

    def read(item: str) -> ItemState:
        module = store.blueprint(item)
        parameters = parameters_of(item, module)
        fresh = [name for name in parameters if is_adapter(name) and not checkpoint.has(name)]
        names = [name for name in parameters if name not in fresh]
        to_load = [*names, *expert_biases_of(item, module)]
        to_load += filter(checkpoint.has, [*(f"{n}.{REFERENCE}" for n in to_load), *(f"{n}.mask" for n in names)])
        stored_as = store.sharding.stored_name
        trained = {name: steps[key] for name in names if (key := checkpoint.stored_name(stored_as(name))) in steps}
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        to_load += [f"{name}.{key}" for name in trained for key in store.optimizers.state_shapes(name, shapes[name])]
        # One tensor at a time, so that only one full tensor is in host memory next to the local shards.
        tensors = {
            name: store.sharding.local_from_checkpoint(name, checkpoint.load([stored])[stored]).to(device)
            for name in to_load
            for stored in (stored_as(name),)
        }
        tensors |= store.initial_values(item, fresh)
        for name in (name for name in memories if is_memory(item, name)):
            tensors[name] = checkpoint.load([name])[name][rank : rank + 1].clone().to(device)
        return ItemState(tensors=tensors, steps=trained)

    return read
