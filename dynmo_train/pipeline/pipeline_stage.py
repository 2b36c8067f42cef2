"""A pipeline stage over items of the layer list.

:class:`ItemStage`, a subclass of torch's ``PipelineStage``, sends and receives what crosses the boundaries of a
:class:`~.stage_module.StageModule`, which runs the items.

    previous stage -> [args_recv_info] -> StageModule.forward: item, item, ... -> [fwd_cache, send] -> next stage
    previous stage <- [bwd_cache, send, factors] <- backward through the marks <- [grad_recv_info] <- next stage

Invariants that keep the bits of a run the same on any partition:

* Each item draws its own random numbers, a function of (seed, step, microbatch, item).
* A frozen prefix of the layer list runs without gradient, and no gradient crosses a boundary behind which nothing
  trains, wherever the boundaries are.
* Gradients accumulate per parameter in the order of the microbatches, whether or not a schedule splits the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward, stage_backward_weight
from torch.distributed.tensor import DTensor

from ..launch.watch.heartbeat import Phase
from ..models.families.sharded_prediction import is_ahead
from ..models.layer_list import BoundaryShape
from ..optim.compression.boundary import BoundaryCodec
from ..parallel.fsdp import accumulate_sharded_grads
from .stage_module import StageModule
from .vocabulary import VocabularyPasses


class BackwardCase(Enum):
    """What a stage does for one microbatch at B or I (``backward_one_chunk``) and at W (``backward_weight_one_chunk``).

    ========  =====================================  ======================  ================
    case      when                                   at B or I               at W
    ========  =====================================  ======================  ================
    NONE      evaluation                             nothing                 nothing
    FROZEN    no item of or before the stage trains  drop the activations    nothing
    DEFERRED  split, and no item before it trains    nothing                 full backward
    SPLIT     split, and the stage can be split      input gradients         weight gradients
    FULL      otherwise                              full backward           nothing
    ========  =====================================  ======================  ================

    DEFERRED exists because the split backward of torch 2.11 to 2.13 drops the weight gradients of a stage none of whose
    inputs requires grad, except for stage 0. A stage cannot be split where

    * several values with gradients enter it, as in an encoder-decoder: torch's split follows paths from one input;
    * an item is compiled: it has one backward for inputs and weights;
    * matrix products are kept by selective recomputation: a checkpoint gives them out once, a split asks twice;
    * parameters are gathered only while an item runs (ZeRO 3): the split looks for their gradients between items.
    """

    NONE = auto()
    FROZEN = auto()
    DEFERRED = auto()
    SPLIT = auto()
    FULL = auto()


class ItemStage(PipelineStage):
    """A ``PipelineStage`` with frozen items, compressed gradients and per-item costs.

    It overrides public and private methods of torch's ``PipelineStage`` (checked with torch 2.11 to 2.13). What each
    override relies on is stated at the method.

    Args:
        module: The items of the stage.
        stage: Index of the stage.
        stages: Number of stages.
        boundary: Shapes of all values.
        device: Device of the items.
        trains_before: For each value written before this stage, whether its gradient matters.
        trains_after: The same for values written before the next stage.
        group: Processes of the pipeline.
        on_gradients_final: Called with the name of each item whose gradients no backward of this step changes any more.
        codec: Compresses the gradients of the microbatches in :meth:`set_compressed`; None compresses none.
        can_split: Whether a backward may leave weight gradients to W.
        vocabulary: Sharded output layer, which computes the loss of the last stage; None: its last item does.
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
        on_gradients_final: Callable[[str], None] | None = None,
        codec: BoundaryCodec | None = None,
        can_split: bool = True,
        vocabulary: VocabularyPasses | None = None,
    ) -> None:
        def metadata(names: Sequence[str], trains: Mapping[str, bool]) -> tuple[torch.Tensor, ...]:
            return tuple(boundary.empty(name).requires_grad_(trains[name]) for name in names)

        # With static metadata torch infers no shapes; requires_grad decides which boundaries have gradient buffers.
        super().__init__(
            module,
            stage,
            stages,
            device,
            input_args=metadata(module.input_names, trains_before),
            output_args=metadata(module.output_names, trains_after),
            group=group,
        )
        self.module = module
        self._values_with_gradient = tuple(name for name in module.input_names if trains_before[name])
        # A gradient enters the stage: an item of it or before it trains.
        self.needs_backward = any(trains_after[name] for name in module.output_names)
        # All items must read the one value with a gradient first: weights on no path from it cannot be left to W.
        one_path = all(spec.reads[:1] == self._values_with_gradient for spec in module.specs)
        # Rows that shards look up for an item behind the front have their gradient at I, and none at W.
        self._reads_ahead = any(is_ahead(name) for spec in module.specs for name in spec.reads)
        self._can_split = can_split and len(self._values_with_gradient) == 1 and one_path and not self._reads_ahead
        # torch reads an entry of ``bwd_cache`` for each microbatch, also where no gradient is sent.
        self._no_gradients = (None,) * len(module.input_names)
        self._on_gradients_final = on_gradients_final
        self._split_cases: dict[int, BackwardCase] = {}
        self._vocabulary = vocabulary if self.is_last else None
        self._codec = codec
        self._boundaries = ("", "")
        self._compressed_sends: frozenset[int] = frozenset()
        self._compressed_receives: frozenset[int] = frozenset()
        self._received_factors: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._forwarded_factors: dict[int, list[torch.Tensor]] = {}

    def set_compressed(self, boundaries: tuple[str, str], sends: frozenset[int], receives: frozenset[int]) -> None:
        """Set which gradients travel as low-rank factors.

        Args:
            boundaries: Names of the boundaries before and behind this stage: the items that follow them.
            sends: Microbatches whose gradient this stage sends compressed.
            receives: Microbatches whose gradient it receives compressed.
        """
        if self._codec is not None:
            self._boundaries, self._compressed_sends, self._compressed_receives = boundaries, sends, receives

    @property
    def sends_gradients(self) -> bool:
        """Whether a gradient leaves this stage to the previous one: an item before it trains."""
        return bool(self._values_with_gradient)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive no gradient where nothing trains; receive compressed ones into buffers of factors.

        Relies on ``P2POp.tensor`` being read when the operation is posted, after this method.

        Args:
            bwd_chunk_id: Microbatch of the step, from 0.
        """
        operations = super().get_bwd_recv_ops(bwd_chunk_id) if self.needs_backward else []
        if self._codec is not None and bwd_chunk_id in self._compressed_receives:
            for operation in operations:
                factors = self._codec.empty(operation.tensor.shape, operation.tensor.device)
                self._received_factors.setdefault(bwd_chunk_id, []).append((factors, operation.tensor))
                operation.tensor = factors
        return operations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        """Decompress received factors into torch's receive buffers before torch reads these.

        Private in torch: ``backward_one_chunk`` calls it after the receives of the microbatch have completed.
        """
        received = self._received_factors.pop(bwd_chunk_id, [])
        if self._codec is not None:
            for factors, gradient in received:
                self._codec.decode(factors, gradient, self._boundaries[1])
        # Without items the gradient passes through unchanged; compressing it again would lose more of it.
        if received and not self.module.names:
            self._forwarded_factors[bwd_chunk_id] = [factors for factors, _ in received]
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send no gradient where nothing before this stage trains; compress the gradients to be compressed.

        torch would send zeros for a gradient that is None. ``bwd_cache`` has an entry per microbatch that only a send
        removes, so it is removed here. A stage without items forwards the factors that it received.

        Args:
            bwd_chunk_id: Microbatch of the step, from 0.
        """
        if not self.sends_gradients:
            self.bwd_cache.pop(bwd_chunk_id, None)
            return []
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        forwarded = self._forwarded_factors.pop(bwd_chunk_id, [])
        if operations and self._codec is not None and bwd_chunk_id in self._compressed_sends:
            with self.module.profiler.busy():
                for at, (value, operation) in enumerate(zip(self._values_with_gradient, operations, strict=True)):
                    operation.tensor = (
                        forwarded[at] if forwarded else self._compress(value, operation.tensor, bwd_chunk_id)
                    )
        return operations

    def _compress(self, value: str, gradient: torch.Tensor, bwd_chunk_id: int) -> torch.Tensor:
        """Return the factors of a gradient; the codec compares it with what the forward received."""
        if self._codec is None:
            return gradient
        activation = self.args_recv_info[bwd_chunk_id][self.module.input_names.index(value)].buffer
        return self._codec.encode(self._boundaries[0], value, gradient, activation)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients for the previous stage on the same rank; none in an evaluation.

        torch asserts a backward here, but calls it in an evaluation of several stages per rank, too.

        Args:
            mb_index: Microbatch of the step, from 0.
        """
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients from the next stage on the same rank; none in an evaluation, as above.

        Args:
            next_stage_bwd_outputs: Gradient of each output of this stage, in the shape of that output, or None.
            mb_index: Microbatch of the step, from 0.
        """
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one microbatch, measured as busy time; send its output to the shards of the vocabulary."""
        heartbeat = self.module.profiler.heartbeat
        microbatch = args[0] if args else kwargs["fwd_chunk_id"]
        heartbeat.enter(Phase.FORWARD if self.has_backward else Phase.EVALUATE, microbatch)
        with self.module.profiler.busy():
            output = super().forward_one_chunk(*args, **kwargs)
        heartbeat.enter(Phase.PIPELINE, microbatch)
        if self._vocabulary is not None:
            self._vocabulary.send_features(microbatch, output)
        return output

    def _backward_case(self, *, full_backward: bool) -> BackwardCase:
        if not self.has_backward:
            return BackwardCase.NONE
        if not self.needs_backward:
            return BackwardCase.FROZEN
        if full_backward:
            return BackwardCase.FULL
        if not self.sends_gradients and not self._reads_ahead:
            return BackwardCase.DEFERRED
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self.module.parameters())
        return BackwardCase.SPLIT if self._can_split and not is_sharded else BackwardCase.FULL

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of one microbatch, B or I of the schedule; see :class:`BackwardCase`.

        Args:
            bwd_chunk_id: Microbatch of the step, from 0.
            loss: The microbatch's part of the step's loss, a scalar, at the last stage; None at the others.
            full_backward: False at I, where weight gradients may be left to W.
            last_backward: Whether this is the last backward of the stage in the step.
        """
        if self._vocabulary is not None and loss is not None:
            # In an evaluation, too: its loss is known only now.
            [stream], _ = self.fwd_cache[bwd_chunk_id]
            loss = self._vocabulary.loss(bwd_chunk_id, stream, loss)
        case = self._backward_case(full_backward=full_backward)
        if case is BackwardCase.NONE:
            return
        if not full_backward:
            self._split_cases[bwd_chunk_id] = case
        self.module.profiler.heartbeat.enter(Phase.BACKWARD, bwd_chunk_id)
        with self.module.profiler.busy():
            if case is BackwardCase.FROZEN:
                # torch removes the entry in its own backward, which does not run here.
                self.fwd_cache.pop(bwd_chunk_id)
                self.bwd_cache[bwd_chunk_id] = self._no_gradients
            elif case is BackwardCase.DEFERRED:
                self._defer_backward(bwd_chunk_id, loss)
            else:
                full = case is BackwardCase.FULL
                with (
                    self._completing(bwd_chunk_id if full else None, last_backward),
                    self.module.profiler.backward(self.module.names, full=full),
                ):
                    super().backward_one_chunk(bwd_chunk_id, loss, full, last_backward)
                self.module.graphs.release(bwd_chunk_id)
        self.module.profiler.heartbeat.enter(Phase.PIPELINE, bwd_chunk_id)

    def _defer_backward(self, bwd_chunk_id: int, loss: torch.Tensor | None) -> None:
        """Keep what the full backward at W needs, and leave the previous stage without gradients."""
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        grads = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)
        self.backward_state[bwd_chunk_id] = (loss if self.is_last else outputs, grads, inputs)
        self.bwd_cache[bwd_chunk_id] = self._no_gradients

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run what :meth:`backward_one_chunk` has left over, W of the schedule; see :class:`BackwardCase`.

        Args:
            bwd_chunk_id: Microbatch of the step, from 0.
            last_backward: Whether this is the last backward of the stage in the step.
        """
        case = self._split_cases.pop(bwd_chunk_id, BackwardCase.NONE)
        if case in (BackwardCase.NONE, BackwardCase.FROZEN):
            return
        with self.module.profiler.busy():
            if case is BackwardCase.DEFERRED:
                outputs, grads, inputs = self.backward_state.pop(bwd_chunk_id)
                with self._completing(bwd_chunk_id, last_backward), self.module.profiler.backward(self.module.names):
                    stage_backward(outputs, grads, inputs)
                self.module.graphs.release(bwd_chunk_id)
                return
            if case is BackwardCase.SPLIT:
                # What torch's own backward_one_chunk has stored: (inputs, parameter groups, outputs, output grads).
                self.dw_runner.pop(bwd_chunk_id)
                _, groups, _, _ = self.backward_state.pop(bwd_chunk_id)
                self._weight_gradients(groups)
                # A backward of the weights alone does not run the hooks in which FSDP2 adds to its float32 sums.
                for layer in self.module.layers:
                    accumulate_sharded_grads(layer)
                self._observe_gradients(bwd_chunk_id)
            if last_backward:
                self._announce_final(0)

    def _observe_gradients(self, bwd_chunk_id: int) -> None:
        """Show an observer, if there is one, what the microbatches up to this one have added to the gradients."""
        observer = self.module.profiler.observer
        if observer is not None:
            observer.accumulated(self.module.names, self.module.first_microbatch + bwd_chunk_id)

    def _weight_gradients(self, groups: Sequence[dict[str, Any]]) -> None:
        """Compute the weight gradients of torch's parameter groups one by one, so that each item's time is measured."""
        owner: dict[int, int] = {}
        for position, layer in enumerate(self.module.layers):
            owner.update(dict.fromkeys(map(id, layer.parameters()), position))
        positions_of = [sorted({owner[id(node.variable)] for node in group["params"]}) for group in groups]
        # torch merges groups that share an intermediate node, so that a group can have parameters of several items; its
        # time is counted for the first of them.
        groups_of_item = Counter(positions[0] for positions in positions_of)
        for group, positions in zip(groups, positions_of, strict=True):
            with self.module.profiler.weight(self.module.names[positions[0]], 1 / groups_of_item[positions[0]]):
                parameters = [p for at in positions for p in self.module.layers[at].parameters()]
                stage_backward_weight(iter(parameters), [group])

    @contextmanager
    def _completing(self, bwd_chunk_id: int | None, last_backward: bool) -> Iterator[None]:
        """Around a backward: show an observer the gradients; in the step's last one, announce the items that are final.

        Without an observer each item is announced while others are computed. With one they are announced after it: the
        sum over the replicas, which an announcement starts, changes the gradients. When it starts changes no bit of it.

        Args:
            bwd_chunk_id: Microbatch whose weight gradients are complete afterwards; None where W computes them.
            last_backward: Whether this is the last backward of the stage in the step.
        """
        announces = last_backward and self._on_gradients_final is not None
        if announces and self.module.profiler.observer is None:
            with self.module.profiler.listening(self._announce_final):
                yield
        else:
            yield
        if bwd_chunk_id is not None:
            self._observe_gradients(bwd_chunk_id)
        # Items before the last mark that was reached: the first item has a mark only if its input requires grad.
        if announces:
            self._announce_final(0)

    def _announce_final(self, position: int) -> None:
        """Announce the items from ``position`` on."""
        if self._on_gradients_final is not None:
            # From last to first, the order in which a backward completes them; a name may be announced again.
            for name in reversed(self.module.names[position:]):
                self._on_gradients_final(name)
