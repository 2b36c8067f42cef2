"""Writes the profile of a run for the planner, and its metrics and events for people; on rank 0 only.

Data flow of one step and one boundary::

    every rank                       rank 0
    LayerProfiler: times and bytes of items
      | CostGather
      v
    StepResult.costs  -------------> log_costs             -> profile.jsonl   record "step"
    StepResult.losses -------------> log_metrics           -> metrics.jsonl
    technique events  -------------> log_technique_event   -> profile.jsonl   record "event"
                                                           -> events.jsonl
    plans, checkpoints, problems --> log_event             -> events.jsonl
    released ranks ----------------> log_release           -> profile.jsonl   record "header", a new segment
                                                           -> events.jsonl

``dynmo-plan watch`` reads the profile while it is written, so that a record is always appended as one complete line.
A full disk does not end the run: lines wait in memory, in order, until they can be written.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..._common.console import print_message
from ..._common.log_parts import NO_ROTATION, Rotation
from ...dynamics.technique import Event
from ...formats.incident import Incident
from ...formats.profile import (
    WORKER_SPEED,
    ItemInfo,
    Layout,
    LinkInfo,
    ModelInfo,
    ProfileAppender,
    WorkerInfo,
    event_record,
    header_record,
    next_segment,
    step_record,
)
from ...formats.run_lines import append_event, append_metrics
from ...models.families.vocabulary_family import family_parts, prediction_depths, shard_names
from ...models.flops import attention_windows
from ...models.layer_list import HIDDEN, BoundaryShape, ModelFamily, live_before, parameters_of
from ...models.sharding import experts_of
from ...models.vocabulary.vocabulary_shards import SHARD, WORDS, VocabularyShard, shard_activation_bytes
from ...optim.optimizers.protocol import OptimizerSettings
from ...optim.optimizers.registry import state_bytes
from ...parallel.link_speed import bandwidth_without_latency, one_way_ns
from ...parallel.process_groups import World, all_gather_objects
from ...pipeline.expert_migration import experts_by_item
from ..run_directory import RunDirectory
from .worker_speed import SpeedChange, header_speeds

# Parameters and gradients are float32 in every precision; bytes per parameter.
FLOAT_BYTES = 4
# Lines that wait in memory for a full disk: a few MB.
MAX_WAITING_LINES = 10_000


def _known_sum(values: Mapping[str, int | None], names: Collection[str]) -> int | None:
    """Sum of the values of those ``names`` that are keys; None if one of them is null."""
    chosen = [values[name] for name in names if name in values]
    known = [each for each in chosen if each is not None]
    return sum(known) if len(known) == len(chosen) else None


def describe_items(
    family: ModelFamily, boundary: BoundaryShape, optimizer: OptimizerSettings, build: Callable[[str], nn.Module]
) -> list[ItemInfo]:
    """Items of a profile header, with their sizes in training, from modules on the meta device.

    Parameters and gradients are float32. In bf16 and fp16 there is also a copy of the parameters in that dtype.

    Args:
        family: the model as a layer list.
        boundary: shapes and dtype at stage boundaries.
        optimizer: optimizer of the run.
        build: returns an item by its name as one rank has it, on the meta device.

    Returns:
        One entry per item, in list order; sizes in bytes.
    """
    parameter_bytes = FLOAT_BYTES + (boundary.dtype.itemsize if boundary.dtype != torch.float32 else 0)
    infos: list[ItemInfo] = []
    windows = attention_windows(family)
    is_uniform = len(set(windows.values())) < 2
    for index, item in enumerate(family.items):
        module = build(item.name)
        parameters = parameters_of(item.name, module)
        # Parameters that no step trains, such as those under adapters, have neither gradient nor optimizer state.
        trained = {name: tuple(each.shape) for name, each in parameters.items() if each.requires_grad}
        count = sum(each.numel() for each in parameters.values())
        infos.append(
            ItemInfo(
                name=item.name,
                layer=item.layer,
                kind=item.kind,  # type: ignore[arg-type] # kinds of items are those of the format
                param_count=count,
                param_bytes=count * parameter_bytes,
                gradient_bytes=sum(math.prod(shape) for shape in trained.values()) * FLOAT_BYTES,
                optimizer_bytes=state_bytes(optimizer, trained),
                boundary_bytes=boundary.num_bytes(live_before(family.items, index + 1)),
                cut_before=item.cut_before,
                tied_to=item.tied_to,
                x_attention_window=None if is_uniform else windows.get(item.name),
            )
        )
    return infos


def describe_copies(
    family: ModelFamily, boundary: BoundaryShape, slots: int | None, build: Callable[[str], nn.Module]
) -> dict[str, Any] | None:
    """The ``x_expert_copies`` of a profile header: room for copies of experts, and their sizes; None without.

    Args:
        family: the model as a layer list.
        boundary: shapes and dtype at stage boundaries; copies have its dtype.
        slots: experts and copies of a layer that a rank may have; None where experts have no copies.
        build: returns an item by its name as one rank has it, on the meta device.
    """
    if slots is None:
        return None
    counts = {}
    for item in experts_by_item(family.items):
        one_of_each = [next(iter(experts.values()), None) for experts in experts_of(build(item))]
        counts[item] = sum(p.numel() for expert in one_of_each if expert is not None for p in expert.parameters())
    return {"slots": slots, "weight_bytes": boundary.dtype.itemsize, "param_count": counts}


def describe_shards(
    family: ModelFamily, boundary: BoundaryShape, optimizer: OptimizerSettings, build: Callable[[str], nn.Module]
) -> dict[str, int] | None:
    """The ``x_vocabulary`` of a profile header: number and sizes of the shards of the vocabulary; None without.

    Args:
        family: the model as a layer list.
        boundary: shapes and dtype at stage boundaries.
        optimizer: optimizer of the run.
        build: returns a shard by its name, on the meta device.

    Returns:
        Sums over all shards, in bytes; ``activation_bytes`` and ``lookup_bytes``, the rows of the word table that the
        shards look up, are of a microbatch.
    """
    names = shard_names(family)
    if not names:
        return None
    parameter_bytes = FLOAT_BYTES + (boundary.dtype.itemsize if boundary.dtype != torch.float32 else 0)
    modules = {name: build(name) for name in names}
    parameters = {full: p for name, each in modules.items() for full, p in parameters_of(name, each).items()}
    # Tables under adapters are frozen.
    trained = {name: tuple(each.shape) for name, each in parameters.items() if each.requires_grad}
    outputs = [each.output.shape for each in modules.values() if isinstance(each, VocabularyShard)]
    # With sequence parallelism the stream has this rank's tokens, and its slices of the shards all.
    tokens = math.prod(boundary.shapes.get(WORDS, boundary.shapes[HIDDEN])[:2]) * (1 + prediction_depths(family))
    count = sum(each.numel() for each in parameters.values())
    return {
        "shards": len(names),
        "param_count": count,
        "output_param_count": sum(math.prod(shape) for shape in outputs),
        "param_bytes": count * parameter_bytes,
        "gradient_bytes": sum(map(math.prod, trained.values())) * FLOAT_BYTES,
        "optimizer_bytes": state_bytes(optimizer, trained),
        "activation_bytes": sum(
            shard_activation_bytes(rows, width, tokens, boundary.dtype.itemsize) for rows, width in outputs
        ),
        "lookup_bytes": tokens * boundary.shapes[HIDDEN][-1] * boundary.dtype.itemsize // family_parts(family),
    }


def describe_workers(world: World, calibration_ns: int = 0) -> list[WorkerInfo]:
    """Pipeline ranks of a profile header, each with all its ranks. Every rank calls this.

    Args:
        world: process groups.
        calibration_ns: time of the calibration product on this rank; 0 where it was not measured.
    """
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # The processes of a machine share its memory.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    local_facts = {"host": world.host, "memory_bytes": memory, "calibration_ns": calibration_ns}
    gathered = all_gather_objects(world, local_facts)
    # The slowest rank of a worker decides, as in its item times.
    slowest = [
        max(gathered[rank]["calibration_ns"] for rank in world.dims.ranks(pipeline=worker))
        for worker in range(world.dims.pipeline)
    ]
    speeds = header_speeds(slowest)
    workers: list[WorkerInfo] = []
    for worker in range(world.dims.pipeline):
        ranks = world.dims.ranks(pipeline=worker)
        workers.append(
            WorkerInfo(
                worker=worker,
                ranks=ranks,
                hosts=list(dict.fromkeys(gathered[rank]["host"] for rank in ranks)),
                device="cuda" if world.device.type == "cuda" else "cpu",
                # A stage is on all ranks of its pipeline rank: it must fit on the smallest.
                memory_bytes=min(gathered[rank]["memory_bytes"] for rank in ranks),
                relative_speed=speeds[worker],
                # Pipeline rank 0 hosts the rendezvous store, the run directory and the planner.
                releasable=worker > 0,
            )
        )
    return workers


def link_from(payload_bytes: int, latency_ns: float, payload_ns: float) -> LinkInfo:
    """Latency and bandwidth of a link from the one-way times of one byte and of a payload.

    Args:
        payload_bytes: size of the payload.
        latency_ns: one-way time of one byte, in nanoseconds.
        payload_ns: one-way time of the payload, in nanoseconds.
    """
    bandwidth = bandwidth_without_latency(payload_bytes, latency_ns, payload_ns)
    return LinkInfo(bandwidth_bytes_per_s=bandwidth, latency_ns=int(latency_ns))


def measure_links(world: World) -> tuple[LinkInfo | None, LinkInfo | None]:
    """Measure a link between pipeline ranks and a link between replicas. Every rank calls this.

    They are those of pipeline ranks 0 and 1, and of the first two replicas of pipeline rank 0.

    Returns:
        Pipeline link and replica link; None for one that does not exist.
    """
    # One link of each kind stands for all: the cost model has a single bandwidth for each.
    first = world.dims.rank_of(pipeline=0, data=0, tensor=0)
    worker = world.dims.rank_of(pipeline=1, data=0, tensor=0) if world.dims.pipeline > 1 else None
    replica = world.dims.rank_of(pipeline=0, data=1, tensor=0) if world.dims.data > 1 else None
    return (
        None if worker is None else measure_link(world, first, worker),
        None if replica is None else measure_link(world, first, replica),
    )


def measure_link(world: World, here: int, there: int, payload_bytes: int = 1 << 22, repeats: int = 5) -> LinkInfo:
    """Measure latency and bandwidth between two ranks by ping-pong. Every rank calls this.

    Args:
        world: process groups.
        here: global rank of one end.
        there: global rank of the other end.
        payload_bytes: size of the payload for the bandwidth.
        repeats: number of measured round trips per size, after one warm-up.

    Returns:
        Latency in nanoseconds and bandwidth in bytes per second; meaningful on the two ranks only.
    """
    latency, large = (one_way_ns(world, here, there, size, repeats) for size in (1, payload_bytes))
    return link_from(payload_bytes, latency, large)


def freed_hosts(released: Sequence[WorkerInfo], remaining: Sequence[WorkerInfo]) -> tuple[list[str], list[str]]:
    """Hosts of released pipeline ranks, and those of them on which no pipeline rank remains."""
    hosts = list(dict.fromkeys(host for worker in released for host in worker.hosts))
    in_use = {host for worker in remaining for host in worker.hosts}
    return hosts, [host for host in hosts if host not in in_use]


def release_message(released: Sequence[WorkerInfo], remaining: Sequence[WorkerInfo], free: Sequence[str]) -> str:
    """A sentence on released and remaining workers, and on the hosts that are free now."""
    ranks = ", ".join(str(rank) for worker in released for rank in worker.ranks)
    workers = ", ".join(str(worker.worker) for worker in released)
    hosts = f"; free hosts: {', '.join(free)}" if free else ""
    total = len(released) + len(remaining)
    return f"released workers {workers} (ranks {ranks}); {len(remaining)} of {total} workers remain{hosts}"


def _with_keys(record: dict[str, Any], of_model: Mapping[str, Any], of_header: Mapping[str, Any]) -> dict[str, Any]:
    """A header with further keys of ``model`` and of its own."""
    return {**record, **of_header, "model": {**record["model"], **of_model}}


class RunLogger:
    """Appends to the files of a run directory; on other ranks than 0 the methods have no effect.

    Args:
        run: run directory.
        world: process groups of this rank.
        profile: rotation of the profile.
        others: rotation of metrics and of events.
    """

    def __init__(
        self, run: RunDirectory, world: World, profile: Rotation = NO_ROTATION, others: Rotation = NO_ROTATION
    ) -> None:
        self.run, self._writes = run, world.is_rank0
        self._profile = ProfileAppender(run.profile, profile)
        self._others = others
        self._names: list[str] = []
        self._num_shards = 0
        self._workers: tuple[WorkerInfo, ...] = ()
        # Makes a header for some workers; a release writes the header again without the released ones.
        self._header: Callable[[Sequence[WorkerInfo]], dict[str, Any]] = lambda _: {}
        # Of all files together, so that one refused line keeps every later one in order.
        self._waiting: deque[Callable[[], None]] = deque(maxlen=MAX_WAITING_LINES)
        # Of each pipeline rank in the last profiled step: item -> bytes; null where no sample was taken.
        self._activation_bytes: list[dict[str, int | None]] = []

    def _write(self, append: Callable[[], None]) -> None:
        """Append a line; if the disk refuses, retry it before the next one, so that the order is preserved.

        At most ``MAX_WAITING_LINES`` lines wait; beyond that the oldest are dropped.
        """
        had_waiting = bool(self._waiting)
        self._waiting.append(append)
        while self._waiting:
            try:
                self._waiting[0]()
            except OSError as error:
                if not had_waiting:
                    print_message(f"warning: {self.run.path}: cannot write a line ({error}); lines wait in memory")
                return
            self._waiting.popleft()
        if had_waiting:
            print_message(f"{self.run.path}: wrote the lines that were waiting")

    def log_profile_record(self, record: Mapping[str, Any]) -> None:
        """Append a record to the profile."""
        if self._writes:
            self._write(lambda: self._profile.append(record))

    def write_header(
        self,
        run_id: str,
        model: ModelInfo,
        layout: Layout,
        links: tuple[LinkInfo | None, LinkInfo | None],
        workers: Sequence[WorkerInfo],
        items: Sequence[ItemInfo],
        shards: Mapping[str, int] | None = None,
        copies: Mapping[str, Any] | None = None,
        keys: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    ) -> None:
        """Start a segment of the profile.

        Args:
            run_id: id of the run.
            model: description of the model.
            layout: schedule and parallel sizes.
            links: link between pipeline ranks, and link between replicas.
            workers: pipeline ranks, in order.
            items: items of the layer list, in order.
            shards: shards of the output layer, see :func:`describe_shards`.
            copies: room for copies of experts, see :func:`describe_copies`.
            keys: further keys of ``model`` and of the header, see :func:`analytic_keys`.
        """
        link, replica_link = links
        self._num_shards = 0 if shards is None else shards["shards"]
        vocabulary = {} if shards is None else {"x_vocabulary": dict(shards)}
        of_copies = {} if copies is None else {"x_expert_copies": dict(copies)}
        self._names = [item.name for item in items]
        self._workers = tuple(workers)
        self._header = lambda remaining: _with_keys(
            header_record(
                run_id=run_id,
                segment=next_segment(self.run.profile),
                model=model,
                layout=layout,
                link=link if len(remaining) > 1 else None,
                replica_link=replica_link,
                workers=remaining,
                items=items,
            )
            | vocabulary
            | of_copies,
            *keys,
        )
        self.log_profile_record(self._header(self._workers))

    def log_release(self, step: int, workers: Collection[int]) -> str:
        """Start a segment without the ``workers`` that were released after ``step``.

        Returns:
            A sentence for the training log.
        """
        released = [each for each in self._workers if each.worker in workers]
        self._workers = tuple(each for each in self._workers if each.worker not in workers)
        hosts, free = freed_hosts(released, self._workers)
        ranks = [rank for each in released for rank in each.ranks]
        message = release_message(released, self._workers, free)
        # A new segment, not an event: the planner keeps no cost that was measured on other workers.
        self.log_profile_record(self._header(self._workers))
        self.log_event(
            "released", message, step=step, workers=sorted(workers), ranks=ranks, hosts=hosts, free_hosts=free
        )
        return message

    def log_worker_speeds(self, step: int, change: SpeedChange) -> None:
        """Append the speeds of the workers to the profile, and an incident per worker that is slow or recovered.

        Args:
            step: number of the step.
            change: new speeds, by position.
        """
        self._workers = tuple(
            replace(worker, relative_speed=speed.speed)
            for worker, speed in zip(self._workers, change.speeds, strict=True)
        )
        detail = {
            "workers": [worker.worker for worker in self._workers],
            "relative_speed": [worker.relative_speed for worker in self._workers],
        }
        if self._writes:
            record = event_record(step=step, kind=WORKER_SPEED, detail=detail, next_expected_step=None)
            self.log_profile_record(record)
        for position in (*change.slow, *change.recovered):
            worker, speed = self._workers[position], change.speeds[position]
            name = f"worker {worker.worker} on {', '.join(worker.hosts)}"
            is_slow = position in change.slow
            message = f"{name} computes at {speed.speed:.2f} of the normal speed: {speed.cause}"
            self.log_incident(
                Incident(
                    incident="slow_worker" if is_slow else "worker_recovered",
                    message=message if is_slow else f"{name} computes at normal speed again",
                    cause=speed.cause if is_slow else "measured speed is normal",
                    step=step,
                    ranks=worker.ranks,
                    hosts=worker.hosts,
                )
            )

    def log_costs(
        self,
        step: int,
        plan_id: int,
        step_ns: int,
        costs: Sequence[dict[str, Any]],
        counts: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    ) -> None:
        """Append a ``step`` record to the profile.

        Args:
            step: number of the step.
            plan_id: number of the active plan.
            step_ns: wall time of the step, in nanoseconds.
            costs: measurements of each pipeline rank, in order.
            counts: vector metrics of items, such as tokens per expert: metric -> item -> values.
        """
        if not self._writes:
            return
        measured = [(one["items"], one["activation_bytes"]) for one in costs]
        self._activation_bytes = [
            {} if sizes is None else dict(zip(names, sizes, strict=True)) for names, sizes in measured
        ]

        def by_name(field: str, names: Sequence[str]) -> list[int | None]:
            merged = {
                name: value
                for one in costs
                if one[field] is not None
                for name, value in zip(one["items"], one[field], strict=True)
            }
            # 0 for an item that no rank reports: it did not run. A null in ``one[field]`` is "not sampled".
            return [merged.get(name, 0) for name in names]

        def by_item(field: str) -> list[int | None]:
            return by_name(field, self._names)

        # Only a schedule with separate operations for the weight gradients (zero bubble) measures both parts.
        split = any(one["backward_weight_ns"] is not None for one in costs)
        backward: dict[str, Any] = {"backward_ns": by_item("backward_ns")}
        if split:
            backward = {
                "backward_input_ns": by_item("backward_ns"),
                "backward_weight_ns": by_item("backward_weight_ns"),
            }
        record = step_record(
            step=step,
            plan_id=plan_id,
            step_ns=step_ns,
            forward_ns=by_item("forward_ns"),
            activation_bytes=by_item("activation_bytes"),
            busy_ns=[one["busy_ns"] for one in costs],
            peak_memory_bytes=[one["peak_memory_bytes"] for one in costs],
            **backward,
        )
        if self._num_shards:
            names = [f"{SHARD}.{index}" for index in range(self._num_shards)]
            record["x_vocabulary"] = {
                field: by_name(field, names) for field in ("forward_ns", "backward_ns", "activation_bytes")
            }
        self.log_profile_record(record | ({"x_counts": counts} if counts else {}))

    def log_technique_event(self, event: Event) -> None:
        """Append an event of a dynamic technique, which changes the costs of layers, to profile and events."""
        if self._writes:
            detail = dict(event.detail)
            if event.freed_items:
                detail["freed_activation_bytes"] = [
                    _known_sum(of_rank, event.freed_items) for of_rank in self._activation_bytes
                ]
            record = event_record(
                step=event.step,
                kind=event.kind,
                detail=detail,
                next_expected_step=event.next_expected_step,
            )
            self.log_profile_record(record)
            self.log_event(event.kind, event.message, step=event.step, **detail)

    def log_event(self, kind: str, message: str, *, step: int, **detail: Any) -> None:
        """Append a line to ``events.jsonl``.

        Args:
            kind: kind of the event, for programs.
            message: a sentence for a person.
            step: number of completed steps.
            detail: further fields, as JSON values.
        """
        if self._writes:
            record = self.run.event_record(kind, message, step=step, **detail)
            self._write(lambda: append_event(self.run.events, record, self._others))

    def log_stopped(self, step: int, exit_code: int) -> None:
        """Append a ``stopped`` event to ``events.jsonl``.

        Args:
            step: number of completed steps, fewer than those of the run.
            exit_code: exit code of this start.
        """
        message = f"stopped with exit code {exit_code} after step {step:,}"
        self.log_event("stopped", message, step=step, exit_code=exit_code, segment=self.run.segment)

    def log_incident(self, incident: Incident) -> None:
        """Append an ``incident`` to ``events.jsonl``."""
        self.log_event("incident", incident.message, step=incident.step, **incident.detail)

    def log_metrics(self, **fields: Any) -> None:
        """Append a line to ``metrics.jsonl``."""
        if self._writes:
            self._write(lambda: append_metrics(self.run.metrics, fields, self._others))
