"""Weights in the blocked layout of oneDNN's float32 products, for generation in batches on CPU.

A product with 2 to 16 rows reads each weight once, and the BLAS library of torch first copies it to a layout of its
own, in every call. oneDNN can do this once::

    weight_OI [O, I]  --reorder, once-->  packed  --product(x [M, I])-->  y [M, O]

2-core AMD EPYC, one thread, 8 rows, [4096, 768]: 0.94 ms, and 1.83 ms from rows, 1.99 ms from columns. For one row the
product by columns (:func:`~.kv_cache.store_by_columns`) is faster: 0.63 ms against 0.77 ms.

A packed linear layer has no plain weight any more: the parameter is on the meta device, so that whatever reads its
values fails, and memory is not doubled. A head has both: a tied one shares its weight with the embedding.

Shapes in names: M rows, O output features, I input features.
"""

from __future__ import annotations

import torch
from torch import nn

from .attention.latent_attention import LatentAttention
from .layers.linear import PrunableLinear
from .vocabulary.head import Head

_MKLDNN = torch.ops.mkldnn


class PackedProduct:
    """The product with one packed weight.

    Args:
        weight_OI: float32 weight on the CPU, ``[O, I]``; not changed.
        rows: usual number of rows of the input; the layout is chosen for it, and any number is valid.
    """

    def __init__(self, weight_OI: torch.Tensor, rows: int) -> None:
        self.outputs = weight_OI.shape[0]
        self._packed = _MKLDNN._reorder_linear_weight(weight_OI.detach().contiguous(), rows)

    def __call__(self, x: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """``x`` ``[..., I]`` times the transposed weight, plus ``bias_O`` ``[O]``: ``[..., O]``."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.outputs)
        y: torch.Tensor = _MKLDNN._linear_pointwise(x.contiguous(), self._packed, bias_O, "none", [], "")
        return y


def can_pack() -> bool:
    """Whether torch has oneDNN's products with packed weights."""
    # Private operators, which torch's own compiler uses for CPU (torch 2.11 to 2.13).
    has_products = hasattr(_MKLDNN, "_linear_pointwise") and hasattr(_MKLDNN, "_reorder_linear_weight")
    return bool(torch.backends.mkldnn.is_available()) and has_products


@torch.no_grad()
def pack_weights(module: nn.Module, rows: int) -> None:
    """Pack the dense float32 weights of an item on the CPU, in place; those that are packed stay as they are.

    Experts, whose number of rows differs by token, keep their weights, and so does the product that a latent attention
    reads by head.

    Args:
        module: an item in evaluation mode.
        rows: number of rows of a product, sequences of a batch times new tokens of each.
    """
    by_head = {id(each.kv_up) for each in module.modules() if isinstance(each, LatentAttention)}
    for path, child in module.named_modules():
        if isinstance(child, Head):
            if child.packed is None and child.region is None and _is_plain(child.weight):
                child.packed = PackedProduct(child.weight[: child.vocabulary], rows)
        elif (
            isinstance(child, PrunableLinear)
            and child.packed is None
            and child.is_dense
            and _is_plain(child.weight)
            and id(child) not in by_head
            and "experts" not in path.split(".")
        ):
            child.packed = PackedProduct(child.weight, rows)
            child.weight = nn.Parameter(child.weight.to("meta"), requires_grad=False)


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32
