"""A Python configuration of Megatron-Bridge or torchtitan as a command line, and its fields without words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...config.compat.flag import CompatFlag
from ...config.compat.megatron_bridge import WITHOUT_OPTION, field_words, flag_of_field
from .python_config import PythonConfig, Unknown
from .script_commands import BRIDGE_PROGRAM, TORCHTITAN_PROGRAM, FlagMeaning, ScriptCommand

_UNREAD = "is not executed: give what it sets as options, or its file with --module"


def command_of_config(
    config: PythonConfig, is_known: Callable[[str], bool], table: Mapping[str, CompatFlag]
) -> tuple[ScriptCommand, list[FlagMeaning]]:
    """The command line of a configuration.

    Args:
        config: fields and their values.
        is_known: whether ``dynmo-train pretrain`` knows an option of Megatron-LM.
        table: options of other projects.

    Returns:
        The command, and the meaning of each field that has no words in it.
    """
    words: list[str] = []
    meanings: list[FlagMeaning] = []
    for name, value in config.fields.items():
        is_titan = config.project == "torchtitan"
        flag = f"--{name}" if is_titan else flag_of_field(name, is_known)
        known = table.get(flag or "")
        if isinstance(value, Unknown):
            reason = WITHOUT_OPTION.get(name, known.reason if known is not None and known.kind == "ignored" else "")
            if reason:
                meanings.append(FlagMeaning(name, (), "ignored", reason))
            else:
                meanings.append(FlagMeaning(name, (value.text,), "refused", _remedy(name, flag, known, is_known)))
            continue
        if not is_titan:
            found = field_words(name, value, is_known)
            words += found.words
            if not found.words:
                meanings.append(FlagMeaning(name, (str(value),), found.kind, found.reason))
        elif value is None or value is False:
            meanings.append(FlagMeaning(name, (), "ignored", "is off"))
        elif known is None:
            remedy = "has no option here: leave it out, or give what it sets as options"
            meanings.append(FlagMeaning(name, (str(value),), "refused", remedy))
        else:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    meanings += [FlagMeaning(text, (), "refused", _UNREAD) for text in config.unread]
    program = TORCHTITAN_PROGRAM if config.project == "torchtitan" else BRIDGE_PROGRAM
    return ScriptCommand((), program, tuple(words)), meanings


def _remedy(name: str, flag: str | None, known: CompatFlag | None, is_known: Callable[[str], bool]) -> str:
    """What to give in place of a value that only an execution would give."""
    found = field_words(name, "", is_known)
    if known is not None and known.kind == "refused":
        return known.reason
    if known is not None and known.kind == "becomes":
        return f"only its execution gives the value: give {known.arguments[-1]}"
    if found.kind == "refused" and found.reason:
        return found.reason
    return f"only its execution gives the value: give {flag}" if flag else "only its execution gives the value"
