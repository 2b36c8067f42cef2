"""``--vary NAME=VALUES``: the values of one axis of a what-if grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from .._common.errors import UsageError

MAX_VALUES = 10_000


def parse_axis(text: str, integers: bool) -> tuple[float, ...]:
    """The values of ``a:b`` (step 1), ``a:b:step`` (both ends included), or ``a,b,c``.

    Raises:
        UsageError: not one of these forms, too many values, or fractions where whole numbers are wanted.
    """
    try:
        if ":" in text:
            parts = [Decimal(part) for part in text.split(":")]
            if len(parts) not in (2, 3):
                raise UsageError(f"{text!r} has {len(parts)} parts; write first:last or first:last:step")
            first, last = parts[0], parts[1]
            step = parts[2] if len(parts) == 3 else Decimal(1)
            if step <= 0 or last < first:
                raise UsageError(
                    f"{text!r} goes nowhere; the step must be above 0 and the last value not below the first"
                )
            count = int((last - first) / step) + 1
            if count > MAX_VALUES:
                raise UsageError(f"{text!r} has {count} values; at most {MAX_VALUES}")
            values = [first + step * index for index in range(count)]
        else:
            values = [Decimal(part) for part in text.split(",")]
    except InvalidOperation as error:
        raise UsageError(f"{text!r} is not a list of numbers; write a,b,c or first:last:step") from error
    if integers and any(value != int(value) for value in values):
        raise UsageError(f"{text!r} must hold whole numbers")
    return tuple(float(value) for value in values)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis takes: numbers, whole numbers only, or some of these words."""

    integers: bool = False
    choices: tuple[str, ...] = ()


def parse_vary(entry: str, known: Mapping[str, Axis]) -> tuple[str, tuple[float | str, ...]]:
    """The name and values of one ``--vary`` entry."""
    name, equals, text = entry.partition("=")
    name = name.strip().replace("_", "-")
    if not equals or name not in known:
        raise UsageError(f"--vary {entry!r}: write NAME=VALUES with NAME one of {', '.join(known)}")
    axis = known[name]
    if not axis.choices:
        return name, parse_axis(text.strip(), axis.integers)
    words = tuple(word.strip() for word in text.split(","))
    if wrong := [word for word in words if word not in axis.choices]:
        raise UsageError(f"--vary {name}: {', '.join(wrong)} is none of {', '.join(axis.choices)}")
    return name, words
