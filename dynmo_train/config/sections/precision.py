"""Options of mixed precision; names and defaults are Megatron's."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .. import panels
from ..options import option

Float8Format = Literal["e4m3", "hybrid"]
Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


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
    fp8: bool = option("Compute products of attention and MLPs in float8 (torchao).", default=False, common=True)
    fp8_format: Float8Format | None = option(
        "Float8 format; hybrid has gradients in e5m2. It implies --fp8.", default=None
    )
    fp8_recipe: Float8Recipe = option(
        "Float8 scales: per tensor or row; gw_hp: bf16 weight gradients.", default="tensorwise"
    )
    first_last_layers_bf16: bool = option("Keep first and last layers in bfloat16 with float8.", default=False)
    num_layers_at_start_in_bf16: int = option("First layers kept in bfloat16.", default=1, minimum=0)
    num_layers_at_end_in_bf16: int = option("Last layers kept in bfloat16.", default=1, minimum=0)
    accumulate_allreduce_grads_in_fp32: bool = option(
        "Accumulate and reduce gradients in float32; always on.", default=True
    )

    @property
    def uses_float8(self) -> bool:
        """Whether products run in float8; as in Megatron, the format alone is enough."""
        return self.fp8 or self.fp8_format is not None

    @property
    def float8_form(self) -> Float8Format:
        """The format; without one given, that of torchao's recipe."""
        return self.fp8_format or ("hybrid" if self.fp8_recipe == "tensorwise" else "e4m3")
