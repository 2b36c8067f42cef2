"""The layer list: what an item is, for all model families.

An item is the unit that is placed, measured, moved and checkpointed. It is a module with a name for life, the values
that it reads and the one that it writes. What crosses a stage boundary follows from these declarations:

    items        embedding      layers.0.attention   layers.0.mlp   ...   head
    inputs       ids                                                      labels
    reads        -              hidden               hidden               hidden
    writes       hidden         hidden               hidden               loss
                           boundary: live_before(items, index) = (hidden,)

Shapes in names: B samples of a microbatch, T tokens, D model width, O and I rows and columns of a weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import nn

from .layers.linear import PrunableLinear

HIDDEN = "hidden"
LOSS = "loss"
ENDS = ("embedding", "head")
# The buffer of a router with a bias for each expert.
EXPERT_BIAS = "expert_bias"
SUBLAYERS = ("attention", "cross_attention", "mlp")


@dataclass(frozen=True, kw_only=True)
class ItemSpec:
    """One item of the layer list, at the finest granularity.

    An item's module is called with the values that it reads and then with its inputs, in this order, and returns the
    value that it writes, or that and metrics as ``ItemOutput``.

    Attributes:
        name: unique and permanent; names of parameters extend it (``layers.7.mlp`` has ``layers.7.mlp.fc1.weight``).
        layer: the layer that it is a part of (``layers.7``).
        kind: ``embedding``, ``attention``, ``cross_attention``, ``mlp``, ``head``, or ``layer`` for anything else.
        cut_before: whether a stage may begin with this item.
        tied_to: the item that owns a weight that this one shares, or None.
        reads: names of the values of earlier items that it reads; it transforms the first one.
        writes: name of its value; a later item that writes the same name overwrites it.
        inputs: names of the batch tensors that it reads.
        metrics: names and lengths of the metrics that it reports for each microbatch.
        side: names of further values, without gradient, that it writes as ``ItemOutput.side``.
    """

    name: str
    layer: str
    kind: str
    cut_before: bool
    tied_to: str | None = None
    reads: tuple[str, ...] = (HIDDEN,)
    writes: str = HIDDEN
    inputs: tuple[str, ...] = ()
    metrics: tuple[tuple[str, int], ...] = ()
    side: tuple[str, ...] = ()


class ItemOutput(NamedTuple):
    """The return value of an item that has metrics, losses or further values.

    Attributes:
        output: its value, ``[...]``.
        metrics: by name, scalars or vectors.
        losses: weighted scalars that are added to the loss of the microbatch. Their gradient enters at the item's
            output, so the item depends on neither the number of microbatches nor the loss scale.
        side: further values, without gradient.
    """

    output: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = MappingProxyType({})
    losses: Mapping[str, torch.Tensor] = MappingProxyType({})
    side: Mapping[str, torch.Tensor] = MappingProxyType({})


def output_of(result: torch.Tensor | ItemOutput) -> torch.Tensor:
    """An item's value ``[...]``, without its metrics: ``result`` itself where it is a tensor."""
    return result.output if isinstance(result, ItemOutput) else result


@dataclass(frozen=True, kw_only=True)
class BoundaryShape:
    """The static shape of every value that may cross a stage boundary, such as ``hidden: (B, T, D)``.

    ``dtype`` is the compute type; a loss, the value without dimensions, is always float32.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype = torch.float32

    @classmethod
    def hidden(cls, *, batch: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> BoundaryShape:
        """The boundary of a model with one residual stream ``[B, T, D]``.

        Args:
            batch: samples of a microbatch B.
            tokens: tokens of a sample T.
            width: model width D.
            dtype: compute dtype.
        """
        return cls(shapes={HIDDEN: (batch, tokens, width), LOSS: ()}, dtype=dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a sample, in a model with one stream."""
        return self.shapes[HIDDEN][1]

    def with_tokens(self, tokens: int) -> BoundaryShape:
        """The boundary for samples of ``tokens`` tokens, in a model with one stream."""
        shapes = {name: (s[0], tokens, *s[2:]) if len(s) > 1 else s for name, s in self.shapes.items()}
        return replace(self, shapes=shapes)

    def cut_along_tokens(self, parts: int) -> BoundaryShape:
        """The boundary with streams ``[B, T, D]`` split along the tokens over ``parts`` ranks."""
        cut = {name: (s[0], s[1] // parts, *s[2:]) if len(s) == 3 else s for name, s in self.shapes.items()}
        return replace(self, shapes=cut)

    def empty(self, name: str) -> torch.Tensor:
        """The named value on the meta device."""
        shape = self.shapes[name]
        return torch.empty(shape, device="meta", dtype=self.dtype if shape else torch.float32)

    def num_bytes(self, names: Iterable[str]) -> int:
        """Total bytes of the named values."""
        values = [self.empty(name) for name in names]
        return sum(value.numel() * value.element_size() for value in values)


def live_before(items: Sequence[ItemSpec], index: int) -> tuple[str, ...]:
    """The values that cross a boundary before item ``index``: written before it, and read by it or later items.

    After the last item it is the value that the last item writes.

    Args:
        items: the layer list.
        index: index of an item, or the number of items.

    Returns:
        Names of the values, in list order; send and receive of a boundary follow this order.
    """
    if index == len(items):
        return (items[-1].writes,)
    # A dict, not a set: both ends of a boundary must send and receive the values in one order.
    written = dict.fromkeys(name for item in items[:index] for name in (item.writes, *item.side))
    overwritten: set[str] = set()
    needed: set[str] = set()
    for item in items[index:]:
        # A value that is overwritten before it is read need not cross the boundary.
        needed.update(name for name in item.reads if name not in overwritten)
        overwritten.update((item.writes, *item.side))
    return tuple(name for name in written if name in needed)


def train_before(items: Sequence[ItemSpec], index: int, frozen: int) -> dict[str, bool]:
    """Value written before item ``index`` -> whether its gradient is needed, with the first ``frozen`` items frozen.

    Args:
        items: the layer list.
        index: index of an item.
        frozen: number of items at the front that do not train.
    """
    # A later item overwrites an earlier entry: behind the frozen prefix the same stream trains.
    trains = {item.writes: position >= frozen for position, item in enumerate(items[:index])}
    return trains | dict.fromkeys((name for item in items[:index] for name in item.side), False)


# By name, not by module: masks, moments and stored tensors are split by the name of their parameter.
CUT_FIRST = ("qkv", "query", "key_value", "fc1", "gate", "up")
CUT_LAST = ("dense.weight", "fc2.weight", "relative.weight")
CUT_ROWS = ("word.weight", "head.weight", "head.bias", ".sinks")


def split_dim(parameter: str) -> int | None:
    """The dimension along which tensor parallelism splits a parameter, by its name; None where it is replicated.

    Attention heads, MLP columns and vocabulary rows are split. Norms, positions, routers, the biases of row-parallel
    layers, and the layers of a head before its projection are replicated.
    """
    owner, _, kind = parameter.rpartition(".")
    if parameter.endswith(CUT_ROWS) or (owner.endswith(CUT_FIRST) and kind in ("weight", "bias")):
        return 0
    return 1 if parameter.endswith(CUT_LAST) and not parameter.startswith("head.") else None


def is_of_heads(parameter: str) -> bool:
    """Whether a parameter is shared by the heads of an attention, by its name: the norms of queries and keys."""
    return parameter.rpartition(".")[0].endswith((".query_norm", ".key_norm"))


class ModelFamily(Protocol):
    """The interface of a model family: a pure description, and a builder of single items."""

    @property
    def items(self) -> tuple[ItemSpec, ...]:
        """The layer list, in order."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Parameter that is a copy -> parameter that owns the value."""

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item with its initial weights, which depend on the seed and the name alone."""

    def split_dim(self, parameter: str) -> int | None:
        """The dimension along which tensor parallelism splits a parameter, by its global name; None: replicated.

        A linear layer split along 0 is column-parallel, along 1 row-parallel.
        """

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""


def masks_of(name: str, module: nn.Module) -> dict[str, PrunableLinear]:
    """The prunable weights of an item: global parameter name -> its layer, in module order."""
    return {
        f"{name}.{child}.weight": layer for child, layer in module.named_modules() if isinstance(layer, PrunableLinear)
    }


def expert_biases_of(name: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """The biases of an item's routers, float32 ``[E]``, by global name: ``layers.7.mlp.router.expert_bias``."""
    buffers = module.named_buffers()
    return {f"{name}.{child}": bias for child, bias in buffers if child.rpartition(".")[2] == EXPERT_BIAS}


def parameters_of(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an item by global name, in module order."""
    return {f"{name}.{child}": parameter for child, parameter in module.named_parameters()}


def has_vocabulary_rows(parameter_name: str) -> bool:
    """Whether a parameter has one row per token id, by its global name: word tables, the head's weight and bias.

    These rows are padded to a multiple of the tensor-parallel size. Rows of padding are always zero: no id reads them,
    they take no part in a loss, and zero rows stay zero under Adam. So checkpoints do not store them.
    """
    return re.search(r"(^|\.)(embedding\.word\.weight|head\.(weight|bias))$", parameter_name) is not None


def is_embedding_or_output(parameter_name: str) -> bool:
    """Whether a parameter is a word table or the output layer's weight, by its global name.

    As in Megatron, these have the decoupled learning rate. A tied copy has it with its owner.
    """
    return has_vocabulary_rows(parameter_name) and not parameter_name.endswith(".bias")


def vocabulary_rows(family: ModelFamily, *, padded: bool = False) -> int:
    """The vocabulary size of a family, or with ``padded`` the rows of its tables on this layout.

    Raises:
        TypeError: the family's manifest has no vocabulary size.
    """
    rows = family.manifest()["padded_vocab_size" if padded else "vocab_size"]
    if not isinstance(rows, int):
        raise TypeError(f"{type(family).__name__} states no vocabulary size: {rows!r}")
    return rows
