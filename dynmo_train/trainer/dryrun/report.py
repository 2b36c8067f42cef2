"""What a run would need, without building it: parameters, operations of a step, memory of each worker.

The layer list is built on the meta device, which holds shapes alone. An exact profile header goes to ``dynmo-plan
simulate``, which has the one cost model; its figures are for a device that need not be here.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..._common.console import Format, emit, emit_json, human_bytes
from ..._common.document import parse_any_json
from ..._common.errors import UsageError
from ...config import Config
from ...formats.profile import Layout, ModelInfo, WorkerInfo, append_record, header_record
from ...launch.find_command import program_path
from ...models.layer_list import ModelFamily, parameters_of
from ...models.registry import family_of
from ..monitoring.profile_writer import describe_items
from ..settings_from_config import flops_counter, settings_of
from .item_memory import ItemMemory
from .peak_memory import memory_of_items, worker_peaks


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """The figures. Memory is the peak of each pipeline worker's devices, without what the process itself takes.

    Attributes:
        parameters: of the model, tied weights once.
        parameters_per_worker: of the largest share that one device holds.
        flops_per_step: model operations of a step over all devices, nothing recomputed.
        peak_memory_bytes: of each worker.
        step_s: predicted time of a step on ``device``.
        processes: devices in all.
    """

    parameters: int
    parameters_per_worker: int
    flops_per_step: int
    peak_memory_bytes: list[int]
    step_s: float
    bubble_fraction: float
    device: str
    processes: int


def _cut_to_rank(family: ModelFamily, tensor: int) -> Callable[[str], nn.Module]:
    """Builds items on the meta device as one of ``tensor`` ranks holds them."""

    def build(name: str) -> nn.Module:
        module = family.build(name, torch.device("meta"))
        for full, parameter in parameters_of(name, module).items():
            dim = family.split_dim(full)
            if tensor > 1 and dim is not None:
                shape = list(parameter.shape)
                shape[dim] = math.ceil(shape[dim] / tensor)
                parameter.data = torch.empty(shape, device="meta")
        return module

    return build


def header_of(config: Config, family: ModelFamily, memories: Mapping[str, ItemMemory]) -> dict[str, Any]:
    """The profile's header of the run, as it would be written at its start, with exact sizes.

    Args:
        memories: what the items hold, as far as that is known.
    """
    parallel, boundary = config.parallel, settings_of(config).pipeline.boundary
    ranks = parallel.tensor_model_parallel_size * parallel.data_parallel_size
    record = header_record(
        run_id="dry-run",
        segment=0,
        model=ModelInfo(
            family=config.model.family,
            num_layers=config.model.num_layers,
            hidden_size=config.model.hidden_size,
            sequence_length=config.model.seq_length,
        ),
        layout=Layout(
            schedule="zero-bubble" if parallel.schedule == "custom" else parallel.schedule,
            virtual_stages_per_worker=parallel.virtual_stages_per_worker,
            granularity=config.balance.granularity,
            microbatches=config.microbatches,
            micro_batch_size=config.training.micro_batch_size,
            tensor_parallel_size=parallel.tensor_model_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
        ),
        link=None,
        workers=[
            WorkerInfo(
                worker=worker,
                ranks=list(range(worker * ranks, (worker + 1) * ranks)),
                hosts=["dry-run"],
                device="cuda",
                memory_bytes=None,
            )
            for worker in range(parallel.pipeline_model_parallel_size)
        ],
        items=describe_items(family, boundary, _cut_to_rank(family, parallel.tensor_model_parallel_size)),
    )
    record["model"]["x_num_attention_heads"] = config.model.num_attention_heads
    for item in record["items"]:
        if item["name"] in memories:
            item["x_activation_bytes"] = memories[item["name"]].kept
    return record


def _simulate(header: dict[str, Any], config: Config, device: str) -> dict[str, Any]:
    """What ``dynmo-plan simulate`` says of the run; raises ``UsageError`` where it is absent or refuses."""
    program = program_path("dynmo-plan")
    if program is None:
        raise UsageError("--dry-run asks dynmo-plan, which is not installed beside dynmo-train nor on PATH")
    precision = config.precision
    dtype = "bfloat16" if precision.bf16 else "float16" if precision.fp16 else "float32"
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.jsonl"
        append_record(profile, header)
        words = [program, "simulate", str(profile), "--device", device, "--dtype", dtype, "--balancer", "uniform"]
        words += ["--recompute", config.training.recompute_granularity, "--format", "json"]
        words += ["--plan", config.balance.plan] if config.balance.plan else []
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"dynmo-plan simulate: {done.stderr.strip() or done.returncode}")
    document: dict[str, Any] = parse_any_json(done.stdout)
    return document


def dry_run(config: Config, device: str) -> DryRunReport:
    """The figures of a run on a device: ``h200``, ``h100``, ``a100``, ``cpu`` or a TOML file of ``dynmo-plan``."""
    family, parallel = family_of(config), config.parallel
    boundary = settings_of(config).pipeline.boundary
    memories = memory_of_items(config, family, boundary)
    header = header_of(config, family, memories)
    told = _simulate(header, config, device)
    whole, held = 0, {}
    for item in family.items:
        counts = parameters_of(item.name, family.build(item.name, torch.device("meta")))
        whole += sum(parameter.numel() for name, parameter in counts.items() if name not in family.ties)
        held[item.name] = next(each["param_count"] for each in header["items"] if each["name"] == item.name)
    by_worker: dict[int, int] = {}
    for stage in told.get("stages", []):
        count = sum(held[name] for name in stage["items"])
        by_worker[stage["worker"]] = by_worker.get(stage["worker"], 0) + count
    return DryRunReport(
        parameters=whole,
        parameters_per_worker=max(by_worker.values(), default=sum(held.values())),
        flops_per_step=flops_counter(config, family)(config.training.global_batch_size, config.model.seq_length),
        peak_memory_bytes=worker_peaks(config, family, boundary, header, told, memories),
        step_s=told["step_ns"] / 1e9,
        bubble_fraction=told["bubble_fraction"],
        device=device,
        processes=parallel.pipeline_model_parallel_size
        * parallel.tensor_model_parallel_size
        * parallel.data_parallel_size,
    )


def print_dry_run(config: Config, device: str, form: Format) -> None:
    """Print the figures."""
    figures = dry_run(config, device)
    if form is Format.JSON:
        emit_json(asdict(figures))
        return
    emit(f"parameters: {figures.parameters:,}; at most {figures.parameters_per_worker:,} on a device")
    emit(f"operations of a step: {figures.flops_per_step:.4e} ({figures.processes} devices)")
    for worker, peak in enumerate(figures.peak_memory_bytes):
        emit(f"worker {worker}: {human_bytes(peak)} on each of its devices")
    emit(f"a step on {device}: {figures.step_s:.3f} s, of which {figures.bubble_fraction:.1%} is the bubble")
