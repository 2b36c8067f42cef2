"""Options that several commands share: each is declared once, with its unit, and related ones form a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .._common.console import Format, emit_json, print_message
from .._common.document import MAX_INTEGER, MAX_LAYERS, MAX_MICROBATCHES, MAX_RANKS, MAX_SIZE, MAX_STEPS
from .._common.panel import Panel

if TYPE_CHECKING:
    from ..analysis.compression import CompressionOptions
    from ..costs.devices import Device
    from ..inputs.profile_source import ProfileSource


class Schedule(StrEnum):
    """Pipeline schedules by name."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"


# Python's enumerations with members cannot be extended, so the names are repeated with those of a search.
class ScheduleOrSearch(StrEnum):
    """Pipeline schedules by name, ``custom`` for an order of operations made for the costs, ``auto`` for a search."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"
    CUSTOM = "custom"
    AUTO = "auto"


class Granularity(StrEnum):
    """Where a plan may cut."""

    LAYER = "layer"
    SUBLAYER = "sublayer"


class GranularityOrSearch(StrEnum):
    """Where a plan may cut, or ``auto`` to search both."""

    LAYER = "layer"
    SUBLAYER = "sublayer"
    AUTO = "auto"


class Objective(StrEnum):
    """What the exact balancer minimizes."""

    AUTO = "auto"
    BOTTLENECK = "bottleneck"
    SIMULATED = "simulated"


class Policy(StrEnum):
    """Rule by which the online planner decides to move."""

    NEVER = "never"
    ALWAYS = "always"
    THRESHOLD = "threshold"
    REGRET = "regret"


class Recompute(StrEnum):
    """Activation recomputation."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Dtype(StrEnum):
    """Data type of matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Technique(StrEnum):
    """Dynamic techniques with a scripted trajectory."""

    STATIC = "static"
    PRUNING = "pruning"
    FREEZING = "freezing"
    MOE = "moe"
    MOD = "mod"
    EARLY_EXIT = "early-exit"
    SPARSE_ATTENTION = "sparse-attention"


class Target(StrEnum):
    """Frameworks that a plan can be exported to."""

    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    TORCH_CSV = "torch-csv"
    VLLM = "vllm"


class Importable(StrEnum):
    """File formats that ``profile import`` reads."""

    CHROME_TRACE = "chrome-trace"
    DEEPSPEED_LOG = "deepspeed-log"
    MEGATRON_LOG = "megatron-log"


class Transfers(StrEnum):
    """What a transfer between workers blocks."""

    OVERLAPPED = "overlapped"
    SERIAL = "serial"
    BLOCKING = "blocking"


def _known_balancer(name: str) -> str:
    # Not an enumeration: other packages register balancers, and finding those takes time that help must not spend.
    from ..partition.registry import balancer_names

    if name not in balancer_names():
        raise typer.BadParameter(f"{name!r}: choose one of {', '.join(balancer_names())}")
    return name


SourceArgument = Annotated[Path, typer.Argument(help="A profile.jsonl, or a run directory that contains one.")]
FormatOption = Annotated[Format, typer.Option("--format", help="Output as text or JSON.")]
ScheduleOption = Annotated[
    Schedule | None,
    typer.Option("--schedule", help="Pipeline schedule. Default: as in the profile.", rich_help_panel="Pipeline"),
]
BalancerOption = Annotated[
    str,
    typer.Option(
        "--balancer",
        metavar="NAME",
        callback=_known_balancer,
        help="exact: least bottleneck under all constraints, proven; time, parameters: the same solver on measured time"
        " or parameter counts, without memory limits and speeds; uniform: Megatron's static split; deepspeed,"
        " deepspeed_param, deepspeed_static: DeepSpeed's splits by time, by parameters, and even; diffusion,"
        " diffusion_param: neighbors rebalance in pairs; or a balancer that another package registers.",
    ),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="What exact minimizes. bottleneck: proven; simulated: the simulated step, by local search; auto:"
        " simulated below 8 microbatches per worker and for gpipe.",
    ),
]
GranularityOption = Annotated[
    Granularity | None,
    typer.Option("--granularity", help="Where to cut. Default: as in the profile.", rich_help_panel="Pipeline"),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="Memory per worker, in bytes or as 80GB or 80GiB. Default: as in the profile."),
]
StagesOption = Annotated[
    int | None,
    typer.Option(
        "--stages", min=1, max=MAX_RANKS, help="Pipeline workers. Default: as in the active plan or the profile."
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Data type of computed costs.")]
FusedOption = Annotated[
    bool,
    typer.Option(
        "--fused-attention/--unfused-attention",
        help="Whether computed costs keep attention scores out of memory.",
        rich_help_panel="Costs",
    ),
]
WindowOption = Annotated[
    int, typer.Option("--window", min=1, max=MAX_STEPS, help="Number of step records; costs are their median.")
]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The size of the pipeline; None is as in the profile."""

    PANEL: ClassVar[str] = "Pipeline"

    stages: StagesOption = None
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=MAX_MICROBATCHES, help="Microbatches per step. Default: as in the profile.")
    ] = None
    virtual_stages: Annotated[
        int | None, typer.Option(min=1, max=MAX_RANKS, help="Stages per worker. Default: as in the profile.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Constraints that every stage or worker must satisfy."""

    PANEL: ClassVar[str] = "Constraints"

    memory: MemoryOption = None
    min_layers: Annotated[
        int, typer.Option(min=0, max=MAX_LAYERS, help="Minimum number of units (layers or parts of layers) per stage.")
    ] = 1


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """The step records that the costs come from."""

    PANEL: ClassVar[str] = "Costs"

    window: WindowOption = 20
    at_step: Annotated[
        int | None, typer.Option(min=1, max=MAX_INTEGER, help="Use the costs at this step. Default: the last.")
    ] = None

    def load(self, source: Path, **options: Any) -> ProfileSource:
        """Read the profile; ``options`` are those of ``profile_source.load``."""
        from ..inputs.profile_source import load

        return load(source, window=self.window, at_step=self.at_step, **options)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device to compute costs for, in place of measured ones."""

    PANEL: ClassVar[str] = "Costs"

    device: Annotated[
        str | None,
        typer.Option(help="Compute the costs for h200, h100, a100, cpu or a TOML file instead of measured ones."),
    ] = None
    dtype: DtypeOption = Dtype.FLOAT32

    def load(self) -> Device | None:
        """The device; None where costs are measured."""
        from ..costs.devices import load_device

        return None if self.device is None else load_device(self.device)


@dataclass(frozen=True, kw_only=True)
class ClockOptions:
    """What an operation and a transfer take beyond the arithmetic."""

    PANEL: ClassVar[Panel] = Panel("Simulation", rare=True)

    overhead_us: Annotated[float, typer.Option(min=0, help="Microseconds added to every operation.")] = 0.0
    transfers: Annotated[
        Transfers,
        typer.Option(
            help="overlapped: workers continue; serial: workers continue, one tensor at a time per link; blocking:"
            " sender and receiver wait."
        ),
    ] = Transfers.OVERLAPPED


@dataclass(frozen=True, kw_only=True)
class CompressionFlags:
    """Low-rank gradient compression, by the flags of ``dynmo-train``."""

    PANEL: ClassVar[Panel] = Panel("Gradient compression", rare=True)

    inter_grad_comp_rank: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="Rank of compressed gradients between stages.")
    ] = None
    inter_grad_comp_epilogue_only: Annotated[
        bool,
        typer.Option(
            "--inter-grad-comp-epilogue-only", help="Compress only after a worker's last forward pass of a step."
        ),
    ] = False
    use_error_feedback: Annotated[
        bool, typer.Option("--use-error-feedback", help="Keep the compression error; takes one more product.")
    ] = False
    grad_comp_rank: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="Rank of compressed gradients between replicas.")
    ] = None
    selective_grad_comp_way: Annotated[
        str | None, typer.Option(help="Number of workers that compress between replicas; auto: the fastest number.")
    ] = None
    emb_comm_opt: Annotated[
        bool,
        typer.Option("--emb-comm-opt", help="Reduce tied weights over replicas and copies in one all-reduce."),
    ] = False
    compression_device: Annotated[
        str | None,
        typer.Option(help="Device that compresses: a preset or a TOML file. Default: --device, or cpu."),
    ] = None

    def resolve(self, hardware: Device | None = None) -> CompressionOptions:
        """The options with their device: the named one, else ``hardware``, else the CPU."""
        from ..analysis.compression import CompressionOptions
        from ..costs.devices import load_device

        return CompressionOptions(
            boundary_rank=self.inter_grad_comp_rank,
            epilogue_only=self.inter_grad_comp_epilogue_only,
            feedback=self.use_error_feedback,
            replica_rank=self.grad_comp_rank,
            way=self.selective_grad_comp_way,
            fuse_ties=self.emb_comm_opt,
            device=load_device(self.compression_device) if self.compression_device else hardware or load_device("cpu"),
        )


def write_plan(encode: Callable[[str], bytes], output: Path | None, output_format: Format) -> None:
    """Write a plan to a file, and print the same document where JSON is asked for.

    Args:
        encode: from the name of the plan, for errors, to its bytes.
        output: file to write; None writes none.
        output_format: of what is printed.
    """
    from .._common.document import parse_json, write_whole

    if output is None and output_format is not Format.JSON:
        return
    payload = encode(str(output or "the plan"))
    if output is not None:
        write_whole(output, payload)
        print_message(f"wrote {output}")
    if output_format is Format.JSON:
        emit_json(parse_json(payload))
