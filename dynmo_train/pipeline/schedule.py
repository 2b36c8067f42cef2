"""torch's schedules over the stages of one worker, for one partition; rebuilt whenever the partition changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from .._common.errors import UsageError
from ..data.batch import Batch
from ..models.layer_list import BoundaryShape, ItemSpec, live_before, train_before
from ..optim.compression.boundary import BoundaryCodec
from ..optim.precision import float32_matmuls
from ..parallel.process_groups import World
from .epilogue import compressed_microbatches, epilogue_backwards, one_f_one_b_epilogue
from .frozen_cache import FrozenPrefixCache, sample_hashes
from .partition import Partition, frozen_prefix
from .pipeline_stage import SAMPLES, ItemStage, StageModule, microbatch_loss
from .profiler import LayerProfiler

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """What a pipeline is built for; the microbatches and the tokens of a sample follow those of the batch.

    Attributes:
        schedule: ``gpipe``, ``1f1b``, ``interleaved-1f1b``, ``zero-bubble``, ``zb-v`` or ``custom``.
        microbatches: of a step. With fewer of them than stages, as where the batch is still growing, 1F1B runs all
            forwards before it could begin to alternate: its order is then GPipe's, which torch has for any number.
        boundary: the shapes of what crosses a stage boundary.
        seed: of the run.
        recompute: whether items run again in the backward instead of keeping their activations.
        selective: whether they keep the results of matrix products then.
        front_cache_bytes: for what the frozen front gave for samples seen before; None keeps nothing.
        operations: with ``custom``, what each worker does in a step, as in a plan: ``0F0 1F0 1I0 ...``.
        token_parts: ranks that share the tokens of the stream, of which ``boundary`` has one rank's.
        compiled: the backend of torch.compile by which items are compiled; None where they are not.
    """

    schedule: str
    microbatches: int
    boundary: BoundaryShape
    seed: int
    recompute: bool
    selective: bool = False
    frozen_cache_bytes: int | None = None
    operations: tuple[str, ...] | None = None
    token_parts: int = 1
    compiled: str | None = None

    def for_batch(self, batch: Batch) -> PipelineConfig:
        """The shape that a batch needs: itself where nothing differs."""
        boundary = self.boundary
        if batch.tokens is not None and batch.tokens // self.token_parts != boundary.tokens:
            boundary = boundary.with_tokens(batch.tokens // self.token_parts)
        if (batch.microbatches or self.microbatches) == self.microbatches and boundary is self.boundary:
            return self
        return replace(self, microbatches=batch.microbatches or self.microbatches, boundary=boundary)


class Pipeline:
    """The stages of this worker and the schedule that drives them. ``loss_scale`` multiplies what is differentiated.

    Args:
        specs: the whole layer list.
        items: the modules that this worker holds, by name.
        frozen: names of the frozen front of the whole list.
        final: told the name of each item whose gradients no backward of a step touches any more.
        codec: packs gradients that are sent back to the stage before; None sends all as they are.
    """

    def __init__(
        self,
        shape: PipelineConfig,
        partition: Partition,
        world: World,
        specs: Sequence[ItemSpec],
        items: Mapping[str, nn.Module],
        frozen: Sequence[str],
        profiler: LayerProfiler,
        final: Callable[[str], None] | None = None,
        codec: BoundaryCodec | None = None,
    ) -> None:
        self.shape, self.world, self._codec = shape, world, codec
        prefixes = frozen_prefix(partition.stages, frozen)
        by_name = {spec.name: spec for spec in specs}
        self.modules: list[StageModule] = []
        self._front = None if shape.frozen_cache_bytes is None else FrozenPrefixCache(shape.frozen_cache_bytes)
        profiler.always_marks = profiler.always_marks or final is not None
        stages: list[ItemStage] = []
        for number in partition.stages_of_worker(world.pipeline_rank):
            names = partition.stages[number]
            begin = sum(len(before) for before in partition.stages[:number])
            end = begin + len(names)
            module = StageModule(
                {name: items[name] for name in names},
                [by_name[name] for name in names],
                enters=live_before(specs, begin) if number else (),
                leaves=live_before(specs, end),
                frozen=prefixes[number],
                seed=shape.seed,
                recompute=shape.recompute,
                selective=shape.selective,
                profiler=profiler,
                device=world.device,
                dtype=shape.boundary.dtype,
                number=number,
                front=self._front,
            )
            stages.append(
                ItemStage(
                    module,
                    number,
                    len(partition.stages),
                    boundary=shape.boundary,
                    device=world.device,
                    trains_before=train_before(specs, begin, sum(prefixes)),
                    trains_after=train_before(specs, end, sum(prefixes)),
                    group=world.groups.pipeline,
                    final=final,
                    codec=codec,
                    splits=shape.compiled is None and not shape.selective,
                )
            )
            self.modules.append(module)
        self._inputs = tuple(dict.fromkeys(name for module in self.modules for name in module.inputs))
        self.has_last = any(stage.is_last for stage in stages)
        self.loss_scale = 1.0
        self._microbatches_of_all = shape.microbatches * world.dims.data
        self._schedule = _schedule(shape, stages, self._microbatches_of_all, lambda: self.loss_scale)
        if codec is not None:
            self._pack(stages, [spec.name for spec in specs], partition, codec)

    def _pack(self, stages: list[ItemStage], names: list[str], partition: Partition, codec: BoundaryCodec) -> None:
        """Tell each stage which gradients cross its boundaries as factors, and the codec which boundaries it has."""
        epilogue = self._epilogue(len(partition.stages)) if codec.settings.epilogue_only else None
        packed = compressed_microbatches(partition, self.shape.microbatches, epilogue)
        used = set()
        for stage in stages:
            number = stage.stage_index
            begin = sum(len(before) for before in partition.stages[:number])
            end = begin + len(partition.stages[number])
            before = packed.get(number, frozenset()) if stage.trains_before else frozenset()
            stage.pack((names[begin], [*names, ""][end]), before, packed.get(number + 1, frozenset()))
            if before:
                used.add(names[begin])
        codec.keep_only(used)

    def _epilogue(self, stages: int) -> dict[int, frozenset[int]] | None:
        """The microbatches of each stage's epilogue; None where all are in it."""
        if isinstance(self._schedule, ScheduleGPipe):
            return None
        if not isinstance(self._schedule, PipelineScheduleMulti):
            return one_f_one_b_epilogue(stages, self.shape.microbatches)
        order = [
            [(each.stage_index, each.computation_type.value, each.microbatch_index or 0) for each in row if each]
            for row in self._schedule.pipeline_order.values()
        ]
        return epilogue_backwards(order)

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Run forward and backward of one step; gradients accumulate in the parameters.

        Returns:
            The replica's part of the step's loss (a float64 scalar on CPU) on the worker that holds the head, zero
            elsewhere.
        """
        return self._run(batch, training=True)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch without gradient or dropout; as ``train_step`` otherwise."""
        return self._run(batch, training=False)

    def _run(self, batch: Batch, *, training: bool) -> torch.Tensor:
        if self._codec is not None and training:
            self._codec.begin_step(self.loss_scale)
        for module in self.modules:
            module.begin(batch.step, self.loss_scale / self._microbatches_of_all, training=training)
        device = self.world.device
        first = batch.first_microbatch
        keywords: dict[str, Any] = {name: batch.inputs[name].to(device) for name in self._inputs}
        keywords["microbatch"] = torch.arange(first, first + self.shape.microbatches)
        if training and any(module.front is not None for module in self.modules):
            keywords[SAMPLES] = sample_hashes(batch.inputs)
        # The head computes the loss from its inputs; torch asks for a target where there is a loss function.
        target = keywords["microbatch"] if self.has_last else None
        losses: list[torch.Tensor] = []
        run = self._schedule.step if training else self._schedule.eval
        with float32_matmuls(device, self.shape.boundary.dtype, compiled=self.shape.compiled is not None):
            run(target=target, losses=losses, return_outputs=False, **keywords)
        total = torch.zeros((), dtype=torch.float64)
        if self.has_last:
            total = torch.stack([loss.detach() for loss in losses]).to("cpu", torch.float64).sum() / self.loss_scale
        return total

    def metrics_of(self, item: str) -> dict[str, list[torch.Tensor]]:
        """What one item reported in the last step: figure -> a tensor a microbatch; empty where it is elsewhere."""
        return next((dict(module.metrics[item]) for module in self.modules if item in module.metrics), {})

    def metrics(self) -> dict[str, dict[str, torch.Tensor]]:
        """Item -> figure -> its mean over the microbatches of the last step, float64 on CPU, of the items held here."""
        return {
            item: {name: torch.stack(values).to("cpu", torch.float64).mean(0) for name, values in metrics.items()}
            for module in self.modules
            for item, metrics in module.metrics.items()
        }


def _schedule(
    shape: PipelineConfig, stages: list[ItemStage], microbatches_of_all: int, scale: Callable[[], float]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    loss = microbatch_loss(microbatches_of_all, scale)
    if shape.schedule in SINGLE:
        few = shape.microbatches < stages[0].num_stages
        return SINGLE["gpipe" if few else shape.schedule](
            stages[0], shape.microbatches, loss_fn=loss, scale_grads=False
        )
    if shape.schedule in LOOPED:
        looped: list[_PipelineStageBase] = [*stages]
        return LOOPED[shape.schedule](looped, shape.microbatches, loss_fn=loss, scale_grads=False)
    if shape.schedule == CUSTOM and shape.operations is not None:
        return _custom(shape, stages, shape.operations, loss)
    raise UsageError(f"schedule {shape.schedule!r} is none of {', '.join([*SINGLE, *LOOPED, CUSTOM])}")


def _custom(
    shape: PipelineConfig, stages: list[ItemStage], operations: Sequence[str], loss: Callable[..., torch.Tensor]
) -> PipelineScheduleMulti:
    """The runtime of torch for any table of operations; it puts sends and receives between them."""
    schedule = _PipelineScheduleRuntime([*stages], shape.microbatches, loss_fn=loss, scale_grads=False)
    table: dict[int, list[_Action | None]] = {
        worker: [_Action.from_str(word) for word in line.split()] for worker, line in enumerate(operations)
    }
    try:
        schedule._prepare_schedule_with_comms(table)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UsageError(f"the plan's operations cannot be run in this order: {error}") from error
    return schedule
