"""The programs of the project in processes that are forked from one with everything loaded, and their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults.network_hosts import end_fork

PR_SET_CHILD_SUBREAPER = 36
MAIN = {
    "dynmo-train": ("dynmo_train.__main__", "run"),
    "dynmo-prep": ("dynmo_tools.cli", "main"),
    "dynmo-ckpt": ("dynmo_ckpt.cli", "main"),
}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Patch = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line.

    Attributes:
        program: a key of ``MAIN``.
        words: arguments; paths are relative to the folder it runs in.
        ranks: processes that run it, without a launcher; more than one are ranks of one world.
        environment: additional variables.
    """

    program: str
    words: tuple[str, ...]
    ranks: int = 1
    environment: tuple[tuple[str, str], ...] = ()


PRELOADED = {
    "dynmo-train": ("dynmo_train", "dynmo_train.__main__", "torch.distributed.pipelining"),
    "dynmo-prep": ("dynmo_tools", "ftfy", "orjson", "tokenizers"),
    "dynmo-ckpt": ("dynmo_ckpt",),
}


def preload(programs: set[str]) -> None:
    """Import what the programs need, so that forked processes start at once."""
    for package, *others in (PRELOADED[program] for program in sorted(programs)):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.endswith((".__main__", ".ray")):
                importlib.import_module(found.name)
        for name in others:
            importlib.import_module(name)


def become_subreaper() -> None:
    """Orphans of this process's descendants become its children, so that none is lost from sight."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def start(command: Command, folder: Path, logs: list[Path], port: int, patch: Patch | None = None) -> list[int]:
    """Start a command in ``folder``, with one log per rank; the process ids of its ranks.

    ``patch`` runs in each process before the program.
    """
    pids = []
    for rank, log in enumerate(logs):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _run(command, rank, folder, log, port, patch)
        pids.append(pid)
    return pids


def _run(command: Command, rank: int, folder: Path, log: Path, port: int, patch: Patch | None) -> None:
    """The program, in its forked process; does not return."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if command.ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(command.ranks))
            os.environ.update(LOCAL_WORLD_SIZE=str(command.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(command.environment)
        sys.argv = [command.program, *command.words]
        module, name = MAIN[command.program]
        if patch is not None:
            patch()
        getattr(importlib.import_module(module), name)()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
    finally:
        sys.setprofile(None)
        if isinstance(sys.exc_info()[1], SystemExit):
            os._exit(code)
        end_fork(code)


@dataclass(frozen=True, kw_only=True)
class Process:
    """A row of the table of processes: ``role`` names it in reports, ``cpu_s`` are its processor seconds."""

    pid: int
    role: str
    state: str
    cpu_s: float


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; empty once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _role(pid: int, is_root: bool) -> str:
    """What a process is, by its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "process"
    for sign, role in (("dynmo-plan", "planner"), ("resource_tracker", "tracker"), ("spawn_main", "pool worker")):
        if sign in words:
            return role
    if "dynmo_train\0pretrain" in words:
        return "launched rank"
    return "root" if is_root else "forked worker"


def descendants(root: int | None = None) -> list[Process]:
    """The living descendants of a process, by default of this one."""
    root = os.getpid() if root is None else root
    rows = {int(name): fields for name in os.listdir("/proc") if name.isdigit() and (fields := _stat(int(name)))}
    found, level = [], [root]
    while level:
        level = [pid for pid, fields in rows.items() if int(fields[1]) in level]
        found += level
    return [
        Process(
            pid=pid,
            role=_role(pid, rows[pid][1] == str(root)),
            state=rows[pid][0],
            cpu_s=sum(map(int, rows[pid][11:15])) / TICKS_PER_S,
        )
        for pid in found
        if rows[pid][0] not in "ZX"
    ]


def end_descendants() -> None:
    """Kill and reap all descendants of this process."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for process in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


# ---------------------------------------------------------------- patches, applied in the forked process


class Counter:
    """A number that forked processes share."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8)

    @property
    def value(self) -> int:
        return int.from_bytes(self.memory[:8], "little")

    @value.setter
    def value(self, number: int) -> None:
        self.memory[:8] = number.to_bytes(8, "little")


def count_file_calls(counter: Counter, kill_at: int, signal_number: int = signal.SIGKILL) -> Patch:
    """Count the calls to the file system in all threads, and signal the process at the call ``kill_at``; 0: never."""

    def patch() -> None:
        own, lock, calls = os.getpid(), threading.Lock(), [0]

        def count(frame: object, event: str, function: object) -> None:
            if event != "c_call" or os.getpid() != own:
                return
            module = getattr(function, "__module__", None)
            if module == "posix" or type(getattr(function, "__self__", None)).__module__ == "_io":
                with lock:
                    calls[0] += 1
                    is_due = calls[0] == kill_at
                    counter.value = calls[0]
                if is_due:
                    os.kill(own, signal_number)

        threading.setprofile(count)
        sys.setprofile(count)

    return patch


def limit_file_size(num_bytes: int) -> Patch:
    """Files cannot grow beyond ``num_bytes``; the log is a file too."""

    def patch() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return patch


def slow_disk(seed: int, max_s: float) -> Patch:
    """Calls that write wait up to ``max_s`` seconds."""

    def patch() -> None:
        draw = Random(seed)

        def slow(function: Callable[..., object]) -> Callable[..., object]:
            def slowed(*arguments: object, **options: object) -> object:
                time.sleep(draw.uniform(0, max_s))
                return function(*arguments, **options)

            return slowed

        for name in ("write", "fsync", "replace", "rename", "link", "mkdir"):
            setattr(os, name, slow(getattr(os, name)))

    return patch


def jumping_clock(seed: int) -> Patch:
    """``time.time`` and ``time.time_ns`` jump by an hour, a day or ten years, back or forth, at random calls."""

    def patch() -> None:
        draw, real_s, real_ns, offset = Random(seed), time.time, time.time_ns, [0.0]

        def jump() -> float:
            if draw.random() < 0.2:
                offset[0] = draw.choice((-1, 1)) * draw.choice((3600.0, 86400.0, 3.2e8))
            return offset[0]

        time.time = lambda: real_s() + jump()
        time.time_ns = lambda: real_ns() + int(jump() * 1e9)

    return patch
