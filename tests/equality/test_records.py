"""What two commits' records have in common: normalized texts, differences by field, accepted keys, exit codes."""

from __future__ import annotations

import pytest

from tests.compare_commits import main
from tests.equality.records import Record, compare, differing_fields, normalized, read_accepted, read_record


def record(values, *, inputs="same", excluded=()):
    made = Record(area="plans", inputs=inputs)
    for key, value in values.items():
        made.add(key, value)
    for key in excluded:
        made.exclude(key, "measured")
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "saved /tmp/x/run at 2026-11-28T13:49:03Z by dynmo-train 0.2.0",
            "saved {folder}/run at {time} by dynmo-train {version}",
        ),
        ("process 123 listens on 127.0.0.1:40123", "process {pid} listens on 127.0.0.1:{port}"),
        ("W1128 14:27:08.198000 3794 torch/x.py:630] y", "W{time} torch/x.py:630] y"),
        ("step 42.24 ms, bubble 12.9%", "step 42.24 ms, bubble 12.9%"),
    ],
)  # fmt: skip
def test_what_differs_between_executions_is_a_word(text, expected):
    assert normalized(text, {"/tmp/x": "{folder}", "/tmp": "{work}"}) == expected


def test_measured_durations_and_rates_are_words_and_other_numbers_stay():
    text = "10 steps in 26 ms, 1,234 tokens/s, 315.9 MB of memory, iteration (ms): 56.4 | loss: 4.5, python3.11/site"
    assert normalized(text, {}, is_measured=True) == (
        "10 steps in {duration}, {rate}, {memory} of memory, iteration (ms): {duration} | loss: 4.5, python3.11/site"
    )


def test_differing_fields_are_named_to_the_line_of_a_text():
    old = {"stdout": "a\nb\n", "codes": [0, 1], "gone": 1}
    new = {"stdout": "a\nc\n", "codes": [0], "more": None}
    assert list(differing_fields(old, new)) == [
        (".stdout[1]", "b", "c"),
        (".codes.length", 2, 1),
        (".gone", 1, "(missing)"),
        (".more", "(missing)", None),
    ]


@pytest.mark.parametrize(("old", "new"), [(1, 1.0), (1, True), ("1", 1), ([], {}), (0.1, 0.1000000001), ({"a": 1}, {})])
def test_values_that_are_not_the_same_document_differ(old, new):
    assert compare(record({"key": old}), record({"key": new}), {}).differences == {"key": (old, new)}
    assert not compare(record({"key": old}), record({"key": old}), {}).differences


def test_missing_keys_and_other_inputs_differ():
    found = compare(record({"a": 1, "b": 2}), record({"b": 2, "c": 3}, inputs="others"), {})
    assert found.compared == 1
    assert found.differences == {"(inputs)": ("same", "others"), "a": (1, None), "c": (None, 3)}


def test_accepted_and_excluded_keys_are_counted(tmp_path):
    (tmp_path / "accepted").write_text("# a comment\n\nplans model *: the profile has another field\n")
    accepted = read_accepted(tmp_path / "accepted")
    old = record({"model 1": 1, "model 2": 1, "profile 1": 1}, excluded=["times"])
    found = compare(old, record({"model 1": 2, "model 2": 2, "profile 1": 2}), accepted)
    assert list(found.differences) == ["profile 1"]
    assert list(found.report()) == [
        "plans: 3 keys compared, 1 differ",
        "  not compared: 1 keys: measured",
        "  accepted: 2 keys: plans model *",
        "  profile 1: 1 fields differ",
        *("    .", "      old: 1", "      new: 2"),
    ]


def test_accepted_line_without_reason_is_refused(tmp_path):
    (tmp_path / "accepted").write_text("plans model 1\n")
    with pytest.raises(ValueError, match=r"line 1: must be 'AREA KEY: reason'"):
        read_accepted(tmp_path / "accepted")


def test_a_written_record_is_read_back(tmp_path):
    made = record({"a": {"text": "\ud800 \u2028"}, "b": [1.5, None]}, excluded=["c"])
    made.write(tmp_path)
    assert read_record(tmp_path / "plans.jsonl") == made


@pytest.mark.parametrize(("new", "code"), [({"a": 1}, 0), ({"a": 2}, 1)])
def test_compare_exits_with_1_where_something_differs(tmp_path, capsys, new, code):
    for name, values in (("old", {"a": 1}), ("new", new)):
        (tmp_path / name).mkdir()
        record(values).write(tmp_path / name)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == code
    assert f"plans: 1 keys compared, {code} differ" in capsys.readouterr().out


def test_wrong_use_exits_with_2(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert main(["no-such-commit", "HEAD", "--area", "help"]) == 2
    assert "must be a commit of this repository" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["HEAD", "HEAD", "--area", "nothing"])
    assert stop.value.code == 2
