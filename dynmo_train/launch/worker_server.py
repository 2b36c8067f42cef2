"""A process that imports torch and this package once, and forks the ranks of its node.

Importing takes a rank 3.5 s of processor time and 300 MB of memory, a fork a few milliseconds and shared pages::

    launcher ──exec──> server: imports, waits for requests
        │                 └──fork──> process that only forks, and exits
        └──────────────────────────────└──fork──> rank: session, streams, environment, runs the module

The process in between exits, so that the rank becomes a child of the nearest subreaper among its ancestors: the
launcher (``worker_start.py``). To it and to the rank nothing differs from a program that it has executed: parent,
session, process group, exit status, signals, streams, environment, and what ``ps`` shows.

A fork copies one thread only. The server therefore has no other one after its imports, neither of Python nor of a
library, and CUDA is not initialized: it reports what it finds, and the launcher then executes each rank by itself. The
server exits when the connection closes, which the kernel does at the end of the launcher, however it ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._common.document import parse_json
from .process_view import show_program

# What every rank imports: commands, options, and the trainer with torch. A rank imports further modules by itself.
PRELOADED = ("dynmo_train.cli", "dynmo_train.trainer.run")
LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A rank to run: the module and its arguments, and its environment."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def send_message(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message with open files: its length in bytes, with the files, and then JSON."""
    text = json.dumps(message).encode()
    socket.send_fds(connection, [len(text).to_bytes(LENGTH_BYTES)], list(descriptors))
    connection.sendall(text)


def receive_message(connection: socket.socket, num_descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and at most ``num_descriptors`` open files.

    Raises:
        EOFError: the other process has closed the connection, or has ended.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, num_descriptors)
    head += _receive(connection, LENGTH_BYTES - len(head))
    return parse_json(_receive(connection, int.from_bytes(head))), list(descriptors)


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            raise EOFError("the connection is closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _import_modules() -> str | None:
    """Import the modules of the ranks; returns why this process must not fork, or None."""
    gc.disable()  # collections during the imports of torch take 0.4 s
    try:
        for name in PRELOADED:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever a module raises, the rank itself has to report
        return f"{type(error).__name__} in the imports"
    return reason_not_to_fork()


def reason_not_to_fork() -> str | None:
    """Why a fork of this process would be unsafe; None if it is safe."""
    threads = max(threading.active_count(), len(os.listdir("/proc/self/task")))
    if threads > 1:
        return f"{threads} threads run after the imports (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized after the imports"
    return None


def _written_so_far() -> tuple[bytes, bytes]:
    """What the imports wrote to both streams, which are files in memory."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sizes = (os.fstat(1).st_size, os.fstat(2).st_size)
    return os.pread(1, sizes[0], 0), os.pread(2, sizes[1], 0)


def _fork_rank(connection: socket.socket, streams: Sequence[int]) -> bool:
    """Fork a rank, and answer with its process id or with the error; returns whether this process is the rank."""
    pipes: list[int] = []
    try:
        for _ in range(2):
            pipes += os.pipe()
        between = os.fork()
    except OSError as error:
        for descriptor in pipes:
            os.close(descriptor)
        send_message(connection, {"pid": 0, "errno": error.errno})
        return False
    reader, writer, waiting, release = pipes
    if between:
        os.close(writer)
        os.close(waiting)
        # Ends when the rank has its session and its streams: only then may the launcher signal its process group.
        with os.fdopen(reader) as source:
            text = source.read()
        os.waitpid(between, 0)
        pid, number = map(int, text.split())
        send_message(connection, {"pid": pid, "errno": number})
        # The rank waits for this: before, it is not a child of the launcher, and would conclude that this one ended.
        # After the answer, so that no rank runs of which the launcher does not know, should this process be killed.
        os.close(release)
        return False
    os.close(reader)
    os.close(release)
    try:
        pid = os.fork()
    except OSError as error:
        os.write(writer, b"0 %d" % (error.errno or 1))
        os._exit(1)
    if pid:
        os.write(writer, b"%d 0" % pid)
        os._exit(0)
    os.setsid()
    _reset_signals()
    for target, stream in enumerate(streams, start=1):
        os.dup2(stream, target)
        os.close(stream)
    connection.close()
    os.close(writer)
    os.read(waiting, 1)
    os.close(waiting)
    return True


def _reset_signals() -> None:
    """Handle signals as after an exec by the launcher, which has handlers for these while its processes run.

    The server started before, and ignores those that its parents ignored, such as SIGQUIT of a job in the background.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _serve(connection: socket.socket) -> _Rank | None:
    """Fork ranks until the connection closes; returns the rank in a rank, and None in the server."""
    while True:
        try:
            request, streams = receive_message(connection, 2)
        except (EOFError, ConnectionError):
            return None
        if _fork_rank(connection, streams):
            arguments = tuple(request["arguments"])
            return _Rank(module=request["module"], arguments=arguments, environment=request["environment"])
        for stream in streams:
            os.close(stream)


def _run(rank: _Rank, written: tuple[bytes, bytes]) -> None:
    """Become the program ``python -m MODULE ARGUMENTS`` with the environment of the rank."""
    for target, text in enumerate(written, start=1):
        if text:
            with contextlib.suppress(OSError):  # messages of the imports, on a full disk
                os.write(target, text)
    gc.enable()
    # Through os.environ, so that libraries see the variables, too.
    os.environ.clear()
    os.environ.update(rank.environment)
    sys.orig_argv[:] = [sys.executable, "-m", rank.module, *rank.arguments]
    show_program(sys.orig_argv, rank.environment)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # Python's generator is seeded again by the fork itself
        numpy.random.seed()
    sys.argv[:] = ["-m", *rank.arguments]
    runpy.run_module(rank.module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Serve the connection whose file descriptor is the argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    problem = _import_modules()
    # The collector of a rank would write to the pages of imported objects, which are then no longer shared.
    gc.freeze()
    written = _written_so_far()
    rank = None
    try:
        send_message(connection, {"problem": problem})
        rank = _serve(connection)
    except (BrokenPipeError, KeyboardInterrupt):
        return
    # Not in the loop: exceptions of the rank end it, as they end any program.
    if rank is not None:
        _run(rank, written)


if __name__ == "__main__":
    main()
