"""Messages for files that could not be read or written."""

from __future__ import annotations

from collections.abc import Mapping

from .._common.document import DocumentError

_WORDS: Mapping[type[OSError], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "is a folder, not a file",
    NotADirectoryError: "a part of the path is a file, not a folder",
    PermissionError: "no permission",
}


def reason(error: Exception) -> str:
    """Return a reason without path and errno, such as ``no such file``, for messages that name the path."""
    if isinstance(error, DocumentError):
        if isinstance(error.__cause__, OSError | UnicodeDecodeError):
            return reason(error.__cause__)
        return "; ".join(problem.message for problem in error.problems)
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (at byte {error.start:,})"
    if isinstance(error, OSError):
        return _WORDS.get(type(error)) or error.strerror or str(error)
    return str(error)
