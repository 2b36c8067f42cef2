"""dynmo-prep: each step with each kind of invalid input."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest
import zstandard

GOOD = "The river runs past the old mill and under the bridge of stone, where children look for snails. " * 14
LONG = 8000
LINES = [
    (None, b"\xef\xbb\xbf" + json.dumps({"url": "a", "text": GOOD}).encode()),
    ("json", b'{"text": '),
    ("json", b"[1]"),
    ("key", b'{"url": "c"}'),
    ("type", b'{"url": "d", "text": 5}'),
    ("type", b'{"url": "e", "text": null}'),
    ("utf8", b'{"url": "f", "text": "\xff' + GOOD.encode() + b'"}'),
    ("surrogate", json.dumps({"url": "g", "text": GOOD + "\ud800"}).encode()),
    (None, b""),
    (None, b" \t"),
    ("long", b'{"text": "' + b"x" * LONG + b'"}'),
    (None, json.dumps({"url": "h", "text": " \n"}).encode()),
    (None, json.dumps({"url": "i", "text": ""}).encode()),
    (None, json.dumps({"url": "k", "text": "abc"}).encode()),
    (None, json.dumps({"url": "j", "text": GOOD[1:]}).encode()),  # no newline behind it
]
STEPS = {
    "merge": (),
    "add-id": ("--id-prefix", "p"),
    "clean": ("--min-tokens", 4),
    "fix": ("--tasks", "ftfy_fix_text"),
    "find-duplicates": (),
    "remove-duplicates": ("--groups", "groups"),
    "dedup": (),
    "decontaminate": ("--task", "squad=task.jsonl"),
    "shuffle": (),
    "split-sentences": (),
    "train-tokenizer": ("--vocab-size", 300),
    "binarize": ("--tokenizer-type", "WhitespaceVocab", "--vocab-file", "words.json"),
}
WHATEVER_KEY = ("merge", "add-id", "shuffle", "remove-duplicates")
WRITES_EMPTY = {
    "merge": 2,
    "add-id": 2,
    "shuffle": 2,
    "remove-duplicates": 2,
    "fix": 2,
    "split-sentences": 2,
    "dedup": 2,
}


@pytest.fixture
def prep(prep, monkeypatch, tmp_path):
    """Run the command in this process, in a folder with what the steps need: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text("".join(json.dumps({"text": f"{GOOD}{n}"}) + "\n" for n in range(3)))
    (tmp_path / "dirty.jsonl").write_bytes(b"\n".join(line for _, line in LINES))
    (tmp_path / "groups").write_text('{"0": ["a", "none"]}\n')
    (tmp_path / "task.jsonl").write_text('{"question": "who was the first person to walk past the mill alone"}\n')
    words = dict.fromkeys([*GOOD.split(), "abc", "0", "1", "2", "\ufffdThe", "<unk>"])
    (tmp_path / "words.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    return prep


def rejected(tmp_path):
    parts = sorted((tmp_path / "out.work" / "rejects").glob("*"))
    return [json.loads(line) for part in parts for line in part.read_bytes().splitlines()]


@pytest.mark.parametrize("step", STEPS)
def test_invalid_lines_are_rejected_with_location_and_reason(prep, tmp_path, step):
    """Two files with several tasks each: lines are numbered within their file."""
    code, out, err = prep(
        step, *STEPS[step], "--input", "good.jsonl", "--input", "dirty.jsonl", "-o", "out", "--task-bytes", 3000,
        "--max-line-bytes", LONG, "--max-rejects", 1, "--format", "json",
    )  # fmt: skip
    assert code == 3
    assert "Processed 16 documents (" in err
    unseen = ("key", "type") if step in WHATEVER_KEY else ("surrogate",) if step in ("clean", "fix") else ()
    expected, offset = [], 0
    for number, (reason, line) in enumerate(LINES, 1):
        if reason and reason not in unseen:
            expected.append(("dirty.jsonl", number, offset, reason))
        offset += len(line) + 1
    found = rejected(tmp_path)
    assert [(row["file"], row["line"], row["offset"], row["reason"]) for row in found] == expected
    assert all(len(row["excerpt"]) <= 200 for row in found)
    report = json.loads(out)
    assert (report["documents_in"], report["blank_lines"], report["lines"]) == (16, 2, 18)
    assert sum(report["rejected"].values()) == len(expected)
    if step != "decontaminate":  # which writes several pieces of a document
        assert report["documents_out"] + sum(report["dropped"].values()) == 16 - len(expected)
    assert report["dropped"].get("empty", 0) == {"clean": 2, "binarize": 2}.get(step, 0)
    if step in WRITES_EMPTY and step != "dedup":
        rows = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
        assert sum(not row.get("text", "x" if step in WHATEVER_KEY else "").__str__().strip() for row in rows) == 2


@pytest.mark.parametrize("step", ["merge", "clean", "binarize"])
def test_invalid_utf8_is_repaired_with_utf8_replace(prep, tmp_path, step):
    (tmp_path / "dirty.jsonl").write_bytes(LINES[6][1])
    code, out, _ = prep(
        step, *STEPS[step], "dirty.jsonl", "-o", "out", "--utf8", "replace", "--format", "json", "--max-rejects", 1
    )
    assert (code, json.loads(out)["documents_out"]) == (0, 1)
    if step != "binarize":
        assert json.loads((tmp_path / "out").read_bytes().decode())["text"].startswith("\ufffdThe river")


def compressed(ending, payload):
    return {
        ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstandard.compress,
    }[ending](payload)  # fmt: skip


def parquet(payload):
    import io

    import pyarrow
    import pyarrow.parquet

    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in payload.splitlines()]), target)
    return target.getvalue()


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst", ".parquet"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_damaged_file_fails_its_task_without_output(prep, tmp_path, ending, damage):
    payload = b"".join(json.dumps({"text": f"{n} {GOOD}"}).encode() + b"\n" for n in range(50))
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
        whole = parquet(payload)
    else:
        whole = compressed(ending, payload)
    (tmp_path / f"in{ending}").write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"what is this" * 40)
    code, out, err = prep("merge", f"in{ending}", "-o", "out")
    assert (code, out, (tmp_path / "out").exists()) == (1, "", False)
    assert f"in{ending}: " in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("**/*.tmp-*"))
    (tmp_path / f"in{ending}").write_bytes(whole)
    assert prep("merge", f"in{ending}", "-o", "out", "--overwrite")[0] == 0


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("count", [1, 20, 3 << 20])
def test_bytes_after_a_compressed_stream_are_named(prep, tmp_path, count, ending):
    whole = compressed(ending, b'{"text": "one"}\n') + compressed(ending, b'{"text": "two"}\n')
    (tmp_path / f"in{ending}").write_bytes(whole + b"x" * count)
    code, _, err = prep("merge", f"in{ending}", "-o", "out")
    assert (code, (tmp_path / "out").exists()) == (1, False)
    assert f"the compressed stream is complete, but {count:,} bytes after it, from byte {len(whole)}, are not of" in err
    (tmp_path / f"in{ending}").write_bytes(whole[:-4])
    assert "truncated" in prep("merge", f"in{ending}", "-o", "out", "--overwrite")[2]


def test_bytes_of_parquet_are_text_or_base64(prep, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    columns = {"text": [b"caf\xc3\xa9", b"b\xff"], "more": [{"raw": [b"\xff\0"]}, None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    code, out, _ = prep("split-sentences", "in.parquet", "-o", "out", "--max-rejects", 0.5)
    assert (code, "1 rejected (1 utf8)" in out) == (3, True)
    assert json.loads((tmp_path / "out").read_text()) == {"text": "café", "more": {"raw": ["/wA="]}}
    assert prep("split-sentences", "in.parquet", "-o", "all", "--utf8", "replace")[0] == 0
    assert json.loads((tmp_path / "all").read_text().splitlines()[1])["text"] == "b\ufffd"


def test_parquet_columns_above_the_depth_limit_fail_the_step(prep, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    kind, value = pyarrow.string(), "x"
    for _ in range(100):
        kind, value = pyarrow.list_(kind), [value]
    columns = {"text": pyarrow.array(["words"]), "deep": pyarrow.array([value], type=kind)}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    code, _, err = prep("split-sentences", "in.parquet", "-o", "out")
    assert code == 1
    assert "in.parquet: damaged, or not a parquet file, after row 0: Parquet schema too deeply nested" in err
    assert "Traceback" not in err


def test_parquet_row_without_text_is_rejected(prep, tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "in.parquet").write_bytes(parquet(b'{"text": "good"}\n{"text": null}\n'))
    assert prep("split-sentences", "in.parquet", "-o", "out", "--max-rejects", 1)[0] == 3
    assert [(row["line"], row["reason"]) for row in rejected(tmp_path)] == [(2, "type")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "good.jsonl", "-o", "good.jsonl"),
        ("merge", "*.jsonl", "-o", "dirty.jsonl"),
        ("clean", "good.jsonl", "-o", "out", "--save-dropped", "out"),
        ("clean", "good.jsonl", "-o", "out", "--save-dropped", "good.jsonl"),
        ("fix", "good.jsonl", "-o", "out", "--tasks", "gutenberg", "--filtered", "out"),
        ("dedup", "good.jsonl", "-o", "out", "--load-fingerprints", "prints", "--save-fingerprints", "prints"),
        ("remove-duplicates", "good.jsonl", "-o", "groups", "--groups", "groups"),
        ("decontaminate", "good.jsonl", "-o", "out", "--task", "squad=task.jsonl", "--save-dictionary", "task.jsonl"),
        ("group-duplicates", "groups", "-o", "groups"),
        ("blacklist-urls", "groups", "-o", "groups"),
        ("blacklist-urls", "groups", "-o", "out", "--save-dropped", "out"),
        ("fetch-urls", "groups", "-o", "groups"),
    ],
)
def test_output_that_is_an_input_is_refused_before_writing(prep, tmp_path, arguments):
    prints = ("dedup", "good.jsonl", "-o", "once", "--save-fingerprints", "prints")
    if "prints" in arguments:
        assert prep(*prints)[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = prep(*arguments)
    assert (code, out) == (2, "")
    assert len(err) > 20
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "out.work").exists()


def test_decontaminate_with_a_changed_task_file_is_not_resumed(prep, tmp_path):
    command = ("decontaminate", "good.jsonl", "-o", "out", "--task", "squad=task.jsonl")
    assert prep(*command)[0] == 0
    (tmp_path / "task.jsonl").write_text('{"question": "another question of eight words or more, is it not"}\n')
    assert prep(*command)[0] == 2


@pytest.mark.parametrize("step", STEPS)
def test_row_above_the_depth_limit_is_rejected(prep, tmp_path, step):
    deep = b'{"url": "deep", "text": "' + GOOD.encode() + b'", "deep": ' + b"[" * 900 + b"]" * 900 + b"}\n"
    (tmp_path / "deep.jsonl").write_bytes((tmp_path / "good.jsonl").read_bytes() + deep)
    code, out, err = prep(
        step, *STEPS[step], "--input", "deep.jsonl", "-o", "out", "--format", "json", "--max-rejects", 1
    )
    assert (code, "Traceback" in err) == (3, False)
    assert json.loads(out)["rejected"] == {"json": 1}
