"""Every step that rewrites rows changes the edited field only: integers of any size, repeated keys, escapes stay."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynmo_tools.config.settings import (
    AddIdSettings,
    DecontaminateSettings,
    DedupSettings,
    MergeSettings,
    RemoveDuplicatesSettings,
    ShuffleSettings,
    SplitSentencesSettings,
)
from dynmo_tools.filters.clean import CleanSettings
from dynmo_tools.filters.fix import FixSettings, FixTask
from dynmo_tools.io.json_edit import append_entry, replace_value
from dynmo_tools.io.jsonl import Row, exact_integer, parse_line, path_of, text_of
from dynmo_tools.runner.job import Execution, run_job
from dynmo_tools.runner.registry import steps
from dynmo_tools.runner.task_manifest import Job

SPACES = st.sampled_from(["", " ", "\t", " \r "])
NUMBERS = st.sampled_from(
    ["12345678901234567890123", "1e400", "-0", "1.10", "1E5", "-9223372036854775809", "9" * 5000, "0.1e-7", "NaN"]
)
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def quoted(text, style):
    """A JSON string in one of several spellings of the same text."""
    if style == "escaped":
        return '"' + "".join(f"\\u{ord(c):04X}" if ord(c) < 0x10000 else json.dumps(c)[1:-1] for c in text) + '"'
    return json.dumps(text, ensure_ascii=style == "ascii").replace("/", "\\/" if style == "ascii" else "/")


STYLES = st.sampled_from(["ascii", "plain", "escaped"])
STRINGS = st.builds(quoted, PLAIN_TEXT | st.sampled_from(['"', "\\", '{"a": [', "}", "],", "text"]), STYLES)
SCALARS = STRINGS | NUMBERS | st.sampled_from(["null", "true", "false"])
KEYS = st.builds(quoted, st.sampled_from(["a", "url2", "", "text2", 'q"', "é"]), STYLES)


def listed(values, space):
    return f"[{space}" + f"{space},{space}".join(values) + f"{space}]"


def table(entries, space):
    return f"{{{space}" + f"{space},{space}".join(f"{key}{space}:{space}{value}" for key, value in entries) + "}"


VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.builds(listed, st.lists(inner, max_size=3), SPACES)
        | st.builds(table, st.lists(st.tuples(KEYS, inner), max_size=3), SPACES)
    ),
    max_leaves=8,
)
SENTENCES = st.lists(
    st.sampled_from(["One  two.", "Typographic \u2019s.", "Three\n\n\nfour!", "Fünf ' sechs .", 'a/b \\ "c"']),
    min_size=1,
)


@st.composite
def rows(draw):
    """A row as a list of (key as written, value as written), the place of its text, its text, and its white space."""
    entries = draw(st.lists(st.tuples(KEYS, VALUES), max_size=4))
    text = " ".join(draw(SENTENCES))
    at = draw(st.integers(0, len(entries)))
    entries.insert(at, (quoted("text", draw(STYLES)), quoted(text, draw(STYLES))))
    if draw(st.booleans()):  # an earlier value of the same key, which is not read
        entries.insert(0, (quoted("text", draw(STYLES)), draw(VALUES)))
        at += 1
    return entries, at, text, draw(SPACES)


def encoded(row):
    entries, _, _, space = row
    return (space + table(entries, space) + space).encode()


def with_text(row, text):
    """The row with another text; where that is the text that it has, its spelling stays."""
    entries, at, before, space = row
    if text == before:
        return row
    value = json.dumps(text, ensure_ascii=False)
    return [*entries[:at], (entries[at][0], value), *entries[at + 1 :]], at, text, space


def appended(raw, key, value):
    end = raw.rindex(b"}")
    return raw[:end] + b', "' + key.encode() + b'": "' + value.encode() + b'"' + raw[end:]


def run(step, options, lines, folder):
    (folder / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    job = Job(
        step=step, inputs=(folder / "in.jsonl",), output=folder / "out.jsonl", work=folder / "work", settings=options
    )
    run_job(job, steps()[step].phases_of(), Execution(overwrite=True))
    return (folder / "out.jsonl").read_bytes().split(b"\n")[:-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "groups.json").write_text("")
    (folder / "task.json").write_text(json.dumps({"text": " ".join(f"word{n}" for n in range(20))}))
    return folder


def stripped_spaces(text):
    from dynmo_tools.filters.fix import repaired

    return repaired(text, [FixTask.GENERAL, FixTask.STORIES])


def sentence_lines(text):
    from dynmo_tools.tokenization.sentences import split_sentences

    return "\n".join(" ".join(sentence.split()) for sentence in split_sentences(text))


def repaired(text):
    from dynmo_tools.filters.clean import plain_punctuation, repair

    return plain_punctuation(repair(text))


EDITS = {
    "clean": (CleanSettings(language="", min_tokens=0, punctuation=True), repaired),
    "fix": (FixSettings(tasks=(FixTask.GENERAL, FixTask.STORIES)), stripped_spaces),
    "split-sentences": (SplitSentencesSettings(), sentence_lines),
    "merge": (MergeSettings(), str),
}
QUICK = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BATCHES = st.lists(rows(), min_size=5, max_size=30)


@pytest.mark.parametrize("step", EDITS)
@QUICK
@given(batch=BATCHES)
def test_edit_of_text_keeps_every_other_byte(step, folder, batch):
    options, edit = EDITS[step]
    found = run(step, options, [encoded(row) for row in batch], folder)
    assert found == [encoded(with_text(row, edit(row[2]))) for row in batch]


@QUICK
@given(batch=BATCHES)
def test_add_id_keeps_every_other_byte(folder, batch):
    lines = [encoded(row) for row in batch]
    found = run("add-id", AddIdSettings(id_prefix="x"), lines, folder)
    assert found == [appended(line, "adlr_id", f"x-{number:010d}") for number, line in enumerate(lines, 1)]
    again = run("add-id", AddIdSettings(id_prefix="longer", rewrite=True), found, folder)
    assert again == [appended(line, "adlr_id", f"longer-{number:010d}") for number, line in enumerate(lines, 1)]


@QUICK
@given(batch=BATCHES)
def test_decontaminate_keeps_every_other_byte(folder, batch):
    words = " ".join(f"word{n}" for n in range(20))
    before, after = "Before it. " * 40, "After it. " * 50
    long = [with_text(row, f"{before}{words}{after}") for row in batch]
    options = DecontaminateSettings(task=(f"t={folder / 'task.json'}:text",), key_threshold=100)
    found = run("decontaminate", options, [encoded(row) for row in [*long, *batch]], folder)
    expected, at = [], iter(found)
    for number, row in enumerate(long, 1):
        for part in range(2):
            raw = next(at)
            piece = json.loads(raw, parse_int=str)["text"]
            assert words not in piece
            expected.append(appended(encoded(with_text(row, piece)), "split_id", f"t-{number:010d}-{part:04d}"))
    for number, row in enumerate(batch, len(long) + 1):
        expected.append(appended(encoded(row), "split_id", f"t-{number:010d}-0000"))
    assert found == expected


@pytest.mark.parametrize("step", ["dedup", "remove-duplicates", "shuffle"])
@QUICK
@given(batch=BATCHES)
def test_steps_that_drop_rows_keep_the_bytes_of_others(step, folder, batch):
    options = {
        "dedup": DedupSettings(),
        "remove-duplicates": RemoveDuplicatesSettings(groups=folder / "groups.json"),
        "shuffle": ShuffleSettings(),
    }[step]
    lines = Counter(encoded(row) for row in batch)
    found = Counter(run(step, options, lines.elements(), folder))
    assert found <= lines
    assert step == "dedup" or found == lines


@settings(max_examples=40, deadline=None)
@given(row=rows(), text=PLAIN_TEXT)
@example(row=([('"text"', '"a"')], 0, "a", ""), text="b")
def test_replace_value_changes_the_last_of_repeated_keys(row, text):
    value = json.dumps(text, ensure_ascii=False).encode()
    raw = encoded(row)
    entries, at, _, space = row
    assert replace_value(raw, ("text",), value) == encoded(
        ([*entries[:at], (entries[at][0], value.decode()), *entries[at + 1 :]], at, text, space)
    )
    assert text_of(parse_line(replace_value(raw, ("text",), value)), "text") == text


@pytest.mark.parametrize(
    ("raw", "key", "expected"),
    [
        (b'{"a": {"b": "x", "c": 1e400}, "b": "y"}', "a.b", b'{"a": {"b": "N", "c": 1e400}, "b": "y"}'),
        (b'{"a.b": "x", "a": {"b": "y"}}', "a.b", b'{"a.b": "N", "a": {"b": "y"}}'),
        (b'{"a": {"b.c": "x", "b": {"c": "y"}}}', "a.b.c", b'{"a": {"b.c": "x", "b": {"c": "N"}}}'),
        (b'{"a": {"b": "1"}, "a": {"b": "2", "b": "3"}}', "a.b", b'{"a": {"b": "1"}, "a": {"b": "2", "b": "N"}}'),
        (b'{"\\u0061": "x"}', "a", b'{"\\u0061": "N"}'),
        (b' { "z" : [ "]" , {"a": "}"} ] , "a" : "x" } ', "a", b' { "z" : [ "]" , {"a": "}"} ] , "a" : "N" } '),
    ],
)
def test_replace_value_replaces_what_text_of_reads(raw, key, expected):
    value = parse_line(raw)
    assert replace_value(raw, path_of(value, key), b'"N"') == expected
    assert text_of(parse_line(expected), key) == "N"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"{}", b'{"k": 1}'),
        (b" { } ", b' {"k": 1 } '),
        (b'{"a": 2 }', b'{"a": 2, "k": 1 }'),
        (b'{"a": {}}', b'{"a": {}, "k": 1}'),
    ],
)
def test_append_entry_appends_after_the_last_entry(raw, expected):
    assert append_entry(raw, "k", b"1") == expected


def test_exact_integer_is_not_rounded():
    for raw, expected in (
        (b'{"id": 12345678901234567890123}', 12345678901234567890123),
        (b'{"id": 18446744073709551616, "x": NaN}', 1 << 64),
        (b'{"id": 1.5}', None),
        (b'{"id": true}', None),
        (b'{"id": ' + b"9" * 5000 + b"}", None),
    ):
        assert exact_integer(Row(1, 0, raw, parse_line(raw)), "id") == expected


def test_rows_with_crlf_keep_their_bytes(tmp_path):
    line = b'{"text": "a  b", "n": 1e400}\r'
    found = run("fix", FixSettings(tasks=(FixTask.GENERAL,)), [line], tmp_path)
    assert found == [b'{"text": "a b", "n": 1e400}\r']
