"""A pseudo-terminal with the live view on it, and what it shows."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time


class Display:
    """What a terminal shows, of the control sequences that the view uses; others of them fail."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}
        self._row, self._column, self._rest = 0, 0, ""
        self._main: tuple[dict[int, str], int, int] = ({}, 0, 0)

    def feed(self, output: str) -> None:
        tokens = re.split(r"(\x1b\[[0-9;?]*[a-zA-Z]|\r\n|\n|\r)", self._rest + output)
        # The start of a sequence: its end comes with the next read.
        head, escape, rest = tokens[-1].partition("\x1b")
        tokens[-1], self._rest = head, escape + rest
        for token in tokens:
            if token:
                self._apply(token)

    def _apply(self, token: str) -> None:
        if token == "\x1b[?1049h":
            self._main, self.rows = (self.rows, self._row, self._column), {}
        elif token == "\x1b[?1049l":
            self.rows, self._row, self._column = self._main
        elif token == "\x1b[2J":
            self.rows = {}
        elif token == "\x1b[2K":
            self.rows.pop(self._row, None)
        elif move := re.fullmatch(r"\x1b\[(?:(\d+);(\d+))?H", token):
            self._row, self._column = (int(move[1]) - 1, int(move[2]) - 1) if move[1] else (0, 0)
        elif token in ("\r\n", "\n", "\r"):
            self._row, self._column = self._row + ("\n" in token), 0
        elif token.startswith("\x1b["):
            assert token[-1] == "m" or token in ("\x1b[?25l", "\x1b[?25h"), repr(token)
        else:
            line = self.rows.get(self._row, "").ljust(self._column)
            self.rows[self._row] = line[: self._column] + token + line[self._column + len(token) :]
            self._column += len(token)

    @property
    def lines(self) -> list[str]:
        return [self.rows.get(row, "").rstrip() for row in range(max(self.rows, default=-1) + 1)]


class Terminal:
    """A pseudo-terminal with ``dynmo-train monitor`` on it."""

    def __init__(self, *arguments: object, size: tuple[int, int] = (60, 24), **environment: str) -> None:
        self.output, self.display, self._decoder = "", Display(), codecs.getincrementaldecoder("utf-8")("replace")
        self.master, terminal = pty.openpty()
        self.resize(*size)
        self.settings = termios.tcgetattr(terminal)
        outer = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynmo_train", "monitor", *map(str, arguments)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=outer | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | environment,
            start_new_session=True,
            # The kernel sends SIGWINCH and SIGINT to the processes of the controlling terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        self.terminal = terminal

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self, timeout_s: float) -> bool:
        """Read what the program writes within a time; whether it wrote anything."""
        if not select.select([self.master], [], [], timeout_s)[0]:
            return False
        output = self._decoder.decode(os.read(self.master, 65536))
        self.output += output
        self.display.feed(output)
        return True

    def wait_for(self, text: str) -> str:
        """The output since the last call, until the terminal shows ``text``."""
        deadline = time.monotonic() + 60
        while text not in "\n".join([*self.display.lines, ""]):
            assert time.monotonic() < deadline, f"{text!r} is not in {self.display.lines!r}"
            self.read(1)
        output, self.output = self.output, ""
        return output

    def drain(self) -> None:
        """Read until the program has written nothing for a second."""
        while self.read(1):
            pass

    def end(self) -> tuple[int, str]:
        """The exit code and the rest of the output."""
        deadline = time.monotonic() + 60
        # A program that writes more than the buffer of the terminal waits for its reader.
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"still running: {self.display.lines!r}"
            self.read(0.1)
        while self.read(0.1):
            pass
        return code, self.output

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.terminal)
        os.close(self.master)
