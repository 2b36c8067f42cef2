"""The trees that are compared: checkouts of commits, and their commands, run without their modules' names.

A tree has the four console scripts of its ``pyproject.toml`` in a folder of programs, and an environment that is the
same for all trees: its own home, no colours, 100 columns, one thread.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from tests.distributed.ports import free_port
from tests.paths import ROOT, extract

Job = TypeVar("Job")
SERVE = Path(__file__).with_name("serve.py")
# Variables of the caller that would reach the commands.
HIDDEN = ("DYNMO_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PYTEST_", "COLUMNS", "LINES", "FORCE_COLOR")


class MissingCommitError(Exception):
    """What is to be compared is neither a commit nor a folder."""


def checkout(name: str, folder: Path) -> Path:
    """The tree of a commit, or the tracked files of a folder, copied into a folder."""
    if os.sep in name and Path(name).is_dir():
        return copy_tracked(Path(name).resolve(), folder)
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    if found.returncode:
        raise MissingCommitError(f"{name}: must be a commit of this repository, or the path of a folder with a slash")
    packed = subprocess.run(["git", "archive", name], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        extract(archive, folder)
    return folder


def copy_tracked(source: Path, target: Path) -> Path:
    """Copy the files of a folder: those that git tracks or would add; all of them where it is not a work tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        return source
    for name in filter(None, listed.stdout.split("\0")):
        if (source / name).is_file():  # a deleted file is still tracked
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
    return target


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended.

    Attributes:
        codes: exit code of each rank.
        out: stdout of rank 0.
        err: stderr of rank 0.
    """

    codes: tuple[int, ...]
    out: str
    err: str


class Tree:
    """A checkout with its commands.

    Args:
        root: the checkout.
        work: an empty folder for everything that its commands write.
        jobs: number of commands that run at the same time.
    """

    def __init__(self, root: Path, work: Path, jobs: int) -> None:
        self.root, self.work, self.jobs = root, work, jobs
        self.entries: dict[str, str] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "scripts"
        ]
        self.programs = _programs(self.entries, work / "environment")
        self.environment = self._environment()
        self._servers: dict[str, queue.SimpleQueue[_Server]] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def _environment(self) -> dict[str, str]:
        home = self.work / "home"
        home.mkdir(parents=True)
        shared = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
        return shared | {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.root),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            **{"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8"},
            **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DYNMO_SETUP": "no"},
        }

    def run(self, program: str, *words: str, folder: Path, ranks: int = 1, timeout_s: float = 120.0) -> Done:
        """Run a command, in ``ranks`` processes as ``torchrun`` starts them."""
        return self._ask(program, {"words": words}, folder, ranks, timeout_s)

    def read(self, readers: Sequence[str], argument: Path, kind: str, folder: Path) -> dict[str, Any]:
        """The verdict of a public reader (of ``areas.READERS``) on a file."""
        request = {"readers": list(readers), "argument": str(argument), "as": kind}
        done = self._ask("dynmo-train", request, folder, 1, 60.0)
        return json.loads(done.out) if done.out else {"fails": f"exit code {done.codes[0]}"}

    def _ask(self, program: str, request: dict[str, Any], folder: Path, ranks: int, timeout_s: float) -> Done:
        servers = self._servers_of(program)
        server = servers.get()
        try:
            return server.ask(request, folder, _ranks(ranks), timeout_s)
        finally:
            servers.put(server)

    def _servers_of(self, program: str) -> queue.SimpleQueue[_Server]:
        if program not in self._servers:
            started = queue.SimpleQueue[_Server]()
            self._servers[program] = started
            for _ in range(self.jobs):
                server = _Server(self, program)
                self._processes.append(server.process)
                started.put(server)
        return self._servers[program]

    def warm_up(self, program: str, *words: str) -> None:
        """Run a command in each server, so that later commands find its modules loaded."""
        self._warm_up(program, {"words": words})

    def warm_up_reader(self, readers: Sequence[str], argument: Path, kind: str) -> None:
        """Load the modules of a public reader in each server."""
        self._warm_up("dynmo-train", {"readers": list(readers), "argument": str(argument), "as": kind})

    def _warm_up(self, program: str, request: dict[str, Any]) -> None:
        servers = self._servers_of(program)
        for _ in range(self.jobs):
            server, place = servers.get(), Path(tempfile.mkdtemp(dir=self.work))
            server.ask({**request, "modules": str(place / "modules")}, place, _ranks(1), 300.0)
            servers.put(server)

    def map(self, function: Callable[[Job], Any], jobs: Sequence[Job]) -> Iterator[Any]:
        """Results of a function of each job, in order; each server runs one at a time."""
        with ThreadPoolExecutor(self.jobs) as pool:
            yield from pool.map(function, jobs)

    def close(self) -> None:
        """End the servers, which have no command by now and nothing to save."""
        for process in self._processes:
            process.kill()
            process.wait()
            for end in (process.stdin, process.stdout):
                if end is not None:
                    end.close()


class _Server:
    """A process that runs commands of one program, one after another."""

    def __init__(self, tree: Tree, program: str) -> None:
        self._program = program
        self._log = tree.work / f"server-{program}-{len(os.listdir(tree.work))}"
        self._log.mkdir()
        self.process = subprocess.Popen(
            [str(tree.programs / "python"), str(SERVE), tree.entries[program]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=tree.environment, cwd=self._log,
        )  # fmt: skip

    def ask(self, request: dict[str, Any], folder: Path, ranks: list[dict[str, str]], timeout_s: float) -> Done:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        output = self._log / "output"
        full = {
            **request,
            "program": self._program,
            "folder": str(folder),
            "ranks": ranks,
            "output": str(output),
            "timeout_s": timeout_s,
        }
        self.process.stdin.write(json.dumps(full) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        out, err = (
            Path(f"{output}.0.{end}").read_text(encoding="utf-8", errors="backslashreplace") for end in ("out", "err")
        )
        return Done(codes=tuple(codes), out=out, err=err)


def _ranks(count: int) -> list[dict[str, str]]:
    """Variables of each rank, as ``torchrun`` sets them; none for one process."""
    if count == 1:
        return [{}]
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _programs(entries: dict[str, str], folder: Path) -> Path:
    """A folder with the interpreter's programs, and the console scripts of a tree in place of the installed ones."""
    own, target = Path(sys.executable).parent, folder / "bin"
    target.mkdir(parents=True)
    configuration = own.parent / "pyvenv.cfg"
    if configuration.exists():  # a command finds others next to its interpreter: the environment as a whole is copied
        shutil.copy(configuration, folder)
        for path in own.parent.glob("lib*"):
            (folder / path.name).symlink_to(path)
    for path in own.iterdir() if configuration.exists() else [Path(sys.executable)]:
        if path.name not in entries:
            (target / path.name).symlink_to(path)
    for name in ("python", "python3"):
        if not (target / name).exists():
            (target / name).symlink_to(sys.executable)
    for name, entry in entries.items():
        module, _, function = entry.partition(":")
        text = f"#!{target}/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (target / name).write_text(text, encoding="utf-8")
        (target / name).chmod(0o755)
    return target
