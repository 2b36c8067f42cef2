"""Mixed precision: float32 parameters, copies of them for the arithmetic, and the loss scale of float16.

Parameters, gradients and moments are always float32, so that checkpoints, migration and the optimizer do not depend on
the dtype of the arithmetic. An item runs on copies of its parameters, cast once per step; gradients come back through
the cast and accumulate in float32 over the microbatches::

    master (float32) -> copy (bf16, fp16) -> forward, backward -> gradient -> cast -> grad of the master (float32)

CPUs have no float16 arithmetic: torch's own float16 products take 20 to 100 times as long as float32 ones (measured on
an AMD EPYC). ``float32_matmuls`` casts the operands, multiplies in float32 and casts the result back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .._common.document import short_repr
from .._common.errors import UsageError
from ..models.float8 import Float8Settings
from ..models.layers.gated import are_stacked, stack


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2), with Megatron's update rule.

    Attributes:
        initial: Scale at the start.
        minimum: Smallest scale.
        window: Consecutive updates without overflow after which the scale doubles; 0 keeps it constant.
        hysteresis: Overflows until the scale is halved; a doubling resets the count.
    """

    initial: float
    minimum: float
    window: int
    hysteresis: int


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Mixed precision of a run.

    Attributes:
        compute: dtype of the arithmetic, of activations and boundary tensors.
        scaling: Loss scaling; None does not scale the loss.
        float8: Products of attention and MLPs that run in float8; None has none.
    """

    compute: torch.dtype = torch.float32
    scaling: LossScaling | None = None
    float8: Float8Settings | None = None

    @property
    def casts(self) -> bool:
        """Whether items run on copies of their parameters."""
        return self.compute != torch.float32


# The number of an expert in the name of a parameter.
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+")
# The gate of a gated MLP; its up has the same name otherwise.
_GATE = re.compile(r"(^|\.)gate\.")
FLOAT32_PRECISION = Precision()


class LossScaler:
    """The loss scale over the steps: a pure function of which steps overflowed.

    Args:
        settings: Loss scaling; None keeps ``scale`` at 1.
    """

    def __init__(self, settings: LossScaling | None) -> None:
        self.settings = settings
        self.scale = 1.0 if settings is None else settings.initial
        self._clean = 0
        self._overflows_left = 0 if settings is None else settings.hysteresis

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale depends on which steps overflowed."""
        return self.settings is not None and self.settings.window > 0

    @property
    def can_fall(self) -> bool:
        """Whether the scale is dynamic and above its minimum: an overflow is then part of finding it."""
        return self.settings is not None and self.is_dynamic and self.scale > self.settings.minimum

    def update(self, *, finite: bool) -> None:
        """Update the scale after a step; ``finite`` is whether all its gradients were finite."""
        settings = self.settings
        if settings is None or not settings.window:
            return
        if not finite:
            self._clean = 0
            # As in Megatron, a halving does not reset the count: each further overflow halves the scale again.
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, settings.minimum)
            return
        self._clean += 1
        if self._clean == settings.window:
            self._clean, self._overflows_left = 0, settings.hysteresis
            self.scale *= 2

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None without scaling."""
        if self.settings is None:
            return None
        return {"scale": self.scale, "clean_steps": self._clean, "overflows_left": self._overflows_left}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's state; a constant scale is not changed.

        Raises:
            UsageError: The state does not have the fields of :meth:`state`.
        """
        if state is None or self.settings is None or not self.settings.window:
            return
        try:
            scale, clean = float(state["scale"]), int(state["clean_steps"])
            left = int(state["overflows_left"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"the checkpoint's loss scale is {short_repr(state)}; must have scale, clean_steps and overflows_left"
            ) from error
        self.scale, self._clean, self._overflows_left = scale, clean, left


class _CastForCompute(torch.autograd.Function):
    """Returns the copy; the gradient goes to the master, in the master's dtype."""

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = master.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None


def cast_forward(master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return ``copy``, whose gradient goes to ``master`` in the dtype of ``master``.

    Args:
        master: Parameter in float32, of any shape.
        copy: Its values in the dtype of the arithmetic, of the same shape.
    """
    through: torch.Tensor = _CastForCompute.apply(master, copy)  # type: ignore[no-untyped-call]
    return through


class ComputeCopies:
    """The parameters of one item in the dtype of the arithmetic, cast when first used after a change.

    Args:
        module: Item; its parameters are the masters.
        dtype: dtype of the copies.
        is_static: Whether the copies stay in the same memory, as CUDA graphs require.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, is_static: bool = False) -> None:
        self.module, self.dtype, self._is_static = module, dtype, is_static
        self._copies: dict[str, torch.Tensor] = {}

    def refresh(self) -> None:
        """Renew the copies, at once or at their next use, because the masters may have changed."""
        if not self._is_static:
            self._copies.clear()
        elif self._copies:
            masters = dict(self.module.named_parameters())
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies.values()), [masters[name] for name in self._copies])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the item on the copies."""
        return functional_call(self.module, self.parameters(), arguments, keywords)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the copies, whose gradients go to the masters."""
        # One cast per step, but a new autograd node per call, because each microbatch has its own graph.
        masters = dict(self.module.named_parameters())
        if not self._copies:
            self._copies = _cast_all({name: master.detach() for name, master in masters.items()}, self.dtype)
        return {name: cast_forward(master, self._copies[name]) for name, master in masters.items()}


def _cast_all(masters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Cast parameters; those that one product reads are consecutive in one storage: a layer's experts, gate and up."""
    copies: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[str]] = {}
    for name, master in masters.items():
        partner = _GATE.sub(r"\1up.", name)
        if _EXPERT.search(name):
            stacks.setdefault(_EXPERT.sub("", name), []).append(name)
        elif partner != name and partner in masters and are_stacked(master, masters[partner]):
            copies[name], copies[partner] = stack(master, masters[partner], dtype)
        elif name not in copies:
            copies[name] = master.to(dtype)
    for names in stacks.values():
        first = masters[names[0]]
        whole = first.new_empty((len(names), *first.shape), dtype=dtype)
        copies |= {name: whole[place].copy_(masters[name]) for place, name in enumerate(names)}
    return copies


def unscale(gradients: Sequence[torch.Tensor], scale: float) -> None:
    """Divide ``gradients``, float32 of any shape, by the loss scale in place; exact where it is a power of two."""
    if scale != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), 1.0 / scale)


_ATEN = torch.ops.aten
_SAME_TYPE = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
_INTO = {_ATEN.mm.out: _ATEN.mm.default, _ATEN.addmm.out: _ATEN.addmm.default}
_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu.default


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value


def _narrow(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) else value


class _FloatProducts(TorchDispatchMode):
    # Below autograd, so that the products of a backward are cast too, which no module sees.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Not DTensor and other subclasses, which have a dispatch of their own.
        is_product = func in _SAME_TYPE or func in _INTO or func is _ATTENTION
        if not is_product or args[0].dtype != torch.float16 or not all(type(each) in _PLAIN for each in args[:2]):
            return func(*args, **kwargs)
        wide, into = tree_map(_wide, args), kwargs.get("out")
        if into is not None:
            rest = {name: value for name, value in kwargs.items() if name != "out"}
            return into.copy_(_INTO[func](*wide, **rest))
        result = func(*wide, **tree_map(_wide, kwargs))
        if func is _ATTENTION:
            # The backward reads logsumexp in float32.
            output, logsumexp = result
            return output.half(), logsumexp
        return tree_map(_narrow, result)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def float32_matmuls(device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which float16 matrix products on CPU are computed in float32; a null context otherwise.

    Args:
        device: Device of the arithmetic.
        dtype: dtype of the arithmetic.
        compiled: Whether items are compiled; the compiler chooses its products itself.
    """
    if device.type == "cpu" and dtype == torch.float16 and not compiled:
        return _FloatProducts()  # type: ignore[no-untyped-call]
    return nullcontext()
