"""What compression does, measured: time, bytes, and how what is lost lies to what crossed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...parallel.device_clock import Clock

Stamps = tuple[Any, Any]


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    norms = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return float(torch.dot(one, other) / norms) if float(norms) else 0.0


@dataclass
class BoundaryStats:
    """Of one boundary in one step: on the sender's side what was sent, on the receiver's what came."""

    sent_bytes: int = 0
    whole_bytes: int = 0
    received_whole_bytes: int = 0
    compress: list[Stamps] = field(default_factory=list)
    decompress: list[Stamps] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    error_means: list[float] = field(default_factory=list)
    activation_means: list[float] = field(default_factory=list)
    change_cosines: list[float] = field(default_factory=list)
    change_means: list[float] = field(default_factory=list)

    def sent(self, gradient: torch.Tensor, flat: torch.Tensor, stamps: Stamps) -> None:
        """One microbatch was compressed."""
        self.whole_bytes += gradient.numel() * gradient.element_size()
        self.sent_bytes += flat.numel() * flat.element_size()
        self.compress.append(stamps)

    def received(self, gradient: torch.Tensor, stamps: Stamps) -> None:
        """One microbatch was put together again."""
        self.received_whole_bytes += gradient.numel() * gradient.element_size()
        self.decompress.append(stamps)

    def lost(self, error_ND: torch.Tensor, activation: torch.Tensor) -> None:
        """What the factors of one microbatch do not say, beside its activation."""
        one, other = error_ND.reshape(-1), activation.detach().reshape(-1).float()
        self.cosines.append(_cosine(one, other))
        self.error_means.append(float(one.mean()))
        self.activation_means.append(float(other.mean()))

    def changed(self, error_ND: torch.Tensor, change: torch.Tensor) -> None:
        """What one microbatch lost, beside the difference of the next one's activation to its own.

        Where the error is added to the next microbatch, the gradient of a weight is off by the product of the two.
        """
        self.change_cosines.append(_cosine(error_ND.reshape(-1), change.reshape(-1)))
        self.change_means.append(float(change.mean()))

    def document(self, clock: Clock) -> dict[str, Any]:
        """For the log: sums over the step, and means over its microbatches."""
        told: dict[str, Any] = {}
        if self.compress:
            told |= {"sent_bytes": self.sent_bytes, "whole_bytes": self.whole_bytes}
            told["compress_ns"] = sum(clock.elapsed_ns(*stamps) for stamps in self.compress)
        if self.decompress:
            told["decompressed_bytes"] = self.received_whole_bytes
            told["decompress_ns"] = sum(clock.elapsed_ns(*stamps) for stamps in self.decompress)
        if self.cosines:
            count = len(self.cosines)
            told["error_activation_cosine"] = sum(self.cosines) / count
            told["error_mean"] = sum(self.error_means) / count
            told["activation_mean"] = sum(self.activation_means) / count
        if self.change_cosines:
            count = len(self.change_cosines)
            told["error_change_cosine"] = sum(self.change_cosines) / count
            told["activation_change_mean"] = sum(self.change_means) / count
        return told


@dataclass
class ReplicaStats:
    """Of the gradients of one item between replicas, in one step."""

    sent_bytes: int = 0
    whole_bytes: int = 0
    compress: list[Stamps] = field(default_factory=list)
    decompress: list[Stamps] = field(default_factory=list)

    def sent(self, whole_bytes: int, sent_bytes: int) -> None:
        """What is added: bytes of the matrices, and of their factors."""
        self.whole_bytes += whole_bytes
        self.sent_bytes += sent_bytes

    def document(self, clock: Clock) -> dict[str, Any]:
        """For the log: sums over the step."""
        return {
            "sent_bytes": self.sent_bytes,
            "whole_bytes": self.whole_bytes,
            "decompressed_bytes": self.whole_bytes,
            "compress_ns": sum(clock.elapsed_ns(*stamps) for stamps in self.compress),
            "decompress_ns": sum(clock.elapsed_ns(*stamps) for stamps in self.decompress),
        }


MEANS = (
    "error_activation_cosine",
    "error_mean",
    "activation_mean",
    "error_change_cosine",
    "activation_change_mean",
)

Figures = Mapping[str, Any]


def merge_stats(gathered: Sequence[Figures]) -> dict[str, Any]:
    """The processes' figures as one.

    Bytes and times are sums, means are means over those who measured, memories are of the process with the most.

    Args:
        gathered: one object a process: ``boundaries`` and ``replicas``, name -> figure -> value, and ``memory_bytes``.
    """
    result: dict[str, Any] = {"memory_bytes": max((one["memory_bytes"] for one in gathered), default=0)}
    for group in ("boundaries", "replicas"):
        by_name: dict[str, dict[str, list[float]]] = {}
        for one in gathered:
            for name, stats in one[group].items():
                for figure, value in stats.items():
                    by_name.setdefault(name, {}).setdefault(figure, []).append(value)
        if by_name:
            result[group] = {
                name: {
                    figure: sum(values) / len(values) if figure in MEANS else sum(values)
                    for figure, values in stats.items()
                }
                for name, stats in by_name.items()
            }
    return result


def report_lines(step: int, stats: Figures, *, error: bool, speed: bool, ratio: bool) -> list[str]:
    """A line for each kind of figure that was asked for."""
    everything = [*stats.get("boundaries", {}).items(), *stats.get("replicas", {}).items()]
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
        ("compress", "compress_ns", "whole_bytes"),
        ("decompress", "decompress_ns", "decompressed_bytes"),
    ):
        if time in stats:
            rate = stats[size] / max(1, stats[time])
            parts.append(f"{word} {stats[time] / 1e6:.2f} ms ({rate:.2f} GB/s)")
    return " ".join(parts)


def _line(what: str, step: int, parts: Sequence[str]) -> str:
    return " | ".join([f" {what} at iteration {step}", *(parts or ["nothing was compressed"])])
