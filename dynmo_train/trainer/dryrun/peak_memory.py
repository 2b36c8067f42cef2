"""The peak memory of each worker in a dry run: model state, activations of microbatches, and transient memory.

Pure functions of the layer list, the configuration, and the stages and peaks that ``dynmo-plan simulate`` predicts. The
CUDA context, libraries and allocator overhead are not included.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..._common.vocabulary_order import LEAD
from ...config import Config
from ...data.registry import zero_microbatch
from ...models.experts.moe import MoeMlp
from ...models.experts.moe_shape import BALANCED
from ...models.families.bert import BertHead
from ...models.families.sharded_prediction import FEATURES, PREDICTIONS
from ...models.families.vocabulary_family import VocabularyShardedFamily
from ...models.float8 import float8_items, operand_bytes
from ...models.layer_list import HIDDEN, BoundaryShape, ModelFamily, live_before, vocabulary_rows
from ...models.sharding import cut_item, join_context
from ...models.vocabulary.embedding import Embedding
from ...models.vocabulary.embedding_grad import PendingRows, most_pending
from ...models.vocabulary.vocabulary_shards import ranks_of_shards
from ...optim.optimizers.registry import optimizer_settings, state_bytes
from ...parallel.context_parallel import ContextRegion, cut_chunks
from ...parallel.tensor_parallel import TOKENS_DIM, PendingGather, TensorRegion
from ...pipeline.expert_migration import experts_by_item
from ...pipeline.stage_module import save_products
from ..monitoring.profile_writer import FLOAT_BYTES
from ..settings_from_config import float8_settings
from .item_memory import (
    NO_ASSUMPTIONS,
    DataAssumptions,
    ItemMemory,
    ItemRunner,
    item_memory,
    single_bytes,
    transient_bytes,
)

# Gradients of chunks are summed in float64, see ``models/experts/expert_sums.py``.
_SUM_BYTES = 8


def recompute_runner(granularity: str) -> ItemRunner:
    """A function that calls an item as a run with this ``--recompute-granularity`` does."""
    if granularity == "none":
        return lambda item, *arguments: item(*arguments)
    # The arguments of ``pipeline_stage.py``, so that the same tensors are saved.
    selective: dict[str, Any] = {"context_fn": partial(save_products, [])} if granularity == "selective" else {}
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **selective)


def item_memories(config: Config, family: ModelFamily, boundary: BoundaryShape) -> dict[str, ItemMemory]:
    """The activation memory of each item on its first tensor-parallel rank, computed once for equal items.

    Items whose memory depends on data in other ways than :class:`DataAssumptions` are not included.
    """
    size = config.parallel.context_parallel_size
    inputs = {
        name: each if size == 1 else cut_chunks(each, 1, 0, size) for name, each in zero_microbatch(config).items()
    }
    context = None if size == 1 else ContextRegion(None, 0, size)
    run = recompute_runner(config.training.recompute_granularity)
    float8 = float8_settings(config)
    in_float8 = set() if float8 is None else float8_items(family.items, float8)
    tokens = config.training.micro_batch_size * config.model.seq_length // size
    known: dict[Any, ItemMemory | None] = {}
    keys: dict[str, Any] = {}
    for item in family.items:
        module = family.build(item.name, torch.device("meta"))
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
        read = tuple(boundary.shapes[name] for name in item.reads)
        window = getattr(module, "window", None)
        keys[item.name] = key = (item.kind, shapes, read, item.inputs, item.name in in_float8, window)
        if key not in known:
            # No limit: adding the rows to the table finds unique ids, whose number fake tensors cannot have. The memory
            # of the collected rows is counted by ``_deferred_gradient_bytes``.
            if isinstance(module, Embedding) and _is_by_token(config):
                module.pending = PendingRows(module.word.weight, sys.maxsize)
            assumptions = _assumptions(config, module)
            cut = join_context(cut_item(item.name, module, family.split_dim, _region(config)), context)
            memory = None if assumptions is None else item_memory(item, cut, boundary, inputs, run, assumptions)
            if memory is not None and item.name in in_float8:
                # Both operands are saved in the compute dtype; their rounded copies live during a product.
                copies = operand_bytes(cut, tokens)
                memory = replace(memory, forward=memory.forward + copies, backward=memory.backward + copies)
            known[key] = memory
    found = {name: known[key] for name, key in keys.items()}
    return {name: memory for name, memory in found.items() if memory is not None}


def _assumptions(config: Config, module: nn.Module) -> DataAssumptions | None:
    """The assumptions for an item whose memory depends on data: an even load of experts; None where none is made."""
    if isinstance(module, BertHead):
        return DataAssumptions(nonzero_fraction=config.data.mask_prob)
    experts = next((part for part in module.modules() if isinstance(part, MoeMlp)), None)
    if experts is None or not isinstance(module, (MoeMlp, *PREDICTIONS)):
        return NO_ASSUMPTIONS
    moe = experts.moe
    # Their numbers of tokens depend on the scores, or on those of other ranks.
    if moe.routing == BALANCED or config.parallel.expert_model_parallel_size > 1:
        return None
    tokens = config.model.seq_length // config.parallel.context_parallel_size
    assignments = config.training.micro_batch_size * tokens * moe.top_k
    per_expert, remainder = divmod(assignments, moe.num_experts)
    even = [per_expert + (expert < remainder) for expert in range(moe.num_experts)]
    limit = None if moe.capacity_factor is None else moe.capacity(assignments // moe.top_k)
    return DataAssumptions(scalars=tuple(even if limit is None else [min(count, limit) for count in even]))


def _region(config: Config) -> TensorRegion | None:
    parallel = config.parallel
    size = parallel.tensor_model_parallel_size
    return None if size == 1 else _SingleRankRegion(size, sequence=parallel.sequence_parallel)


class _SingleRankRegion(TensorRegion):
    """The first of several tensor-parallel ranks without communication; results have the shapes of the real ones."""

    def __init__(self, size: int, *, sequence: bool) -> None:
        self.rank, self.size, self.sequence = 0, size, sequence

    def without_sequence_parallelism(self) -> TensorRegion:
        return _SingleRankRegion(self.size, sequence=False)

    def seed_inside(self) -> None:
        """Do nothing: random numbers do not affect shapes."""

    def _seed_outside(self) -> None:
        """Do nothing, as in ``seed_inside``."""

    def all_reduce(self, x: torch.Tensor, op: Any = None) -> torch.Tensor:
        return x

    def start_gather(self, x: torch.Tensor) -> PendingGather:
        return PendingGather(torch.stack([x] * self.size), None)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=TOKENS_DIM)

    def scatter_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return self.local_tokens(x).clone()

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=-1)


def _is_by_token(config: Config) -> bool:
    """Whether the gradient of a word table is collected by token until the end of the step."""
    parallel, training = config.parallel, config.training
    return parallel.shard_ranks == 1 and parallel.tensor_model_parallel_size == 1 and not training.torch_compile


def _deferred_gradient_bytes(
    config: Config, family: ModelFamily, items: Sequence[str], boundary: BoundaryShape
) -> dict[str, int]:
    """By how many bytes the gradients of word tables are smaller until the end of a step, by item."""
    deferred: dict[str, int] = {}
    tokens = config.microbatches * config.training.micro_batch_size * config.model.seq_length
    tokens //= config.parallel.context_parallel_size
    for name in items if _is_by_token(config) else ():
        module = family.build(name, torch.device("meta"))
        if isinstance(module, Embedding) and module.word.weight.requires_grad:
            rows, width = module.word.weight.shape
            max_pending = most_pending(rows)
            collected = min(tokens, max_pending) * width * boundary.dtype.itemsize
            full = FLOAT_BYTES * rows * width if tokens <= max_pending else 0
            deferred[name] = full - collected
    return deferred


def _shard_rows_bytes(config: Config, family: ModelFamily, worker: int, workers: int, boundary: BoundaryShape) -> int:
    """By how many bytes the gradients of a worker's shards of the word table differ from whole ones until the end.

    The tokens are those of a uniform distribution over the vocabulary.

    Args:
        config: configuration of the run.
        family: model of the run.
        worker: index of the worker.
        workers: number of workers.
        boundary: shapes and dtype at stage boundaries.
    """
    if not isinstance(family, VocabularyShardedFamily):
        return 0
    width, vocabulary = boundary.shapes[HIDDEN][-1], vocabulary_rows(family)
    tokens = config.microbatches * config.training.micro_batch_size * config.model.seq_length
    tokens //= config.parallel.context_parallel_size
    total = 0
    for index, at in enumerate(ranks_of_shards(family.count, range(workers))):
        begin, end = family.local_rows(index, 0)
        if at != worker:
            continue
        rows, of_shard = end - begin, tokens * (end - begin) // vocabulary
        is_dense = of_shard > most_pending(rows)
        total += min(of_shard, most_pending(rows)) * width * boundary.dtype.itemsize
        # A tied table has a dense gradient for its output; that of its rows is another one, once it is dense.
        total += FLOAT_BYTES * rows * width * (is_dense if family.is_tied else is_dense - 1)
    return total


@dataclass(frozen=True, kw_only=True)
class _ParameterCounts:
    """Numbers of parameters of a worker.

    Attributes:
        total: all parameters.
        trained: those that have a gradient.
        shared: copies of tied weights that share the memory of their owner on this worker.
        largest: parameters of the largest item.
        state_bytes: optimizer state of all parameters.
        shared_state_bytes: optimizer state that the shared copies would have.
    """

    total: int
    trained: int
    shared: int
    largest: int
    state_bytes: int
    shared_state_bytes: int


SHARD_FIELDS = ("param_count", "param_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


def shard_share(header: Mapping[str, Any], worker: int, workers: int) -> dict[str, int]:
    """The sizes of a worker's shards of the output layer, as ``x_vocabulary`` of a profile header names them.

    Args:
        header: profile header.
        worker: index of the worker.
        workers: number of workers.
    """
    vocabulary = header.get("x_vocabulary")
    if vocabulary is None:
        return dict.fromkeys(SHARD_FIELDS, 0)
    count = vocabulary["shards"]
    local = ranks_of_shards(count, range(workers)).count(worker)
    return {field: vocabulary[field] * local // count for field in SHARD_FIELDS}


def _counts(
    config: Config, items: Sequence[str], family: ModelFamily, infos: Mapping[str, Mapping[str, Any]]
) -> _ParameterCounts:
    local, params = set(items), {name: info["param_count"] for name, info in infos.items()}
    optimizer = optimizer_settings(config.optimizer)
    shared, shared_state = 0, 0
    for copy_name, owner_name in family.ties.items():
        copy_item = max((name for name in params if copy_name.startswith(f"{name}.")), key=len)
        owner_item = max((name for name in params if owner_name.startswith(f"{name}.")), key=len)
        if {copy_item, owner_item} <= local:
            module = family.build(copy_item, torch.device("meta"))
            total = sum(each.numel() for each in module.parameters())
            copy = module.get_parameter(copy_name.removeprefix(f"{copy_item}."))
            local_fraction = params[copy_item] / total  # the share of a tensor-parallel rank
            shared += round(copy.numel() * local_fraction)
            if not copy.requires_grad:
                continue
            shared_state += round(state_bytes(optimizer, {copy_name: tuple(copy.shape)}) * local_fraction)
    return _ParameterCounts(
        total=sum(params[name] for name in items),
        trained=sum(infos[name]["gradient_bytes"] for name in items) // FLOAT_BYTES,
        shared=shared,
        largest=max((params[name] for name in items), default=0),
        state_bytes=sum(infos[name]["optimizer_bytes"] for name in items),
        shared_state_bytes=shared_state,
    )


def _gradient_shards(config: Config) -> int:
    """Number of replicas over which the sum of the gradients is sharded while it grows."""
    return config.parallel.shard_ranks if config.parallel.zero_gradient_sync == "microbatch" else 1


def _reducing_bytes(config: Config, boundary: BoundaryShape, counts: _ParameterCounts) -> int:
    """Bytes of one item's gradients in a reduce-scatter of every microbatch: whole, as its input, and its output."""
    shards = _gradient_shards(config)
    if shards == 1:
        return 0
    return (boundary.dtype.itemsize + FLOAT_BYTES) * counts.largest + FLOAT_BYTES * counts.largest // shards


def _model_bytes(config: Config, boundary: BoundaryShape, counts: _ParameterCounts) -> tuple[int, int]:
    """Bytes on a device of a worker: parameters with moments and compute copies, and sums of gradients."""
    shards, zero = config.parallel.shard_ranks, config.parallel.zero_stage
    copies = boundary.dtype.itemsize
    gradients = FLOAT_BYTES * counts.trained // _gradient_shards(config)
    if shards > 1:
        # FSDP2 gathers an item before its forward. Stage 3 frees it afterwards, and the next one may be gathered
        # meanwhile; in the other stages all items stay gathered until the end of the step.
        sharded = (FLOAT_BYTES * counts.total + counts.state_bytes) // shards
        gathered = copies * (2 * counts.largest if zero == 3 else counts.total + counts.largest)
        return sharded + gathered, gradients
    state = FLOAT_BYTES * (counts.total - counts.shared) + counts.state_bytes - counts.shared_state_bytes
    if boundary.dtype != torch.float32:
        state += copies * counts.total
    return state, gradients


def _shard_model_bytes(config: Config, boundary: BoundaryShape, shards: Mapping[str, int]) -> int:
    """Bytes of parameters, compute copies and moments of shards of the vocabulary; with ZeRO replicas share moments."""
    copies = 0 if boundary.dtype == torch.float32 else boundary.dtype.itemsize
    return (FLOAT_BYTES + copies) * shards["param_count"] + shards["optimizer_bytes"] // config.parallel.shard_ranks


def copies_of_worker(
    config: Config,
    family: ModelFamily,
    header: Mapping[str, Any],
    worker: int,
    stages: Sequence[Mapping[str, Any]],
) -> int:
    """Bytes on a device for copies of experts in all slots that are free at the start, and for sums of gradients.

    During the backward the gradients of a rank's experts and copies are float64 sums; of these, the gradients in
    float32 of its own experts are counted elsewhere.

    Args:
        config: configuration of the run.
        family: model of the run.
        header: profile header, whose ``x_expert_copies`` has the sizes.
        worker: index of the worker.
        stages: of the simulation.
    """
    copies = header.get("x_expert_copies")
    if copies is None:
        return 0
    total, experts = 0, experts_by_item(family.items)
    for item in (name for stage in stages if stage["worker"] == worker for name in stage["items"]):
        if item in experts:
            own = experts[item] // config.parallel.expert_model_parallel_size
            of_copy = copies["weight_bytes"] + _SUM_BYTES
            # No rank has an expert twice.
            num_copies = min(copies["slots"], experts[item]) - own
            total += copies["param_count"][item] * (num_copies * of_copy + own * (_SUM_BYTES - FLOAT_BYTES))
    return total


def worker_peaks(
    config: Config,
    family: ModelFamily,
    boundary: BoundaryShape,
    header: Mapping[str, Any],
    simulation: Mapping[str, Any],
    memories: Mapping[str, ItemMemory],
) -> list[int]:
    """The peak memory of each worker's devices.

    Args:
        config: configuration of the run.
        family: model of the run.
        boundary: shapes and dtype at stage boundaries.
        header: profile header that was simulated.
        simulation: result of ``dynmo-plan simulate``: stages, and the peaks of its own model.
        memories: activation memory of items; without an item's, the peak of the simulation is used.

    Returns:
        Bytes, by worker.
    """
    infos = {item["name"]: item for item in header["items"]}
    params = {name: info["param_count"] for name, info in infos.items()}
    microbatches, data = config.microbatches, config.parallel.data_ranks
    peaks, states, workers = [], [], len(simulation["peak_memory_bytes"])
    for worker, simulated in enumerate(simulation["peak_memory_bytes"]):
        stages = [stage for stage in simulation["stages"] if stage["worker"] == worker]
        items = [name for stage in stages for name in stage["items"]]
        static = sum(
            infos[name][field] for name in items for field in ("param_bytes", "gradient_bytes", "optimizer_bytes")
        )
        counts = _counts(config, items, family, infos)
        shards_here = shard_share(header, worker, workers)
        static += sum(shards_here[field] for field in ("param_bytes", "gradient_bytes", "optimizer_bytes"))
        model, gradients = _model_bytes(config, boundary, counts)
        of_shards = _shard_model_bytes(config, boundary, shards_here)
        model, gradients = model + of_shards, gradients + shards_here["gradient_bytes"]
        shards = _gradient_shards(config)
        known = [memories[name] for name in items if name in memories]
        deferred = _deferred_gradient_bytes(config, family, items, boundary)
        of_rows = _shard_rows_bytes(config, family, worker, workers, boundary)
        # The simulation adds the peaks of gradients and activations. With a single microbatch they are not at the same
        # time: the backward frees activations while it allocates gradients.
        if microbatches == 1 and len(simulation["stages"]) == 1 and len(known) == len(items):
            summed = [FLOAT_BYTES * params[name] // shards - deferred.get(name, 0) for name in items]
            peak = model + single_bytes(known, summed) + _reducing_bytes(config, boundary, counts)
        else:
            peak = model + gradients + of_rows - sum(deferred.values()) + (simulated - static) + transient_bytes(known)
            peak += _reducing_bytes(config, boundary, counts)
            peak += _buffers(family, boundary, stages, len(simulation["stages"]), microbatches)
            if "x_vocabulary" in header:
                local = {stage["stage"] for stage in stages}
                is_last = len(simulation["stages"]) - 1 in local
                peak += _message_bytes(boundary, workers, is_first=0 in local, is_last=is_last)
        # At the end of a step all gradients exist, and no activations.
        peak = max(peak, model + gradients)
        if data > 1 and not config.parallel.zero_stage:
            # At the end of a step each bucket of the reduction is a copy of its gradients.
            peak = max(peak, model + 2 * gradients)
        peaks.append(peak + copies_of_worker(config, family, header, worker, simulation["stages"]))
        states.append(FLOAT_BYTES * counts.total + counts.state_bytes)
    if config.run.peer_checkpoint_interval is None:
        return peaks
    return [peak + copied for peak, copied in zip(peaks, peer_copy_bytes(states, data), strict=True)]


def peer_copy_bytes(states: Sequence[int], replicas: int = 1) -> list[int]:
    """Bytes of the copies of ``--peer-checkpoint-interval`` on each worker: two of itself, two of the worker before.

    Args:
        states: bytes of parameters and optimizer state of each worker.
        replicas: number of replicas; those on different nodes send nothing, and need the first two only.
    """
    if len(states) == 1:
        return [2 * states[0] if replicas > 1 else 0]
    return [2 * (states[worker] + states[worker - 1]) for worker in range(len(states))]


def _message_bytes(boundary: BoundaryShape, workers: int, *, is_first: bool, is_last: bool) -> int:
    """Bytes of the messages of a sharded vocabulary for the microbatches on their way: two, and ``LEAD`` of lookups.

    Args:
        boundary: shapes and dtype at stage boundaries.
        workers: number of workers.
        is_first: whether the worker has the first stage, which receives the rows that all others look up.
        is_last: whether the worker has the last stage, which receives the parts of all others.
    """
    batch, tokens, width = boundary.shapes[HIDDEN]
    # With multi-token prediction the stream has the samples of all, and rows are read behind the front, too.
    predictions = boundary.shapes.get(FEATURES, boundary.shapes[HIDDEN])[0] // batch
    batch *= predictions
    stream = batch * tokens * width * boundary.dtype.itemsize
    part = stream + batch * tokens * (width + 3) * FLOAT_BYTES
    rows = LEAD * (stream if is_first or (is_last and predictions > 1) else stream // workers)
    return 2 * (stream + part * (workers - 1 if is_last else 1)) + rows


def _buffers(
    family: ModelFamily,
    boundary: BoundaryShape,
    stages: Sequence[Mapping[str, Any]],
    num_stages: int,
    microbatches: int,
) -> int:
    """Bytes of the receive buffers of torch's stages, one for every microbatch, used or not."""
    names = [item.name for item in family.items]
    local = {stage["stage"] for stage in stages}
    total = 0
    for stage in stages:
        if not stage["items"]:
            continue
        # Neighbours on the same rank pass tensors without a buffer.
        begin, end = names.index(stage["items"][0]), names.index(stage["items"][-1]) + 1
        if stage["stage"] > 0 and stage["stage"] - 1 not in local:
            total += microbatches * boundary.num_bytes(live_before(family.items, begin))
        if stage["stage"] < num_stages - 1 and stage["stage"] + 1 not in local:
            total += microbatches * boundary.num_bytes(live_before(family.items, end))
    return total
