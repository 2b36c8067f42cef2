"""Options of batches, length, evaluation, logging and failures of a training run."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..._common.document import MAX_JOBS, MAX_MICROBATCHES, MAX_RANKS, MAX_SAMPLES
from .. import panels
from ..options import option
from ..parse import iters_of_samples

Device = Literal["auto", "cpu", "cuda"]
Recompute = Literal["none", "selective", "full"]
CurriculumSchedule = Literal["fixed_linear", "fixed_root"]
LossSpikeAction = Literal["report", "rollback"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batches, length, evaluation and logging."""

    PANEL: ClassVar[str] = panels.BATCH

    micro_batch_size: int = option("Microbatch size in samples.", minimum=1, maximum=MAX_RANKS, common=True)
    global_batch_size: int = option(
        "Global batch size in samples per optimizer step.",
        minimum=1,
        derive=(
            "--micro-batch-size x replicas x --gradient-accumulation-steps",
            lambda v, _: v["micro_batch_size"] * v["data_parallel_size"] * (v["gradient_accumulation_steps"] or 1),
        ),
        common=True,
    )
    gradient_accumulation_steps: int | None = option(
        "Microbatches per step and replica; none: from --global-batch-size.",
        default=None,
        minimum=1,
        maximum=MAX_MICROBATCHES,
    )
    rampup_batch_size: str | None = option(
        "Batch-size ramp-up: START INCREMENT SAMPLES, up to --global-batch-size; needs --train-samples.",
        default=None,
    )
    step_batch_size_schedule: str | None = option(
        "Global batch sizes by consumed tokens: TOKENS:SIZE pairs, such as 0:16 2.4B:320.",
        default=None,
    )
    train_samples: int | None = option(
        "Training length in samples, instead of --train-iters.",
        default=None,
        minimum=1,
        maximum=MAX_SAMPLES,
        common=True,
    )
    train_iters: int = option(
        "Training length in optimizer steps.",
        minimum=1,
        derive=("from --train-samples", lambda v, _: iters_of_samples(v)),
        common=True,
    )
    seed: int = option(
        "Random seed of weights, dropout and sample order.", default=1234, minimum=0, maximum=2**32 - 1, common=True
    )
    recompute_granularity: Recompute = option(
        "Activation checkpointing: recompute whole layers (full), or all but matrix products (selective).",
        default="none",
        common=True,
        panel=panels.PRECISION,
    )
    torch_compile: bool = option(
        "Compile each layer with torch.compile.",
        default=False,
        common=True,
        panel=panels.PRECISION,
    )
    cuda_graph: bool = option("Launch attention and MLP blocks as CUDA graphs.", default=False, panel=panels.PRECISION)
    torch_compile_backend: str = option("Backend of --torch-compile.", default="inductor", panel=panels.PRECISION)
    skip_train: bool = option("Evaluate the --load model on validation and test data; do not train.", default=False)
    eval_interval: int = option(
        "Steps between evaluations on the validation data.", default=1000, minimum=1, common=True
    )
    eval_iters: int = option(
        "Number of batches per evaluation; 0 disables evaluation.", default=100, minimum=0, common=True
    )
    log_interval: int = option("Steps between log lines.", default=100, minimum=1, common=True, panel=panels.LOGGING)
    log_throughput: bool = option("Log model FLOP/s per device.", default=False, common=True, panel=panels.LOGGING)
    check_for_nan_in_loss_and_grad: bool = option(
        "Check loss and gradients for NaN and infinity at each step.", default=True, panel=panels.ELASTICITY
    )
    max_skipped_iterations: int = option(
        "Consecutive non-finite steps before the run ends with exit code 3.",
        default=10,
        minimum=1,
        panel=panels.ELASTICITY,
    )
    loss_spike_threshold: float | None = option(
        "Deviations of a loss spike above the median; none: not detected.",
        default=None,
        above=0,
        common=True,
        panel=panels.ELASTICITY,
    )
    loss_spike_window: int = option(
        "Number of last losses that the median is over.",
        default=128,
        minimum=4,
        maximum=65_536,
        panel=panels.ELASTICITY,
    )
    loss_spike_action: LossSpikeAction = option(
        "Report spikes, or return to the last checkpoint and skip batches.",
        default="report",
        panel=panels.ELASTICITY,
    )
    loss_spike_skip_batches: int = option(
        "Batches to skip after a rollback, up to the spike's.",
        default=100,
        minimum=1,
        maximum=1_000_000,
        panel=panels.ELASTICITY,
    )
    loss_spike_max_rollbacks: int = option(
        "Rollbacks to one checkpoint before the run ends with exit code 3.",
        default=3,
        minimum=1,
        panel=panels.ELASTICITY,
    )
    skip_train_samples: str | None = option(
        "Ranges of training samples to skip, BEGIN:END separated by spaces.",
        default=None,
        words=True,
        panel=panels.BATCH,
    )
    exit_interval: int | None = option(
        "Save and exit after a step divisible by N.", default=None, minimum=1, panel=panels.ELASTICITY
    )
    distributed_timeout_minutes: float = option(
        "Minutes after which a collective or a hanging rank fails.",
        default=10.0,
        above=0,
        panel=panels.ELASTICITY,
    )
    exit_duration_in_mins: float | None = option(
        "Save and exit after N minutes.", default=None, above=0, common=True, panel=panels.ELASTICITY
    )
    curriculum_shortest: int | None = option(
        "Initial sequence length of curriculum learning in tokens; none: no curriculum.",
        default=None,
        minimum=1,
    )
    curriculum_steps: int = option(
        "Steps until the curriculum reaches --seq-length.",
        minimum=1,
        derive=("--train-iters", lambda v, _: v["train_iters"]),
    )
    curriculum_multiple: int = option(
        "Multiple in tokens to which curriculum lengths are rounded down.", default=8, minimum=1
    )
    curriculum_schedule: CurriculumSchedule = option(
        "Growth of the curriculum length over the steps.", default="fixed_linear"
    )
    curriculum_root_degree: float = option(
        "Degree of the root of --curriculum-schedule fixed_root.", default=2.0, above=0
    )
    num_threads: int = option(
        "CPU threads per process.", default=1, minimum=1, maximum=MAX_JOBS, panel=panels.PARALLELISM
    )
    device: Device = option(
        "Device type; auto: cuda if available, else cpu.", default="auto", common=True, panel=panels.PARALLELISM
    )
