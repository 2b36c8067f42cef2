"""What a command of another package says of its flags, read from its ``--help``: the packages share no code."""

from __future__ import annotations

import itertools
import re
import subprocess

from ...config.compat import is_flag
from ...launch.find_command import program_path
from .published_scripts import CLASSIC_FLAGS, PLACES, find
from .script_commands import Meaning, ScriptCommand, flags_with_values

_OPTION = re.compile(r"  (-\S.*?)(?:  +(\S.*))?$")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")


def parse_help(text: str) -> dict[str, str]:
    """Flag -> what it does, of the help text that a command prints."""
    found: dict[str, str] = {}
    flags: list[str] = []
    for line in text.splitlines():
        if match := _OPTION.match(line):
            flags = _FLAG.findall(match[1])
            found |= dict.fromkeys(flags, match[2] or "")
        elif flags and line.startswith(" " * 20):
            found |= {flag: f"{found[flag]} {line.strip()}".strip() for flag in flags}
        else:
            flags = []
    return found


def explain_foreign(command: ScriptCommand) -> list[Meaning] | None:
    """Flag by flag, what a command of a script means to a command of another package; None where that is not here."""
    program, *names = command.ours.split()
    where = program_path(program) if program.startswith("dynmo-") else None
    if where is None:
        return None
    done = subprocess.run([where, *names, "--help"], capture_output=True, text=True, check=False)
    return explain_by_help(command, parse_help(done.stdout)) if done.returncode == 0 else None


def explain_by_help(command: ScriptCommand, helps: dict[str, str]) -> list[Meaning]:
    """As ``explain_foreign``, for help that was read."""
    meanings = _by_place(command)
    for flag, values in flags_with_values(command.arguments):
        own = next((name for name in (flag, flag.replace("_", "-")) if name in helps), None)
        if own is None and (classic := CLASSIC_FLAGS.get((command.ours, flag))):
            meanings.append(Meaning(flag, values, "same", classic))
        elif own is None:
            meanings.append(Meaning(flag, values, "unknown", f"{command.ours} has no such flag"))
        else:
            meanings.append(Meaning(flag, values, "same", ("" if own == flag else f"{own}: ") + helps[own]))
    return meanings


def _by_place(command: ScriptCommand) -> list[Meaning]:
    """The words before the first flag: files that the program knows by their places."""
    words = list(itertools.takewhile(lambda word: not is_flag(word), command.arguments))
    places = PLACES.get(command.program.rpartition("/")[2], ())
    if not places:
        return [Meaning(word, (), "same", "a file") for word in words]
    if len(words) != len(command.arguments):
        return [Meaning(word, (), "unknown", f"with flags behind it, {command.ours} wants -o") for word in words]
    known = [Meaning(word, (), "same", place) for word, place in zip(words, places, strict=False)]
    return known + [Meaning(word, (), "unknown", "one word too many") for word in words[len(places) :]]


def script_of(path: str) -> str | None:
    """The script here that stands in for a published one, known by its name; None without one."""
    row = find(path)
    return row.ours if row and row.ours.startswith("bin/") else None
