"""Arguments as the classic tools take them: one flag with several values behind it."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Sequence

LISTS = frozenset({"--json-keys", "--json-key", "--input-files", "--inputs", "--tasks", "--input"})
"""Flags that may be followed by several values; each value becomes a flag of its own."""

POSITIONS = {
    "blacklist-urls": ("", "--output"),
    "clean": ("", "--output"),
    "group-duplicates": ("", "--output", "--threshold"),
    "remove-duplicates": ("--groups", "", "--output"),
}
"""Steps whose classic tool takes its files by their places, and the flag of each place here."""
_NAMES = {("add-id", "--input-file"): "--input", ("add-id", "--output-file"): "--output"}


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
    Files alone are taken by their places (``POSITIONS``); ``--json_path FOLDER`` of merge are its ``.json`` files.
    """
    if placed := _by_place(arguments):
        return placed
    step = next((argument for argument in arguments if not argument.startswith("-")), None)
    made: list[str] = []
    left = list(arguments)
    while left:
        flag = left.pop(0)
        values = list(itertools.takewhile(lambda value: not value.startswith("-"), left))
        pairs = list(zip(values[::2], values[1::2], strict=False)) if len(values) % 2 == 0 else []
        if (step, flag) == ("find-duplicates", "--inputs") and pairs:
            made += [word for file, key in pairs for word in ("--input", file, "--id-key", key)]
        elif (step, flag) in _NAMES and len(values) == 1:
            made += [_NAMES[step or "", flag], *values]
        elif (step, flag) == ("merge", "--json_path") and len(values) == 1:
            made += ["--input", os.path.join(glob.escape(values[0]), "*.json")]
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


def _by_place(arguments: Sequence[str]) -> list[str]:
    """A step with nothing but files, as the classic tool takes them; none where that may be a forgotten ``-o``.

    The output must not be there yet: the last of two inputs would be lost.
    """
    step, files = (arguments[0], arguments[1:]) if arguments else ("", ())
    places = POSITIONS.get(step, ())
    output = places.index("--output") if places else 0
    if not places or not output < len(files) <= len(places) or any(file.startswith("-") for file in files):
        return []
    if os.path.exists(files[output]):
        return []
    pairs = zip(places, files, strict=False)
    return [step, *(word for pair in pairs for word in pair if word)]
