"""What this package does with one flag of another project: it becomes other arguments, is ignored or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["becomes", "ignored", "refused"]


@dataclass(frozen=True, kw_only=True)
class CompatFlag:
    """A flag of another project.

    Attributes:
        kind: whether the flag ``becomes`` other arguments, is ``ignored`` or ``refused``.
        arguments: what the flag becomes; its values follow.
        reason: why the flag is ignored, or what to write instead.
        num_values: number of values; None: all words before the next flag.
        drop_values: whether ``arguments`` already contain the value.
        families: model families that accept the flag; empty: all.
        neutral: value of a flag that changes nothing; with it the flag is ignored.
        renamed_values: name of a value in the other project to its name here.
        value_arguments: value to further arguments that it becomes.
        by_value: value to what the flag is with it, where that differs.
    """

    kind: Kind
    arguments: tuple[str, ...] = ()
    reason: str = ""
    num_values: int | None = 0
    drop_values: bool = False
    families: tuple[str, ...] = ()
    neutral: str | None = None
    renamed_values: Mapping[str, str] = field(default_factory=dict)
    value_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_value: Mapping[str, CompatFlag] = field(default_factory=dict)


def becomes(
    *arguments: str,
    values: int | None = 0,
    drop_values: bool = False,
    reason: str = "",
    renamed_values: Mapping[str, str] | None = None,
    value_arguments: Mapping[str, tuple[str, ...]] | None = None,
    neutral: str | None = None,
    by_value: Mapping[str, CompatFlag] | None = None,
) -> CompatFlag:
    """A flag with a counterpart in this package.

    Args:
        *arguments: what the flag becomes; its values follow.
        values: number of values; None: all words before the next flag.
        drop_values: whether ``arguments`` already contain the value.
        reason: how the counterpart differs.
        renamed_values: name of a value in the other project to its name here.
        value_arguments: value to further arguments that it becomes.
        neutral: value that changes nothing; with it the flag is ignored.
        by_value: value to what the flag is with it, where that differs.
    """
    return CompatFlag(
        kind="becomes",
        arguments=arguments,
        num_values=values,
        drop_values=drop_values,
        reason=reason,
        renamed_values=renamed_values or {},
        value_arguments=value_arguments or {},
        neutral=neutral,
        by_value=by_value or {},
    )


def ignored(reason: str, values: int | None = 0, *families: str) -> CompatFlag:
    """A flag that is accepted for compatibility and ignored.

    Args:
        reason: why it is ignored.
        values: number of values; None: all words before the next flag.
        *families: model families that accept the flag; none: all.
    """
    return CompatFlag(kind="ignored", reason=reason, num_values=values, families=families)


def refused(
    remedy: str,
    values: int | None = 0,
    neutral: str | None = None,
    by_value: Mapping[str, CompatFlag] | None = None,
) -> CompatFlag:
    """A flag that is an error.

    Args:
        remedy: what to write instead.
        values: number of values; None: all words before the next flag.
        neutral: value that changes nothing; with it the flag is ignored.
        by_value: value to what the flag is with it, where that differs.
    """
    return CompatFlag(kind="refused", reason=remedy, num_values=values, neutral=neutral, by_value=by_value or {})
