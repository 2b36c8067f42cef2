"""The pipeline of one rank: its stages, and the schedule of torch that runs them.

A :class:`Pipeline` is built for one partition, and rebuilt whenever the partition, the batch's shape or the frozen
prefix changes. A step::

    Engine.train_step -> Pipeline.train_step -> step() of torch's schedule
        -> ItemStage.forward_one_chunk, backward_one_chunk, backward_weight_one_chunk, in the order of the schedule
        -> sum of the microbatches' losses

Schedules with one stage per rank are torch's ``PipelineScheduleSingle``, those with several ``PipelineScheduleMulti``.
A plan's own operations run on torch's private ``_PipelineScheduleRuntime``, which inserts the sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from .._common.errors import UsageError
from .._common.vocabulary_order import (
    LOOKUP,
    LOOKUP_GRADIENT,
    SHARD_FORWARD,
    SHARD_WEIGHT,
    Operation,
    gpipe_order,
    one_f_one_b_order,
    with_shard_passes,
)
from ..data.batch import Batch
from ..models.compiled import CompileSettings
from ..models.experts.balance_losses import GLOBAL
from ..models.families.sharded_prediction import is_looked_up
from ..models.layer_list import HIDDEN, BoundaryShape, ItemSpec, live_before, train_before
from ..optim.compression.boundary import BoundaryCodec
from ..optim.precision import float32_matmuls
from ..parallel.fsdp import connect_items, share_streams
from ..parallel.process_groups import World
from ..parallel.seeding import stable_seed
from .epilogue import compressed_microbatches, epilogue_backwards, one_f_one_b_epilogue
from .frozen_cache import FrozenPrefixCache, joined_hashes, sample_hashes
from .graphed_items import most_in_flight
from .partition import Partition, frozen_prefix
from .pipeline_stage import ItemStage
from .profiler import LayerProfiler
from .stage_module import SAMPLES, StageModule
from .vocabulary import VocabularyGroups, VocabularyPasses, VocabularyShape

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """What a pipeline is built for; microbatches and tokens per sample follow the batch.

    Attributes:
        schedule: ``gpipe``, ``1f1b``, ``interleaved-1f1b``, ``zero-bubble``, ``zb-v``, ``dualpipe-v`` or
            ``custom``.
        microbatches: Microbatches of a step. 1F1B with fewer microbatches than stages, as while the batch size ramps
            up, runs all forwards before the first backward: GPipe's order, which torch has for any number.
        boundary: Shapes of the values that cross a stage boundary.
        seed: Seed of the run.
        recompute: Recompute activations in the backward instead of saving them.
        selective: With ``recompute``: save the results of matrix products.
        frozen_cache_bytes: Size of the cache of the frozen prefix's outputs; None has no cache.
        operations: With ``custom``: the operations of each pipeline rank in a step, as in a plan: ``0F0 1F0 1I0 ...``.
        token_parts: Ranks that share the tokens (context and sequence parallelism); ``boundary`` has one part.
        compiled: Settings of torch.compile; None does not compile.
        cuda_graphs: Capture items in CUDA graphs where that is possible.
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
    compiled: CompileSettings | None = None
    cuda_graphs: bool = False

    def for_batch(self, batch: Batch) -> PipelineConfig:
        """Return the configuration for a batch; ``self`` where it already fits."""
        boundary = self.boundary
        if batch.tokens is not None and batch.tokens // self.token_parts != boundary.tokens:
            boundary = boundary.with_tokens(batch.tokens // self.token_parts)
        if (batch.microbatches or self.microbatches) == self.microbatches and boundary is self.boundary:
            return self
        return replace(self, microbatches=batch.microbatches or self.microbatches, boundary=boundary)


class Pipeline:
    """The stages of this pipeline rank and the schedule that runs them.

    Args:
        config: What the pipeline is built for.
        partition: The active partition.
        world: Processes of the run.
        specs: The whole layer list.
        items: Local modules by name.
        frozen: Names of the frozen prefix of the whole list.
        profiler: Measures the items.
        on_gradients_final: Called with the name of each item whose gradients no backward of a step changes any more.
        codec: Compresses gradients at stage boundaries; None compresses none.
        vocabulary_groups: Process groups of a sharded output layer; None without shards.

    Attributes:
        loss_scale: Factor of the loss in the backward.

    Raises:
        UsageError: The schedule is unknown, or a plan's operations cannot run in their order.
    """

    def __init__(
        self,
        config: PipelineConfig,
        partition: Partition,
        world: World,
        specs: Sequence[ItemSpec],
        items: Mapping[str, nn.Module],
        frozen: Sequence[str],
        profiler: LayerProfiler,
        on_gradients_final: Callable[[str], None] | None = None,
        codec: BoundaryCodec | None = None,
        vocabulary_groups: VocabularyGroups | None = None,
    ) -> None:
        self.config, self.world, self._codec = config, world, codec
        self._total_microbatches = config.microbatches * world.dims.data
        trains_words = specs[0].name not in frozen
        self._vocabulary = self._vocabulary_passes(partition, items, profiler, vocabulary_groups, trains_words)
        prefixes = frozen_prefix(partition.stages, frozen)
        by_name = {spec.name: spec for spec in specs}
        self.modules: list[StageModule] = []
        # Context-parallel ranks have other tokens of the same microbatch.
        rank = world.context_rank
        seed = config.seed if rank == 0 else stable_seed(config.seed, "context", rank)
        cache = None if config.frozen_cache_bytes is None else FrozenPrefixCache(config.frozen_cache_bytes)
        # The marks announce which gradients are final, also in steps that are not measured.
        profiler.always_marks = profiler.always_marks or on_gradients_final is not None
        stages: list[ItemStage] = []
        for number in partition.stages_of_rank(world.pipeline_rank):
            names = partition.stages[number]
            begin = sum(len(before) for before in partition.stages[:number])
            end = begin + len(names)
            module = StageModule(
                {name: items[name] for name in names},
                [by_name[name] for name in names],
                input_names=live_before(specs, begin) if number else (),
                output_names=live_before(specs, end),
                frozen=prefixes[number],
                seed=seed,
                recompute=config.recompute,
                selective=config.selective,
                profiler=profiler,
                device=world.device,
                dtype=config.boundary.dtype,
                number=number,
                cache=cache,
                captures_graphs=config.cuda_graphs,
            )
            stages.append(
                ItemStage(
                    module,
                    number,
                    len(partition.stages),
                    boundary=config.boundary,
                    device=world.device,
                    trains_before=train_before(specs, begin, sum(prefixes)),
                    trains_after=train_before(specs, end, sum(prefixes)),
                    group=world.groups.pipeline,
                    on_gradients_final=on_gradients_final,
                    codec=codec,
                    can_split=config.compiled is None and not config.selective and not config.cuda_graphs,
                    vocabulary=self._vocabulary,
                )
            )
            if self._vocabulary is not None:
                reads = {name for spec in module.specs for name in spec.reads if is_looked_up(name)}
                module.looked_up = {name: self._vocabulary.lookup_of(name) for name in sorted(reads)}
            self.modules.append(module)
            connect_items(list(module.layers), prefixes[number])
        share_streams(layer for module in self.modules for layer in module.layers)
        self._batch_names = tuple(dict.fromkeys(name for module in self.modules for name in module.batch_names))
        if any(name == f"{GLOBAL}_loss" for spec in specs for name, _ in spec.metrics):
            _check_forward_order(config.operations or ())
        self.has_last = any(stage.is_last for stage in stages)
        self.loss_scale = 1.0
        if self._vocabulary is None:
            loss = microbatch_loss(self._total_microbatches, lambda: self.loss_scale)
            self._schedule = _schedule(config, stages, loss)
        else:
            self._schedule = _schedule_with_shards(config, stages, partition, self._vocabulary)
        self._slots: list[int] = []
        if config.cuda_graphs:
            self._slots = [self._in_flight(stage.stage_index, len(partition.stages)) for stage in stages]
        if codec is not None:
            self._set_compressed(stages, [spec.name for spec in specs], partition, codec)

    def _vocabulary_passes(
        self,
        partition: Partition,
        items: Mapping[str, nn.Module],
        profiler: LayerProfiler,
        groups: VocabularyGroups | None,
        trains_words: bool,
    ) -> VocabularyPasses | None:
        if groups is None or not partition.shards:
            return None
        shape = VocabularyShape(
            count=len(partition.shards),
            inputs=groups.loss_inputs,
            stream=self.config.boundary.shapes[HIDDEN],
            dtype=self.config.boundary.dtype,
            microbatches=self.config.microbatches,
            total_microbatches=self._total_microbatches,
            token_parts=groups.region.size if groups.region is not None and groups.region.sequence else 1,
        )
        shards = {name: items[name] for name in partition.shards if name in items}
        return VocabularyPasses(shape, shards, partition, self.world, groups, profiler, trains_words=trains_words)

    def _set_compressed(
        self, stages: list[ItemStage], names: list[str], partition: Partition, codec: BoundaryCodec
    ) -> None:
        """Set which gradients the stages send and receive compressed; drop memories of boundaries that are gone."""
        epilogue = self._epilogue(len(partition.stages)) if codec.settings.epilogue_only else None
        compressed = compressed_microbatches(partition, self.config.microbatches, epilogue)
        used = set()
        for stage in stages:
            number = stage.stage_index
            begin = sum(len(before) for before in partition.stages[:number])
            end = begin + len(partition.stages[number])
            sends = compressed.get(number, frozenset()) if stage.sends_gradients else frozenset()
            stage.set_compressed((names[begin], [*names, ""][end]), sends, compressed.get(number + 1, frozenset()))
            # A memory belongs to the item behind its boundary; without a boundary there, its error is out of date.
            if sends:
                used.add(names[begin])
        codec.keep_only(used)

    def _epilogue(self, stages: int) -> dict[int, frozenset[int]] | None:
        """Return the microbatches of each stage's epilogue; None where all are in it."""
        if isinstance(self._schedule, ScheduleGPipe):
            return None
        if not isinstance(self._schedule, PipelineScheduleMulti):
            return one_f_one_b_epilogue(stages, self.config.microbatches)
        order = [_operations_of(row) for row in self._schedule.pipeline_order.values()]
        return epilogue_backwards(order)

    def _in_flight(self, stage: int, stages: int) -> int:
        """Return the maximum number of microbatches between forward and backward on a local stage."""
        if isinstance(self._schedule, ScheduleGPipe):
            return self.config.microbatches
        if not isinstance(self._schedule, PipelineScheduleMulti):
            return min(self.config.microbatches, stages - stage)
        # With the transfers: the operations of a plan are in this table only.
        rows = getattr(self._schedule, "pipeline_order_with_comms", {})
        return max(most_in_flight(_operations_of(row), stage) for row in rows.values())

    @property
    def graph_obstacles(self) -> dict[str, str]:
        """Local item -> why it is not captured in a CUDA graph; empty where none is wanted."""
        return {name: reason for module in self.modules for name, reason in module.graphs.obstacles.items()}

    def train_step(self, batch: Batch) -> torch.Tensor:
        """Run forward and backward of one step; gradients accumulate in the parameters.

        Args:
            batch: Samples of this replica.

        Returns:
            The replica's part of the step's loss, a float64 scalar on the device, on the last pipeline rank; zero
            elsewhere.
        """
        return self._run(batch, training=True)

    def _sample_keys(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the keys of the step's samples in the cache of the frozen prefix, the same decision on all ranks."""
        groups, device = self.world.groups, self.world.device
        keys = sample_hashes(inputs)
        if groups.context is not None:
            keys = joined_hashes(keys, groups.context, device)
        frozen = [module for module in self.modules if module.cache is not None and module.frozen]
        is_joint = self.world.dims.expert > 1 or any(
            isinstance(layer, FSDPModule) or any(name == f"{GLOBAL}_loss" for name, _ in spec.metrics)
            for module in frozen
            for spec, layer in zip(module.specs, module.layers, strict=True)
        )
        if frozen and frozen[0].cache is not None and is_joint and groups.data is not None:
            stages = [module.number for module in frozen]
            keys = frozen[0].cache.agree(stages, keys, self.config.microbatches, groups.data, device)
        return keys

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch without gradient and dropout; otherwise as :meth:`train_step`."""
        return self._run(batch, training=False)

    def _run(self, batch: Batch, *, training: bool) -> torch.Tensor:
        if self._codec is not None and training:
            self._codec.begin_step(self.loss_scale)
        first = batch.first_microbatch
        microbatches = range(first, first + self.config.microbatches)
        loss_scale = self.loss_scale / self._total_microbatches
        for module in self.modules:
            module.begin_step(batch.inputs, batch.step, loss_scale, microbatches, training=training)
        if self._vocabulary is not None:
            self._vocabulary.begin_step(batch.inputs, self.loss_scale, training=training)
        device = self.world.device
        inputs = batch.inputs
        keywords: dict[str, Any] = {name: inputs[name].to(device, non_blocking=True) for name in self._batch_names}
        # torch splits every keyword along dimension 0, so that each microbatch gets its own global index.
        keywords["microbatch"] = torch.arange(microbatches.start, microbatches.stop)
        if training and any(module.cache is not None for module in self.modules):
            keywords[SAMPLES] = self._sample_keys(inputs)
        # The head computes the loss from its inputs; torch requires a target where there is a loss function.
        target = keywords["microbatch"] if self.has_last else None
        losses: list[torch.Tensor] = []
        run = self._schedule.step if training else self._schedule.eval
        matmuls = float32_matmuls(device, self.config.boundary.dtype, compiled=self.config.compiled is not None)
        # torch's ``eval`` runs no backward, but records one, and keeps what all microbatches would need for it.
        with matmuls, torch.set_grad_enabled(training):
            if training and self.config.cuda_graphs:
                one = {name: tensor[: len(tensor) // self.config.microbatches] for name, tensor in inputs.items()}
                for module, slots in zip(self.modules, self._slots, strict=True):
                    module.graphs.capture(self.config.boundary, one, slots)
            run(target=target, losses=losses, return_outputs=False, **keywords)
            if self._vocabulary is not None:
                self._vocabulary.end_step()
        # On the device: reading a loss here would wait for it. The sum is in float64, in the order of the microbatches.
        if not self.has_last:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([loss.detach() for loss in losses]).double().sum() / self.loss_scale

    def metrics_of(self, item: str) -> dict[str, list[torch.Tensor]]:
        """Return the metrics of one item in the last step; empty if the item is not local.

        Returns:
            Name -> one tensor per microbatch, in the shape in which the item reports it.
        """
        return next((dict(module.metrics[item]) for module in self.modules if item in module.metrics), {})

    def metrics(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return local item -> metric -> mean over the microbatches of the last step, float64 on the device."""
        found = {
            item: {name: torch.stack(values).double().mean(0) for name, values in metrics.items()}
            for module in self.modules
            for item, metrics in module.metrics.items()
        }
        for item, metrics in ({} if self._vocabulary is None else self._vocabulary.metrics()).items():
            found[item] = found.get(item, {}) | metrics
        return found


def microbatch_loss(
    microbatches: int, loss_scale: Callable[[], float]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the schedule's loss function: the head's own loss over the number of microbatches, times the loss scale.

    Args:
        microbatches: Microbatches of a step, over all replicas.
        loss_scale: Returns the current loss scale.
    """

    def scaled(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        factor = loss_scale()
        return output / microbatches if factor == 1.0 else output / microbatches * factor

    return scaled


def _schedule(
    config: PipelineConfig, stages: list[ItemStage], loss: Callable[..., torch.Tensor]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    # scale_grads=False: the loss is already divided by the number of microbatches of all replicas.
    if config.schedule in SINGLE:
        # torch's 1F1B requires at least one microbatch per stage.
        is_short = config.microbatches < stages[0].num_stages
        return SINGLE["gpipe" if is_short else config.schedule](
            stages[0], config.microbatches, loss_fn=loss, scale_grads=False
        )
    if config.schedule in LOOPED:
        looped: list[_PipelineStageBase] = [*stages]
        return LOOPED[config.schedule](looped, config.microbatches, loss_fn=loss, scale_grads=False)
    if config.schedule == CUSTOM and config.operations is not None:
        return _custom(config, stages, config.operations, loss)
    raise UsageError(f"schedule {config.schedule!r}: must be one of {', '.join([*SINGLE, *LOOPED, CUSTOM])}")


def _check_forward_order(operations: Sequence[str]) -> None:
    """Check that a plan's operations run the forwards of each stage in the order of the microbatches.

    The balance loss over a batch counts the microbatches before each one. The schedules of torch have this order.

    Raises:
        UsageError: they do not.
    """
    last: dict[int, int] = {}
    for word in (word for line in operations for word in line.split()):
        action = _Action.from_str(word)
        for one in () if action is None else action.sub_actions or (action,):
            if one.computation_type is not _ComputationType.FORWARD or one.microbatch_index is None:
                continue
            before = last.get(one.stage_index, -1)
            if one.microbatch_index < before:
                raise UsageError(
                    f"the plan's operations run microbatch {before} of stage {one.stage_index} before"
                    f" {one.microbatch_index}; global_aux_loss needs their order: use another loss or --schedule"
                )
            last[one.stage_index] = one.microbatch_index


def _custom(
    config: PipelineConfig, stages: list[ItemStage], operations: Sequence[str], loss: Callable[..., torch.Tensor]
) -> PipelineScheduleMulti:
    """Build torch's private runtime for any table of operations (torch 2.11 to 2.13 have no public one)."""
    schedule = _PipelineScheduleRuntime([*stages], config.microbatches, loss_fn=loss, scale_grads=False)
    table: dict[int, list[_Action | None]] = {
        rank: [_Action.from_str(word) for word in line.split()] for rank, line in enumerate(operations)
    }
    # torch has no error type of its own for an order that cannot run.
    try:
        schedule._prepare_schedule_with_comms(table)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UsageError(f"the plan's operations cannot run in this order: {error}") from error
    return schedule


# torch's runtime knows no operations of its users. This one has no effect on a stage that is not an FSDP2 root, and
# none of the schedules that torch makes gives it a microbatch: here it is the index of a pass among those of the rank.
CARRIER = _ComputationType.RESHARD
PASSES = (SHARD_FORWARD, SHARD_WEIGHT, LOOKUP, LOOKUP_GRADIENT)


def _schedule_with_shards(
    config: PipelineConfig, stages: list[ItemStage], partition: Partition, vocabulary: VocabularyPasses
) -> PipelineScheduleMulti:
    """Build torch's private runtime for the operations of a schedule with the passes of the shards between them."""

    def placeholder(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        """Return the loss of a microbatch, which its backward sets."""
        return torch.zeros((), dtype=torch.float32, device=output.device)

    num_stages, rank = len(partition.stages), stages[0].group_rank
    own_orders = {"gpipe": gpipe_order, "1f1b": one_f_one_b_order}
    if config.schedule in own_orders:
        order = own_orders[config.schedule](num_stages, config.microbatches)
    else:
        # It also refuses an order that cannot run. That of a plan is in ``operations`` only.
        rows = getattr(_schedule(config, stages, placeholder), "pipeline_order", {})
        planned = [[_Action.from_str(word) for word in line.split()] for line in config.operations or ()]
        order = [_operations_of(row) for row in planned or [rows[at] for at in sorted(rows)]]
    table: dict[int, list[_Action | None]] = {
        number: [_Action.from_str(f"{one.stage}{one.kind}{one.microbatch}") for one in row]
        for number, row in enumerate(order)
    }
    schedule = _PipelineScheduleRuntime([*stages], config.microbatches, loss_fn=placeholder, scale_grads=False)
    schedule._prepare_schedule_with_comms(table)
    placed = with_shard_passes(order, num_stages, lookups=True)
    lowered = schedule.pipeline_order_with_comms
    lowered[rank], passes = _merge_passes(lowered[rank], placed[rank], stages[0].stage_index)
    run = {
        SHARD_FORWARD: vocabulary.run_shards,
        SHARD_WEIGHT: vocabulary.add_gradients,
        LOOKUP: vocabulary.look_up,
        LOOKUP_GRADIENT: vocabulary.add_word_gradients,
    }
    schedule.register_custom_function(CARRIER, _Passes(passes, run))
    return schedule


class _Passes:
    """Runs the pass whose index an action has, if it has one; torch calls it by these names of arguments."""

    def __init__(self, passes: Sequence[Operation], run: Mapping[str, Callable[[int], None]]) -> None:
        self._passes, self._run = passes, run

    def __call__(self, action: _Action, ctx: object) -> None:
        if action.microbatch_index is not None:
            _, kind, microbatch = self._passes[action.microbatch_index]
            self._run[kind](microbatch)


def _operations_of(row: Sequence[_Action | None]) -> list[Operation]:
    """Return the operations of a rank; pairs of a forward and a backward (DualPipeV) run one after the other."""
    return [
        Operation(one.stage_index, one.computation_type.value, one.microbatch_index or 0)
        for each in row
        if each
        for one in each.sub_actions or (each,)
    ]


def _merge_passes(
    lowered: Sequence[_Action], placed: Sequence[Operation], stage: int
) -> tuple[list[_Action], list[Operation]]:
    """Insert the passes of the shards into the operations with messages of a rank.

    Args:
        lowered: Operations and messages, as torch runs them.
        placed: Operations and passes.
        stage: Any local stage, which carries the passes.

    Returns:
        Actions, and the passes that those of ``CARRIER`` index.
    """
    merged: list[_Action] = []
    passes: list[Operation] = []
    waiting = list(placed)

    def insert_passes() -> None:
        while waiting and waiting[0].kind in PASSES:
            merged.append(_Action(stage, CARRIER, len(passes)))
            passes.append(waiting.pop(0))

    for action in lowered:
        # Only before operations: the messages that follow an operation leave before the next pass.
        if action.is_compute_op:
            insert_passes()
            waiting.pop(0)
        merged.append(action)
    insert_passes()
    return merged, passes
