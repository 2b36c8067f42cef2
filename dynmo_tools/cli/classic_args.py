"""Arguments in the syntax of Megatron's tools: one flag with several values, files without flags.

Scripts of these tools then work with the name of the program changed. Arguments are only translated where they have one
meaning; everything else is left to typer, which reports it.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Sequence

LIST_FLAGS = frozenset({"--json-keys", "--json-key", "--input-files", "--inputs", "--tasks", "--input"})
"""Flags that accept several values; the flag is repeated for each value."""

POSITIONAL_FILES = {
    "blacklist-urls": ("", "--output"),
    "clean": ("", "--output"),
    "group-duplicates": ("", "--output", "--threshold"),
    "remove-duplicates": ("--groups", "", "--output"),
}
"""Steps whose Megatron tool has positional files, and the flag of each position here."""
# What the tool does by itself: cleanup_dataset.py applies all of ftfy.
POSITIONAL_OPTIONS = {"clean": ("--normalize",)}
RENAMED_FLAGS = {
    ("add-id", "--input-file"): "--input",
    ("add-id", "--output-file"): "--output",
    ("extract-wiki", "--processes"): "--workers",
}
# Flags of WikiExtractor.py without effect here, and their number of values: articles are JSON, templates are not
# expanded, and the output is one file.
IGNORED_FLAGS = {"--json": 0, "--no-templates": 0, "--no_templates": 0, "-q": 0, "--quiet": 0, "-b": 1, "--bytes": 1}
FILE_ENDINGS = (".jsonl", ".json", ".txt", ".gz", ".xz", ".bz2", ".zst")
"""Extensions of an output that is a file; WikiExtractor's is a folder."""


def expand_list_flags(arguments: Sequence[str]) -> list[str]:
    """Repeat list flags: ``--json-keys a b`` becomes ``--json-keys a --json-keys b``."""
    expanded: list[str] = []
    flag: str | None = None
    expects_value = False
    for position, argument in enumerate(arguments):
        # Everything after "--" is positional, also what looks like a flag.
        if argument == "--":
            return [*expanded, *arguments[position:]]
        # A flag=value has its value already; such an argument is in no list.
        if argument.startswith("-") and argument != "-":
            flag = argument if argument in LIST_FLAGS else None
            expects_value = flag is not None
            expanded.append(argument)
        elif flag is not None and not expects_value:
            expanded += [flag, argument]
        else:
            expanded.append(argument)
            expects_value = False
    return expanded


def from_classic_syntax(arguments: Sequence[str]) -> list[str]:
    """Translate arguments of Megatron's tools to flags of this command line.

    ``find-duplicates --inputs FILE KEY ...`` gives files and the keys of their document ids, ``decontaminate
    --dedup-dataset FILE KEY`` a file and the key of its text, ``--lambada-path FILE`` a task's file, and ``merge
    --json_path FOLDER`` the ``.json`` files of a folder. ``extract-wiki --json`` writes into a folder. Commands with
    files only are read by ``POSITIONAL_FILES``.
    """
    if positional := _from_positional(arguments):
        return positional
    if arguments[:1] == ["extract-wiki"] and "--json" in arguments:
        arguments = _from_wiki_extractor(arguments)
    step = next((argument for argument in arguments if not argument.startswith("-")), None)
    expanded: list[str] = []
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        # Values up to the next flag, as argparse collects them for ``nargs="+"``.
        values = list(itertools.takewhile(lambda value: not value.startswith("-"), remaining))
        pairs = list(zip(values[::2], values[1::2], strict=False)) if len(values) % 2 == 0 else []
        if (step, flag) == ("find-duplicates", "--inputs") and pairs:
            expanded += [word for file, key in pairs for word in ("--input", file, "--id-key", key)]
        elif (step, flag) in RENAMED_FLAGS and len(values) == 1:
            expanded += [RENAMED_FLAGS[step or "", flag], *values]
        elif (step, flag) == ("merge", "--json_path") and len(values) == 1:
            # The folder is escaped, the pattern is not: a folder may be named "a[1]".
            expanded += ["--input", os.path.join(glob.escape(values[0]), "*.json")]
        elif (step, flag) == ("decontaminate", "--dedup-dataset") and len(pairs) == 1:
            expanded += ["--input", values[0], "--json-key", values[1]]
        elif (step, flag) == ("decontaminate", "--lambada-path") and len(values) == 1:
            expanded += ["--task", f"lambada={values[0]}"]
        # Megatron's --tasks only has names; the file of lambada is that of --lambada-path.
        elif (step, flag) == ("decontaminate", "--tasks") and "--lambada-path" in arguments:
            expanded += [word for name in values if name != "lambada" for word in ("--task", name)]
        else:
            expanded.append(flag)
            continue
        del remaining[: len(values)]
    return expanded


def _from_wiki_extractor(arguments: Sequence[str]) -> list[str]:
    """Translate a line of ``WikiExtractor.py --json``, whose output is a folder: ``wiki/AA/wiki_00``."""
    translated: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word in IGNORED_FLAGS:
            del remaining[: IGNORED_FLAGS[word]]
        elif word in ("-o", "--output") and remaining and not remaining[0].endswith(FILE_ENDINGS):
            folder = remaining.pop(0)
            translated += [word, os.path.join(folder, "AA", "wiki_00")]
            # Not within the folder: its files are read as "wiki/*/wiki_*".
            if "--work-dir" not in arguments:
                translated += ["--work-dir", f"{folder.rstrip('/')}.work"]
        else:
            translated.append(word)
    return translated


def _from_positional(arguments: Sequence[str]) -> list[str]:
    """Translate a step with files only; empty if the arguments have another form or ``-o`` may be missing.

    The output must not exist: the last of two inputs would be overwritten.
    """
    step, files = (arguments[0], arguments[1:]) if arguments else ("", ())
    places = POSITIONAL_FILES.get(step, ())
    output = places.index("--output") if places else 0
    if not places or not output < len(files) <= len(places) or any(file.startswith("-") for file in files):
        return []
    if os.path.exists(files[output]):
        return []
    pairs = zip(places, files, strict=False)
    return [step, *(word for pair in pairs for word in pair if word), *POSITIONAL_OPTIONS.get(step, ())]
