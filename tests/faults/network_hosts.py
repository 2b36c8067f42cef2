"""Hosts as network namespaces on one bridge, each with a launcher that is forked from a process with torch loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000


def ip(*words: str) -> str:
    """Run iproute2's ``ip``."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def reason_to_skip() -> str | None:
    """Why there are no network namespaces here; None if there are."""
    if os.geteuid() or shutil.which("ip") is None:
        return "needs root and iproute2"
    name = f"dynmo-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    ip("netns", "delete", name)
    return None


def pids_in(name: str) -> list[int]:
    """Processes in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in listed.split()]


class Network:
    """Namespaces ``0`` to ``count - 1`` with the addresses 10.213.0.1 and following, on a bridge in another one."""

    def __init__(self, count: int, label: str) -> None:
        self.switch, self.names = f"dynmo-{label}-s", [f"dynmo-{label}-{number}" for number in range(count)]

    def create(self) -> None:
        """Make the namespaces and links."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            port = f"port{number}"
            ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "wire", "netns", name)
            ip("-n", self.switch, "link", "set", port, "master", "bridge")
            ip("-n", self.switch, "link", "set", port, "up")
            ip("-n", name, "address", "add", f"10.213.0.{number + 1}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def connect(self, number: int, *, is_up: bool) -> None:
        """Cut a host off, or connect it again."""
        ip("-n", self.switch, "link", "set", f"port{number}", "up" if is_up else "down")

    def kill_all(self, number: int) -> None:
        """Kill all processes of a host, as the loss of its power does."""
        for pid in pids_in(self.names[number]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def delete(self) -> None:
        """Kill all processes and remove the namespaces."""
        for number in range(len(self.names)):
            self.kill_all(number)
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def network(count: int, label: str) -> Iterator[Network]:
    """A network of ``count`` hosts."""
    made = Network(count, label)
    try:
        made.create()
        yield made
    finally:
        made.delete()


def fork_into(name: str, log: Path, action: Callable[[], int]) -> int:
    """Run ``action`` in a forked process in the namespace ``name``, with its output in ``log``; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        with open(f"/var/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = action()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        end_fork(code)


def end_fork(code: int) -> None:
    """End a forked process without the exit handlers of its parent, and print the exception that ends it."""
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code(pid: int) -> int | None:
    """Exit code of a child, -N after signal N; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition becomes true within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
