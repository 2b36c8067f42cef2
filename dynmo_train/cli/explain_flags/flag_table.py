"""Every flag of other projects that ``pretrain`` knows, and what it is here: the rows of ``cli/FLAGS.md``.

The rows are computed from the declared options and ``config/compat/flags.py``; ``project_flags.toml`` only lists which
project has which flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..._common.document import parse_toml
from ...config.compat.flag import CompatFlag
from ...config.compat.flags import FLAGS
from ...config.compat.torchtitan import TORCHTITAN
from ...config.compat.translate import RENAMED_VALUES, declared_name
from ...config.resolve import built_in_specs

Families = Mapping[str, Mapping[str, int]]
Status = Literal["same", "renamed", "no effect", "refused"]
STATUSES: Mapping[Status, tuple[str, str]] = {
    "same": ("Same name", "our key of `--config`"),
    "renamed": ("Renamed", "here"),
    "no effect": ("No effect", "why"),
    "refused": ("Refused", "what to do instead"),
}
MARKS = {
    "Megatron-LM": "M",
    "Megatron-DeepSpeed": "D",
    "Optimus-CC": "O",
    "DynMo": "B",
    "Forks of Megatron-LM": "F",
    "Hugging Face Trainer": "H",
}
_KINDS: Mapping[str, Status] = {"becomes": "renamed", "ignored": "no effect", "refused": "refused"}
_FILE = Path(__file__).with_name("project_flags.toml")


@dataclass(frozen=True)
class FlagRow:
    """A flag of other projects, or a key of torchtitan.

    Attributes:
        flag: the flag or key.
        projects: projects that have it.
        status: what ``pretrain`` does with it.
        here: our key, our options, the reason or the remedy, by status.
    """

    flag: str
    projects: tuple[str, ...]
    status: Status
    here: str


def declared_flags(root: Any) -> dict[str, dict[str, int]]:
    """Model family to flag of ``pretrain`` to its number of values.

    Args:
        root: the command ``dynmo-train``.
    """
    return {
        family: {
            name: 0 if option.is_flag else option.nargs
            for option in command.params
            for name in (*option.opts, *option.secondary_opts)
        }
        for family, command in root.commands["pretrain"].commands.items()
    }


def project_flags() -> dict[str, list[str]]:
    """Project to its flags."""
    document = parse_toml(_FILE.read_text(encoding="utf-8"))
    return {project: table["flags"].split() for project, table in document.items()}


def rows(families: Families) -> list[FlagRow]:
    """One row for each flag of Megatron-LM, Megatron-DeepSpeed and Optimus-CC, by name.

    Args:
        families: model family to its flags, of :func:`declared_flags`.

    Raises:
        KeyError: a flag of ``project_flags.toml`` is unknown to ``pretrain``.
    """
    members: dict[str, list[str]] = {}
    for project, flags in project_flags().items():
        for flag in flags:
            members.setdefault(flag, []).append(project)
    return [
        _row(flag, tuple(members[flag]), families)
        for flag in sorted(members, key=lambda name: name.lstrip("-").lower())
    ]


def torchtitan_rows() -> list[FlagRow]:
    """One row for each key of torchtitan's TOML files, in the order of its tables."""
    return [FlagRow(key, ("torchtitan",), _KINDS[known.kind], _here(known)) for key, known in TORCHTITAN.items()]


def _row(flag: str, projects: tuple[str, ...], families: Families) -> FlagRow:
    names = {family: declared_name(flag, declared, FLAGS) for family, declared in families.items()}
    having = [family for family, name in names.items() if name in families[family]]
    if having:
        return FlagRow(flag, projects, "same", _key(names[having[0]]) + _only(having, families))
    known = FLAGS[flag]
    if known.kind == "becomes":
        having = [family for family, declared in families.items() if known.arguments[0] in declared]
        return FlagRow(flag, projects, "renamed", _here(known) + _only(having, families))
    only = f"; refused for other families than {', '.join(known.families)}" if known.families else ""
    return FlagRow(flag, projects, _KINDS[known.kind], _here(known) + only)


def _key(flag: str) -> str:
    """The table and key of one of our options, and its values with other names."""
    for spec in built_in_specs().values():
        if flag in (spec.flag, spec.negative):
            renamed = [f"`{theirs}` is `{ours}`" for theirs, ours in RENAMED_VALUES.get(flag, {}).items()]
            value = " = false" if flag == spec.negative else ""
            return "; ".join([f"`[{spec.concern}] {spec.name}{value}`", *renamed])
    raise KeyError(f"{flag} is an option of the command, not of the configuration: take it out of {_FILE.name}")


def _only(having: list[str], families: Families) -> str:
    return "" if len(having) == len(families) else f"; {', '.join(having)} only"


def _here(known: CompatFlag) -> str:
    """The last column of a flag that is not declared."""
    if known.kind == "becomes":
        value = "" if known.drop_values or known.num_values == 0 else " ..."
        renamed = [f"`{theirs}` is `{ours}`" for theirs, ours in known.renamed_values.items()]
        return "; ".join([f"`{' '.join(known.arguments)}{value}`", *renamed, *filter(None, [known.reason])])
    accepted = f"; `{known.neutral}` is accepted" if known.neutral is not None else ""
    return known.reason + accepted


def markdown(root: Any) -> Iterator[str]:
    """Lines of ``cli/FLAGS.md``.

    Args:
        root: the command ``dynmo-train``.
    """
    found, titan = rows(declared_flags(root)), torchtitan_rows()
    yield from (
        "# Flags of other projects, and what they are here",
        "",
        "<!-- Generated by bin/generate.py from the options and config/compat/flags.py: do not edit. -->",
        "",
        "Flags of `pretrain_*.py` of Megatron-LM (M) and its forks (F), Megatron-DeepSpeed (D), Optimus-CC (O), DynMo"
        " (B), and of the Hugging Face Trainer (H), that `dynmo-train pretrain` knows, and keys of torchtitan.",
        "[MIGRATION.md](MIGRATION.md) has the rules and whole",
        "commands; `dynmo-train explain-flags SCRIPT` reads a script or a file of torchtitan.",
        "",
        "A flag that has no effect is listed in one line at the start of a run. A refused flag ends the command with",
        "exit code 2 and the remedy of its row. Any other flag is an unknown option.",
        "",
        "| project | same | renamed | no effect | refused |",
        "|---|---|---|---|---|",
    )
    for project in (*MARKS, "torchtitan"):
        counts = [sum(row.status == each and project in row.projects for row in (*found, *titan)) for each in STATUSES]
        yield f"| {project} | {' | '.join(map(str, counts))} |"
    for status, (title, column) in STATUSES.items():
        yield from ("", f"## {title}", "", f"| flag | projects | {column} |", "|---|---|---|")
        for row in found:
            if row.status == status:
                marks = " ".join(MARKS[project] for project in row.projects)
                yield f"| `{row.flag}` | {marks} | {_cell(row.here)} |"
    yield from (
        "",
        "## torchtitan",
        "",
        "Releases 0.1 and 0.2 read TOML files. Their keys are also accepted as flags of torchtitan's command line, two"
        " dashes before table and key. In a file of `--config` they are errors that name our key.",
        "",
        "| key | status | here |",
        "|---|---|---|",
    )
    for row in titan:
        yield f"| `{row.flag}` | {row.status} | {_cell(row.here)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
