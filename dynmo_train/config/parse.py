"""Parsers of options with a format of their own: splits, blends, ramp-ups, layer lists."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .._common.document import MAX_LAYERS, finite_number, is_count, parse_json, short_repr
from .._common.errors import UsageError
from .batch_schedule import AnyBatchSizes, BatchSizes, parse_batch_size_schedule

MAX_RAMP_SIZES, MAX_RAMP_STEPS = 65_536, 10_000_000
FACTOR_LISTS = ("short_factor", "long_factor")
# Fields of each type of rotary scaling: those that it must have, and those that it may have.
ROTARY_SCALINGS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "longrope": (("factor", *FACTOR_LISTS, "original_max_position_embeddings"), ("attention_factor",)),
}


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``969,30,1`` (or ``8,2`` or ``1``; missing weights are 0) into three fractions with sum 1.

    Raises:
        UsageError: not one to three numbers, a negative number, or only zeros.
    """
    try:
        # Scripts quote the value within an array, and Megatron reads only the numbers.
        shares = [float(part) for part in text.strip("'\"").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares):
        raise UsageError(f"--split {text!r}: must be one to three nonnegative numbers, not all 0, such as 969,30,1")
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total


def parse_blend(flag: str, text: str) -> tuple[tuple[float, str], ...]:
    """Parse ``A`` into ((1.0, A),) and ``0.3 A 0.7 B`` into ((0.3, A), (0.7, B)); paths may be quoted as in a shell.

    Raises:
        UsageError: neither a path nor pairs of a positive weight and a path.
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
        raise UsageError(f"{flag} {text!r}: must be a path, or positive weights and paths, such as 0.3 A 0.7 B")
    return tuple(pairs)


def parse_layer_types(text: str) -> tuple[str, ...]:
    """Parse ``sliding,full`` into (``sliding_attention``, ``full_attention``); the longer names are accepted, too.

    Raises:
        UsageError: another word, or none.
    """
    words = [word.removesuffix("_attention") for word in text.replace(",", " ").split()]
    unknown = sorted({word for word in words if word not in ("full", "sliding")})
    if unknown or not 1 <= len(words) <= MAX_LAYERS:
        raise UsageError(f"--layer-types {short_repr(text)}: must be full or sliding by layer, such as sliding,full")
    return tuple(f"{word}_attention" for word in words)


def repeat_pattern(pattern: Sequence[str], count: int) -> list[str]:
    """The first ``count`` entries of a pattern that repeats."""
    return [pattern[at % len(pattern)] for at in range(count)]


def parse_rotary_scaling(text: str) -> Mapping[str, Any]:
    """Parse ``{"rope_type": "yarn", "factor": 4.0, ...}``; the types are those of ``ROTARY_SCALINGS``.

    Raises:
        UsageError: no JSON object, an unknown type, a missing or unknown field, or a value that is not positive.
    """
    flag, example = "--rotary-scaling", '{"rope_type": "linear", "factor": 2.0}'
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{flag} {short_repr(text)}: must be a JSON object, such as {example}")
    kind = found.get("rope_type")
    if not isinstance(kind, str) or kind not in ROTARY_SCALINGS:
        raise UsageError(f"{flag}: rope_type is {short_repr(kind)}; must be one of {', '.join(ROTARY_SCALINGS)}")
    required, optional = ROTARY_SCALINGS[kind]
    missing = [name for name in required if name not in found]
    unknown = sorted(found.keys() - {"rope_type", *required, *optional})
    if missing or unknown:
        names = f"lacks {', '.join(missing)}" if missing else f"has unknown fields {', '.join(unknown)}"
        raise UsageError(f"{flag}: {kind} {names}; its fields are {', '.join((*required, *optional))}")
    for name, value in found.items():
        if name in ("rope_type", "truncate"):
            continue
        if name in FACTOR_LISTS:
            sizes = [finite_number(each) for each in value] if isinstance(value, list) else []
            if not sizes or not all(size is not None and size > 0 for size in sizes):
                raise UsageError(f"{flag}: {name} is {short_repr(value)}; must be a list of positive numbers")
            continue
        if (size := finite_number(value)) is None or size <= 0:
            raise UsageError(f"{flag}: {name} is {short_repr(value)}; must be a positive number")
    if not isinstance(found.get("truncate", True), bool):
        raise UsageError(f"{flag}: truncate is {short_repr(found['truncate'])}; must be true or false")
    return found


def batch_sizes_of(rampup: str | None, final: int) -> BatchSizes:
    """Parse a ramp-up such as ``16 16 5859375``: start, increment and length in samples.

    Args:
        rampup: value of ``--rampup-batch-size``; None for a constant batch size.
        final: global batch size after the ramp-up, in samples.

    Raises:
        UsageError: not three integers, or increments that do not reach ``final``.
    """
    if rampup is None:
        return BatchSizes.constant(final)
    words = rampup.replace(",", " ").split()
    flag = f"--rampup-batch-size {rampup!r}"
    if len(words) != 3 or not all(is_count(word) for word in words):
        raise UsageError(f"{flag}: must be START INCREMENT SAMPLES, such as 16 16 5859375")
    start, increment, samples = map(int, words)
    if not 0 < start <= final or not increment or (final - start) % increment:
        raise UsageError(f"{flag}: --global-batch-size {final} must be {start} plus a multiple of {increment}")
    sizes = BatchSizes(start=start, increment=increment, ramp_samples=samples, final=final)
    parts = max(1, (final - start) // increment)
    # Conversion from samples to steps iterates over the steps of the ramp-up.
    if parts > MAX_RAMP_SIZES or sum(samples // (parts * size) for size in sizes.sizes()) > MAX_RAMP_STEPS:
        raise UsageError(
            f"{flag}: must have at most {MAX_RAMP_SIZES:,} sizes and {MAX_RAMP_STEPS:,} steps; give a larger INCREMENT"
        )
    return sizes


def iters_of_samples(values: Mapping[str, Any]) -> int | None:
    """The number of steps of ``train_samples`` samples; None if not given."""
    if values["train_samples"] is None:
        return None
    try:
        sizes: AnyBatchSizes
        if values["step_batch_size_schedule"] is not None:
            sizes = parse_batch_size_schedule(values["step_batch_size_schedule"], values["seq_length"])
        else:
            sizes = batch_sizes_of(values["rampup_batch_size"], values["global_batch_size"])
    except UsageError:
        return 1  # reported by the rules of validate.py
    return sizes.steps_for(values["train_samples"])


def parse_freeze_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ``100:2,300:4`` into ((100, 2), (300, 4)): step, and the number of blocks frozen after it.

    Raises:
        UsageError: another format, steps that do not increase, or layers that decrease.
    """
    flag, rule = f"--freeze-schedule {text!r}", "must be STEP:LAYERS,STEP:LAYERS,... with increasing steps and layers"
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        step, colon, layers = part.strip().partition(":")
        if not (colon and is_count(step) and is_count(layers)):
            raise UsageError(f"{flag}: {part.strip()!r} {rule}")
        pairs.append((int(step), int(layers)))
    for before, after in pairwise(pairs):
        if after[0] <= before[0] or after[1] < before[1]:
            raise UsageError(f"{flag}: {rule}; {after[0]}:{after[1]} follows {before[0]}:{before[1]}")
    return tuple(pairs)


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Parse ``1 5 20`` or ``1,5,20`` into (1, 5, 20), ascending.

    Raises:
        UsageError: not positive integers.
    """
    words = text.replace(",", " ").split()
    numbers = sorted({int(word) for word in words if is_count(word)})
    if not words or len([word for word in words if is_count(word)]) < len(words) or numbers[0] < 1:
        raise UsageError(f"{flag} {text!r}: must be positive integers, such as 1 5 20")
    return tuple(numbers)


def parse_weights(flag: str, text: str, *, words: tuple[str, ...]) -> tuple[float, ...]:
    """Parse ``0.1,0.2`` into (0.1, 0.2); empty for one of ``words``.

    Raises:
        UsageError: neither a word nor nonnegative numbers.
    """
    if text in words:
        return ()
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (-1.0,)
    if not all(0 <= number < math.inf for number in numbers):
        raise UsageError(f"{flag} {text!r}: must be {', '.join(words)} or nonnegative numbers, such as 0.1,0.2")
    return numbers


def parse_layers(flag: str, text: str) -> tuple[int, ...]:
    """Parse ``3,7`` into (3, 7): indices of blocks.

    Raises:
        UsageError: not nonnegative integers in ascending order.
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if is_count(part)]
    if len(numbers) < len(parts) or any(after <= before for before, after in pairwise(numbers)):
        raise UsageError(f"{flag} {text!r}: must be ascending block indices from 0, such as 3,7")
    return tuple(numbers)


BALANCE_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
SINKHORN, NO_BALANCING = "sinkhorn", "none"


def parse_balance(types: str, coefficients: str) -> dict[str, float]:
    """Parse ``aux_loss seq_aux_loss`` and ``0.01 0.001`` into {"aux_loss": 0.01, "seq_aux_loss": 0.001}.

    Raises:
        UsageError: an unknown type, a type twice, types that exclude each other, or not one coefficient for each type.
    """
    flag, coefficient_flag = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
    names, texts = (text.replace(",", " ").split() for text in (types, coefficients))
    if unknown := [name for name in names if name not in (*BALANCE_LOSSES, SINKHORN, NO_BALANCING)]:
        allowed = ", ".join((*BALANCE_LOSSES, SINKHORN, NO_BALANCING))
        raise UsageError(f"{flag} {types!r}: {unknown[0]!r} must be one of {allowed}")
    has_other = any(name not in BALANCE_LOSSES for name in names)
    if not names or len(set(names)) < len(names) or (has_other and len(names) > 1):
        raise UsageError(f"{flag} {types!r}: must be different losses, or {SINKHORN} or {NO_BALANCING} alone")
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = []
    if len(numbers) != len(names) or not all(0 <= number < math.inf for number in numbers):
        rule = f"must be {len(names)} nonnegative number{'s' * (len(names) > 1)}, one for each of {' '.join(names)}"
        raise UsageError(f"{coefficient_flag} {coefficients!r}: {rule}")
    if has_other and numbers != [0.0]:
        raise UsageError(f"{coefficient_flag} {coefficients!r}: {flag} {names[0]} has no loss; remove the coefficient")
    return dict(zip(names, numbers, strict=True))


def parse_fractions(flag: str, text: str) -> tuple[float, ...]:
    """Parse ``0.5,0.9`` into (0.5, 0.9).

    Raises:
        UsageError: not numbers from 0 to 1.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    # ``not`` also refuses NaN.
    if not numbers or not all(0.0 <= number <= 1.0 for number in numbers):
        raise UsageError(f"{flag} {text!r}: must be numbers from 0 to 1, such as 0.5,0.7,0.9")
    return numbers
