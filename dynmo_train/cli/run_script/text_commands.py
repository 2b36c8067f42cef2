"""Commands of a shell script that only produce text: ``echo``, ``date``, ``dirname``, ``cat``, ``sed`` and similar.

Each is computed here; none starts a process.
"""

from __future__ import annotations

import getpass
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..._common.document import DocumentError
from ...formats.input_text import read_input
from ...formats.os_errors import reason
from .syntax import Place

MAX_FILE_BYTES = 1 << 20
MAX_SEQUENCE = 10_000
# A name, and numbers in brackets with the rest of the name. No two parts match the same characters: a text that is no
# list is refused in linear time.
_HOSTS = re.compile(r"([\w.-]*)(?:\[(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\]([\w.-]*))?(?:,|\Z)", re.ASCII)


def _in_lines(texts: Iterable[str], separator: str | None) -> str:
    """Texts with a line break after each, or with a separator between them and a line break at the end."""
    return "".join(f"{text}\n" for text in texts) if separator is None else f"{separator.join(texts)}\n"


def _unescaped(text: str) -> str:
    """Text in which a backslash with n, t or another one is the character that it stands for."""
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t"}.get(match[1], "\\"), text)


def expand_hosts(text: str) -> list[str] | None:
    """The names of a list of hosts of Slurm, such as ``n[01-03,7],login``.

    Args:
        text: the list.

    Returns:
        The names in order; None for another text, or more than ``MAX_SEQUENCE`` names.
    """
    found: list[str] = []
    at = 0
    while at < len(text):
        match = _HOSTS.match(text, at)
        if match is None:
            return None
        at = match.end()
        if match[2] is None:
            found += [match[1]] if match[1] else []
            continue
        for span in match[2].split(","):
            first, _, last = span.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not numbers or len(numbers) + len(found) > MAX_SEQUENCE:
                return None
            found += [f"{match[1]}{number:0{len(first)}d}{match[3]}" for number in numbers]
    return found


class TextCommands:
    """The text commands of a script.

    Args:
        folder: returns the working folder.
        written: path to text of files that the script writes before this command.
        variable: returns the value of a variable, empty without one.
    """

    def __init__(
        self, folder: Callable[[], Path], written: Mapping[Path, str], variable: Callable[[str], str] = lambda _: ""
    ) -> None:
        self.folder, self.written, self.variable = folder, written, variable
        self.commands: dict[str, Callable[[Sequence[str], str, Place], str]] = {
            "echo": self.echo,
            "printf": self.printf,
            "pwd": lambda *_: f"{self.folder()}\n",
            "dirname": self.dirname,
            "basename": self.basename,
            "realpath": self.realpath,
            "readlink": self.realpath,
            "nproc": lambda *_: (
                f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}\n"
            ),
            "hostname": self.hostname,
            "whoami": lambda *_: f"{getpass.getuser()}\n",
            "date": self.date,
            "seq": self.sequence,
            "scontrol": self.hosts,
            "cat": self.cat,
            "sed": self.sed,
            "head": self.head,
            "wc": self.count,
            "tr": self.translate,
            "xargs": self.join,
            "grep": self.grep,
            "awk": self.field,
            "nvidia-smi": self.gpus,
        }

    def find(self, name: str, words: Sequence[str]) -> Callable[[Sequence[str], str, Place], str] | None:
        """The text command of a name with these words; None for a program."""
        # shuf of a file is dynmo-prep shuffle.
        if name == "shuf" and any(word.startswith("-i") for word in words):
            return self.shuffle
        return self.commands.get(name)

    @staticmethod
    def echo(words: Sequence[str], _stdin: str, _place: Place) -> str:
        """``echo``; its options -n, -e and -E."""
        words, end, has_escapes = list(words), "\n", False
        while words and re.fullmatch(r"-[neE]+", words[0]):
            option = words.pop(0)
            end = "" if "n" in option else end
            has_escapes = "e" in option or (has_escapes and "E" not in option)
        text = " ".join(words)
        return (_unescaped(text) if has_escapes else text) + end

    @staticmethod
    def printf(words: Sequence[str], _stdin: str, place: Place) -> str:
        """``printf`` with %s, %d and padded numbers; the format is repeated while there are values."""
        if not words or words[0].startswith("-"):
            place.refuse("printf has no format, or an option, which is not interpreted; use echo")
        form, *values = words
        rest = list(values)

        def convert(match: re.Match[str]) -> str:
            if match[0] == "%%":
                return "%"
            value = rest.pop(0) if rest else ""
            if match[3] == "s":
                return value.ljust(int(match[2] or 0)) if match[1] == "-" else value.rjust(int(match[2] or 0))
            try:
                return format(int(value or 0), f"{match[1] if match[1] == '0' else ''}{match[2]}d")
            except ValueError:
                place.refuse(f"printf: {value[:80]!r} is not a whole number; use %s")

        known = re.compile(r"%%|%([-0]?)(\d{0,3})([sd])")
        if "%" in known.sub("", form):
            place.refuse(f"printf: the format {form[:80]!r} has more than %s and %d; give the value with --set")
        form = _unescaped(form)
        text = known.sub(convert, form)
        while rest and len(rest) < len(values):
            values = list(rest)
            text += known.sub(convert, form)
        return text

    @staticmethod
    def dirname(words: Sequence[str], _stdin: str, _place: Place) -> str:
        """``dirname``."""
        paths = [word for word in words if word != "--"]
        return "".join(f"{os.path.dirname(path.rstrip('/') or path) or '.'}\n" for path in paths)

    @staticmethod
    def basename(words: Sequence[str], _stdin: str, _place: Place) -> str:
        """``basename PATH [SUFFIX]``."""
        paths = [word for word in words if word != "--"]
        name = os.path.basename((paths or [""])[0].rstrip("/"))
        return f"{name.removesuffix(paths[1]) if len(paths) > 1 and name != paths[1] else name}\n"

    def realpath(self, words: Sequence[str], _stdin: str, place: Place) -> str:
        """``realpath`` and ``readlink -f``."""
        paths = [word for word in words if not re.fullmatch(r"-[fems]|--", word)]
        if len(paths) != 1 or "\0" in paths[0]:
            place.refuse("realpath needs one path; give one")
        return f"{os.path.realpath(self.folder() / paths[0])}\n"

    @staticmethod
    def hostname(words: Sequence[str], _stdin: str, place: Place) -> str:
        """The name of this host; ``-s``: up to the first dot."""
        name = socket.gethostname()
        if any(word not in ("-s", "-f") for word in words):
            place.refuse(
                f"hostname {' '.join(words)[:80]} is not interpreted; use hostname, or give the address with --set"
            )
        return f"{name.partition('.')[0] if '-s' in words else name}\n"

    @staticmethod
    def date(words: Sequence[str], _stdin: str, place: Place) -> str:
        """The time of now, with a format such as ``+%Y-%m-%d``."""
        forms = [word for word in words if word != "-u"]
        if len(forms) > 1 or (
            forms and not re.fullmatch(r"\+(?:[^%\0]|%[aAbBcCdDeFgGhHIjklmMnNpPrRsStTuUVwWxXyYzZ%])*", forms[0])
        ):
            place.refuse("date is interpreted with a format such as +%Y-%m-%d; use one")
        moment = time.gmtime() if "-u" in words else time.localtime()
        if not forms:
            return time.strftime("%a %b %e %H:%M:%S %Z %Y", moment) + "\n"
        form = forms[0][1:].replace("%N", f"{time.time_ns() % 10**9:09d}").replace("%s", str(int(time.time())))
        return time.strftime(form, moment) + "\n" if form else "\n"

    @staticmethod
    def sequence(words: Sequence[str], _stdin: str, place: Place) -> str:
        """``seq [-s SEPARATOR] [FIRST [STEP]] LAST``."""
        words, separator = list(words), None
        if words and words[0].startswith("-s"):
            separator = words[0][2:] or "".join(words[1:2])
            words = words[1 if words[0][2:] else 2 :]
        if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", word) for word in words):
            place.refuse("seq needs whole numbers: FIRST STEP LAST; give them")
        numbers = [int(word) for word in words]
        first, last = (numbers[0] if len(numbers) > 1 else 1), numbers[-1]
        step = numbers[1] if len(numbers) == 3 else 1
        if step == 0 or abs(last - first) // abs(step) >= MAX_SEQUENCE:
            place.refuse(f"seq has no end or more than {MAX_SEQUENCE:,} numbers; use fewer")
        return _in_lines(map(str, range(first, last + (1 if step > 0 else -1), step)), separator)

    @staticmethod
    def shuffle(words: Sequence[str], _stdin: str, place: Place) -> str:
        """``shuf -n 1 -i FIRST-LAST``: a random number, as scripts select a port."""
        match = re.fullmatch(r"-n ?1 -i ?(\d{1,9})-(\d{1,9})|-i ?(\d{1,9})-(\d{1,9}) -n ?1", " ".join(words))
        first, last = (int(text) for text in match.groups() if text) if match else (1, 0)
        if first > last:
            place.refuse("shuf is interpreted as shuf -n 1 -i FIRST-LAST; give the value with --set NAME=VALUE")
        return f"{random.randint(first, last)}\n"

    def hosts(self, words: Sequence[str], _stdin: str, place: Place) -> str:
        """``scontrol show hostnames [LIST]``: the names of a list such as ``n[01-03,7]``, one on a line.

        Outside of a job its hosts are not known, and ``localhost`` stands for each: the launcher finds their addresses.
        """
        if list(words[:1]) != ["show"] or words[1:2] not in (["hostnames"], ["hostname"]) or len(words) > 3:
            place.refuse("scontrol is interpreted as scontrol show hostnames LIST; remove the line")
        text = words[2] if len(words) == 3 else self.variable("SLURM_JOB_NODELIST")
        nodes = self.variable("SLURM_NNODES")
        names = expand_hosts(text) if text else ["localhost"] * (int(nodes) if re.fullmatch(r"\d{1,4}", nodes) else 1)
        if names is None:
            place.refuse(f"{text[:80]!r} is not a list of hosts such as n[1-3]; give the value with --set NAME=VALUE")
        return _in_lines(names, None)

    def read(self, path: str, place: Place) -> str:
        """The text of a file, or of one that the script writes."""
        if "\0" in path or path.startswith("/dev/"):
            place.refuse(f"{path[:80]!r} is not a text file; name one")
        full = self.folder() / path
        written = self.written.get(Path(os.path.abspath(full)))
        if written is not None:
            return written
        try:
            return read_input(full, MAX_FILE_BYTES)
        except DocumentError as error:
            return place.refuse(f"{path} cannot be read: {reason(error)}; create it before")

    def cat(self, words: Sequence[str], stdin: str, place: Place) -> str:
        """The text of files, or of a here-document."""
        return "".join(stdin if word == "-" else self.read(word, place) for word in words) if words else stdin

    def sed(self, words: Sequence[str], stdin: str, place: Place) -> str:
        """``sed s/WORD/TEXT/`` with a literal word, as scripts fill in templates of DeepSpeed."""
        words = [word for word in words if word != "-e"]
        match = re.fullmatch(r"s([/|#,:])([\w .{}$-]+)\1([^\n]*)\1(g?)", words[0]) if words else None
        if match is None or match[1] in match[3].replace("\\" + match[1], "") or len(words) > 2:
            place.refuse(
                "sed is interpreted only to replace a word: sed 's/WORD/TEXT/' FILE; write the result to a file"
            )
        new = match[3].replace("\\" + match[1], match[1]).replace("\\&", "&")
        text = self.read(words[1], place) if len(words) == 2 else stdin
        count = -1 if match[4] else 1
        if text.count(match[2]) * len(new) > MAX_FILE_BYTES:
            place.refuse(f"the result of sed has more than {MAX_FILE_BYTES:,} bytes; use a shorter text")
        return "".join(line.replace(match[2], new, count) for line in text.splitlines(keepends=True))

    def head(self, words: Sequence[str], stdin: str, place: Place) -> str:
        """``head -n N``."""
        match = re.fullmatch(r"(?:-n ?|-)?(\d{1,6})?", " ".join(words))
        if match is None:
            place.refuse("head is interpreted as head -n N; use it so")
        return "".join(stdin.splitlines(keepends=True)[: int(match[1] or 10)])

    def count(self, words: Sequence[str], stdin: str, place: Place) -> str:
        """``wc -l`` and ``wc -w``."""
        if list(words) not in (["-l"], ["-w"]):
            place.refuse("wc is interpreted as wc -l or wc -w of a pipe; give the number with --set")
        return f"{stdin.count(chr(10)) if words[0] == '-l' else len(stdin.split())}\n"

    @staticmethod
    def grep(words: Sequence[str], stdin: str, place: Place) -> str:
        """``grep WORD``: the lines of a pipe that contain it."""
        if len(words) != 1 or not re.fullmatch(r"[\w:/.-]*", words[0]):
            place.refuse("grep is interpreted as grep WORD of a pipe; give the value with --set")
        return "".join(line for line in stdin.splitlines(keepends=True) if words[0] in line)

    @staticmethod
    def field(words: Sequence[str], stdin: str, place: Place) -> str:
        """``awk '{print $N}'``: a word of each line of a pipe."""
        match = re.fullmatch(r"\s*\{\s*print \$(\d{1,4})\s*;?\s*\}\s*", words[0]) if len(words) == 1 else None
        if match is None:
            place.refuse("awk is interpreted as awk '{print $N}' of a pipe; give the value with --set")
        at = int(match[1])
        rows = [line if not at else "".join(line.split()[at - 1 : at]) for line in stdin.splitlines()]
        return "".join(f"{row}\n" for row in rows)

    @staticmethod
    def join(words: Sequence[str], stdin: str, place: Place) -> str:
        """``xargs`` without a command: the words on one line."""
        if words:
            place.refuse("xargs is interpreted without a command; write the commands")
        return " ".join(stdin.split()) + "\n"

    @staticmethod
    def translate(words: Sequence[str], stdin: str, place: Place) -> str:
        """``tr A B`` and ``tr -d A`` with single characters."""
        if len(words) == 2 and words[0] == "-d" and len(words[1]) == 1:
            return stdin.replace(words[1], "")
        ranges = {"[:upper:]", "[:lower:]", "A-Z", "a-z"}
        if len(words) == 2 and set(words) <= ranges:
            return stdin.lower() if words[0] in ("[:upper:]", "A-Z") else stdin.upper()
        if len(words) != 2 or any(len(word) != 1 for word in words):
            place.refuse("tr is interpreted with single characters; give the value with --set")
        return stdin.replace(words[0], words[1])

    @staticmethod
    def gpus(_words: Sequence[str], _stdin: str, _place: Place) -> str:
        """One line for each GPU, so that ``nvidia-smi -L | wc -l`` is their number."""
        names = (
            name for name in (os.listdir("/dev") if os.path.isdir("/dev") else []) if re.fullmatch(r"nvidia\d+", name)
        )
        return "".join(f"{name}\n" for name in sorted(names))
