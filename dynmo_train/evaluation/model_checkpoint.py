"""Opens the checkpoint that an evaluation or a generation runs: its directory, model family and tokenizer.

    --load PATH --convert foreign formats--> native checkpoint --verify checksums--> ModelCheckpoint -> forward_engine

All ranks get the same checkpoint: rank 0 lists the candidates, and the ranks compare the manifests that they read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .._common.console import print_message
from .._common.errors import UsageError
from ..config.extensions import base_family
from ..config.sections.evaluation import InferenceConfig
from ..config.task_command import check_model_flags
from ..data.tokenizer import Tokenizer, TokenizerFiles, load_tokenizer, open_tokenizer
from ..formats.checkpoint import Checkpoint, list_checkpoints, open_checkpoint
from ..launch.failure_record import recording_failure
from ..models.layer_list import ModelFamily
from ..models.registry import CAUSAL, family_of_manifest
from ..parallel.consensus import run_on_all_ranks
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import World, broadcast_object, destroy_world
from ..trainer.checkpoint.load_checkpoint import convert_to_native, default_cache, first_valid_checkpoint, foreign_kind
from ..trainer.checkpoint.unread_tensors import check_model_has_all_weights
from ..trainer.failures import lost_another_rank
from ..trainer.fingerprint import checkpoint_properties, join_same, option_properties, require_same


@dataclass(frozen=True, kw_only=True)
class ModelCheckpoint:
    """A native checkpoint and the model family that its manifest describes."""

    checkpoint: Checkpoint
    family: ModelFamily

    @property
    def directory(self) -> Path:
        """Directory of the checkpoint."""
        return self.checkpoint.directory

    @property
    def model(self) -> dict[str, Any]:
        """The ``model`` object of the manifest."""
        return dict(self.checkpoint.manifest["model"])

    def window_length(self, seq_length: int | None) -> int:
        """Tokens of a sample: ``seq_length`` (``--seq-length``), by default all positions of the model.

        Raises:
            UsageError: the model has fewer positions.
        """
        positions = int(self.model["max_position_embeddings"])
        if seq_length is not None and seq_length > positions:
            raise UsageError(
                f"--seq-length {seq_length}: the model of {self.directory} has {positions} positions; give at most"
                f" {positions}"
            )
        return seq_length or positions


def parallel_dims(inference: InferenceConfig, processes: int) -> ParallelDims:
    """The parallel layout of a command; processes beyond tensor x pipeline ranks are data-parallel replicas.

    Raises:
        UsageError: the parallel sizes do not divide the number of processes.
    """
    tensor = inference.tensor_model_parallel_size
    pipeline = inference.pipeline_model_parallel_size or max(1, processes // tensor)
    if processes % (tensor * pipeline):
        raise UsageError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} must divide the number"
            f" of processes, {processes}; start them by dynmo-train launch local --nproc N"
        )
    return ParallelDims(tensor=tensor, pipeline=pipeline, data=processes // (tensor * pipeline))


@contextmanager
def evaluation_world(inference: InferenceConfig, task: object, processes: int) -> Iterator[World]:
    """Join the process groups of a command, and leave them at the end.

    Args:
        inference: parallel sizes, device and threads.
        task: options of the task; they must be the same on all ranks.
        processes: the world size.

    Raises:
        UsageError: options or data files differ between ranks.
    """
    if inference.num_threads is not None:
        torch.set_num_threads(inference.num_threads)
    dims = parallel_dims(inference, processes)
    world = join_same(inference.device, dims, lambda: option_properties(inference, task))
    try:
        with recording_failure(os.environ, lost_another_rank):
            yield world
    finally:
        destroy_world()


def open_model(path: Path, inference: InferenceConfig, world: World) -> ModelCheckpoint:
    """Open the newest sound checkpoint of ``path``; all ranks call this and get the same one.

    Rank 0 converts foreign formats into ``--cache-dir`` first.

    Raises:
        UsageError: there is no checkpoint, it cannot be converted, its model cannot be built, or it has weights that
            the model does not have.
    """

    def candidates() -> list[str]:
        directory = path
        if foreign_kind(path):
            directory = convert_to_native(path, Path(inference.cache_dir) if inference.cache_dir else default_cache())
        return [str(checkpoint) for checkpoint in list_checkpoints(directory)]

    # One rank lists: a checkpoint may be added or removed while the others look.
    found = broadcast_object(world, run_on_all_ranks(world, lambda: candidates() if world.is_rank0 else []))
    directory, faults = run_on_all_ranks(
        world, lambda: first_valid_checkpoint(world, str(path), found, weights_only=True)
    )
    if faults and world.is_rank0:
        print_message(f"warning: damaged checkpoint: {'; '.join(faults)}; using {directory} instead")
    found_model = run_on_all_ranks(world, lambda: _read_model(directory, world.dims.tensor))
    require_same(world, checkpoint_properties(found_model.checkpoint))

    def checked() -> ModelCheckpoint:
        check_model_has_all_weights(found_model.checkpoint, found_model.family, world)
        return found_model

    return run_on_all_ranks(world, checked)


def open_causal_model(inference: InferenceConfig, world: World, model_flags: Mapping[str, Any]) -> ModelCheckpoint:
    """As :func:`open_model` for ``--load``, and check that the model predicts the next token.

    Args:
        inference: ``load`` names the checkpoint.
        world: all ranks call this.
        model_flags: the model's shape as the command line states it; must equal the manifest's.

    Raises:
        UsageError: the model is not causal.
        DocumentError: the command line states another shape.
    """
    source = open_model(Path(inference.load), inference, world)
    run_on_all_ranks(world, lambda: check_model_flags(model_flags, source.model, source.directory))
    if base_family(source.model["family"]) not in CAUSAL:
        raise UsageError(
            f"{source.directory} contains a {source.model['family']} model, which does not predict the next token;"
            f" give a model of the families {', '.join(CAUSAL)}"
        )
    return source


def _read_model(directory: Path, tensor_ranks: int) -> ModelCheckpoint:
    checkpoint = open_checkpoint(directory)
    model = checkpoint.manifest["model"]
    # Checkpoints store no padding rows: pad only as far as the tensor-parallel ranks need to shard the table evenly.
    padded = -(-model["vocab_size"] // tensor_ranks) * tensor_ranks
    try:
        family = family_of_manifest({**model, "padded_vocab_size": padded})
    except (TypeError, KeyError) as error:
        raise UsageError(f"{directory}: cannot build the model of the manifest: {error}") from error
    return ModelCheckpoint(checkpoint=checkpoint, family=family)


def model_tokenizer(source: ModelCheckpoint, inference: InferenceConfig, opened: Tokenizer | None = None) -> Tokenizer:
    """The tokenizer of the options, by default the one in the checkpoint; with ``prefix`` for a published model only.

    Args:
        source: the model.
        inference: options of the tokenizer.
        opened: that tokenizer, where it is open.

    Raises:
        UsageError: there is no tokenizer, or it has more ids than the model.
    """
    files = TokenizerFiles.of(vars(inference))
    folder = source.directory / "tokenizer"
    if files is None and not folder.is_dir():
        raise UsageError(
            f"{source.directory} contains no tokenizer; give --tokenizer-model FILE, or --vocab-file and --merge-file"
        )
    tokenizer = opened or (load_tokenizer(folder) if files is None else open_tokenizer(files))
    name = folder if files is None else ", ".join(str(path) for path in files.files.values())
    vocab_size = source.model["vocab_size"]
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"{name} has {tokenizer.vocab_size:,} ids; the model of {source.directory} has {vocab_size:,}: give the"
            " model's own tokenizer"
        )
    # Data sets of dynmo-prep have no such token: a model that was trained on them from scratch has not read it.
    return tokenizer if source.checkpoint.manifest.get("source") else replace(tokenizer, prefix=())
