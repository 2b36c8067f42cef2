"""The interface of a filter: a step that keeps, edits or drops each document.

    row of a slice ─> text under --json-key ─> DocumentFilter.apply ─> FilterResult
                                                     ├─ same text     the row is copied byte for byte
                                                     ├─ other text    only the bytes of the text are replaced
                                                     └─ drop_reason   counted; the row goes to --save-dropped

A filter is a class and a dataclass of settings. ``runner/registry.py`` makes a command and a recipe step of it; slices,
workers, resume, rejected lines, progress and counts come from ``runner``. Built-in filters are entries of
``registry.BUILT_IN_FILTERS``, filters of other packages are entry points of the group ``dynmo_tools.filters``.

The module of a filter is imported for ``dynmo-prep --help`` too: import large libraries within functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..config.options import setting

__all__ = ["DocumentFilter", "FilterResult", "FilterSettings", "setting"]


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Settings of every filter; subclasses add theirs. The docstring of a subclass is the help of its command."""

    json_key: str = setting("text", help="Key of the text in each document; dots address nested objects.")
    save_dropped: Path | None = setting(None, output=True, help="File for the dropped documents, with drop_reason.")


@dataclass(frozen=True, kw_only=True)
class FilterResult:
    """The outcome for one document.

    Attributes:
        text: text to write.
        drop_reason: one word, counted in the summary; None writes the document.
    """

    text: str
    drop_reason: str | None = None


class DocumentFilter(ABC):
    """Decides on one document at a time. One object is made for each task, in a worker process.

    Attributes:
        settings_type: subclass of ``FilterSettings``: a frozen dataclass whose fields are made by ``setting``.
        repairs_surrogates: ``apply`` also gets texts with lone surrogates; otherwise their lines are rejected.
        output_names: further names of ``--output``.

    Args:
        settings: an object of ``settings_type``.
    """

    # Class attributes: the registry reads them for the command line, when no settings exist yet.
    settings_type: ClassVar[type[FilterSettings]]
    repairs_surrogates: ClassVar[bool] = False
    output_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def apply(self, text: str, document: Mapping[str, Any]) -> FilterResult:
        """Keep, edit or drop a document. The result must depend on the arguments and settings only.

        Args:
            text: text under ``json_key``.
            document: the parsed row, for reading other keys; numbers of 64 bits and more may be rounded.
        """
