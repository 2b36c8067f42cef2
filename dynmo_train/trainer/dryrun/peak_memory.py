"""The peak memory of each worker of a dry run: of the model, of microbatches in flight, and in passing.

Pure functions of the layer list, the configuration and what ``dynmo-plan simulate`` says of the schedule. A device's
own share (context, libraries, allocator) is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...config import Config
from ...data.registry import shapes_of
from ...models.bert import BertHead
from ...models.blocks import Embedding
from ...models.embedding_grad import PendingRows, most_pending
from ...models.layer_list import BoundaryShape, ModelFamily, live_before
from ...models.moe import BALANCED, MoeMlp
from ...models.sharding import cut_item
from ...parallel.tensor_parallel import TOKENS_DIM, TensorRegion
from ...pipeline.pipeline_stage import save_products
from ..monitoring.profile_writer import FLOAT_BYTES, MOMENTS_BYTES
from .item_memory import NOTHING, DataAssumptions, ItemMemory, Run, item_memory, single_bytes, transient_bytes


def run_of(granularity: str) -> Run:
    """Calls an item as a run of this ``--recompute-granularity`` does."""
    if granularity == "none":
        return lambda item, *arguments: item(*arguments)
    more: dict[str, Any] = {"context_fn": partial(save_products, [])} if granularity == "selective" else {}
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **more)


def memory_of_items(config: Config, family: ModelFamily, boundary: BoundaryShape) -> dict[str, ItemMemory]:
    """What each item holds in its passes on its first tensor rank, computed once for items alike.

    Items for which that depends on data in a way that is not foreseen are left out.
    """
    inputs = shapes_of(config)
    run = run_of(config.training.recompute_granularity)
    known: dict[Any, ItemMemory | None] = {}
    keys: dict[str, Any] = {}
    for item in family.items:
        module = family.build(item.name, torch.device("meta"))
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
        keys[item.name] = key = (item.kind, shapes, tuple(boundary.shapes[name] for name in item.reads), item.inputs)
        if key not in known:
            if isinstance(module, Embedding) and _is_by_token(config):
                module.pending = PendingRows(module.word.weight, sys.maxsize)
            expected = _expected(config, module)
            cut = cut_item(item.name, module, family.split_dim, _region(config))
            known[key] = None if expected is None else item_memory(item, cut, boundary, inputs, run, expected)
    found = {name: known[key] for name, key in keys.items()}
    return {name: memory for name, memory in found.items() if memory is not None}


def _expected(config: Config, module: nn.Module) -> DataAssumptions | None:
    """What an item's memory goes by where it depends on data: an even load of experts; None where nothing is known."""
    if isinstance(module, BertHead):
        return DataAssumptions(counted=config.data.mask_prob)
    if not isinstance(module, MoeMlp):
        return NOTHING
    moe = module.moe
    if moe.routing == BALANCED or config.parallel.expert_model_parallel_size > 1:
        return None
    places = config.training.micro_batch_size * config.model.seq_length * moe.top_k
    least, more = divmod(places, moe.num_experts)
    return DataAssumptions(places=tuple(least + (expert < more) for expert in range(moe.num_experts)))


def _region(config: Config) -> TensorRegion | None:
    parallel = config.parallel
    size = parallel.tensor_model_parallel_size
    return None if size == 1 else _AloneRegion(size, sequence=parallel.sequence_parallel)


class _AloneRegion(TensorRegion):
    """The first of some tensor ranks without the others: results have the shapes that they have with them."""

    def __init__(self, size: int, *, sequence: bool) -> None:
        self.rank, self.size, self.sequence = 0, size, sequence

    def without_sequence_parallelism(self) -> TensorRegion:
        return _AloneRegion(self.size, sequence=False)

    def seed_inside(self) -> None:
        """Random numbers matter to nobody here."""

    def _seed_outside(self) -> None:
        """Nor outside."""

    def all_reduce(self, x: torch.Tensor, op: Any = None) -> torch.Tensor:
        return x

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=TOKENS_DIM)

    def scatter_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return self.local_tokens(x).clone()

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=-1)


def _is_by_token(config: Config) -> bool:
    """Whether the gradient of a table of words is kept by token until the end of a step."""
    parallel, training = config.parallel, config.training
    shared = parallel.zero_stage > 0 and parallel.data_parallel_size > 1
    return not shared and parallel.tensor_model_parallel_size == 1 and not training.torch_compile


def _left_out(config: Config, family: ModelFamily, items: Sequence[str], boundary: BoundaryShape) -> dict[str, int]:
    """By how much the gradients of items are less until the end of a step, in bytes: of tables kept by token."""
    left: dict[str, int] = {}
    tokens = config.microbatches * config.training.micro_batch_size * config.model.seq_length
    for name in items if _is_by_token(config) else ():
        module = family.build(name, torch.device("meta"))
        if isinstance(module, Embedding):
            rows, width = module.word.weight.shape
            most = most_pending(rows)
            kept = min(tokens, most) * width * boundary.dtype.itemsize
            left[name] = (FLOAT_BYTES * rows * width if tokens <= most else 0) - kept
    return left


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Parameters of a worker: all, and those whose memory another one shares (copies of tied weights held here)."""

    every: int
    shared: int
    largest: int


def _counts(items: Sequence[str], family: ModelFamily, params: Mapping[str, int]) -> _Counts:
    held = set(items)
    shared = 0
    for copy_name, owner_name in family.ties.items():
        copy_item = max((name for name in params if copy_name.startswith(f"{name}.")), key=len)
        owner_item = max((name for name in params if owner_name.startswith(f"{name}.")), key=len)
        if {copy_item, owner_item} <= held:
            module = family.build(copy_item, torch.device("meta"))
            whole = sum(each.numel() for each in module.parameters())
            count = module.get_parameter(copy_name.removeprefix(f"{copy_item}.")).numel()
            shared += round(count * params[copy_item] / whole)  # of a tensor-parallel rank: its part
    return _Counts(
        every=sum(params[name] for name in items),
        shared=shared,
        largest=max((params[name] for name in items), default=0),
    )


def _model_bytes(config: Config, boundary: BoundaryShape, counts: _Counts) -> tuple[int, int]:
    """(Parameters, copies for the arithmetic and moments, gradients) of a worker's device."""
    replicas, zero = config.parallel.data_parallel_size, config.parallel.zero_stage
    copies = boundary.dtype.itemsize
    gradients = FLOAT_BYTES * counts.every
    if zero and replicas > 1:
        rows = (FLOAT_BYTES + MOMENTS_BYTES) * counts.every // replicas
        whole = copies * (2 * counts.largest if zero == 3 else counts.every + counts.largest)
        return rows + whole, gradients
    held = (FLOAT_BYTES + MOMENTS_BYTES) * (counts.every - counts.shared)
    if boundary.dtype != torch.float32:
        held += copies * counts.every
    return held, gradients


def worker_peaks(
    config: Config,
    family: ModelFamily,
    boundary: BoundaryShape,
    header: Mapping[str, Any],
    told: Mapping[str, Any],
    memories: Mapping[str, ItemMemory],
) -> list[int]:
    """The peak of each worker's devices, in bytes.

    Args:
        header: the profile's header that was simulated.
        told: what ``dynmo-plan simulate`` said of it: stages and the peaks of its own count.
        memories: what the items hold; for items that are not there the simulation's own count stands alone.
    """
    infos = {item["name"]: item for item in header["items"]}
    params = {name: info["param_count"] for name, info in infos.items()}
    microbatches, data = config.microbatches, config.parallel.data_parallel_size
    peaks = []
    for worker, simulated in enumerate(told["peak_memory_bytes"]):
        stages = [stage for stage in told["stages"] if stage["worker"] == worker]
        items = [name for stage in stages for name in stage["items"]]
        static = sum(
            infos[name][field] for name in items for field in ("param_bytes", "gradient_bytes", "optimizer_bytes")
        )
        counts = _counts(items, family, params)
        model, gradients = _model_bytes(config, boundary, counts)
        known = [memories[name] for name in items if name in memories]
        left = _left_out(config, family, items, boundary)
        if microbatches == 1 and len(told["stages"]) == 1 and len(known) == len(items):
            peak = model + single_bytes(known, [FLOAT_BYTES * params[name] - left.get(name, 0) for name in items])
        else:
            peak = model + gradients - sum(left.values()) + (simulated - static) + transient_bytes(known)
            peak += _buffers(family, boundary, stages, len(told["stages"]), microbatches)
        peak = max(peak, model + gradients)
        if data > 1 and not config.parallel.zero_stage:
            # At the end of a step each bucket is a copy of its gradients.
            peak = max(peak, model + 2 * gradients)
        peaks.append(peak)
    return peaks


def _buffers(
    family: ModelFamily,
    boundary: BoundaryShape,
    stages: Sequence[Mapping[str, Any]],
    number: int,
    microbatches: int,
) -> int:
    """What torch's stages keep for what comes from other workers: room for every microbatch, filled or not."""
    names = [item.name for item in family.items]
    own = {stage["stage"] for stage in stages}
    total = 0
    for stage in stages:
        if not stage["items"]:
            continue
        begin, end = names.index(stage["items"][0]), names.index(stage["items"][-1]) + 1
        if stage["stage"] > 0 and stage["stage"] - 1 not in own:
            total += microbatches * boundary.num_bytes(live_before(family.items, begin))
        if stage["stage"] < number - 1 and stage["stage"] + 1 not in own:
            total += microbatches * boundary.num_bytes(live_before(family.items, end))
    return total
