"""Distinguishes slow workers from costly layers: pure functions of what each worker measures next to its layers.

Two measurements that do not depend on a worker's layers are compared between workers, as medians over a window:

* the time of a fixed product, a calibration that each rank runs in profiled steps (a slow clock, a slower device);
* the wall time of its operations divided by their processor time (a neighbor that takes the processor, a CPU quota).
  Item times of one thread are processor time, in which a starved worker looks as fast as the others.

Their quotient to the faster half of the workers is the relative speed. A worker counts as slow below ``SLOW`` and until
it is above ``RECOVERED`` again; all others have exactly the speed 1, so that noise moves no layers. The threshold is
that of straggler detection in nvidia-resiliency-ext (0.75), which compares equal work; a calibration product and a
quotient of two clocks need no equal work.
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
PPM = 1_000_000
# Times of a worker that count processor time where it is starved.
_TIMES = ("forward_ns", "backward_ns", "backward_weight_ns")


@dataclass(frozen=True, kw_only=True)
class SpeedSample:
    """What a worker measured in a step.

    Attributes:
        calibration_ns: time of the fixed product; 0 where it was not measured.
        stall: wall time over processor time of its operations, at least 1.
    """

    calibration_ns: int
    stall: float


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
        slow: positions of the workers that became slow, or changed their speed.
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
class SpeedMonitor:
    """The samples of the last profiled steps and the published speeds.

    Attributes:
        published: speeds of the workers, by position; empty before the first sample.
    """

    published: tuple[WorkerSpeed, ...] = ()
    _rows: deque[list[SpeedSample]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, samples: Sequence[SpeedSample]) -> SpeedChange | None:
        """Add the samples of a step, one per worker; what changed."""
        if len(samples) != len(self.published):
            # Workers were released: the others keep no speed that was relative to those.
            self._rows.clear()
            self.published = (NORMAL,) * len(samples)
        self._rows.append(list(samples))
        if len(self._rows) < MIN_SAMPLES:
            return None
        columns = zip(*self._rows, strict=True)
        medians = [
            SpeedSample(
                calibration_ns=round(median(each.calibration_ns for each in column)),
                stall=median(each.stall for each in column),
            )
            for column in columns
        ]
        before, self.published = self.published, publish(relative_speeds(medians), self.published)
        if before == self.published:
            return None
        changed = [at for at, speed in enumerate(self.published) if speed != before[at]]
        return SpeedChange(
            speeds=self.published,
            slow=tuple(at for at in changed if self.published[at] != NORMAL),
            recovered=tuple(at for at in changed if self.published[at] == NORMAL),
        )


def samples_of(costs: Sequence[Mapping[str, Any]]) -> list[SpeedSample]:
    """The samples in the gathered costs of a step, one per worker."""
    return [
        SpeedSample(calibration_ns=int(one["calibration_ns"]), stall=max(1.0, int(one["stall_ppm"]) / PPM))
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
