"""ZB-H1: 1F1B whose backward is split in two, weight gradients in the bubbles (Qi et al. 2023, arXiv 2401.10241)."""

from __future__ import annotations

from .interleaved import rounds_order
from .operations import Order


def order(workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations, also with several stages per worker."""
    return rounds_order(workers, virtual_stages, microbatches, warm_up_factor=1, split=True)
