"""Sections of options in help pages; imports nothing, so that a module can declare options without a command line."""

from __future__ import annotations

from typing import Any

OTHER = "Options"


class Panel(str):
    """The section of an option in help pages, as ``rich_help_panel`` of ``typer.Option``.

    Typer passes this value on untouched, so it also has what typer cannot declare.

    Attributes:
        rare: only ``--help-all`` shows the option.
        required: the value may also come from a file, so that typer must not require it.
        default: description of the default; empty if typer has it.
        bounds: description of the bounds; empty if typer has them.
    """

    rare: bool
    required: bool
    default: str
    bounds: str

    def __new__(
        cls, title: str, *, rare: bool = False, required: bool = False, default: str = "", bounds: str = ""
    ) -> Panel:
        """A panel of this title."""
        panel = super().__new__(cls, title)
        panel.rare, panel.required, panel.default, panel.bounds = rare, required, default, bounds
        return panel

    def __reduce__(self) -> tuple[Any, ...]:
        return _panel, (str(self), self.rare, self.required, self.default, self.bounds)


def _panel(title: str, rare: bool, required: bool, default: str, bounds: str) -> Panel:
    return Panel(title, rare=rare, required=required, default=default, bounds=bounds)
