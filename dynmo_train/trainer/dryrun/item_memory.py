"""What an item holds while it runs, from its forward to the end of its backward, told without running it.

The item runs on fake tensors, which have shapes and types and no memory; every storage is counted from the operation
that makes it to the moment when nothing refers to it any more. What a stage holds at its highest follows from that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...models.layer_list import BoundaryShape, ItemSpec, output_of
from ...optim.precision import cast_forward

Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ItemMemory:
    """Bytes of one item and one microbatch, without its parameters and their gradients.

    Attributes:
        kept: from its forward to its backward, its output among them.
        forward: at the highest within its forward.
        backward: at the highest within its backward, what it kept among them.
    """

    kept: int
    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True)
class DataAssumptions:
    """What is taken for granted of values that there are none of.

    Attributes:
        counted: of the tokens asked for by ``nonzero``, the share that is not zero.
        places: numbers read one after the other, again and again: the tokens of each expert.
    """

    counted: float | None = None
    places: tuple[int, ...] = ()


NOTHING = DataAssumptions()


class _Live(TorchDispatchMode):
    """Counts the storages that operations make, as long as they live."""

    def __init__(self, expected: DataAssumptions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.highest = 0
        self._known: set[int] = set()
        self._counted, self._places = expected.counted, cycle(expected.places) if expected.places else None

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._counted is not None and func is torch.ops.aten.nonzero.default:
            rows = max(round(self._counted * args[0].numel()), 1)
            return torch.empty(rows, args[0].dim(), dtype=torch.int64, device=args[0].device)
        if self._places is not None and func is torch.ops.aten.bincount.default:
            return torch.empty(args[2], dtype=torch.int64, device=args[0].device)
        if self._places is not None and func is torch.ops.aten._local_scalar_dense.default:
            return next(self._places)
        return func(*args, **(kwargs or {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave these out: somebody else holds them."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.highest = max(self.highest, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def item_memory(
    item: ItemSpec,
    module: nn.Module,
    boundary: BoundaryShape,
    inputs: Mapping[str, torch.Tensor],
    run: Run,
    expected: DataAssumptions = NOTHING,
) -> ItemMemory | None:
    """What one item holds; None where that depends on the values of tensors, and ``expected`` does not tell them.

    Args:
        module: the item, on any device.
        inputs: the batch's tensors, of which shapes and types are taken.
        run: calls the item with its arguments, and keeps what the run keeps (``checkpoint`` where it recomputes).
        expected: what is taken for granted of their values.
    """
    try:
        with FakeTensorMode():
            return _on_fake_tensors(item, module, boundary, inputs, run, expected)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None


def _on_fake_tensors(
    item: ItemSpec,
    module: nn.Module,
    boundary: BoundaryShape,
    inputs: Mapping[str, torch.Tensor],
    run: Run,
    expected: DataAssumptions,
) -> ItemMemory:
    live = _Live(expected)
    used: dict[str, torch.Tensor] = {}
    others: list[torch.Tensor] = []  # alive, so that nothing else takes their place
    for name, parameter in module.train().named_parameters():
        master = torch.empty(parameter.shape, device="cpu", requires_grad=True)
        # As from the second microbatch on: gradients are there, and are added to.
        master.grad = torch.empty_like(master)
        others += [master, master.grad]
        used[name] = master
        if boundary.dtype != torch.float32:
            copy = torch.empty(parameter.shape, dtype=boundary.dtype, device="cpu")
            others.append(copy)
            used[name] = cast_forward(master, copy)
    read = [torch.empty(boundary.shapes[n], dtype=boundary.dtype, device="cpu", requires_grad=True) for n in item.reads]
    given = [torch.empty(inputs[name].shape, dtype=inputs[name].dtype, device="cpu") for name in item.inputs]
    live.ignore([*others, *read, *given])
    with live:
        result = output_of(run(lambda *arguments: functional_call(module, used, arguments), *read, *given))
        kept, forward = live.now, live.highest
        live.highest = live.now
        try:
            # The gradient of the output comes from the item behind.
            result.backward(torch.ones_like(result))
        except DataDependentOutputException:
            # The loss in pieces has its gradients ready; they are handed on.
            live.highest = max(live.highest, kept)
    return ItemMemory(kept=kept, forward=forward, backward=live.highest)


def transient_bytes(items: Sequence[ItemMemory]) -> int:
    """What a stage holds at its highest above what all of its items keep, while one of them runs."""
    kept = sum(item.kept for item in items)
    before = highest = 0
    for item in items:
        highest = max(highest, before + item.forward, before + item.backward)
        before += item.kept
    return highest - kept


def single_bytes(items: Sequence[ItemMemory], gradient_bytes: Sequence[int]) -> int:
    """What a model holds at its highest beside parameters and moments where a step is one microbatch.

    Gradients come as activations go.
    """
    before = highest = 0
    behind = sum(gradient_bytes)
    for item, gradients in zip(items, gradient_bytes, strict=True):
        highest = max(highest, before + item.forward, before + item.backward + behind - gradients)
        behind -= gradients
        before += item.kept
    return max(highest, sum(gradient_bytes))
