"""Runs functions in processes that form a gloo world on loopback, with a timeout that dumps every stack.

The processes of a world size are started once and play many scenarios (``_Pool``). For each scenario they join a new
world on a new port, and leave it afterwards; then each puts back what a scenario may change in its process: variables
of the environment, folder, arguments, handlers of signals, filters of warnings, random numbers, flags of torch, names
of the trainer's modules and classes. A
scenario that fails, hangs or ends a process costs its pool, which is killed; the next scenario of that size starts
another one. So does one that leaves threads, children or open files behind.

A function that ends its process, or whose changes nobody could put back, asks for processes of its own with ``fresh``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import pkgutil
import random
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import dynmo_train
from tests.distributed.ports import free_port

TIMEOUT_S = 600
# What the others have once one has failed: they may wait for it in a collective until the world's own timeout.
OTHERS_S = 5
# Messages of torch before a scenario begins: another program took the port, or a world that starts at the same moment.
RENDEZVOUS_FAILED = ("Gloo connectFullMesh failed", "failed to listen on any local network address")
RENDEZVOUS_TRIES = 3
# Everything of the trainer: what is imported later would not be put back where a scenario changes it.
PRELOADED = [
    *("torch", "torch.distributed.pipelining", "numpy", "pytest", "typer._adapters"),
    *(
        found.name
        for found in pkgutil.walk_packages(dynmo_train.__path__, "dynmo_train.")
        if "__main__" not in found.name
    ),
]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD)


def _end_with(connection: Connection) -> None:
    """End this process once the other end of the connection is closed, whatever the main thread does."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    poll.poll()
    os._exit(1)


def _descriptors() -> set[str]:
    """Open files, by number and by what they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def _left_behind(before: set[str], threads: set[threading.Thread]) -> list[str]:
    """What a scenario left in this process: threads of Python, children, open files."""
    gc.collect()
    left = [f"thread {thread.name}" for thread in set(threading.enumerate()) - threads]
    with contextlib.suppress(OSError):
        left += [f"child {pid}" for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return left + sorted(f"file {each}" for each in _descriptors() - before)


def _names_of_the_trainer() -> list[tuple[Any, dict[str, Any]]]:
    """Modules of the trainer and their classes, each with its names: scenarios replace functions to do things wrong."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "dynmo_train"]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("dynmo_train")
    }
    return [(owner, dict(vars(owner))) for owner in (*modules, *classes)]


def _put_back(owner: Any, before: dict[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if name not in before:
            if callable(value) and isinstance(owner, type):
                delattr(owner, name)
        elif value is not before[name] and name not in ("__dict__", "__weakref__"):
            setattr(owner, name, before[name])


def _forget_meshes() -> None:
    """Clear torch's caches of sharded operations: they keep the device meshes of ZeRO, and with them open sockets."""
    from torch.distributed.tensor import debug

    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Put back what a scenario may change in its process."""
    import numpy
    import torch

    environment, folder, arguments, path = dict(os.environ), os.getcwd(), list(sys.argv), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic, gradients = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    matmul = torch.get_float32_matmul_precision()
    names = _names_of_the_trainer()
    with warnings.catch_warnings():
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            sys.argv[:], sys.path[:] = arguments, path
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            random.setstate(states[0])
            numpy.random.set_state(states[1])
            torch.set_rng_state(states[2])
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)
            torch.set_grad_enabled(gradients)
            torch.set_float32_matmul_precision(matmul)
            for owner, before in names:
                _put_back(owner, before)
            _forget_meshes()


def _play(job: bytes, rank: int, size: int, port: int, joins: bool) -> Any:
    from dynmo_train.parallel.process_groups import destroy_world, init_world

    warnings.simplefilter("ignore")
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    function, arguments = pickle.loads(job)  # noqa: S301 - from the process that started this one
    try:
        return function(*arguments) if not joins else function(init_world("cpu", timeout_s=300), *arguments)
    finally:
        destroy_world()


def _nothing(_world: Any) -> None:
    """A scenario that plays nothing."""


def _serve(connection: Connection, rank: int, size: int) -> None:
    """Play scenarios until the other end closes. Answers are (failure, result, what was left behind)."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    threads = set(threading.enumerate())
    with _restored_process():  # torch opens some files with the first world and keeps them
        _play(pickle.dumps((_nothing, ())), 0, 1, free_port(), joins=True)
    gc.freeze()  # the collection after each scenario leaves out the modules: 0.1 s less
    while True:
        try:
            job, port, joins = connection.recv()
        except EOFError:
            os._exit(0)
        before = _descriptors()
        faulthandler.dump_traceback_later(TIMEOUT_S - 10, exit=True)
        failure, result = None, None
        with _restored_process():
            try:
                result = _play(job, rank, size, port, joins)
            except BaseException:  # noqa: BLE001 - whatever it is, the test must hear of it
                failure = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send((failure, result, _left_behind(before, threads)))
        result = None


class _Pool:
    """Processes of one world size."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.usable = True
        ends = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, size), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(self.processes, ends, strict=True):
            process.start()
            theirs.close()

    def play(self, function: Callable[..., Any], arguments: tuple[Any, ...], joins: bool) -> list[Any]:
        """Results in order of rank; the pool is unusable where this fails."""
        self.usable = False
        job, port = pickle.dumps((function, arguments)), free_port()
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # it has died since; its answer is missing below
                connection.send((job, port, joins))
        answers = self._answers()
        failures = [failure for failure, _, _ in answers if failure]
        assert not failures, "\n".join(failures)
        self.usable = not any(left for _, _, left in answers)
        return [result for _, result, _ in answers]

    def _answers(self) -> list[tuple[str | None, Any, list[str]]]:
        answers: dict[Connection, tuple[str | None, Any, list[str]]] = {}
        end = time.monotonic() + TIMEOUT_S
        while missing := [connection for connection in self._connections if connection not in answers]:
            ready = wait(missing, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    answers[connection] = connection.recv()
                except (EOFError, OSError):
                    answers[connection] = (f"worker {rank} of {len(self._connections)} died", None, [])
                if answers[connection][0]:
                    end = min(end, time.monotonic() + OTHERS_S)
        absent = (f"a worker of {len(self._connections)} did not answer", None, [])
        return [answers.get(connection, absent) for connection in self._connections]

    def close(self) -> None:
        self.usable = False
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()


_POOLS: dict[int, _Pool] = {}


@atexit.register
def _close_pools() -> None:
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


def kill_workers(size: int) -> None:
    """SIGKILL to the processes of a world size, which play a scenario; its call of ``run_workers`` fails."""
    for process in _POOLS[size].processes:
        process.kill()


def run_workers(
    function: Callable[..., Any], size: int, *arguments: Any, joins: bool = True, fresh: bool = False
) -> list[Any]:
    """What ``function(world, *arguments)`` returns in each of ``size`` processes, in order of rank.

    Args:
        joins: whether the processes join a world first. Without, the function gets no world; it joins by itself, from
            the environment that is set for it.
        fresh: use processes that have played nothing before, and end them afterwards.
    """
    for _ in range(RENDEZVOUS_TRIES - 1):
        try:
            return _play_once(function, size, arguments, joins, fresh)
        except AssertionError as error:
            # Ports belong to the machine. The scenario has not begun where the rendezvous failed.
            if not joins or not any(message in str(error) for message in RENDEZVOUS_FAILED):
                raise
    return _play_once(function, size, arguments, joins, fresh)


def _play_once(
    function: Callable[..., Any], size: int, arguments: tuple[Any, ...], joins: bool, fresh: bool
) -> list[Any]:
    pool = _Pool(size) if fresh else _POOLS.get(size) or _POOLS.setdefault(size, _Pool(size))
    try:
        return pool.play(function, arguments, joins)
    finally:
        if fresh or not pool.usable:
            pool.close()
            if not fresh:
                del _POOLS[size]
