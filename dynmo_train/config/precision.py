"""Options of the types that a run computes in; names and defaults are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Types of the arithmetic; parameters, gradients and moments are float32 throughout."""

    bf16: bool = option("Compute in bfloat16.", default=False)
    fp16: bool = option("Compute in float16, with a scaled loss.", default=False)
    loss_scale: float | None = option(
        "Constant factor of the loss with --fp16; none is a dynamic one.", default=None, above=0
    )
    initial_loss_scale: float = option("Dynamic loss scale at the start.", default=2.0**32, above=0)
    min_loss_scale: float = option("Least dynamic loss scale.", default=1.0, above=0)
    loss_scale_window: int = option(
        "Steps in a row without overflow after which the dynamic loss scale doubles.", default=1000, minimum=1
    )
    hysteresis: int = option(
        "Overflows after which the dynamic loss scale is halved; a doubling resets the count.",
        default=2,
        minimum=1,
    )
    accumulate_allreduce_grads_in_fp32: bool = option(
        "Accumulate and reduce gradients in float32, which this program always does.", default=True
    )
