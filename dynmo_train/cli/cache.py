"""``dynmo-train cache``: list and remove checkpoints that ``--load`` converted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import Format, emit, emit_json, emit_table, human_bytes
from .._common.help import CommandLine

CacheDir = Annotated[
    Path | None, typer.Option("--cache-dir", help="Folder of converted checkpoints [default: ~/.cache/dynmo].")
]

cache = CommandLine(help="List or remove checkpoints that --load converted.")


def count_text(count: int) -> str:
    """``count`` in words: ``1 converted checkpoint``, ``2 converted checkpoints``."""
    return f"{count} converted checkpoint{'' if count == 1 else 's'}"


@cache.command("list")
def list_cache(
    cache_dir: CacheDir = None,
    report: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
) -> None:
    """List converted checkpoints: name, size, date and source."""
    from ..trainer.checkpoint.converted_models import conversions
    from ..trainer.checkpoint.load_checkpoint import default_cache

    folder = cache_dir or default_cache()
    found = conversions(folder)
    if report is Format.JSON:
        rows = [
            {"name": each.path.name, "bytes": each.num_bytes, "source": each.source}
            | {"modified_utc": f"{each.modified:%Y-%m-%dT%H:%M:%SZ}"}
            for each in found
        ]
        emit_json({"folder": str(folder), "conversions": rows})
        return
    cells = [(e.path.name, human_bytes(e.num_bytes), f"{e.modified:%Y-%m-%d %H:%M}", e.source) for e in found]
    if cells:
        emit_table(str(folder), ("name", "size", "created (UTC)", "source"), cells)
    total = human_bytes(sum(each.num_bytes for each in found))
    emit(f"{folder}: {count_text(len(found))}, {total}")


@cache.command("clear")
def clear_cache(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names to remove [default: all].")
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Remove converted checkpoints; other files are kept, and --load converts again."""
    from ..trainer.checkpoint.converted_models import remove
    from ..trainer.checkpoint.load_checkpoint import default_cache

    folder = cache_dir or default_cache()
    removed = remove(folder, names or [])
    emit(f"{folder}: removed {count_text(len(removed))}, {human_bytes(sum(e.num_bytes for e in removed))}")
