"""A run's checkpoints: what the engine holds, to the native format and back, on any partition."""

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
from ...models.layer_list import ModelFamily, has_vocabulary_rows, masks_of, parameters_of, vocabulary_rows
from ...models.sharding import whole_shape
from ...optim.adamw import MOMENTS
from ...optim.item_store import REFERENCE, ItemState, ItemStore, is_memory, parameter_of, role_of
from ...optim.lr_schedule import WeightDecay
from ...optim.scheduler_state import FIELD as SCHEDULER
from ...optim.scheduler_state import scheduler_state
from ...parallel.process_groups import World, all_agree, all_gather_objects, broadcast_object
from ..engine import Engine


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The facts of a run that a checkpoint states beside the engine's own.

    Attributes:
        data: what fixes the order of the samples, as in the manifest.
        tokenizer: the tokenizer's files to copy along, by their names in the checkpoint.
        moments: whether the optimizer state is stored.
        keep: how many checkpoints to keep; None keeps all.
        consumed_valid_samples: of the evaluations so far.
        class_names: of a classifier, in the order of its logits.
        source: what the model came with, as in the manifest of the checkpoint that was loaded; None without one.
    """

    run_id: str
    step: int
    consumed_train_samples: int
    data: Mapping[str, Any]
    tokenizer: Mapping[str, Path]
    keep: int | None
    consumed_valid_samples: int = 0
    source: Mapping[str, Any] | None = None
    class_names: tuple[str, ...] = ()
    moments: bool = True


@dataclass(frozen=True, kw_only=True)
class _File:
    """One shard file of this process: its tensors, and what the manifest says of each, but for the checksum."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    entries: Sequence[Mapping[str, Any]]


class HostBuffers:
    """Copies of tensors in host memory that is used again: the first touch of fresh memory takes longer than a copy."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, valid until another is asked for under this name."""
        held = self._held.get(name)
        if held is None or not _has_room(held, tensor):
            held = self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        # A word table is prepared with the rows of its padding, and stored without.
        part = held[: tensor.shape[0]] if held.shape != tensor.shape else held
        return part.copy_(tensor.detach())

    def prepare(self, sizes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Touch the memory of copies to come, by name."""
        for name, (shape, dtype) in sizes.items():
            self._held.setdefault(name, torch.zeros(shape, dtype=dtype).fill_(0))

    def keep_only(self, names: Collection[str]) -> None:
        """Give up the memory of what is no longer asked for, as after a layer has moved away."""
        self._held = {name: tensor for name, tensor in self._held.items() if name in names}


def _has_room(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``held`` has the type and the shape of ``tensor``, or more rows."""
    if held.dtype != tensor.dtype or held.dim() != tensor.dim():
        return False
    return held.shape == tensor.shape or (held.shape[0] > tensor.shape[0] and held.shape[1:] == tensor.shape[1:])


class PendingSave:
    """A checkpoint on its way: begun at a step boundary, written (in a thread, if that is wished), then committed.

    Every process makes one at the same boundary, and calls ``advance`` and ``finish`` at the same later ones.

    Args:
        copies: where the state is copied to first, so that training can go on while it is written; None writes the
            tensors themselves.
    """

    def __init__(
        self, engine: Engine, checkpoints_dir: Path, run: CheckpointMetadata, *, copies: HostBuffers | None = None
    ) -> None:
        self.run, self._world, self._checkpoints = run, engine.world, checkpoints_dir
        world = engine.world
        self._problem: str | None = None
        named = None
        if world.is_rank0:
            try:
                named = str(new_staging(checkpoints_dir, run.step))
            except OSError as error:
                self._problem = f"rank {world.rank}: {error}"
        named = broadcast_object(world, named)
        self._staging = None if named is None else Path(named)
        states = {item: engine.item_store.export_whole(item) for item in engine.local_names}
        # Replicas hold the same, but for experts that they share: the first ones write.
        mine = world.data_rank < world.dims.expert
        self._files = _files_of(engine, states, moments=run.moments, copies=copies) if mine else []
        if run.moments:
            self._files += _memories_of(world, states, copies=copies)
        if copies is not None:
            copies.keep_only({name for file in self._files for name in file.tensors})
        gathered = all_gather_objects(world, _facts_of_part(engine, states) if mine else None)
        facts = [one for one in gathered if one is not None]
        self._document = _document(engine, run, facts) if world.is_rank0 else None
        self._members = [name for one in facts for group in ("decay", "no_decay") for name in one[group]]
        self._report: list[dict[str, Any]] = []
        self._thread: threading.Thread | None = None
        self._is_gathered = False

    def write(self) -> None:
        """Write this process's part."""
        if self._staging is None:
            return
        try:
            for file in self._files:
                checksums = write_shard(self._staging, file.name, file.tensors)
                self._report += [{**entry, "crc32": checksums[entry["key"]]} for entry in file.entries]
            if self._world.is_rank0 and self.run.tokenizer:
                (self._staging / "tokenizer").mkdir()
                for name, path in self.run.tokenizer.items():
                    shutil.copyfile(path, self._staging / "tokenizer" / name)
        except (OSError, DynmoError) as error:
            self._problem = f"rank {self._world.rank}: {error}"
        self._files = []

    def write_aside(self) -> None:
        """Write while training goes on."""
        self._thread = threading.Thread(target=self.write, name="checkpoint")
        self._thread.start()

    def advance(self) -> bool:
        """Go on at a boundary without waiting; whether the checkpoint is in place, or cannot be.

        When all processes have written their parts, the first one commits beside the training as well.
        """
        if not all_agree(self._world, self._thread is None or not self._thread.is_alive()):
            return False
        if self._is_gathered:
            return True
        self._gather()
        return False

    def finish(self) -> Path:
        """Wait for what is still being written, and put the checkpoint in place.

        Raises:
            DynmoError: on every worker, where one of them could not write its part; the last checkpoint stays in place,
                and what was written of this one is removed.
        """
        for gathered in (self._is_gathered, True):
            if self._thread is not None:
                self._thread.join()
            if not gathered:
                self._gather()
        if not all_agree(self._world, self._problem is None):
            problem = broadcast_object(self._world, self._problem)
            if self._world.is_rank0 and self._staging is not None:
                shutil.rmtree(self._staging, ignore_errors=True)
            raise DynmoError(f"the checkpoint of step {self.run.step} was not written: {problem}")
        return self._checkpoints / f"step-{self.run.step:08d}"

    def _gather(self) -> None:
        """Report to the first process what all have written; it commits that, in a thread."""
        gathered = all_gather_objects(self._world, {"problem": self._problem, "report": self._report})
        self._is_gathered, self._thread = True, None
        document = self._document
        if document is None:
            self._problem = None
            return
        self._problem = "; ".join(one["problem"] for one in gathered if one["problem"]) or None
        staging = self._staging
        if self._problem is None and staging is not None:

            def commit_aside() -> None:
                self._problem = self._commit(staging, document, [one["report"] for one in gathered])

            self._thread = threading.Thread(target=commit_aside, name="checkpoint")
            self._thread.start()

    def _commit(
        self, staging: Path, document: RunMetadata, reports: Sequence[Sequence[Mapping[str, Any]]]
    ) -> str | None:
        """Put the checkpoint in place; returns what went wrong, if anything."""
        try:
            written_by = f"dynmo-train {__version__}"
            manifest = build_manifest(document, reports, written_by=written_by, expected=self._members)
            commit(self._checkpoints, self.run.step, staging, manifest)
        except (OSError, DynmoError) as error:
            return str(error)
        if self.run.keep is not None:
            # The new checkpoint is in place: what cannot be removed now is removed after the next one.
            with contextlib.suppress(OSError):
                prune(self._checkpoints, self.run.keep)
        return None


def save(engine: Engine, checkpoints_dir: Path, run: CheckpointMetadata) -> Path:
    """Write a checkpoint of the state after ``run.step``; every worker calls this, and gets its directory.

    Raises:
        DynmoError: on every worker, where one of them could not write its part; the last checkpoint stays in place.
    """
    pending = PendingSave(engine, checkpoints_dir, run)
    pending.write()
    return pending.finish()


def sizes_of_copies(engine: Engine) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of what this process copies for a checkpoint of the present state, by name.

    With ZeRO these are whole tensors at the replicas that write, and nothing at the others; nothing is gathered here.
    """
    writes = engine.world.data_rank < engine.world.dims.expert
    sizes = {}
    for item in engine.local_names:
        whole = parameters_of(item, engine.item_store.blueprint(item))
        for name, tensor in engine.item_store.export(item).tensors.items():
            if is_memory(item, name):
                sizes[name] = tensor.shape, tensor.dtype
            elif writes and _is_stored(engine, name):
                shape = tensor.shape if role_of(name) == "mask" else whole[parameter_of(name)].shape
                sizes[name] = shape, tensor.dtype
    return sizes


def _is_stored(engine: Engine, name: str) -> bool:
    """Whether a process that writes stores a tensor of an item it holds; a tied weight is stored by its owner alone."""
    return engine.item_store.stores(name) and parameter_of(name) not in engine.family.ties


def _files_of(
    engine: Engine, states: Mapping[str, ItemState], *, moments: bool, copies: HostBuffers | None
) -> list[_File]:
    """The shard files that this process writes."""
    store = engine.item_store
    files = []
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
        if store.dispatcher is not None:
            place += f"-e{store.dispatcher.rank:02d}"
        file = f"{kind}-{place}.safetensors"
        entries = []
        vocabulary = vocabulary_rows(engine.family)
        for name, tensor in list(tensors.items()):
            shape, index = whole_shape(tensor.shape, store.split_dim(name), store.region)
            if has_vocabulary_rows(parameter_of(name)):
                begin, end = (min(row, vocabulary) for row in index[0])
                shape[0], index[0] = vocabulary, [begin, end]
                tensors[name] = tensor[: end - begin]
                if begin == end:
                    del tensors[name]
                    continue
            about = {"name": name, "dtype": dtype_name(tensor.dtype), "shape": shape, "role": role_of(name)}
            entries.append({**about, "file": file, "key": name, "index": index})
        if copies is not None:
            tensors = {name: copies.of(name, tensor) for name, tensor in tensors.items()}
        files.append(_File(name=file, tensors=tensors, entries=entries))
    return files


def _memories_of(world: World, states: Mapping[str, ItemState], *, copies: HostBuffers | None) -> list[_File]:
    """The file of what compression remembers: each process of a pipeline position has its own part of every tensor."""
    tensors = {
        name: tensor.detach() if copies is None else copies.of(name, tensor)
        for item, state in states.items()
        for name, tensor in state.tensors.items()
        if is_memory(item, name)
    }
    if not tensors:
        return []
    at, processes = _process_of(world), world.dims.data * world.dims.tensor
    file = f"memory-p{world.pipeline_rank:03d}-d{world.data_rank:03d}-t{world.tensor_rank:02d}.safetensors"
    entries = []
    for name, tensor in tensors.items():
        index = [[at, at + 1], *([0, size] for size in tensor.shape[1:])]
        about = {"name": name, "dtype": dtype_name(tensor.dtype), "shape": [processes, *tensor.shape[1:]]}
        entries.append({**about, "role": role_of(name), "file": file, "key": name, "index": index})
    return [_File(name=file, tensors=tensors, entries=entries)]


def _process_of(world: World) -> int:
    """The place of this process among those of its pipeline position."""
    return world.data_rank * world.dims.tensor + world.tensor_rank


def _facts_of_part(engine: Engine, states: Mapping[str, ItemState]) -> dict[str, Any]:
    """What rank 0 cannot see of this process: optimizer steps, which parameters decay, pruned weights of its items."""
    tied = engine.family.ties
    pruned: dict[str, list[int]] = {}
    for item in engine.local_names:
        for name, layer in masks_of(item, engine.item_store.modules[item]).items():
            if layer.mask is not None and engine.item_store.stores(name):
                counts = pruned.setdefault(item, [0, 0])
                counts[0] += layer.mask.numel() - int(layer.mask.sum())
                counts[1] += layer.mask.numel()
    if engine.world.tensor_rank != 0:
        return {"steps": {}, "decay": [], "no_decay": [], "pruned": pruned}
    named = [
        (name, p)
        for _, name, p in engine.item_store.parameters()
        if name not in tied and engine.item_store.stores(name)
    ]
    parameters = [(name, p.dim() >= 2) for name, p in named]
    steps = {name: step for state in states.values() for name, step in state.steps.items()}
    return {
        "steps": {name: steps[name] for name, _ in named if name in steps},
        "decay": [name for name, decays in parameters if decays],
        "no_decay": [name for name, decays in parameters if not decays],
        "pruned": pruned,
    }


def _document(engine: Engine, run: CheckpointMetadata, facts: Sequence[Mapping[str, Any]]) -> RunMetadata:
    """What the manifest says of the run as it is now."""
    settings = engine.settings
    partition, dims = engine.partition, engine.world.dims
    sparsity = {}
    for item in (item.name for item in engine.family.items):
        counts = [fact["pruned"][item] for fact in facts if item in fact["pruned"]]
        if counts:
            sparsity[item] = sum(zeros for zeros, _ in counts) / sum(weights for _, weights in counts)
    technique = engine.techniques.find(GradualPruning)
    pruning = {"sparsity": technique.sparsity, "sparsity_by_item": sparsity} if technique is not None else None
    members = {name: [each for fact in facts for each in fact[name]] for name in ("decay", "no_decay")}
    rates = {"decay": engine.weight_decay, "no_decay": 0.0}
    groups = [{"name": name, "weight_decay": rates[name], "parameters": members[name]} for name in members]
    decay = settings.adamw.weight_decay
    constant_decay = WeightDecay(start=decay, end=decay, style="constant", steps=0)
    return RunMetadata(
        run_id=run.run_id,
        step=run.step,
        consumed_train_samples=run.consumed_train_samples,
        model=engine.family.manifest(),
        topology={
            "tensor_parallel_size": dims.tensor,
            "pipeline_parallel_size": dims.pipeline,
            "data_parallel_size": dims.data,
            "expert_parallel_size": dims.expert,
            "virtual_stages_per_worker": partition.virtual_stages,
            "schedule": settings.pipeline.schedule,
            "world_size": engine.world.size,
            "partition": partition.lists(),
        },
        dynamic={
            "frozen_items": list(engine.techniques.frozen_items),
            "pruning": pruning,
            "sparse_thresholds": dict(settings.sparse.thresholds),
        },
        ties=engine.family.ties,
        optimizer={
            "type": "adamw",
            "steps": {name: step for fact in facts for name, step in fact["steps"].items()},
            "groups": groups,
        }
        if run.moments
        else None,
        data=run.data,
        source=run.source,
        rng={"scheme": "hash(seed,step,microbatch,item)", "seed": settings.pipeline.seed},
        extra={
            "x_consumed_valid_samples": run.consumed_valid_samples,
            **({"x_class_names": list(run.class_names)} if run.class_names else {}),
            "x_adam": {"beta1": settings.adamw.beta1, "beta2": settings.adamw.beta2, "eps": settings.adamw.eps},
            SCHEDULER: scheduler_state(settings.rate, settings.weight_decay or constant_decay, engine.advanced_samples),
            "x_progress": {
                "advanced_samples": engine.advanced_samples,
                "loss_scale": engine.scaler.state(),
                "techniques": engine.techniques.state_dict(),
                **({} if engine.replica_workers is None else {"replica_workers": engine.replica_workers}),
            },
        },
    )


# A record of how the run padded its vocabulary.
RECORDS = frozenset({"padded_vocab_size"})
# How the experts are trained, not what they compute: another run may choose it anew.
OF_TRAINING = frozenset({"moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_capacity_factor"})


def check_same_model(checkpoint: Checkpoint, family: ModelFamily, *, goes_on: bool = True) -> None:
    """Raise ``CheckpointError`` where the checkpoint is of another model; names every difference.

    Args:
        checkpoint: what is to be loaded.
        family: the model of this run.
        goes_on: the stored run is gone on with, so that the weights of its experts' losses count too; a run that takes
            only the weights, or a conversion that brings nothing else, leaves them open.
    """
    stored, wanted = checkpoint.manifest["model"], family.manifest()
    goes_on = goes_on and checkpoint.manifest.get("optimizer") is not None
    differences = [
        f"{key} is {short_repr(stored.get(key))} there and {value!r} here"
        for key, value in wanted.items()
        if stored.get(key) != value and key not in RECORDS and (goes_on or key not in OF_TRAINING)
    ]
    if differences:
        raise CheckpointError(f"{checkpoint.directory} holds another model: {'; '.join(differences)}")


def state_reader(
    checkpoint: Checkpoint, store: ItemStore, world: World, *, moments: bool = True
) -> Callable[[str], ItemState]:
    """Reads what this process holds of one item, and of nothing else, from a checkpoint of any layout.

    Memories of compression belong to a process: they are taken where there are as many replicas and tensor-parallel
    ranks as there were; else compression begins without.

    Args:
        moments: whether the optimizer state is read, and what compression remembers.
    """
    device, topology = world.device, checkpoint.manifest["topology"]
    same = (topology["data_parallel_size"], topology["tensor_parallel_size"]) == (world.dims.data, world.dims.tensor)
    remembered = checkpoint.names("buffer") if moments and same else []
    own = _process_of(world)
    optimizer = checkpoint.manifest["optimizer"] if moments else None
    steps: Mapping[str, int] = (optimizer or {"steps": {}})["steps"]

    def read(item: str) -> ItemState:
        module = store.blueprint(item)
        names = list(parameters_of(item, module))
        wanted = [*names, *(f"{name}.mask" for name in masks_of(item, module) if checkpoint.has(f"{name}.mask"))]
        wanted += [f"{name}.{REFERENCE}" for name in names if checkpoint.has(f"{name}.{REFERENCE}")]
        trained = {name: steps[owner] for name in names if (owner := checkpoint.stored_name(name)) in steps}
        wanted += [f"{name}.{key}" for name in trained for key in MOMENTS]
        tensors = {name: store.local_from_checkpoint(name, checkpoint.load([name])[name]).to(device) for name in wanted}
        for name in (name for name in remembered if is_memory(item, name)):
            tensors[name] = checkpoint.load([name])[name][own : own + 1].clone().to(device)
        return ItemState(tensors=tensors, steps=trained)

    return read
