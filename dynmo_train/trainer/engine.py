"""The training engine of one process: the items of its pipeline rank, its pipeline stages, and the optimizer step.

One call of ``train_step`` passes through these objects::

    Batch [samples of the step]          the same on every rank
      | Technique.before_step            hooks of the dynamic techniques, here and below
      | _local_batch                     the samples of this replica
      v
    Pipeline.train_step                  schedule, stages, activations between pipeline ranks
      |                                  LayerProfiler: times and activation bytes of items in profiled steps
      v
    gradients in float32
      | Technique.after_backward
      | GradientReducer.finish           sum over replicas, overlapped with the backward where possible
      | add_partial_gradients            sum over the tensor-parallel ranks
      | add_tied_gradients               sum over the copies of a tied weight
      | frozen items and pruned weights  lose their gradients
      | unscale                          divide by the loss scale
      | Technique.before_optimizer_step
      v
    ItemSquares, loss, item metrics
      | StepSums.add                     one vector over all ranks: equal on all, bit for bit
      v
    ItemStore.step (optimizer)            divides by the clipping factor; skipped on the device unless norm and loss
      |                                  are finite: weights and moments stay
      | HostCopy                         the only thing of a step that the host waits for
      v
    learning-rate schedule, LossScaler.update, costs -> StepResult

Invariants:

* The layer list has one order, and every sum over items follows it. The sums do not depend on the placement, so that
  the bits of a run do not either.
* Every rank takes the same branch: norm and loss are reduced before they are compared.
* ``launch_step`` queues a step without waiting for the device; ``collect`` waits and returns its result. A step may be
  launched before the last one is collected: its forward and backward do not depend on that result, unless the loss
  scale is dynamic or gradients are compressed (``can_defer``). The values are the same either way.
* ``_pipeline`` is built on demand. Whatever changes stages, batch shape or frozen items sets it to None.

The engine does not access files, logs or planners; ``trainer/loop.py`` drives it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._common.portable import peak_memory_bytes
from ..data.batch import Batch
from ..dynamics.technique import Event, Techniques
from ..launch.watch.heartbeat import HeartbeatWriter, Phase
from ..models.families.vocabulary_family import shard_names
from ..models.layer_list import ModelFamily
from ..optim.compression.boundary import BoundaryCodec
from ..optim.compression.powersgd import ReplicaCodec
from ..optim.compression.stats import merge_stats
from ..optim.compression.tied_embeddings import add_fused_gradients, fused_parameters
from ..optim.expert_replicas import ExpertReplicas
from ..optim.grad_reducer import GradientReducer
from ..optim.gradients import (
    ItemSquares,
    TiedPresence,
    add_partial_gradients,
    add_tied_gradients,
    clip_divisor,
    drop_gradients,
    is_state_finite,
    largest_weight,
    zero_pruned_gradients,
)
from ..optim.item_sharding import ItemBuilder, ItemSharding
from ..optim.item_state import ItemState
from ..optim.item_store import ItemStore, OptimizerStates
from ..optim.lr_schedule import rate_at
from ..optim.optimizers.protocol import Update
from ..optim.precision import LossScaler, unscale
from ..parallel.collectives import replica_gather
from ..parallel.context_parallel import context_region
from ..parallel.device_clock import CpuClock, clock_for
from ..parallel.expert_replicas import ReplicaDispatcher, token_dispatcher
from ..parallel.fsdp import FsdpSharding
from ..parallel.host_copy import HostCopy
from ..parallel.process_groups import World, all_agree, all_gather_objects, gather_over, sum_over_pipeline
from ..parallel.tensor_parallel import tensor_region
from ..pipeline.expert_migration import ExpertMoveReport, Placements, move_experts, sharded_experts
from ..pipeline.migration import MoveReport, move_items
from ..pipeline.partition import Partition
from ..pipeline.profiler import CostGather, LayerProfiler
from ..pipeline.schedule import Pipeline
from ..pipeline.vocabulary import VocabularyGroups
from .engine_settings import EngineSettings
from .step_result import LaunchedStep, StepResult
from .step_sums import StepSums


class Engine:
    """Trains, evaluates, moves and restores the items that a partition assigns to this pipeline rank.

    Args:
        family: the model as a layer list.
        settings: numerics of the run.
        partition: initial partition of the layer list.
        world: process groups of this rank.
        profiler: measures the costs of items; an emulated run passes one that also delays them.

    Attributes:
        item_store: modules, optimizer state and sharding of the local items.
        pipeline_config: the configuration that the pipeline is built for; it changes with the size of the batch.
        is_warm: whether a step has run since the pipeline was built; the first one is not profiled.
        advanced_samples: position of the learning-rate schedule, in samples; steps without an update do not count.
        replica_workers: pipeline ranks that compress between their replicas; None before a run has chosen it.
    """

    def __init__(
        self,
        family: ModelFamily,
        settings: EngineSettings,
        partition: Partition,
        world: World,
        profiler: LayerProfiler | None = None,
    ) -> None:
        world = VocabularyGroups.prepare(world, family)
        self.family, self.settings, self.world = family, settings, world
        self.partition = replace(partition, shards=shard_names(family))
        region = tensor_region(world, sequence=settings.sequence_parallel, overlaps=settings.async_tensor_parallel)
        fsdp = None
        # With one replica there is nothing to shard over: every ZeRO stage is then plain training.
        if settings.zero_stage and world.dims.data > 1:
            fsdp = FsdpSharding(
                world,
                reshard=settings.zero_stage == 3,
                compute=settings.precision.compute,
                sync_microbatches=settings.zero_sync_microbatches,
                reduce_dtype=settings.reduce_dtype,
            )
        dispatcher = token_dispatcher(world, slots=settings.expert_slots, chunk_rows=settings.expert_chunk_rows)
        builder = ItemBuilder(
            sharding=ItemSharding(
                family=family,
                region=region,
                fsdp=fsdp,
                dispatcher=dispatcher,
                adapters_only=settings.adapters_only,
            ),
            device=world.device,
            replicas=replica_gather(world),
            context=context_region(world, weighs_steps=settings.per_token_loss),
            fused_norms=settings.fused_norms,
            compiling=settings.pipeline.compiled,
            float8=settings.precision.float8,
        )
        self.item_store = ItemStore(
            builder, OptimizerStates(settings.optimizer, settings.fused_adam, builder.sharding), settings.sparse
        )
        self.scaler = LossScaler(settings.precision.scaling)
        self.advanced_samples = 0
        self.replica_workers: int | None = None
        self.profiler = profiler or LayerProfiler(clock_for(world.device))
        # Elsewhere operations contain collectives, whose wall time is that of the slowest peer.
        computes_only = world.dims.tensor * world.dims.context * world.dims.expert == 1 and settings.zero_stage < 3
        is_processor_time = isinstance(self.profiler.clock, CpuClock) and self.profiler.clock.is_processor_time
        self.profiler.measures_stall = computes_only and is_processor_time and not self.partition.shards
        self.techniques = Techniques(settings.techniques, family=family, store=self.item_store, world=world)
        self._item_names = tuple(item.name for item in family.items)
        self.pipeline_config = settings.pipeline
        self._codec, self.replica_codec = None, None
        self._fused: frozenset[str] = frozenset()
        if settings.compression.replica_rank is not None and world.dims.data > 1:
            seed = settings.pipeline.seed
            self.replica_codec = ReplicaCodec(settings.compression, self.item_store, world, seed, self.profiler.clock)
        if settings.compression.fuse_ties:
            self._fused = fused_parameters(self.item_store, family.ties, world)
        self._replicas: ExpertReplicas | None = None
        if isinstance(dispatcher, ReplicaDispatcher):
            self._replicas = ExpertReplicas(self.item_store, dispatcher, settings.precision.compute)
        self.grad_reducer = GradientReducer(
            self.item_store,
            world,
            overlap=settings.overlap_reduction,
            dtype=settings.reduce_dtype,
            compressor=self.replica_codec,
            excluded=self._fused,
            experts=self._replicas,
        )
        if settings.compression.boundary_rank is not None:
            self._codec = BoundaryCodec(
                settings.compression, self.item_store, settings.pipeline.seed, self.profiler.clock
            )
        self._presence = TiedPresence()
        experts = sharded_experts(builder.sharding)
        self._squares = ItemSquares((*self._item_names, *self.partition.shards), family.ties, experts)
        self._sums = StepSums(family.items, world, sharded=fsdp is not None, num_squares=self._squares.length)
        self._launched: LaunchedStep | None = None
        self._measured_from_ns = 0
        self._pipeline: Pipeline | None = None
        self.is_warm = False

    @property
    def heartbeat(self) -> HeartbeatWriter:
        """Reports what this rank does to its launcher."""
        return self.profiler.heartbeat

    @property
    def can_defer(self) -> bool:
        """Whether a step may be launched before the result of the last one is collected.

        A dynamic loss scale and error feedback depend on that result, and Apex reads it on the host.
        """
        is_compressed = self._codec is not None or self.replica_codec is not None
        return not is_compressed and not self.scaler.is_dynamic and self.item_store.optimizers.skips_on_device

    @property
    def weight_decay(self) -> float:
        """Weight decay of matrices in the next update."""
        schedule = self.settings.weight_decay
        return self.settings.optimizer.weight_decay if schedule is None else schedule.at(self.advanced_samples)

    @property
    def local_names(self) -> tuple[str, ...]:
        """Names of the items that the partition assigns to this pipeline rank, in list order."""
        return self.partition.items_of_rank(self.world.pipeline_rank)

    def build(self) -> None:
        """Initialize the local items with random weights."""
        for name in self.local_names:
            self.item_store.build(name)

    def restore(
        self,
        read: Callable[[str], ItemState],
        step: int,
        *,
        advanced_samples: int = 0,
        loss_scale: Mapping[str, Any] | None = None,
        techniques: Mapping[str, Any] | None = None,
        replica_workers: int | None = None,
    ) -> None:
        """Load the state of the local items, and resume schedules and techniques.

        Args:
            read: returns the state of an item by its name.
            step: number of completed steps.
            advanced_samples: position of the learning-rate schedule, in samples.
            loss_scale: state of the loss scaler.
            techniques: state of ``Techniques.state_dict``.
            replica_workers: number of pipeline ranks that compress between their replicas.
        """
        self.advanced_samples = advanced_samples
        self.scaler.load_state(loss_scale)
        for name in self.local_names:
            self.item_store.load_state(name, read(name))
        # After the items: techniques read their masks, and freeze their parameters.
        self.techniques.load_state_dict(techniques or {}, step)
        if replica_workers is not None:
            self.choose_replica_workers(replica_workers)

    @property
    def chooses_replica_workers(self) -> bool:
        """Whether the number of pipeline ranks that compress between replicas is chosen during the run."""
        return self.replica_codec is not None and self.settings.compression.choose_workers

    def choose_replica_workers(self, count: int) -> None:
        """Let the first ``count`` pipeline ranks compress between replicas; no effect where the number is fixed."""
        if self.replica_codec is not None and self.settings.compression.choose_workers:
            self.replica_workers = self.replica_codec.num_compressing_stages = count

    def _configure_for(self, batch: Batch) -> None:
        """Gather what replicas share, and rebuild the pipeline where the sizes of ``batch`` are others."""
        self.item_store.gather_shards()
        if self._replicas is not None:
            self._replicas.begin(self.scaler.scale)
        if (needed := self.settings.pipeline.for_batch(batch)) != self.pipeline_config:
            self.pipeline_config = needed
            self._pipeline = None

    def pipeline(self) -> Pipeline:
        """Stages and schedule of the active partition; built on the first call after a change."""
        if self._pipeline is None:
            self.is_warm = False
            self._pipeline = Pipeline(
                self.pipeline_config,
                self.partition,
                self.world,
                self.family.items,
                self.item_store.modules,
                self.techniques.frozen_items,
                self.profiler,
                self.grad_reducer.item_is_final if self.grad_reducer.overlaps else None,
                self._codec,
                VocabularyGroups.of(
                    self.world, self.family, self.item_store.sharding.region, weighs_steps=self.settings.per_token_loss
                ),
            )
        return self._pipeline

    def train_step(self, batch: Batch, *, sampled: bool, advance: int = 1) -> StepResult:
        """Run one optimizer step and wait for it. Every rank calls this with the same batch, or its replica's shard.

        Args:
            batch: samples of all replicas or of this rank's; ``batch.step`` starts at 1.
            sampled: whether the costs of items are measured.
            advance: number of samples by which the learning-rate schedule advances after an update.

        Returns:
            The result, equal on all ranks except for ``step_ns``.

        Raises:
            RuntimeError: the step has no result, an error of the engine.
        """
        self.launch_step(batch, sampled=sampled, advance=advance)
        result = self.collect()
        if result is None:
            raise RuntimeError("the launched step has no result")
        return result

    def launch_step(self, batch: Batch, *, sampled: bool, advance: int = 1) -> StepResult | None:
        """Queue one optimizer step without waiting for the device.

        Args:
            batch: samples of all replicas or of this rank's.
            sampled: whether the costs of items are measured.
            advance: number of samples by which the learning-rate schedule advances after an update.

        Returns:
            The result of the step before, if it was not collected; the host waits for it once this step's forward and
            backward are queued.
        """
        # ``can_defer`` is checked here, too: without it a caller would train with an outdated loss scale.
        self.heartbeat.begin_step(batch.step, is_cold=not self.is_warm)
        result = None if self.can_defer else self.collect()
        if self._launched is None:
            self._measured_from_ns = time.perf_counter_ns()
        self.profiler.begin_step(sampled, batch.step)
        self.profiler.calibrate(self.world.device)
        self._configure_for(batch)
        self.heartbeat.enter(Phase.TECHNIQUE)
        # Before the pipeline is built, since a hook may freeze items.
        for technique in self.techniques:
            technique.before_step(batch.step)
        pipeline = self.pipeline()
        pipeline.loss_scale = self.scaler.scale
        if self.replica_codec is not None:
            self.replica_codec.begin_step(batch.step, self.scaler.scale)
        self.heartbeat.enter(Phase.PIPELINE)
        loss = pipeline.train_step(self._local_batch(batch))
        self.heartbeat.enter(Phase.REDUCTION)
        if batch.problem is not None:
            loss.fill_(math.nan)  # all ranks see it in the mean, and none updates
        for technique in self.techniques:
            technique.after_backward(batch.step)
        squares = self.prepare_gradients(batch.step)
        sums = self._sums.add(loss, pipeline.metrics(), squares)
        # The result of the last step decides the learning rate of this one.
        result = result or self.collect()
        # Both schedules are read at the samples before this step, as Megatron does, and advance after the update.
        update = Update(
            lr=self.settings.rate.at(self.advanced_samples),
            weight_decay=self.weight_decay,
            decoupled_lr=rate_at(self.settings.decoupled_rate, self.advanced_samples),
            divisor=clip_divisor(sums[0], self.settings.clip),
            skip=sums[:2].isfinite().all().logical_not().float(),
        )
        self.heartbeat.enter(Phase.OPTIMIZER)
        self.item_store.step(update, self.world.groups.data)
        if self._replicas is not None:
            self._replicas.outdate()
        self.heartbeat.enter(Phase.RESULT)
        self._launched = LaunchedStep(
            sums=HostCopy(sums),
            measured=self.profiler.measurements() if sampled else None,
            microbatches=self.pipeline_config.microbatches,
            advance=advance,
            rates=(update.lr, update.decoupled_lr),
        )
        self.is_warm = True
        return result

    def collect(self) -> StepResult | None:
        """Wait for the launched step and return its result; None without one. Every rank calls this."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None
        sums = self._sums.read(launched.sums.read().tolist())
        updated = math.isfinite(sums.norm) and math.isfinite(sums.loss)
        is_scale_search = not updated and math.isfinite(sums.loss) and self.scaler.can_fall
        if updated:
            self.advanced_samples += launched.advance
        else:
            # Error feedback would add the infinities of this step to the gradients of the next one.
            for codec in (each for each in (self._codec, self.replica_codec) if each is not None):
                codec.drop_nonfinite()
        self.scaler.update(finite=updated)
        now = time.perf_counter_ns()
        step_ns, self._measured_from_ns = now - self._measured_from_ns, now
        return StepResult(
            loss=sums.loss,
            grad_norm=sums.norm,
            rate=launched.rates[0],
            decoupled_rate=launched.rates[1],
            next_rate=self.settings.rate.at(self.advanced_samples),
            next_decoupled_rate=rate_at(self.settings.decoupled_rate, self.advanced_samples),
            loss_scale=self.scaler.scale,
            updated=updated,
            is_scale_search=is_scale_search,
            step_ns=step_ns,
            gathered_costs=self._gather_costs(launched),
            metrics=sums.metrics,
            compiled_graphs=sums.compiled_graphs,
            compression=self._compression(),
        )

    def _compression(self) -> dict[str, Any]:
        """Measurements of the compression in this step; empty where none are requested. Every rank calls this."""
        if not self.settings.compression.checks:
            return {}
        if self.world.device.type == "cuda":
            # CUDA events can be read only after the device has reached them.
            torch.cuda.synchronize(self.world.device)
        boundaries = self._codec.stats if self._codec is not None else {}
        replicas = self.replica_codec.stats if self.replica_codec is not None else {}
        local = {
            "boundaries": {name: one.document(self.profiler.clock) for name, one in boundaries.items()},
            "replicas": {name: one.document(self.profiler.clock) for name, one in replicas.items()},
            "memory_bytes": self.item_store.memory_bytes,
        }
        return merge_stats(all_gather_objects(self.world, local))

    def _local_batch(self, batch: Batch) -> Batch:
        microbatches = self.pipeline_config.microbatches
        local = batch.of_process(self.world, microbatches)
        return local.weighed_over_step(self.world, microbatches) if self.settings.per_token_loss else local

    def prepare_gradients(self, step: int) -> torch.Tensor:
        """Reduce, mask and unscale the gradients in place; their squares by item. Every rank calls this.

        The order of the additions determines the bits: microbatches, then replicas, then copies of tied weights.

        Args:
            step: number of the step, from 1, for the hooks of the techniques.

        Returns:
            Float64 ``[items]`` on the device: the sums of squares of this process's gradients before clipping, without
            the loss scale.
        """
        ties = self.family.ties
        self.grad_reducer.finish()
        add_partial_gradients(self.item_store)
        owners = self.partition.item_ranks()
        self._presence.keep_for((self.partition, self.techniques.frozen_items))
        if self._fused:
            add_fused_gradients(self.item_store, ties, owners, self.world, self._presence, self._fused)
        add_tied_gradients(self.item_store, ties, owners, self.world, self._presence, self._fused)
        # With ``freeze_tied`` the other copy of a frozen tied weight still adds a gradient.
        drop_gradients(self.item_store, self.techniques.frozen_parameters())
        # After all sums: each of them could add to the gradient of a pruned weight.
        zero_pruned_gradients(self.item_store)
        gradients = [p.grad for _, _, p in self.item_store.parameters() if p.grad is not None]
        unscale(gradients, self.scaler.scale)
        for technique in self.techniques:
            technique.before_optimizer_step(step)
        if self.profiler.observer is not None:
            self.profiler.observer.gradients()
        return self._squares(self.item_store)

    def _gather_costs(self, launched: LaunchedStep) -> CostGather | None:
        """Start to gather the costs of a profiled step, whose end the device has reached."""
        if launched.measured is None:
            return None
        world = self.world
        peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else peak_memory_bytes()
        local = launched.measured.result(self.local_names, launched.microbatches) | {"peak_memory_bytes": peak}
        names = [self.partition.items_of_rank(rank) for rank in range(world.dims.pipeline)]
        return CostGather(world, (*self._item_names, *self.partition.shards), names, local)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over ``batches``, without gradients or dropout."""
        return self.evaluate_losses(batches)["loss"]

    def evaluate_losses(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean over ``batches`` of ``loss``, then of the scalar metrics of the head, such as the two losses of BERT."""
        losses: dict[str, list[float]] = {}
        head = self._item_names[-1]
        for batch in batches:
            self.heartbeat.enter(Phase.EVALUATE)
            self.profiler.begin_step(False, batch.step)
            self._configure_for(batch)
            loss = self.pipeline().evaluate(self._local_batch(batch))
            sums = self._sums.read(HostCopy(self._sums.add(loss, self.pipeline().metrics())).read().tolist())
            parts = {name: values[0] for name, values in sums.metrics.get(head, {}).items() if len(values) == 1}
            for name, value in ({"loss": sums.loss} | parts).items():
                losses.setdefault(name, []).append(value)
        # FSDP2 frees gathered parameters in the backward, which an evaluation lacks.
        self.item_store.reshard()
        return {name: sum(values) / len(values) for name, values in losses.items()}

    @torch.no_grad()
    def score(self, batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Per-sample metrics of the last item, without gradients or dropout, equal on all ranks.

        Args:
            batch: samples of all replicas.
            names: metrics of the last item that have one value per sample.

        Returns:
            Metric -> float64 tensor ``[samples]`` on the CPU, in the order of the batch.
        """
        self.profiler.begin_step(False, batch.step)
        self._configure_for(batch)
        part = self._local_batch(batch)
        pipeline = self.pipeline()
        pipeline.evaluate(part)
        reported = pipeline.metrics_of(self._item_names[-1])
        samples = len(part.inputs[self.family.items[-1].inputs[0]])
        # Zeros on all pipeline ranks but the last one make the sum below exact.
        own = torch.zeros(len(names), samples, dtype=torch.float64)
        if reported:
            own = torch.stack([torch.cat(reported[name]).to("cpu", torch.float64) for name in names])
        sum_over_pipeline(self.world, own)
        whole = torch.cat(gather_over(self.world.groups.data, own), dim=1)
        self.item_store.reshard()
        return dict(zip(names, whole, strict=True))

    def has_finite_state(self) -> bool:
        """Whether the parameters and moments of all ranks are finite. Every rank calls this."""
        return all_agree(self.world, is_state_finite(self.item_store))

    def has_finite_loss(self, batch: Batch) -> bool:
        """Whether the loss of ``batch`` is finite with the current weights. Every rank calls this.

        An update can leave weights that are finite but so large that the next forward overflows. The forward is run
        only where a weight exceeds the twelfth root of the largest number of the compute dtype (fp16: 2.5, else
        1,600): between two normalizations a value is a product of up to five weights, and its square is taken.
        """
        # All ranks skip the evaluation, or none does: it contains collectives.
        limit = torch.finfo(self.settings.precision.compute).max ** (1 / 12)
        if all_agree(self.world, largest_weight(self.item_store) <= limit):
            return True
        return math.isfinite(self.evaluate([batch]))

    def after_step(self, step: int) -> Sequence[Event]:
        """Run the dynamic techniques at the boundary after ``step``. Every rank calls this.

        Returns:
            What changed, in order.
        """
        self.heartbeat.enter(Phase.TECHNIQUE)
        events = [*self.profiler.events(step), *self.techniques.after_step(step)]
        if any(event.rebuild for event in events):
            self._pipeline = None
        return events

    def repartition(self, after: Partition) -> MoveReport:
        """Move items between pipeline ranks and activate the partition ``after``. Every rank calls this.

        Raises:
            MoveError: a transfer failed; the old partition is still active.
            RuntimeError: the result of the last step was not collected.
        """
        if self._launched is not None:
            raise RuntimeError("a step was launched whose result was not collected")
        self.heartbeat.enter(Phase.MIGRATE)
        after = replace(after, shards=self.partition.shards)
        # The partition changes only after the move has succeeded on all ranks; see ``MoveError``.
        report = move_items(self.item_store, self.partition, after, self.world)
        self.partition = after
        # Its modules and receive buffers are those of the old partition.
        self._pipeline = None
        return report

    def place_experts(self, placements: Placements) -> ExpertMoveReport:
        """Move experts between the ranks that share them. Every rank calls this.

        Args:
            placements: item -> rank of each expert, or its ranks with the preferred owner first.

        Raises:
            MoveError: a transfer failed; the old placement is still active.
            RuntimeError: the result of the last step was not collected.
        """
        if self._launched is not None:
            raise RuntimeError("a step was launched whose result was not collected")
        self._pipeline = None
        self.heartbeat.enter(Phase.MIGRATE)
        return move_experts(self.item_store, placements, self.world)

    def set_world(self, world: World) -> None:
        """Continue on the ranks of ``world`` after others were released; the partition has no stages on those."""
        self.world = self._sums.world = world
        self.partition = self.partition.renumbered()
        self._pipeline = None
        for technique in self.techniques:
            technique.set_world(world)
        if self.replica_codec is not None:
            self.replica_codec.set_world(world)
