"""A pipeline stage over some items of the layer list: one subclass of torch's ``PipelineStage``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..models.aux_loss import with_losses
from ..models.layer_list import BoundaryShape, ItemOutput, ItemSpec, output_of
from ..optim.compression.boundary import BoundaryCodec
from ..optim.precision import ComputeCopies
from ..parallel.fsdp import accumulate_sharded_grads
from ..parallel.seeding import seeded
from .frozen_cache import FrozenPrefixCache
from .profiler import LayerProfiler

SAMPLES = "samples"


class StageModule(nn.Module):
    """Runs items in order: each with its own random numbers, its boundaries marked, its costs measured.

    Args:
        items: name -> module, in list order; may be empty.
        specs: what each of them reads, writes and needs of the batch, in the same order.
        enters: names of the values that come from the stage before; none at the first.
        leaves: names of the values that this stage passes on; at the last the loss.
        frozen: how many of the first items belong to the frozen front of the whole list: they run without gradient.
        seed: of the run.
        recompute: whether an item keeps its input alone and runs again in the backward.
        selective: whether it keeps the results of its matrix products as well, and does not compute those again.
        dtype: the type of the arithmetic.
        number: of the stage.
        front: keeps what the frozen items gave; they run without dropout then.
        device: where the items live.
    """

    def __init__(
        self,
        items: Mapping[str, nn.Module],
        specs: Sequence[ItemSpec],
        *,
        enters: tuple[str, ...],
        leaves: tuple[str, ...],
        frozen: int,
        seed: int,
        recompute: bool,
        selective: bool = False,
        profiler: LayerProfiler,
        device: torch.device,
        dtype: torch.dtype,
        number: int = 0,
        front: FrozenPrefixCache | None = None,
    ) -> None:
        super().__init__()
        self.number, self.front = number, front if frozen else None
        self.names, self.specs = tuple(items), tuple(specs)
        self.layers = nn.ModuleList(items.values())
        self.enters, self.leaves = enters, leaves
        self.inputs = tuple(dict.fromkeys(name for spec in specs for name in spec.inputs))
        self.frozen, self.seed, self.recompute, self.selective = frozen, seed, recompute, selective
        self.step, self.loss_scale = 0, 1.0
        self.profiler, self.device = profiler, device
        self.metrics: dict[str, dict[str, list[torch.Tensor]]] = {}
        # Sharded items (ZeRO) cast by themselves.
        copied = dtype != torch.float32 and not any(isinstance(layer, FSDPModule) for layer in self.layers)
        self._copies = [ComputeCopies(layer, dtype) for layer in self.layers] if copied else []

    def begin(self, step: int, loss_scale: float, *, training: bool) -> None:
        """Before the first microbatch of a step; ``loss_scale`` is what a microbatch's loss is multiplied with."""
        self.train(training)
        if self.front is not None:
            for layer in self.layers[: self.frozen]:
                layer.eval()
        self.step, self.loss_scale = step, loss_scale
        self.metrics.clear()
        for copies in self._copies:
            copies.refresh()

    def forward(self, *entering: torch.Tensor, microbatch: torch.Tensor, **batch: torch.Tensor) -> Any:
        """Run one microbatch.

        Args:
            entering: the values of ``enters``.
            microbatch: global microbatch index, ``[1]``, on CPU.
            batch: the microbatch's part of the batch's tensors: at least those that the items need.

        Returns:
            The value of ``leaves``, or a tuple where there are several; at the head the loss (a scalar).
        """
        index = int(microbatch)
        values = dict(zip(self.enters, entering, strict=True))
        items: Sequence[Callable[..., Any]] = self._copies or list(self.layers)
        keys = batch.pop(SAMPLES, None)
        known = self.front.get(self.number, keys) if self.front is not None and keys is not None else None
        for position, (spec, module) in enumerate(zip(self.specs, items, strict=True)):
            if position == self.frozen and known is None and self.front is not None and keys is not None:
                self._remember(keys, values)
            if position < self.frozen and known is not None:
                values.update(known)
                continue
            frozen = position < self.frozen
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen), self.profiler.forward(spec.name):
                read = [values[name].detach() if frozen else values[name] for name in spec.reads]
                read[:1] = [self.profiler.mark(each, position) for each in read[:1]]
                result = self._run(spec.name, module, index, *read, *(batch[name] for name in spec.inputs))
            values[spec.writes] = output_of(result)
            if isinstance(result, ItemOutput):
                values[spec.writes] = with_losses(result.output, result.losses.values(), self.loss_scale)
                values.update(result.side)
                self._record_metrics(spec.name, result.metrics)
        if self.frozen == len(self.specs) and known is None and self.front is not None and keys is not None:
            self._remember(keys, values)
        leaving = tuple(_not_a_view(values[name]) for name in self.leaves)
        return leaving[0] if len(leaving) == 1 else leaving

    def _remember(self, keys: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Keep what the frozen items of this stage have written."""
        written = dict.fromkeys(spec.writes for spec in self.specs[: self.frozen])
        if self.front is not None and written:
            self.front.put(self.number, keys, {name: values[name].detach() for name in written})

    def _kept_anyway(self) -> set[int]:
        """Where the bytes of the parameters are, as far as they are whole now."""
        return {p.untyped_storage().data_ptr() for p in self.parameters() if not isinstance(p, DTensor)}

    def _record_metrics(self, item: str, metrics: Mapping[str, torch.Tensor]) -> None:
        kept = self.metrics.setdefault(item, {})
        for name, value in metrics.items():
            kept.setdefault(name, []).append(value.detach())

    def _run(
        self, name: str, module: Callable[..., Any], index: int, *arguments: torch.Tensor
    ) -> torch.Tensor | ItemOutput:
        def run(*inputs: Any) -> torch.Tensor | ItemOutput:
            with seeded(self.device, self.seed, self.step, index, name):
                output: torch.Tensor | ItemOutput = module(*inputs)
            return output

        if not torch.is_grad_enabled():
            return run(*arguments)
        if self.recompute:
            kept = [sum(each.numel() * each.element_size() for each in arguments)]
            # The item seeds itself at its entry, so torch need not save and restore the generators.
            more: dict[str, Any] = {"context_fn": partial(save_products, kept)} if self.selective else {}
            recomputed: torch.Tensor | ItemOutput = checkpoint(
                run, *arguments, use_reentrant=False, preserve_rng_state=False, **more
            )
            self.profiler.activation_is(name, sum(kept))
            return recomputed
        with self.profiler.saved(name, self._kept_anyway):
            return run(*arguments)


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _not_a_view(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself: torch's split backward detaches what a stage passes on in place, which no view allows."""
    if not (x.requires_grad and x._is_view()):
        return x
    leaving: torch.Tensor = _Leaving.apply(x)  # type: ignore[no-untyped-call]
    return leaving


def save_products(kept: list[int]) -> Any:
    """What a selective checkpoint keeps: the results of matrix products, whose bytes are appended to ``kept``."""

    def policy(ctx: Any, operation: Any, *inputs: Any, **_: Any) -> CheckpointPolicy:
        if operation not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not ctx.is_recompute:
            left, right = inputs[-2:]
            kept.append(left.shape[0] * right.shape[1] * left.element_size())
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


class ItemStage(PipelineStage):
    """``PipelineStage`` that knows the frozen front: no gradient crosses a boundary behind which nothing trains.

    torch 2.13's split backward silently drops the weight gradients of a stage none of whose inputs requires grad, but
    for stage 0; here such a stage runs its full backward at W. A stage through which several values run (of an
    encoder-decoder) runs its full backward at once, and nothing at W; so does one whose parameters are whole only while
    an item runs (ZeRO 3): torch's split backward looks for the gradients of those it finds between items. So does one
    of compiled items, each of which has one backward for input and weights, and one of items that recompute all but
    their matrix products: what they keep is given out once, and a split backward asks for it twice.

    Args:
        boundary: the shapes of all values.
        trains_before: for each value written before this stage, whether its gradient matters.
        trains_after: the same behind it.
        group: the processes of the pipeline.
        final: told the name of each item whose gradients no backward of this step touches any more.
        codec: packs the gradients of the microbatches that :meth:`pack` names; None sends all as they are.
        splits: whether a backward may leave weight gradients to W.
    """

    def __init__(
        self,
        module: StageModule,
        stage: int,
        stages: int,
        *,
        boundary: BoundaryShape,
        device: torch.device,
        trains_before: Mapping[str, bool],
        trains_after: Mapping[str, bool],
        group: dist.ProcessGroup | None = None,
        final: Callable[[str], None] | None = None,
        codec: BoundaryCodec | None = None,
        splits: bool = True,
    ) -> None:
        def crossing(names: Sequence[str], trains: Mapping[str, bool]) -> tuple[torch.Tensor, ...]:
            return tuple(boundary.empty(name).requires_grad_(trains[name]) for name in names)

        super().__init__(
            module,
            stage,
            stages,
            device,
            input_args=crossing(module.enters, trains_before),
            output_args=crossing(module.leaves, trains_after),
            group=group,
        )
        self.module = module
        self._trains_before = any(trains_before[name] for name in module.enters)
        self._trains = any(trains_after[name] for name in module.leaves)
        # Weights that no path from the one input reaches cannot be left to W: they share their graph with others.
        moving = tuple(name for name in module.enters if trains_before[name])
        self._splits = splits and len(moving) == 1 and all(spec.reads[:1] == moving for spec in module.specs)
        self._no_gradients = (None,) * len(module.enters)
        self._final = final
        self._codec = codec
        self._values_back = tuple(name for name in module.enters if trains_before[name])
        self._names = ("", "")
        self._packed_before: frozenset[int] = frozenset()
        self._packed_behind: frozenset[int] = frozenset()
        self._arriving: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._passing: dict[int, list[torch.Tensor]] = {}

    def pack(self, names: tuple[str, str], before: frozenset[int], behind: frozenset[int]) -> None:
        """Which gradients are sent back as factors.

        Args:
            names: of the boundaries before and behind this stage: the items that follow them.
            before: microbatches whose gradient this stage sends as factors.
            behind: those that it gets so.
        """
        if self._codec is not None:
            self._names, self._packed_before, self._packed_behind = names, before, behind

    @property
    def trains_before(self) -> bool:
        """Whether a gradient leaves this stage to the one before."""
        return self._trains_before

    @property
    def trains(self) -> bool:
        """Whether a gradient enters this stage from behind: something in it or before it trains."""
        return self._trains

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """No gradient is received where nothing up to here trains; packed ones get room of their own."""
        operations = super().get_bwd_recv_ops(bwd_chunk_id) if self._trains else []
        if self._codec is not None and bwd_chunk_id in self._packed_behind:
            for operation in operations:
                factors = self._codec.empty(operation.tensor.shape, operation.tensor.device)
                self._arriving.setdefault(bwd_chunk_id, []).append((factors, operation.tensor))
                operation.tensor = factors
        return operations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        """The gradients that were received, unpacked where they came as factors."""
        arrived = self._arriving.pop(bwd_chunk_id, [])
        if self._codec is not None:
            for factors, gradient in arrived:
                self._codec.decode(factors, gradient, self._names[1])
        if arrived and not self.module.names:
            self._passing[bwd_chunk_id] = [factors for factors, _ in arrived]
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """No gradient is sent where nothing before this stage trains."""
        if not self._trains_before:
            self.bwd_cache.pop(bwd_chunk_id, None)
            return []
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        passing = self._passing.pop(bwd_chunk_id, [])
        if operations and self._codec is not None and bwd_chunk_id in self._packed_before:
            with self.module.profiler.busy():
                for place, (value, operation) in enumerate(zip(self._values_back, operations, strict=True)):
                    operation.tensor = (
                        passing[place] if passing else self._encoded(value, operation.tensor, bwd_chunk_id)
                    )
        return operations

    def _encoded(self, value: str, gradient: torch.Tensor, bwd_chunk_id: int) -> torch.Tensor:
        """The factors of a gradient; whoever measures sees what the forward had received."""
        if self._codec is None:
            return gradient
        arrived = self.args_recv_info[bwd_chunk_id][self.module.enters.index(value)].buffer
        return self._codec.encode(self._names[0], value, gradient, arrived)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """What the stage before, on the same worker, gets as gradient; nothing in an evaluation, as torch forgets."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """The gradient from the stage behind, on the same worker; none in an evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward one microbatch, counted as busy time."""
        with self.module.profiler.busy():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Backward one microbatch: nothing on a frozen stage, deferred whole to W where no input requires grad."""
        if not self.has_backward:
            return
        with self.module.profiler.busy():
            if not self._trains:
                self.fwd_cache.pop(bwd_chunk_id)
                self.bwd_cache[bwd_chunk_id] = self._no_gradients
            elif not full_backward and not self._trains_before:
                outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
                grads = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)
                self.backward_state[bwd_chunk_id] = (loss if self.is_last else outputs, grads, inputs)
                self.bwd_cache[bwd_chunk_id] = self._no_gradients
            else:
                whole = full_backward or not self._splits or self._is_shared_now()
                with self._announcing(last_backward), self.module.profiler.backward(self.module.names, whole=whole):
                    super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)

    def _is_shared_now(self) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in self.module.parameters())

    @contextmanager
    def _announcing(self, last_backward: bool) -> Iterator[None]:
        """Around a backward that completes gradients: where it is the step's last one, tell what is final meanwhile."""
        if not last_backward or self._final is None:
            yield
            return
        with self.module.profiler.telling(self._announce_from):
            yield
        self._announce_from(0)

    def _announce_from(self, position: int) -> None:
        if self._final is not None:
            for name in reversed(self.module.names[position:]):
                self._final(name)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weight gradients that a split backward left over, item by item."""
        if not self.has_backward or not self._trains:
            return
        with self.module.profiler.busy():
            if not self._trains_before:
                outputs, grads, inputs = self.backward_state.pop(bwd_chunk_id)
                with self._announcing(last_backward), self.module.profiler.backward(self.module.names):
                    stage_backward(outputs, grads, inputs)
                return
            if bwd_chunk_id not in self.backward_state:
                with self._announcing(last_backward):
                    return
            self.dw_runner.pop(bwd_chunk_id)
            _, groups, _, _ = self.backward_state.pop(bwd_chunk_id)
            self._weight_gradients(groups)
            for layer in self.module.layers:
                accumulate_sharded_grads(layer)
            if last_backward:
                self._announce_from(0)

    def _weight_gradients(self, groups: Sequence[dict[str, Any]]) -> None:
        owner: dict[int, int] = {}
        for position, layer in enumerate(self.module.layers):
            owner.update(dict.fromkeys(map(id, layer.parameters()), position))
        places = [sorted({owner[id(node.variable)] for node in group["params"]}) for group in groups]
        parts = Counter(positions[0] for positions in places)
        for group, positions in zip(groups, places, strict=True):
            position = positions[0]
            with self.module.profiler.weight(self.module.names[position], 1 / parts[position]):
                parameters = [p for at in positions for p in self.module.layers[at].parameters()]
                stage_backward_weight(iter(parameters), [group])


def microbatch_loss(
    microbatches: int, scale: Callable[[], float]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The schedule's loss function: the head's own loss over the number of microbatches; the target is not used.

    Args:
        scale: the loss scale in force.
    """

    def scaled(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        factor = scale()
        return output / microbatches if factor == 1.0 else output / microbatches * factor

    return scaled
