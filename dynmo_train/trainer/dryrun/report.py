"""``--dry-run``: parameters, FLOPs of a step, memory of each worker and step time, without building the model.

The layer list is built on the meta device, which has shapes but no memory. An exact profile header is passed to
``dynmo-plan simulate``, which has the cost model, for a device that need not be present::

    Config -> layer list on meta -> profile header -> dynmo-plan simulate -> stages, step time
                   `-> item_memory on fake tensors ---------> worker_peaks <------' -> DryRunReport
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..._common.console import Format, emit, emit_json, human_bytes
from ..._common.document import parse_any_json
from ..._common.errors import UsageError
from ...config import Config
from ...dynamics.freezing import frozen_items, weights_tied_to
from ...formats.plan import initial_plan, write_plan
from ...formats.profile import Layout, ModelInfo, WorkerInfo, append_record, header_record
from ...launch.find_command import program_path
from ...models.families.vocabulary_family import VocabularyShardedFamily
from ...models.layer_list import ModelFamily, parameters_of
from ...models.lora import LoraFamily
from ...models.registry import family_of
from ...models.sharding import experts_of
from ...optim.optimizers.registry import optimizer_settings
from ...pipeline.expert_migration import experts_by_item
from ..monitoring.profile_writer import FLOAT_BYTES, describe_copies, describe_items, describe_shards
from ..settings_from_config import analytic_keys_of, engine_settings, flops_counter, initial_partition
from .item_memory import ItemMemory
from .peak_memory import copies_of_worker, item_memories, shard_share, worker_peaks
from .replica_traffic import replica_bytes


@dataclass(frozen=True, kw_only=True)
class FrozenTraffic:
    """Largest number of bytes that a device sends to other replicas in a step, after the freeze at ``after_step``."""

    after_step: int
    replica_bytes: int


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """The resources of a run.

    Attributes:
        parameters: number of parameters of the model; tied weights count once.
        parameters_per_worker: largest number of parameters on a device.
        flops_per_step: model FLOPs of a step over all devices, without recomputation.
        peak_memory_bytes: peak memory of each worker's devices, without the CUDA context and libraries.
        step_s: predicted step time on ``device``, in seconds.
        bubble_fraction: predicted fraction of the step time in which workers are idle.
        device: device of the prediction.
        processes: total number of devices.
        expert_copies_bytes: largest number of bytes of copies of experts and of their gradient sums on a device, with
            ``--moe-expert-slots``; included in the peak.
        replica_bytes: largest number of bytes that a device sends to other data-parallel ranks in a step.
        replica_bytes_frozen: the same after each freeze of ``--freeze-schedule``.
        not_modelled: what of the run the figures leave out, as sentences.
    """

    parameters: int
    parameters_per_worker: int
    flops_per_step: int
    peak_memory_bytes: list[int]
    step_s: float
    bubble_fraction: float
    device: str
    processes: int
    expert_copies_bytes: int
    replica_bytes: int
    replica_bytes_frozen: list[FrozenTraffic]
    not_modelled: list[str]


def _sharded_builder(family: ModelFamily, tensor: int, expert: int = 1) -> Callable[[str], nn.Module]:
    """A function that builds items on the meta device with the shapes of one rank.

    Args:
        family: model of the run.
        tensor: number of tensor-parallel ranks.
        expert: number of ranks that share the experts of a layer; each has the same number of them.
    """

    def build(name: str) -> nn.Module:
        module = family.build(name, torch.device("meta"))
        for experts in experts_of(module):
            for number in list(experts)[len(experts) // expert :]:
                del experts[number]
        for full, parameter in parameters_of(name, module).items():
            dim = family.split_dim(full)
            if tensor > 1 and dim is not None:
                shape = list(parameter.shape)
                shape[dim] = math.ceil(shape[dim] / tensor)
                parameter.data = torch.empty(shape, device="meta")
        return module

    return build


def profile_header_of_run(config: Config, family: ModelFamily, memories: Mapping[str, ItemMemory]) -> dict[str, Any]:
    """The profile header that the run would write at its start, with exact sizes.

    Args:
        config: configuration of the run.
        family: model of the run.
        memories: activation memory of items, where it is known.
    """
    parallel, boundary = config.parallel, engine_settings(config).pipeline.boundary
    build = _sharded_builder(family, parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size)
    ranks = parallel.tensor_model_parallel_size * parallel.data_ranks
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
            # The operations of a custom schedule are in its plan, which need not exist before a dry run.
            schedule="zero-bubble" if parallel.schedule == "custom" else parallel.schedule,
            virtual_stages_per_worker=parallel.virtual_stages_per_worker,
            granularity=config.balance.granularity,
            microbatches=config.microbatches,
            micro_batch_size=config.training.micro_batch_size,
            tensor_parallel_size=parallel.tensor_model_parallel_size,
            data_parallel_size=parallel.data_ranks,
            expert_parallel_size=parallel.expert_model_parallel_size,
        ),
        link=None,
        workers=[
            WorkerInfo(
                worker=worker,
                ranks=list(range(worker * ranks, (worker + 1) * ranks)),
                hosts=["dry-run"],
                device="cuda",
                memory_bytes=None,  # not of this machine: ``--device`` of the simulation sets it
            )
            for worker in range(parallel.pipeline_model_parallel_size)
        ],
        items=describe_items(family, boundary, optimizer_settings(config.optimizer), build),
    )
    shards = describe_shards(family, boundary, optimizer_settings(config.optimizer), build)
    if shards is not None:
        record["x_vocabulary"] = shards
    slots = parallel.moe_expert_slots if parallel.expert_model_parallel_size > 1 else None
    copies = describe_copies(family, boundary, slots, build)
    if copies is not None:
        record["x_expert_copies"] = copies
    _state_weights_of_all_experts(record, family, parallel.tensor_model_parallel_size)
    # With these the cost model needs no estimate of its own.
    of_model, of_header = analytic_keys_of(config)
    record["model"] |= of_model
    record |= of_header
    for item in record["items"]:
        if item["name"] in memories:
            item["x_activation_bytes"] = memories[item["name"]].saved
    return record


def _state_weights_of_all_experts(record: dict[str, Any], family: ModelFamily, tensor: int) -> None:
    """State the weights that tokens use where ranks share experts: those of a rank serve the tokens of all ranks."""
    build, experts = _sharded_builder(family, tensor), experts_by_item(family.items)
    for item in record["items"]:
        if record["expert_parallel_size"] > 1 and item["name"] in experts:
            item["x_active_param_count"] = sum(parameter.numel() for parameter in build(item["name"]).parameters())


def _plan_of(config: Config, family: ModelFamily, run_id: str, folder: Path) -> str | None:
    """The plan that the run starts with: of ``--plan``, or of Megatron's options of stages; None: uniform."""
    if config.balance.plan or not config.parallel.has_layout:
        return config.balance.plan
    partition = initial_partition(config, family, None)
    document = initial_plan(
        run_id=run_id,
        stages=partition.stages,
        stage_workers=partition.stage_ranks,
        schedule=config.parallel.schedule,
        virtual_stages_per_worker=config.parallel.virtual_stages_per_worker,
        granularity=config.balance.granularity,
    )
    return str(write_plan(folder / "plans", document))


def _simulate(header: dict[str, Any], config: Config, family: ModelFamily, device: str) -> dict[str, Any]:
    """The result of ``dynmo-plan simulate``; raises ``UsageError`` if it is not installed or fails."""
    program = program_path("dynmo-plan")
    if program is None:
        raise UsageError("--dry-run needs dynmo-plan, which is not installed next to dynmo-train nor on PATH")
    precision = config.precision
    dtype = "bfloat16" if precision.bf16 else "float16" if precision.fp16 else "float32"
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.jsonl"
        append_record(profile, header)
        # ``uniform``, since a run without a plan starts with Megatron's uniform partition.
        command = [program, "simulate", str(profile), "--device", device, "--dtype", dtype, "--balancer", "uniform"]
        command += ["--recompute", config.training.recompute_granularity, "--format", "json"]
        plan = _plan_of(config, family, header["run_id"], Path(folder))
        command += ["--plan", plan] if plan else []
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"dynmo-plan simulate: {done.stderr.strip() or done.returncode}")
    document: dict[str, Any] = parse_any_json(done.stdout)
    return document


def dry_run(config: Config, device: str) -> DryRunReport:
    """Compute the resources of a run.

    Args:
        config: configuration of the run.
        device: ``h200``, ``h100``, ``a100``, ``cpu`` or a device file (TOML) of ``dynmo-plan``.

    Raises:
        UsageError: ``dynmo-plan`` is not installed, or rejects the device or the plan.
    """
    family, parallel = family_of(config), config.parallel
    boundary = engine_settings(config).pipeline.boundary
    memories = item_memories(config, family, boundary)
    header = profile_header_of_run(config, family, memories)
    simulation = _simulate(header, config, family, device)
    total, local_counts, untrained_counts = 0, {}, {}
    front = _front_under_adapters(family)
    for item in family.items:
        counts = parameters_of(item.name, family.build(item.name, torch.device("meta")))
        total += sum(parameter.numel() for name, parameter in counts.items() if name not in family.ties)
        info = next(each for each in header["items"] if each["name"] == item.name)
        local_counts[item.name] = info["param_count"]
        if item.name not in front:
            untrained_counts[item.name] = info["param_count"] - info["gradient_bytes"] // FLOAT_BYTES
    workers = parallel.pipeline_model_parallel_size
    # The header has the sizes of one tensor-parallel rank.
    total += shard_share(header, 0, 1)["param_count"] * parallel.tensor_model_parallel_size
    of_shards = [shard_share(header, worker, workers) for worker in range(workers)]
    shards = [each["param_count"] for each in of_shards]
    stages = simulation.get("stages") or [{"worker": 0, "items": list(local_counts)}]
    by_worker = _sums_by_worker(shards, stages, local_counts)
    without_gradients = [each["param_count"] - each["gradient_bytes"] // FLOAT_BYTES for each in of_shards]
    untrained = _sums_by_worker(without_gradients, stages, untrained_counts)

    def sent_after(step: int) -> int:
        counts = {name: local_counts[name] for name in front} or _frozen_counts(config, family, step)
        frozen = _sums_by_worker([0] * workers, stages, counts)
        itemsize = boundary.dtype.itemsize
        of_workers = zip(by_worker, frozen, untrained, strict=True)
        return max(replica_bytes(config, whole, itemsize, *without) for whole, *without in of_workers)

    schedule = () if config.freezing.freeze_adaptive else config.freezing.freeze_steps
    return DryRunReport(
        parameters=total,
        parameters_per_worker=max(by_worker),
        flops_per_step=flops_counter(config, family)(config.batch_sizes.final, config.model.seq_length),
        peak_memory_bytes=worker_peaks(config, family, boundary, header, simulation, memories),
        expert_copies_bytes=max(copies_of_worker(config, family, header, worker, stages) for worker in range(workers)),
        step_s=simulation["step_ns"] / 1e9,
        bubble_fraction=simulation["bubble_fraction"],
        device=device,
        processes=workers * parallel.tensor_model_parallel_size * parallel.data_ranks,
        replica_bytes=sent_after(0),
        replica_bytes_frozen=[
            FrozenTraffic(after_step=step, replica_bytes=sent_after(step)) for step, _ in schedule if step > 0
        ],
        not_modelled=not_modelled(config),
    )


def _sums_by_worker(begin: Sequence[int], stages: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> list[int]:
    """Sum of the counts of the items of each worker, added to ``begin``."""
    sums = list(begin)
    for stage in stages:
        sums[stage["worker"]] += sum(counts.get(name, 0) for name in stage["items"])
    return sums


def _front_under_adapters(family: ModelFamily) -> tuple[str, ...]:
    """The items before the first adapter; none in a model without adapters."""
    base = family.base if isinstance(family, VocabularyShardedFamily) else family
    return base.frozen_front if isinstance(base, LoraFamily) else ()


def _frozen_counts(config: Config, family: ModelFamily, step: int) -> dict[str, int]:
    """Item -> number of parameters of one tensor-parallel rank that are frozen after ``step``, by the schedule."""
    freezing = config.freezing
    if freezing.freeze_adaptive:
        return {}
    parallel = config.parallel
    build = _sharded_builder(family, parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size)
    frozen = frozen_items(family.items, freezing.freeze_steps, step)
    tied_and_frozen = weights_tied_to(family.ties, frozen) if freezing.freeze_tied else set()
    training = {*family.ties, *family.ties.values()} - tied_and_frozen
    return {
        item: sum(p.numel() for name, p in parameters_of(item, build(item)).items() if name not in training)
        for item in frozen
    }


def not_modelled(config: Config) -> list[str]:
    """What of a run the figures leave out, as sentences."""
    compression = config.compression
    flags = {"--inter-grad-comp": compression.inter_grad_comp, "--grad-comp": compression.grad_comp}
    flags |= {"--selective-grad-comp": compression.selective_grad_comp, "--emb-comm-opt": compression.emb_comm_opt}
    used = [flag for flag, is_on in flags.items() if is_on]
    if not used:
        return []
    return [
        f"gradient compression ({', '.join(used)}): memory of its errors and factors, its time, and the bytes that it"
        " saves; dynmo-plan simulate has its time and bytes"
    ]


def print_dry_run(config: Config, device: str, form: Format) -> None:
    """Print the resources of a run; see :func:`dry_run`.

    Raises:
        UsageError: ``dynmo-plan`` is not installed, or rejects the device or the plan.
    """
    report = dry_run(config, device)
    if form is Format.JSON:
        emit_json(asdict(report))
        return
    emit(f"parameters: {report.parameters:,} | per device: at most {report.parameters_per_worker:,}")
    emit(f"model FLOPs per step: {report.flops_per_step:.4e} | devices: {report.processes}")
    for worker, peak in enumerate(report.peak_memory_bytes):
        emit(f"worker {worker}: peak memory per device {human_bytes(peak)}")
    if report.expert_copies_bytes:
        emit(f"of these for copies of experts and float64 gradients: at most {human_bytes(report.expert_copies_bytes)}")
    if report.replica_bytes:
        emit(f"sent to other replicas: at most {human_bytes(report.replica_bytes)} per device and step")
        for each in report.replica_bytes_frozen:
            emit(f"  after the freeze at iteration {each.after_step:,}: at most {human_bytes(each.replica_bytes)}")
    emit(f"step time on {device}: {report.step_s:.3f} s | bubble: {report.bubble_fraction:.1%}")
    for sentence in report.not_modelled:
        emit(f"not modelled: {sentence}")
    if config.precision.uses_float8:
        emit("the step time is that of products in bfloat16; those in float8 are faster")
