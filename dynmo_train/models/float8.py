"""Float8 training: the products of attention and MLP layers on operands that are rounded to 8 bits (torchao).

A product and its two gradients each round both operands, at scales that follow from the largest value of the tensor, or
of each row (Micikevicius et al. 2022, arXiv:2209.05433). Everything else stays in the compute dtype or in float32::

    input  [N, I] ─▶ float8 ─┐
                             ├─▶ product in float8, sums in float32 ─▶ output [N, O] in the compute dtype
    weight [O, I] ─▶ float8 ─┘

* Weights, gradients and moments are what they are without float8, and so are checkpoints and migration.
* A scale depends on one microbatch and one item: the bits are the same on any partition.
* Embeddings, the output layer, routers, normalization and attention itself have no such products. Routed experts have
  none either: torchao's grouped product in float8 is a prototype, and the two forms of a layer must not differ.
* A pruned weight keeps its zeros, which float8 has. A product in a sparse format, or on fewer rows and columns than the
  weight has, stays in the compute dtype.

On CUDA the kernel wants sizes that are multiples of 16; the number of rows may be any, and is padded. Elsewhere
products are emulated: operands are rounded to float8, and multiplied in float32.

Shapes in names: N rows, O output features, I input features.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .._common.errors import MissingExtraError, UsageError
from .attention.cross_attention import CrossAttention
from .attention.self_attention import SelfAttention
from .layer_list import ItemSpec
from .layers.feed_forward import FeedForward
from .layers.linear import PrunableLinear

MULTIPLE = 16
# Tensor cores of Ada and Hopper are the first with float8.
LEAST_CAPABILITY = (8, 9)
TENSORWISE = "tensorwise"
E4M3, HYBRID = "e4m3", "hybrid"
_LAYER = re.compile(r"(.*\blayers)\.(\d+)")
_EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class Float8Settings:
    """Which products run in float8, and how they are scaled.

    Attributes:
        recipe: torchao's name: one scale per tensor (``tensorwise``) or per row and column (``rowwise``), or
            ``rowwise_with_gw_hp``, whose weight gradients stay in the compute dtype.
        form: ``hybrid`` rounds gradients to e5m2, which has more range, the rest to e4m3; ``e4m3`` rounds all to it.
        first_in_bf16: Number of first layers of each stack that have no float8 products.
        last_in_bf16: Number of last layers that have none.
    """

    recipe: str = TENSORWISE
    form: str = HYBRID
    first_in_bf16: int = 0
    last_in_bf16: int = 0


def import_torchao() -> Any:
    """Import torchao's float8 training.

    Returns:
        The module ``torchao.float8``.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    # It warns about libraries of kernels that this package does not use.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.float8
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torchao", "fp8") from error
    finally:
        logging.disable(before)
    return torchao.float8


def check_float8(device: torch.device) -> None:
    """Check that torchao is installed, and that the device has float8 products or can emulate them.

    Args:
        device: device of this process.

    Raises:
        UsageError: one of them is missing.
    """
    import_torchao()
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            raise UsageError(
                f"--fp8 requires a GPU of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later, and"
                f" {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; leave it out"
            )


class Float8Product:
    """``x W^T`` on operands that are rounded to float8, with gradients; ``nn.Linear`` of torchao has the same.

    Args:
        settings: formats and scales.
        emulate: Whether to multiply the rounded operands in float32.
    """

    def __init__(self, settings: Float8Settings, *, emulate: bool) -> None:
        ao = import_torchao()
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

        if settings.recipe == TENSORWISE and settings.form == E4M3:
            config = ao.Float8LinearConfig(cast_config_grad_output=ao.CastConfig(target_dtype=torch.float8_e4m3fn))
        else:
            config = ao.Float8LinearConfig.from_recipe_name(settings.recipe)
        self._config = replace(config, emulate=emulate)
        self._apply = matmul_with_hp_or_float8_args.apply
        # The number of rows is the inner dimension of the weight's gradient. Padding copies, so only where it must be.
        self._plain, self._padded = (
            Float8Linear(
                MULTIPLE, MULTIPLE, bias=False, device="meta", config=replace(self._config, pad_inner_dim=pad)
            ).linear_mm_config
            for pad in (False, True)
        )

    def __call__(self, x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """The product ``[..., O]`` in the dtype of ``x``.

        Args:
            x: input, ``[..., I]``, not empty.
            weight_OI: weight, ``[O, I]``.
        """
        rows = x.numel() // x.shape[-1]
        products = self._padded if rows % MULTIPLE else self._plain
        y: torch.Tensor = self._apply(x, weight_OI.t(), products, self._config)
        return y


def layers_in_bf16(items: Iterable[ItemSpec], settings: Float8Settings) -> set[str]:
    """The layers of each stack (encoder, decoder, towers) that stay in the compute dtype.

    Args:
        items: the layer list.
        settings: number of first and last layers.
    """
    stacks: dict[str, list[str]] = {}
    for layer in dict.fromkeys(item.layer for item in items):
        if found := _LAYER.fullmatch(layer):
            stacks.setdefault(found[1], []).append(layer)
    excluded: set[str] = set()
    for layers in stacks.values():
        excluded |= {*layers[: settings.first_in_bf16], *layers[max(0, len(layers) - settings.last_in_bf16) :]}
    return excluded


def float8_items(items: Sequence[ItemSpec], settings: Float8Settings) -> set[str]:
    """Names of the items in the layers that have float8 products.

    Args:
        items: the layer list.
        settings: layers that are left out.
    """
    excluded = layers_in_bf16(items, settings)
    return {item.name for item in items if _LAYER.fullmatch(item.layer) and item.layer not in excluded}


def operand_bytes(module: nn.Module, rows: int) -> int:
    """Bytes of the float8 operands of an item's largest product and its gradients.

    Args:
        module: the item.
        rows: tokens of a microbatch.
    """
    sizes = (layer.weight.shape for layer in products_of(module))
    return max((rows * inputs + outputs * inputs + rows * outputs for outputs, inputs in sizes), default=0)


def products_of(module: nn.Module) -> list[PrunableLinear]:
    """The linear layers of attention and MLPs in an item, without those of routed experts."""
    found: list[PrunableLinear] = []
    for path, child in module.named_modules():
        if isinstance(child, SelfAttention | CrossAttention | FeedForward) and _EXPERTS not in path.split("."):
            found += [layer for layer in child.children() if isinstance(layer, PrunableLinear)]
    return found


class Float8Items:
    """Lets the items of a run multiply in float8.

    Args:
        settings: formats, scales, and layers that are left out.
        items: the layer list.
        device: device of this process.
    """

    def __init__(self, settings: Float8Settings, items: Sequence[ItemSpec], device: torch.device) -> None:
        self._names = float8_items(items, settings)
        self._product = Float8Product(settings, emulate=device.type != "cuda")

    def apply(self, name: str, module: nn.Module) -> nn.Module:
        """Set the products of an item in place, and return it.

        Args:
            name: name of the item.
            module: the item, or this process's part of it.
        """
        if name in self._names:
            for layer in products_of(module):
                layer.float8 = self._product
        return module
