"""DynMo's own checkpoints: opened, and planned on another topology."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .._common.document import MAX_TABLE_BYTES
from ..formats.checkpoint import seal
from ..formats.choices import ReadOptions, WriteOptions
from ..huggingface.tokenizer import tokenizer_folder, tokenizer_names
from ..io.files import read_file
from ..native.checkpoint import NativeCheckpoint, find_checkpoint, is_native, open_native
from ..native.reshard import complete_manifest, layer_counts, num_blocks, partition_from_counts, plan_native
from ..tensors.copy_plan import ExportPlan, WrittenFile
from .registry import CheckpointFormat


def read_native(path: Path, options: ReadOptions) -> tuple[NativeCheckpoint, list[str]]:
    """Open a run directory, its ``checkpoints`` or one step.

    Raises:
        CorruptError: no checkpoint there is complete, or its files contradict each other.
        UsageError: the step is missing.
    """
    directory, remarks = find_checkpoint(path, options.step)
    return open_native(directory), remarks


def write_native(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan a native checkpoint; on one stage (``pp`` and ``vpp`` 1) it keeps the partition of the input.

    Raises:
        UnsupportedError: sizes that the tensor-parallel ranks do not divide.
        UsageError: a partition that does not fit the model.
    """
    model = checkpoint.manifest["model"]
    counts = layer_counts(num_blocks(model), options.pp * options.vpp, options.partition)
    # Without options of topology, nothing moves: the stages of the input are kept.
    partition = checkpoint.manifest["topology"]["partition"]
    if len(counts) > 1:
        partition = partition_from_counts(counts, model)
    return plan_native_export(checkpoint, options, partition)


def plan_native_export(
    checkpoint: NativeCheckpoint, options: WriteOptions, partition: Sequence[Sequence[str]], dp: int = 1
) -> ExportPlan:
    """Plan a native checkpoint on a partition.

    Args:
        checkpoint: the input.
        options: tensor-parallel size, virtual stages, weight type, optimizer state and tokenizer of the output.
        partition: the item names of each stage, in layer order.
        dp: number of data-parallel replicas. The manifest records it; the files do not depend on it.

    Raises:
        UnsupportedError: sizes that the tensor-parallel ranks do not divide.
    """
    plan = plan_native(
        checkpoint.manifest,
        checkpoint.tensors,
        partition=partition,
        tensor_parallel_size=options.tp,
        data_parallel_size=dp,
        virtual_stages_per_worker=options.vpp,
        with_optimizer=options.with_optimizer,
        dtype=options.dtype,
    )

    # Called after the copy: the manifest has the checksums of the written bytes.
    def manifest_file(written: Mapping[str, WrittenFile], small: Mapping[str, bytes]) -> dict[str, bytes]:
        sums = {name: (len(payload), zlib.crc32(payload)) for name, payload in small.items()}
        return {"manifest.json": seal(complete_manifest(plan, written, sums))}

    before, after = checkpoint.manifest["topology"], plan.manifest["topology"]
    decisions = {
        "workers_before": before["pipeline_parallel_size"] * before["tensor_parallel_size"],
        "workers_after": after["pipeline_parallel_size"] * after["tensor_parallel_size"],
        "with_optimizer": plan.manifest["optimizer"] is not None,
        "masks": len(checkpoint.names("mask")),
    }
    small = _small_files(checkpoint, options.tokenizer)
    return ExportPlan(files=plan.files, small_files=small, decisions=decisions, finish=manifest_file)


def _small_files(checkpoint: NativeCheckpoint, tokenizer: Path | None) -> dict[str, bytes]:
    """Files that are copied unchanged, by path: other files of a native checkpoint, and the tokenizer.

    An older ``conversion.json`` is left out. ``tokenizer`` is a directory whose tokenizer replaces that of the input.
    """
    directory, listed = checkpoint.directory, checkpoint.manifest["files"]
    shards = {shard["file"] for entry in checkpoint.manifest["tensors"].values() for shard in entry["shards"]}
    # The `conversion.json` of an earlier conversion does not describe this one, which writes its own.
    copied = {name: directory / name for name in sorted(set(listed) - shards - {"conversion.json"})}
    # The manifest of an imported checkpoint lists no files: its tokenizer lies next to its weights.
    if tokenizer is not None or not listed:
        copied = {name: path for name, path in copied.items() if not name.startswith("tokenizer/")}
        folder = tokenizer_folder(checkpoint, tokenizer)
        copied |= {f"tokenizer/{name}": folder / name for name in tokenizer_names(folder)}
    return {name: read_file(path, MAX_TABLE_BYTES) for name, path in copied.items()}


NATIVE = CheckpointFormat(
    name="native",
    description="DynMo, any family and topology, with masks and optimizer state",
    marker="manifest.json, step-NNNNNNNN",
    detect=is_native,
    read=read_native,
    write=write_native,
    topology=("tp", "pp", "vpp", "partition"),
    stores_optimizer=True,
    has_steps=True,
    options=(),
)
