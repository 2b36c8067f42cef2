"""A worker process at a fifth of its speed is named, loses layers, and is named again once it has recovered.

The process is truly slow: a CPU quota of its own control group, which the test sets and removes while the run trains.
The quota is a fifth of the processor time that the process had before, so that it limits it on a busy machine, too.
Nothing is compared with absolute times. The run is stopped by the test as soon as it has shown all of this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.whole_runs import check_fields, command, events, lines, write_data
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(1500)]

LAYERS, WORKERS, SLOW_RANK = 6, 2, 1
PERIOD_US, SHARE = 100_000, 0.2
# Profiled steps before the worker becomes slow, and the bound after which it must have been named.
NORMAL_STEPS, NAMED_WITHIN = 10, 20
SHAPE = {
    "num_layers": str(LAYERS),
    "hidden_size": "128",
    "seq_length": "64",
    "global_batch_size": "8",
    "train_iters": "4000",
    "log_interval": "1",
    "eval_iters": "0",
    "rebalance_interval": "5",
    "balance": "online",
    "pruning_start_iter": None,
    "pruning_end_iter": None,
    "pruning_freq": None,
    "freeze_schedule": None,
}


class Quota:
    """A control group with a CPU quota.

    Args:
        folder: Its folder.
        home: ``cgroup.procs`` of the group to which processes return.
        is_v2: Whether it is of version 2.
    """

    def __init__(self, folder: Path, home: Path, *, is_v2: bool) -> None:
        self.folder, self.home = folder, home
        self._is_v2 = is_v2
        folder.mkdir()
        try:
            self._set(PERIOD_US)
        except OSError:
            folder.rmdir()
            raise

    def _set(self, quota_us: int) -> None:
        if self._is_v2:
            (self.folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def throttle(self, pid: int, processors: float) -> None:
        """Give a process this part of a processor."""
        self._set(max(1000, round(PERIOD_US * processors)))
        (self.folder / "cgroup.procs").write_text(str(pid))

    def release(self) -> None:
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                self.home.write_text(pid)

    def throttled_periods(self) -> int:
        fields = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
        return int(fields["nr_throttled"])


def open_quota() -> Quota:
    """A group below that of this process; skips where this process may not make one."""
    problems = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/cpu" if controllers else "/sys/fs/cgroup")
        parent = root / path.lstrip("/")
        try:
            return Quota(parent / f"dynmo-slow-{os.getpid()}", parent / "cgroup.procs", is_v2=not controllers)
        except OSError as error:
            problems.append(f"{parent}: {error.strerror}")
    pytest.skip(f"no control group with a CPU quota can be made ({'; '.join(problems)})")


@pytest.fixture
def quota() -> Iterator[Quota]:
    found = open_quota()
    yield found
    found.release()
    wait_for(lambda: not (found.folder / "cgroup.procs").read_text(), "the processes have left the group")
    found.folder.rmdir()


def pid_of_rank(rank: int, launcher: int) -> int | None:
    """The process of a rank among the descendants of a launcher."""
    waiting = [launcher]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
            waiting += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return None


def processor_time_s(pid: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def last_step(run: Path) -> int:
    return max((line["step"] for line in lines(run / "metrics.jsonl")), default=0)


def events_of(run: Path, kind: str) -> list[dict]:
    """Events of a kind; the file begins with the first event."""
    return events(run, kind) if (run / "events.jsonl").exists() else []


def layers_of(run: Path, worker: int) -> int:
    """Layers of a worker in the plan that was applied last."""
    [*_, plan_id] = [0, *(event["plan_id"] for event in events_of(run, "plan_applied"))]
    plan = json.loads((run / "plans" / f"plan-{plan_id:06d}.json").read_text())
    names = {name for stage in plan["stages"] if stage["worker"] == worker for name in stage["items"]}
    return sum(name.startswith("layers.") and name.endswith(".mlp") for name in names)


def incidents_of(run: Path, kind: str, after: int) -> list[dict]:
    """Incidents of the slow rank after a step."""
    found = [event for event in events_of(run, "incident") if event["incident"] == kind]
    return [event for event in found if event["ranks"] == [SLOW_RANK] and event["step"] >= after]


def test_throttled_worker_is_named_loses_layers_and_recovers(tmp_path, quota):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    words = [word for word in command(data, run, WORKERS, **SHAPE) if word != "--sparsify"]
    with (tmp_path / "launch.log").open("wb") as log:
        launcher = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            wait_for(lambda: (run / "metrics.jsonl").exists(), "start", launcher)
            wait_for(lambda: last_step(run) >= NORMAL_STEPS, "steps at normal speed", launcher)
            pid = pid_of_rank(SLOW_RANK, launcher.pid)
            begin, used_s = time.monotonic(), processor_time_s(pid)
            wait_for(lambda: last_step(run) >= 2 * NORMAL_STEPS, "more of them", launcher)
            used_s = processor_time_s(pid) - used_s
            before, throttled = layers_of(run, SLOW_RANK), last_step(run)
            quota.throttle(pid, SHARE * used_s / (time.monotonic() - begin))
            [named, *_] = wait_for(lambda: incidents_of(run, "slow_worker", throttled), "slow worker", launcher)
            wait_for(lambda: layers_of(run, SLOW_RANK) < before, "layers leave the slow worker", launcher)
            periods, moved, released = quota.throttled_periods(), layers_of(run, SLOW_RANK), last_step(run)
            quota.release()
            wait_for(lambda: incidents_of(run, "worker_recovered", released), "recovery", launcher)
        finally:
            launcher.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(120)
            launcher.kill()
            launcher.wait()
    assert periods > 0, "the quota did not limit the process"
    assert named["cause"].startswith("starved of processor time")
    assert named["step"] <= throttled + NAMED_WITHIN
    assert moved < before
    check_fields(run)
