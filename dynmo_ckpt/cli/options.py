"""Options of the commands: each is declared once, and related ones form a dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .._common.console import Format
from .._common.document import (
    MAX_INTEGER,
    MAX_JOBS,
    MAX_RANKS,
    MAX_SIZE,
    is_count,
    short_repr,
)
from .._common.errors import UsageError
from .._common.panel import Panel
from ..converters import BUILTIN, NOT_READ, NOT_WRITTEN
from ..formats.choices import AUTO, Dtype, ReadOptions, ReplicaPolicy, SparseFormat, WriteOptions
from ..io.remote import parse_location

if TYPE_CHECKING:
    from ..operations.write import WriteSettings

READABLE = [name for name in BUILTIN if name not in NOT_READ]
DEFAULT_JOBS = min(2, os.cpu_count() or 1)

Input = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        parser=parse_location,
        help="A run, its checkpoints, or one step; or a directory of Hugging Face, legacy Megatron, Megatron-core, "
        "torch (DCP, torchtitan) or Megatron-DeepSpeed; or NAME.bin of llama2.c.",
    ),
]
Other = Annotated[
    Path,
    typer.Argument(metavar="OTHER", parser=parse_location, help="The checkpoint to compare with, of any format."),
]
Output = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", parser=parse_location, help="New directory, or an address; it appears when it is complete."
    ),
]
Step = Annotated[
    int | None,
    typer.Option("--step", "--iteration", min=0, max=MAX_INTEGER, help="Step of a run directory; default: the latest."),
]
SourceFormat = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FORMAT",
        help=f"Format of IN: auto, {', '.join(READABLE)}, or another one of `dynmo-ckpt formats`.",
        autocompletion=lambda: [AUTO, *READABLE],
    ),
]
TargetFormat = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="Format of OUT, such as native, hf or legacy; `dynmo-ckpt formats` lists all.",
        autocompletion=lambda: [name for name in BUILTIN if name not in NOT_WRITTEN],
    ),
]
Report = Annotated[Format, typer.Option("--format", help="text for people, json for programs.")]
Jobs = Annotated[
    int,
    typer.Option(
        min=1, max=MAX_JOBS, help="Number of copy threads; each needs up to 64 MiB. Default: 2, or 1 on one processor."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a checkpoint.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Show files, bytes, memory and time; write nothing.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Read everything back before OUT appears.")]
CheckLogits = Annotated[
    bool | None,
    typer.Option(
        "--check-logits/--no-check-logits",
        help="Compare the logits of IN and OUT; default: up to 200 million parameters.",
    ),
]
WithOptimizer = Annotated[bool, typer.Option("--with-optimizer/--no-optimizer", help="Include the optimizer state.")]
# Three states: without the option, the formats of both sides decide.
MaybeOptimizer = Annotated[
    bool | None,
    typer.Option(
        "--with-optimizer/--no-optimizer",
        help="Include the optimizer state; default: only from native to native.",
    ),
]
OptimizerIfPresent = Annotated[
    bool,
    typer.Option(
        "--with-optimizer-if-present",
        help="Include the optimizer state where IN has one.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
# The second names of --tp and --pp are those of Megatron's checkpoint_util.py.
TensorSize = Annotated[
    int,
    typer.Option(
        "--tp", "--target-tensor-parallel-size", min=1, max=MAX_RANKS, help="Number of tensor-parallel ranks of OUT."
    ),
]
PipelineSize = Annotated[
    int,
    typer.Option(
        "--pp", "--target-pipeline-parallel-size", min=1, max=MAX_RANKS, help="Number of pipeline ranks of OUT."
    ),
]
DataSize = Annotated[
    int,
    typer.Option(
        "--dp",
        min=1,
        max=MAX_RANKS,
        help="Number of data-parallel replicas of OUT; recorded only.",
        rich_help_panel="Topology",
    ),
]
VirtualSize = Annotated[
    int, typer.Option("--vpp", min=1, max=MAX_RANKS, help="Number of virtual stages per pipeline rank.")
]
Counts = Annotated[
    str | None,
    typer.Option("--partition", help="Number of layers of each stage, such as 7,5,8,4; default: even."),
]
Atol = Annotated[float, typer.Option("--atol", min=0, help="Largest absolute difference that counts as equal.")]
VocabSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_SIZE,
        help="True vocabulary size, for Megatron checkpoints that do not record it.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
NumHeads = Annotated[
    int | None,
    typer.Option(
        "--num-attention-heads",
        min=1,
        max=MAX_SIZE,
        help="Number of heads, for Megatron checkpoints without args.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Directory with the model's config.json, for Megatron and distributed checkpoints.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
WeightType = Annotated[
    Dtype, typer.Option("--dtype", help="Type of the weights in OUT; optimizer state keeps its type.")
]
Replicas = Annotated[
    ReplicaPolicy,
    typer.Option(
        help="Replicas of tensor ranks or stages: must be equal, or use the first.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
Tie = Annotated[
    bool,
    typer.Option(
        "--tie/--untie",
        help="--untie: a head that copies the embedding becomes a separate weight.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        help="Leave out tensors of IN that match this shell pattern; repeatable.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
IgnoreConfig = Annotated[
    list[str] | None,
    typer.Option(
        help="Ignore config.json keys or Megatron arguments that match this shell pattern; repeatable.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
Adapters = Annotated[
    list[Path] | None,
    typer.Option("--adapter", help="Merge a LoRA or DoRA adapter of peft into the weights; repeatable."),
]
Sparse = Annotated[
    bool,
    typer.Option(
        "--sparse",
        help="Keep the masks of weights that IN stores as sparse rows.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]
SparseLayout = Annotated[
    SparseFormat | None,
    typer.Option("--sparse-format", help="Compress pruned linear weights of --to hf; default: zeros."),
]
Version = Annotated[
    float,
    typer.Option(
        "--checkpoint-version",
        min=0,
        max=3,
        help="Version of a legacy OUT: 0, 1.0, 2.0 or 3.0.",
        rich_help_panel=Panel("Contents of OUT", rare=True),
    ),
]
Tokenizer = Annotated[Path | None, typer.Option(help="Directory with the tokenizer's files; default: those of IN.")]
ShardSize = Annotated[str | None, typer.Option(help="Largest weight file, such as 500MB; 5GB, one file of GGUF.")]
VocabDivisor = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_SIZE,
        help="Pad an imported vocabulary to a multiple of this number of rows.",
        rich_help_panel=Panel("Reading", rare=True),
    ),
]


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """How a command writes its new directory; :meth:`settings` is what the operations take."""

    PANEL: ClassVar[str] = "Writing"

    jobs: Jobs = DEFAULT_JOBS
    verify: Verify = True
    overwrite: Overwrite = False
    plan: PlanOnly = False
    report: Report = Format.TEXT

    def settings(self) -> WriteSettings:
        """The same settings without the command line."""
        from ..operations.write import WriteSettings

        return WriteSettings(
            jobs=self.jobs, verify=self.verify, overwrite=self.overwrite, plan_only=self.plan, format=self.report
        )


@dataclass(frozen=True, kw_only=True)
class TopologyOptions:
    """Ranks and stages of a new checkpoint."""

    PANEL: ClassVar[str] = "Topology"

    tp: TensorSize = 1
    pp: PipelineSize = 1
    vpp: VirtualSize = 1
    partition: Counts = None


@dataclass(frozen=True, kw_only=True)
class FactOptions:
    """Facts that the files of a checkpoint do not record, and what is left out of them."""

    PANEL: ClassVar[str] = "Reading"

    vocab_size: VocabSize = None
    num_attention_heads: NumHeads = None
    config: ModelConfig = None
    drop: Drop = None
    ignore_config: IgnoreConfig = None

    def read_options(self, *, headers_only: bool = False) -> ReadOptions:
        """The same options without the command line."""
        return ReadOptions(
            headers_only=headers_only,
            vocab_size=self.vocab_size,
            num_attention_heads=self.num_attention_heads,
            config=self.config,
            drop=tuple(self.drop or ()),
            ignore_config=tuple(self.ignore_config or ()),
        )


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(FactOptions):
    """The same, of a step of a run."""

    step: Step = None

    def read_options(self, *, headers_only: bool = False) -> ReadOptions:
        """The same options without the command line."""
        return replace(super().read_options(headers_only=headers_only), step=self.step)


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """How ``convert`` reads a checkpoint of any format."""

    PANEL: ClassVar[str] = "Reading"

    source_format: SourceFormat = AUTO
    step: Step = None
    make_vocab_size_divisible_by: VocabDivisor = 128
    vocab_size: VocabSize = None
    num_attention_heads: NumHeads = None
    config: ModelConfig = None
    adapter: Adapters = None
    sparse: Sparse = False
    with_optimizer_if_present: OptimizerIfPresent = False
    tie: Tie = True
    replicas: Replicas = ReplicaPolicy.EQUAL
    drop: Drop = None
    ignore_config: IgnoreConfig = None

    def read_options(self) -> ReadOptions:
        """The same options without the command line."""
        return ReadOptions(
            step=self.step,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            vocab_size=self.vocab_size,
            num_attention_heads=self.num_attention_heads,
            sparse=self.sparse,
            first_replica=self.replicas is ReplicaPolicy.FIRST,
            untie=not self.tie,
            drop=tuple(self.drop or ()),
            ignore_config=tuple(self.ignore_config or ()),
            optimizer_if_present=self.with_optimizer_if_present,
            config=self.config,
            adapters=tuple(self.adapter or ()),
        )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Contents of the files that ``convert`` writes."""

    PANEL: ClassVar[str] = "Contents of OUT"

    tokenizer: Tokenizer = None
    max_shard_size: ShardSize = None
    dtype: WeightType = Dtype.KEEP
    sparse_format: SparseLayout = None
    checkpoint_version: Version = 3.0

    def write_options(self, topology: TopologyOptions) -> WriteOptions:
        """The same options without the command line, on the ranks of ``topology``.

        Raises:
            UsageError: ``--max-shard-size`` is not a size.
        """
        return WriteOptions(
            dtype=self.dtype.stored,
            tp=topology.tp,
            pp=topology.pp,
            vpp=topology.vpp,
            partition=topology.partition,
            checkpoint_version=self.checkpoint_version,
            tokenizer=self.tokenizer,
            max_shard_bytes=None if self.max_shard_size is None else parse_bytes(self.max_shard_size),
            sparse_format=self.sparse_format,
        )


def parse_bytes(text: str) -> int:
    """A size in bytes: ``5GB`` is 5,000,000,000.

    Raises:
        UsageError: ``text`` is not a size.
    """
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "B": 1}
    upper = text.strip().upper()
    # "B" is the last unit, because all others end with it.
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    if not is_count(number.replace(".", "", 1)):
        raise UsageError(f"{text!r}: not a size; give a number and B, KB, MB, GB or TB, such as 5GB")
    return max(1, int(float(number) * units.get(unit, 1)))


def parse_numbers(option: str, text: str) -> list[float]:
    """Numbers between commas.

    Args:
        option: its name, for messages.
        text: such as ``1,0.5,2``.

    Raises:
        UsageError: a part is not a number.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {short_repr(text)}: must be numbers between commas, such as 1,1,2") from error
