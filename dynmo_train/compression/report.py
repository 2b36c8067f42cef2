"""What compression did in a step, over all processes: one object for ``metrics.jsonl``, and lines for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEANS = (
    "error_activation_cosine",
    "error_mean",
    "activation_mean",
    "error_change_cosine",
    "activation_change_mean",
)

Figures = Mapping[str, Any]


def merged_figures(told: Sequence[Figures]) -> dict[str, Any]:
    """The processes' figures as one.

    Bytes and times are sums, means are means over those who measured, memories are of the process with the most.

    Args:
        told: one object a process: ``boundaries`` and ``replicas``, name -> figure -> value, and ``memory_bytes``.
    """
    result: dict[str, Any] = {"memory_bytes": max((one["memory_bytes"] for one in told), default=0)}
    for group in ("boundaries", "replicas"):
        by_name: dict[str, dict[str, list[float]]] = {}
        for one in told:
            for name, figures in one[group].items():
                for figure, value in figures.items():
                    by_name.setdefault(name, {}).setdefault(figure, []).append(value)
        if by_name:
            result[group] = {
                name: {
                    figure: sum(values) / len(values) if figure in MEANS else sum(values)
                    for figure, values in figures.items()
                }
                for name, figures in by_name.items()
            }
    return result


def report_lines(step: int, figures: Figures, *, error: bool, speed: bool, ratio: bool) -> list[str]:
    """A line for each kind of figure that was asked for."""
    everything = [*figures.get("boundaries", {}).items(), *figures.get("replicas", {}).items()]
    lines = []
    if error:
        parts = [
            f"{name}: error mean {one['error_mean']:.3E} activation mean {one['activation_mean']:.3E}"
            f" cosine {one['error_activation_cosine']:.3E}{_change(one)}"
            for name, one in everything
            if "error_mean" in one
        ]
        lines.append(_line("compression error", step, parts))
    if speed:
        lines.append(_line("compression speed", step, [f"{name}: {_speed(one)}" for name, one in everything]))
    if ratio:
        parts = [
            f"{name}: {one['whole_bytes']:,} -> {one['sent_bytes']:,} bytes"
            f" ({one['whole_bytes'] / max(1, one['sent_bytes']):.1f} x)"
            for name, one in everything
            if "sent_bytes" in one
        ]
        lines.append(_line("compression ratio", step, [*parts, f"memories {figures['memory_bytes']:,} bytes"]))
    return lines


def _change(figures: Mapping[str, float]) -> str:
    if "error_change_cosine" not in figures:
        return ""
    mean, cosine = figures["activation_change_mean"], figures["error_change_cosine"]
    return f"; to the next microbatch activation change mean {mean:.3E} cosine {cosine:.3E}"


def _speed(figures: Mapping[str, float]) -> str:
    parts = []
    for word, time, size in (
        ("compress", "compress_ns", "whole_bytes"),
        ("decompress", "decompress_ns", "decompressed_bytes"),
    ):
        if time in figures:
            rate = figures[size] / max(1, figures[time])
            parts.append(f"{word} {figures[time] / 1e6:.2f} ms ({rate:.2f} GB/s)")
    return " ".join(parts)


def _line(what: str, step: int, parts: Sequence[str]) -> str:
    return " | ".join([f" {what} at iteration {step}", *(parts or ["nothing was compressed"])])
