"""Hosts from a file, reached over ssh: DeepSpeed's ``host slots=N`` form with its include and exclude filters."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._common.console import say
from .._common.document import MAX_JOBS
from .._common.errors import EXIT_RELAUNCH, EXIT_TERMINATED, UsageError
from ..formats.input_text import read_input
from .exit_status import shell_code

_LINE = re.compile(r"(?P<host>[^\s#=]+)\s+slots=(?P<slots>\d{1,9})\s*(#.*)?")
# What a run on other hosts should see as it is seen here.
_CARRIED = re.compile(r"(NCCL|GLOO|OMP|CUDA|TORCH|DYNMO|MALLOC|PYTHON|UCX|FI|LD_LIBRARY)(_.*|PATH)?|PATH|VIRTUAL_ENV")
# What ssh ends with where it reaches no host.
UNREACHABLE = 255
POLL_S = 0.1
_NOT_CARRIED = {"CUDA_VISIBLE_DEVICES", "DYNMO_LAUNCHER_PID", "DYNMO_LAUNCH_FILE"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine and the numbers of its devices that are used."""

    name: str
    slots: tuple[int, ...]


def parse_hostfile(text: str, source: str) -> list[Host]:
    """``host slots=N`` lines in order; comments and empty lines are skipped.

    Raises:
        UsageError: another line, a host twice, or none at all; every bad line is named.
    """
    hosts: list[Host] = []
    bad: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or not 1 <= int(match["slots"]) <= MAX_JOBS or match["host"].startswith("-"):
            bad.append(f"{source}:{number}: {line.strip()!r} is not 'HOST slots=N' with N of 1 to {MAX_JOBS:,}")
        elif any(host.name == match["host"] for host in hosts):
            bad.append(f"{source}:{number}: {match['host']} is there twice")
        else:
            hosts.append(Host(name=match["host"], slots=tuple(range(int(match["slots"])))))
    if not hosts and not bad:
        bad.append(f"{source} names no host")
    if bad:
        raise UsageError("\n".join(bad))
    return hosts


def _filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """``host1@host2:0,2`` as the slots of each host that it names."""
    known = {host.name: host.slots for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for word in text.split("@"):
        name, colon, listed = word.strip().partition(":")
        if name not in known:
            raise UsageError(f"{option}: {name!r} is not in the hostfile, which has {', '.join(known)}")
        if colon and not re.fullmatch(r"\d+(,\d+)*", listed):
            raise UsageError(f"{option}: {word!r} is not HOST or HOST:SLOT,SLOT")
        slots = tuple(int(slot) for slot in listed.split(",")) if colon else known[name]
        if missing := [slot for slot in slots if slot not in known[name]]:
            raise UsageError(f"{option}: {name} has the slots 0 to {len(known[name]) - 1}, not {missing[0]}")
        found[name] = tuple(sorted({*found.get(name, ()), *slots}))
    return found


def choose(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts and slots that take part, in the order of the hostfile.

    Args:
        include: ``host1@host2:0,2``: only these.
        exclude: in the same form: all but these.

    Raises:
        UsageError: both are given, a name or slot is unknown, or nothing is left.
    """
    if include and exclude:
        raise UsageError("give --include or --exclude, not both")
    if include:
        wanted = _filter("--include", include, hosts)
        return [Host(name=host.name, slots=wanted[host.name]) for host in hosts if host.name in wanted]
    dropped = _filter("--exclude", exclude, hosts) if exclude else {}
    kept = [
        Host(name=host.name, slots=tuple(slot for slot in host.slots if slot not in dropped.get(host.name, ())))
        for host in hosts
    ]
    if not (kept := [host for host in kept if host.slots]):
        raise UsageError(f"--exclude {exclude} leaves no host")
    return kept


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """A launch on hosts: ``options`` are those of ``launch node``, ``environment`` is set on each host."""

    hosts: tuple[Host, ...]
    arguments: tuple[str, ...]
    options: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    least: int
    master_addr: str
    master_port: int
    ssh: tuple[str, ...]
    program: tuple[str, ...] = (sys.executable, "-m", "dynmo_train")
    devices: bool = False


def carried(environment: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """The variables that go along to other hosts: the communication libraries', Python's, and ``more``."""
    own = {name: value for name, value in environment.items() if _CARRIED.fullmatch(name) and name not in _NOT_CARRIED}
    return dict(sorted((own | dict(more)).items()))


def host_command(job: HostJob, rank: int) -> list[str]:
    """The command of this machine that starts node ``rank`` on its host; each word for the other shell is quoted."""
    host = job.hosts[rank]
    node = [
        *job.program,
        *("launch", "node", "--nproc", str(len(host.slots)), "--nnodes", f"{job.least}:{len(job.hosts)}"),
        *("--node-rank", str(rank), "--master-addr", job.master_addr, "--master-port", str(job.master_port)),
        *("--end-with-stdin", *job.options, "--", *job.arguments),
    ]
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))} if job.devices else {}
    variables = [f"{name}={value}" for name, value in {**job.environment, **devices}.items()]
    line = f"cd {shlex.quote(job.folder)} && exec env {shlex.join([*variables, *node])}"
    return [*job.ssh, host.name, line]


def _show(lines: Iterable[str], prefix: str) -> None:
    for line in lines:
        say(prefix + line.rstrip("\n"))


def _wait(children: Sequence[subprocess.Popen[str]], job: HostJob) -> list[int]:
    """Exit codes of all; ends the others once too few hosts can be reached."""
    told: set[int] = set()
    running = True
    while running:
        running = None in [child.poll() for child in children]
        for rank, child in enumerate(children):
            if child.returncode == UNREACHABLE and rank not in told:
                told.add(rank)
                say(f"dynmo-train: error: the connection to {job.hosts[rank].name} failed")
        if told and (0 in told or len(children) - len(told) < job.least):
            for child in children:
                if child.stdin is not None:
                    child.stdin.close()
        if running:
            time.sleep(POLL_S)
    return [shell_code(child.returncode) for child in children]


def run_on_hosts(job: HostJob) -> int:
    """Start all nodes and wait for them; the code of node 0, or of the first that failed where it is gone.

    The connections' standard input ends when this process does, and with it the launchers on the hosts.
    """
    children: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []

    def end(number: int, _frame: object) -> None:
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for rank, host in enumerate(job.hosts):
            child = subprocess.Popen(
                host_command(job, rank),
                stdin=subprocess.PIPE,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            children.append(child)
            if child.stderr is not None:
                prefix = "" if rank == 0 else f"{host.name}: "
                readers.append(threading.Thread(target=_show, args=(child.stderr, prefix), daemon=True))
                readers[-1].start()
        codes = _wait(children, job)
        for reader in readers:
            reader.join()
    except FileNotFoundError as error:
        raise UsageError(f"{job.ssh[0]} is not on PATH") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return codes[0] or next((code for code in codes if code in (EXIT_RELAUNCH, EXIT_TERMINATED)), 0)


def end_with_stdin() -> None:
    """End this process as SIGTERM does once its standard input is closed: the connection that started it is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file; raises ``UsageError`` where it cannot be read or understood."""
    return parse_hostfile(read_input(path), str(path))
