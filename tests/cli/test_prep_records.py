"""dynmo-prep: merge, add-id, fix, the three parts of deduplication and dedup, through the command line."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from dynmo_tools.dedup.shingles import jaccard

WORDS = [f"{a}{b}" for a in ("ba", "ke", "li", "mo", "nu") for b in ("rt", "n", "ss", "x")]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def family(seed, copies, changes):
    """A text and near copies of it."""
    rng = random.Random(seed)
    base = [f"{rng.choice(WORDS)}{rng.randrange(10_000)}" for _ in range(250)]
    made = [" ".join(base)]
    for _ in range(copies):
        copy = list(base)
        for _ in range(changes):
            copy[rng.randrange(len(copy))] = "other"
        made.append(" ".join(copy))
    return made


def corpus():
    texts = [*family(1, 2, 1), *family(2, 0, 0), *family(3, 1, 2), "short", "short"]
    return [{"url": f"u{n}", "text": text, "n": n} for n, text in enumerate(texts)]


def test_merge_terminates_lines_and_keeps_file_order(prep, tmp_path):
    (tmp_path / "b.json").write_text('{"a": 1}\n{"a":  2}')
    (tmp_path / "a.json").write_text('{"a": 3}\n\n')
    code, out, _ = prep("merge", tmp_path / "b.json", tmp_path / "*.json", "--output_file", tmp_path / "all.jsonl")
    assert code == 0
    assert (tmp_path / "all.jsonl").read_text() == '{"a": 1}\n{"a":  2}\n{"a": 3}\n'
    assert "3 documents in" in out


@pytest.mark.parametrize("workers", [1, 2])
def test_add_id_numbers_across_all_tasks(prep, tmp_path, workers):
    source = write(tmp_path / "in.jsonl", [{"text": f"é {n}", "k": None} for n in range(300)])
    common = ("add-id", source, "-o", tmp_path / "out.jsonl", "--id-prefix", "web", "--task-bytes", 2000)
    assert prep(*common, "--workers", workers)[0] == 0
    rows = read(tmp_path / "out.jsonl")
    assert [row["adlr_id"] for row in rows] == [f"web-{n:010d}" for n in range(1, 301)]
    assert [list(row) for row in rows[:1]] == [["text", "k", "adlr_id"]]


def test_add_id_without_rewrite_refuses_existing_ids(prep, tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b", "adlr_id": "x"}])
    code, _, err = prep("add-id", source, "-o", tmp_path / "out.jsonl", "--id-prefix", "p")
    assert (code, "--rewrite" in err) == (2, True)
    assert prep("add-id", source, "-o", tmp_path / "out.jsonl", "--id-prefix", "p", "--rewrite", "--overwrite")[0] == 0
    assert read(tmp_path / "out.jsonl")[1] == {"text": "b", "adlr_id": "p-0000000002"}


def test_fix_runs_all_tasks_and_saves_dropped_documents(prep, tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "x" * 600 + "  schÃ¶n"}, {"text": "short"}])
    code, out, _ = prep(
        "fix", source, "--output-path", tmp_path / "out.jsonl", "--tasks", "remove_512", "ftfy_fix_text",
        "general_cleaning", "--filtered", tmp_path / "dropped.jsonl.gz",
    )  # fmt: skip
    assert (code, "1 dropped (1 remove_512)" in out) == (0, True)
    assert read(tmp_path / "out.jsonl") == [{"text": "x" * 600 + " schön"}]
    import gzip

    assert json.loads(gzip.decompress((tmp_path / "dropped.jsonl.gz").read_bytes())) == {
        "text": "short",
        "drop_reason": "remove_512",
    }


def test_find_group_and_remove_match_dedup(prep, tmp_path):
    source = write(tmp_path / "in.jsonl", corpus())
    pairs, groups, left, at_once = (tmp_path / name for name in ("pairs", "groups", "left.jsonl", "once.jsonl"))
    code, out, _ = prep("find-duplicates", source, "-o", pairs)
    assert (code, "pairs 5" in out) == (0, True)
    assert [list(row) for row in read(pairs)] == [["u0"], ["u1"], ["u4"], ["u6"]]
    assert [list(other) for other in read(pairs)[0]["u0"]] == [["u1"], ["u2"]]
    assert all(
        0.9 < index <= 1 for row in read(pairs) for others in row.values() for o in others for index in o.values()
    )
    code, out, _ = prep("group-duplicates", pairs, "-o", groups, "--format", "json")
    assert json.loads(out)["largest_group"] == 3
    assert read(groups) == [{"0": ["u0", "u1", "u2"]}, {"1": ["u4", "u5"]}, {"2": ["u6", "u7"]}]
    dropped = ("--save-dropped", tmp_path / "dropped.jsonl")
    code, out, _ = prep("remove-duplicates", source, "-o", left, "--groups", groups, *dropped)
    assert (code, [row["n"] for row in read(left)]) == (0, [0, 3, 4, 6])
    assert [(row["n"], row["drop_reason"]) for row in read(dropped[1])] == [(n, "duplicate") for n in (1, 2, 5, 7)]
    dropped[1].unlink()
    assert prep("dedup", source, "-o", at_once, "--task-bytes", 2000, "--workers", 2, *dropped)[0] == 0
    assert at_once.read_bytes() == left.read_bytes()
    removed = [(row["n"], row["drop_reason"], row["duplicate_of"]) for row in read(tmp_path / "dropped.jsonl")]
    assert removed == [(1, "duplicate", "u0"), (2, "duplicate", "u0"), (5, "duplicate", "u4"), (7, "duplicate", "u6")]
    assert all(0.9 < row["jaccard"] <= 1 for row in read(tmp_path / "dropped.jsonl"))


def test_dedup_keeps_a_document_that_only_a_chain_connects(prep, tmp_path):
    words = [f"word{at * 7919 % 10007}" for at in range(800)]
    rows = [{"url": f"u{at}", "text": " ".join(words[at * 5 : at * 5 + 300])} for at in range(60)]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    dropped = tmp_path / "dropped.jsonl"
    assert prep("dedup", source, "-o", output, "--save-dropped", dropped)[0] == 0
    survivors = {row["url"]: row["text"] for row in read(output)}
    assert 8 < len(survivors) < 25
    assert len(survivors) + len(read(dropped)) == 60
    for row in read(dropped):
        assert jaccard(survivors[row["duplicate_of"]], row["text"], 5) == pytest.approx(row["jaccard"], abs=1e-6)
        assert row["jaccard"] >= 0.9
    for first, second in itertools.combinations(survivors.values(), 2):
        assert jaccard(first, second, 5) < 0.92  # some pairs near the threshold share no band
    code, out, _ = prep(
        "dedup", source, "-o", output, "--grouping", "connected", "--save-dropped", dropped, "--overwrite"
    )
    assert (code, "1 out" in out) == (0, True)
    assert {(row["duplicate_of"], row.get("jaccard")) for row in read(dropped)} == {("u0", None)}


def test_documents_without_unique_names_are_never_lost(prep, tmp_path):
    rows = corpus()
    for row in rows:
        row["url"] = "same"
    del rows[3]["url"], rows[2]["url"]
    source = write(tmp_path / "in.jsonl", rows)
    assert "repeated names 1" in prep("find-duplicates", source, "-o", tmp_path / "pairs")[1]
    prep("group-duplicates", tmp_path / "pairs", "-o", tmp_path / "groups")
    assert read(tmp_path / "groups")[0]["0"][0] == f"{source}@0"
    _, out, _ = prep("remove-duplicates", source, "-o", tmp_path / "left.jsonl", "--groups", tmp_path / "groups")
    assert [row["n"] for row in read(tmp_path / "left.jsonl")] == [0, 3, 4, 6]
    assert "without name 2" in out


def test_group_duplicates_applies_its_threshold(prep, tmp_path):
    write(tmp_path / "pairs", [{"a": [{"b": 0.95}, {"c": 0.6}]}, {"c": [{"d": 0.9}]}, {"b": [{"e": 0.91}]}])
    prep("group-duplicates", tmp_path / "pairs", "-o", tmp_path / "groups")
    assert read(tmp_path / "groups") == [{"0": ["a", "b", "e"]}, {"1": ["c", "d"]}]
    prep("group-duplicates", tmp_path / "pairs", "-o", tmp_path / "groups", "--threshold", "0.5", "--overwrite")
    assert read(tmp_path / "groups") == [{"0": ["a", "b", "c", "d", "e"]}]


def test_saved_fingerprints_deduplicate_across_runs(prep, tmp_path):
    rows = corpus()
    first, second = write(tmp_path / "1.jsonl", rows[:4]), write(tmp_path / "2.jsonl", rows[1:])
    prints, both = tmp_path / "prints", tmp_path / "both"
    assert prep("dedup", first, "-o", tmp_path / "a.jsonl", "--save-fingerprints", prints)[0] == 0
    code, out, _ = prep(
        "dedup", second, "-o", tmp_path / "b.jsonl", "--load-fingerprints", prints, "--save-fingerprints", both
    )
    assert (code, "earlier documents 4" in out) == (0, True)
    assert [row["n"] for row in read(tmp_path / "b.jsonl")] == [4, 6]
    assert json.loads((both / "header.json").read_text())["documents"] == 4 + len(rows) - 1
    code, _, err = prep("dedup", second, "-o", tmp_path / "c.jsonl", "--load-fingerprints", both, "--seed", 7)
    assert (code, "seed is 1234, but 7 in this run" in err) == (2, True)


def test_split_sentences_writes_one_per_line(prep, tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "One  two. Dr. X\ncame! ", "k": 1}])
    assert prep("split-sentences", source, "-o", tmp_path / "out.jsonl")[0] == 0
    assert read(tmp_path / "out.jsonl") == [{"text": "One two.\nDr. X came!", "k": 1}]


def test_blacklist_urls_reads_a_folder(prep, tmp_path):
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "1.txt").write_text("http://good.org/a\nhttp://youtube.com/b\n")
    (tmp_path / "urls" / "2.txt").write_text("http://good.org/a\nhttp://good.org/c.mp3\n")
    code, out, _ = prep("blacklist-urls", tmp_path / "urls", "-o", tmp_path / "kept.txt", "--format", "json")
    report = json.loads(out)
    assert (code, report["urls_in"], report["urls_out"]) == (0, 4, 1)
    assert report["dropped"] == {"domain": 1, "ending": 1, "short": 0, "malformed": 0, "duplicate": 1}


@pytest.mark.parametrize("workers", [1, 2])
def test_decontaminate_removes_task_questions(prep, tmp_path, workers):
    question = "who was the first person to walk along the river and past the old mill"
    fill = "A sentence of filling text without a meaning that has a certain length. " * 12
    rows = [{"text": fill + f"Now, {question}? " + fill, "id": n} for n in range(3)]
    rows += [{"text": fill, "id": 3}, {"text": question, "id": 4}]
    source = write(tmp_path / "in.jsonl", rows)
    write(tmp_path / "task.jsonl", [{"question": question + "?"}])
    code, out, _ = prep(
        "decontaminate", source, "-o", tmp_path / "out.jsonl", "--task", f"squad={tmp_path / 'task.jsonl'}",
        "--save-dictionary", tmp_path / "dictionary", "--workers", workers, "--task-bytes", 2000,
    )  # fmt: skip
    assert (code, "3 changed; 1 dropped (1 contaminated)" in out) == (0, True)
    made = read(tmp_path / "out.jsonl")
    assert [row["split_id"] for row in made] == [
        "squad-0000000001-0000", "squad-0000000001-0001", "squad-0000000002-0000", "squad-0000000002-0001",
        "squad-0000000003-0000", "squad-0000000003-0001", "squad-0000000004-0000",
    ]  # fmt: skip
    assert all(len(row["text"]) > 200 and "walk along" not in row["text"] for row in made)
    code, out, _ = prep(
        "decontaminate", source, "-o", tmp_path / "again.jsonl", "--load-dictionary", tmp_path / "dictionary",
        "--name", "squad",
    )  # fmt: skip
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    code, out, _ = prep(
        "decontaminate", source, "-o", tmp_path / "kept.jsonl", "--task", f"squad={tmp_path / 'task.jsonl'}",
        "--key-threshold", 3,
    )  # fmt: skip
    assert "common ngrams 1" in out
