"""Flags of commands of the other packages, parsed from their ``--help``: the packages share no code."""

from __future__ import annotations

import itertools
import re
import subprocess

from ...config.compat.translate import is_flag
from ...launch.find_command import program_path
from ..published_scripts import CLASSIC_FLAGS, POSITIONAL_ARGUMENTS, find
from .script_commands import FlagMeaning, ScriptCommand, flags_with_values

_OPTION = re.compile(r"  (-\S.*?)(?:  +(\S.*))?$")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")


def parse_help(text: str) -> dict[str, str]:
    """Parse the help text of a command into a mapping from flag to help."""
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


def explain_other_package(command: ScriptCommand) -> list[FlagMeaning] | None:
    """The meaning of each flag to a command of another package; None if that package is not installed."""
    program, *names = command.equivalent.split()
    path = program_path(program) if program.startswith("dynmo-") else None
    if path is None:
        return None
    done = subprocess.run([path, *names, "--help"], capture_output=True, text=True, check=False)
    return explain_by_help(command, parse_help(done.stdout)) if done.returncode == 0 else None


def explain_by_help(command: ScriptCommand, helps: dict[str, str]) -> list[FlagMeaning]:
    """The meaning of each flag of a command.

    Args:
        command: command of a script.
        helps: flag of the equivalent command to its help.
    """
    meanings = _positional_meanings(command)
    for flag, values in flags_with_values(command.arguments):
        own = next((name for name in (flag, flag.replace("_", "-")) if name in helps), None)
        if own is None and (classic := CLASSIC_FLAGS.get((command.equivalent, flag))):
            meanings.append(FlagMeaning(flag, values, "same", classic))
        elif own is None:
            meanings.append(FlagMeaning(flag, values, "unknown", f"{command.equivalent} has no such flag"))
        else:
            meanings.append(FlagMeaning(flag, values, "same", ("" if own == flag else f"{own}: ") + helps[own]))
    return meanings


def _positional_meanings(command: ScriptCommand) -> list[FlagMeaning]:
    """The meanings of positional arguments: the words before the first flag."""
    words = list(itertools.takewhile(lambda word: not is_flag(word), command.arguments))
    roles = POSITIONAL_ARGUMENTS.get(command.program.rpartition("/")[2], ())
    if not roles:
        return [FlagMeaning(word, (), "same", "a file") for word in words]
    if len(words) != len(command.arguments):
        return [
            FlagMeaning(word, (), "unknown", f"with flags after it, {command.equivalent} needs -o") for word in words
        ]
    known = [FlagMeaning(word, (), "same", role) for word, role in zip(words, roles, strict=False)]
    return known + [FlagMeaning(word, (), "unknown", "unexpected argument") for word in words[len(roles) :]]


def equivalent_script(path: str) -> str | None:
    """The script in ``bin/`` that is equivalent to a published one of that name; None without one."""
    row = find(path)
    return row.equivalent if row and row.equivalent.startswith("bin/") else None
