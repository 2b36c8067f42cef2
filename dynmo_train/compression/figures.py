"""What compression does, measured: time, bytes, and how what is lost lies to what crossed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..pipeline.clock import Clock

Stamps = tuple[Any, Any]


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    norms = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return float(torch.dot(one, other) / norms) if float(norms) else 0.0


@dataclass
class BoundaryFigures:
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
class ReplicaFigures:
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
