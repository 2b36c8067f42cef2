"""``dynmo-train measure-costs`` and ``tune-sparse``: measurements on the device at hand."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._common.console import Format, emit_json, emit_table, print_message
from .._common.document import (
    MAX_JOBS,
    MAX_SIZE,
    is_count,
    write_whole,
)
from .._common.errors import UsageError
from .common import DeviceName, need_torch

if TYPE_CHECKING:
    import torch

CASES = ("dense", "frozen", "pruned", "depths", "exited", "exit", "sparse", "experts")
NUM_EXPERTS = 8

FfnHiddenSize = Annotated[
    int | None,
    typer.Option("--ffn-hidden-size", min=1, max=MAX_SIZE, help="Hidden size of the MLP [default: 4 x --hidden-size]."),
]
NumThreads = Annotated[int, typer.Option("--num-threads", min=1, max=MAX_JOBS, help="CPU threads.")]
Device = Annotated[DeviceName, typer.Option("--device", help="Device type; auto: cuda if available, else cpu.")]
OutputFile = Annotated[Path | None, typer.Option("--output", help="JSON file to write the table to.")]


def measure_costs(
    hidden_size: Annotated[
        int, typer.Option("--hidden-size", min=1, max=MAX_SIZE, help="Hidden size of the transformer.")
    ] = 1024,
    num_attention_heads: Annotated[
        int, typer.Option("--num-attention-heads", min=1, max=MAX_SIZE, help="Number of attention heads.")
    ] = 16,
    ffn_hidden_size: FfnHiddenSize = None,
    vocab_size: Annotated[int, typer.Option("--vocab-size", min=2, max=MAX_SIZE, help="Vocabulary size.")] = 50257,
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", min=1, max=MAX_SIZE, help="Samples per microbatch.")
    ] = 1,
    seq_lengths: Annotated[
        str, typer.Option("--seq-lengths", metavar="N,...", help="Sequence lengths to measure.")
    ] = "512,2048",
    cases: Annotated[
        str | None,
        typer.Option("--cases", metavar="NAME,...", help=f"Subset of {', '.join(CASES)}."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=1000, help="Timed repetitions per operator.")] = 5,
    output: OutputFile = None,
    num_threads: NumThreads = 1,
    device: Device = DeviceName.AUTO,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
) -> None:
    """Measure the cost of each dynamic technique on this device, next to the dense layer.

    Forward, backward by input and backward by weight of attention, MLP, head and exits: by sparsity and format, active
    tokens, buckets and experts. The ratios show where a technique breaks even on the device.
    """
    chosen = tuple(cases.split(",")) if cases is not None else CASES
    if unknown := [name for name in chosen if name not in CASES]:
        raise UsageError(f"--cases {cases}: {unknown[0]!r} is not a case; use {', '.join(CASES)}")
    lengths = _lengths(seq_lengths)
    if hidden_size % num_attention_heads:
        raise UsageError(
            f"--hidden-size is {hidden_size}; must be a multiple of --num-attention-heads {num_attention_heads}"
        )
    need_torch()
    from ..dynamics.operator_costs import OperatorCosts, OperatorShape, cost_document

    measured_on = _prepare(device, num_threads)
    shape = OperatorShape(
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size or 4 * hidden_size,
        num_attention_heads=num_attention_heads,
        vocab_size=vocab_size,
        num_experts=NUM_EXPERTS,
        micro_batch_size=micro_batch_size,
        sequence_lengths=lengths,
    )
    measured = [
        costs.measure(case, repeats)
        for costs in (OperatorCosts(shape, tokens, measured_on) for tokens in lengths)
        for case in costs.cases(chosen)
    ]
    document = cost_document(shape, measured_on, measured)
    if output is not None:
        write_whole(output, (json.dumps(document, indent=1) + "\n").encode())
        print_message(f"wrote {output}: {len(measured)} rows")
    if form is Format.JSON:
        emit_json(document)
        return
    emit_table(
        f"{document['device']['name']}, {document['dtype']}: milliseconds, and ratio to the dense layer",
        ("case", "layer", "tokens", "setting", "forward", "by input", "by weight", "total / dense"),
        [_cells(row) for row in document["rows"]],
    )


def _lengths(text: str) -> tuple[int, ...]:
    """Sequence lengths.

    Raises:
        UsageError: ``text`` is not a list of positive numbers.
    """
    parts = text.split(",")
    if not all(is_count(part) and 0 < int(part) <= MAX_SIZE for part in parts):
        raise UsageError(f"--seq-lengths {text}: must be positive numbers, such as 512,2048")
    return tuple(int(part) for part in parts)


PARTS = ("forward_ns", "backward_input_ns", "backward_weight_ns")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    setting = " ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in row["setting"].items()
    )
    ratio = sum(row[part] for part in PARTS) / max(1, sum(row["dense"][part] for part in PARTS))
    times = (f"{row[part] / 1e6:.2f}" for part in PARTS)
    return (row["case"], row["operator"], str(row["sequence_length"]), setting, *times, f"{ratio:.2f}")


def tune_sparse(
    hidden_size: Annotated[
        int, typer.Option("--hidden-size", min=1, max=MAX_SIZE, help="Hidden size of the transformer.")
    ],
    ffn_hidden_size: FfnHiddenSize = None,
    rows: Annotated[
        int,
        typer.Option("--rows", min=1, max=MAX_SIZE, help="Tokens per microbatch: --micro-batch-size x --seq-length."),
    ] = 512,
    output: OutputFile = None,
    num_threads: NumThreads = 1,
    device: Device = DeviceName.AUTO,
    report: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
) -> None:
    """Measure the break-even sparsity of sparse matrix multiplication, for each matrix shape of a model.

    Forward, gradient of the input and gradient of the weight, in CSR and blocks, on GPUs also in 2:4 formats. The
    table is the input of `pretrain --sparse-table`.
    """
    need_torch()
    from ..dynamics.tuning import model_shapes, table_document, tune, write_sparse_table
    from ..models.layers.sparse_formats import NEVER

    measured_on = _prepare(device, num_threads)
    shapes = model_shapes(hidden_size, ffn_hidden_size or 4 * hidden_size)
    table, products = tune(shapes, rows, measured_on)
    document = table_document(table, products)
    if output is not None:
        write_sparse_table(output, document)
    if report is Format.JSON:
        emit_json(document)
        return
    cells = [(rule, "never" if value >= NEVER else f"{value:g}") for rule, value in table.items()]
    emit_table(f"Sparse products, {rows} rows, {measured_on.type}", ("rule", "break-even sparsity"), cells)
    ratios = [
        (
            *(each.rule, each.shape, f"{each.sparsity:g}"),
            *(f"{part:.2f}" for part in (each.forward, each.backward_input, each.backward_weight, each.total)),
        )
        for each in products
    ]
    header = ("rule", "weight", "sparsity", "forward", "by input", "by weight", "total")
    emit_table("Times relative to the dense product", header, ratios)


def _prepare(device: DeviceName, num_threads: int) -> torch.device:
    """Set the number of threads and return the device to measure.

    Raises:
        UsageError: the device is not available.
    """
    import torch

    from ..parallel.process_groups import check_device

    torch.set_num_threads(num_threads)
    warnings.filterwarnings("ignore", message="Sparse (CSR|BSR) tensor support is in beta state")
    if device is DeviceName.AUTO:
        device = DeviceName.CUDA if torch.cuda.is_available() else DeviceName.CPU
    check_device(device)
    return torch.device(device)
