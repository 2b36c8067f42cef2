"""What ``--load`` means: a run or a native checkpoint, or what ``dynmo-ckpt`` makes one of first.

That is a Hugging Face directory, or a checkpoint of Megatron (legacy or Megatron-core) or of Megatron-DeepSpeed. Of the
last three a run takes the optimizer state and the progress as well, unless an option leaves them out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..._common.console import say
from ..._common.document import complete_lines, parse_json, short_repr
from ..._common.errors import UsageError
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
from ...models.family import STATED
from ...models.ict import QUERY, bert_parameter
from ...models.layer_list import ModelFamily, parameters_of
from ...optim.item_state import ItemState
from ...optim.item_store import ItemStore
from ...parallel.process_groups import World, all_gather_objects, broadcast_object
from .engine_checkpoint import RECORDS

VOCABULARY_MULTIPLE = 128


def holds_steps(path: Path) -> bool:
    """Whether a native checkpoint, complete or not, lies at ``path`` or in the run directory that it is."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    is_step = path.is_dir() and STEP_NAME.fullmatch(path.name) is not None
    return is_step or (path / "manifest.json").exists() or any(folder.glob("step-*"))


def is_hugging_face(path: Path) -> bool:
    """Whether ``path`` is a Hugging Face directory: it has a ``config.json``, and nothing native."""
    return (path / "config.json").is_file() and not holds_steps(path)


def is_megatron(path: Path) -> bool:
    """Whether ``path`` is a legacy Megatron checkpoint, or one iteration of it."""
    found = (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_*.pt"))
    return found and not holds_steps(path)


def is_distributed(path: Path) -> bool:
    """Whether ``path`` is one of torch's distributed checkpoints, or one iteration of Megatron-core."""
    return (path / ".metadata").is_file()


def is_deepspeed(path: Path) -> bool:
    """Whether ``path`` is a directory of DeepSpeed, or one step of it."""
    found = (path / "latest").is_file() or any(path.glob("*mp_rank_*_model_states.pt"))
    return found and not holds_steps(path)


def foreign_kind(path: Path) -> str | None:
    """What ``path`` is, in words, where ``dynmo-ckpt`` makes a native checkpoint of it; None where it is none such."""
    kinds = {
        "a distributed checkpoint": is_distributed,
        "a Hugging Face directory": is_hugging_face,
        "a Megatron checkpoint": is_megatron,
        "a Megatron-DeepSpeed checkpoint": is_deepspeed,
    }
    return next((words for words, holds in kinds.items() if holds(path)), None)


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/dynmo``, by default ``~/.cache/dynmo``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynmo"


def cached_name(source: Path, vocabulary_multiple: int, with_optimizer: bool, converter: str) -> str:
    """A name for the conversion of ``source``: another one once a file is replaced, changes its size or is touched.

    ``converter`` is :func:`converter_digest`: what an older ``dynmo-ckpt`` converted is not taken again.
    """
    inside = source.iterdir() if is_hugging_face(source) else source.rglob("*")
    files = sorted(path for path in inside if path.is_file())
    facts = [[str(path.relative_to(source)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    text = json.dumps([str(source.resolve()), vocabulary_multiple, with_optimizer, converter, facts])
    return f"{source.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def converter_digest(program: str) -> str:
    """The digest of the code and tables of ``dynmo-ckpt``; empty for a release that does not report one."""
    done = subprocess.run(
        [program, "source-digest"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return "" if done.returncode else done.stdout.strip()


def _is_complete(checkpoint: Path) -> bool:
    try:
        return (checkpoint / "manifest.json").exists() and find_checkpoint(checkpoint) == checkpoint
    except CheckpointError:
        return False


def native_copy(
    source: Path, cache: Path, vocabulary_multiple: int = VOCABULARY_MULTIPLE, *, with_optimizer: bool = False
) -> Path:
    """The native form of a foreign checkpoint, out of the cache, or converted into it by ``dynmo-ckpt``.

    Args:
        source: a directory that :func:`foreign_kind` knows.
        cache: folder of conversions; made where it is missing.
        vocabulary_multiple: the vocabulary is padded to a multiple of this.
        with_optimizer: take the optimizer state as well, where ``source`` has any.

    Raises:
        UsageError: ``dynmo-ckpt`` is not installed, or it cannot convert ``source``; says what it said.
    """
    program = program_path("dynmo-ckpt")
    if program is None:
        raise UsageError(
            f"{source} is {foreign_kind(source)}; dynmo-ckpt, which converts it, is not installed beside dynmo-train"
            " nor on PATH; run: pip install 'dynmo-toolkit[ckpt]'"
        )
    target = cache / cached_name(source, vocabulary_multiple, with_optimizer, converter_digest(program))
    if _is_complete(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder of conversions {cache}: {reason(error)}; give another --cache-dir"
        ) from error
    padding = ["--make-vocab-size-divisible-by", str(vocabulary_multiple)]
    again = ["--overwrite"] if target.exists() else []
    state = ["--with-optimizer-if-present"] if with_optimizer else []
    command = [program, "convert", str(source), str(target), "--to", "native", *padding, *state, *again]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode and not _is_complete(target):  # another process may have been first
        said = done.stderr.strip().removeprefix("dynmo-ckpt: error: ") or f"exit code {done.returncode}"
        without = "; --no-load-optim and --finetune take the weights without it" if with_optimizer else ""
        raise UsageError(f"{source}: dynmo-ckpt cannot convert it: {said}{without}")
    say(f"{source} is {foreign_kind(source)}; dynmo-ckpt converted it into {target}")
    return target


def _find(config: Config, flag: str, place: str, with_optimizer: bool) -> list[str]:
    """The checkpoints that ``place`` may mean, best first; none, with a warning, where there is none yet."""
    path = Path(place)
    if foreign_kind(path):
        cache = Path(config.run.cache_dir) if config.run.cache_dir else default_cache()
        multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
        found = native_copy(path, cache, multiple, with_optimizer=with_optimizer and not is_hugging_face(path))
        say(f"{flag} {path}: {_taken(open_checkpoint(found).manifest, begins=config.run.finetune)}")
        return [str(found)]
    if not path.exists() or not holds_steps(path):
        _refuse_missing(config, flag, path)
        say(f"warning: no checkpoint in {path}; training starts from the first step")
        return []
    return [str(each) for each in list_checkpoints(path)]


def _refuse_missing(config: Config, flag: str, path: Path) -> None:
    """Raise ``CheckpointError`` where a checkpoint is asked for, or where a run has lost its own."""
    wanted = config.run.exit_on_missing_checkpoint
    lost = lost_step(path)
    if wanted is False or (wanted is None and lost is None):
        return
    if lost is None:
        raise CheckpointError(
            f"{flag} {path} holds no checkpoint; --no-exit-on-missing-checkpoint starts from the first step"
        )
    raise CheckpointError(
        f"{flag} {path} holds no checkpoint, yet its metrics.jsonl goes up to step {lost:,} and checkpoints were saved:"
        f" restore {path / 'checkpoints'}, or give --no-exit-on-missing-checkpoint to start again from the first step"
    )


def lost_step(run: Path) -> int | None:
    """The last step of a run that has saved checkpoints, by its own records; None where it has saved none.

    Only an event of a committed checkpoint counts. A run that failed before its first one, at whatever step, has lost
    nothing: a launcher starts it again from the first step.
    """
    if not any(line.get("kind") == "checkpoint" for line in _lines(run / "events.jsonl")):
        return None
    return max((line.get("step", 0) for line in _lines(run / "metrics.jsonl")), default=0) or None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of a run's log that can be read."""
    records = []
    for line in complete_lines(path.read_bytes()) if path.is_file() else ():
        with contextlib.suppress(ValueError):
            records.append(parse_json(line))
    return [record for record in records if isinstance(record, dict)]


def sound_checkpoint(
    world: World, place: str, candidates: Sequence[str], *, weights_only: bool = False
) -> tuple[Path, tuple[str, ...]]:
    """The first sound one of several checkpoints, and what is damaged in those before it; every process calls this.

    All bytes that are needed are read, each file by one process; with ``weights_only`` the files of the optimizer state
    are not. One rule holds for a missing file, for one that is cut off and for
    altered bytes: the next older checkpoint stands for the damaged one.

    Raises:
        CheckpointError: none is sound; at every process.
    """
    faults: list[str] = []
    for candidate in candidates:
        gathered = all_gather_objects(
            world, find_damage(Path(candidate), world.rank, world.size, weights_only=weights_only)
        )
        found = next((fault for fault in gathered if fault), None)
        if found is None:
            return Path(candidate), tuple(faults)
        faults.append(found)
    remedy = "dynmo-ckpt verify lists the damage; restore it from a copy, or --load an older step's directory"
    raise CheckpointError("\n  ".join([f"{place}: no sound checkpoint; {remedy}", *faults]))


def _taken(manifest: Mapping[str, Any], *, begins: bool) -> str:
    """What a run takes from a converted checkpoint, in words."""
    if begins or not manifest["consumed_train_samples"]:
        return "the weights only; training starts from the first step, without optimizer state"
    place = f"step {manifest['step']:,}, {manifest['consumed_train_samples']:,} samples consumed"
    what = "the weights only, the moments start from zero" if manifest["optimizer"] is None else "with optimizer state"
    return f"resumes from {place}; {what}"


def checkpoint_to_load(
    config: Config,
    world: World,
    *,
    flag: str = "--load",
    place: str | None = None,
    with_optimizer: bool = False,
    weights_only: bool = False,
) -> Checkpoint | None:
    """The checkpoint that ``--load`` means, the same at every process: rank 0 looks, and converts where it must.

    As in Megatron, a place without a checkpoint is no error, unless a run has lost its own.

    Args:
        flag: the option that says so.
        place: its value; None is that of ``--load``.
        with_optimizer: take the optimizer state of another program's checkpoint, where it has any.
        weights_only: do not check the files of the optimizer state; so it is with --finetune and --no-load-optim.

    Raises:
        UsageError: no sound checkpoint, or a directory that cannot be converted; at every process.
    """
    place = place or config.run.load
    found: list[str] = []
    problem = None
    if world.is_rank0 and place is not None:
        try:
            found = _find(config, flag, place, with_optimizer)
        except UsageError as error:
            problem = str(error)
    found, problem = broadcast_object(world, [found, problem])
    if problem is not None:
        raise CheckpointError(problem)
    if not found or place is None:
        return None
    weights_only = weights_only or config.run.finetune or config.run.no_load_optim
    directory, faults = sound_checkpoint(world, place, found, weights_only=weights_only)
    if faults and world.is_rank0:
        for fault in faults:
            say(f"warning: damaged checkpoint: {fault}")
        say(f"warning: {directory} stands for it; dynmo-ckpt verify --level full lists the damage")
    return replace(open_checkpoint(directory), skipped_checkpoints=faults)


# A tower may have other dropout, seed or scores than the BERT; these must be the same.
SAME = ("num_layers", "num_tokentypes", *(name for name in STATED if name not in RECORDS))


def check_bert(checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Raise ``CheckpointError`` unless the checkpoint is a BERT of the towers' sizes; names every difference."""
    stored, wanted = checkpoint.manifest["model"], family.manifest()
    differences = [
        f"{key} is {short_repr(stored.get(key))} there and {wanted[key]!r} here"
        for key in SAME
        if stored.get(key, 0) != wanted[key]
    ]
    if stored["family"] != "bert":
        differences.insert(0, f"it is a {stored['family']}")
    if differences:
        raise CheckpointError(
            f"--bert-load {checkpoint.directory} is no BERT for these towers: {'; '.join(differences)}"
        )


def tower_reader(
    checkpoint: Checkpoint, family: ModelFamily, store: ItemStore, device: torch.device
) -> Callable[[str], ItemState]:
    """Reads what this process holds of a tower's item from a BERT; the projections of both towers begin alike."""

    def read(item: str) -> ItemState:
        fresh = parameters_of(item, family.build(item, torch.device("cpu")))
        tensors: dict[str, torch.Tensor] = {}
        for name, initial in fresh.items():
            source = bert_parameter(name)
            if source is not None:
                tensors[name] = store.sharding.local_from_checkpoint(name, checkpoint.load([source])[source]).to(device)
                continue
            if item == "head":
                first = f"{QUERY}.pooler"
                twin = parameters_of(first, family.build(first, torch.device("cpu")))
                whole = twin[first + name.removeprefix(item)].detach()
            else:
                whole = initial.detach()
            tensors[name] = store.sharding.local_slice(name, whole).to(device)
        return ItemState(tensors=tensors, steps={})

    return read
