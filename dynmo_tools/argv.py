"""Arguments as the classic tools take them: one flag with several values behind it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

LISTS = frozenset({"--json-keys", "--json-key", "--input-files", "--inputs", "--tasks", "--input"})
"""Flags that may be followed by several values; each value becomes a flag of its own."""


def spread_lists(arguments: Sequence[str]) -> list[str]:
    """``--json-keys a b`` as ``--json-keys a --json-keys b``; everything else as it is."""
    spread: list[str] = []
    flag: str | None = None
    fresh = False
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*spread, *arguments[position:]]
        if argument.startswith("-") and argument != "-":
            flag = argument if argument in LISTS else None
            fresh = flag is not None
            spread.append(argument)
        elif flag is not None and not fresh:
            spread += [flag, argument]
        else:
            spread.append(argument)
            fresh = False
    return spread


def from_classic(arguments: Sequence[str]) -> list[str]:
    """Values that the classic tools take in pairs, and a task's file under its own flag, as flags of ours.

    ``--inputs FILE KEY ...`` of find-duplicates names the files and the keys of their documents' names;
    ``--dedup-dataset FILE KEY`` of decontaminate the file and the key of the text, ``--lambada-path`` a task's file.
    """
    step = next((argument for argument in arguments if not argument.startswith("-")), None)
    made: list[str] = []
    left = list(arguments)
    while left:
        flag = left.pop(0)
        values = list(itertools.takewhile(lambda value: not value.startswith("-"), left))
        pairs = list(zip(values[::2], values[1::2], strict=False)) if len(values) % 2 == 0 else []
        if (step, flag) == ("find-duplicates", "--inputs") and pairs:
            made += [word for file, key in pairs for word in ("--input", file, "--id-key", key)]
        elif (step, flag) == ("decontaminate", "--dedup-dataset") and len(pairs) == 1:
            made += ["--input", values[0], "--json-key", values[1]]
        elif (step, flag) == ("decontaminate", "--lambada-path") and len(values) == 1:
            made += ["--task", f"lambada={values[0]}"]
        elif (step, flag) == ("decontaminate", "--tasks") and "--lambada-path" in arguments:
            made += [word for name in values if name != "lambada" for word in ("--task", name)]
        else:
            made.append(flag)
            continue
        del left[: len(values)]
    return made


def without_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The arguments without these flags, each of which has one value."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in flags:
            skip = True
        elif argument.partition("=")[0] not in flags:
            kept.append(argument)
    return kept
