"""Options whose text has an inner form."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .._common.errors import UsageError
from .batch_schedule import BatchSizes

MAX_RAMP_SIZES, MAX_RAMP_STEPS = 65_536, 10_000_000


def parse_split(text: str) -> tuple[float, float, float]:
    """``969,30,1`` (also ``8,2`` or ``1``: what is left out is 0) as three fractions that add up to 1.

    Raises:
        UsageError: not one to three numbers, one is negative, or all are 0.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares):
        raise UsageError(f"--split must be one to three numbers of at least 0, such as 969,30,1; is {text!r}")
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total


def parse_blend(flag: str, text: str) -> tuple[tuple[float, str], ...]:
    """``A`` as ((1.0, A),), ``0.3 A 0.7 B`` as ((0.3, A), (0.7, B)); words may be quoted as in a shell.

    Raises:
        UsageError: several words that are not weights above 0, each before a path.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if len(words) == 1:
        return ((1.0, words[0]),)
    pairs: list[tuple[float, str]] = []
    for weight, path in zip(words[::2], words[1::2], strict=False):
        try:
            pairs.append((float(weight), path))
        except ValueError:
            pairs.append((0.0, path))
    if not pairs or len(words) % 2 or not all(math.isfinite(weight) and weight > 0 for weight, _ in pairs):
        raise UsageError(f"{flag} must be a path, or weights above 0 each before its path (0.3 A 0.7 B); is {text!r}")
    return tuple(pairs)


def batch_sizes_of(rampup: str | None, final: int) -> BatchSizes:
    """``16 16 5859375`` and 1536 as sizes that grow by 16 from 16 to 1536 over that many samples; None never grows.

    Raises:
        UsageError: not three whole numbers, or a growth that does not end at ``final``.
    """
    if rampup is None:
        return BatchSizes.constant(final)
    words = rampup.replace(",", " ").split()
    rule = "--rampup-batch-size must be START INCREMENT SAMPLES, such as 16 16 5859375"
    if len(words) != 3 or not all(word.isdecimal() for word in words):
        raise UsageError(f"{rule}; is {rampup!r}")
    start, increment, samples = map(int, words)
    if not 0 < start <= final or not increment or (final - start) % increment:
        raise UsageError(f"{rule}; {start} by {increment} does not come to --global-batch-size {final} in whole steps")
    sizes = BatchSizes(start=start, increment=increment, ramp_samples=samples, final=final)
    parts = max(1, (final - start) // increment)
    # The steps are counted one by one wherever samples become steps.
    if parts > MAX_RAMP_SIZES or sum(samples // (parts * size) for size in sizes.sizes()) > MAX_RAMP_STEPS:
        raise UsageError(
            f"{rule}; {rampup!r} has more than {MAX_RAMP_SIZES:,} sizes or {MAX_RAMP_STEPS:,} steps, the limits"
        )
    return sizes


def iters_of_samples(values: Mapping[str, Any]) -> int | None:
    """The steps that ``train_samples`` make, for the option values; None without it."""
    if values["train_samples"] is None:
        return None
    try:
        sizes = batch_sizes_of(values["rampup_batch_size"], values["global_batch_size"])
    except UsageError:
        return 1  # told with all else by the rules
    return sizes.steps_for(values["train_samples"])


def parse_freeze_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """``100:2,300:4`` as ((100, 2), (300, 4)): after the step, that many blocks are frozen.

    Raises:
        UsageError: another form, steps that do not grow, or fewer blocks frozen than before.
    """
    rule = "--freeze-schedule must be STEP:LAYERS,STEP:LAYERS,... with growing steps and layers"
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        step, colon, layers = part.strip().partition(":")
        if not (colon and step.isdecimal() and layers.isdecimal()):
            raise UsageError(f"{rule}; {part.strip()!r} in {text!r} is not STEP:LAYERS")
        pairs.append((int(step), int(layers)))
    for before, after in pairwise(pairs):
        if after[0] <= before[0] or after[1] < before[1]:
            raise UsageError(f"{rule}; {after[0]}:{after[1]} in {text!r} comes after {before[0]}:{before[1]}")
    return tuple(pairs)


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """``1 5 20`` (also with commas) as (1, 5, 20), ascending.

    Raises:
        UsageError: something else than whole numbers above 0.
    """
    words = text.replace(",", " ").split()
    numbers = sorted({int(word) for word in words if word.isdecimal()})
    if not words or len([word for word in words if word.isdecimal()]) < len(words) or numbers[0] < 1:
        raise UsageError(f"{flag} must be whole numbers above 0, such as 1 5 20; is {text!r}")
    return tuple(numbers)


def parse_layers(flag: str, text: str) -> tuple[int, ...]:
    """``3,7`` as (3, 7): numbers of blocks.

    Raises:
        UsageError: another form, or numbers that do not ascend.
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) < len(parts) or any(after <= before for before, after in pairwise(numbers)):
        raise UsageError(f"{flag} must be numbers of blocks, from 0, ascending, such as 3,7; is {text!r}")
    return tuple(numbers)
