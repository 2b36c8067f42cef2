"""Writes what a run measures: the profile for the planner, metrics and events for people. On worker 0 alone."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._common.console import say
from ...dynamics.technique import Event
from ...formats.profile import (
    ItemInfo,
    Layout,
    LinkInfo,
    ModelInfo,
    WorkerInfo,
    append_record,
    event_record,
    header_record,
    next_segment,
    step_record,
)
from ...formats.run_lines import append_event
from ...models.layer_list import BoundaryShape, ModelFamily, live_before
from ...parallel.process_groups import World, all_gather_objects
from ..run_directory import RunDirectory

FLOAT_BYTES = 4
MOMENTS_BYTES = 8
# Lines of the run directory that wait for a disk that is full: some MB.
WAITING_LINES = 10_000


def describe_items(family: ModelFamily, boundary: BoundaryShape, build: Callable[[str], nn.Module]) -> list[ItemInfo]:
    """The items of a profile's header; sizes of training with AdamW, from modules on the meta device.

    Args:
        build: an item as one process holds it, without memory for its weights.

    Parameters and gradients are float32; lower precision holds a copy of the parameters in its own type beside them.
    """
    parameter_bytes = FLOAT_BYTES + (boundary.dtype.itemsize if boundary.dtype != torch.float32 else 0)
    infos: list[ItemInfo] = []
    for index, item in enumerate(family.items):
        module = build(item.name)
        count = sum(parameter.numel() for parameter in module.parameters())
        infos.append(
            ItemInfo(
                name=item.name,
                layer=item.layer,
                kind=item.kind,  # type: ignore[arg-type] # kinds of items are those of the format
                param_count=count,
                param_bytes=count * parameter_bytes,
                gradient_bytes=count * FLOAT_BYTES,
                optimizer_bytes=count * MOMENTS_BYTES,
                boundary_bytes=boundary.num_bytes(live_before(family.items, index + 1)),
                cut_before=item.cut_before,
                tied_to=item.tied_to,
            )
        )
    return infos


def describe_workers(world: World) -> list[WorkerInfo]:
    """The workers of a profile's header, each with all its ranks; every process calls this."""
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    told = all_gather_objects(world, {"host": world.host, "memory_bytes": memory})
    workers: list[WorkerInfo] = []
    for worker in range(world.dims.pipeline):
        ranks = world.dims.ranks(pipeline=worker)
        workers.append(
            WorkerInfo(
                worker=worker,
                ranks=ranks,
                hosts=list(dict.fromkeys(told[rank]["host"] for rank in ranks)),
                device="cuda" if world.device.type == "cuda" else "cpu",
                memory_bytes=min(told[rank]["memory_bytes"] for rank in ranks),
                # The first one holds the rendezvous store, the run directory and the planner.
                releasable=worker > 0,
            )
        )
    return workers


def link_from(payload_bytes: int, latency_ns: float, payload_ns: float) -> LinkInfo:
    """A link from the one-way times of a byte and of a payload.

    Where the latency was disturbed so much that it takes most of the payload's time, half of that time is taken as the
    transfer: the bandwidth is then at most twice what was seen, never without bound.
    """
    transfer_ns = max(payload_ns - latency_ns, payload_ns / 2, 1.0)
    return LinkInfo(bandwidth_bytes_per_s=max(1, int(payload_bytes / transfer_ns * 1e9)), latency_ns=int(latency_ns))


def measure_links(world: World) -> tuple[LinkInfo | None, LinkInfo | None]:
    """The links between workers 0 and 1, and between the first two replicas of worker 0; None where there are none.

    Every process calls this.
    """
    first = world.dims.rank_of(pipeline=0, data=0, tensor=0)
    worker = world.dims.rank_of(pipeline=1, data=0, tensor=0) if world.dims.pipeline > 1 else None
    replica = world.dims.rank_of(pipeline=0, data=1, tensor=0) if world.dims.data > 1 else None
    return (
        None if worker is None else measure_link(world, first, worker),
        None if replica is None else measure_link(world, first, replica),
    )


def measure_link(world: World, here: int, there: int, payload_bytes: int = 1 << 22, repeats: int = 5) -> LinkInfo:
    """Latency and bandwidth between two ranks, by ping-pong. Every process calls this."""
    fastest: list[float] = []
    for size in (1, payload_bytes):
        block = torch.zeros(size, dtype=torch.uint8, device=world.device)
        times: list[float] = []
        for _ in range(repeats + 1):
            dist.barrier()
            begin = time.perf_counter_ns()
            if world.rank == here:
                dist.send(block, there)
                dist.recv(block, there)
            elif world.rank == there:
                dist.recv(block, here)
                dist.send(block, here)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append((time.perf_counter_ns() - begin) / 2)
        # Whatever else runs on a machine only ever adds to a time: the least is the link's.
        fastest.append(min(times[1:]))
    latency, large = fastest
    return link_from(payload_bytes, latency, large)


def freed_hosts(gone: Sequence[WorkerInfo], left: Sequence[WorkerInfo]) -> tuple[list[str], list[str]]:
    """The hosts of workers that left, and those of them on which no worker is left."""
    hosts = list(dict.fromkeys(host for worker in gone for host in worker.hosts))
    needed = {host for worker in left for host in worker.hosts}
    return hosts, [host for host in hosts if host not in needed]


def released_message(gone: Sequence[WorkerInfo], left: Sequence[WorkerInfo], free: Sequence[str]) -> str:
    """Who left, who stays, and which hosts are free now."""
    ranks = ", ".join(str(rank) for worker in gone for rank in worker.ranks)
    workers = ", ".join(str(worker.worker) for worker in gone)
    hosts = f"; free hosts: {', '.join(free)}" if free else ""
    return f"released workers {workers} (ranks {ranks}); {len(left)} of {len(gone) + len(left)} workers stay{hosts}"


class Recorder:
    """Appends to the run directory; on other workers than 0 every call does nothing."""

    def __init__(self, run: RunDirectory, world: World) -> None:
        self.run, self._writes = run, world.is_rank0
        self._names: list[str] = []
        self._workers: tuple[WorkerInfo, ...] = ()
        self._begin: Callable[[Sequence[WorkerInfo]], dict[str, Any]] = lambda _: {}
        self._waiting: deque[Callable[[], None]] = deque(maxlen=WAITING_LINES)

    def _write(self, append: Callable[[], None]) -> None:
        """Append a line; where the disk refuses, keep it and try again with the next one, in the same order.

        A full disk is no reason to end a healthy run. Kept are the last ``WAITING_LINES`` lines.
        """
        had_waiting = bool(self._waiting)
        self._waiting.append(append)
        while self._waiting:
            try:
                self._waiting[0]()
            except OSError as error:
                if not had_waiting:
                    say(f"warning: {self.run.path}: a line cannot be written ({error}); lines wait until it can")
                return
            self._waiting.popleft()
        if had_waiting:
            say(f"{self.run.path}: lines are written again")

    def profile_line(self, record: Mapping[str, Any]) -> None:
        """Append a record to the profile."""
        if self._writes:
            self._write(lambda: append_record(self.run.profile, record))

    def header(
        self,
        run_id: str,
        model: ModelInfo,
        layout: Layout,
        links: tuple[LinkInfo | None, LinkInfo | None],
        workers: Sequence[WorkerInfo],
        items: Sequence[ItemInfo],
    ) -> None:
        """Begin a segment of the profile; ``links`` are those between workers and between replicas."""
        link, replica_link = links
        self._names = [item.name for item in items]
        self._workers = tuple(workers)
        self._begin = lambda left: header_record(
            run_id=run_id,
            segment=next_segment(self.run.profile),
            model=model,
            layout=layout,
            link=link if len(left) > 1 else None,
            replica_link=replica_link,
            workers=left,
            items=items,
        )
        self.profile_line(self._begin(self._workers))

    def released(self, step: int, workers: Collection[int]) -> str:
        """Workers have left after ``step``: a new segment of those that stay; a sentence for a person."""
        gone = [each for each in self._workers if each.worker in workers]
        self._workers = tuple(each for each in self._workers if each.worker not in workers)
        hosts, free = freed_hosts(gone, self._workers)
        ranks = [rank for each in gone for rank in each.ranks]
        message = released_message(gone, self._workers, free)
        self.profile_line(self._begin(self._workers))
        self.event("released", message, step=step, workers=sorted(workers), ranks=ranks, hosts=hosts, free_hosts=free)
        return message

    def costs(
        self,
        step: int,
        plan_id: int,
        step_ns: int,
        costs: Sequence[dict[str, Any]],
        counts: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    ) -> None:
        """A ``step`` line from what each worker measured; ``counts`` are what items count, such as tokens by expert."""
        if not self._writes:
            return

        def by_item(field: str) -> list[int | None]:
            merged = {
                name: value
                for one in costs
                if one[field] is not None
                for name, value in zip(one["items"], one[field], strict=True)
            }
            return [merged.get(name, 0) for name in self._names]

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
        self.profile_line(record | ({"x_counts": counts} if counts else {}))

    def technique(self, event: Event) -> None:
        """Something changed what layers cost."""
        if self._writes:
            record = event_record(
                step=event.step,
                kind=event.kind,
                detail=event.detail,
                next_expected_step=event.next_expected_step,
            )
            self.profile_line(record)
            self.event(event.kind, event.message, step=event.step, **event.detail)

    def event(self, kind: str, message: str, *, step: int, **detail: Any) -> None:
        """A line in ``events.jsonl``; ``message`` is a sentence for a person."""
        if self._writes:
            record = self.run.event_record(kind, message, step=step, **detail)
            self._write(lambda: append_event(self.run.events, record))

    def metrics(self, **fields: Any) -> None:
        """A line in ``metrics.jsonl``."""
        if self._writes:
            self._write(lambda: self.run.log_metrics(fields))
