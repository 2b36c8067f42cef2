"""The records of a profile as frozen dataclasses; the fields are those of ``profile.md``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._common.document import finite_number

Samples = tuple[int | None, ...]
"""One value per item or worker; None was not sampled in this step, 0 did not run."""
# Kinds of events after which layers cost what they did before. Any other kind, a foreign one too, changes costs.
MIN_RELATIVE_SPEED = 1e-6
COST_NEUTRAL_EVENTS = ("evaluated", "checkpoint")


# Kind of the event with new relative speeds of the workers.
WORKER_SPEED = "worker_speed"


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the run trains.

    Optional keys: the heads of a layer, the elements of the keys and values of a token in a layer, heads times the mean
    width of a key and a value, and the keys that a token attends to under a sliding window.
    """

    family: str
    num_layers: int
    hidden_size: int
    sequence_length: int
    x_num_attention_heads: int | None = None
    x_key_value_width: int | None = None
    x_score_width: int | None = None
    x_attention_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between neighboring workers, as measured."""

    bandwidth_bytes_per_s: int
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One pipeline rank with all its tensor- and data-parallel ranks."""

    worker: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    device: str
    memory_bytes: int | None
    relative_speed: float
    releasable: bool


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item of the layer list, at the finest granularity.

    Optional keys make predictions more exact: ``x_active_param_count``, the matrix weights that one token uses,
    ``x_activation_bytes``, the bytes that a microbatch stores from forward to backward, ``x_attention_window``, the
    keys that a token attends to in this item, where layers differ, ``x_inner_width``, the numbers per token between its
    matrices, and ``x_num_matrices``, into how many products the weights are divided.
    """

    name: str
    layer: str
    kind: str
    param_count: int
    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    boundary_bytes: int
    cut_before: bool
    tied_to: str | None
    x_active_param_count: int | None = None
    x_activation_bytes: int | None = None
    x_attention_window: int | None = None
    x_inner_width: int | None = None
    x_num_matrices: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertCopies:
    """Room for copies of experts.

    Attributes:
        slots: experts and copies of a layer that a rank has room for.
        weight_bytes: of a parameter of a copy.
        param_count: parameters of one expert, by item.
    """

    slots: int
    weight_bytes: int
    param_count: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line of a segment."""

    run_id: str
    segment: int
    model: Model
    schedule: str
    virtual_stages_per_worker: int
    granularity: str
    microbatches: int
    micro_batch_size: int
    tensor_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    link: Link | None
    workers: tuple[Worker, ...]
    items: tuple[Item, ...]
    x_replica_link: Mapping[str, Any] | None = None
    x_vocabulary: Mapping[str, Any] | None = None
    x_context_parallel_size: int | None = None
    x_sequence_parallel: bool | None = None
    x_recompute: str | None = None
    x_fused_attention: bool | None = None
    x_expert_copies: Mapping[str, Any] | None = None

    @property
    def expert_copies(self) -> ExpertCopies | None:
        """Room for copies of experts; None where the run has none, or the key has another form."""
        found = self.x_expert_copies
        if not isinstance(found, Mapping):
            return None
        slots, size, counts = (found.get(name) for name in ("slots", "weight_bytes", "param_count"))
        if not isinstance(counts, Mapping) or not all(isinstance(n, int) and n >= 0 for n in counts.values()):
            return None
        if not isinstance(slots, int) or not isinstance(size, int) or slots < 1 or size < 1:
            return None
        return ExpertCopies(slots=slots, weight_bytes=size, param_count=counts)

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share the tokens of a sample; ``data_parallel_size`` counts them, too."""
        found = self.x_context_parallel_size
        is_size = isinstance(found, int) and found > 0 and self.data_parallel_size % found == 0
        return found if found is not None and is_size else 1

    @property
    def replica_bandwidth(self) -> int | None:
        """Bytes per second between replicas, if measured."""
        link = self.x_replica_link
        found = link.get("bandwidth_bytes_per_s") if isinstance(link, Mapping) else None
        return found if isinstance(found, int) and found > 0 else None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The costs of one step; per item in the header's order, the mean over microbatches. None is "not sampled"."""

    step: int
    plan_id: int
    step_ns: int
    forward_ns: Samples
    backward_ns: Samples | None = None
    backward_input_ns: Samples | None = None
    backward_weight_ns: Samples | None = None
    activation_bytes: Samples
    busy_ns: Samples
    peak_memory_bytes: Samples
    x_vocabulary: Mapping[str, Any] | None = None
    x_counts: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of the model or the run; ``kind`` is an open set."""

    step: int
    kind: str
    detail: Mapping[str, Any]
    next_expected_step: int | None


def with_speeds(header: Header, event: Event) -> Header:
    """The header with the relative speeds of an event; unchanged by other kinds, and by a detail of another form."""
    if event.kind != WORKER_SPEED:
        return header
    ids, speeds = event.detail.get("workers"), event.detail.get("relative_speed")
    if not isinstance(ids, list) or not isinstance(speeds, list) or len(ids) != len(speeds):
        return header
    by_id = {
        worker: speed
        for worker, speed in zip(ids, map(finite_number, speeds), strict=True)
        if isinstance(worker, int) and speed is not None and speed >= MIN_RELATIVE_SPEED
    }
    workers = tuple(
        replace(worker, relative_speed=by_id.get(worker.worker, worker.relative_speed)) for worker in header.workers
    )
    return replace(header, workers=workers)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The trainer is paused at the boundary after this step until a plan has read up to it."""

    step: int


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The result of a plan; see ``profile.md``."""

    plan_id: int
    step: int
    result: str
    pause_ns: int
    bytes: int
    reason: str


Record = Header | Step | Event | PlanRequest | PlanResult
