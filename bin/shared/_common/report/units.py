"""Numbers of a page in the units that people use: ``1.42 s``, ``340 ms``, ``12.3 GiB``, ``6.81 M``."""

from __future__ import annotations

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_COUNTS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))
NONE = "-"
"""What a cell without a value shows."""


def digits(value: float) -> str:
    """The value with three significant digits, never in scientific notation; thousands have separators."""
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.995 else 3
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals == 3 else text


def _scaled(value: float, units: tuple[tuple[float, str], ...], gap: str) -> str:
    for factor, name in units:
        # A value that rounds to 1,000 of a unit is 1.00 of the next.
        if abs(value) >= factor * 0.9995 or factor == 1.0:
            plain = factor == 1.0 and float(value).is_integer()
            return f"{value:,.0f}{gap}{name}" if plain else f"{digits(value / factor)}{gap}{name}"
    return str(value)


def time_text(ns: float | None) -> str:
    """A time in ns: ``340 ms``; from two minutes on ``12 min 5 s`` and ``3 h 20 min``."""
    if ns is None:
        return NONE
    seconds = ns / 1e9
    if seconds < 120:
        return _scaled(ns, _TIMES, " ")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def size_text(num_bytes: float | None) -> str:
    """A size ``num_bytes`` as text: ``12.3 GiB``; None is not known."""
    return NONE if num_bytes is None else _scaled(num_bytes, _SIZES, " ")


def count_text(value: float | None) -> str:
    """A large number ``value``: ``6.81 M``; below 10,000 with all digits. None is not known."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) < 10_000 else _scaled(value, _COUNTS, "")


def share_text(value: float | None, *, signed: bool = False) -> str:
    """A share ``value`` of one in percent: ``28.6 %``, or with a sign ``+28.6 %``."""
    if value is None:
        return NONE
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def plural(count: int, noun: str) -> str:
    """``count`` and ``noun``: ``1 layer``, ``2 layers``, ``1,000 layers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
