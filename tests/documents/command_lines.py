"""Whether a command line of a document would be accepted: its command, its options and their choices exist."""

from __future__ import annotations

import enum
import functools
import importlib
import re
import typing
from collections.abc import Sequence
from typing import Any

import typer

from dynmo_train.config.compat.flags import FLAGS
from dynmo_train.config.compat.translate import declared_name
from dynmo_train.config.task_command import TASK_FLAGS

PACKAGES = {
    "dynmo-train": "dynmo_train",
    "dynmo-prep": "dynmo_tools",
    "dynmo-plan": "dynmo_balance",
    "dynmo-ckpt": "dynmo_ckpt",
}
ROOT_OPTIONS = {"--help", "--help-all", "--version", "--show-completion", "--install-completion"}
SHELL = ("|", ";", "&&", "||", ">", ">>", "2>", "&", "<")


@functools.cache
def application(program: str) -> Any:
    return typer.main.get_command(importlib.import_module(f"{PACKAGES[program]}.cli").app)


def problems(words: Sequence[str]) -> list[str]:
    """What is wrong with a command line of one of our programs, split into words; nothing behind a pipe is checked."""
    words = list(words)
    for at, word in enumerate(words):
        if word in SHELL or word == "..." or word == "…":
            words = words[:at]
            break
    program = words[0]
    # These read the command line of Megatron's tasks/main.py.
    if words[1:2] == ["tasks"] or words[2:3] == ["--task"]:
        return [f"{words[1]}: no option {word}" for word in words if word.startswith("--") and word not in all_flags()]
    command, at = application(program), 1
    while hasattr(command, "commands"):
        rest = words[at:]
        if not rest or rest[0] in ROOT_OPTIONS:
            return []
        # A sentence may name several commands at once, or stand for each of them.
        names = re.split(r"[|/]", rest[0])
        if re.fullmatch(r"[A-Z]+|<.*>", rest[0]):
            return []
        missing = [name for name in names if name not in command.commands]
        if missing:
            return [f"no command {' '.join(words[:at])} {missing[0]}"]
        command, at = command.commands[names[0]], at + 1
    if words[1:2] == ["launch"] and "--" in words:
        end = words.index("--")
        inner = words[end + 1 :]
        own = option_problems(program, command, words[at:end])
        return own + (problems([program, *inner]) if inner[:1] and inner[0] in application(program).commands else [])
    return option_problems(program, command, words[at:])


def option_problems(program: str, command: Any, words: Sequence[str]) -> list[str]:
    """Options that do not exist, are refused, or have a value that is not one of their choices."""
    declared = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    compatible = {*FLAGS, *TASK_FLAGS} if program == "dynmo-train" else set()
    found = []
    for at, word in enumerate(words):
        if word == "--":
            break
        if not re.match(r"--?[a-zA-Z]", word):
            continue
        flag, equals, value = word.partition("=")
        flag = declared_name(flag, dict.fromkeys(declared, 1), {}) if program == "dynmo-train" else flag
        if flag in ROOT_OPTIONS:
            continue
        if flag not in declared:
            if flag not in compatible:
                found.append(f"{' '.join([program, command.name or ''])}: no option {flag}")
            elif flag in FLAGS and FLAGS[flag].kind == "refused":
                found.append(f"{program}: {flag} is refused")
            continue
        choices = choices_of(declared[flag].type_descriptor.annotation)
        listed = declared[flag].metavar or ""
        if re.fullmatch(r"[a-z0-9][\w.-]*(\|[a-z0-9][\w.-]*)+", listed):
            choices = set(listed.split("|"))
        value = value if equals else (words[at + 1] if at + 1 < len(words) else "")
        if choices and re.fullmatch(r"[a-z0-9][\w.-]*", value) and value not in choices:
            found.append(f"{flag} {value}: choices are {', '.join(sorted(choices))}")
    return found


def choices_of(annotation: Any) -> set[str]:
    """The values that a type allows, for an enumeration or literals, also within an option or a list; else none."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {str(member.value) for member in annotation}
    if typing.get_origin(annotation) is typing.Literal:
        return set(map(str, typing.get_args(annotation)))
    return set().union(*(choices_of(inner) for inner in typing.get_args(annotation)))


@functools.cache
def all_flags() -> frozenset[str]:
    """Flags of all commands of all programs, with those of other projects that are accepted or refused."""
    found = {*ROOT_OPTIONS, *FLAGS, *TASK_FLAGS}

    def collect(command: Any) -> None:
        found.update(name for param in command.params for name in (*param.opts, *param.secondary_opts))
        for inner in getattr(command, "commands", {}).values():
            collect(inner)

    for program in PACKAGES:
        collect(application(program))
    return frozenset(found)
