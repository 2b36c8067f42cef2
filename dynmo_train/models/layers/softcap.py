"""Soft caps: ``c tanh(x / c)`` is nearly ``x`` where it is small, and never above ``c``.

Gemma 2 (arXiv:2408.00118, section 2) caps attention scores and logits.
"""

from __future__ import annotations

import torch


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``x`` of any shape with the cap ``cap``; itself where that is None."""
    return x if cap is None else torch.tanh(x / cap) * cap


def soft_cap_(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """:func:`soft_cap` of ``x`` ``[...]`` with the cap ``cap`` in place, without gradient; returns ``x``."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def soft_cap_slope(exponentials: torch.Tensor, top: torch.Tensor, cap: float) -> torch.Tensor:
    """The derivative of capped logits by the logits, ``1 - (z / c)^2``, of exponentials that took their place.

    Args:
        exponentials: ``exp(z - top)`` of the capped logits ``z``, float32 of any shape.
        top: broadcastable to it; the largest of the logits.
        cap: the cap ``c``.
    """
    # An exponential that underflowed to 0 has a logit of at least -c all the same.
    z = exponentials.log().add_(top).clamp_(-cap, cap)
    return z.div_(cap).square_().neg_().add_(1.0)
