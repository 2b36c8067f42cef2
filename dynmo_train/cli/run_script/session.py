"""What an interpretation of a script produces and may use: steps, notes, budget, and the jumps of control flow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .syntax import Place

MAX_COMMANDS, MAX_CHARACTERS, MAX_SCRIPTS, MAX_SCRIPT_BYTES = 20_000, 1 << 24, 16, 1 << 20
# Commands without an effect on a run, and what is reported; empty: nothing.
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        ("wait", "sleep", "trap", "shopt", "ulimit", "umask", "clear", "hash", "sync", "free", "df", "ls"), ""
    ),
    "mkdir": "",
    "touch": "",
    "chmod": "permissions are not changed",
    "module": "modules are not loaded; load them before",
    "conda": "environments are not activated; activate yours before",
    "cmake": "nothing is compiled",
    "make": "nothing is compiled",
    "scancel": "no job is canceled",
    "kill": "no process is ended",
    "pkill": "no process is ended",
    "env": "",
    "printenv": "",
    "which": "",
    "type": "",
    "alias": "",
    "git": "no repository is changed",
}
UNSAFE_VARIABLE = re.compile(
    r"LD_.*|DYLD_.*|PYTHON(?!UNBUFFERED$|WARNINGS$|FAULTHANDLER$|HASHSEED$).*|PATH|BASH_ENV|ENV|HOME|SHELL|IFS|PS4|GIT_.*"
)
# Variables that change what a run computes or prints, and not which code it executes: those of a printed command.
HARMLESS_VARIABLE = re.compile(
    r"MASTER_(ADDR|PORT)|NODE_RANK|NNODES|NUM_NODES|NPROC_PER_NODE|GPUS_PER_NODE|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER"
    r"|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|OMP_PROC_BIND|TOKENIZERS_PARALLELISM"
    r"|NCCL_(DEBUG|DEBUG_SUBSYS|ALGO|PROTO|IB_\w+|P2P_\w+|SHM_\w+|SOCKET_\w+|NVLS_\w+|CUMEM_\w+|BUFFSIZE|TIMEOUT"
    r"|BLOCKING_WAIT|ASYNC_ERROR_HANDLING|MIN_NCHANNELS|MAX_NCHANNELS|NTHREADS|CROSS_NIC|LAUNCH_MODE)"
    r"|TORCH_(NCCL_\w+|CPP_LOG_LEVEL|DISTRIBUTED_DEBUG)|PYTORCH_(CUDA_)?ALLOC_CONF|(GLOO|TP)_SOCKET_IFNAME|UCX_TLS"
    r"|PYTHON(UNBUFFERED|FAULTHANDLER|HASHSEED)|(HF_HUB|HF_DATASETS|TRANSFORMERS)_OFFLINE|WANDB_(MODE|PROJECT|NAME|DISABLED)"
    r"|NVTE_\w+|LANG|LC_[A-Z]+|TZ|TERM|COLUMNS"
)
# The launcher sets these; values for another launcher would be wrong.
LAUNCHER_VARIABLE = re.compile(r"WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|TORCHELASTIC_.*")
PIPE_SINKS = frozenset({"tee", "cat", "grep", "egrep", "sed", "awk", "head", "tail", "ts", "less", "sort", "tr"})


@dataclass(frozen=True)
class StartStep:
    """A command of this project: its words, the variables that the script exports, and its folder.

    ``origin`` is the command line in the script, expanded.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    place: Place
    origin: tuple[str, ...] = ()


@dataclass(frozen=True)
class WriteStep:
    """A JSON file that the script writes."""

    path: Path
    text: str
    place: Place


Step = StartStep | WriteStep


@dataclass
class Budget:
    """What all parts of a script may use together."""

    commands: int = MAX_COMMANDS
    characters: int = MAX_CHARACTERS
    scripts: int = MAX_SCRIPTS

    def spend(self, kind: str, amount: int, place: Place) -> None:
        """Subtract an amount.

        Raises:
            ScriptError: the budget is spent.
        """
        remaining = getattr(self, kind) - amount
        setattr(self, kind, remaining)
        if remaining < 0:
            limits = {"commands": MAX_COMMANDS, "characters": MAX_CHARACTERS, "scripts": MAX_SCRIPTS}
            place.refuse(f"the script uses more than {limits[kind]:,} {kind}; simplify it")


@dataclass
class ScriptResult:
    """What a script does: its steps, notes for the user, text that it prints, and its exit code."""

    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    exit_code: int = 0


class ExitScript(Exception):
    """``exit``: the end of a script or subshell."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Jump(Exception):
    """``break``, ``continue`` or ``return``."""

    def __init__(self, kind: str, levels: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.levels = kind, levels


def passed_variables(variables: Mapping[str, str], initial: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables that a script sets for a command.

    Args:
        variables: exported variables.
        initial: the environment of the script, which the command has anyway.

    Returns:
        The variables to pass on, and names of those that change which code is executed.
    """
    found: dict[str, str] = {}
    unsafe: list[str] = []
    for name, value in sorted(variables.items()):
        if initial.get(name) == value or name in ("PWD", "OLDPWD") or LAUNCHER_VARIABLE.fullmatch(name):
            continue
        if UNSAFE_VARIABLE.fullmatch(name) or "\0" in value:
            unsafe.append(name)
        else:
            found[name] = value
    return found, unsafe
