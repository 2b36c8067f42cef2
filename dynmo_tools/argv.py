"""Arguments as the classic tools take them: one flag with several values behind it."""

from __future__ import annotations

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
