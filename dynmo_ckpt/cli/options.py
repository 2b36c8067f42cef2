"""Options that several commands share, each declared once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .._common.console import Format
from .._common.document import MAX_INTEGER, MAX_JOBS, MAX_RANKS, MAX_SIZE
from .._common.errors import UsageError
from ..formats.choices import Agreement, Dtype, SourceKind

DEFAULT_JOBS = min(2, os.cpu_count() or 1)

Input = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        help="Native checkpoint: a run, its checkpoints, or one step; or a directory of Hugging Face, legacy Megatron, "
        "Megatron-core, torch (DCP, torchtitan) or Megatron-DeepSpeed; or llama2.c's NAME.bin.",
    ),
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; appears whole or not at all.")]
Step = Annotated[
    int | None,
    typer.Option(
        "--step", "--iteration", min=0, max=MAX_INTEGER, help="Step of a run directory; default: what LATEST names."
    ),
]
Source = Annotated[
    SourceKind,
    typer.Option(
        "--from",
        help="Format of IN; auto looks at the files. legacy: Megatron's mp_rank_*/model_optim_rng.pt; dcp: .metadata "
        "and *.distcp of torch, torchtitan and Megatron-core.",
    ),
]
Report = Annotated[Format, typer.Option("--format", help="text for people, json for programs.")]
Jobs = Annotated[int, typer.Option(min=1, max=MAX_JOBS, help="Threads that copy; each needs up to 64 MiB of memory.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Only show files, bytes, memory and time; write nothing.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Read everything back before it is put in place.")]
CheckLogits = Annotated[
    bool | None,
    typer.Option(
        "--check-logits/--no-check-logits",
        help="Compare logits of IN and OUT before OUT appears; default: up to 200 million parameters.",
    ),
]
WithOptimizer = Annotated[
    bool, typer.Option("--with-optimizer/--no-optimizer", help="Take the optimizer's state along.")
]
MaybeOptimizer = Annotated[
    bool | None,
    typer.Option(
        "--with-optimizer/--no-optimizer",
        help="Take the optimizer's state along; default: from native to native, yes, else no.",
    ),
]
OptimizerIfPresent = Annotated[
    bool,
    typer.Option(
        "--with-optimizer-if-present",
        help="As --with-optimizer where IN holds optimizer state; else the weights alone.",
    ),
]
TensorSize = Annotated[
    int,
    typer.Option("--tp", "--target-tensor-parallel-size", min=1, max=MAX_RANKS, help="Tensor-parallel ranks of OUT."),
]
PipelineSize = Annotated[
    int, typer.Option("--pp", "--target-pipeline-parallel-size", min=1, max=MAX_RANKS, help="Pipeline workers of OUT.")
]
DataSize = Annotated[
    int, typer.Option("--dp", min=1, max=MAX_RANKS, help="Data-parallel replicas of OUT; recorded, nothing more.")
]
VirtualSize = Annotated[
    int, typer.Option("--vpp", min=1, max=MAX_RANKS, help="Stages that each pipeline worker holds.")
]
Counts = Annotated[
    str | None,
    typer.Option("--partition", help="Layers of each stage, such as 7,5,8,4; default: as even as can be."),
]
Atol = Annotated[float, typer.Option("--atol", min=0, help="Largest absolute difference that counts as equal.")]
VocabSize = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_SIZE, help="True vocabulary size of a legacy checkpoint that does not record it."),
]
NumHeads = Annotated[
    int | None,
    typer.Option(
        "--num-attention-heads", min=1, max=MAX_SIZE, help="Heads, only for a legacy checkpoint without args."
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Directory with transformers' config.json of the model, for a distributed checkpoint that has none.",
    ),
]
WeightType = Annotated[
    Dtype, typer.Option("--dtype", help="Type of the weights in OUT; optimizer state stays as it is.")
]
Replicas = Annotated[
    Agreement,
    typer.Option(help="Where tensor ranks or stages should hold equal copies and do not: refuse, or take the first."),
]
Tie = Annotated[
    bool,
    typer.Option("--tie/--untie", help="--untie: a head that is a copy of the embedding becomes a weight of its own."),
]
Drop = Annotated[
    list[str] | None, typer.Option(help="Leave out tensors of IN whose own name fits this shell pattern; may repeat.")
]
IgnoreConfig = Annotated[
    list[str] | None,
    typer.Option(help="Leave out keys of config.json, or Megatron arguments, that fit this shell pattern; may repeat."),
]
Sparse = Annotated[
    bool, typer.Option("--sparse", help="Keep the masks of weights that a legacy checkpoint stores as sparse rows.")
]
Version = Annotated[
    float,
    typer.Option(
        "--checkpoint-version", min=0, max=3, help="Version of a legacy checkpoint to write: 0, 1.0, 2.0 or 3.0."
    ),
]
VocabDivisor = Annotated[
    int,
    typer.Option(min=1, max=MAX_SIZE, help="Pad the vocabulary of an imported model to a multiple of this many rows."),
]


def parse_bytes(text: str) -> int:
    """``5GB`` is 5,000,000,000; raises ``UsageError`` for what is not a size."""
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "B": 1}
    upper = text.strip().upper()
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    if not number.replace(".", "", 1).isdecimal():
        raise UsageError(f"{text!r} is not a size; write a number and B, KB, MB or GB, such as 5GB")
    return max(1, int(float(number) * units.get(unit, 1)))


def layer_counts(num_layers: int, num_stages: int, text: str | None) -> list[int]:
    """Layers of each stage: what ``text`` says, such as ``7,5,8,4``, else as even as can be, the first ones larger.

    Raises:
        UsageError: ``text`` is not one number for each stage, or they do not add up to the model's layers.
    """
    if text is None:
        return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(words) != num_stages:
        raise UsageError(f"--partition {text!r}: must be {num_stages} numbers of layers with commas between")
    if sum(map(int, words)) != num_layers:
        raise UsageError(f"--partition {text!r}: must add up to the model's {num_layers} layers")
    return [int(word) for word in words]


def num_blocks(model: Mapping[str, Any]) -> int:
    """Blocks of a model that a partition counts; those of a T5's encoder come before those of its decoder."""
    return int(model["num_layers"] + model.get("num_decoder_layers", 0))


def legacy_counts(model: Mapping[str, Any], num_stages: int, text: str | None) -> list[int]:
    """Layers of each stage of a legacy checkpoint; by default a T5's stages are cut between encoder and decoder."""
    if text is not None or model["family"] != "t5" or num_stages == 1:
        return layer_counts(num_blocks(model), num_stages, text)
    encoder = min(max(1, round(num_stages * model["num_layers"] / max(1, num_blocks(model)))), num_stages - 1)
    sides = ((model["num_layers"], encoder), (model["num_decoder_layers"], num_stages - encoder))
    return [count for layers, stages in sides for count in layer_counts(layers, stages, None)]


def legacy_version(value: float) -> float:
    """A checkpoint version of Megatron that can be written; raises ``UsageError`` for another."""
    if value not in (0, 1, 2, 3):
        raise UsageError(f"--checkpoint-version {value:g}: must be 0, 1.0, 2.0 or 3.0")
    return float(value)
