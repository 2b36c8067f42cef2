"""The items of one pipeline stage, run in order.

:class:`StageModule` is what a stage computes; ``pipeline_stage.py`` sends and receives what crosses its boundaries.

    values from the previous stage -> item, item, ... -> values for the next stage; losses and metrics on the side

Each item draws its own random numbers, a function of (seed, step, microbatch, item). A frozen prefix of the layer list
runs without gradient, wherever the boundaries are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..models.aux_loss import with_losses
from ..models.compiled import PRODUCTS, is_compiled
from ..models.experts.moe import counting_layers
from ..models.layer_list import ItemOutput, ItemSpec, output_of
from ..models.vocabulary.head import Head
from ..optim.precision import ComputeCopies
from ..parallel.random_stream import ItemStream, StreamKeys, drawing_from, draws_from_generator
from ..parallel.seeding import seeded
from .frozen_cache import FrozenPrefixCache
from .graphed_items import StageGraphs
from .profiler import LayerProfiler

SAMPLES = "samples"


class StageModule(nn.Module):
    """Runs items in order: gives them their random numbers, marks their boundaries, measures their costs.

    Args:
        items: Name -> module, in list order; may be empty.
        specs: Specifications of the items, in the same order.
        input_names: Names of the values from the previous stage; none at the first stage.
        output_names: Names of the values for the next stage; at the last stage the loss.
        frozen: Number of first items that belong to the frozen prefix of the whole list and run without gradient.
        seed: Seed of the run.
        recompute: Keep only the inputs of each item, and run it again in the backward.
        selective: With ``recompute``: also keep the results of matrix products.
        profiler: Measures the items.
        device: Device of the items.
        dtype: dtype of the arithmetic.
        number: Index of the stage.
        cache: Cache of the outputs of the frozen items, which then run without dropout.
        captures_graphs: Whether items are captured in CUDA graphs where that is possible.

    Attributes:
        graphs: CUDA graphs of the items.
        looked_up: Values that shards look up -> what returns them for a microbatch of the step.
    """

    def __init__(
        self,
        items: Mapping[str, nn.Module],
        specs: Sequence[ItemSpec],
        *,
        input_names: tuple[str, ...],
        output_names: tuple[str, ...],
        frozen: int,
        seed: int,
        recompute: bool,
        selective: bool = False,
        profiler: LayerProfiler,
        device: torch.device,
        dtype: torch.dtype,
        number: int = 0,
        cache: FrozenPrefixCache | None = None,
        captures_graphs: bool = False,
    ) -> None:
        super().__init__()
        self.number, self.cache = number, cache if frozen else None
        self.names, self.specs = tuple(items), tuple(specs)
        self.layers = nn.ModuleList(items.values())
        self.input_names, self.output_names = input_names, output_names
        self.batch_names = tuple(dict.fromkeys(name for spec in specs for name in spec.inputs))
        self.frozen, self.seed, self.recompute, self.selective = frozen, seed, recompute, selective
        self._recomputing_graphs = {name for name, layer in items.items() if selective and is_compiled(layer)}
        self.step, self.loss_scale, self.first_microbatch = 0, 1.0, 0
        self.looked_up: dict[str, Callable[[int], torch.Tensor]] = {}
        self.profiler, self.device = profiler, device
        self._heads = [part for layer in self.layers for part in layer.modules() if isinstance(part, Head)]
        self._routed = {name: counting_layers(layer) for name, layer in items.items()}
        self._keys = StreamKeys(seed, self.names, device)
        # By name: an item that draws from torch's generator, which is seeded on the host before each of its runs.
        self._seeds_generator = {name: draws_from_generator(layer) for name, layer in items.items()}
        self.metrics: dict[str, dict[str, list[torch.Tensor]]] = {}
        # Items that FSDP2 shards (ZeRO) cast their parameters themselves.
        casts = dtype != torch.float32 and not any(isinstance(layer, FSDPModule) for layer in self.layers)
        self._copies = [ComputeCopies(each, dtype, is_static=captures_graphs) for each in self.layers] if casts else []
        copied = [copies.parameters for copies in self._copies] or None
        self.graphs = StageGraphs(specs, list(self.layers), frozen, device, copied, is_on=captures_graphs)

    def begin_step(
        self,
        inputs: Mapping[str, torch.Tensor],
        step: int,
        loss_scale: float,
        microbatches: range,
        *,
        training: bool,
    ) -> None:
        """Prepare for the first microbatch of a step.

        Args:
            inputs: Batch of the step, tensors ``[samples, ...]`` on the CPU. Items with a method ``prepare_batch`` read
                sizes from it that would otherwise have to be copied from the device.
            step: Optimizer step, from 1.
            loss_scale: Factor of a microbatch's loss in the backward.
            microbatches: Global microbatch indices of this replica.
            training: False evaluates, without dropout.
        """
        self.train(training)
        if self.cache is not None:
            for layer in self.layers[: self.frozen]:
                layer.eval()
        for layer in self.layers:
            if (prepare_batch := getattr(layer, "prepare_batch", None)) is not None:
                prepare_batch(inputs)
        self.step, self.loss_scale = step, loss_scale
        for head in self._heads:
            head.loss_factor = loss_scale
        for routed in (each for layers in self._routed.values() for each in layers):
            routed.counts.begin_step(microbatches.start)
        self.first_microbatch = self.graphs.first_microbatch = microbatches.start
        self.metrics.clear()
        self._keys.begin_step(step, microbatches)
        for copies in self._copies:
            copies.refresh()

    def forward(self, *received: torch.Tensor, microbatch: torch.Tensor, **batch: torch.Tensor) -> Any:
        """Run one microbatch.

        Args:
            received: The values of ``input_names``, each in its shape of the ``BoundaryShape``.
            microbatch: Global microbatch index, int64 ``[1]``, on CPU.
            batch: The microbatch's part of the batch's tensors, at least those in ``batch_names``.

        Returns:
            The value of ``output_names``, or a tuple of several; at the last stage the loss, a scalar.
        """
        # The index is on the CPU: reading it does not wait for the device.
        index = int(microbatch)
        # A schedule receives into the same tensors in every step, and items keep on a value what they derive from it.
        values = {name: each.view_as(each) for name, each in zip(self.input_names, received, strict=True)}
        for name, look_up in self.looked_up.items():
            values[name] = look_up(index - self.first_microbatch)
        items: Sequence[Callable[..., Any]] = self._copies or list(self.layers)
        keys = batch.pop(SAMPLES, None) if self.cache is not None else None
        cached = self.cache.get(self.number, keys) if self.cache is not None and keys is not None else None
        for position, (spec, module) in enumerate(zip(self.specs, items, strict=True)):
            frozen = position < self.frozen
            if frozen and cached is not None:
                values.update(cached)
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen), self.profiler.forward(spec.name):
                read = [values[name].detach() if frozen else values[name] for name in spec.reads]
                read[:1] = [self.profiler.mark(each, position) for each in read[:1]]
                result = self._run(spec.name, module, index, *read, *(batch[name] for name in spec.inputs))
            values[spec.writes] = output_of(result)
            if isinstance(result, ItemOutput):
                values[spec.writes] = with_losses(result.output, result.losses.values(), self.loss_scale)
                values.update(result.side)
                self._record_metrics(spec.name, result.metrics)
            if self.profiler.observer is not None and self.training:
                self.profiler.observer.activation(spec.name, index, values[spec.writes])
            # Once the last frozen item has run, all values that the frozen items write are final.
            if position == self.frozen - 1 and keys is not None:
                self._cache_outputs(keys, values)
        outputs = tuple(_without_view(values[name]) for name in self.output_names)
        return outputs[0] if len(outputs) == 1 else outputs

    def _cache_outputs(self, keys: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Cache what the frozen items of this stage have written."""
        if self.cache is not None:
            written = dict.fromkeys(spec.writes for spec in self.specs[: self.frozen])
            self.cache.put(self.number, keys, {name: values[name].detach() for name in written})

    def _parameter_pointers(self) -> set[int]:
        """Return the data pointers of the parameters that are unsharded now."""
        return {p.untyped_storage().data_ptr() for p in self.parameters() if not isinstance(p, DTensor)}

    def _record_metrics(self, item: str, metrics: Mapping[str, torch.Tensor]) -> None:
        of_item = self.metrics.setdefault(item, {})
        for name, value in metrics.items():
            of_item.setdefault(name, []).append(value.detach())

    def _run(
        self, name: str, module: Callable[..., Any], index: int, *arguments: torch.Tensor
    ) -> torch.Tensor | ItemOutput:
        seeds_generator = self._seeds_generator[name]
        key = self._keys.key(index, self.names.index(name))

        def run(*inputs: Any) -> torch.Tensor | ItemOutput:
            # Here, for recomputations, too: they run in the backward, when later microbatches have run.
            for routed in self._routed[name]:
                routed.counts.microbatch = index
            generator = seeded(self.device, self.seed, self.step, index, name) if seeds_generator else nullcontext()
            with drawing_from(ItemStream(key, seeds_generator=seeds_generator)), generator:
                output: torch.Tensor | ItemOutput = module(*inputs)
            return output

        # No graph is recorded (frozen prefix, evaluation): nothing is saved that could be recomputed or counted.
        if not torch.is_grad_enabled():
            return run(*arguments)
        if self.training and name in self.graphs:
            self.profiler.set_activation_bytes(name, self.graphs.activation_bytes(name))
            return self.graphs.run(name, index, key, *arguments)
        if self.recompute and name not in self._recomputing_graphs:
            saved_bytes = [sum(each.nbytes for each in arguments)]
            # The item draws by its own key, so torch need not save and restore the generators.
            more: dict[str, Any] = {"context_fn": partial(save_products, saved_bytes)} if self.selective else {}
            recomputed: torch.Tensor | ItemOutput = checkpoint(
                run, *arguments, use_reentrant=False, preserve_rng_state=False, **more
            )
            self.profiler.set_activation_bytes(name, sum(saved_bytes))
            return recomputed
        with self.profiler.saved_tensors(name, self._parameter_pointers):
            return run(*arguments)


class _DetachFromView(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _without_view(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a tensor that is not a view: torch's split backward detaches outputs in place, not views.

    It detaches the outputs without gradient as well. What passes through the stage, such as the tokens that have exited
    or a frozen encoder's stream, is the view that ``forward`` made of it.
    """
    if not x._is_view():
        return x
    if not x.requires_grad:
        return x.detach()
    detached: torch.Tensor = _DetachFromView.apply(x)  # type: ignore[no-untyped-call]
    return detached


def save_products(saved_bytes: list[int]) -> Any:
    """Return the contexts of a checkpoint that saves the results of matrix products and recomputes the rest.

    Args:
        saved_bytes: The bytes of each saved result are appended to it.
    """

    def policy(ctx: Any, operation: Any, *inputs: Any, **_: Any) -> CheckpointPolicy:
        if operation not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not ctx.is_recompute:
            # The operands: mm(left, right), addmm(bias, left, right), _grouped_mm(left, right, offsets).
            left, right = inputs[1:3] if operation is torch.ops.aten.addmm.default else inputs[:2]
            saved_bytes.append(left.shape[0] * right.shape[-1] * left.element_size())
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)
