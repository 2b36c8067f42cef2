"""Sections of options in help pages; imports nothing, so that a module can declare options without a command line."""

from __future__ import annotations

OTHER = "Options"


class Panel(str):
    """The section of an option in help pages, as ``rich_help_panel`` of ``typer.Option``.

    Typer passes this value on untouched, so it also has what typer cannot declare.

    Attributes:
        rare: only ``--help-all`` shows the option.
        required: the value may also come from a file, so that typer must not require it.
        default: description of the default; empty if typer has it.
        bounds: description of the bounds; empty if typer has them.
        table: table of the option in a configuration file; empty if it has none.
    """

    rare: bool
    required: bool
    default: str
    bounds: str
    table: str

    def __new__(
        cls,
        title: str,
        *,
        rare: bool = False,
        required: bool = False,
        default: str = "",
        bounds: str = "",
        table: str = "",
    ) -> Panel:
        """A panel of this title."""
        panel = super().__new__(cls, title)
        panel.rare, panel.required = rare, required
        panel.default, panel.bounds, panel.table = default, bounds, table
        return panel
