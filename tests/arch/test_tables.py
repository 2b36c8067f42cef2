"""A table reports every row that fails, and gives each row its own files and environment."""

from __future__ import annotations

import os

import pytest

from tests.tables import SHOWN, table


def failure_of(case, **fixtures):
    with pytest.raises(pytest.fail.Exception) as failure:
        case(**fixtures)
    return str(failure.value)


def test_every_failing_row_is_reported_with_its_name():
    words = []

    @table("word, number", [("a", 1), pytest.param("b", 2, id="second"), ("c", 3), ("d", 4)])
    def case(word, number):
        words.append(word)
        if number == 2:
            raise KeyError(word)
        assert number % 2, f"{number} is even"

    text = failure_of(case)
    assert words == ["a", "b", "c", "d"]
    assert text.startswith("2 of 4 rows failed")
    assert "row second:" in text
    assert "KeyError: 'b'" in text
    assert "row d-4:" in text
    assert "AssertionError: 4 is even" in text
    assert "row a-1" not in text


def test_missing_exception_fails_its_row():
    @table("text", ["1", "one", "2"], ids=["digit", "word", "other digit"])
    def case(text):
        with pytest.raises(ValueError, match="invalid literal"):
            int(text)

    text = failure_of(case)
    assert text.startswith("2 of 3 rows failed")
    assert "row digit:" in text
    assert "row other digit:" in text


def test_rows_beyond_the_limit_are_named():
    @table("number", range(SHOWN + 3), ids=lambda number: f"n{number}")
    def case(number):
        raise ValueError(number)

    text = failure_of(case)
    assert text.count("Traceback") == SHOWN
    assert text.endswith(f"n{SHOWN}\nn{SHOWN + 1}\nn{SHOWN + 2}")


def test_tables_of_one_test_are_a_product():
    @table("outer", "ab")
    @table("inner", [0, 1])
    def case(outer, inner):
        assert (outer, inner) != ("b", 1)

    text = failure_of(case)
    assert text.startswith("1 of 2 rows failed\n\nrow b:\n1 of 2 rows failed\n\nrow 1:")


@table("value", ["first", "second"])
def test_row_has_its_own_folder_environment_and_output(value, tmp_path, monkeypatch, capsys):
    assert list(tmp_path.iterdir()) == []
    assert "DYNMO_TABLE_ROW" not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("DYNMO_TABLE_ROW", value)
    print(value)  # noqa: T201
    if value == "first":
        return
    assert capsys.readouterr().out == "second\n"


def test_skipped_row_hides_no_failure():
    def case(number):
        if number == 0:
            pytest.skip("no such peer")
        assert number != 2

    with pytest.raises(pytest.skip.Exception, match="1 of 2 rows: 0: no such peer"):
        table("number", [0, 1])(case)()
    assert failure_of(table("number", [0, 1, 2])(case)).startswith("1 of 3 rows failed")


@pytest.mark.parametrize("rows", [[], [pytest.param(1, marks=pytest.mark.skip)]], ids=["empty", "marks"])
def test_table_that_could_hide_rows_is_refused(rows):
    with pytest.raises(ValueError, match=r"table of|has no marks"):
        table("number", rows)
