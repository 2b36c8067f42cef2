"""A trained model on the processes of a command: from a checkpoint to an engine that only runs forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._common.console import say
from .._common.errors import UsageError
from ..config.evaluation import InferenceConfig
from ..data.tokenizer import Tokenizer, TokenizerFiles, load_tokenizer
from ..data.tokenizer import open_tokenizer as open_files
from ..formats.checkpoint import Checkpoint, list_checkpoints, open_checkpoint
from ..models.early_exit import LEFT
from ..models.layer_list import HIDDEN, BoundaryShape, ModelFamily
from ..models.registry import family_of_manifest
from ..models.sparse_formats import BUILT_IN, SparseTable
from ..optim.adamw import AdamWSettings
from ..optim.lr_schedule import LearningRate
from ..optim.precision import Precision
from ..parallel.consensus import run_on_all_ranks
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import World, broadcast_object, destroy_world
from ..pipeline.partition import Partition, uniform_partition
from ..pipeline.schedule import PipelineConfig
from ..trainer.checkpoint.engine_checkpoint import state_reader
from ..trainer.checkpoint.load_checkpoint import default_cache, foreign_kind, native_copy, sound_checkpoint
from ..trainer.engine import Engine, EngineSettings
from ..trainer.fingerprint import checkpoint_facts, join_same, option_facts, require_same

# Of the optimizer and the random numbers of an engine that never trains.
_UNUSED_RATE = LearningRate(peak=1.0, floor=0.0, style="constant", warmup_steps=0, decay_steps=1)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint, and the model that it holds."""

    checkpoint: Checkpoint
    family: ModelFamily

    @property
    def model(self) -> dict[str, Any]:
        """The ``model`` object of its manifest."""
        return dict(self.checkpoint.manifest["model"])


def dims_of(place: InferenceConfig, processes: int) -> ParallelDims:
    """How the processes of a command are laid out: those that are left over are replicas.

    Raises:
        UsageError: the sizes do not divide the number of processes.
    """
    tensor = place.tensor_model_parallel_size
    pipeline = place.pipeline_model_parallel_size or max(1, processes // tensor)
    if processes % (tensor * pipeline):
        raise UsageError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} must divide the number"
            f" of processes, {processes}; start them by dynmo-train launch local --nproc N"
        )
    return ParallelDims(tensor=tensor, pipeline=pipeline, data=processes // (tensor * pipeline))


@contextmanager
def joined(place: InferenceConfig, task: object, processes: int) -> Iterator[World]:
    """The processes of this command, laid out as asked, with the same options and data; they part at the end."""
    if place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    world = join_same(place.device, dims_of(place, processes), lambda: option_facts(place, task))
    try:
        yield world
    finally:
        destroy_world()


def open_source(path: Path, place: InferenceConfig, world: World) -> Source:
    """The checkpoint that ``path`` means, the same at every process: rank 0 looks, and converts where it must.

    Raises:
        UsageError: there is none, it cannot be converted, or the model is not what the options say.
    """
    found = None

    def look() -> list[str]:
        place_ = path
        if foreign_kind(path):
            place_ = native_copy(path, Path(place.cache_dir) if place.cache_dir else default_cache())
        return [str(each) for each in list_checkpoints(place_)]

    found = broadcast_object(world, run_on_all_ranks(world, lambda: look() if world.is_rank0 else []))
    directory, faults = run_on_all_ranks(world, lambda: sound_checkpoint(world, str(path), found, weights_only=True))
    if faults and world.is_rank0:
        say(f"warning: damaged checkpoint: {'; '.join(faults)}; {directory} stands for it")
    source = run_on_all_ranks(world, lambda: _source(directory, world.dims.tensor))
    require_same(world, checkpoint_facts(source.checkpoint))
    return source


def _source(directory: Path, tensor_ranks: int) -> Source:
    checkpoint = open_checkpoint(directory)
    model = checkpoint.manifest["model"]
    # Rows of padding take no part: as few as the tensor-parallel ranks need to share the table evenly.
    padded = -(-model["vocab_size"] // tensor_ranks) * tensor_ranks
    try:
        family = family_of_manifest({**model, "padded_vocab_size": padded})
    except (TypeError, KeyError) as error:
        raise UsageError(f"{directory}: the manifest's model cannot be built: {error}") from error
    return Source(checkpoint=checkpoint, family=family)


def tokenizer_of(source: Source, place: InferenceConfig) -> Tokenizer:
    """The tokenizer that was asked for, else the one in the checkpoint; it must fit the vocabulary."""
    return open_tokenizer(source.checkpoint, TokenizerFiles.of(vars(place)))


def open_tokenizer(checkpoint: Checkpoint, given: TokenizerFiles | None) -> Tokenizer:
    """The tokenizer of these files, else the one in the checkpoint.

    Raises:
        UsageError: there is none, or it has more ids than the model.
    """
    folder = checkpoint.directory / "tokenizer"
    if given is None and not folder.is_dir():
        raise UsageError(
            f"{checkpoint.directory} holds no tokenizer; give --tokenizer-model FILE, or --vocab-file and --merge-file"
        )
    tokenizer = load_tokenizer(folder) if given is None else open_files(given)
    name = folder if given is None else ", ".join(str(path) for path in given.files.values())
    vocab_size = checkpoint.manifest["model"]["vocab_size"]
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(f"{name} has {tokenizer.vocab_size} ids; the model of {checkpoint.directory} has {vocab_size}")
    return tokenizer


def check_layout(model: dict[str, Any], partition: Partition, dims: ParallelDims) -> None:
    """Raise ``UsageError`` where a model cannot be cut so."""
    sizes = {
        "attention heads": model["num_attention_heads"],
        "key-value heads": model.get("num_key_value_heads", model["num_attention_heads"]),
        "columns of the MLP": model["ffn_hidden_size"],
    }
    for what, size in sizes.items():
        if size % dims.tensor:
            raise UsageError(
                f"--tensor-model-parallel-size {dims.tensor} must divide the model's {what}, {size}; give another size"
            )
    items = sum(map(len, partition.stages))
    if not all(partition.stages[at] for at in (0, -1)) or dims.pipeline > items:
        raise UsageError(f"--pipeline-model-parallel-size {dims.pipeline}: the model has {items} items to share out")


def compute_type(place: InferenceConfig) -> torch.dtype:
    """The type of the arithmetic."""
    return torch.bfloat16 if place.bf16 else torch.float16 if place.fp16 else torch.float32


def forward_engine(
    source: Source,
    place: InferenceConfig,
    world: World,
    *,
    tokens: int,
    wrap: Callable[[ModelFamily], ModelFamily],
    rows: int | None = None,
) -> Engine:
    """An engine with the weights of a checkpoint, for batches of ``micro_batch_size`` samples a microbatch.

    Args:
        tokens: of a sample; batches may say another number.
        wrap: what is made of the checkpoint's family, such as one that scores.
        rows: of a microbatch; None is one a sample.
    """
    family = wrap(source.family)
    model, manifest = source.model, source.checkpoint.manifest
    partition = uniform_partition(family.items, world.dims.pipeline)
    run_on_all_ranks(world, lambda: check_layout(model, partition, world.dims))
    boundary = BoundaryShape.hidden(
        batch=rows or place.micro_batch_size, tokens=tokens, width=model["hidden_size"], dtype=compute_type(place)
    )
    boundary = BoundaryShape(
        shapes={**boundary.shapes, LEFT: boundary.shapes[HIDDEN][:2]},
        dtype=boundary.dtype,
    )
    thresholds = manifest["dynamic"]["sparse_thresholds"]
    settings = EngineSettings(
        # Any number of microbatches goes through GPipe.
        pipeline=PipelineConfig(schedule="gpipe", microbatches=1, boundary=boundary, seed=0, recompute=False),
        adamw=AdamWSettings(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0),
        rate=_UNUSED_RATE,
        clip=0.0,
        sparse=SparseTable(thresholds=thresholds or BUILT_IN),
        precision=Precision(compute=compute_type(place)),
    )
    engine = Engine(family, settings, partition, world)
    reader = state_reader(source.checkpoint, engine.item_store, world, moments=False)
    run_on_all_ranks(world, lambda: engine.restore(reader, 0))
    return engine
