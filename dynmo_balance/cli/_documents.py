"""What several commands do with documents."""

from __future__ import annotations

from .._common.document import DocumentError, Problem


def refuse(source: str, problems: list[Problem]) -> None:
    """Raise one error with all problems, if there are any."""
    if problems:
        raise DocumentError(source, problems)
