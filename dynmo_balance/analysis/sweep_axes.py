"""``--vary NAME=VALUES``: the values of one axis of a what-if grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, DecimalException, InvalidOperation

from .._common.errors import UsageError

MAX_VALUES = 10_000
MAX_VALUE = 10**15


def parse_axis(text: str, integers: bool) -> tuple[float, ...]:
    """The values of ``a:b`` (step 1), ``a:b:step`` (both ends included), or ``a,b,c``.

    Raises:
        UsageError: the text has none of these forms, too many values, or fractions instead of integers.
    """
    # Decimal: in floats 0.7 / 0.1 is below 7, so 0:0.7:0.1 would end at 0.6.
    try:
        if ":" in text:
            parts = [_decimal(part) for part in text.split(":")]
            if len(parts) not in (2, 3):
                raise UsageError(f"{text!r}: has {len(parts)} parts; use first:last or first:last:step")
            first, last = parts[0], parts[1]
            step = parts[2] if len(parts) == 3 else Decimal(1)
            if step <= 0 or last < first:
                raise UsageError(f"{text!r}: is empty; the step must be above 0 and the last value not below the first")
            count = int((last - first) / step) + 1
            if count > MAX_VALUES:
                raise UsageError(f"{text!r}: has {count} values; use at most {MAX_VALUES}")
            values = [first + step * index for index in range(count)]
        else:
            values = [_decimal(part) for part in text.split(",")]
    except DecimalException as error:  # also an exponent beyond those of the context
        raise UsageError(f"{text!r}: must be numbers below {MAX_VALUE:.0e}; use a,b,c or first:last:step") from error
    if integers and any(value != int(value) for value in values):
        raise UsageError(f"{text!r}: must be integers")
    return tuple(float(value) for value in values)


def _decimal(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite() or abs(value) >= MAX_VALUE:
        raise InvalidOperation
    return value


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The values of an axis: numbers, integers only, or some names."""

    integers: bool = False
    choices: tuple[str, ...] = ()


def parse_vary(entry: str, known: Mapping[str, Axis]) -> tuple[str, tuple[float | str, ...]]:
    """The name and values of one ``--vary`` option.

    Raises:
        UsageError: the axis is unknown, or a value is invalid.
    """
    name, equals, text = entry.partition("=")
    name = name.strip().replace("_", "-")
    if not equals or name not in known:
        raise UsageError(f"--vary {entry!r}: must be NAME=VALUES, with NAME one of {', '.join(known)}")
    axis = known[name]
    if not axis.choices:
        return name, parse_axis(text.strip(), axis.integers)
    names = tuple(each.strip() for each in text.split(","))
    if wrong := [each for each in names if each not in axis.choices]:
        raise UsageError(f"--vary {name}: {', '.join(wrong)} must be one of {', '.join(axis.choices)}")
    return name, names
