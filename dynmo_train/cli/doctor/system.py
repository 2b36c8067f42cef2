"""Findings about this machine that need no torch: programs, packages, limits, memory, disk, network interfaces."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ... import __version__
from ..._common.console import human_bytes
from ...launch.find_command import program_path
from .findings import Finding, Status, ok

PROGRAMS = {
    "dynmo-train": "runs of this program start another version on other ranks",
    "dynmo-plan": "--balance online needs it, and so does --selective-grad-comp-way auto",
    "dynmo-prep": "no datasets can be prepared on this machine",
    "dynmo-ckpt": "--load of Megatron, DeepSpeed and Hugging Face checkpoints needs it",
}
PACKAGES: Mapping[str, tuple[Status, str, str]] = {
    "numpy": ("error", "training does not start", "pip install 'dynmo-toolkit[train]'"),
    "tokenizers": ("missing", "no Hugging Face tokenizers", "pip install 'dynmo-toolkit[train]'"),
    "safetensors": ("error", "no checkpoints can be written or read", "pip install 'dynmo-toolkit[train]'"),
    "pyyaml": ("missing", "no `launch kubernetes`", "pip install 'dynmo-toolkit[train]'"),
    "transformers": ("missing", "no comparison with Hugging Face models", "pip install 'dynmo-toolkit[hf]'"),
    "lm_eval": ("missing", "no `evaluate lm-eval`", "pip install 'dynmo-toolkit[lm-eval]'"),
    "torchao": ("missing", "no `--fp8`", "pip install 'dynmo-toolkit[fp8]'"),
    "wandb": ("missing", "no `--wandb-project`", "pip install 'dynmo-toolkit[wandb]'"),
    "mlflow-skinny": ("missing", "no `--mlflow-experiment`", "pip install 'dynmo-toolkit[mlflow]'"),
    "tensorboard": ("missing", "event files are written, but nothing here shows them", "pip install tensorboard"),
}
MIN_OPEN_FILES = 4096
MIN_SHM_BYTES = 1 << 30
MIN_DISK_BYTES = 10 * 10**9
PROGRAM_TIMEOUT_S = 60.0


def program_version(path: str) -> str | None:
    """The version that a program prints for ``--version``; None if it fails."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.match(r"[\w-]+ (\S+)", done.stdout)
    return found[1] if found else None


def programs(version: str = __version__, ask: Callable[[str], str | None] = program_version) -> Iterator[Finding]:
    """The console scripts next to this interpreter and on PATH, which are programs of their own."""
    for name, cost in PROGRAMS.items():
        paths = list(dict.fromkeys(path for path in (program_path(name), shutil.which(name)) if path))
        if not paths:
            yield Finding(
                group="Programs",
                name=name,
                status="missing",
                found="not found",
                cost=cost,
                remedy="pip install dynmo-toolkit, and add its scripts to PATH",
            )
        for path in paths:
            answer = ask(path)
            if answer == version:
                yield ok("Programs", name, f"{answer} ({path})")
                continue
            yield Finding(
                group="Programs",
                name=name,
                status="warning",
                found=f"{answer or 'does not start'} ({path})",
                cost=f"must be {version}, as dynmo-train; file formats and options of another version may differ",
                remedy="install one version of dynmo-toolkit, or put its scripts first on PATH",
            )


def packages() -> Iterator[Finding]:
    """Python, and the packages that training uses besides torch."""
    yield ok("Packages", "python", ".".join(map(str, sys.version_info[:3])))
    for name, (status, cost, remedy) in PACKAGES.items():
        try:
            yield ok("Packages", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(group="Packages", name=name, status=status, found="not installed", cost=cost, remedy=remedy)


def limits(shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Processors, memory, shared memory and the number of open files."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total  # Linux only
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield ok("Machine", "processors", f"{usable} of {total} | OMP_NUM_THREADS: {threads}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield ok("Machine", "memory", human_bytes(memory))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if 0 <= soft < MIN_OPEN_FILES:
        yield Finding(
            group="Machine",
            name="open files",
            status="warning",
            found=shown,
            cost=f"must be at least {MIN_OPEN_FILES:,} for runs with hundreds of ranks or datasets",
            remedy=f"ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}",
        )
    else:
        yield ok("Machine", "open files", shown)
    if sys.platform != "linux":
        return
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    if size < MIN_SHM_BYTES:
        yield Finding(
            group="Machine",
            name="shared memory",
            status="warning",
            found=f"{shm}: {human_bytes(size)}",
            cost="NCCL between the GPUs of a machine fails, or is slow, below 1 GB",
            remedy="docker run --shm-size 16g, or an emptyDir volume with medium Memory at /dev/shm",
        )
    else:
        yield ok("Machine", "shared memory", f"{shm}: {human_bytes(size)}")


def disk(run_dir: Path) -> Finding:
    """Free bytes of the folder in which a run directory is created, and whether it can be written."""
    folder = run_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {human_bytes(free)} free"
    if not os.access(folder, os.W_OK):
        cost = "no run directory and no checkpoint can be written"
        remedy = "give a folder that you may write: --run-dir FOLDER"
        return Finding(group="Machine", name="run directory", status="error", found=found, cost=cost, remedy=remedy)
    if free < MIN_DISK_BYTES:
        cost = "a checkpoint takes 12 bytes per parameter: weights and two moments in float32"
        remedy = "free space, or give another folder: --run-dir FOLDER"
        return Finding(group="Machine", name="run directory", status="warning", found=found, cost=cost, remedy=remedy)
    return ok("Machine", "run directory", found)


def network(environment: Mapping[str, str], resolve: Callable[[str], str] = socket.gethostbyname) -> Iterator[Finding]:
    """Network interfaces, and the one that gloo uses: that of the host name, unless a variable names one."""
    names = [name for _, name in socket.if_nameindex()]
    yield ok("Network", "interfaces", ", ".join(names))
    chosen = environment.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        missing = [name for name in chosen.split(",") if name not in names]
        if missing:
            yield Finding(
                group="Network",
                name="gloo",
                status="error",
                found=f"GLOO_SOCKET_IFNAME={chosen}",
                cost="process groups cannot be created",
                remedy=f"set GLOO_SOCKET_IFNAME to one of {', '.join(names)}, or unset it",
            )
        else:
            yield ok("Network", "gloo", f"GLOO_SOCKET_IFNAME={chosen}")
        return
    host = socket.gethostname()
    try:
        address = resolve(host)
        several = "; set GLOO_SOCKET_IFNAME for several machines" if address.startswith("127.") else ""
        yield ok("Network", "gloo", f"{host} is {address}{several}")
    except OSError:
        yield Finding(
            group="Network",
            name="gloo",
            status="warning",
            found=f"the host name {host} has no address",
            cost="process groups use the loopback interface, or fail on several machines",
            remedy=f"add {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME to one of {', '.join(names)}",
        )
