"""Resolves ``--load``: a run, a native checkpoint, or a foreign checkpoint that ``dynmo-ckpt`` converts first.

Foreign checkpoints are Hugging Face directories, and checkpoints of Megatron (legacy or Megatron-core) and
Megatron-DeepSpeed. From the last three a run also loads the optimizer state and the progress, unless an option
excludes them.

    --load PATH -> foreign_kind? -> convert_to_native -> native checkpoint in the cache -+
                `-> list_checkpoints, newest first --------------------------------------+-> first_valid_checkpoint
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..._common.console import print_message
from ..._common.document import parse_json, short_repr
from ..._common.errors import UsageError
from ..._common.log_parts import part_paths, read_part_lines
from ...config import Config
from ...formats.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    find_damage,
    list_checkpoints,
    open_checkpoint,
)
from ...formats.checkpoint.writer import STEP_NAME
from ...formats.os_errors import reason
from ...launch.find_command import program_path
from ...models.families.family import STATED
from ...models.families.ict import QUERY, bert_parameter
from ...models.layer_list import ModelFamily, parameters_of
from ...optim.item_state import ItemState
from ...optim.item_store import ItemStore
from ...parallel.process_groups import World, all_gather_objects, broadcast_object
from .model_keys import RECORDS

VOCABULARY_MULTIPLE = 128


def has_native_checkpoint(path: Path) -> bool:
    """Whether ``path`` is, or is a run directory with, a native checkpoint, complete or not."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    is_step = path.is_dir() and STEP_NAME.fullmatch(path.name) is not None
    return is_step or (path / "manifest.json").exists() or any(folder.glob("step-*"))


def is_hugging_face(path: Path) -> bool:
    """Whether ``path`` is a Hugging Face directory: it has a ``config.json`` and no native checkpoint."""
    return (path / "config.json").is_file() and not has_native_checkpoint(path)


def is_megatron(path: Path) -> bool:
    """Whether ``path`` is a legacy Megatron checkpoint or one of its iterations."""
    found = (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_*.pt"))
    return found and not has_native_checkpoint(path)


def is_distributed(path: Path) -> bool:
    """Whether ``path`` is a torch distributed checkpoint, such as an iteration of Megatron-core."""
    return (path / ".metadata").is_file()


def is_deepspeed(path: Path) -> bool:
    """Whether ``path`` is a DeepSpeed checkpoint directory or one of its steps."""
    found = (path / "latest").is_file() or any(path.glob("*mp_rank_*_model_states.pt"))
    return found and not has_native_checkpoint(path)


def foreign_kind(path: Path) -> str | None:
    """The kind of a checkpoint that ``dynmo-ckpt`` can convert, for messages; None for other paths."""
    kinds = {
        "a distributed checkpoint": is_distributed,
        "a Hugging Face directory": is_hugging_face,
        "a Megatron checkpoint": is_megatron,
        "a Megatron-DeepSpeed checkpoint": is_deepspeed,
    }
    return next((kind for kind, matches in kinds.items() if matches(path)), None)


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/dynmo``, by default ``~/.cache/dynmo``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynmo"


def cached_name(source: Path, vocabulary_multiple: int, with_optimizer: bool, converter: str) -> str:
    """The cache name of a conversion; it changes when a file of ``source`` is replaced, resized or touched.

    Args:
        source: foreign checkpoint.
        vocabulary_multiple: the vocabulary is padded to a multiple of this.
        with_optimizer: whether the optimizer state is converted too.
        converter: :func:`converter_digest`, so that another version of ``dynmo-ckpt`` converts again.
    """
    # Size and time instead of a digest: a start must not read all bytes of a large model twice.
    entries = source.iterdir() if is_hugging_face(source) else source.rglob("*")
    files = sorted(path for path in entries if path.is_file())
    files_state = [[str(path.relative_to(source)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    text = json.dumps([str(source.resolve()), vocabulary_multiple, with_optimizer, converter, files_state])
    return f"{source.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def converter_digest(program: str) -> str:
    """The digest of the source of ``dynmo-ckpt``; empty for a release that does not report one."""
    done = subprocess.run(
        [program, "source-digest"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return "" if done.returncode else done.stdout.strip()


def _is_complete(checkpoint: Path) -> bool:
    try:
        return (checkpoint / "manifest.json").exists() and find_checkpoint(checkpoint) == checkpoint
    except CheckpointError:
        return False


def convert_to_native(
    source: Path, cache: Path, vocabulary_multiple: int = VOCABULARY_MULTIPLE, *, with_optimizer: bool = False
) -> Path:
    """The native form of a foreign checkpoint, from the cache, or converted by ``dynmo-ckpt`` into it.

    Args:
        source: a path for which :func:`foreign_kind` is not None.
        cache: folder of conversions; created if it does not exist.
        vocabulary_multiple: the vocabulary is padded to a multiple of this.
        with_optimizer: whether to convert the optimizer state too, if ``source`` has any.

    Returns:
        The directory of the native checkpoint.

    Raises:
        UsageError: ``dynmo-ckpt`` is not installed or cannot convert ``source``; with its message.
    """
    program = program_path("dynmo-ckpt")
    if program is None:
        raise UsageError(
            f"{source} is {foreign_kind(source)}; dynmo-ckpt, which converts it, is not installed next to dynmo-train"
            " nor on PATH; run: pip install 'dynmo-toolkit[ckpt]'"
        )
    target = cache / cached_name(source, vocabulary_multiple, with_optimizer, converter_digest(program))
    # An interrupted conversion has no manifest; it is converted again, with ``--overwrite``.
    if _is_complete(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create the folder of conversions {cache}: {reason(error)}; give another --cache-dir"
        ) from error
    padding = ["--make-vocab-size-divisible-by", str(vocabulary_multiple)]
    overwrite = ["--overwrite"] if target.exists() else []
    state = ["--with-optimizer-if-present"] if with_optimizer else []
    command = [program, "convert", str(source), str(target), "--to", "native", *padding, *state, *overwrite]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode and not _is_complete(target):  # another process may have converted it meanwhile
        cause = done.stderr.strip().removeprefix("dynmo-ckpt: error: ") or f"exit code {done.returncode}"
        remedy = "; --no-load-optim and --finetune load the weights without optimizer state" if with_optimizer else ""
        raise UsageError(f"{source}: dynmo-ckpt cannot convert it: {cause}{remedy}")
    print_message(f"{source} is {foreign_kind(source)}; dynmo-ckpt converted it into {target}")
    return target


def _candidates(config: Config, flag: str, path: Path, with_optimizer: bool) -> list[str]:
    """The checkpoints at ``path``, newest first; empty, with a warning, without any."""
    if foreign_kind(path):
        cache = Path(config.run.cache_dir) if config.run.cache_dir else default_cache()
        multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
        found = convert_to_native(path, cache, multiple, with_optimizer=with_optimizer and not is_hugging_face(path))
        manifest = open_checkpoint(found).manifest
        print_message(f"{flag} {path}: {_loaded_state(manifest, weights_only=config.run.finetune)}")
        return [str(found)]
    if not path.exists() or not has_native_checkpoint(path):
        run = config.run
        check_may_be_missing(path, (run.run_dir, run.save), is_required=run.exit_on_missing_checkpoint, flag=flag)
        print_message(f"warning: no checkpoint in {path}; training starts from the first step")
        return []
    return [str(each) for each in list_checkpoints(path)]


def check_may_be_missing(
    path: Path, own: Iterable[str | None], *, is_required: bool | None, flag: str = "--load"
) -> None:
    """Check that a run may start without the checkpoint that it was given.

    As in Megatron, a script with the same folder for ``--save`` and ``--load`` starts, and continues later. Another
    path that was given and is not there is a mistake.

    Args:
        path: value of the option.
        own: paths of the run's own directory; None where it is not given.
        is_required: value of ``--exit-on-missing-checkpoint``.
        flag: option that names the checkpoint.

    Raises:
        CheckpointError: a checkpoint is required, another path than the run's own has none, or a run has lost its own.
    """
    if is_required is False:
        return
    if lost := lost_step(path):
        raise CheckpointError(
            f"{flag} {path}: no checkpoint, but its logs have {lost:,} steps and saved checkpoints:"
            f" restore {path / 'checkpoints'}, or give --no-exit-on-missing-checkpoint to start from the first step"
        )
    is_own = any(each is not None and Path(each).resolve() == path.resolve() for each in own)
    if is_required or (flag == "--load" and not is_own):
        found = "has no checkpoint" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{flag} {path}: {found}; give the path of a checkpoint or of a run, or give"
            " --no-exit-on-missing-checkpoint to start from the first step"
        )


def lost_step(run: Path) -> int | None:
    """The last step in the logs of a run that saved checkpoints; None for a run that saved none.

    Only events of committed checkpoints count. A run that failed before its first checkpoint has lost nothing: a
    launcher restarts it from the first step.
    """
    if not any(line.get("kind") == "checkpoint" for line in _lines(run / "events.jsonl")):
        return None
    return max((line.get("step", 0) for line in _lines(run / "metrics.jsonl")), default=0) or None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The readable records of a log, over all its parts."""
    for line in read_part_lines(path) if part_paths(path) else ():
        with contextlib.suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict):
                yield record


def first_valid_checkpoint(
    world: World, place: str, candidates: Sequence[str], *, weights_only: bool = False
) -> tuple[Path, tuple[str, ...]]:
    """The first undamaged checkpoint. Every rank calls this.

    All bytes that will be loaded are read, each file by one rank. A missing file, a truncated file and altered bytes
    are treated alike: the next older checkpoint is used.

    Args:
        world: process groups.
        place: path that was given, for messages.
        candidates: directories of checkpoints, newest first.
        weights_only: whether to skip the files of the optimizer state.

    Returns:
        The directory, and the damage of each skipped checkpoint.

    Raises:
        CheckpointError: on every rank, if all are damaged.
    """
    damages: list[str] = []
    for candidate in candidates:
        # All ranks take the same candidate: one that a single rank finds damaged is skipped by all.
        gathered = all_gather_objects(
            world, find_damage(Path(candidate), world.rank, world.size, weights_only=weights_only)
        )
        damage = next((each for each in gathered if each), None)
        if damage is None:
            return Path(candidate), tuple(damages)
        damages.append(damage)
    remedy = "dynmo-ckpt verify lists the damage; restore it from a copy, or --load the directory of an older step"
    raise CheckpointError("\n  ".join([f"{place}: no undamaged checkpoint; {remedy}", *damages]))


def _loaded_state(manifest: Mapping[str, Any], *, weights_only: bool) -> str:
    """A message on what a run loads from a converted checkpoint."""
    if weights_only or not manifest["consumed_train_samples"]:
        return "the weights only; training starts from the first step, without optimizer state"
    progress = f"step {manifest['step']:,}, {manifest['consumed_train_samples']:,} samples consumed"
    state = "the weights only, the moments start from zero" if manifest["optimizer"] is None else "with optimizer state"
    return f"resumes from {progress}; {state}"


def checkpoint_to_load(
    config: Config,
    world: World,
    *,
    flag: str = "--load",
    place: str | None = None,
    with_optimizer: bool = False,
    weights_only: bool = False,
) -> Checkpoint | None:
    """Open the checkpoint of ``--load``, the same on every rank. Every rank calls this.

    Rank 0 searches, and converts a foreign checkpoint. As in Megatron, the run's own directory may lack a checkpoint,
    unless it has lost its checkpoints.

    Args:
        config: configuration of the run.
        world: process groups.
        flag: option that names the checkpoint, for messages.
        place: value of the option; None uses ``--load``.
        with_optimizer: whether to convert the optimizer state of a foreign checkpoint, if it has any.
        weights_only: whether to skip the files of the optimizer state in the check; implied by --finetune and
            --no-load-optim.

    Returns:
        The checkpoint; None without one.

    Raises:
        CheckpointError: on every rank, if there is none in another place than the run's own, all are damaged, or the
            path cannot be converted.
    """
    place = place or config.run.load
    found: list[str] = []
    problem = None
    if world.is_rank0 and place is not None:
        try:
            found = _candidates(config, flag, Path(place), with_optimizer)
        except UsageError as error:
            problem = str(error)
    # The error travels with the result: rank 0 alone must not leave before a collective of all ranks.
    found, problem = broadcast_object(world, [found, problem])
    if problem is not None:
        raise CheckpointError(problem)
    if not found or place is None:
        return None
    weights_only = weights_only or config.run.finetune or config.run.no_load_optim
    directory, damages = first_valid_checkpoint(world, place, found, weights_only=weights_only)
    if damages and world.is_rank0:
        for damage in damages:
            print_message(f"warning: damaged checkpoint: {damage}")
        print_message(f"warning: using {directory} instead; dynmo-ckpt verify --level full lists the damage")
    return replace(open_checkpoint(directory), skipped_checkpoints=damages)


# Keys that must match; a tower may differ from the BERT in dropout, seed and scores.
SHARED_KEYS = ("num_layers", "num_tokentypes", *(name for name in STATED if name not in RECORDS))


def check_bert(checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Check that a checkpoint is a BERT of the size of the towers.

    Raises:
        CheckpointError: it is of another family or size; the message lists every difference.
    """
    stored, expected = checkpoint.manifest["model"], family.manifest()
    differences = [
        f"{key} is {short_repr(stored.get(key))} there and {expected[key]!r} here"
        for key in SHARED_KEYS
        if stored.get(key, 0) != expected[key]
    ]
    if stored["family"] != "bert":
        differences.insert(0, f"it is a {stored['family']}")
    if differences:
        raise CheckpointError(f"--bert-load {checkpoint.directory} does not fit the towers: {'; '.join(differences)}")


def tower_reader(
    checkpoint: Checkpoint, family: ModelFamily, store: ItemStore, device: torch.device
) -> Callable[[str], ItemState]:
    """A function that reads the local shard of a tower's item from a BERT.

    The projections are not in a BERT. Those of both towers start with the same random weights, so that equal inputs
    have equal embeddings.

    Args:
        checkpoint: checkpoint of the BERT.
        family: the model of two towers.
        store: item store of this rank.
        device: device of the tensors.

    Returns:
        Item name -> state of the item: parameters in their local shapes, without optimizer state.
    """

    def read(item: str) -> ItemState:
        fresh = parameters_of(item, family.build(item, torch.device("cpu")))
        tensors: dict[str, torch.Tensor] = {}
        for name, initial in fresh.items():
            source = bert_parameter(name)
            if source is not None:
                tensors[name] = store.sharding.local_from_checkpoint(name, checkpoint.load([source])[source]).to(device)
                continue
            # The head has the projection of the second tower: it is copied from the first one, not drawn again.
            if item == "head":
                first = f"{QUERY}.pooler"
                twin = parameters_of(first, family.build(first, torch.device("cpu")))
                full = twin[first + name.removeprefix(item)].detach()
            else:
                full = initial.detach()
            tensors[name] = store.sharding.local_slice(name, full).to(device)
        return ItemState(tensors=tensors, steps={})

    return read
