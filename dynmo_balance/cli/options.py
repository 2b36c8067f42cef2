"""The options that several commands share, each declared once with its unit."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .._common.console import Format
from .._common.document import MAX_INTEGER, MAX_LAYERS, MAX_MICROBATCHES, MAX_RANKS, MAX_SIZE, MAX_STEPS


class Balancer(StrEnum):
    """The balancers; ``partition.registry.BALANCERS`` has one function for each, which a test checks."""

    EXACT = "exact"
    TIME = "time"
    PARAMETERS = "parameters"
    UNIFORM = "uniform"
    DEEPSPEED = "deepspeed"
    DEEPSPEED_PARAM = "deepspeed_param"
    DEEPSPEED_STATIC = "deepspeed_static"
    DIFFUSION = "diffusion"
    DIFFUSION_PARAM = "diffusion_param"


class Schedule(StrEnum):
    """The schedules."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    ZB_V = "zb-v"


class Granularity(StrEnum):
    """Where a plan may cut."""

    LAYER = "layer"
    SUBLAYER = "sublayer"


class ScheduleOrAuto(StrEnum):
    """The schedules, an order of operations made for the costs at hand, or a search over them all."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    ZB_V = "zb-v"
    CUSTOM = "custom"
    AUTO = "auto"


class GranularityOrAuto(StrEnum):
    """Where a plan may cut, or a search over both."""

    LAYER = "layer"
    SUBLAYER = "sublayer"
    AUTO = "auto"


class Objective(StrEnum):
    """What the exact balancer minimises."""

    AUTO = "auto"
    BOTTLENECK = "bottleneck"
    SIMULATED = "simulated"


class Policy(StrEnum):
    """When to move."""

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
    """Numbers that products are computed in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Technique(StrEnum):
    """Scripted trajectories."""

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
    """What ``profile import`` reads."""

    CHROME_TRACE = "chrome-trace"
    DEEPSPEED_LOG = "deepspeed-log"
    MEGATRON_LOG = "megatron-log"


class Transfers(StrEnum):
    """What a transfer keeps busy."""

    OVERLAPPED = "overlapped"
    SERIAL = "serial"
    BLOCKING = "blocking"


SourceArgument = Annotated[Path, typer.Argument(help="A profile.jsonl, or the run directory that holds one.")]
FormatOption = Annotated[Format, typer.Option("--format", help="Report for a person or for a program.")]
StagesOption = Annotated[
    int | None,
    typer.Option(
        "--stages", min=1, max=MAX_RANKS, help="Pipeline workers. Default: as in the active plan or the profile."
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches", min=1, max=MAX_MICROBATCHES, help="Microbatches a step. Default: as in the profile."
    ),
]
ScheduleOption = Annotated[Schedule | None, typer.Option("--schedule", help="Default: as in the profile.")]
VirtualOption = Annotated[
    int | None,
    typer.Option("--virtual-stages", min=1, max=MAX_RANKS, help="Stages on each worker. Default: as in the profile."),
]
BalancerOption = Annotated[
    Balancer,
    typer.Option(
        "--balancer",
        help="exact: provably least bottleneck under all constraints; time and parameters: the same solver on measured"
        " time or parameter counts, without memory and speeds; uniform: Megatron's static split; deepspeed: what"
        " DeepSpeed would do; diffusion: neighbours even out in turn, to a local equilibrium.",
    ),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="bottleneck: proven; simulated: go on to the least simulated step time; auto: simulated below 8"
        " microbatches a worker and for gpipe.",
    ),
]
GranularityOption = Annotated[
    Granularity | None, typer.Option("--granularity", help="Where to cut. Default: as in the profile.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="Memory of every worker, in bytes or as 80GB or 80GiB. Default: as in the profile."),
]
MinLayersOption = Annotated[
    int,
    typer.Option(
        "--min-layers", min=0, max=MAX_LAYERS, help="Units (layers, or parts of layers) on each stage at least."
    ),
]
PinOption = Annotated[
    list[str] | None, typer.Option("--pin", help="NAME:STAGE, keep an item or a whole layer on a stage; repeatable.")
]
TiedOption = Annotated[
    bool,
    typer.Option(
        "--tied-together", help="Keep items that share a weight on one worker; with zb-v the ends of the model are."
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Compute the costs for h200, h100, a100, cpu or a TOML file; replaces measured ones.",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of computed costs.")]
RecomputeOption = Annotated[
    Recompute, typer.Option("--recompute", help="Activation recomputation that computed costs assume.")
]
FusedOption = Annotated[
    bool,
    typer.Option(
        "--fused-attention/--unfused-attention", help="Whether attention scores go to memory, where costs are computed."
    ),
]
BoundaryRankOption = Annotated[
    int | None,
    typer.Option(
        "--inter-grad-comp-rank", min=1, max=MAX_SIZE, help="Gradients between stages go as factors of this rank."
    ),
]
EpilogueOption = Annotated[
    bool, typer.Option("--inter-grad-comp-epilogue-only", help="Only those behind a worker's last forward of a step.")
]
FeedbackOption = Annotated[
    bool, typer.Option("--use-error-feedback", help="What compression loses is kept, which takes one more product.")
]
ReplicaRankOption = Annotated[
    int | None,
    typer.Option(
        "--grad-comp-rank", min=1, max=MAX_SIZE, help="Gradients between replicas are added as factors of this rank."
    ),
]
WayOption = Annotated[
    str | None,
    typer.Option(
        "--selective-grad-comp-way", help="How many workers compress between replicas, or auto: as many as is fastest."
    ),
]
FusedTiesOption = Annotated[
    bool, typer.Option("--emb-comm-opt", help="Tied weights are added over replicas and copies in one exchange.")
]
FactorDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--compression-device",
        help="Whose rates factors are made at: a preset or a TOML file. Default: --device, or cpu.",
    ),
]
WindowOption = Annotated[
    int, typer.Option("--window", min=1, max=MAX_STEPS, help="Step records that the costs are the median of.")
]
AtStepOption = Annotated[
    int | None,
    typer.Option(
        "--at-step", min=1, max=MAX_INTEGER, help="Take the costs as they were at this step. Default: the last."
    ),
]
