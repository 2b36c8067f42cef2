"""What ``--load`` means: a run or a native checkpoint, or what ``dynmo-ckpt`` makes one of first.

That is a Hugging Face directory, or a legacy Megatron checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

from .checkpoint import Checkpoint, CheckpointError, find_checkpoint, open_checkpoint
from .config import Config
from .console import say
from .errors import UsageError
from .parallel.world import World, broadcast_document
from .programs import program_path

VOCABULARY_MULTIPLE = 128


def holds_steps(path: Path) -> bool:
    """Whether a native checkpoint, complete or not, lies at ``path`` or in the run directory that it is."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return (path / "manifest.json").exists() or any(folder.glob("step-*"))


def is_hugging_face(path: Path) -> bool:
    """Whether ``path`` is a Hugging Face directory: it has a ``config.json``, and nothing native."""
    return (path / "config.json").is_file() and not holds_steps(path)


def is_megatron(path: Path) -> bool:
    """Whether ``path`` is a legacy Megatron checkpoint, or one iteration of it."""
    found = (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_*.pt"))
    return found and not holds_steps(path)


def foreign_kind(path: Path) -> str | None:
    """What ``path`` is, in words, where ``dynmo-ckpt`` makes a native checkpoint of it; None where it is none such."""
    if is_hugging_face(path):
        return "a Hugging Face directory"
    return "a legacy Megatron checkpoint" if is_megatron(path) else None


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/dynmo``, by default ``~/.cache/dynmo``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynmo"


def cached_name(source: Path, vocabulary_multiple: int) -> str:
    """A name for the conversion of ``source``: another one once a file is replaced, changes its size or is touched."""
    inside = source.rglob("*") if is_megatron(source) else source.iterdir()
    files = sorted(path for path in inside if path.is_file())
    facts = [[str(path.relative_to(source)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    text = json.dumps([str(source.resolve()), vocabulary_multiple, facts])
    return f"{source.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _is_complete(checkpoint: Path) -> bool:
    try:
        return (checkpoint / "manifest.json").exists() and find_checkpoint(checkpoint) == checkpoint
    except CheckpointError:
        return False


def native_copy(source: Path, cache: Path, vocabulary_multiple: int = VOCABULARY_MULTIPLE) -> Path:
    """The native form of a foreign checkpoint, out of the cache, or converted into it by ``dynmo-ckpt``.

    Args:
        source: a Hugging Face directory, or a legacy Megatron checkpoint.
        cache: folder of conversions; made where it is missing.
        vocabulary_multiple: the vocabulary is padded to a multiple of this.

    Raises:
        UsageError: ``dynmo-ckpt`` is not installed, or it cannot convert ``source``; says what it said.
    """
    target = cache / cached_name(source, vocabulary_multiple)
    if _is_complete(target):
        return target
    program = program_path("dynmo-ckpt")
    if program is None:
        raise UsageError(
            f"{source} is {foreign_kind(source)}; dynmo-ckpt, which converts it, is not installed beside dynmo-train"
            " nor on PATH; run: pip install 'dynmo[ckpt]'"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder of conversions {cache}: {error}; give another --cache-dir") from error
    padding = ["--make-vocab-size-divisible-by", str(vocabulary_multiple)]
    again = ["--overwrite"] if target.exists() else []
    command = [program, "convert", str(source), str(target), "--to", "native", *padding, *again]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode and not _is_complete(target):  # another process may have been first
        said = done.stderr.strip().removeprefix("dynmo-ckpt: error: ") or f"exit code {done.returncode}"
        raise UsageError(f"{source}: dynmo-ckpt cannot convert it: {said}")
    say(f"{source} is {foreign_kind(source)}; dynmo-ckpt converted it into {target}")
    return target


def _find(config: Config, flag: str, place: str) -> str | None:
    """The directory of the checkpoint that ``place`` names; None, with a warning, where there is none yet."""
    path = Path(place)
    if foreign_kind(path):
        cache = Path(config.run.cache_dir) if config.run.cache_dir else default_cache()
        multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
        found = native_copy(path, cache, multiple)
        say(f"{flag} {path}: the weights only; training starts from the first step, without optimizer state")
        return str(found)
    if not path.exists() or not holds_steps(path):
        say(f"warning: no checkpoint in {path}; training starts from the first step")
        return None
    return str(find_checkpoint(path))


def checkpoint_to_load(
    config: Config, world: World, *, flag: str = "--load", place: str | None = None
) -> Checkpoint | None:
    """The checkpoint that ``--load`` means, the same at every process: rank 0 looks, and converts where it must.

    As in Megatron, a place without a checkpoint is no error.

    Args:
        flag: the option that says so.
        place: its value; None is that of ``--load``.

    Raises:
        UsageError: an incomplete checkpoint, or a directory that cannot be converted; at every process.
    """
    place = place or config.run.load
    found, problem = None, None
    if world.is_first and place is not None:
        try:
            found = _find(config, flag, place)
        except UsageError as error:
            problem = str(error)
    found, problem = broadcast_document(world, [found, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return None if found is None else open_checkpoint(Path(found))
