"""Choosing the next token from logits. Shapes in names: V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: ``temperature`` 0 takes the likeliest; ``top_k`` 0 and ``top_p`` 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Raise ``UsageError`` where a value is out of its range."""
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature must be a number of at least 0, is {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"--top-k must be at least 0, is {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p must be above 0 and at most 1, is {self.top_p}")


def next_token(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one id. Cuts to the ``top_k`` likeliest first, then to the fewest whose probabilities reach ``top_p``.

    The nucleus is that of Holtzman et al. 2020 (arXiv:1904.09751, section 3.1): the token that crosses ``top_p`` stays.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    sorted_V, ids_V = (logits_V.float() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V, ids_V = sorted_V[: sampling.top_k], ids_V[: sampling.top_k]
    probabilities_V = sorted_V.softmax(0)
    if sampling.top_p < 1.0:
        before_V = probabilities_V.cumsum(0) - probabilities_V
        probabilities_V = probabilities_V.masked_fill(before_V >= sampling.top_p, 0.0)
    drawn = int(torch.multinomial(probabilities_V.cpu(), 1, generator=generator))
    return int(ids_V[drawn])
