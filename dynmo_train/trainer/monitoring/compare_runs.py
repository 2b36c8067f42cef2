"""Two runs of the same mathematics side by side: are the losses the same bits, and what did each step cost?"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._common.document import UnreadableError, read_records
from ..._common.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs have in common; a ratio is the first's step time over the second's, times are in ms.

    Attributes:
        steps: steps that both runs logged.
        identical: whether loss and gradient norm of every common step, and every validation loss, are the same bits.
        first_difference: the first step at which they are not; None where they are.
        loss_first, loss_last, validation_first, validation_last: of the second run; None where not evaluated.
        step_ms: mean step time of each run over the common steps, the first one left out: it warms up.
        settled_from: the step after which neither run moved a layer; the ``settled`` figures count from there.
        settled_ms: median step time of each run from there on.
        moves: items that changed worker, in each run; ``moved_bytes`` their bytes.
        tokens_per_s: of the second run, over the common steps.
    """

    steps: int
    identical: bool
    first_difference: int | None
    loss_first: float
    loss_last: float
    validation_first: float | None
    validation_last: float | None
    step_ms: tuple[float, float]
    ratio: float
    settled_from: int
    settled_ms: tuple[float, float]
    ratio_settled: float
    moves: tuple[int, int]
    moved_bytes: tuple[int, int]
    tokens_per_s: float

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(path))
    except UnreadableError as error:
        raise UsageError(f"{path}: cannot be read ({error.reason}); give the directory of a run") from error


def _moves(run: Path) -> tuple[int, int, int]:
    """Items moved, bytes moved and the step of the last move of a run; zeros where there was none."""
    if not (run / "events.jsonl").exists():
        return 0, 0, 0
    taken = [event for event in _lines(run / "events.jsonl") if event["kind"] == "plan_applied"]
    return (
        sum(len(event["moves"]) for event in taken),
        sum(event["bytes"] for event in taken),
        max((event["step"] for event in taken), default=0),
    )


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two run directories; raises ``UsageError`` where one is none, or they have under two common steps."""
    trained: list[dict[int, dict[str, Any]]] = []
    validated: list[dict[int, float]] = []
    for run in (first, second):
        lines = _lines(run / "metrics.jsonl")
        trained.append({line["step"]: line for line in lines if "lm_loss" in line})
        validated.append({line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line})
    common = sorted(set(trained[0]) & set(trained[1]))
    if len(common) < 2:
        raise UsageError(f"{first} and {second} have {len(common)} steps in common; two or more are needed to compare")
    different = [
        step for step in common for key in ("lm_loss", "grad_norm") if trained[0][step][key] != trained[1][step][key]
    ]
    different += [step for step in set(validated[0]) & set(validated[1]) if validated[0][step] != validated[1][step]]
    told = [_moves(run) for run in (first, second)]
    # The first step after a move builds the pipeline anew.
    settled = max(common[0], *(last + 1 for _, _, last in told))
    tail = [step for step in common if step > settled] or common[-1:]
    means = [statistics.fmean(run[step]["step_ns"] for step in common[1:]) / 1e6 for run in trained]
    tails = [statistics.median(run[step]["step_ns"] for step in tail) / 1e6 for run in trained]
    losses = [trained[1][step]["lm_loss"] for step in common]
    held_out = [validated[1][step] for step in sorted(validated[1])]
    return Comparison(
        steps=len(common),
        identical=not different,
        first_difference=min(different, default=None),
        loss_first=losses[0],
        loss_last=losses[-1],
        validation_first=held_out[0] if held_out else None,
        validation_last=held_out[-1] if held_out else None,
        step_ms=(means[0], means[1]),
        ratio=means[0] / means[1],
        settled_from=settled,
        settled_ms=(tails[0], tails[1]),
        ratio_settled=tails[0] / tails[1],
        moves=(told[0][0], told[1][0]),
        moved_bytes=(told[0][1], told[1][1]),
        tokens_per_s=trained[1][common[-1]]["tokens"] / (means[1] / 1e3),
    )


def comparison_rows(result: Comparison) -> list[tuple[str, str, str]]:
    """The comparison as table rows: what, first run, second run."""

    def pair(values: tuple[float, float], form: str) -> tuple[str, str]:
        return format(values[0], form), format(values[1], form)

    return [
        ("mean step time (ms)", *pair(result.step_ms, ".1f")),
        (f"median step time after step {result.settled_from} (ms)", *pair(result.settled_ms, ".1f")),
        ("items moved", *pair(result.moves, "d")),
        ("bytes moved", *pair(result.moved_bytes, ",d")),
    ]
