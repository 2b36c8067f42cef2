"""Launch on the hosts of a file over ssh, with DeepSpeed's ``host slots=N`` format and its filters."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..._common.console import print_message
from ..._common.document import MAX_JOBS, MAX_RANKS
from ..._common.errors import EXIT_RELAUNCH, EXIT_TERMINATED, UsageError
from ...formats.input_text import read_input
from ..exit_status import shell_exit_code
from ..options import Arguments, DryRun, Exports, HangOptions, LogFolder, MaxRestarts

_LINE = re.compile(r"(?P<host>[^\s#=]+)\s+slots=(?P<slots>\d{1,9})\s*(#.*)?")
# Environment variables that are forwarded to other hosts.
_FORWARDED = re.compile(r"(NCCL|GLOO|OMP|CUDA|TORCH|DYNMO|MALLOC|PYTHON|UCX|FI|LD_LIBRARY)(_.*|PATH)?|PATH|VIRTUAL_ENV")
# Exit code of ssh if it cannot connect.
UNREACHABLE = 255
POLL_S = 0.1
DEFAULT_SSH = "ssh -o BatchMode=yes"
_NOT_FORWARDED = {"CUDA_VISIBLE_DEVICES", "DYNMO_LAUNCHER_PID", "DYNMO_LAUNCH_FILE"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and the indices of its slots that are used."""

    name: str
    slots: tuple[int, ...]


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Parse ``host slots=N`` lines; comments and blank lines are skipped.

    Args:
        text: contents of the hostfile.
        source: name of the hostfile, for messages.

    Raises:
        UsageError: invalid lines, repeated hosts, or no host; reports all of them.
    """
    hosts: list[Host] = []
    bad: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or not 1 <= int(match["slots"]) <= MAX_JOBS or match["host"].startswith("-"):
            bad.append(f"{source}:{number}: {line.strip()!r}: must be 'HOST slots=N' with N from 1 to {MAX_JOBS:,}")
        elif any(host.name == match["host"] for host in hosts):
            bad.append(f"{source}:{number}: {match['host']}: must not be repeated")
        else:
            hosts.append(Host(name=match["host"], slots=tuple(range(int(match["slots"])))))
    if not hosts and not bad:
        bad.append(f"{source}: must have at least one 'HOST slots=N' line")
    if bad:
        raise UsageError("\n".join(bad))
    return hosts


def _filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Parse ``host1@host2:0,2`` into the slots of each host."""
    known = {host.name: host.slots for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for word in text.split("@"):
        name, colon, listed = word.strip().partition(":")
        if name not in known:
            raise UsageError(f"{option}: {name!r}: must be a host of the hostfile: {', '.join(known)}")
        if colon and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", listed):
            raise UsageError(f"{option}: {word!r}: must be HOST or HOST:SLOT,SLOT")
        slots = tuple(int(slot) for slot in listed.split(",")) if colon else known[name]
        if missing := [slot for slot in slots if slot not in known[name]]:
            raise UsageError(f"{option}: slot {missing[0]} of {name}: must be from 0 to {len(known[name]) - 1}")
        found[name] = tuple(sorted({*found.get(name, ()), *slots}))
    return found


def filter_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts and slots to use, in the order of the hostfile.

    Args:
        hosts: hosts of the hostfile.
        include: hosts and slots to use, as ``host1@host2:0,2``.
        exclude: hosts and slots not to use, in the same format.

    Raises:
        UsageError: both filters are given, a host or slot is unknown, or all slots are excluded.
    """
    if include and exclude:
        raise UsageError("--include: cannot be combined with --exclude; remove one")
    if include:
        included = _filter("--include", include, hosts)
        return [Host(name=host.name, slots=included[host.name]) for host in hosts if host.name in included]
    excluded = _filter("--exclude", exclude, hosts) if exclude else {}
    remaining = [
        Host(name=host.name, slots=tuple(slot for slot in host.slots if slot not in excluded.get(host.name, ())))
        for host in hosts
    ]
    if not (remaining := [host for host in remaining if host.slots]):
        raise UsageError(f"--exclude {exclude}: must leave at least one slot")
    return remaining


def is_this_machine(name: str) -> bool:
    """Whether a host's name is of this machine: an address of it can be bound, or no name service knows it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return name in (socket.gethostname(), socket.getfqdn())
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as tried:
            try:
                tried.bind(address)
            except OSError:
                continue
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class HostfileOptions(HangOptions):
    """A command on the hosts of a file, or on this machine."""

    arguments: Arguments
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="File of 'HOST slots=N' lines [default: only this machine]."),
    ] = None
    include: Annotated[
        str | None, typer.Option("--include", "-i", metavar="HOST@HOST:SLOT,SLOT", help="Hosts and slots to use.")
    ] = None
    exclude: Annotated[
        str | None, typer.Option("--exclude", "-e", metavar="HOST@HOST:SLOT,SLOT", help="Hosts and slots not to use.")
    ] = None
    num_nodes: Annotated[
        int | None, typer.Option("--num-nodes", "--num_nodes", min=1, max=MAX_RANKS, help="Number of hosts to use.")
    ] = None
    num_gpus: Annotated[
        int | None,
        typer.Option("--num-gpus", "--num_gpus", min=1, max=MAX_JOBS, help="Number of slots to use per host."),
    ] = None
    min_nodes: Annotated[
        int | None,
        typer.Option(
            "--min-nodes", min=1, max=MAX_RANKS, help="Minimum number of hosts to continue with [default: all]."
        ),
    ] = None
    master_addr: Annotated[
        str | None,
        typer.Option("--master-addr", "--master_addr", help="Address of the first host [default: its name]."),
    ] = None
    master_port: Annotated[
        int, typer.Option("--master-port", "--master_port", min=1, max=65535, help="Port on the first host.")
    ] = 29500
    ssh: Annotated[str, typer.Option("--ssh", help="Remote shell command.")] = DEFAULT_SSH
    devices: Annotated[
        bool, typer.Option("--devices/--no-devices", help="Set CUDA_VISIBLE_DEVICES to the slots of the host.")
    ] = True
    export: Exports = None
    log_dir: LogFolder = "logs"
    max_restarts: MaxRestarts = 0
    dry_run: DryRun = False


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """A launch on several hosts.

    Attributes:
        options: the command and its options.
        hosts: hosts in the order of their node ranks.
        environment: environment variables of each host.
        folder: working directory on each host.
        program: program on each host.
    """

    options: HostfileOptions
    hosts: tuple[Host, ...]
    environment: Mapping[str, str]
    folder: str
    program: tuple[str, ...] = (sys.executable, "-m", "dynmo_train")

    @property
    def min_nodes(self) -> int:
        """Minimum number of hosts to continue with."""
        return self.options.min_nodes or len(self.hosts)


def forwarded_environment(environment: Mapping[str, str], exported: Mapping[str, str]) -> dict[str, str]:
    """Variables that are forwarded to other hosts: of communication libraries and Python, and ``exported``."""
    forwarded = {
        name: value for name, value in environment.items() if _FORWARDED.fullmatch(name) and name not in _NOT_FORWARDED
    }
    return dict(sorted((forwarded | dict(exported)).items()))


def host_command(job: HostJob, rank: int) -> list[str]:
    """The local command that starts node ``rank`` on its host; words for the remote shell are quoted."""
    options, host = job.options, job.hosts[rank]
    master_addr = options.master_addr or job.hosts[0].name
    node = [
        *job.program,
        *("launch", "node", "--nproc", str(len(host.slots)), "--nnodes", f"{job.min_nodes}:{len(job.hosts)}"),
        *("--node-rank", str(rank), "--master-addr", master_addr, "--master-port", str(options.master_port)),
        *("--end-with-stdin", "--max-restarts", str(options.max_restarts), *options.hang_words),
        *("--log-dir", options.log_dir),
        *("--", *options.arguments),
    ]
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))} if options.devices else {}
    variables = [f"{name}={value}" for name, value in {**job.environment, **devices}.items()]
    line = f"cd {shlex.quote(job.folder)} && exec env {shlex.join([*variables, *node])}"
    return [*shlex.split(options.ssh), host.name, line]


def _print_lines(lines: Iterable[str], prefix: str) -> None:
    for line in lines:
        print_message(prefix + line.rstrip("\n"))


def _wait(children: Sequence[subprocess.Popen[str]], job: HostJob) -> list[int]:
    """Wait for all children and return their exit codes; ends them if too few hosts are reachable."""
    unreachable: set[int] = set()
    running = True
    while running:
        running = None in [child.poll() for child in children]
        for rank, child in enumerate(children):
            if child.returncode == UNREACHABLE and rank not in unreachable:
                unreachable.add(rank)
                print_message(f"dynmo-train: error: connection to {job.hosts[rank].name} failed")
        if unreachable and (0 in unreachable or len(children) - len(unreachable) < job.min_nodes):
            for child in children:
                if child.stdin is not None:
                    child.stdin.close()
        if running:
            time.sleep(POLL_S)
    return [shell_exit_code(child.returncode) for child in children]


def run_on_hosts(job: HostJob) -> int:
    """Start all nodes and wait for them.

    The standard input of the connections closes when this process ends, which ends the launchers on the hosts.

    Returns:
        The exit code of node 0 if it failed, else the first code for a restart or termination, else 0.

    Raises:
        UsageError: the remote shell is not installed.
    """
    children: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []

    def terminate(number: int, _frame: object) -> None:
        """End the nodes on the signal ``number``: the remote launchers stop when their standard input closes.

        Raises:
            SystemExit: always, with 128 and the number, as a shell does.
        """
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
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
                readers.append(threading.Thread(target=_print_lines, args=(child.stderr, prefix), daemon=True))
                readers[-1].start()
        codes = _wait(children, job)
        for reader in readers:
            reader.join()
    except FileNotFoundError as error:
        raise UsageError(
            f"--ssh {shlex.split(job.options.ssh)[0]}: not found on PATH; give the command of a remote shell"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return codes[0] or next((code for code in codes if code in (EXIT_RELAUNCH, EXIT_TERMINATED)), 0)


def end_with_stdin() -> None:
    """Send SIGTERM to this process when its standard input closes, because the connection is lost."""

    def wait() -> None:
        # ssh forwards no signals; the end of its standard input is the only sign that the connection is gone.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile; raises ``UsageError`` if it cannot be read or parsed."""
    return parse_hostfile(read_input(path), str(path))
