"""Distinguishes slow workers from costly layers: pure functions of what each worker measures next to its layers.

Two measurements that do not depend on a worker's layers are compared between workers, as medians over a window:

* the time of a fixed product, a calibration that each rank runs in profiled steps (a slow clock, a slower device);
* the wall time of its operations divided by their processor time (a neighbor that takes the processor, a CPU quota).
  Item times of one thread are processor time, in which a starved worker looks as fast as the others.

Their quotient to the faster half of the workers is the relative speed. A worker counts as slow below ``SLOW`` and until
it is above ``RECOVERED`` again; all others have exactly the speed 1, so that noise moves no layers. The threshold is
that of straggler detection in nvidia-resiliency-ext (0.75), which compares equal work; a calibration product and a
quotient of two clocks need no equal work.

A starved worker may only look healthy because its layers have moved off: a CPU quota of 20 % starves nobody who needs
less. So its speed belongs to its load. It is normal again once it is healthy with the load that it was slow with; with
a lighter one only after ``patience`` samples, which each relapse multiplies by four. Of a speed that changes again and
again each change takes twice as long as the one before, so that other load on a host does not move layers forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

SLOW, RECOVERED = 0.75, 0.9
WINDOW, MIN_SAMPLES = 7, 5
# A published speed is updated when the measured one differs by more than this factor.
CHANGE = 1.25
MIN_SPEED = 0.01
# Samples for which a starved worker with a lighter load has to be healthy, and the factor of it after a relapse.
PATIENCE, RELAPSE_FACTOR, MAX_PATIENCE = 14, 4, 4096
# Share of the load that a worker was slow with from which it is the same load.
SAME_LOAD = 0.9
# Samples without a change after which the earlier ones are forgotten.
MEMORY = 400
PPM = 1_000_000
# Times of a worker that count processor time where it is starved.
_TIMES = ("forward_ns", "backward_ns", "backward_weight_ns")


@dataclass(frozen=True, kw_only=True)
class SpeedSample:
    """What a worker measured in a step.

    Attributes:
        calibration_ns: time of the fixed product; 0 where it was not measured.
        stall: wall time over processor time of its operations, at least 1.
        busy_ns: processor time of its operations in the step, which is its load.
    """

    calibration_ns: int
    stall: float
    busy_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerSpeed:
    """The speed of a worker relative to the faster half.

    Attributes:
        speed: 1 is normal.
        clock: part of it that the calibration product shows.
        time_factor: factor from its measured item times to the time that they take, at least 1.
    """

    speed: float = 1.0
    clock: float = 1.0
    time_factor: float = 1.0

    @property
    def cause(self) -> str:
        """Why the worker is slow, as a phrase."""
        if self.clock * self.time_factor > 1.0:
            return f"starved of processor time: {self.time_factor:.1f} x the wall time of others"
        return f"slow device: a fixed product takes {1 / self.clock:.1f} x the time of others"


NORMAL = WorkerSpeed()


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """A change of the published speeds.

    Attributes:
        speeds: published speeds of all workers, by position.
        slow: positions of the workers that became slow; those that are slow and changed their speed are not in it.
        recovered: positions of the workers that have normal speed again.
    """

    speeds: tuple[WorkerSpeed, ...]
    slow: tuple[int, ...]
    recovered: tuple[int, ...]


def faster_half(rates: Sequence[float]) -> float:
    """The median of the faster half of the workers, rounded up; with two workers that of the faster one."""
    ordered = sorted(rates, reverse=True)
    return median(ordered[: (len(ordered) + 1) // 2])


def relative_speeds(samples: Sequence[SpeedSample]) -> list[WorkerSpeed]:
    """The measured speed of each worker.

    Args:
        samples: one per worker.
    """
    clocks = [1.0 / max(1, sample.calibration_ns) for sample in samples]
    shares = [1.0 / max(1.0, sample.stall) for sample in samples]
    is_calibrated = all(sample.calibration_ns > 0 for sample in samples)
    clock_of, share_of = faster_half(clocks), faster_half(shares)
    found = []
    for clock, share in zip(clocks, shares, strict=True):
        of_clock = clock / clock_of if is_calibrated else 1.0
        of_share = share / share_of
        speed = max(MIN_SPEED, of_clock * of_share)
        found.append(WorkerSpeed(speed=speed, clock=of_clock, time_factor=max(1.0, 1.0 / of_share)))
    return found


def publish(measured: Sequence[WorkerSpeed], published: Sequence[WorkerSpeed]) -> tuple[WorkerSpeed, ...]:
    """The speeds to publish: of slow workers the measured ones, else exactly 1.

    Args:
        measured: of each worker.
        published: those that are active.
    """
    result = []
    for found, active in zip(measured, published, strict=True):
        is_slow = found.speed < (RECOVERED if active != NORMAL else SLOW)
        factor = max(found.speed / active.speed, active.speed / found.speed)
        result.append((active if active != NORMAL and factor < CHANGE else found) if is_slow else NORMAL)
    return tuple(result)


def header_speeds(calibrations_ns: Sequence[int]) -> list[float]:
    """The relative speeds at the start of a run, by the calibration product alone; 1 but for slow workers."""
    measured = relative_speeds([SpeedSample(calibration_ns=each, stall=1.0) for each in calibrations_ns])
    return [each.speed for each in publish(measured, [NORMAL] * len(measured))]


@dataclass
class SpeedMemory:
    """What is remembered of a worker, so that its published speed changes for a reason.

    Attributes:
        num_changes: changes of its published speed.
        num_samples: samples since the last one.
        agreeing: samples in a row that would change it.
        slow_busy_ns: largest load with which it was slow.
        patience: samples for which it has to be healthy with a lighter load.
    """

    num_changes: int = 0
    num_samples: int = 0
    agreeing: int = 0
    slow_busy_ns: float = 0.0
    patience: int = PATIENCE

    def next_speed(
        self, active: WorkerSpeed, proposed: WorkerSpeed, measured: WorkerSpeed, busy_ns: float
    ) -> WorkerSpeed:
        """The speed to publish after another sample.

        Args:
            active: published now.
            proposed: what the thresholds would publish.
            measured: as measured.
            busy_ns: load of the worker.
        """
        self.num_samples += 1
        if self.num_samples > MEMORY:
            self.num_changes, self.patience = 0, PATIENCE
        if measured.speed < RECOVERED and active != NORMAL:
            self.slow_busy_ns = max(self.slow_busy_ns, busy_ns)
        if proposed == active:
            self.agreeing = 0
            return active
        self.agreeing += 1
        # The first two changes, slow and normal again, need no more than the window.
        needed = 0 if self.num_changes < 2 else WINDOW << min(self.num_changes - 2, 6)
        is_lighter = busy_ns < SAME_LOAD * self.slow_busy_ns
        if proposed == NORMAL and active.time_factor > 1.0 and is_lighter:
            needed = max(needed, self.patience)
        if self.agreeing <= needed:
            return active
        if active == NORMAL:
            if self.num_changes:
                self.patience = min(MAX_PATIENCE, RELAPSE_FACTOR * self.patience)
            self.slow_busy_ns = busy_ns
        self.num_changes, self.num_samples, self.agreeing = self.num_changes + 1, 0, 0
        return proposed


@dataclass
class SpeedMonitor:
    """The samples of the last profiled steps and the published speeds.

    Attributes:
        published: speeds of the workers, by position; empty before the first sample.
    """

    published: tuple[WorkerSpeed, ...] = ()
    _rows: deque[list[SpeedSample]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _memory: list[SpeedMemory] = field(default_factory=list)

    def add(self, samples: Sequence[SpeedSample]) -> SpeedChange | None:
        """Add the samples of a step, one per worker; what changed."""
        if len(samples) != len(self.published):
            # Workers were released: the others keep no speed that was relative to those.
            self._rows.clear()
            self.published = (NORMAL,) * len(samples)
            self._memory = [SpeedMemory() for _ in samples]
        self._rows.append(list(samples))
        if len(self._rows) < MIN_SAMPLES:
            return None
        columns = zip(*self._rows, strict=True)
        medians = [
            SpeedSample(
                calibration_ns=round(median(each.calibration_ns for each in column)),
                stall=median(each.stall for each in column),
                busy_ns=round(median(each.busy_ns for each in column)),
            )
            for column in columns
        ]
        measured = relative_speeds(medians)
        found = zip(self._memory, self.published, publish(measured, self.published), measured, medians, strict=True)
        before = self.published
        self.published = tuple(
            memory.next_speed(active, proposed, one, sample.busy_ns) for memory, active, proposed, one, sample in found
        )
        if before == self.published:
            return None
        changed = [at for at, speed in enumerate(self.published) if speed != before[at]]
        return SpeedChange(
            speeds=self.published,
            slow=tuple(at for at in changed if before[at] == NORMAL),
            recovered=tuple(at for at in changed if self.published[at] == NORMAL),
        )


def samples_of(costs: Sequence[Mapping[str, Any]]) -> list[SpeedSample]:
    """The samples in the gathered costs of a step, one per worker."""
    return [
        SpeedSample(
            calibration_ns=int(one["calibration_ns"]),
            stall=max(1.0, int(one["stall_ppm"]) / PPM),
            busy_ns=int(one["busy_ns"]),
        )
        for one in costs
    ]


def elapsed_costs(costs: Sequence[Mapping[str, Any]], speeds: Sequence[WorkerSpeed]) -> list[dict[str, Any]]:
    """The costs of a step as the time that they take on their workers: those of a starved worker are longer.

    Args:
        costs: of each worker.
        speeds: published speed of each worker.
    """
    found = []
    for one, speed in zip(costs, speeds, strict=True):
        scaled = dict(one)
        if speed.time_factor > 1.0:
            for name in _TIMES:
                if one[name] is not None:
                    scaled[name] = [None if ns is None else round(ns * speed.time_factor) for ns in one[name]]
            scaled["busy_ns"] = round(one["busy_ns"] * speed.time_factor)
        found.append(scaled)
    return found
