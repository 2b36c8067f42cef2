"""What an observer of a training step receives: outputs and gradients by item and microbatch, and summed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class StepObserver(Protocol):
    """Reads the tensors of a step without changing them. A profiler without an observer costs one comparison per item.

    The tensors are those of the computation: an observer must not write to them. It may wait for the device.
    """

    def activation(self, item: str, microbatch: int, output: torch.Tensor) -> None:
        """Called with the output of an item in the forward of a microbatch.

        Args:
            item: name of the item.
            microbatch: global microbatch index.
            output: what the item writes, of any shape; part of the autograd graph unless the item is frozen.
        """

    def accumulated(self, items: Sequence[str], microbatch: int) -> None:
        """Called after the weight gradients of a microbatch were added to those of the microbatches before.

        Args:
            items: names of the items of a stage.
            microbatch: global microbatch index.
        """

    def gradients(self) -> None:
        """Called on every rank after the gradients were summed and unscaled, before they are clipped."""
