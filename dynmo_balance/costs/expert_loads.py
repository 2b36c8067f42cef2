"""Tokens per expert of each layer, from ``x_counts.expert_tokens`` of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._common.errors import UsageError
from ..formats.profile import Header, Segment, Step

METRIC = "expert_tokens"
WINDOW = 20
"""Steps that tokens are the mean of."""


@dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """The experts of each layer of a run.

    Attributes:
        header: Of the newest segment with steps.
        tokens: For each item with experts, the tokens of each expert in a step, over all replicas.
        last_step: The last step that counts.
    """

    header: Header
    tokens: dict[str, tuple[int, ...]]
    last_step: int


def expert_loads(
    segments: Sequence[Segment], source: str, *, window: int = WINDOW, at_step: int | None = None
) -> ExpertLoads:
    """The mean tokens per expert over the last steps.

    Args:
        segments: Of a profile, at least one.
        source: Path of the profile, for errors.
        window: Maximum number of steps that the tokens are the mean of.
        at_step: The last step that counts. None is the last of the profile.

    Raises:
        UsageError: The profile has no tokens per expert.
    """
    segment = next((each for each in reversed(segments) if each.steps), segments[-1])
    steps = [step for step in segment.steps if at_step is None or step.step <= at_step]
    recorded = [step for step in steps if has_tokens(step)]
    if not recorded:
        raise UsageError(f"{source}: no step has x_counts.{METRIC}; record a run of a model with --num-experts")
    return ExpertLoads(
        header=segment.header,
        tokens=mean_tokens(recorded[-window:], segment.header, source),
        last_step=recorded[-1].step,
    )


def mean_tokens(recorded: Sequence[Step], header: Header, source: str) -> dict[str, tuple[int, ...]]:
    """The mean tokens of each expert in a step, by item, in the order of the header.

    Args:
        recorded: Steps for which :func:`has_tokens`, at least one.
        header: Of their segment.
        source: Path of the profile, for errors.

    Raises:
        UsageError: The numbers are not those of the header's items.
    """
    names = [item.name for item in header.items]
    scale = header.microbatches * header.data_parallel_size
    tokens = {}
    for item in sorted(_counts(recorded[-1]), key=lambda name: names.index(name) if name in names else len(names)):
        if item not in names:
            raise UsageError(f"{source}: x_counts.{METRIC} has {item!r}, which is not an item of the run")
        lines = [_numbers(_counts(step)[item], item, source) for step in recorded if item in _counts(step)]
        if len({len(line) for line in lines}) > 1:
            raise UsageError(f"{source}: {item} has different numbers of experts in the last steps")
        tokens[item] = tuple(round(sum(column) * scale / len(lines)) for column in zip(*lines, strict=True))
    return tokens


def has_tokens(step: Step) -> bool:
    """Whether a step has tokens per expert."""
    return bool(_counts(step))


def _counts(step: Step) -> dict[str, object]:
    counts = step.x_counts
    found = counts.get(METRIC) if isinstance(counts, Mapping) else None
    return found if isinstance(found, dict) else {}


def _numbers(value: object, item: str, source: str) -> Sequence[float]:
    if isinstance(value, list) and value and all(isinstance(v, int | float) and 0 <= v < 1e15 for v in value):
        return value
    raise UsageError(f"{source}: x_counts.{METRIC} of {item} must be numbers of tokens, at least 0")
