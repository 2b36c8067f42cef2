"""A worker of ``dynmo-train`` that kills itself at a chosen point: ``python -m tests.distributed.dying_worker ...``.

``DYNMO_TEST_DEATHS`` has a comma-separated list of RANK:WHERE:NUMBER, with the rank in the first generation:

* ``backward:S``: in the backward of the second microbatch of step S;
* ``again:S``: there, when the step is executed for the second time, after a rollback;
* ``node:S``: there, with its launcher and all other processes of that;
* ``copy:N``: in the transfer of its N-th copy, from 1;
* ``recovery:G``: when it has joined generation G;
* ``start:0``: at its start; ``start:1`` with its node;
* ``boundary:0``: where it joins, when the others wait at their boundary; ``boundary:1`` with its node.

``DYNMO_TEST_PAUSE`` has GENERATION:STEP: rank 0 begins this step of the generation when others wait to join.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynmo_train.__main__ import run
from dynmo_train.launch.watch import heartbeat
from dynmo_train.launch.watch.heartbeat import Phase
from dynmo_train.launch.worker import GENERATION_VARIABLE
from dynmo_train.pipeline.stage_module import StageModule
from dynmo_train.trainer.recovery import growth, peer_copies, survivor
from tests.waiting import wait_for

DEATHS = "DYNMO_TEST_DEATHS"
# A folder in which each process leaves a file of its rank and process id.
PIDS = "DYNMO_TEST_PIDS"
PAUSE = "DYNMO_TEST_PAUSE"
# FIRST:LAST samples whose loss is a spike.
POISONED = "DYNMO_TEST_POISONED"


def die() -> None:
    """End this process as the kernel ends one without memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_node() -> None:
    """End the launcher and all its processes as a node without power does."""
    launcher = os.getppid()
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    # The launcher first: it must not see that a process died.
    for pid in (launcher, *(int(child) for child in children if int(child) != os.getpid()), os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _in_backward(step: int, end: Callable[[], None] = die, times: int = 1) -> None:
    enter, begin = heartbeat.HeartbeatWriter.enter, heartbeat.HeartbeatWriter.begin_step
    current, count = [0], [0]

    def began(self: Any, number: int, **rest: Any) -> None:
        current[0] = number
        count[0] += number == step
        begin(self, number, **rest)

    def entered(self: Any, phase: Phase, microbatch: int = 0) -> None:
        enter(self, phase, microbatch)
        if current[0] == step and count[0] == times and phase == Phase.BACKWARD and microbatch == 1:
            end()

    heartbeat.HeartbeatWriter.begin_step, heartbeat.HeartbeatWriter.enter = began, entered  # type: ignore[method-assign]


def _in_copy(number: int) -> None:
    exchange, count = peer_copies._exchange, [0]

    def dying(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            die()
        return exchange(*arguments)

    peer_copies._exchange = dying


def _in_recovery(generation: int) -> None:
    find = survivor.find_memory_checkpoint

    def dying(*arguments: Any) -> Any:
        if os.environ.get(GENERATION_VARIABLE) == str(generation):
            die()
        return find(*arguments)

    survivor.find_memory_checkpoint = dying


def _at_boundary(with_node: int) -> None:
    await_boundary = growth._await_boundary

    def dying(*arguments: Any) -> None:
        await_boundary(*arguments)
        die_with_node() if with_node else die()

    growth._await_boundary = dying


PLACES: dict[str, Callable[[int], None]] = {
    "again": lambda step: _in_backward(step, times=2),
    "node": lambda step: _in_backward(step, die_with_node),
    "backward": _in_backward,
    "copy": _in_copy,
    "recovery": _in_recovery,
    "start": lambda with_node: die_with_node() if with_node else die(),
    "boundary": _at_boundary,
}


def pause_before(generation: str, step: int) -> None:
    """Let rank 0 wait before ``step`` of a generation until other ranks are prepared to join, or refused."""
    begin, watches = heartbeat.HeartbeatWriter.begin_step, []
    start = growth.ProposalWatch.start

    def started(self: Any) -> None:
        watches.append(self)
        start(self)

    def paused(self: Any, number: int, **rest: Any) -> None:
        if number == step and os.environ.get(GENERATION_VARIABLE, "0") == generation and watches:
            wait_for(lambda: watches[0].pending or watches[0]._refusals, "ranks that join")
        begin(self, number, **rest)

    heartbeat.HeartbeatWriter.begin_step = paused  # type: ignore[method-assign]
    growth.ProposalWatch.start = started  # type: ignore[method-assign]


def poison(first: int, last: int) -> None:
    """Multiply the loss of the microbatches of some samples, from ``first`` up to ``last``, of two samples each."""
    run = StageModule._run

    def failing(stage: Any, name: str, module: Any, index: int, *inputs: Any) -> Any:
        output = run(stage, name, module, index, *inputs)
        is_poisoned = name == "head" and stage.training and first <= 2 * index < last
        return output * 3.0 if is_poisoned else output

    StageModule._run = failing  # type: ignore[method-assign]


def arrange_deaths() -> None:
    """Change the trainer in this process so that it ends at the points in the environment; not after a restart."""
    if folder := os.environ.get(PIDS):
        (Path(folder) / f"{os.environ['RANK']}-{os.getpid()}").touch()
    if samples := os.environ.get(POISONED):
        poison(*map(int, samples.split(":")))
    if os.environ.get("TORCHELASTIC_RUN_ID", "round-0") != "round-0":
        return
    if pause := os.environ.get(PAUSE):
        generation, step = pause.split(":")
        pause_before(generation, int(step))
    for death in filter(None, os.environ.get(DEATHS, "").split(",")):
        rank, place, number = death.split(":")
        if rank == os.environ["RANK"]:
            PLACES[place](int(number))


if __name__ == "__main__":
    arrange_deaths()
    run()
