"""Shell scripts of Megatron-LM and its kin, read but never run: which programs they start, and with which flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...config.compat import FLAGS, SEVERAL, Known, is_flag, own_name, translate
from .published_scripts import LAUNCHERS, TASKS, find

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^}]*))?\}|(\w+))")
_SUBSHELL = re.compile(r"\$\([^()]*\)")
_CONDITION = re.compile(r"if\s+\[\[?\s+\"?([^\s\"]*)\"?\s+(==?|!=)\s+\"?([^\s\"]*)\"?\s+\]\]?")
_COMMENT = re.compile(r"(?m)(?:^|\s)#.*$")
_DEPTH = 8


@dataclass(frozen=True)
class ScriptCommand:
    """A command line that a script starts, with its variables filled in: words before the program, and behind it."""

    before: tuple[str, ...]
    program: str
    arguments: tuple[str, ...]

    @property
    def ours(self) -> str:
        """The command here that does its work."""
        row = find(self.program)
        name = row.ours if row else self.program
        if name != "dynmo-train tasks":
            return name
        if "--tasks" in self.arguments:  # lm-evaluation-harness
            return "dynmo-train evaluate lm-eval"
        task = dict(zip(self.arguments, self.arguments[1:], strict=False)).get("--task", "").strip("\"'").upper()
        return f"dynmo-train {TASKS.get(task, 'tasks')}"

    @property
    def launcher(self) -> str | None:
        """The command here in place of the one that started several processes, if there was one."""
        return next((LAUNCHERS[word] for word in self.before if word in LAUNCHERS), None)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Variables filled in, as far as the script itself gives them values."""
    for _ in range(_DEPTH):
        made = _EXPANSION.sub(
            lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]),
            text,
        )
        if made == text:
            break
        text = made
    return text


def _lines(text: str) -> list[str]:
    """Logical lines: continued ones joined, also inside quotes; comments gone."""
    lines: list[str] = []
    held = ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        held += ("\n" if held else "") + (line if held else _COMMENT.sub("", line))
        if held.count('"') % 2 == 0 and held.count("'") % 2 == 0:
            lines.append(held)
            held = ""
    return [*lines, held] if held else lines


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _follow(line: str, variables: Mapping[str, str], branches: list[bool]) -> bool:
    """Whether a line is an ``if``, ``else`` or ``fi``; keeps which of the open branches are taken."""
    if match := _CONDITION.match(line):
        same = _expand(match[1], variables) == _expand(match[3], variables)
        branches.append(same != (match[2] == "!="))
    elif re.match(r"if\b", line):
        branches.append(True)
    elif re.match(r"el(se|if)\b", line) and branches:
        branches[-1] = not branches[-1]
    elif re.match(r"fi\b", line) and branches:
        branches.pop()
    else:
        return re.match(r"then\b", line) is not None
    return True


def read_script(text: str) -> list[ScriptCommand]:
    """The known programs that a script starts, in order.

    Assignments are taken in the order of the text. An ``if`` that compares two words is followed, any other is taken to
    hold; nothing is run.
    """
    variables: dict[str, str] = {}
    found: list[ScriptCommand] = []
    branches: list[bool] = []
    for line in _lines(_SUBSHELL.sub("$(...)", text)):
        if _follow(line.strip(), variables, branches) or not all(branches):
            continue
        given = _words(line)
        given = given[1:] if given[:1] == ["export"] else given
        pairs = [match for match in map(_ASSIGNMENT.fullmatch, given) if match]
        if given and len(pairs) == len(given):  # else they are for one command
            for match in pairs:
                value = " ".join(match[2].split())
                variables[match[1]] = _expand(value, {**variables, match[1]: variables.get(match[1], "")})
            continue
        words = _words(_expand(line, variables))
        if words[:1] == ["echo"]:
            continue
        at = next((n for n, word in enumerate(words) if find(word)), None)
        if at is not None:
            behind = [word for word in words[at + 1 :] if word not in ("$@", "\\", ";", "&")]
            found.append(ScriptCommand(tuple(words[:at]), words[at], tuple(behind)))
    return found


@dataclass(frozen=True)
class Meaning:
    """What a flag of a script means here. ``kind``: same, becomes, nothing, refused or unknown."""

    flag: str
    values: tuple[str, ...]
    kind: str
    text: str


def _flags(
    arguments: Sequence[str], declared: Mapping[str, int], table: Mapping[str, Known]
) -> list[tuple[str, tuple[str, ...]]]:
    """Flags with their values; a flag that nobody knows has the words before the next flag."""
    made: list[tuple[str, tuple[str, ...]]] = []
    at = 0
    while at < len(arguments):
        flag, equals, value = arguments[at].partition("=")
        at += 1
        if not is_flag(flag):
            continue
        own, known = own_name(flag, declared, table), table.get(flag)
        count = SEVERAL.get(own, declared[own]) if own in declared else (abs(known.values or 0) if known else None)
        end = at
        while end < len(arguments) and not is_flag(arguments[end]) and (count is None or end - at < count):
            end += 1
        made.append((flag, (value,) if equals else tuple(arguments[at:end])))
        at = at if equals else end
    return made


def flags_with_values(arguments: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Flags with the words before the next one, of a command whose flags nobody here declares."""
    return _flags(arguments, {}, {})


def explain(
    command: ScriptCommand,
    declared: Mapping[str, int],
    helps: Mapping[str, str],
    table: Mapping[str, Known] = FLAGS,
) -> list[Meaning]:
    """Flag by flag, what a command of a script means here.

    Args:
        command: of the script.
        declared: flags of the command here, and how many words follow each.
        helps: what each of those does.
        table: what the other flags mean to it.
    """
    family = command.ours.rpartition(" ")[2] if command.ours.startswith("dynmo-train pretrain") else "gpt"
    meanings: list[Meaning] = []
    for flag, values in _flags(command.arguments, declared, table):
        own = own_name(flag, declared, table)
        if own in declared:
            meanings.append(Meaning(flag, values, "same", ("" if own == flag else f"{own}: ") + helps.get(own, "")))
            continue
        if flag not in table:
            meanings.append(Meaning(flag, values, "unknown", f"{command.ours} has no such flag"))
            continue
        made = translate([flag, *values], family, declared, table)
        if made.problems:
            meanings.append(Meaning(flag, values, "refused", made.problems[0].message))
        elif made.notes:
            meanings.append(Meaning(flag, values, "nothing", made.notes[0].partition(": ")[2]))
        else:
            meanings.append(Meaning(flag, values, "becomes", " ".join(made.arguments)))
    return meanings
