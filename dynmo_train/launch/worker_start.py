"""Start the ranks of this node: forked by a server that has imported everything, or executed one by one.

torch's elastic agent starts each process with a ``SubprocessHandler``. For a forked rank its ``Popen`` is replaced by
:class:`ForkedProcess`, which has the same exit codes. This process is a subreaper while ranks start, so that they
become its own children (``worker_server.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from .._common.console import print_message
from .._common.errors import DynmoError
from .process_view import set_subreaper
from .worker_server import receive_message, send_message

_SERVER = ("-m", "dynmo_train.launch.worker_server")
_POLL_S = 0.01
# Seconds until a server that does not answer is replaced: its imports take 3.5 s on an idle machine, a fork
# milliseconds. A server that was stopped, or waits for a file system, would otherwise stop a restart for ever.
IMPORTS_S, FORK_S = 120.0, 30.0
_NO_ANSWER = (EOFError, ConnectionError, TimeoutError)


class WorkerStart(StrEnum):
    """How the launcher starts the processes of its node."""

    FORK = "fork"
    SPAWN = "spawn"


class ForkedProcess:
    """A child that another process forked, with the methods of ``Popen`` that the elastic agent uses.

    Args:
        arguments: the command that it runs.
        pid: its process id.
    """

    def __init__(self, arguments: Sequence[str], pid: int) -> None:
        self.args, self.pid, self.returncode = list(arguments), pid, None if pid else 0

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: as Popen, which cannot know the code either
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        return code


class WorkerServer:
    """The server of this node: started early, so that it imports while this process does; restarted when it has ended.

    Use it as a context: the server ends with it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._problem: str | None = None
        self._is_ready = self._is_reported = self._is_given_up = False

    def __enter__(self) -> WorkerServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, and do not wait for its imports; no effect while it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._connection, other = socket.socketpair()
        streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_SERVER, str(other.fileno())],
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        finally:
            other.close()
            for stream in streams:
                os.close(stream)

    def close(self) -> None:
        """End the server; ranks that it started continue."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None
        self._is_ready = False

    def is_usable(self) -> bool:
        """Wait for the imports; returns whether the server may fork, and prints once why not."""
        for _ in range(0 if self._is_given_up else 2):
            self.start()
            if self._connection is None or self._is_ready:
                break
            self._is_ready = True
            self._connection.settimeout(IMPORTS_S)
            try:
                self._problem = receive_message(self._connection)[0]["problem"]
                break
            except TimeoutError:
                self._problem = f"the server did not import its modules within {IMPORTS_S:g} s, twice"
                self.close()
            except (EOFError, ConnectionError):
                self._problem = "the server ended during its imports"
                break
        else:
            self._is_given_up = True
        if self._problem is not None and not self._is_reported:
            self._is_reported = True
            print_message(f"dynmo-train: starting the processes without fork: {self._problem}")
        return self._problem is None

    def fork(self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[str]]) -> ForkedProcess:
        """Fork a process that runs ``command``, which is ``python -m MODULE ARGUMENTS``, with these output streams.

        If the server was killed, or does not answer, another one is started.

        Raises:
            OSError: there is no memory for another process, or a limit is reached.
            DynmoError: the server has ended or not answered twice, or the second one may not fork.
        """
        known = _children()
        try:
            return self._ask_for_fork(command, environment, streams)
        except DynmoError:
            # It was killed or stopped since the last fork, or during this one, whose process then is nobody's.
            self.close()
            _end_processes(_children() - known)
            if not self.is_usable():
                raise
        return self._ask_for_fork(command, environment, streams)

    def _ask_for_fork(
        self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[str]]
    ) -> ForkedProcess:
        if self._connection is None:
            raise DynmoError("the process that forks the ranks has not been started")
        message = {"module": command[2], "arguments": list(command[3:]), "environment": dict(environment)}
        self._connection.settimeout(FORK_S)
        try:
            send_message(self._connection, message, [stream.fileno() for stream in streams])
            answer, _ = receive_message(self._connection)
        except _NO_ANSWER as error:
            what = f"does not answer within {FORK_S:g} s" if isinstance(error, TimeoutError) else "has ended"
            raise DynmoError(f"the process that forks the ranks {what}") from error
        if answer["errno"]:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return ForkedProcess(command, answer["pid"])


def _children() -> set[int]:
    """Process ids of the children of this process; empty where the kernel does not list them."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def _end_processes(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def can_fork(command: Sequence[str]) -> bool:
    """Whether a server can fork processes of ``command``: ``python -m MODULE`` with this interpreter, on Linux."""
    return sys.platform == "linux" and tuple(command[:2]) == (sys.executable, "-m") and len(command) > 2


@contextlib.contextmanager
def forked_by(server: WorkerServer | None) -> Iterator[None]:
    """Let the elastic agent fork the processes that it starts in this context, if the server can.

    If one cannot be started, those before it are killed: torch would leave them behind.
    """
    if server is None or not server.is_usable() or (was_subreaper := set_subreaper(is_subreaper=True)) is None:
        yield
        return
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    usable, started = server, list[ForkedProcess]()

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            streams = [stream for stream in (self._stdout, self._stderr) if stream is not None]
            started.append(usable.fork(args, env, streams))
            return started[-1]

    # torch has no parameter for it. Only this thread starts processes of the agent.
    replaced = vars(api)["get_subprocess_handler"]
    vars(api)["get_subprocess_handler"] = Handler
    known = _children()
    try:
        yield
    except BaseException:
        # The answer to a request may still be on its way.
        server.close()
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # A signal may have come before the answer: then a process runs that is not in the list.
        _end_processes(_children() - known)
        raise
    finally:
        vars(api)["get_subprocess_handler"] = replaced
        set_subreaper(is_subreaper=was_subreaper)
