"""Runs a function in several processes that form a gloo world on loopback, with a timeout that dumps every stack."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(
    function: Callable[..., Any], rank: int, size: int, port: int, joins: bool, arguments: tuple[Any, ...], pipe: Any
) -> None:
    faulthandler.dump_traceback_later(TIMEOUT_S - 10, exit=True)
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
    import torch

    from dynmo_train.parallel.world import join_world, leave_world

    torch.set_num_threads(1)
    try:
        if not joins:
            pipe.send((None, function(*arguments)))
            return
        world = join_world("cpu", timeout_s=60)
        try:
            pipe.send((None, function(world, *arguments)))
        finally:
            leave_world()
    except BaseException:  # noqa: BLE001 - whatever it is, the test must hear of it
        pipe.send((traceback.format_exc(), None))
    finally:
        pipe.close()


def run_workers(function: Callable[..., Any], size: int, *arguments: Any, joins: bool = True) -> list[Any]:
    """What ``function(world, *arguments)`` returns in each of ``size`` processes, in order of rank.

    With ``joins`` false the function gets no world: it joins by itself, from the environment that is set for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.pipelining", "dynmo_train.loop"])
    port = free_port()
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_enter, args=(function, rank, size, port, joins, arguments, ends[rank][1]))
        for rank in range(size)
    ]
    for process, (_, sender) in zip(processes, ends, strict=True):
        process.start()
        sender.close()
    try:
        outcomes = []
        for rank, (receiver, _) in enumerate(ends):
            if not receiver.poll(TIMEOUT_S):
                raise TimeoutError(f"worker {rank} of {size} did not answer within {TIMEOUT_S} s")
            try:
                outcomes.append(receiver.recv())
            except EOFError:
                outcomes.append((f"worker {rank} died", None))
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [failure for failure, _ in outcomes if failure]
    assert not failures, "\n".join(failures)
    return [result for _, result in outcomes]
