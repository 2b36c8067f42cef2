"""CUDA graphs of items: the forward and the backward of a layer are each launched as one (``--cuda-graph``).

torch captures the kernels of an item once, with ``torch.cuda.make_graphed_callables``, and replays them on the same
memory. What follows from that:

* A graph has the memory of one microbatch, from its forward to its backward. So a stage captures each item once for
  every microbatch that its schedule has in flight (a *slot*), and a microbatch occupies a slot until its backward ends.
* The items of a slot share a memory pool: their forwards run in the order of capture, their backwards in reverse. Slots
  do not share pools, because the schedule interleaves them.
* A replay overwrites the gradients of the last one of its slot. A gradient that outlives the backward is copied: that
  of a parameter without ``.grad``, and that of a value from another stage or from an item that is not captured, which
  may pass it on as it is: an embedding without dropout does.
* Kernels, shapes and addresses are those of the capture. The pipeline is rebuilt, and with it all graphs, after each
  migration, freeze and change of the batch's shape; :func:`capture_obstacle` names what cannot be captured at all.
* Random numbers come from the item's key, an input of the graph (``random_stream.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .._common.errors import UsageError
from ..models.attention.cross_attention import CrossAttention
from ..models.attention.self_attention import SelfAttention
from ..models.layer_list import BoundaryShape, ItemSpec
from ..models.layers.feed_forward import Mlp
from ..models.layers.linear import PrunableLinear
from ..parallel.random_stream import ItemStream, drawing_from, draws_from_generator

CAPTURED = (SelfAttention, CrossAttention, Mlp)
WARM_UP_CALLS = 3
KEY_WORDS = 2
Item = Callable[..., torch.Tensor]


def check_graph_device(device: str) -> None:
    """Check that the device has CUDA graphs.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        UsageError: it has none.
    """
    if device != "cuda":
        raise UsageError(f"--cuda-graph requires a GPU, and this process runs on {device}; leave it out")


def capture_obstacle(module: nn.Module, *, is_frozen: bool) -> str | None:
    """Return why an item cannot be captured in a CUDA graph; None if it can.

    Args:
        module: The item.
        is_frozen: Whether it runs without gradient.
    """
    # Not ``isinstance``: subclasses, such as items that run on active tokens, have shapes that depend on the data.
    if type(module) not in CAPTURED or "forward" in vars(module):
        return "only attention and MLP blocks of static shapes are captured"
    if is_frozen:
        return "it is frozen, and runs without a backward"
    if isinstance(module, SelfAttention) and module.sparse is not None:
        return "hashed attention reads the number of its blocks"
    if draws_from_generator(module):
        return "attention dropout draws from torch's generator"
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            return "its modules have hooks"
        if isinstance(part, PrunableLinear):
            if part.mask is not None or not part.is_dense:
                return "it is pruned, and its sparse form changes with the mask"
            if part.enter is not None or part.leave is not None:
                return "tensor-parallel collectives run within it"
    return None


class _CopyGradients(torch.autograd.Function):
    """The identity of some tensors; where a gradient outlives the backward of the microbatch, it is copied."""

    @staticmethod
    def forward(ctx: Any, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.num_inputs, ctx.tensors = num_inputs, tensors
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The gradient of an input is sent to another stage, while this one continues. That of a parameter is stored
        # where there is no ``.grad`` yet, and else added. The gradient of a copy in another dtype is cast.
        is_stored = (at < ctx.num_inputs or (each.is_leaf and each.grad is None) for at, each in enumerate(ctx.tensors))
        copies = (
            gradient.clone() if copy and gradient is not None else gradient
            for copy, gradient in zip(is_stored, grads, strict=True)
        )
        return None, *copies


@dataclass(frozen=True, kw_only=True)
class GraphedItem:
    """An item to capture.

    Attributes:
        module: The item.
        parameters: Returns name -> what it computes with, on the same memory in every step.
        samples: Tensors of the shape and dtype of its arguments, on the device.
        stage_inputs: Positions of the arguments that come from another stage, or from an item that is not captured.
    """

    module: nn.Module
    parameters: Callable[[], Mapping[str, torch.Tensor]]
    samples: tuple[torch.Tensor, ...]
    stage_inputs: tuple[int, ...] = ()

    def function(self, names: Sequence[str]) -> Item:
        """Return the item as a function of the key, its arguments and its parameters, tensors only.

        Args:
            names: Of the parameters, in their order.
        """
        num_arguments = len(self.samples)

        def run(key: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            parameters = dict(zip(names, tensors[num_arguments:], strict=True))
            with drawing_from(ItemStream(key)):
                output: torch.Tensor = functional_call(self.module, parameters, tensors[:num_arguments])
            return output

        return run


class GraphedStage:
    """The graphs of a stage's items.

    Args:
        items: Name -> item to capture, in list order.
        slots: Number of microbatches that are in flight at most.
        device: Device of the items.

    Attributes:
        activation_bytes: Name -> bytes that one microbatch saves for the backward of the item.
    """

    def __init__(self, items: Mapping[str, GraphedItem], slots: int, device: torch.device) -> None:
        self._items = items
        self.activation_bytes: dict[str, int] = {}
        self._graphs = [self._captured(device) for _ in range(slots)]
        self._free = list(reversed(range(slots)))
        self._slot_of: dict[int, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def _captured(self, device: torch.device) -> dict[str, Item]:
        """Capture all items for one microbatch."""
        functions, samples = [], []
        for name, item in self._items.items():
            parameters = item.parameters()
            # Of the same memory as what the calls pass, so that no replay copies a parameter.
            fixed = [each.detach().requires_grad_(each.requires_grad) for each in parameters.values()]
            key = torch.zeros(KEY_WORDS, dtype=torch.int64, device=device)
            function = item.function(tuple(parameters))
            arguments = [_static(each) for each in item.samples]
            if name not in self.activation_bytes:
                self.activation_bytes[name] = _saved_bytes(function, (key, *arguments, *fixed), fixed)
            functions.append(function)
            samples.append((key, *arguments, *fixed))
        graphed = make_graphed_callables(
            tuple(functions), tuple(samples), num_warmup_iters=WARM_UP_CALLS, allow_unused_input=True
        )
        return dict(zip(self._items, graphed, strict=True))

    def run(self, name: str, microbatch: int, key: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        """Run an item of a microbatch, which occupies a slot until :meth:`release`.

        Args:
            name: Name of the item.
            microbatch: Global microbatch index.
            key: Key of the item's random numbers, int64 ``[2]``.
            arguments: What the item reads.

        Raises:
            RuntimeError: More microbatches are in flight than there are slots, an error of the engine.
        """
        if microbatch not in self._slot_of:
            if not self._free:
                raise RuntimeError(f"microbatch {microbatch}: {len(self._graphs)} microbatches are in flight already")
            self._slot_of[microbatch] = self._free.pop()
        item = self._items[name]
        # Their gradients are buffers of the graph, which the next backward of the slot overwrites.
        parameters = tuple(item.parameters().values())
        inputs = [arguments[at] for at in item.stage_inputs]
        own = _CopyGradients.apply(len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
        replaced = dict(zip(item.stage_inputs, own, strict=False))
        read = [replaced.get(at, argument) for at, argument in enumerate(arguments)]
        return self._graphs[self._slot_of[microbatch]][name](key, *read, *own[len(inputs) :])

    def release(self, microbatch: int) -> None:
        """Free the slot of a microbatch whose backward has ended; no effect if it has none."""
        if (slot := self._slot_of.pop(microbatch, None)) is not None:
            self._free.append(slot)


class StageGraphs:
    """Which items of a stage are captured, and their graphs once they are.

    Args:
        specs: Specifications of the items, in list order.
        modules: The items, in the same order.
        frozen: Number of first items that run without gradient.
        device: Device of the items.
        parameters: For each item what returns the parameters that it computes with; None: its own.
        is_on: Whether items are captured at all.

    Attributes:
        obstacles: Item -> why it is not captured.
        first_microbatch: Global index of this replica's first microbatch in the step.
    """

    def __init__(
        self,
        specs: Sequence[ItemSpec],
        modules: Sequence[nn.Module],
        frozen: int,
        device: torch.device,
        parameters: Sequence[Callable[[], Mapping[str, torch.Tensor]]] | None,
        *,
        is_on: bool,
    ) -> None:
        self._specs, self._modules, self._device = specs, modules, device
        self._parameters = parameters or [partial(_parameters_of, module) for module in modules]
        self.first_microbatch, self._is_on = 0, is_on
        self.obstacles: dict[str, str] = {}
        for at, (spec, module) in enumerate(zip(specs, modules, strict=True) if is_on else ()):
            if (obstacle := capture_obstacle(module, is_frozen=at < frozen)) is not None:
                self.obstacles[spec.name] = obstacle
        self._graphs: GraphedStage | None = None

    def __contains__(self, name: str) -> bool:
        return self._graphs is not None and name not in self.obstacles

    def capture(self, boundary: BoundaryShape, inputs: Mapping[str, torch.Tensor], slots: int) -> None:
        """Capture the items before the first step; no effect later, or where none is to be captured.

        Args:
            boundary: Shapes of all values.
            inputs: Tensors of one microbatch by name, ``[samples, ...]``.
            slots: Number of microbatches of this stage that are in flight at most.
        """
        if self._graphs is not None or not self._is_on:
            return
        items: dict[str, GraphedItem] = {}
        written: set[str] = set()
        for spec, module, parameters in zip(self._specs, self._modules, self._parameters, strict=True):
            if spec.name not in self.obstacles:
                read = [torch.empty_like(boundary.empty(name), device=self._device) for name in spec.reads]
                items[spec.name] = GraphedItem(
                    module=module,
                    parameters=parameters,
                    samples=(*read, *(inputs[name].to(self._device) for name in spec.inputs)),
                    stage_inputs=tuple(at for at, name in enumerate(spec.reads) if name not in written),
                )
                written.add(spec.writes)
            else:
                written.discard(spec.writes)
        self._graphs = GraphedStage(items, slots if items else 0, self._device)

    def activation_bytes(self, name: str) -> int:
        """Return the bytes that one microbatch saves for the backward of an item."""
        return 0 if self._graphs is None else self._graphs.activation_bytes[name]

    def run(self, name: str, microbatch: int, key: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        """Run a captured item; see :meth:`GraphedStage.run`.

        Args:
            name: Name of the item.
            microbatch: Global microbatch index.
            key: Key of the item's random numbers, int64 ``[2]``.
            arguments: What the item reads, in the shapes of the boundary.

        Raises:
            RuntimeError: The items were not captured, an error of the engine.
        """
        if self._graphs is None:
            raise RuntimeError(f"{name}: the items of the stage were not captured")
        return self._graphs.run(name, microbatch, key, *arguments)

    def release(self, chunk: int) -> None:
        """Free the slot of a microbatch after its backward; ``chunk`` is its index in the step, from 0."""
        if self._graphs is not None:
            self._graphs.release(self.first_microbatch + chunk)


def _parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def _static(sample: torch.Tensor) -> torch.Tensor:
    # Ones: a mask of zeros leaves attention without any key. A gradient that nobody wants is computed and dropped.
    made = torch.ones_like(sample)
    return made.requires_grad_() if made.is_floating_point() else made


def _saved_bytes(function: Item, arguments: Sequence[torch.Tensor], ignored: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages that a call saves for its backward, without those of ``ignored``."""
    skipped = {each.untyped_storage().data_ptr() for each in ignored}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skipped:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*arguments)
    del output
    return sum(sizes.values())


def make_graphed_callables(
    functions: tuple[Item, ...], samples: tuple[tuple[torch.Tensor, ...], ...], **options: Any
) -> tuple[Item, ...]:
    """Capture functions with torch; tests replace it by static memory without a device.

    Args:
        functions: Functions of tensors.
        samples: Arguments of each, of any shape, which become the memory of the graphs.
        options: Of torch's function.
    """
    graphed: Any = torch.cuda.make_graphed_callables(functions, samples, **options)
    return tuple(graphed)


def most_in_flight(order: Sequence[tuple[int, str, int]], stage: int) -> int:
    """Return the maximum number of microbatches between forward and backward on a stage.

    Args:
        order: Operations of a rank in order, (stage, kind, microbatch); of torch's kinds, ``F``, ``B`` and ``W`` count.
        stage: Index of the stage.
    """
    now = most = 0
    for of_stage, kind, _ in order:
        if of_stage == stage:
            now += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            most = max(most, now)
    return most
