"""Copies from the device that the host reads later, so that it does not wait where the copy is started."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a tensor to the host in progress; the host waits only where it reads before the copy has ended.

    Args:
        source: Tensor of any shape, on any device.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = source
        if source.device.type == "cuda":
            # Page-locked memory: a copy to other memory waits for the device.
            self._values = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._values.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> torch.Tensor:
        """Wait for the copy and return it, a CPU tensor of the shape of the source."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
