"""Statistics of gradient compression: time, bytes, and the size and direction of the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...parallel.device_clock import Clock

Interval = tuple[Any, Any]


def _cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    norms = torch.linalg.vector_norm(first) * torch.linalg.vector_norm(second)
    return float(torch.dot(first, second) / norms) if float(norms) else 0.0


@dataclass
class BoundaryStats:
    """One boundary in one step: the sender counts what it sent, the receiver what it received."""

    sent_bytes: int = 0
    uncompressed_bytes: int = 0
    decompressed_bytes: int = 0
    compress: list[Interval] = field(default_factory=list)
    decompress: list[Interval] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    error_means: list[float] = field(default_factory=list)
    activation_means: list[float] = field(default_factory=list)
    change_cosines: list[float] = field(default_factory=list)
    change_means: list[float] = field(default_factory=list)

    def add_sent(self, gradient: torch.Tensor, flat: torch.Tensor, interval: Interval) -> None:
        """Count a microbatch that was compressed.

        Args:
            gradient: ``[..., D]``, any float dtype.
            flat: Its factors, flat float32 ``[(N + D) * R]``.
            interval: Stamps before and after the compression.
        """
        self.uncompressed_bytes += gradient.nbytes
        self.sent_bytes += flat.nbytes
        self.compress.append(interval)

    def add_received(self, gradient: torch.Tensor, interval: Interval) -> None:
        """Count a microbatch that was decompressed.

        Args:
            gradient: Result, ``[..., D]``.
            interval: Stamps before and after the decompression.
        """
        self.decompressed_bytes += gradient.nbytes
        self.decompress.append(interval)

    def add_error(self, error_ND: torch.Tensor, activation: torch.Tensor) -> None:
        """Compare the compression error of a microbatch with its activation.

        Args:
            error_ND: float32, ``[N, D]``.
            activation: ``[..., D]`` with N * D elements, any float dtype.
        """
        error, other = error_ND.reshape(-1), activation.detach().reshape(-1).float()
        self.cosines.append(_cosine(error, other))
        self.error_means.append(float(error.mean()))
        self.activation_means.append(float(other.mean()))

    def add_change(self, error_ND: torch.Tensor, change: torch.Tensor) -> None:
        """Compare the error of a microbatch with the change of the activation to the next microbatch.

        Where the error is added to the next microbatch, the gradient of a weight is off by the product of the two.

        Args:
            error_ND: float32, ``[N, D]``.
            change: Difference of the activations, float32 ``[..., D]`` with N * D elements.
        """
        self.change_cosines.append(_cosine(error_ND.reshape(-1), change.reshape(-1)))
        self.change_means.append(float(change.mean()))

    def document(self, clock: Clock) -> dict[str, Any]:
        """Return sums over the step and means over its microbatches, for ``metrics.jsonl``."""
        values: dict[str, Any] = {}
        if self.compress:
            values |= {"sent_bytes": self.sent_bytes, "uncompressed_bytes": self.uncompressed_bytes}
            values["compress_ns"] = _total_ns(clock, self.compress)
        if self.decompress:
            values["decompressed_bytes"] = self.decompressed_bytes
            values["decompress_ns"] = _total_ns(clock, self.decompress)
        means = {
            "error_activation_cosine": self.cosines,
            "error_mean": self.error_means,
            "activation_mean": self.activation_means,
            "error_change_cosine": self.change_cosines,
            "activation_change_mean": self.change_means,
        }
        return values | {name: sum(each) / len(each) for name, each in means.items() if each}


@dataclass
class ReplicaStats:
    """The gradients of one item between replicas, in one step."""

    sent_bytes: int = 0
    uncompressed_bytes: int = 0
    compress: list[Interval] = field(default_factory=list)
    decompress: list[Interval] = field(default_factory=list)

    def add_sent(self, uncompressed_bytes: int, sent_bytes: int) -> None:
        """Count a transfer of ``sent_bytes`` in place of matrices of ``uncompressed_bytes``."""
        self.uncompressed_bytes += uncompressed_bytes
        self.sent_bytes += sent_bytes

    def document(self, clock: Clock) -> dict[str, Any]:
        """Return sums over the step, for ``metrics.jsonl``."""
        return {
            "sent_bytes": self.sent_bytes,
            "uncompressed_bytes": self.uncompressed_bytes,
            "decompressed_bytes": self.uncompressed_bytes,
            "compress_ns": _total_ns(clock, self.compress),
            "decompress_ns": _total_ns(clock, self.decompress),
        }


def _total_ns(clock: Clock, intervals: Sequence[Interval]) -> int:
    return sum(clock.elapsed_ns(*interval) for interval in intervals)


# Statistics that are averaged over the processes; all others, bytes and times, are summed.
MEANS = (
    "error_activation_cosine",
    "error_mean",
    "activation_mean",
    "error_change_cosine",
    "activation_change_mean",
)

Stats = Mapping[str, Any]


def merge_stats(gathered: Sequence[Stats]) -> dict[str, Any]:
    """Merge the statistics of all processes.

    Args:
        gathered: One object per process: ``boundaries`` and ``replicas`` (name -> statistic -> value), and
            ``memory_bytes``.

    Returns:
        The same structure: sums of bytes and times, means of means over the processes that measured them, and the
        largest ``memory_bytes``.
    """
    result: dict[str, Any] = {"memory_bytes": max((one["memory_bytes"] for one in gathered), default=0)}
    for group in ("boundaries", "replicas"):
        by_name: dict[str, dict[str, list[float]]] = {}
        for one in gathered:
            for name, stats in one[group].items():
                for statistic, value in stats.items():
                    by_name.setdefault(name, {}).setdefault(statistic, []).append(value)
        if by_name:
            result[group] = {
                name: {
                    statistic: sum(values) / len(values) if statistic in MEANS else sum(values)
                    for statistic, values in stats.items()
                }
                for name, stats in by_name.items()
            }
    return result


def report_lines(step: int, stats: Stats, *, error: bool, speed: bool, ratio: bool) -> list[str]:
    """Return a log line for each kind of check that is on.

    Args:
        step: Number of completed steps.
        stats: Result of :func:`merge_stats`.
        error: Whether ``--check-orth-error-acti`` is on: size and direction of the error.
        speed: Whether ``--check-comp-speed`` is on: times in ms, rates in GB/s.
        ratio: Whether ``--check-comp-ratio`` is on: bytes before and after.
    """
    named = [*stats.get("boundaries", {}).items(), *stats.get("replicas", {}).items()]
    lines = []
    if error:
        parts = [
            f"{name}: error mean {one['error_mean']:.3E} activation mean {one['activation_mean']:.3E}"
            f" cosine {one['error_activation_cosine']:.3E}{_change(one)}"
            for name, one in named
            if "error_mean" in one
        ]
        lines.append(_line("compression error", step, parts))
    if speed:
        lines.append(_line("compression speed", step, [f"{name}: {_speed(one)}" for name, one in named]))
    if ratio:
        parts = [
            f"{name}: {one['uncompressed_bytes']:,} -> {one['sent_bytes']:,} bytes"
            f" ({one['uncompressed_bytes'] / max(1, one['sent_bytes']):.1f} x)"
            for name, one in named
            if "sent_bytes" in one
        ]
        lines.append(_line("compression ratio", step, [*parts, f"memories {stats['memory_bytes']:,} bytes"]))
    return lines


def _change(stats: Mapping[str, float]) -> str:
    if "error_change_cosine" not in stats:
        return ""
    mean, cosine = stats["activation_change_mean"], stats["error_change_cosine"]
    return f"; to the next microbatch activation change mean {mean:.3E} cosine {cosine:.3E}"


def _speed(stats: Mapping[str, float]) -> str:
    parts = []
    for word, time, size in (
        ("compress", "compress_ns", "uncompressed_bytes"),
        ("decompress", "decompress_ns", "decompressed_bytes"),
    ):
        if time in stats:
            rate = stats[size] / max(1, stats[time])
            parts.append(f"{word} {stats[time] / 1e6:.2f} ms ({rate:.2f} GB/s)")
    return " ".join(parts)


def _line(label: str, step: int, parts: Sequence[str]) -> str:
    return " | ".join([f" {label} at iteration {step}", *(parts or ["nothing was compressed"])])
