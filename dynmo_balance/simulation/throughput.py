"""What a simulated step means for a run: the step with its tail, throughput, model FLOPs utilization and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..costs.analytic import MicrobatchShape, header_works, step_flops
from ..costs.devices import Device
from ..formats.profile import Header
from ..partition.problem import PartitionProblem
from .simulator import Timeline
from .step_tail import TailOptions, tail_of


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """The forecast of one step; throughput is that of all data-parallel replicas together.

    Attributes:
        step_ns: with the reduction of gradients and the optimizer.
        samples_per_s, tokens_per_s: throughput.
        flops_per_s_per_worker: useful operations per device of a worker; recomputation does not count.
        flops_fraction: share of the device's peak; None without a device, or if the dtype of measured times is
            unknown.
        over_memory: worker, peak and limit in bytes, of each worker above its limit.
    """

    step_ns: int
    samples_per_s: float
    tokens_per_s: float
    flops_per_s_per_worker: float
    flops_fraction: float | None
    over_memory: tuple[tuple[int, int, int], ...]


def rates_of(
    header: Header, device: Device | None, data_parallel_gbps: float | None, optimizer_gbps: float | None
) -> TailOptions:
    """The rates of the step's tail: as given, else the device's, else as measured (replicas), else not counted.

    Replicas reduce over the network if the pipeline and its tensor-parallel ranks fill a node. The optimizer reads
    and writes its data, so it gets half of the memory bandwidth.

    Args:
        header: of the profile.
        device: None if costs are measured.
        data_parallel_gbps, optimizer_gbps: GB/s; None is the default.
    """
    reduce, touch = data_parallel_gbps, optimizer_gbps
    if device is not None:
        ranks = header.tensor_parallel_size
        bandwidth, _ = device.stage_link(len(header.workers) * ranks * header.data_parallel_size, 1)
        reduce = bandwidth / 1e9 if reduce is None else reduce
        half = device.memory_bandwidth_bytes_per_s * device.memory_efficiency / 2
        touch = half / 1e9 if touch is None else touch
    if reduce is None and header.replica_bandwidth is not None:
        reduce = header.replica_bandwidth / 1e9
    return TailOptions(
        data_parallel=header.data_parallel_size,
        data_parallel_bandwidth=None if reduce is None else round(reduce * 1e9),
        memory_bandwidth=None if touch is None else round(touch * 1e9),
    )


def forecast_step(
    header: Header,
    problem: PartitionProblem,
    boundaries: Sequence[int],
    timeline: Timeline,
    rates: TailOptions,
    device: Device | None,
    dtype: str,
) -> StepForecast:
    """The forecast of a simulated step.

    Args:
        header: of the profile.
        problem: chain, workers and number of microbatches.
        boundaries: ``[stages + 1]`` item positions.
        timeline: the simulated operations of the step.
        rates: of the step's tail.
        device: for the share of its peak; None if unknown.
        dtype: of matrix products, a key of ``device.flops_per_s``.
    """
    step_ns = tail_of(problem, boundaries, timeline, rates).step_ns
    samples = problem.microbatches * header.micro_batch_size * header.data_parallel_size // header.context_parallel_size
    per_s = samples * 1e9 / step_ns if step_ns else 0.0
    sequence = header.model.sequence_length
    shape = MicrobatchShape(
        tokens=header.micro_batch_size * sequence // header.context_parallel_size,
        sequence=sequence,
        hidden=header.model.hidden_size,
        dtype=dtype,
        tensor_parallel=header.tensor_parallel_size,
        context_parallel=header.context_parallel_size,
    )
    # Model FLOPs utilization (PaLM: Chowdhery et al. 2022, arXiv 2204.02311, appendix B): the operations that the
    # mathematics needs. Recomputed ones are overhead, so recomputation lowers the figure.
    # ``step_flops`` counts the microbatches of the profile, which a simulation may change.
    flops = step_flops(header, header_works(header, shape), shape) * problem.microbatches / header.microbatches
    devices = len(problem.slots) * header.tensor_parallel_size
    # The peak belongs to a dtype. Only computed costs (no records) have a known one; a profile does not record it.
    is_known = device is not None and problem.chain.costs.records == 0
    rate = flops * 1e9 / step_ns / devices if step_ns else 0.0
    peaks = zip(problem.slots, timeline.peak_memory_bytes, strict=True)
    return StepForecast(
        step_ns=step_ns,
        samples_per_s=per_s,
        tokens_per_s=per_s * sequence,
        flops_per_s_per_worker=rate,
        flops_fraction=rate / device.flops_per_s[dtype] if is_known and device is not None else None,
        over_memory=tuple(
            (slot.worker, peak, slot.memory_bytes)
            for slot, peak in peaks
            if slot.memory_bytes is not None and peak > slot.memory_bytes
        ),
    )


def document_of(problem: PartitionProblem, boundaries: Sequence[int], found: StepForecast) -> dict[str, Any]:
    """The forecast for JSON, with the contents and costs of each stage in one microbatch."""
    chain, costs = problem.chain, problem.chain.costs
    stages = []
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        slot = problem.slot(stage)
        backward = sum(costs.backward_input_ns[begin:end]) + sum(costs.backward_weight_ns[begin:end])
        stages.append(
            {
                "stage": stage,
                "worker": slot.worker,
                "items": list(chain.names[begin:end]),
                "forward_ns": slot.time_ns(sum(costs.forward_ns[begin:end])),
                "backward_ns": slot.time_ns(backward),
                "static_bytes": sum(chain.static_bytes[begin:end]),
                "activation_bytes": sum(costs.activation_bytes[begin:end]),
            }
        )
    return {
        "step_with_tail_ns": found.step_ns,
        "samples_per_s": found.samples_per_s,
        "tokens_per_s": found.tokens_per_s,
        "flops_per_s_per_worker": found.flops_per_s_per_worker,
        "flops_fraction": found.flops_fraction,
        "memory_limit_bytes": [slot.memory_bytes for slot in problem.slots],
        "over_memory": bool(found.over_memory),
        "stages": stages,
    }
