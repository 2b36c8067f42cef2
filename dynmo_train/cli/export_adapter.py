"""``dynmo-train export-adapter``: the adapters of a run for PEFT, or merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import Format, emit, emit_json
from .._common.errors import UsageError
from .common import need_torch


def export_adapter(
    load: Annotated[Path, typer.Option("--load", help="Run or checkpoint that was trained with --lora-rank.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Write a native checkpoint whose weights include the adapters.")
    ] = False,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="Base model that the PEFT adapter names: hub name or path.")
    ] = None,
    report: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
) -> None:
    """Export LoRA adapters for PEFT, or merge them into the model's weights."""
    need_torch()
    if merge and base_model is not None:
        raise UsageError("--base-model: has no effect with --merge; remove one")
    from ..trainer.checkpoint.export_adapter import export_merged, export_peft

    if merge:
        path = export_merged(load, output)
        if report is Format.JSON:
            emit_json({"output": str(path), "format": "native"})
        else:
            emit(f"Wrote {path}, with the adapters merged")
        return
    tensors = export_peft(load, output, base_model)
    if report is Format.JSON:
        emit_json({"output": str(output), "format": "peft", "tensors": tensors})
    else:
        emit(f"Wrote {output}: a PEFT adapter of {tensors:,} tensors")
