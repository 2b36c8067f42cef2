"""Activation memory of an item from its forward to the end of its backward, without running it.

The item runs on fake tensors, which have shapes and dtypes but no memory. A dispatch mode counts every storage from the
operation that allocates it until its last reference is gone. The peak memory of a stage is computed from its items.
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

from ...models.aux_loss import with_losses
from ...models.families.multi_token import PREFIX
from ...models.layer_list import BoundaryShape, ItemOutput, ItemSpec, output_of
from ...optim.precision import cast_forward
from ...parallel.random_stream import ItemStream, drawing_from

ItemRunner = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ItemMemory:
    """Activation memory of one item for one microbatch, in bytes, without parameters and their gradients.

    Attributes:
        saved: saved from the forward to the backward, including the output.
        forward: peak during the forward.
        backward: peak during the backward, including what was saved.
    """

    saved: int
    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True)
class DataAssumptions:
    """Values that fake tensors do not have, and that determine shapes.

    Attributes:
        nonzero_fraction: fraction of elements that ``nonzero`` finds, 0 to 1.
        scalars: values that ``item()`` returns in turn, such as the number of tokens of each expert.
    """

    nonzero_fraction: float | None = None
    scalars: tuple[int, ...] = ()


NO_ASSUMPTIONS = DataAssumptions()


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate, while they are referenced."""

    def __init__(self, assumptions: DataAssumptions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._known: set[int] = set()
        self._nonzero_fraction = assumptions.nonzero_fraction
        self._scalars = cycle(assumptions.scalars) if assumptions.scalars else None

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        # The size of these results depends on values, which fake tensors lack: the assumptions stand in for them.
        if self._nonzero_fraction is not None and func is torch.ops.aten.nonzero.default:
            rows = max(round(self._nonzero_fraction * args[0].numel()), 1)
            return torch.empty(rows, args[0].dim(), dtype=torch.int64, device=args[0].device)
        if self._scalars is not None and func is torch.ops.aten._local_scalar_dense.default:
            return next(self._scalars)
        return func(*args, **(kwargs or {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do not count the storages of ``tensors``."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.current += size
        self.peak = max(self.peak, self.current)
        # The weak reference does not keep the storage alive, and is called when the last tensor on it is gone.
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.current -= size


def item_memory(
    item: ItemSpec,
    module: nn.Module,
    boundary: BoundaryShape,
    inputs: Mapping[str, torch.Tensor],
    run: ItemRunner,
    assumptions: DataAssumptions = NO_ASSUMPTIONS,
) -> ItemMemory | None:
    """The activation memory of one item.

    Args:
        item: entry of the layer list.
        module: the item, on any device.
        boundary: shapes and dtype of the values that the item reads from other items.
        inputs: tensors of the batch; only shapes and dtypes are used.
        run: calls the item, with ``checkpoint`` where the run recomputes activations.
        assumptions: values that determine shapes.

    Returns:
        The memory; None where it depends on values that ``assumptions`` does not have.
    """
    try:
        # Fake tensors have shapes and storages without memory or arithmetic; autograd runs on them as on real ones.
        with FakeTensorMode():
            return _on_fake_tensors(item, module, boundary, inputs, run, assumptions)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None


def _on_fake_tensors(
    item: ItemSpec,
    module: nn.Module,
    boundary: BoundaryShape,
    inputs: Mapping[str, torch.Tensor],
    run: ItemRunner,
    assumptions: DataAssumptions,
) -> ItemMemory:
    live = _LiveStorages(assumptions)
    used: dict[str, torch.Tensor] = {}
    others: list[torch.Tensor] = []  # keeps references, so that no new storage has their address
    for name, parameter in module.train().named_parameters():
        master = torch.empty(parameter.shape, device="cpu", requires_grad=parameter.requires_grad)
        others.append(master)
        if parameter.requires_grad:
            # As from the second microbatch: gradients exist and are accumulated.
            master.grad = torch.empty_like(master)
            others.append(master.grad)
        used[name] = master
        if boundary.dtype != torch.float32:
            copy = torch.empty(parameter.shape, dtype=boundary.dtype, device="cpu")
            others.append(copy)
            used[name] = cast_forward(master, copy)
    # Biases of experts, which have no gradient.
    for name, buffer in module.named_buffers():
        used[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
        others.append(used[name])
    read = [torch.empty(boundary.shapes[n], dtype=boundary.dtype, device="cpu", requires_grad=True) for n in item.reads]
    batch = [torch.empty(inputs[name].shape, dtype=inputs[name].dtype, device="cpu") for name in item.inputs]
    # Parameters, gradients and what other items pass on belong to no item's activations.
    key = torch.zeros(2, dtype=torch.int64, device="cpu")
    live.ignore([*others, *read, *batch, key])

    def call(*arguments: torch.Tensor) -> Any:
        # As a stage runs it: dropout then saves a mask of bytes.
        with drawing_from(ItemStream(key)):
            return functional_call(module, used, arguments)

    with live:
        found = run(call, *read, *batch)
        # A depth of multi-token prediction passes its input on: its loss alone refers to what it saves.
        losses = found.losses.values() if isinstance(found, ItemOutput) and item.name.startswith(f"{PREFIX}.") else ()
        result = with_losses(output_of(found), losses, 1.0)
        del found, losses
        # ``result`` is still referenced: the saved bytes include the output.
        saved, forward = live.current, live.peak
        live.peak = live.current
        try:
            # The gradient of the output is from the next item. The front of a model with adapters has none.
            if result.requires_grad:
                result.backward(torch.ones_like(result))
        except DataDependentOutputException:
            # The chunked loss computed its gradients in the forward; the backward only returns them.
            live.peak = max(live.peak, saved)
    return ItemMemory(saved=saved, forward=forward, backward=live.peak)


def transient_bytes(items: Sequence[ItemMemory]) -> int:
    """The peak memory of a stage during a pass, above what all its items save.

    Args:
        items: items of the stage, in order.

    Returns:
        Bytes.
    """
    saved = sum(item.saved for item in items)
    saved_before = peak = 0
    for item in items:
        peak = max(peak, saved_before + item.forward, saved_before + item.backward)
        saved_before += item.saved
    return peak - saved


def single_bytes(items: Sequence[ItemMemory], gradient_bytes: Sequence[int]) -> int:
    """The peak memory of a model, without parameters and moments, in a step of one microbatch.

    The backward allocates gradients while it frees activations.

    Args:
        items: all items of the model, in order.
        gradient_bytes: size of the gradients of each item.

    Returns:
        Bytes.
    """
    saved_before = peak = 0
    gradients_after = sum(gradient_bytes)
    for item, gradients in zip(items, gradient_bytes, strict=True):
        peak = max(peak, saved_before + item.forward, saved_before + item.backward + gradients_after - gradients)
        gradients_after -= gradients
        saved_before += item.saved
    return max(peak, sum(gradient_bytes))
