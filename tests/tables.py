"""A table of cheap rows is one case of pytest, which reports every row that fails."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

SHOWN = 5  # failures with their traceback; of the others the message gives the names
NAME_LIMIT = 80


def table(names: str | Sequence[str], rows: Iterable, ids: Sequence[str] | Callable[[Any], Any] | None = None):
    """Run a test for every row, in one case that fails once with all rows that failed.

    Takes the arguments of ``pytest.mark.parametrize``; several tables of one test give their product. Rows share the
    fixtures of the case, except that each has its own ``tmp_path``, ``monkeypatch`` and captured output. Use it for
    rows of milliseconds; a row that needs another process or other fixtures of its own is a case.
    """
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = [_values(row, len(columns)) for row in rows]
    labels = [_label(row, position, ids) for position, row in enumerate(values)]
    if not values:
        raise ValueError(f"the table of {', '.join(columns)} has no rows")

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in columns]

        @functools.wraps(test)
        def run_rows(**fixtures: Any) -> None:
            __tracebackhide__ = True
            failures, skips = [], []
            for position, (row, label) in enumerate(zip(values, labels, strict=True)):
                with pytest.MonkeyPatch.context() as monkeypatch:
                    of_row = _fixtures_of_row(fixtures, position, monkeypatch)
                    try:
                        test(**dict(zip(columns, row[0], strict=True)), **of_row)
                    except pytest.skip.Exception as skip:
                        skips.append(f"{label}: {skip.msg}")
                    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 whatever a row raises
                        failures.append((label, _text(error)))
            if failures:
                pytest.fail(_report(failures, len(values)), pytrace=False)
            if skips:
                pytest.skip(f"{len(skips)} of {len(values)} rows: {'; '.join(skips)}")

        run_rows.__signature__ = signature.replace(parameters=fixtures)
        return run_rows

    return decorate


def _values(row: Any, num_columns: int) -> tuple[Sequence, str | None]:
    """The values of a row and its name, if it has one (``pytest.param``)."""
    if isinstance(row, type(pytest.param())):
        if row.marks:
            raise ValueError(f"a row of a table has no marks: {row}")
        return row.values, row.id
    return ((row,) if num_columns == 1 else tuple(row)), None


def _label(row: tuple[Sequence, str | None], position: int, ids: Sequence[str] | Callable[[Any], Any] | None) -> str:
    values, name = row
    if name is not None:
        return name
    if ids is not None and not callable(ids):
        return str(ids[position])
    named = [ids(value) if ids is not None else None for value in values]
    return "-".join(_name(value) if own is None else str(own) for value, own in zip(values, named, strict=True))


def _name(value: Any) -> str:
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= NAME_LIMIT else f"{text[:NAME_LIMIT]}..."


def _fixtures_of_row(fixtures: dict[str, Any], position: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    of_row = dict(fixtures)
    if "tmp_path" in fixtures:
        of_row["tmp_path"] = fixtures["tmp_path"] / f"row{position}"
        of_row["tmp_path"].mkdir()
    if "monkeypatch" in fixtures:
        of_row["monkeypatch"] = monkeypatch
    for name in ("capsys", "capfd"):
        if name in fixtures:
            fixtures[name].readouterr()
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    return of_row


def _text(error: BaseException) -> str:
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)
    # The first frame is that of this module.
    below = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, below))


def _report(failures: list[tuple[str, str]], num_rows: int) -> str:
    parts = [f"{len(failures)} of {num_rows} rows failed"]
    parts += [f"row {label}:\n{text.rstrip()}" for label, text in failures[:SHOWN]]
    if others := [label for label, _ in failures[SHOWN:]]:
        parts.append("more rows that failed:\n" + "\n".join(others))
    return "\n\n".join(parts)
