"""The commands of the older tools, with their arguments: ``merge_mp_partitions``, ``ckpt_convert``.

Both put the partitions of a legacy checkpoint together into a legacy checkpoint. Sizes that are given are compared with
the checkpoint's own; arguments that only their programs need are taken and do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .._common.console import Format, say
from .._common.document import MAX_JOBS, MAX_RANKS, MAX_SIZE, MAX_TABLE_BYTES, DocumentError, parse_any_json, read_text
from .._common.errors import UsageError
from ..formats.choices import SourceKind
from . import options

Size = Annotated[int | None, typer.Option(min=1, max=MAX_SIZE, help="Compared with the checkpoint's own.")]
Idle = Annotated[str | None, typer.Option(help="Taken, and without meaning here.")]
TensorSource = Annotated[
    int | None,
    typer.Option("--tensor-model-parallel-size", "--model-parallel-size", min=1, max=MAX_RANKS, help="Of the input."),
]
FAMILIES = {"gpt": "gpt", "gpt2": "gpt", "bert": "bert", "t5": "t5", "llama": "llama"}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for name in ("merge_mp_partitions", "ckpt_convert"):
        app.command(name)(merge_partitions)


def merge_partitions(
    model_type: Annotated[str, typer.Option(help="GPT, GPT2, BERT, T5 or LLAMA; compared with the checkpoint's.")],
    load: Annotated[Path | None, typer.Option(help="The legacy checkpoint.")] = None,
    save: Annotated[Path | None, typer.Option(help="The directory to write.")] = None,
    source: Annotated[Path | None, typer.Option("-i", help="One iteration's directory, in place of --load.")] = None,
    target: Annotated[Path | None, typer.Option("-o", help="The directory to write, in place of --save.")] = None,
    tensor_model_parallel_size: TensorSource = None,
    pipeline_model_parallel_size: Annotated[
        int | None, typer.Option(min=1, max=MAX_RANKS, help="Of the input.")
    ] = None,
    target_tensor_model_parallel_size: Annotated[
        int,
        typer.Option(
            "--target-tensor-model-parallel-size", "-i_g", "-infer_gpu_num", min=1, max=MAX_RANKS, help="Of the output."
        ),
    ] = 1,
    target_pipeline_model_parallel_size: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Of the output.")] = 1,
    vocab_file: Annotated[Path | None, typer.Option(help="Tells the true vocabulary size; copied beside.")] = None,
    merge_file: Annotated[Path | None, typer.Option(help="Copied beside the weights.")] = None,
    num_layers: Size = None,
    hidden_size: Size = None,
    num_attention_heads: Size = None,
    max_position_embeddings: Size = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="At most the checkpoint's positions.")
    ] = None,
    processes: Annotated[int, typer.Option("-p", "-processes", min=1, max=MAX_JOBS, help="Threads that copy.")] = 2,
    checkpoint_version: options.Version = 3.0,
    overwrite: options.Overwrite = False,
    plan: options.PlanOnly = False,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
    tokenizer_type: Idle = None,
    experiment_name: Annotated[
        str | None, typer.Option("--experiment_name", help="Taken, and without meaning here.")
    ] = None,
    activations_checkpoint_method: Idle = None,
    data_impl: Idle = None,
    ddp_impl: Annotated[str | None, typer.Option("--DDP-impl", help="Taken, and without meaning here.")] = None,
    weight_data_type: Annotated[str | None, typer.Option("-weight_data_type", help="Kept as it is stored.")] = None,
) -> None:
    """Put the partitions of a legacy Megatron checkpoint together, with the arguments of Megatron's own tools."""
    del tokenizer_type, experiment_name, activations_checkpoint_method, data_impl, ddp_impl
    from ..megatron.read import LegacyOptions
    from ..operations.convert import plan_legacy_export
    from ..operations.write import Settings, write_export
    from ..readers.detect import open_any

    path, out = source or load, target or save
    if path is None or out is None:
        raise UsageError("give --load and --save (or -i and -o): the checkpoint, and the directory to write")
    if weight_data_type is not None:
        say(f"-weight_data_type {weight_data_type}: weights keep the type that they are stored in")
    given = LegacyOptions(
        vocab_size=_vocabulary(vocab_file),
        num_attention_heads=num_attention_heads,
        ignore_config=tuple(ignore_config or ()),
    )
    checkpoint, remarks = open_any(path, SourceKind.LEGACY, None, legacy=given)
    for remark in remarks:
        say(remark)
    model = checkpoint.manifest["model"]
    sizes = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
    }
    _compare(path, model_type, model, sizes, seq_length)
    _compare_grid(path, tensor_model_parallel_size, pipeline_model_parallel_size)
    export = plan_legacy_export(
        checkpoint,
        counts=options.legacy_counts(model, target_pipeline_model_parallel_size, None),
        tensor_parallel_size=target_tensor_model_parallel_size,
        virtual_stages_per_worker=1,
        version=options.legacy_version(checkpoint_version),
    )
    copied = {_tokenizer_name(file): file.read_bytes() for file in (vocab_file, merge_file) if file is not None}
    export = replace(export, small_files={**export.small_files, **copied})
    how = Settings(jobs=processes, verify=True, overwrite=overwrite, plan_only=plan, format=report)
    write_export(checkpoint.directory, out, export, how)


def _vocabulary(path: Path | None) -> int | None:
    """Number of tokens of a vocabulary: the keys of ``vocab.json``, the lines of ``vocab.txt``."""
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


def _compare(
    path: Path, model_type: str, model: Mapping[str, Any], sizes: Mapping[str, int | None], seq_length: int | None
) -> None:
    family = FAMILIES.get(model_type.lower())
    if family != model["family"]:
        raise UsageError(f"--model-type {model_type}: {path} holds a {model['family']}")
    for field, value in sizes.items():
        if value is not None and value != model[field]:
            raise UsageError(f"--{field.replace('_', '-')} {value}: {path} holds a model with {model[field]}")
    if seq_length is not None and seq_length > model["max_position_embeddings"]:
        raise UsageError(f"--seq-length {seq_length}: {path} has {model['max_position_embeddings']} positions")


def _compare_grid(path: Path, tensor: int | None, pipeline: int | None) -> None:
    from ..megatron.read import RANK_NAME, find_iteration

    found = [RANK_NAME.fullmatch(child.name) for child in find_iteration(path, None).iterdir()]
    ranks = [(int(match[1]), int(match[2] or 0)) for match in found if match]
    grid = [1 + max(rank[dim] for rank in ranks) for dim in (0, 1)]
    for name, said, seen in (("tensor", tensor, grid[0]), ("pipeline", pipeline, grid[1])):
        if said is not None and said != seen:
            raise UsageError(f"--{name}-model-parallel-size {said}: {path} has {seen}")
