"""dynmo-prep: the main job, its summary, resume, and the exit codes."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from dynmo_tools.formats.indexed import IndexedReader
from tests.tables import table

SENTENCES = [
    "The river runs past the old mill and under the bridge of stone.",
    "Nobody in the village remembers who planted the trees along the road.",
    "When the rain stops, the children come out to look for snails.",
    "A letter arrived in the morning, and it changed what they had planned.",
    "She reads every evening by the window until the light is gone.",
    "There are more questions in this book than anybody could answer.",
]


def documents(count, seed=0):
    rng = random.Random(seed)
    return [
        {
            "id": n,
            "text": " ".join(f"{rng.choice(SENTENCES)} ({rng.randrange(10**6)})" for _ in range(rng.randrange(10, 30))),
        }
        for n in range(count)
    ]


def write(path, rows):
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return path


def corpus(path, count=60):
    rows = documents(count)
    rows += [
        {"id": "copy", "text": rows[0]["text"] + " Indeed."},
        {"id": "short", "text": "Too short."},
        {"id": "german", "text": "Der Fluss fließt an der alten Mühle vorbei und unter der Brücke hindurch. " * 20},
        {"id": "broken", "text": "It&#39;s schÃ¶n. " + documents(1, seed=9)[0]["text"]},
    ]
    return write(path, rows)


def digests(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if (path.is_file() and path.suffix not in (".json", ".jsonl")) or path.name == "tokenizer.json"
    }


QUICK = ("--set", "train-tokenizer.vocab-size=400", "--set", "dedup.threshold=0.8")


def test_quickstart_recipe_writes_a_dataset(prep, tmp_path):
    corpus(tmp_path / "corpus.jsonl")
    code, out, err = prep("pipeline", "quickstart", "--work-dir", tmp_path, *QUICK)
    assert code == 0
    assert all(line.startswith("Processed ") for line in err.splitlines())
    summary = json.loads((tmp_path / "pipeline-summary.json").read_text())
    clean, dedup = summary["steps"][:2]
    assert clean["dropped"] == {"language": 1, "short": 1}
    assert clean["changed"] == 1
    assert dedup["dropped"] == {"duplicate": 1}
    assert (summary["documents_in"], summary["documents_out"]) == (64, 61)
    assert [step["name"] for step in summary["steps"]] == ["clean", "dedup", "train-tokenizer", "shuffle", "binarize"]
    reader = IndexedReader(tmp_path / "corpus_text_document")
    assert reader.index.num_documents == 61
    assert summary["tokens"] == reader.index.num_tokens
    assert summary["data_prefix"] == str(tmp_path / "corpus_text_document")
    assert all(int(reader[n][-1]) == 0 for n in range(len(reader)))  # <|endoftext|>
    assert "clean: 64 documents in" in out
    assert "2 dropped (1 language, 1 short)" in out


def test_dataset_tokens_decode_to_the_documents(prep, tmp_path):
    from tokenizers import Tokenizer

    rows = documents(60)
    write(tmp_path / "corpus.jsonl", rows)
    assert prep("pipeline", "quickstart", "--work-dir", tmp_path, *QUICK)[0] == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reader = IndexedReader(tmp_path / "corpus_text_document")
    decoded = {tokenizer.decode(reader[n][:-1].tolist()) for n in range(len(reader))}
    assert decoded == {row["text"] for row in rows}


def test_pipeline_repeats_a_changed_step_and_later_ones_only(prep, tmp_path):
    corpus(tmp_path / "corpus.jsonl")
    prep("pipeline", "quickstart", "--work-dir", tmp_path, *QUICK)
    before = digests(tmp_path)
    code, out, _ = prep("pipeline", "quickstart", "--work-dir", tmp_path, *QUICK)
    assert code == 0
    assert out.count("reused from an earlier run") == 5
    assert digests(tmp_path) == before
    code, out, err = prep("pipeline", "quickstart", "--work-dir", tmp_path, *QUICK, "--set", "shuffle.seed=5")
    assert code == 0
    assert out.count("reused from an earlier run") == 3
    assert "shuffle: settings or inputs changed" in err
    assert digests(tmp_path)["corpus_text_document.bin"] != before["corpus_text_document.bin"]


@pytest.mark.parametrize("workers", [2, 3])
def test_output_is_equal_for_any_number_of_workers(prep, tmp_path, workers):
    made = []
    for folder, count in ((tmp_path / "one", 1), (tmp_path / "many", workers)):
        folder.mkdir()
        corpus(folder / "corpus.jsonl")
        code, _, _ = prep(
            "pipeline", "quickstart", "--work-dir", folder, *QUICK, "--task-bytes", 20_000, "--workers", count
        )
        assert code == 0
        assert len(json.loads((folder / "01-clean.jsonl.zst.work" / "manifest.json").read_text())["tasks"]) > 3
        made.append(digests(folder))
    assert made[0] == made[1]


def test_too_many_rejects_exit_4(prep, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\nbad\n')
    code, _, err = prep("shuffle", source, "-o", tmp_path / "out.jsonl")
    assert code == 4
    assert "1 of 2 lines are invalid documents" in err
    assert not (tmp_path / "out.jsonl").exists()
    assert prep("shuffle", source, "-o", tmp_path / "out.jsonl", "--max-rejects", 0.5)[0] == 3
    # What the input is, from its first line.
    contents = {
        "To be,\nor not\n": "make it of plain text: jq",
        '[\n{"text": "a"},\n{}]\n': "one JSON array",
        '{\n  "text":\n  3}': "one JSON document over several lines",
        "WARC/1.0\r\n": "WARC",
        "<html>\n": "XML or HTML",
        "\x1f\x8b\x08": "name it .gz",
        "\xff\xfe{\0": "iconv -f UTF-16",
    }
    for content, remedy in contents.items():
        source.write_bytes(content.encode("latin-1"))
        _, _, err = prep("shuffle", source, "-o", tmp_path / "out.jsonl", "--overwrite")
        assert remedy in err, err
    source.write_text("To be,\nor not\n")
    vocabulary = ("--tokenizer-type", "WhitespaceVocab", "--vocab-file", tmp_path / "vocab.json")
    (tmp_path / "vocab.json").write_text('{"<unk>": 0}')
    assert "use --plain-text" in prep("binarize", source, "-o", tmp_path / "data", *vocabulary)[2]


def test_changed_settings_are_refused_without_overwrite(prep, tmp_path):
    source = write(tmp_path / "in.jsonl", documents(5))
    assert prep("shuffle", source, "-o", tmp_path / "out.jsonl")[0] == 0
    code, _, err = prep("shuffle", source, "-o", tmp_path / "out.jsonl", "--seed", 5)
    assert code == 2
    assert "--overwrite" in err
    assert prep("shuffle", source, "-o", tmp_path / "out.jsonl", "--seed", 5, "--overwrite")[0] == 0


@table(
    ("arguments", "message"),
    [
        (("shuffle", "none.jsonl", "-o", "out.jsonl"), "none.jsonl: no file has this name"),
        (("shuffle", "*.none", "-o", "out.jsonl"), "matches this pattern"),
        (("shuffle", "-o", "out.jsonl"), "name at least one input"),
        (("shuffle", "in.jsonl", "-o", "in.jsonl"), "is both input and output"),
        (("shuffle", ".", "-o", "out.jsonl"), "is a folder; name its files, for example './*.jsonl'"),
        (("clean", "a.warc.gz", "-o", "out.jsonl"), "extract its pages to JSON lines first"),
        (("clean", "s3://bucket/a.jsonl", "-o", "out.jsonl"), "aws s3 cp --recursive s3://bucket/a.jsonl"),
        (("clean", "hf://datasets/a/b", "-o", "out.jsonl"), "hf download a/b --repo-type dataset"),
        (("clean", "owner/data-set", "-o", "out.jsonl"), "hf download owner/data-set --repo-type dataset"),
        (("clean", "in.jsonl", "-o", "s3://bucket/out.jsonl"), "s3://bucket/out.jsonl: addresses cannot be written"),
        (
            ("binarize", "in.jsonl", "-o", "out", "--tokenizer", "Owner/Model-1.5"),
            "hf download Owner/Model-1.5 tokenizer",
        ),
        (("binarize", "in.jsonl", "-o", "out", "--tokenizer", "pieces"), "--tokenizer-type SentencePieceTokenizer"),
        (("clean", "in.jsonl", "-o", "out", "--tokenizer", "tekken"), "it has tekken.json; transformers writes it"),
        (("pipeline", "no-such"), "neither a recipe file"),
        (("pipeline", "quickstart", "--set", "a.b=1"), "'a' is not a step of the recipe"),
        (("pipeline", "quickstart", "--set", "clean.nonsense=1"), "unknown key 'nonsense'"),
        (("pipeline", "quickstart", "--set", "clean.min-tokens=x"), "must be of type int"),
        (("pipeline", "quickstart", "--set", "clean"), "must have the form step.key=value"),
        (("inspect", "none"), "none.idx: no such file"),
        (("binarize", "in.jsonl", "-o", "out", "--tokenizer", "none.json"), "none.json: cannot be read"),
        (("decontaminate", "in.jsonl", "-o", "out", "--task", "squad=none.jsonl"), "none.jsonl"),
        (("merge-indexed", "none", "-o", "out"), "none: no indexed dataset found"),
        (("dedup", "in.jsonl", "-o", "out.jsonl", "--num-bands", "7"), "--num-bands 7: must divide --num-seeds"),
    ],
)
def test_invalid_usage_exits_2_with_a_remedy(prep, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", documents(3))
    write(tmp_path / "corpus.jsonl", documents(3))
    (tmp_path / "a.warc.gz").touch()
    for name in ("pieces/tokenizer.model", "tekken/tekken.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    code, out, err = prep(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_inspect_and_verify_report_contents_and_damage(prep, tmp_path):
    corpus(tmp_path / "corpus.jsonl")
    prep("pipeline", "quickstart", "--work-dir", tmp_path, *QUICK)
    prefix = tmp_path / "corpus_text_document"
    code, out, _ = prep("inspect", prefix, "--format", "json")
    view = json.loads(out)
    assert (code, view["documents"], view["dtype"], view["form"]) == (0, 61, "uint16", "mmap")
    code, out, _ = prep("verify", prefix, "--tokenizer", tmp_path / "tokenizer.json")
    assert (code, "61 documents" in out) == (0, True)
    bin_file = Path(f"{prefix}.bin")
    bin_file.write_bytes(b"\xff\xff" + bin_file.read_bytes()[2:])
    code, _, err = prep("verify", prefix, "--tokenizer", tmp_path / "tokenizer.json")
    assert code == 2
    assert "bin.tokens[0]: is 65535; must be from 0 to 399" in err
    bin_file.write_bytes(bin_file.read_bytes()[:-2])
    assert prep("inspect", prefix)[0] == 2


def test_sample_corpus_reports_what_it_wrote(prep, tmp_path):
    code, out, _ = prep(
        "sample-corpus", "--output", tmp_path / "c.jsonl.zst", "--max-bytes", 200_000, "--format", "json"
    )
    report = json.loads(out)
    assert code == 0
    assert report["documents"] > 20
    assert 100_000 < report["bytes"] <= 200_000


def test_binarize_accepts_the_command_line_of_megatron(prep, tmp_path):
    """Several keys behind one flag, sentences, the cached form, and two workers."""
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "The": 2, "river": 3, "runs.": 4}))
    write(
        tmp_path / "in.json",
        [{"text": "The river runs. The river runs.", "title": "The river"}, {"text": "", "title": "Other"}] * 50,
    )
    common = ("binarize", "--input", tmp_path / "in.json", "--tokenizer-type", "WhitespaceVocab", "--vocab-file")
    code, out, _ = prep(
        *common, tmp_path / "vocab.json", "--json-keys", "text", "title", "--append-eod", "--split-sentences",
        "--dataset-impl", "cached", "--output-prefix", tmp_path / "data", "--workers", 2, "--task-bytes", 1000,
    )  # fmt: skip
    assert code == 0
    assert "100 documents in" in out
    assert "50 dropped (50 empty)" in out
    text, title = IndexedReader(tmp_path / "data_text_sentence"), IndexedReader(tmp_path / "data_title_sentence")
    assert text.index.form == "tnt"
    assert [text[n].tolist() for n in range(4)] == [[2, 3, 4], [2, 3, 4, 1]] * 2
    assert text.index.documents.tolist() == list(range(0, 101, 2))
    assert [title[n].tolist() for n in range(2)] == [[2, 3, 1], [0, 1]]
    code, out, _ = prep(
        "merge-indexed", tmp_path / "data_text_sentence", tmp_path / "data_title_sentence", "-o", tmp_path / "m"
    )
    assert (code, "2 datasets; 150 documents" in out) == (0, True)
    code, out, _ = prep(
        "convert-indexed", tmp_path / "m", "-o", tmp_path / "small", "--to", "mmap", "--dtype", "uint16"
    )
    assert (code, IndexedReader(tmp_path / "small").index.dtype.name) == (0, "uint16")


def test_binarize_with_plain_text_reads_lines_as_documents(prep, tmp_path):
    """Text cut into words beforehand, and a JSON vocabulary with <unk> and <|endoftext|>; unknown words are <unk>."""
    words = {"<unk>": 0, "<|endoftext|>": 1, "ein": 2, "Fluss": 3, "{": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "train.txt").write_bytes("ein  Fluss\n\n  { Fl\u00fcsse ein\r\n".encode() + b"bad \xff\nFluss")
    common = ("binarize", "--input", tmp_path / "train.txt", "--tokenizer-type", "WhitespaceVocab")
    common += ("--vocab-file", tmp_path / "vocab.json", "--output-prefix", tmp_path / "d", "--append-eod")
    code, out, _ = prep(*common, "--plain-text", "--max-rejects", 0.5)
    assert (code, "1 rejected (1 utf8)" in out) == (3, True), out
    data = IndexedReader(tmp_path / "d_text_document")
    assert [data[n].tolist() for n in range(3)] == [[2, 3, 1], [4, 0, 2, 1], [3, 1]]
    code, _, err = prep(*common, "--plain-text", "--json-keys", "body")
    assert (code, "a line of text has no keys" in err) == (2, True)


def test_binarize_with_an_unknown_eod_token_is_refused(prep, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0}))
    write(tmp_path / "in.json", documents(2))
    code, _, err = prep(
        "binarize", tmp_path / "in.json", "-o", tmp_path / "d", "--tokenizer-type", "WhitespaceVocab",
        "--vocab", tmp_path / "vocab.json", "--append-eod",
    )  # fmt: skip
    assert code == 2
    assert "select one of its tokens with --eod-token" in err
    assert not (tmp_path / "d_text_document.bin").exists()
