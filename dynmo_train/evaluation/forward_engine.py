"""Forward passes of a checkpoint's model over pipeline, tensor and data ranks, without any state of training.

The engine has no optimizer, no gradient buffers and no autograd graph. Each rank loads the layers of its pipeline
stage straight in the compute dtype, so a bfloat16 evaluation needs 2 bytes a parameter. (The training engine, which
evaluated before, kept float32 weights and a cast copy: 6 bytes.) Validation during training still runs in the training
engine, whose weights are the live ones.

    Batch --shard by replica, chunk--> microbatches
                                           |
        stage 0: embedding, layers --send--> stage 1: layers --send--> last stage: layers, head
                                                                           |
                                       metrics per sample <--gather-- ItemOutput.metrics

Invariants:

* A score is the same bit pattern in every layout without tensor parallelism. Microbatches are formed from the whole
  batch, and random numbers (hashed attention draws its axes) are seeded by microbatch index and layer name.
* Weights are cast once at load time; training casts the same float32 values at each step, so the bits are equal.
* Tied weights share memory where both ends are on one rank.

Microbatches go through the pipeline one after another (GPipe's forward order). Sends do not block, so a stage computes
microbatch ``i + 1`` while microbatch ``i`` is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from .._common.errors import UsageError
from ..config.sections.evaluation import InferenceConfig
from ..data.batch import Batch
from ..formats.checkpoint import Checkpoint
from ..models.families.multi_token import PREDICTION
from ..models.layer_list import (
    EXPERT_BIAS,
    HIDDEN,
    BoundaryShape,
    ItemOutput,
    ModelFamily,
    expert_biases_of,
    live_before,
    masks_of,
    output_of,
    parameters_of,
)
from ..models.layers.feed_forward import join_gated_layers
from ..models.layers.sparse_formats import BUILT_IN, SparseTable
from ..models.lora import merge_adapters
from ..models.techniques.early_exit import EXITED
from ..optim.item_sharding import ItemBuilder, ItemSharding
from ..optim.precision import float32_matmuls
from ..parallel.consensus import run_on_all_ranks
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import World, gather_over, sum_over_pipeline
from ..parallel.seeding import seeded
from ..parallel.tensor_parallel import tensor_region
from ..pipeline.partition import Partition, uniform_partition
from .model_checkpoint import ModelCheckpoint

SEED = 0


class ForwardEngine:
    """One pipeline stage of a model in evaluation mode, and its links to the neighbouring stages.

    Args:
        family: the whole model.
        modules: item name -> module of this stage's items, on ``world.device``.
        partition: one stage per pipeline rank.
        world: the process groups.
        boundary: shapes and dtype of the values that cross a stage boundary, for one microbatch.

    Attributes:
        items: specifications of this stage's items, in list order.
        entering: names of the values that the previous stage sends; empty on the first stage.
        leaving: names of the values that the next stage receives; empty on the last stage.
    """

    def __init__(
        self,
        family: ModelFamily,
        modules: Mapping[str, nn.Module],
        partition: Partition,
        world: World,
        boundary: BoundaryShape,
    ) -> None:
        self.family, self.world, self.boundary = family, world, boundary
        self.modules = {name: module.eval() for name, module in modules.items()}
        begin = sum(map(len, partition.stages[: world.pipeline_rank]))
        end = begin + len(partition.stages[world.pipeline_rank])
        self.items = family.items[begin:end]
        self.entering = live_before(family.items, begin) if begin else ()
        self.leaving = live_before(family.items, end) if end < len(family.items) else ()
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self.boundary.dtype

    @torch.no_grad()
    def score(self, batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Per-sample metrics of the head; all ranks call this and get the same values.

        Args:
            batch: the samples of all replicas; ``microbatches`` is the number per replica.
            names: metrics of the head that have one value per sample.

        Returns:
            Metric name -> float64 ``[samples]`` on CPU, in the order of the batch.
        """
        microbatches = batch.microbatches or 1
        local = batch.of_replica(self.world.data_rank, self.world.dims.data, microbatches)
        head = self.family.items[-1]
        values = torch.zeros(len(names), len(local.inputs[head.inputs[0]]), dtype=torch.float64)
        metrics = self._forward(local, microbatches)
        if not self.leaving:
            values = torch.stack(
                [torch.cat([each[name] for each in metrics]).to("cpu", values.dtype) for name in names]
            )
        # Only the last stage has values; adding zeros is exact.
        sum_over_pipeline(self.world, values)
        return dict(zip(names, torch.cat(gather_over(self.world.groups.data, values), dim=1), strict=True))

    def _forward(self, batch: Batch, microbatches: int) -> list[Mapping[str, torch.Tensor]]:
        """Run this replica's microbatches through this stage; the last item's metrics of each microbatch."""
        device = self.world.device
        boundary = self.boundary if batch.tokens is None else self.boundary.with_tokens(batch.tokens)
        inputs = {
            name: batch.inputs[name].to(device).chunk(microbatches)
            for name in dict.fromkeys(name for item in self.items for name in item.inputs)
        }
        metrics: list[Mapping[str, torch.Tensor]] = []
        with float32_matmuls(device, self.dtype):
            for index in range(microbatches):
                values = {name: torch.empty_like(boundary.empty(name), device=device) for name in self.entering}
                for buffer in values.values():
                    self.receive(buffer, self.world.pipeline_rank - 1)
                for item in self.items:
                    arguments = [values[name] for name in item.reads] + [inputs[name][index] for name in item.inputs]
                    with seeded(device, SEED, batch.step, batch.first_microbatch + index, item.name):
                        result = self.modules[item.name](*arguments)
                    values[item.writes] = output_of(result)
                    if isinstance(result, ItemOutput):
                        values.update(result.side)
                        if not self.leaving and item is self.items[-1]:
                            metrics.append(result.metrics)
                for name in self.leaving:
                    self.send(values[name], self.world.pipeline_rank + 1)
            self.wait_for_sends()
        return metrics

    def receive(self, buffer: torch.Tensor, pipeline_rank: int) -> None:
        """Receive from a pipeline rank of this replica; blocks until the tensor is here.

        Args:
            buffer: ``[...]``, of the shape and dtype of the sent tensor.
            pipeline_rank: the sender, from 0.
        """
        dist.recv(buffer, src=self._global_rank(pipeline_rank))

    def send(self, tensor: torch.Tensor, pipeline_rank: int) -> None:
        """Send without blocking.

        Args:
            tensor: of any shape ``[...]``; the receiver has a buffer of its shape and dtype.
            pipeline_rank: the receiver, in this replica, from 0.
        """
        # The memory of a tensor must stay allocated until it has been sent.
        self._sends = [(work, sent) for work, sent in self._sends if work is not None and not work.is_completed()]
        tensor = tensor.contiguous()
        self._sends.append((dist.isend(tensor, dst=self._global_rank(pipeline_rank)), tensor))

    def wait_for_sends(self) -> None:
        """Wait for all sends, and free their buffers."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()

    def _global_rank(self, pipeline_rank: int) -> int:
        """Global rank of a pipeline rank with this process's data and tensor rank."""
        return self.world.global_rank(self.world.peer(pipeline_rank))


def load_forward_engine(
    source: ModelCheckpoint,
    inference: InferenceConfig,
    world: World,
    *,
    tokens: int,
    wrap: Callable[[ModelFamily], ModelFamily] | None = None,
    rows: int | None = None,
) -> ForwardEngine:
    """Build a forward engine with the weights of a checkpoint; all ranks call this.

    Args:
        source: the checkpoint.
        inference: ``micro_batch_size``, and the dtype by ``bf16`` and ``fp16``.
        world: the process groups.
        tokens: tokens per sample; a batch may override it.
        wrap: makes the family to run from the checkpoint's, such as one whose head scores.
        rows: rows per microbatch; by default one per sample.

    Raises:
        UsageError: the model cannot be partitioned over these ranks.
        CheckpointError: a tensor is missing or damaged.
    """
    family = source.family if wrap is None else wrap(source.family)
    partition = uniform_partition(family.items, world.dims.pipeline)
    run_on_all_ranks(world, lambda: check_layout(source, partition, world.dims))
    dtype = torch.bfloat16 if inference.bf16 else torch.float16 if inference.fp16 else torch.float32
    hidden = (rows or inference.micro_batch_size, tokens, source.model["hidden_size"])
    boundary = BoundaryShape(shapes={HIDDEN: hidden, EXITED: hidden[:2], PREDICTION: hidden}, dtype=dtype)
    thresholds = source.checkpoint.manifest["dynamic"]["sparse_thresholds"]
    loader = _ItemLoader(source.checkpoint, family, world, dtype, SparseTable(thresholds=thresholds or BUILT_IN))
    names = partition.stages[world.pipeline_rank]
    modules = run_on_all_ranks(world, lambda: {name: loader.load(name) for name in names})
    return ForwardEngine(family, modules, partition, world, boundary)


def check_layout(source: ModelCheckpoint, partition: Partition, dims: ParallelDims) -> None:
    """Check that a model can be partitioned over some ranks.

    Args:
        source: the checkpoint.
        partition: stages of the layer list.
        dims: parallel sizes.

    Raises:
        UsageError: a width is not a multiple of the tensor-parallel size, or there are more pipeline ranks than items.
    """
    model = source.model
    sizes = {
        "attention heads": model["num_attention_heads"],
        "key-value heads": model.get("num_key_value_heads", model["num_attention_heads"]),
        "columns of the MLP": model["ffn_hidden_size"],
    }
    for what, size in sizes.items():
        if size % dims.tensor:
            raise UsageError(
                f"--tensor-model-parallel-size {dims.tensor} must divide the model's {what}, {size}; give another size"
            )
    items = sum(map(len, partition.stages))
    if not all(partition.stages[at] for at in (0, -1)) or dims.pipeline > items:
        raise UsageError(
            f"--pipeline-model-parallel-size {dims.pipeline}: must be at most {items}, the number of items of the"
            " model; give a smaller size"
        )


class _ItemLoader:
    """Builds items on the meta device, and assigns this rank's part of the stored weights in the compute dtype."""

    def __init__(
        self, checkpoint: Checkpoint, family: ModelFamily, world: World, dtype: torch.dtype, sparse: SparseTable
    ) -> None:
        self.checkpoint, self.dtype, self.sparse, self.device = checkpoint, dtype, sparse, world.device
        self.sharding = ItemSharding(family=family, region=tensor_region(world, sequence=False))
        self.builder = ItemBuilder(sharding=self.sharding, device=world.device)
        # Stored name and split dimension -> tensor: tied weights of one rank share memory.
        self._loaded: dict[tuple[str, int | None], torch.Tensor] = {}

    def load(self, item: str) -> nn.Module:
        """Load one item without gradients; raises ``CheckpointError`` for a missing or damaged tensor."""
        # On the meta device: initial weights would be drawn only to be replaced.
        module = self.builder.blueprint(item)
        weights = {name[len(item) + 1 :]: self._weight(name) for name in parameters_of(item, module)}
        # ``assign``: parameters on the meta device have no memory to copy to, and tied weights must stay one tensor.
        module.load_state_dict(weights, assign=True)
        module.requires_grad_(False)
        masks = {}
        for name, layer in masks_of(item, module).items():
            if self.checkpoint.has(f"{name}.mask"):
                mask = self._read(f"{name}.mask", torch.bool)
                layer.weight.mul_(mask)
                # The update of an adapter is not pruned: with it, the weight is dense.
                if layer.adapter is None:
                    masks[name] = mask
        # One product instead of two, as fast as the model without adapters.
        merge_adapters(module)
        for name, bias in expert_biases_of(item, module).items():
            # Not ``copy_``: the buffer is on the meta device, too. In float32, as the scores that it is added to.
            router = module.get_submodule(name[len(item) + 1 :].rpartition(".")[0])
            router.register_buffer(EXPERT_BIAS, self._read(name, bias.dtype), persistent=False)
        join_gated_layers(module)
        for name, layer in masks_of(item, module).items():
            if name in masks:
                layer.set_mask(masks[name], self.sparse)
        return module

    def _weight(self, name: str) -> torch.Tensor:
        key = self.checkpoint.stored_name(name), self.sharding.split_dim(name)
        if key not in self._loaded:
            self._loaded[key] = self._read(name, self.dtype)
        return self._loaded[key]

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of a stored tensor on the device; never a view, which would keep the whole tensor alive."""
        local = self.sharding.local_from_checkpoint(name, self.checkpoint.load([name])[name])
        is_view = local.untyped_storage().nbytes() > local.nbytes
        return local.to(self.device, dtype, copy=is_view, memory_format=torch.contiguous_format)
