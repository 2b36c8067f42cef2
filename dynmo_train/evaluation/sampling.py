"""Draws the next token from logits. Shapes in names: B sequences, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._common.errors import UsageError

MIN_TEMPERATURE = 1e-30
"""Lower temperatures draw as this one does: the most likely token."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divisor of the logits; 0 is greedy decoding.
        top_k: number of most likely tokens to draw from; 0 is all.
        top_p: cumulative probability of the nucleus, in (0, 1]; 1 is all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Check the ranges of the values.

        Raises:
            UsageError: a value is out of its range; names the option.
        """
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature}: must be a number of at least 0; 0 is greedy decoding")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k}: must be at least 0; 0 draws among all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p {self.top_p}: must be in (0, 1]; use --temperature 0 for greedy decoding")


def next_tokens(logits_BV: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw one token per sequence.

    Args:
        logits_BV: floating point ``[B, V]``, on any device.
        sampling: how to draw.
        generators: one CPU generator per sequence, so that a draw does not depend on the rest of the batch.

    Returns:
        Token ids, int64 ``[B]`` on CPU.
    """
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1).cpu()
    drawn = [next_token(row_V, sampling, each) for row_V, each in zip(logits_BV, generators, strict=True)]
    return torch.tensor(drawn)


def next_token(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token: the ``top_k`` filter first, then the nucleus of probability ``top_p``.

    The nucleus is that of Holtzman et al. 2020 (arXiv:1904.09751, section 3.1); the token that crosses ``top_p`` is in.

    Args:
        logits_V: floating point ``[V]``.
        sampling: how to draw.
        generator: CPU generator.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    # The draw is on CPU: the generators of a GPU give other numbers for the same seed.
    scaled_V = logits_V.float()
    if sampling.temperature < MIN_TEMPERATURE:
        # Quotients would be beyond the range of float32; differences to the maximum are at most 0, and one is 0.
        scaled_V = (scaled_V - scaled_V.max()) / MIN_TEMPERATURE
    else:
        scaled_V = scaled_V / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return int(torch.multinomial(scaled_V.softmax(0).cpu(), 1, generator=generator))
    if sampling.top_k:
        sorted_V, ids_V = scaled_V.topk(min(sampling.top_k, len(scaled_V)))
    else:
        sorted_V, ids_V = scaled_V.sort(descending=True, stable=True)
    probabilities_V = sorted_V.softmax(0)
    if sampling.top_p < 1.0:
        # The probability before a token decides, so the token that crosses ``top_p`` stays, and at least one remains.
        before_V = probabilities_V.cumsum(0) - probabilities_V
        probabilities_V = probabilities_V.masked_fill(before_V >= sampling.top_p, 0.0)
    drawn = int(torch.multinomial(probabilities_V.cpu(), 1, generator=generator))
    return int(ids_V[drawn])
