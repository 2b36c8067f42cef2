"""The commands ``merge_mp_partitions`` and ``ckpt_convert``, with the arguments of Megatron's tools of these names.

Both merge the partitions of a legacy checkpoint into a legacy checkpoint. Given sizes are compared with those of the
checkpoint. Arguments that only Megatron's programs need are accepted for compatibility and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from .._common.console import Format, print_message
from .._common.document import MAX_JOBS, MAX_RANKS, MAX_SIZE, MAX_TABLE_BYTES, DocumentError, parse_any_json, read_text
from .._common.errors import UsageError
from .._common.option_groups import grouped
from .._common.panel import Panel
from ..formats.choices import ReadOptions, WriteOptions
from . import options

Size = Annotated[int | None, typer.Option(min=1, max=MAX_SIZE, help="Must be equal to that of the checkpoint.")]
Ignored = Annotated[str | None, typer.Option(help="Accepted for compatibility and ignored.")]
TensorSource = Annotated[
    int | None,
    typer.Option(
        "--tensor-model-parallel-size", "--model-parallel-size", min=1, max=MAX_RANKS, help="Size of the input."
    ),
]
FAMILIES = {"gpt": "gpt", "gpt2": "gpt", "bert": "bert", "t5": "t5", "llama": "llama"}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for name in ("merge_mp_partitions", "ckpt_convert"):
        app.command(name)(merge_partitions)


@dataclass(frozen=True, kw_only=True)
class DirectoryOptions:
    """Input and output, under the names of both tools."""

    PANEL: ClassVar[str] = "Directories"

    load: Annotated[Path | None, typer.Option(help="Legacy checkpoint to read.")] = None
    save: Annotated[Path | None, typer.Option(help="New directory.")] = None
    source: Annotated[Path | None, typer.Option("-i", help="Directory of one iteration, in place of --load.")] = None
    target: Annotated[Path | None, typer.Option("-o", help="New directory, in place of --save.")] = None


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """Tensor- and pipeline-parallel sizes of the input and the output."""

    PANEL: ClassVar[str] = "Topology"

    tensor_model_parallel_size: TensorSource = None
    pipeline_model_parallel_size: Annotated[
        int | None, typer.Option(min=1, max=MAX_RANKS, help="Size of the input.")
    ] = None
    # -i_g and -infer_gpu_num are the names of Optimus-CC's ckpt_convert.py, as are -i, -o and -p.
    target_tensor_model_parallel_size: Annotated[
        int,
        typer.Option(
            "--target-tensor-model-parallel-size",
            "-i_g",
            "-infer_gpu_num",
            min=1,
            max=MAX_RANKS,
            help="Size of the output.",
        ),
    ] = 1
    target_pipeline_model_parallel_size: Annotated[
        int, typer.Option(min=1, max=MAX_RANKS, help="Size of the output.")
    ] = 1


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of the model, compared with those of the checkpoint."""

    PANEL: ClassVar[Panel] = Panel("Sizes to compare", rare=True)

    num_layers: Size = None
    hidden_size: Size = None
    num_attention_heads: Size = None
    max_position_embeddings: Size = None
    seq_length: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="At most the number of positions of the checkpoint.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class IgnoredOptions:
    """Arguments of Megatron's tools that have no effect here."""

    PANEL: ClassVar[Panel] = Panel("Ignored", rare=True)

    tokenizer_type: Ignored = None
    experiment_name: Annotated[
        str | None, typer.Option("--experiment_name", help="Accepted for compatibility and ignored.")
    ] = None
    activations_checkpoint_method: Ignored = None
    data_impl: Ignored = None
    ddp_impl: Annotated[str | None, typer.Option("--DDP-impl", help="Accepted for compatibility and ignored.")] = None
    weight_data_type: Annotated[
        str | None, typer.Option("-weight_data_type", help="Ignored; weights keep their type.")
    ] = None


@grouped
def merge_partitions(
    model_type: Annotated[str, typer.Option(help="GPT, GPT2, BERT, T5 or LLAMA; must be that of the checkpoint.")],
    *,
    directories: DirectoryOptions,
    grid: GridOptions,
    vocab_file: Annotated[Path | None, typer.Option(help="Vocabulary; sets the true size, and is copied.")] = None,
    merge_file: Annotated[Path | None, typer.Option(help="BPE merges; copied next to the weights.")] = None,
    sizes: ModelOptions,
    processes: Annotated[
        int, typer.Option("-p", "-processes", min=1, max=MAX_JOBS, help="Number of copy threads.")
    ] = 2,
    checkpoint_version: options.Version = 3.0,
    overwrite: options.Overwrite = False,
    plan: options.PlanOnly = False,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
    ignored: IgnoredOptions,
) -> None:
    """Merge the partitions of a legacy Megatron checkpoint, with the arguments of Megatron's tools."""
    from ..converters.legacy_megatron import write_legacy
    from ..converters.registry import open_and_report
    from ..operations.write import WriteSettings, write_export

    path, out = directories.source or directories.load, directories.target or directories.save
    if path is None or out is None:
        raise UsageError(
            "--load and --save: both are required (or -i and -o); give the checkpoint and the new directory"
        )
    if ignored.weight_data_type is not None:
        print_message(f"-weight_data_type {ignored.weight_data_type}: ignored; weights keep their type")
    read = ReadOptions(
        vocab_size=_vocabulary(vocab_file),
        num_attention_heads=sizes.num_attention_heads,
        ignore_config=tuple(ignore_config or ()),
    )
    checkpoint = open_and_report(path, "legacy", read)
    model = checkpoint.manifest["model"]
    _compare(path, model_type, model, sizes)
    _compare_grid(path, grid.tensor_model_parallel_size, grid.pipeline_model_parallel_size)
    write = WriteOptions(
        tp=grid.target_tensor_model_parallel_size,
        pp=grid.target_pipeline_model_parallel_size,
        checkpoint_version=checkpoint_version,
    )
    export = write_legacy(checkpoint, write)
    # The vocabulary is named after its kind, for the input may have any name, and AutoTokenizer finds it by name.
    copied = {_tokenizer_name(file): file.read_bytes() for file in (vocab_file, merge_file) if file is not None}
    export = replace(export, small_files={**export.small_files, **copied})
    inputs = tuple(file for file in (vocab_file, merge_file) if file is not None)
    settings = WriteSettings(
        jobs=processes, verify=True, overwrite=overwrite, plan_only=plan, format=report, inputs=inputs
    )
    write_export(checkpoint.directory, out, export, settings)


def _vocabulary(path: Path | None) -> int | None:
    """Number of tokens of a vocabulary: the keys of ``vocab.json`` or the lines of ``vocab.txt``."""
    if path is None:
        return None
    try:
        text = read_text(path, MAX_TABLE_BYTES)
        return len(parse_any_json(text, MAX_TABLE_BYTES)) if path.suffix == ".json" else len(text.splitlines())
    except (DocumentError, ValueError, TypeError) as error:
        raise UsageError(f"--vocab-file {path}: {error}") from error


def _tokenizer_name(path: Path) -> str:
    return {".json": "vocab.json", ".bpe": "merges.txt"}.get(
        path.suffix, "merges.txt" if "merges" in path.name else "vocab.txt"
    )


def _compare(path: Path, model_type: str, model: Mapping[str, Any], sizes: ModelOptions) -> None:
    family = FAMILIES.get(model_type.lower())
    if family != model["family"]:
        raise UsageError(f"--model-type {model_type}: the model of {path} is a {model['family']}")
    given = vars(sizes).copy()
    seq_length = given.pop("seq_length")
    for field, value in given.items():
        if value is not None and value != model[field]:
            raise UsageError(f"--{field.replace('_', '-')} {value}: the model of {path} has {model[field]}")
    if seq_length is not None and seq_length > model["max_position_embeddings"]:
        raise UsageError(f"--seq-length {seq_length}: {path} has {model['max_position_embeddings']} positions")


def _compare_grid(path: Path, tensor: int | None, pipeline: int | None) -> None:
    from ..megatron.read import RANK_NAME, find_iteration

    found = [RANK_NAME.fullmatch(child.name) for child in find_iteration(path, None).iterdir()]
    ranks = [(int(match[1]), int(match[2] or 0)) for match in found if match]
    grid = [1 + max(rank[dim] for rank in ranks) for dim in (0, 1)]
    for name, given, found_size in (("tensor", tensor, grid[0]), ("pipeline", pipeline, grid[1])):
        if given is not None and given != found_size:
            raise UsageError(f"--{name}-model-parallel-size {given}: {path} has {found_size}")
