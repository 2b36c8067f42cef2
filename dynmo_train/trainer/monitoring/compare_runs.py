"""Compares two runs with the same numerics: whether the losses are equal bit for bit, and the step times.

Lines are read one by one. Of a step only the numbers that are compared stay in memory, 40 bytes per line and run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._common.document import UnreadableError, parse_any_json
from ..._common.errors import UsageError
from ..._common.log_parts import part_paths, read_part_lines


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a quantity of two runs differs.

    Attributes:
        first: first step with a difference.
        largest: largest difference, relative to the larger value; infinite where one of two is missing or not finite.
    """

    first: int
    largest: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two runs. Times are in milliseconds; a ratio is the first run's time over the second's.

    Attributes:
        steps: number of steps that both runs logged.
        identical: whether loss and gradient norm of all common steps, and all validation losses, are equal bit for
            bit.
        first_difference: first step with a difference; None without any.
        largest_difference: largest difference of a loss or gradient norm; infinite as in ``Difference``.
        losses: difference of training and validation losses; None where they are equal bit for bit.
        norms: difference of gradient norms; None where they are equal bit for bit.
        loss_first: loss of the second run at the first common step.
        loss_last: loss of the second run at the last common step.
        first_losses: loss of each run at the first common step.
        last_losses: loss of each run at the last common step.
        validation_first: first validation loss of the second run; None without evaluation.
        validation_last: last validation loss of the second run; None without evaluation.
        step_ms: mean step time of each run over the common steps without the first, a warm-up.
        ratio: ratio of the mean step times.
        steady_from: step after which no run moved a layer; the steady state starts there.
        steady_ms: median step time of each run in the steady state.
        ratio_steady: ratio of the median step times.
        moves: number of moved items of each run.
        moved_bytes: bytes of the moved items of each run.
        tokens_per_s: throughput of the second run over the common steps.
    """

    steps: int
    identical: bool
    first_difference: int | None
    largest_difference: float
    losses: Difference | None
    norms: Difference | None
    loss_first: float | None
    loss_last: float | None
    first_losses: tuple[float | None, float | None]
    last_losses: tuple[float | None, float | None]
    validation_first: float | None
    validation_last: float | None
    step_ms: tuple[float, float]
    ratio: float
    steady_from: int
    steady_ms: tuple[float, float]
    ratio_steady: float
    moves: tuple[int, int]
    moved_bytes: tuple[int, int]
    tokens_per_s: float

    def document(self) -> dict[str, Any]:
        """The comparison as a JSON document; a difference is null where it is infinite."""
        largest = self.largest_difference
        found = asdict(self) | {"largest_difference": largest if math.isfinite(largest) else None}
        for name in ("losses", "norms"):
            if found[name] is not None and not math.isfinite(found[name]["largest"]):
                found[name]["largest"] = None
        return found

    @property
    def verdict(self) -> str:
        """Whether losses and gradient norms are equal, as a line of text."""
        if self.identical:
            return "losses bit-identical"
        losses = "bit-identical" if self.losses is None else f"differ ({_text(self.losses)})"
        norms = "" if self.norms is None else f"; gradient norms differ ({_text(self.norms)})"
        return f"losses {losses}{norms}"


class _Series:
    """Values by step, one line after another; of a step that was repeated after a resume, the later line counts."""

    def __init__(self, *names: str) -> None:
        self._steps = array("q")
        self._values = {name: array("d") for name in names}

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; a value that it does not have, or that is not finite, is NaN."""
        self._steps.append(line["step"])
        for name, values in self._values.items():
            value = line.get(name)
            values.append(math.nan if value is None else value)

    def last(self) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        """The steps in ascending order, and their values by name."""
        # ``unique`` returns the first position of each step, here from the end.
        steps, at = np.unique(np.frombuffer(self._steps, np.int64)[::-1], return_index=True)
        return steps, {name: np.frombuffer(each, np.float64)[::-1][at] for name, each in self._values.items()}


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics or event file.

    Raises:
        UsageError: the file cannot be read, or a line is not an object.
    """
    try:
        for number, line in enumerate(read_part_lines(path), 1):
            try:
                record = parse_any_json(line)
            except ValueError as error:
                raise UsageError(f"{path}: line {number} is not JSON ({error}); give a run directory") from error
            if not isinstance(record, dict):
                raise UsageError(f"{path}: line {number} is not an object; give a run directory")
            yield record
    except UnreadableError as error:
        raise UsageError(f"{path}: cannot be read ({error.reason}); give a run directory") from error


def _read_series(run: Path) -> tuple[_Series, _Series]:
    """The training steps and the evaluations of a run.

    Raises:
        UsageError: ``metrics.jsonl`` cannot be read, or lacks a value.
    """
    trained, validated = _Series("lm_loss", "grad_norm", "step_ns", "tokens"), _Series("validation_loss")
    path = run / "metrics.jsonl"
    for number, line in enumerate(read_records(path), 1):
        try:
            if "lm_loss" in line:
                trained.add(line)
            if "validation_loss" in line:
                validated.add(line)
        except (KeyError, TypeError, OverflowError) as error:
            raise UsageError(f"{path}: line {number} has no valid {error}; give a run directory") from error
    return trained, validated


def _moves(run: Path) -> tuple[int, int, int]:
    """Number of moved items, moved bytes and step of the last migration of a run; zeros without any."""
    num_moves = num_bytes = last = 0
    for event in read_records(run / "events.jsonl") if part_paths(run / "events.jsonl") else ():
        if event["kind"] == "plan_applied":
            num_moves, num_bytes = num_moves + len(event["moves"]), num_bytes + event["bytes"]
            last = max(last, event["step"])
    return num_moves, num_bytes, last


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two run directories.

    Raises:
        UsageError: a path is not a run directory, or the runs have fewer than two steps in common.
    """
    series = [tuple(each.last() for each in _read_series(run)) for run in (first, second)]
    trained, validated = zip(*series, strict=True)
    common, *at = np.intersect1d(trained[0][0], trained[1][0], assume_unique=True, return_indices=True)
    if len(common) < 2:
        count = f"{len(common)} step{'' if len(common) == 1 else 's'}"
        raise UsageError(f"{first} and {second} have {count} in common; two or more are needed to compare")
    values = [{name: each[rows] for name, each in run[1].items()} for run, rows in zip(trained, at, strict=True)]
    # Equality of floats on purpose: a placement must not change any bit. JSON holds the shortest exact text of each.
    loss_difference = _difference(common, values[0]["lm_loss"], values[1]["lm_loss"])
    norm_difference = _difference(common, values[0]["grad_norm"], values[1]["grad_norm"])
    evaluated, *at = np.intersect1d(validated[0][0], validated[1][0], assume_unique=True, return_indices=True)
    evaluations = [run[1]["validation_loss"][rows] for run, rows in zip(validated, at, strict=True)]
    loss_difference = _larger(loss_difference, _difference(evaluated, *evaluations))
    different = [one for one in (loss_difference, norm_difference) if one is not None]
    migrations = [_moves(run) for run in (first, second)]
    # The pipeline is rebuilt in the first step after a migration.
    steady_from = max(int(common[0]), *(last + 1 for _, _, last in migrations))
    is_steady = common > steady_from
    is_steady[-1] |= not is_steady.any()
    # The mean contains the pauses of migrations; the median shows the steady state without outliers.
    means = [float(np.mean(run["step_ns"][1:])) / 1e6 for run in values]
    tails = [float(np.median(run["step_ns"][is_steady])) / 1e6 for run in values]
    losses = [tuple(_finite(run["lm_loss"][place]) for run in values) for place in (0, -1)]
    validation = [_finite(value) for value in validated[1][1]["validation_loss"]]
    return Comparison(
        steps=len(common),
        identical=not different,
        first_difference=min((one.first for one in different), default=None),
        largest_difference=max((one.largest for one in different), default=0.0),
        losses=loss_difference,
        norms=norm_difference,
        loss_first=losses[0][1],
        loss_last=losses[1][1],
        first_losses=(losses[0][0], losses[0][1]),
        last_losses=(losses[1][0], losses[1][1]),
        validation_first=validation[0] if validation else None,
        validation_last=validation[-1] if validation else None,
        step_ms=(means[0], means[1]),
        ratio=means[0] / means[1],
        steady_from=steady_from,
        steady_ms=(tails[0], tails[1]),
        ratio_steady=tails[0] / tails[1],
        moves=(migrations[0][0], migrations[1][0]),
        moved_bytes=(migrations[0][1], migrations[1][1]),
        tokens_per_s=float(values[1]["tokens"][-1]) / (means[1] / 1e3),
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _difference(steps: NDArray[np.int64], first: NDArray[np.float64], second: NDArray[np.float64]) -> Difference | None:
    """The difference of two series of values; None where all are equal, or not finite in both."""
    is_different = (first != second) & ~(np.isnan(first) & np.isnan(second))
    if not is_different.any():
        return None
    one, other = first[is_different], second[is_different]
    with np.errstate(invalid="ignore"):
        sizes = np.abs(one - other) / np.maximum(np.abs(one), np.abs(other))
    sizes[~(np.isfinite(one) & np.isfinite(other))] = math.inf
    return Difference(first=int(steps[is_different][0]), largest=float(sizes.max()))


def _larger(one: Difference | None, other: Difference | None) -> Difference | None:
    """The difference of two quantities together."""
    if one is None or other is None:
        return one or other
    return Difference(first=min(one.first, other.first), largest=max(one.largest, other.largest))


def _text(difference: Difference) -> str:
    return f"at most {difference.largest:.1e} relative; first at step {difference.first}"


def comparison_rows(result: Comparison) -> list[tuple[str, str, str]]:
    """The comparison as table rows: label, first run, second run."""

    def pair(values: tuple[float | None, float | None], form: str) -> tuple[str, str]:
        # A loss that was not finite is null.
        first, second = ("-" if value is None else format(value, form) for value in values)
        return first, second

    return [
        ("first common loss", *pair(result.first_losses, ".6f")),
        ("last common loss", *pair(result.last_losses, ".6f")),
        ("mean step time (ms)", *pair(result.step_ms, ".1f")),
        (f"median step time after step {result.steady_from} (ms)", *pair(result.steady_ms, ".1f")),
        ("items moved", *pair(result.moves, "d")),
        ("bytes moved", *pair(result.moved_bytes, ",d")),
    ]
