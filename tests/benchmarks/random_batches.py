"""Random batches, for a peer's process as well: nothing of this project is imported here."""

from __future__ import annotations

import torch


def random_rows(step: int, *, rows: int, tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens drawn for the step, and the same one token on: each [rows, tokens]."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocabulary, (rows, tokens + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
