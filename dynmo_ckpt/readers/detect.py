"""Opens an input of any known format as if it were a native checkpoint: a manifest, and tensors under our names.

A reader is imported where its format is met, so that a look at one format does not wait for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .._common.document import MAX_TABLE_BYTES
from .._common.errors import UsageError
from ..errors import CorruptError, NoStateError
from ..formats.choices import SourceKind
from ..io.files import read_file
from ..megatron.read import LegacyOptions, is_legacy, open_legacy
from ..native.checkpoint import NativeCheckpoint, find_checkpoint, is_native, open_native
from .torch_dcp import is_dcp

NOTHING_ADDED = LegacyOptions()


def detect(path: Path) -> SourceKind:
    """The format of ``path``; raises ``CorruptError`` where it is none that is known."""
    if is_native(path):
        return SourceKind.NATIVE
    if is_dcp(path):
        return SourceKind.DCP
    if (path / "config.json").is_file():
        return SourceKind.HF
    if is_legacy(path):
        return SourceKind.LEGACY
    from .deepspeed import is_deepspeed
    from .llama2c import is_llama2c

    if is_deepspeed(path):
        return SourceKind.DEEPSPEED
    if is_llama2c(path):
        return SourceKind.LLAMA2C
    raise CorruptError(
        f"{path}: no checkpoint here; known are native ones (manifest.json, step-NNNNNNNN), Hugging Face directories "
        "(config.json), torch's distributed ones (.metadata), legacy Megatron ones (latest_checkpointed_iteration.txt, "
        "mp_rank_*), Megatron-DeepSpeed's (latest, global_stepN) and files of llama2.c (NAME.bin)"
    )


def open_any(
    path: Path,
    kind: SourceKind,
    step: int | None,
    make_vocab_size_divisible_by: int = 128,
    legacy: LegacyOptions = NOTHING_ADDED,
) -> tuple[NativeCheckpoint, list[str]]:
    """Open ``path``; returns the checkpoint and remarks for a person.

    Args:
        path: the input.
        kind: its format, or ``auto``.
        step: which step of a run directory; None: the latest.
        make_vocab_size_divisible_by: what the vocabulary of a Hugging Face model is padded to a multiple of.
        legacy: what a person adds for a legacy checkpoint.
    """
    kind = detect(path) if kind is SourceKind.AUTO else kind
    if legacy.optimizer_if_present:
        asked = replace(legacy, optimizer_if_present=False, with_optimizer=True)
        try:
            return open_any(path, kind, step, make_vocab_size_divisible_by, asked)
        except NoStateError as error:
            without = replace(asked, with_optimizer=False)
            checkpoint, remarks = open_any(path, kind, step, make_vocab_size_divisible_by, without)
            return checkpoint, [*remarks, str(error)]
    if kind is SourceKind.NATIVE:
        if legacy.sparse or legacy.untie or legacy.first_replica or legacy.drop:
            raise UsageError("--sparse, --untie, --replicas and --drop go with input that is not a native checkpoint")
        directory, remarks = find_checkpoint(path, step)
        return open_native(directory), remarks
    if kind is SourceKind.LEGACY:
        from .assemble import from_legacy

        return from_legacy(open_legacy(path, step, legacy), path)
    if kind is SourceKind.DEEPSPEED:
        from .assemble import from_legacy
        from .deepspeed import open_deepspeed

        return from_legacy(open_deepspeed(path, step, legacy), path)
    if kind is SourceKind.DCP:
        from .assemble_dcp import open_distributed

        return open_distributed(path, step, make_vocab_size_divisible_by, legacy)
    if step is not None:
        raise UsageError(f"{path}: --step chooses among the steps of a run directory; this is a {kind} directory")
    if kind is SourceKind.LLAMA2C:
        return open_llama2c(path, make_vocab_size_divisible_by), []
    return open_hf(path, make_vocab_size_divisible_by, legacy.drop, legacy.ignore_config)


def open_llama2c(path: Path, make_vocab_size_divisible_by: int) -> NativeCheckpoint:
    """A ``NAME.bin`` of llama2.c as a checkpoint at step 0."""
    from .assemble import from_map
    from .llama2c import read_llama2c

    model, tensors = read_llama2c(path, make_vocab_size_divisible_by)
    return from_map(path.parent, model, "llama2c", tensors, (), run_id=path.stem)[0]


def open_hf(
    directory: Path, make_vocab_size_divisible_by: int, drop: Sequence[str] = (), ignored: Sequence[str] = ()
) -> tuple[NativeCheckpoint, list[str]]:
    """A Hugging Face directory as a checkpoint at step 0 without optimizer state, and remarks for a person.

    Left out are tensors whose name fits a pattern of ``drop``, and keys of the configuration that fit ``ignored``.

    Raises:
        CorruptError: a file is missing or broken, the configuration holds impossible sizes, or copies differ.
        UnsupportedError: another architecture, or tensors that do not fit the map.
    """
    from ..huggingface.files import read_config, read_generation_config, read_tensors
    from ..huggingface.models import ARCHITECTURES
    from ..huggingface.source_config import source_of
    from .assemble import checked_model, from_map

    config = read_config(directory)
    model = checked_model(config, directory / "config.json", make_vocab_size_divisible_by, ignored)
    name = ARCHITECTURES[config["model_type"]].map
    source = source_of(config, read_generation_config(directory))
    run_id = directory.resolve().name
    return from_map(directory, model, name, read_tensors(directory), drop, run_id=run_id, source=source)


def small_files(checkpoint: NativeCheckpoint, tokenizer: Path | None) -> dict[str, bytes]:
    """What lies beside the shards and goes along, by path: a native checkpoint's other files, a model's tokenizer.

    An older record of a conversion is left out. ``tokenizer`` is another directory to take the tokenizer's files from.
    """
    from ..huggingface.files import tokenizer_names

    directory, listed = checkpoint.directory, checkpoint.manifest["files"]
    shards = {shard["file"] for entry in checkpoint.manifest["tensors"].values() for shard in entry["shards"]}
    kept = {name: directory / name for name in sorted(set(listed) - shards - {"conversion.json"})}
    if tokenizer is not None or not listed:
        kept = {name: path for name, path in kept.items() if not name.startswith("tokenizer/")}
        names = tokenizer_names(tokenizer or directory)
        kept |= {f"tokenizer/{name}": (tokenizer or directory) / name for name in names}
    return {name: read_file(path, MAX_TABLE_BYTES) for name, path in kept.items()}
