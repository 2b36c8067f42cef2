"""Print the option tables of the package's README: ``python -m dynmo_train.config.reference``."""

from __future__ import annotations

from .._common.console import emit
from .options import OptionSpec
from .resolve import built_in_concerns, built_in_specs


def _row(spec: OptionSpec) -> str:
    flags = f"`{spec.flag}`"
    if spec.negative:
        flags += f", `{spec.negative}`"
    value = ", ".join(filter(None, (spec.value_text.replace("|", ", "), spec.bounds_text))) or "-"
    return f"| {flags} | {value} | {spec.default_text} | {spec.declaration.help.replace('|', ', ')} |"


def options_markdown() -> str:
    """One Markdown table per concern, whose name is the table in a ``--config`` file."""
    parts = []
    for concern, kind in built_in_concerns().items():
        rows = [_row(spec) for spec in built_in_specs().values() if spec.concern == concern and spec.is_flag]
        about = (kind.__doc__ or "").splitlines()[0]
        parts.append(
            "\n".join(
                [f"### `[{concern}]`: {about}", "", "| flag | value | default | meaning |", "|---|---|---|---|", *rows]
            )
        )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    emit(options_markdown().rstrip())
