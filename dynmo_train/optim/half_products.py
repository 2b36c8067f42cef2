"""Products of float16 numbers on a CPU, by its float32 arithmetic.

CPUs have no arithmetic of float16: torch's own products of them take 20 to 100 times as long as those of float32 (seen
on an AMD EPYC). Here the factors are cast, multiplied in float32, and the results cast back: one rounding a result.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

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
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = func in _SAME_TYPE or func in _INTO or func is _ATTENTION
        if not known or args[0].dtype != torch.float16 or not all(type(each) in _PLAIN for each in args[:2]):
            return func(*args, **kwargs)
        wide, into = tree_map(_wide, args), kwargs.get("out")
        if into is not None:
            rest = {name: value for name, value in kwargs.items() if name != "out"}
            return into.copy_(_INTO[func](*wide, **rest))
        result = func(*wide, **tree_map(_wide, kwargs))
        if func is _ATTENTION:
            output, logsumexp = result
            return output.half(), logsumexp
        return tree_map(_narrow, result)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def float_products(device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> AbstractContextManager[Any]:
    """Within it float16 products on a CPU go by float32; for other types and devices nothing changes.

    Args:
        compiled: whether items are compiled, which chooses their products itself.
    """
    if device.type == "cpu" and dtype == torch.float16 and not compiled:
        return _FloatProducts()  # type: ignore[no-untyped-call]
    return nullcontext()
