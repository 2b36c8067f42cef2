"""The training engine of one worker: its items, its part of the pipeline, and what one optimizer step does.

It knows nothing of files, logs or planners; ``trainer/loop.py`` drives it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .._common.portable import peak_memory_bytes
from ..data.batch import Batch
from ..dynamics.technique import Event, TechniqueBuilder, Techniques
from ..models.layer_list import ModelFamily
from ..models.sparse_formats import SparseTable
from ..optim.adamw import AdamWSettings
from ..optim.compression.boundary import BoundaryCodec
from ..optim.compression.powersgd import ReplicaCodec
from ..optim.compression.settings import NO_COMPRESSION, CompressionSettings
from ..optim.compression.stats import merge_stats
from ..optim.compression.tied_embeddings import add_fused_gradients, fused_parameters
from ..optim.grad_reducer import GradientReducer
from ..optim.gradients import (
    add_tied_gradients,
    add_token_gradients,
    clip_gradients,
    gradient_norm,
    zero_pruned_gradients,
)
from ..optim.item_store import ItemState, ItemStore
from ..optim.lr_schedule import LearningRate, WeightDecay
from ..optim.precision import FLOAT32_PRECISION, LossScaler, Precision, unscale
from ..parallel.collectives import replica_gather
from ..parallel.device_clock import clock_for
from ..parallel.expert_parallel import token_dispatcher
from ..parallel.fsdp import FsdpSharding
from ..parallel.process_groups import (
    World,
    all_agree,
    all_gather_objects,
    gather_over,
    sum_over_pipeline,
    sum_over_replicas,
)
from ..parallel.tensor_parallel import tensor_region
from ..pipeline.costs import merge_rank_costs
from ..pipeline.migration import MoveReport, move_items
from ..pipeline.partition import Partition
from ..pipeline.profiler import LayerProfiler
from ..pipeline.schedule import Pipeline, PipelineConfig


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What fixes the mathematics of a run, beside the model.

    Attributes:
        weight_decay: over the samples of the run; None is constantly that of ``adamw``.
        clip: limit of the global gradient norm; 0 clips never.
        techniques: what builds the dynamic techniques that are on, by name, in the order in which their hooks are
            called.
        sparse: in which form products with pruned weights run.
        precision: types of the arithmetic; the boundary's type is its ``compute``.
        fused_adam: NVIDIA's ``FusedAdam`` where it updates the weights; None where torch's AdamW does.
        fused_norms: NVIDIA's normalisations in the place of torch's.
        overlap_reduction: whether the replicas' gradients are added while others are still being computed.
        sequence_parallel: whether the stream between tensor-parallel regions is cut along the tokens; the boundary's
            shape is then that of a part.
        zero_stage: 0: every replica holds whole parameters and moments; 1 and 2: its rows between steps; 3: always.
        compression: of gradients on their way to other processes.
    """

    pipeline: PipelineConfig
    adamw: AdamWSettings
    rate: LearningRate
    clip: float
    sparse: SparseTable
    techniques: Mapping[str, TechniqueBuilder] = field(default_factory=dict)
    weight_decay: WeightDecay | None = None
    precision: Precision = FLOAT32_PRECISION
    fused_adam: type[Any] | None = None
    fused_norms: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    overlap_reduction: bool = False
    sequence_parallel: bool = False
    zero_stage: int = 0
    compression: CompressionSettings = NO_COMPRESSION


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step gave, the same on every worker but for ``costs``.

    Attributes:
        loss: mean over the step's tokens.
        grad_norm: before clipping.
        rate: the learning rate of this step's update.
        next_rate: that of the next update, to which the schedule has advanced; Megatron's log shows this one.
        loss_scale: the scale that the next step will use.
        updated: False where the loss or a gradient was not finite; the weights and the schedule then stayed as they
            were.
        is_scale_search: whether only scaled gradients overflowed, and the dynamic loss scale can still fall.
        step_ns: wall time of this worker.
        figures: what items report (auxiliary losses, routing): item -> figure -> one or more values, means over the
            microbatches, in list order.
        costs: one object a worker (``items``, arrays as in the profile, ``busy_ns``, ``peak_memory_bytes``), in order
            of worker, where the step was sampled.
        compression: what compression did, as ``compression.report`` has it; empty where nothing is measured.
    """

    loss: float
    grad_norm: float
    rate: float
    next_rate: float
    loss_scale: float
    updated: bool
    step_ns: int
    costs: list[dict[str, Any]] | None
    is_scale_search: bool = False
    metrics: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)
    compression: Mapping[str, Any] = field(default_factory=dict)

    @property
    def losses(self) -> dict[str, float]:
        """``lm_loss`` first, then whatever scalars the items report, each the mean over its items, in list order."""
        scalars: dict[str, list[float]] = {}
        for metrics in self.metrics.values():
            for name, values in metrics.items():
                if len(values) == 1:
                    scalars.setdefault(name, []).append(values[0])
        means = {name: sum(values) / len(values) for name, values in scalars.items()}
        return {"lm_loss": self.loss} | means

    @property
    def counts(self) -> dict[str, dict[str, list[float]]]:
        """What the items count, such as tokens by expert: figure -> item -> values, in list order."""
        counts: dict[str, dict[str, list[float]]] = {}
        for item, metrics in self.metrics.items():
            for name, values in metrics.items():
                if len(values) > 1:
                    counts.setdefault(name, {})[item] = values
        return counts


class Engine:
    """Holds this worker's items under a partition, and trains, evaluates, moves and exports them.

    ``is_warm`` says whether a step has run since the stages were last built: the first one is no measure of costs.
    ``profiler`` measures the items, and may make them take stated times; by default it measures alone.
    ``shape`` is what the pipeline is built for; it follows the batches. ``advanced_samples`` is the position of the
    learning-rate schedule, in samples; steps without an update do not count. ``replica_workers`` is how many workers
    were chosen to compress between their replicas; None before that, or where nothing is chosen.
    """

    def __init__(
        self,
        family: ModelFamily,
        settings: EngineSettings,
        partition: Partition,
        world: World,
        profiler: LayerProfiler | None = None,
    ) -> None:
        self.family, self.settings, self.world = family, settings, world
        self.partition = partition
        region = tensor_region(world, sequence=settings.sequence_parallel)
        fsdp = None
        if settings.zero_stage and world.dims.data > 1:
            fsdp = FsdpSharding(world, reshard=settings.zero_stage == 3, compute=settings.precision.compute)
        self.item_store = ItemStore(
            family,
            settings.adamw,
            world.device,
            settings.sparse,
            settings.fused_adam,
            region,
            fsdp,
            token_dispatcher(world),
            replica_gather(world),
            settings.fused_norms,
            settings.pipeline.compiled,
        )
        self.scaler = LossScaler(settings.precision.scaling)
        self.advanced_samples = 0
        self.replica_workers: int | None = None
        self.profiler = profiler or LayerProfiler(clock_for(world.device))
        self.techniques = Techniques(settings.techniques, family=family, store=self.item_store, world=world)
        self._item_names = tuple(item.name for item in family.items)
        self.shape = settings.pipeline
        self._codec, self._replica_codec = None, None
        self._fused: frozenset[str] = frozenset()
        if settings.compression.replica_rank is not None and world.dims.data > 1:
            seed = settings.pipeline.seed
            self._replica_codec = ReplicaCodec(settings.compression, self.item_store, world, seed, self.profiler.clock)
        if settings.compression.fuse_ties:
            self._fused = fused_parameters(self.item_store, family.ties, world)
        self._reducer = GradientReducer(
            self.item_store,
            world,
            overlap=settings.overlap_reduction,
            compressor=self._replica_codec,
            elsewhere=self._fused,
        )
        if settings.compression.boundary_rank is not None:
            self._codec = BoundaryCodec(
                settings.compression, self.item_store, settings.pipeline.seed, self.profiler.clock
            )
        self._pipeline: Pipeline | None = None
        self.is_warm = False

    @property
    def weight_decay(self) -> float:
        """The weight decay of matrices in the next update."""
        schedule = self.settings.weight_decay
        return self.settings.adamw.weight_decay if schedule is None else schedule.at(self.advanced_samples)

    @property
    def local_names(self) -> tuple[str, ...]:
        """Names of the items that the partition gives this worker, in list order."""
        stages = self.partition.stages_of_worker(self.world.pipeline_rank)
        return tuple(name for stage in stages for name in self.partition.stages[stage])

    def build(self) -> None:
        """Start with fresh weights."""
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
        """Start with the state that ``read`` gives for each item, as it was after ``step``.

        Args:
            advanced_samples: how far the learning rate's schedule had come, in samples.
            loss_scale: the state of the loss scale.
            techniques: what ``Techniques.state_dict`` returned.
            replica_workers: how many workers were chosen to compress between their replicas.
        """
        self.advanced_samples = advanced_samples
        self.scaler.load_state(loss_scale)
        for name in self.local_names:
            self.item_store.load_state(name, read(name))
        self.techniques.load_state_dict(techniques or {}, step)
        if replica_workers is not None:
            self.choose_replica_workers(replica_workers)

    @property
    def chooses_replica_workers(self) -> bool:
        """Whether it is to be chosen how many workers compress between their replicas."""
        return self._replica_codec is not None and self.settings.compression.choose_workers

    def choose_replica_workers(self, count: int) -> None:
        """From the next step on the first ``count`` workers compress between their replicas, where that is chosen."""
        if self._replica_codec is not None and self.settings.compression.choose_workers:
            self.replica_workers = self._replica_codec.workers = count

    def _fit(self, batch: Batch) -> None:
        """Have a pipeline for as many microbatches, and samples as long, as those of ``batch``."""
        needed = self.settings.pipeline.for_batch(batch)
        if needed != self.shape:
            self.shape = needed
            self._pipeline = None

    def pipeline(self) -> Pipeline:
        """The stages and the schedule for the partition in force; built when first asked for after a change."""
        if self._pipeline is None:
            self.is_warm = False
            self._pipeline = Pipeline(
                self.shape,
                self.partition,
                self.world,
                self.family.items,
                self.item_store.modules,
                self.techniques.frozen_items,
                self.profiler,
                self._reducer.item_is_final if self._reducer.overlaps else None,
                self._codec,
            )
        return self._pipeline

    def train_step(self, batch: Batch, *, sampled: bool, advance: int = 1) -> StepResult:
        """One optimizer step; ``batch.step`` counts from 1.

        Args:
            sampled: whether costs are measured.
            advance: by how much the schedule of the learning rate advances after the update: the samples of the batch.
        """
        started = time.perf_counter_ns()
        self.profiler.begin_step(sampled, batch.step)
        self._fit(batch)
        for technique in self.techniques:
            technique.before_step(batch.step)
        pipeline = self.pipeline()
        pipeline.loss_scale = self.scaler.scale
        if self._replica_codec is not None:
            self._replica_codec.begin(batch.step, self.scaler.scale)
        loss = pipeline.train_step(self._own_part(batch))
        for technique in self.techniques:
            technique.after_backward(batch.step)
        norm = self._prepare_gradients(batch.step)
        total = self._mean_loss(loss)
        updated = math.isfinite(norm) and math.isfinite(total)
        is_scale_search = not updated and math.isfinite(total) and self.scaler.can_fall
        rate = self.settings.rate.at(self.advanced_samples)
        if updated:
            clip_gradients(self.item_store, norm, self.settings.clip)
            self.item_store.update(rate, self.weight_decay)
            self.advanced_samples += advance
        else:
            self.item_store.zero_grad()
            for codec in (self._codec, self._replica_codec):
                if codec is not None:
                    codec.drop_nonfinite()
        self.scaler.update(finite=updated)
        metrics = self._metrics()
        step_ns = time.perf_counter_ns() - started
        self.is_warm = True
        costs = None
        if sampled:
            costs = merge_rank_costs(self.world.dims, all_gather_objects(self.world, self._costs()))
        return StepResult(
            loss=total,
            grad_norm=norm,
            rate=rate,
            next_rate=self.settings.rate.at(self.advanced_samples),
            loss_scale=self.scaler.scale,
            updated=updated,
            is_scale_search=is_scale_search,
            step_ns=step_ns,
            costs=costs,
            metrics=metrics,
            compression=self._compression(),
        )

    def _compression(self) -> dict[str, Any]:
        """What compression did in this step, where somebody asks; every process calls this."""
        if not self.settings.compression.checks:
            return {}
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        boundaries = self._codec.stats if self._codec is not None else {}
        replicas = self._replica_codec.stats if self._replica_codec is not None else {}
        told = {
            "boundaries": {name: one.document(self.profiler.clock) for name, one in boundaries.items()},
            "replicas": {name: one.document(self.profiler.clock) for name, one in replicas.items()},
            "memory_bytes": self.item_store.memory_bytes,
        }
        return merge_stats(all_gather_objects(self.world, told))

    def _own_part(self, batch: Batch) -> Batch:
        return batch.of_replica(self.world.data_rank, self.world.dims.data, self.shape.microbatches)

    def _prepare_gradients(self, step: int) -> float:
        ties = self.family.ties
        self._reducer.finish()
        add_token_gradients(self.item_store)
        owners = self.partition.owners()
        if self._fused:
            add_fused_gradients(self.item_store, ties, owners, self.world, self._fused)
        add_tied_gradients(self.item_store, ties, owners, self.world, self._fused)
        stopped = self.techniques.frozen_parameters()
        if stopped:
            for _, name, parameter in self.item_store.parameters():
                if name in stopped:
                    parameter.grad = None
        zero_pruned_gradients(self.item_store)
        gradients = [p.grad for _, _, p in self.item_store.parameters() if p.grad is not None]
        unscale(gradients, self.scaler.scale)
        for technique in self.techniques:
            technique.before_optimizer_step(step)
        return gradient_norm(self.item_store, self._item_names, ties, self.world)

    def _mean_loss(self, loss: torch.Tensor) -> float:
        """The step's loss at every process, from the parts that one worker of each replica knows."""
        return float(sum_over_replicas(self.world, sum_over_pipeline(self.world, loss)))

    def _metrics(self) -> dict[str, dict[str, list[float]]]:
        """What the items of all workers reported in the last step."""
        declared = [(item.name, name, length) for item in self.family.items for name, length in item.metrics]
        if not declared:
            return {}
        here = self.pipeline().metrics()
        parts = [
            here[item][name].reshape(length) if name in here.get(item, {}) else torch.zeros(length, dtype=torch.float64)
            for item, name, length in declared
        ]
        means = sum_over_replicas(self.world, sum_over_pipeline(self.world, torch.cat(parts))) / self.world.dims.data
        whole = means.split([length for _, _, length in declared])
        metrics: dict[str, dict[str, list[float]]] = {}
        for (item, name, _), values in zip(declared, whole, strict=True):
            metrics.setdefault(item, {})[name] = values.tolist()
        return metrics

    def _costs(self) -> dict[str, Any]:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
            peak = int(torch.cuda.max_memory_allocated(self.world.device))
        else:
            peak = peak_memory_bytes()
        names = self.local_names
        microbatches = self.shape.microbatches
        return {"items": names, "peak_memory_bytes": peak, **self.profiler.result(names, microbatches)}

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss over some batches, without gradient or dropout."""
        return self.evaluate_losses(batches)["loss"]

    def evaluate_losses(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The same as ``loss``, and behind it the means of what the head reports of it, such as BERT's two losses."""
        told: dict[str, list[float]] = {}
        head = self._item_names[-1]
        for batch in batches:
            self.profiler.begin_step(False, batch.step)
            self._fit(batch)
            loss = self._mean_loss(self.pipeline().evaluate(self._own_part(batch)))
            parts = {name: values[0] for name, values in self._metrics().get(head, {}).items() if len(values) == 1}
            for name, value in ({"loss": loss} | parts).items():
                told.setdefault(name, []).append(value)
        self.item_store.release()
        return {name: sum(values) / len(values) for name, values in told.items()}

    @torch.no_grad()
    def score(self, batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the last item reports of each sample, without gradient or dropout, the same at every process.

        Args:
            batch: of all replicas.
            names: of its figures that have a value for each sample.

        Returns:
            Name -> float64 ``[samples]`` on CPU, in the order of the batch.
        """
        self.profiler.begin_step(False, batch.step)
        self._fit(batch)
        part = self._own_part(batch)
        pipeline = self.pipeline()
        pipeline.evaluate(part)
        told = pipeline.metrics_of(self._item_names[-1])
        samples = len(part.inputs[self.family.items[-1].inputs[0]])
        own = torch.zeros(len(names), samples, dtype=torch.float64)
        if told:
            own = torch.stack([torch.cat(told[name]).to("cpu", torch.float64) for name in names])
        sum_over_pipeline(self.world, own)
        whole = torch.cat(gather_over(self.world.groups.data, own), dim=1)
        self.item_store.release()
        return dict(zip(names, whole, strict=True))

    def has_finite_state(self) -> bool:
        """Whether all parameters and moments are finite, at all processes; every process calls this."""
        moments = [
            each for item, _, p in self.item_store.parameters() for each in self.item_store.moments(item, p).values()
        ]
        largest = [_largest([p.detach() for _, _, p in self.item_store.parameters()]), _largest(moments)]
        return all_agree(self.world, all(math.isfinite(value) for value in largest))

    def has_finite_loss(self, batch: Batch) -> bool:
        """Whether the loss of ``batch`` is finite with the weights as they are; every process calls this.

        An update may leave weights that are finite, and so large that the next forward overflows. The forward runs
        only where a weight is above the twelfth root of the largest number of the arithmetic (fp16: 2.5, else 1,600):
        between two normalizations a value is a product of up to five weights, and its square is taken.
        """
        limit = torch.finfo(self.settings.precision.compute).max ** (1 / 12)
        if all_agree(self.world, _largest([p.detach() for _, _, p in self.item_store.parameters()]) <= limit):
            return True
        return math.isfinite(self.evaluate([batch]))

    def after_step(self, step: int) -> Sequence[Event]:
        """Let the dynamic techniques act at the boundary after ``step``; every worker calls this."""
        events = [*self.profiler.events(step), *self.techniques.after_step(step)]
        if any(event.rebuild for event in events):
            self._pipeline = None
        return events

    def repartition(self, after: Partition) -> MoveReport:
        """Move items so that ``after`` is active; raises ``MoveError`` with the old partition still in place."""
        report = move_items(self.item_store, self.partition, after, self.world)
        self.partition = after
        self._pipeline = None
        return report

    def set_world(self, world: World) -> None:
        """Go on among the processes of ``world``, on whose workers alone the partition has stages."""
        self.world = world
        self.partition = replace(self.partition, places=())
        self._pipeline = None
        for technique in self.techniques:
            technique.set_world(world)
        if self._replica_codec is not None:
            self._replica_codec.set_world(world)


def _largest(tensors: Sequence[torch.Tensor]) -> float:
    """The largest absolute value of some tensors, NaN where one is; synchronizes with the device once."""
    norms = [torch.linalg.vector_norm(each, math.inf) for each in tensors if each.numel()]
    return float(torch.stack(norms).max()) if norms else 0.0
