"""Standard streams of a command: what may reach a terminal, and what follows when a write fails.

Text that is printed quotes data: names of files, fields of documents, generated text. Its control characters are
commands of the terminal, such as those that change its title or rewrite lines above. ``printable`` shows them escaped;
all output of the commands passes it. Files and pipes receive data unchanged, and messages escaped.

A message that cannot be written, because a disk is full or a pipe is closed, ends no program: ``keep_running`` replaces
a stream by one that drops and counts such writes. It is for streams of messages only. Data on standard output that is
lost is an error of the command.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Any, Literal, TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escaped(text: str, pattern: str = "\\x{:02x}") -> str:
    """The text with its control characters escaped; line ends and tabs stay.

    Args:
        text: to print.
        pattern: format of the number of a character.
    """
    # Most texts have none, and the test is faster than the search.
    return text if text.isprintable() else _CONTROL.sub(lambda match: pattern.format(ord(match[0])), text)


def encoding_of(stream: TextIO | None) -> str:
    """The encoding of a stream; without UTF-8 in the locale it may be ASCII."""
    return getattr(stream, "encoding", None) or "utf-8"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; a stream that is closed is none."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def printable(text: str, stream: TextIO | None, *, is_message: bool = False, pattern: str = "\\x{:02x}") -> str:
    """The text as ``stream`` can show it: characters that it cannot encode and lone surrogates are escaped.

    Args:
        text: to print.
        stream: where it is printed.
        is_message: whether control characters are escaped everywhere; those of data only on a terminal.
        pattern: format of the number of a control character.
    """
    if is_message or is_terminal(stream):
        text = escaped(text, pattern)
    encoding = encoding_of(stream)
    return text.encode(encoding, "backslashreplace").decode(encoding)


class MessageFile(io.FileIO):
    """The file of a stream of messages: a write that fails is dropped and counted, never raised.

    The first write that succeeds afterwards is preceded by a line with the number of dropped lines and the reason.

    Attributes:
        dropped_lines: number of lines that were dropped since the last write that succeeded.
        total_dropped_bytes: number of bytes that were dropped.
        problem: why the last write failed; empty before.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.dropped_lines = self.total_dropped_bytes = 0
        self.problem = ""
        self._has_dropped, self._is_within_line = False, False

    def write(self, data: Any) -> int:
        """Write bytes, or drop them; the number of those that need not be written again."""
        content = bytes(data)
        try:
            if self._has_dropped:
                self._write_all(self._note())
                self._has_dropped, self.dropped_lines, self._is_within_line = False, 0, False
            count = self._write_some(content)
        except OSError as error:
            self.problem = error.strerror or str(error)
            self._has_dropped = True
            self.dropped_lines += content.count(b"\n")
            self.total_dropped_bytes += len(content)
            return len(content)
        self._is_within_line = not content[:count].endswith(b"\n") if count else self._is_within_line
        return count

    def _note(self) -> bytes:
        lines = f"{self.dropped_lines:,} line{'' if self.dropped_lines == 1 else 's'}"
        text = f"(dropped {lines} of messages: {self.problem})\n"
        return (("\n" if self._is_within_line else "") + text).encode()

    def _write_some(self, content: bytes) -> int:
        count = super().write(content)
        if count is None:  # the stream does not block, and nobody reads it
            raise BlockingIOError("it is not read")
        return count

    def _write_all(self, content: bytes) -> None:
        while content:
            content = content[self._write_some(content) :]
            self._is_within_line = True


def keep_running(name: Literal["stdout", "stderr"]) -> MessageFile | None:
    """Let writes to a standard stream, whoever makes them, never end this process; its file, which counts them.

    No effect on a stream that a test or a library has replaced. One that is closed becomes ``/dev/null``.
    """
    stream: TextIO | None = getattr(sys, name)
    if stream is None:
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives until the process ends
        return None
    file = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(file, MessageFile):
        return file
    if stream is not getattr(sys, f"__{name}__"):
        return None
    with contextlib.suppress(OSError):
        stream.flush()
    file = MessageFile(stream.fileno())
    encoding, errors = encoding_of(stream), getattr(stream, "errors", None) or "backslashreplace"
    setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors=errors, line_buffering=True))
    return file
