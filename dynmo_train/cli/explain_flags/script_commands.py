"""Parse shell scripts of Megatron-LM and similar projects, without executing them: programs and their flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.compat.flag import CompatFlag
from ...config.compat.flags import FLAGS
from ...config.compat.megatron_model import COMBINED_FLAGS
from ...config.compat.project_defaults import project_defaults, torchtitan_defaults
from ...config.compat.translate import (
    MULTI_WORD_FLAGS,
    TranslatedCommand,
    declared_name,
    flag_name,
    is_flag,
    translate,
    values_after,
)
from ..published_scripts import LAUNCHERS, TASKS, find

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^}]*))?\}|(\w+))")
_SUBSHELL = re.compile(r"\$\([^()]*\)")
_CONDITION = re.compile(r"if\s+\[\[?\s+\"?([^\s\"]*)\"?\s+(==?|!=)\s+\"?([^\s\"]*)\"?\s+\]\]?")
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)(\+?)=\((.*)")
_ALL_OF_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_COMMENT = re.compile(r"(?m)(?:^|\s)#.*$")
_DEPTH = 8
# The programs of a configuration of torchtitan and of a recipe of Megatron-Bridge.
TORCHTITAN_PROGRAM, BRIDGE_PROGRAM = "torchtitan", "Megatron-Bridge"


@dataclass(frozen=True)
class ScriptCommand:
    """A command line of a script with expanded variables: words before the program, and its arguments."""

    before: tuple[str, ...]
    program: str
    arguments: tuple[str, ...]

    @property
    def equivalent(self) -> str:
        """The equivalent command of this project."""
        if self.program == TORCHTITAN_PROGRAM:
            return "dynmo-train pretrain llama"
        if self.program == BRIDGE_PROGRAM:
            return "dynmo-train pretrain gpt"
        row = find(self.program)
        name = row.equivalent if row else self.program
        if name != "dynmo-train tasks":
            return name
        if "--tasks" in self.arguments:  # lm-evaluation-harness
            return "dynmo-train evaluate lm-eval"
        task = dict(zip(self.arguments, self.arguments[1:], strict=False)).get("--task", "").strip("\"'").upper()
        return f"dynmo-train {TASKS.get(task, 'tasks')}"

    @property
    def launcher(self) -> str | None:
        """The equivalent launch command; None if the script does not use a launcher."""
        return next((LAUNCHERS[word] for word in self.before if word in LAUNCHERS), None)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand the variables that the script assigns."""
    for _ in range(_DEPTH):
        expanded = _EXPANSION.sub(
            lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]),
            text,
        )
        if expanded == text:
            break
        text = expanded
    return text


def _without_arrays(text: str) -> str:
    """A script whose arrays are strings: ``A=(--lr 1)`` becomes ``A="--lr 1"``, and ``"${A[@]}"`` becomes ``${A}``."""
    lines: list[str] = []
    array: list[str] | None = None
    for line in _ALL_OF_ARRAY.sub(r"${\1}", text).splitlines():
        start = _ARRAY.match(line) if array is None else None
        if start:
            array = [f'{start[1]}="${{{start[1]}}} ' if start[2] else f'{start[1]}="']
            line = start[3]
        if array is None:
            lines.append(line)
            continue
        words = _COMMENT.sub("", line).replace('"', "").rstrip("\\ \t")
        # A subshell is ``$(...)`` here.
        is_last = words.removesuffix("$(...)").endswith(")")
        array.append(words.removesuffix(")") if is_last else words)
        if is_last:
            lines.append(" ".join(array) + '"')
            array = None
    return "\n".join(lines)


def _lines(text: str) -> list[str]:
    """Logical lines: without comments, with continuation lines and quoted line breaks joined."""
    lines: list[str] = []
    pending = ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        pending += ("\n" if pending else "") + (line if pending else _COMMENT.sub("", line))
        if pending.count('"') % 2 == 0 and pending.count("'") % 2 == 0:
            lines.append(pending)
            pending = ""
    return [*lines, pending] if pending else lines


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _follow(line: str, variables: Mapping[str, str], branches: list[bool]) -> bool:
    """Whether a line is an ``if``, ``else`` or ``fi``; updates which open branches are taken."""
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

    Assignments apply in the order of the text, those of arrays too. An ``if`` that compares two words is evaluated; any
    other condition is assumed to be true. Nothing is executed.
    """
    variables: dict[str, str] = {}
    found: list[ScriptCommand] = []
    branches: list[bool] = []
    for line in _lines(_without_arrays(_SUBSHELL.sub("$(...)", text))):
        if _follow(line.strip(), variables, branches) or not all(branches):
            continue
        words = _words(line)
        words = words[1:] if words[:1] == ["export"] else words
        pairs = [match for match in map(_ASSIGNMENT.fullmatch, words) if match]
        if words and len(pairs) == len(words):  # else they apply to one command
            for match in pairs:
                value = " ".join(match[2].split())
                variables[match[1]] = _expand(value, {**variables, match[1]: variables.get(match[1], "")})
            continue
        words = _words(_expand(line, variables))
        if words[:1] == ["echo"]:
            continue
        at = next((n for n, word in enumerate(words) if find(word)), None)
        if at is not None:
            arguments = [word for word in words[at + 1 :] if word not in ("$@", "\\", ";", "&")]
            found.append(ScriptCommand(tuple(words[:at]), words[at], tuple(arguments)))
    return found


def with_flags_of(read: Sequence[ScriptCommand], started: Sequence[ScriptCommand]) -> list[ScriptCommand]:
    """Commands with the flags of both ways to read a script.

    A branch that the script does not take has flags that are read only, and ``source`` and ``eval`` have flags that are
    started only.

    Args:
        read: commands of :func:`read_script`.
        started: commands that the script starts in this environment, in order.
    """
    remaining = list(started)
    found: list[ScriptCommand] = []
    for command in read:
        other = next((one for one in remaining if one.program == command.program), None)
        if other is None:
            found.append(command)
            continue
        remaining.remove(other)
        known = {flag for flag, _ in flags_with_values(other.arguments)}
        more = [
            word
            for flag, values in flags_with_values(command.arguments)
            if flag not in known
            for word in (flag, *values)
        ]
        found.append(ScriptCommand(other.before or command.before, other.program, (*other.arguments, *more)))
    return [*found, *remaining]


def command_of_words(words: Sequence[str]) -> ScriptCommand | None:
    """The command of expanded words, such as ``torchrun --nnodes 2 pretrain_gpt.py --lr 1``; None without a program."""
    at = next((n for n, word in enumerate(words) if find(word)), None)
    return None if at is None else ScriptCommand(tuple(words[:at]), words[at], tuple(words[at + 1 :]))


def unresolved_names(command: ScriptCommand) -> list[str]:
    """Variables that stand in place of flags, and whose value is not known."""
    names = (re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?\}?", word) for word in command.arguments)
    flags = {value for _, values in flags_with_values(command.arguments) for value in values[:1]}
    return [match[1] for match in names if match and match[0] not in flags]


def read_torchtitan(document: Mapping[str, Any]) -> ScriptCommand:
    """The keys of a TOML file of torchtitan as flags of its command line; a key that is false or empty is left out."""
    arguments: list[str] = []

    def add(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                add(value, f"{prefix}{key}.")
            elif value is not False and value != []:
                values = [] if value is True else value if isinstance(value, list) else [value]
                arguments.extend([f"--{prefix}{key}", *map(str, values)])

    add(document, "")
    return ScriptCommand((), TORCHTITAN_PROGRAM, tuple(arguments))


@dataclass(frozen=True)
class FlagMeaning:
    """The meaning of a flag of a script. ``kind``: same, becomes, ignored, refused, unknown, or default: not given."""

    flag: str
    values: tuple[str, ...]
    kind: str
    text: str


def _flags(
    arguments: Sequence[str], declared: Mapping[str, int], table: Mapping[str, CompatFlag]
) -> list[tuple[str, tuple[str, ...]]]:
    """Flags with their values; an unknown flag has all words before the next flag."""
    flags: list[tuple[str, tuple[str, ...]]] = []
    at = 0
    while at < len(arguments):
        flag, equals, value = arguments[at].partition("=")
        at += 1
        if not is_flag(flag):
            continue
        name, known = declared_name(flag, declared, table), table.get(flag_name(flag, table))
        count = MULTI_WORD_FLAGS.get(name, declared[name]) if name in declared else known.num_values if known else None
        values, at = ([value], at) if equals else values_after(arguments, at, count)
        flags.append((flag, tuple(values)))
    return flags


def flags_with_values(arguments: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Flags with all words before the next flag, for a command of another package."""
    return _flags(arguments, {}, {})


def _combined_meaning(flag: str, values: tuple[str, ...], whole: TranslatedCommand) -> FlagMeaning:
    """The meaning of a flag that depends on others of the command.

    Args:
        flag: a key of ``COMBINED_FLAGS``.
        values: its values.
        whole: translation of the whole command.
    """
    problem = next((problem.message for problem in whole.problems if problem.path == flag), None)
    if problem is not None:
        return FlagMeaning(flag, values, "refused", problem)
    note = next((note.partition(": ")[2] for note in whole.notes if note.startswith(f"{flag}: ")), None)
    if note is not None:
        return FlagMeaning(flag, values, "ignored", note)
    known = COMBINED_FLAGS[flag]
    return FlagMeaning(flag, values, "becomes", "; ".join([" ".join(known.arguments), *filter(None, [known.reason])]))


def _option_values(words: Sequence[str]) -> dict[str, str]:
    """Option name to the text of its value, from the arguments of a translated command."""
    return {
        word.partition("=")[0][2:].replace("-", "_"): word.partition("=")[2] or "".join(words[at + 1 : at + 2])
        for at, word in enumerate(words)
        if word.startswith("--")
    }


def _defaults(command: ScriptCommand, family: str, translated: Sequence[str]) -> list[FlagMeaning]:
    """The defaults of the project of a program that trains, where ours differ and the command has no value.

    Args:
        command: command of a script.
        family: its model family.
        translated: its arguments as ours.
    """
    if not command.equivalent.startswith("dynmo-train pretrain") or command.program == BRIDGE_PROGRAM:
        return []
    if command.program != TORCHTITAN_PROGRAM:
        program = command.program.rpartition("/")[2]
        found = project_defaults(program, family, command.arguments)
        return [FlagMeaning(one.words[0], one.words[1:], "default", one.reason or one.project) for one in found]
    # The world size is not known; several processes shard by default.
    values = torchtitan_defaults(command.arguments, _option_values(translated), family, processes=2)
    return [
        FlagMeaning(f"--{name.replace('_', '-')}", () if value is True else (str(value),), "default", "torchtitan")
        for name, value in values.items()
    ]


def explain(
    command: ScriptCommand,
    declared: Mapping[str, int],
    helps: Mapping[str, str],
    table: Mapping[str, CompatFlag] = FLAGS,
) -> list[FlagMeaning]:
    """The meaning of each flag of a command.

    Args:
        command: command of a script.
        declared: flag of the equivalent command to its number of values.
        helps: flag of the equivalent command to its help.
        table: flags that are not declared.
    """
    family = command.equivalent.rpartition(" ")[2] if command.equivalent.startswith("dynmo-train pretrain") else "gpt"
    meanings: list[FlagMeaning] = []
    whole = translate(command.arguments, family, declared, table)
    for flag, values in _flags(command.arguments, declared, table):
        name = declared_name(flag, declared, table)
        if name in declared:
            alias = "" if name == flag else f"{name}: "
            meanings.append(FlagMeaning(flag, values, "same", alias + helps.get(name, "")))
            continue
        name = flag_name(flag, table)
        if name not in table:
            meanings.append(FlagMeaning(flag, values, "unknown", f"{command.equivalent} has no such flag"))
            continue
        if table[name] is COMBINED_FLAGS.get(name):
            meanings.append(_combined_meaning(name, values, whole))
            continue
        translation = translate([flag, *values], family, declared, table)
        if translation.problems:
            meanings.append(FlagMeaning(flag, values, "refused", translation.problems[0].message))
        elif translation.notes:
            meanings.append(FlagMeaning(flag, values, "ignored", translation.notes[0].partition(": ")[2]))
        else:
            meanings.append(FlagMeaning(flag, values, "becomes", " ".join(translation.arguments)))
    return meanings + _defaults(command, family, whole.arguments)
