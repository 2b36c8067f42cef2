"""Compares two runs with the same numerics: whether the losses are equal bit for bit, and the step times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._common.document import UnreadableError
from ..._common.errors import UsageError
from ..._common.log_parts import part_paths, read_part_records


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
    loss_first: float
    loss_last: float
    first_losses: tuple[float, float]
    last_losses: tuple[float, float]
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics or event file.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return list(read_part_records(path))
    except UnreadableError as error:
        raise UsageError(f"{path}: cannot be read ({error.reason}); give a run directory") from error


def _moves(run: Path) -> tuple[int, int, int]:
    """Number of moved items, moved bytes and step of the last migration of a run; zeros without any."""
    if not part_paths(run / "events.jsonl"):
        return 0, 0, 0
    applied = [event for event in read_lines(run / "events.jsonl") if event["kind"] == "plan_applied"]
    return (
        sum(len(event["moves"]) for event in applied),
        sum(event["bytes"] for event in applied),
        max((event["step"] for event in applied), default=0),
    )


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two run directories.

    Raises:
        UsageError: a path is not a run directory, or the runs have fewer than two steps in common.
    """
    trained: list[dict[int, dict[str, Any]]] = []
    validated: list[dict[int, float]] = []
    for run in (first, second):
        lines = read_lines(run / "metrics.jsonl")
        trained.append({line["step"]: line for line in lines if "lm_loss" in line})
        validated.append({line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line})
    common = sorted(set(trained[0]) & set(trained[1]))
    if len(common) < 2:
        count = f"{len(common)} step{'' if len(common) == 1 else 's'}"
        raise UsageError(f"{first} and {second} have {count} in common; two or more are needed to compare")
    # Equality of floats on purpose: a placement must not change any bit. JSON holds the shortest exact text of each.
    pairs = {
        key: [(step, trained[0][step].get(key), trained[1][step].get(key)) for step in common]
        for key in ("lm_loss", "grad_norm")
    }
    validation_steps = set(validated[0]) & set(validated[1])
    pairs["lm_loss"] += [(step, validated[0][step], validated[1][step]) for step in validation_steps]
    loss_difference, norm_difference = _difference(pairs["lm_loss"]), _difference(pairs["grad_norm"])
    different = [one for one in (loss_difference, norm_difference) if one is not None]
    migrations = [_moves(run) for run in (first, second)]
    # The pipeline is rebuilt in the first step after a migration.
    steady_from = max(common[0], *(last + 1 for _, _, last in migrations))
    tail = [step for step in common if step > steady_from] or common[-1:]
    # The mean contains the pauses of migrations; the median shows the steady state without outliers.
    means = [statistics.fmean(run[step]["step_ns"] for step in common[1:]) / 1e6 for run in trained]
    tails = [statistics.median(run[step]["step_ns"] for step in tail) / 1e6 for run in trained]
    losses = [tuple(run[step]["lm_loss"] for run in trained) for step in (common[0], common[-1])]
    validation = [validated[1][step] for step in sorted(validated[1])]
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
        tokens_per_s=trained[1][common[-1]]["tokens"] / (means[1] / 1e3),
    )


def _difference(values: Sequence[tuple[int, float | None, float | None]]) -> Difference | None:
    """The difference of (step, value of the first run, value of the second run); None where all are equal."""
    different = [(step, _relative(one, other)) for step, one, other in values if one != other]
    if not different:
        return None
    return Difference(first=min(step for step, _ in different), largest=max(size for _, size in different))


def _text(difference: Difference) -> str:
    return f"at most {difference.largest:.1e} relative; first at step {difference.first}"


def _relative(one: float | None, other: float | None) -> float:
    """The difference of two values, relative to the larger one."""
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


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
