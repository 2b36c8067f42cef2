"""Options of mixed precision; names and defaults are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from . import panels
from .options import option


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Compute type and loss scaling; parameters, gradients and moments stay float32."""

    PANEL: ClassVar[str] = panels.PRECISION

    bf16: bool = option("Compute in bfloat16.", default=False, common=True)
    fp16: bool = option("Compute in float16 with loss scaling.", default=False, common=True)
    loss_scale: float | None = option("Static loss scale with --fp16; none: dynamic.", default=None, above=0)
    initial_loss_scale: float = option("Initial dynamic loss scale.", default=2.0**32, above=0)
    min_loss_scale: float = option("Minimum dynamic loss scale.", default=1.0, above=0)
    loss_scale_window: int = option(
        "Consecutive steps without overflow until the loss scale doubles.", default=1000, minimum=1
    )
    hysteresis: int = option(
        "Overflows until the loss scale is halved; doubling resets the count.",
        default=2,
        minimum=1,
    )
    accumulate_allreduce_grads_in_fp32: bool = option(
        "Accumulate and reduce gradients in float32; always on.", default=True
    )
