"""What ``--overwrite`` may remove: one checkpoint, and nothing else.

A folder that was named by mistake, such as a home directory, a run with all its steps or a repository of code, is
refused. So are files that no checkpoint has, next to one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from .._common.errors import DynmoError, UsageError
from ..converters import BUILTIN
from ..converters.registry import detect
from ..huggingface.files import WEIGHT_SUFFIXES
from ..huggingface.tokenizer import FURTHER_TEMPLATES, TIKTOKEN, TOKENIZER_FILES
from ..io.directory import CheckReplaced, refuse_inputs
from ..io.errors import CorruptError, short_names
from ..io.remote import REPOSITORY_FILES, UPLOAD_MARK, RemotePath
from ..io.uploads import replaced_names
from ..native.checkpoint import load_manifest
from .verify import MANIFEST

REMEDY = "--overwrite replaces one checkpoint only; choose another OUT, or remove this one yourself"
WEIGHTS = (*WEIGHT_SUFFIXES, ".distcp")
# Patterns of paths in a checkpoint besides weights, of any depth.
FILES = (
    *TOKENIZER_FILES,
    *REPOSITORY_FILES,
    *(TIKTOKEN, f"{FURTHER_TEMPLATES}/*.jinja"),
    # transformers and its trainer
    *("*config.json", "*.index.json", "params.json", "trainer_state.json", "*_results.json"),
    *("modeling_*.py", "configuration_*.py", "tokenization_*.py", "LICENSE*", "NOTICE*", "USE_POLICY.md"),
    # this project
    *("conversion.json", MANIFEST, "LATEST"),
    # Megatron, torch and DeepSpeed
    *(".metadata", "metadata.json", "latest_checkpointed_iteration.txt", "latest", "zero_to_fp32.py"),
    *("progress.txt", "run_config.yaml", "modelopt_*"),
)
# Folders and files of which a directory with several has several checkpoints.
STEPS = ("step-*", "iter_*", "global_step*", "checkpoint-*")
MARKERS = ("config.json", "adapter_config.json", MANIFEST)
# What `hf download --local-dir` writes next to the files.
HUB_CACHE = ".cache/huggingface/"


def replaced_check(inputs: Iterable[Path]) -> CheckReplaced:
    """The check of an existing output with ``--overwrite``: it is a checkpoint, and no input is in it."""
    listed = list(inputs)

    def check(target: Path) -> None:
        refuse_inputs(target, listed)
        check_replaceable(target)

    return check


def check_replaceable(target: Path) -> None:
    """Check that a directory or address is empty, or has one checkpoint and no other files.

    Raises:
        UsageError: it has something else.
        StorageError: an object store cannot be reached or denies access.
    """
    # A cut upload has no file by which it could be detected.
    is_cut = isinstance(target, RemotePath) and (target / UPLOAD_MARK).info(refresh=True) is not None
    if not target.is_dir():
        if is_cut or not target.exists():
            return
        raise UsageError(f"{target}: is not a directory; {REMEDY}")
    if not any(target.iterdir()):
        return
    if not is_cut:
        try:
            name = detect(target).name
        except CorruptError as error:
            raise UsageError(f"{target}: is not a checkpoint; {REMEDY}") from error
        # Only its package knows the files of another format.
        if name not in BUILTIN:
            return
    paths = {path.relative_to(target): path.is_dir() and not path.is_symlink() for path in target.rglob("*")}
    files = [path.as_posix() for path, is_folder in paths.items() if not is_folder]
    if not is_cut and not any(path.endswith(WEIGHTS) for path in files):
        raise UsageError(f"{target}: has no weights, and so is not a checkpoint; {REMEDY}")
    places = {path.parent for path in paths if path.name in MARKERS}
    places |= {path for path, is_folder in paths.items() if is_folder and is_step(path.name)}
    if len(places) > 1:
        raise UsageError(f"{target}: has several checkpoints, {short_names(sorted(map(str, places)))}; {REMEDY}")
    recorded: Iterable[str] = ()
    if (target / MANIFEST).is_file():
        with suppress(DynmoError):
            recorded = load_manifest(target)["files"]
    if isinstance(target, RemotePath) and is_cut:
        recorded = {*recorded, *replaced_names(target)}
    refuse_other_files(target, set(files) - set(recorded))


def is_step(name: str) -> bool:
    """Whether a folder of this name is a step of a run of any project."""
    return any(fnmatchcase(name, pattern) for pattern in STEPS)


def refuse_other_files(target: Path, paths: Iterable[str]) -> None:
    """Refuse to replace ``target`` where one of its ``paths``, relative to it, does not belong to a checkpoint.

    Raises:
        UsageError: one is not.
    """

    def is_known(path: str) -> bool:
        name = path.rpartition("/")[2]
        patterns = any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern) for pattern in FILES)
        return path.endswith(WEIGHTS) or patterns or path.startswith(HUB_CACHE)

    if others := sorted(path for path in paths if not is_known(path)):
        raise UsageError(f"{target}: has {short_names(others)}, which no checkpoint has; {REMEDY}")
