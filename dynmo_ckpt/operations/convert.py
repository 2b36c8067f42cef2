"""Converts a checkpoint to another format or topology: opens the input, plans the output, writes it.

::

    converters.registry.open_checkpoint     any format -> NativeCheckpoint: manifest + lazily read tensors
                  | v
    CheckpointFormat.write                  NativeCheckpoint + WriteOptions -> ExportPlan (pure)
                  |
                  v
    operations.write.write_export           stage, copy, read back, compare logits, rename into place

The two formats never see each other: each converts to or from the native form. Options are checked before the input
is opened, so that a wrong option costs no time, and the logits are compared before the output appears under its name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .._common.errors import UsageError
from ..converters import NOT_READ, NOT_WRITTEN
from ..converters.native import plan_native_export
from ..converters.registry import CheckpointFormat, detect, get_format, open_and_report
from ..formats.choices import AUTO, BLOCK_TYPES, ReadOptions, WriteOptions
from ..native.reshard import layer_counts, num_blocks, partition_from_counts, single_stage_partition
from .logits import LogitsCheck
from .write import WriteSettings, write_export


def convert(
    source: Path,
    target: Path,
    *,
    source_format: str,
    target_format: str,
    read: ReadOptions,
    write: WriteOptions,
    with_optimizer: bool | None,
    check_logits: bool | None,
    settings: WriteSettings,
) -> None:
    """Write ``source`` in another format.

    Args:
        source: the input.
        target: the new directory.
        source_format: the format of the input; ``auto`` detects it.
        target_format: the format of the output.
        read: how to open the input; ``optimizer_if_present`` and ``with_optimizer`` exclude each other.
        write: topology, weight type and tokenizer of the output.
        with_optimizer: include the optimizer state; None: where both formats are native.
        check_logits: compare the logits of input and output; None: unless both formats are native, and within a budget.
        settings: how to write.

    Raises:
        UsageError: options that the formats do not have.
        DynmoError: the errors of reading, planning and writing, by exit code.
    """
    output = get_format(target_format, NOT_WRITTEN)
    if read.optimizer_if_present and with_optimizer is not None:
        raise UsageError("--with-optimizer-if-present: cannot be combined with --with-optimizer or --no-optimizer")
    check_options(output, write, with_optimizer=bool(with_optimizer))
    if write.tokenizer is not None and not write.tokenizer.is_dir():
        raise UsageError(f"--tokenizer {write.tokenizer}: not a directory")
    # Megatron has two formats, which files show; every other name is that of a format.
    is_open = source_format in (AUTO, "megatron")
    name = detect(source).name if is_open else get_format(source_format, NOT_READ).name
    # A format without optimizer state does not need that of the input.
    optional = read.optimizer_if_present and output.stores_optimizer
    read = replace(read, with_optimizer=bool(with_optimizer), optimizer_if_present=optional)
    checkpoint = open_and_report(source, name, read)
    if optional:
        with_optimizer = checkpoint.manifest["optimizer"] is not None
    # A native copy is complete by default. In other formats the state is found by position or flat offset, so it is
    # written on request only.
    if with_optimizer is None:
        with_optimizer = output.name == "native"
    # Between native checkpoints names and layouts stay; the checksums of the bytes prove more than logits.
    if check_logits is not False and (check_logits or not name == output.name == "native"):
        check = LogitsCheck(
            source=checkpoint,
            source_format=name,
            target_format=output.name,
            dtype=write.dtype,
            required=check_logits is True,
            is_compressed=write.sparse_format is not None,
        )
        settings = replace(settings, logits=check)
    if output.write is None:  # refused by check_options; narrows the type
        raise UsageError(f"--to {output.name}: can only be read")
    read_too = (*read.adapters, *(path for path in (read.config, write.tokenizer) if path is not None))
    settings = replace(settings, inputs=(source, *read_too))
    write_export(
        checkpoint.directory, target, output.write(checkpoint, replace(write, with_optimizer=with_optimizer)), settings
    )


def reshard(
    source: Path,
    target: Path,
    *,
    read: ReadOptions,
    write: WriteOptions,
    dp: int,
    settings: WriteSettings,
) -> None:
    """Write a checkpoint of any format as a native one on another topology, in one pass.

    Args:
        source: the input.
        target: the new directory.
        read: how to open the input.
        write: topology of the output, and whether to include the optimizer state.
        dp: number of data-parallel replicas; it is recorded only.
        settings: how to write.
    """
    checkpoint = open_and_report(source, AUTO, read)
    model = checkpoint.manifest["model"]
    counts = layer_counts(num_blocks(model), write.pp * write.vpp, write.partition)
    plan = plan_native_export(checkpoint, write, partition_from_counts(counts, model), dp)
    write_export(checkpoint.directory, target, plan, settings)


def merge(source: Path, target: Path, *, read: ReadOptions, with_optimizer: bool, settings: WriteSettings) -> None:
    """Write a checkpoint of any format as a native one on a single rank; its items keep their granularity."""
    checkpoint = open_and_report(source, AUTO, read)
    options = WriteOptions(with_optimizer=with_optimizer)
    plan = plan_native_export(checkpoint, options, single_stage_partition(checkpoint.manifest))
    write_export(checkpoint.directory, target, plan, settings)


def check_options(output: CheckpointFormat, write: WriteOptions, *, with_optimizer: bool) -> None:
    """Check that the output format has the topology, the types of weights and the optimizer state that are requested.

    Raises:
        UsageError: it does not.
    """
    if output.write is None:
        raise UsageError(
            f"--to {output.name}: checkpoints of this format can only be read; `dynmo-ckpt formats` lists those that "
            "are written"
        )
    defaults = WriteOptions()
    fields = ("tp", "pp", "vpp", "partition")
    unused = [f for f in fields if f not in output.topology and getattr(write, f) != getattr(defaults, f)]
    if unused:
        allowed = " and ".join(f"--{field}" for field in output.topology) or "no topology option"
        raise UsageError(f"--{unused[0]}: does not apply to --to {output.name}, which takes {allowed}")
    blocks = [name for name, stored in BLOCK_TYPES.items() if stored == write.dtype]
    if blocks and output.name != "gguf":
        raise UsageError(f"--dtype {blocks[0]}: blocks with a scale are a type of --to gguf only, not of {output.name}")
    if write.sparse_format is not None and output.name != "hf":
        raise UsageError(f"--sparse-format: a layout of --to hf only, not of {output.name}")
    if with_optimizer and not output.stores_optimizer:
        raise UsageError(f"--with-optimizer: {output.name} checkpoints do not store optimizer state")
