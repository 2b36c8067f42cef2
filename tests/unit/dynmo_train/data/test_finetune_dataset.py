"""Samples of MNLI and RACE, as Megatron builds them."""

from __future__ import annotations

import json

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.data.finetune_dataset import (
    QUESTION_TOKENS,
    build_pairs,
    clean_text,
    data_name,
    join_pairs,
    pair_tokens,
    read_mnli,
    read_race,
)
from dynmo_train.data.tokenizer import TokenizerFiles, open_tokenizer
from dynmo_train.evaluation.finetune import EpochOrder
from dynmo_train.models.families.bert_tasks import NO_LABEL

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a", "b", "c", "q", "no", "."]) + "\n")
    named = TokenizerFiles(kind="BertWordPieceLowerCase", files={"vocab-lower.txt": tmp_path / "vocab.txt"})
    return open_tokenizer(named)


def tokens(first, second, length):
    return [row.tolist() for row in pair_tokens(first, second, length, cls=2, sep=3, pad=0)]


def test_pair_is_padded_or_truncated():
    assert tokens([7, 8], [9], 8) == [
        [2, 7, 8, 3, 9, 3, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
    ]
    assert tokens([7, 8], [9], 6)[0] == [2, 7, 8, 3, 9, 3]
    assert tokens([7, 8], [9, 9], 6) == [[2, 7, 8, 3, 9, 3], [0, 0, 0, 0, 1, 1], [1] * 6]
    assert tokens([7, 8, 7, 8], [9], 4) == [[2, 7, 8, 3], [0, 0, 0, 1], [1] * 4]


def test_clean_text_collapses_white_space():
    assert clean_text("a\tb  c . d\n. e") == "a b c. d. e"


def write_glue(path, rows, columns=12, header=None):
    header = header or [f"c{at}" for at in range(columns)]
    path.write_text("\n".join("\t".join(row) for row in [header, *rows]) + "\n")


def glue_row(first, second, label, columns=12):
    return ["7", *["x"] * 7, first, second, *["x"] * (columns - 11), label]


def test_read_mnli_by_position_by_name_and_without_labels(tmp_path):
    write_glue(tmp_path / "a.tsv", [glue_row('quote "b', "c", "neutral"), glue_row("a", "b", "entailment")])
    first, second = read_mnli(tmp_path / "a.tsv")
    assert (first.rows[0].first, first.rows[0].second, first.label, second.label) == ('quote "b', "c", 2, 1)
    names = ["index", "sentence1", "sentence2", "gold_label"]
    write_glue(tmp_path / "b.tsv", [["0", "a", "b", "contradiction"]], header=names)
    assert read_mnli(tmp_path / "b.tsv")[0].label == 0
    write_glue(tmp_path / "test.tsv", [[*["x"] * 8, "a", "b"]], columns=10)
    assert read_mnli(tmp_path / "test.tsv")[0].label == 0


def race_line(**changes):
    document = {
        "article": "a b",
        "questions": ["q _ ."],
        "options": [["a", "b", "c", "no"]],
        "answers": ["C"],
        "id": "1",
    }
    return json.dumps(document | changes)


def test_read_race_inserts_each_choice_into_the_question(tmp_path):
    (tmp_path / "2.txt").write_text(race_line(questions=["q"]))
    (tmp_path / "1.txt").write_text(race_line() + "\n\n")
    blank, question = read_race(tmp_path)
    assert [row.first for row in blank.rows] == ["q a .", "q b .", "q c .", "q no ."]
    assert [row.first for row in question.rows] == ["q a", "q b", "q c", "q no"]
    assert (blank.label, blank.rows[0].second) == (2, "a b")


def test_tensors_of_race_limit_the_question_and_pad_samples(tmp_path, tokenizer):
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "1.txt").write_text(race_line(questions=["q " * 200]))
    data = build_pairs("race", str(tmp_path / "race"), tokenizer, 140)
    tensors = data.tensors([0], 2)
    assert tensors["ids"].shape == (8, 140)
    assert tensors["labels"].tolist() == [2, NO_LABEL]
    # The question is truncated; the article follows.
    assert tensors["ids"][0, QUESTION_TOKENS + 1 :].tolist() == [3, 5, 6, 3, *[0] * 7]
    assert tensors["attention_mask"].sum().item() == 8 * (QUESTION_TOKENS + 5)
    assert len(join_pairs([data, data])) == 2


@pytest.mark.parametrize(
    ("task", "path", "name"),
    [
        ("mnli", "data/glue/MNLI/dev_matched.tsv", "dev-matched"),
        ("race", "/x/RACE/dev/middle/", "dev-middle"),
    ],
)
def test_data_name_equals_megatrons(task, path, name):
    assert data_name(task, path) == name


def test_epoch_order_has_every_sample_in_each_epoch():
    order = EpochOrder(samples=7, seed=3)
    drawn = order.sample_indices(0, 21)
    assert [sorted(drawn[at : at + 7]) for at in (0, 7, 14)] == [list(range(7))] * 3
    assert drawn[:7] != drawn[7:14]
    assert EpochOrder(samples=7, seed=3).sample_indices(5, 9) == drawn[5:9]


@pytest.mark.parametrize(
    ("reader", "text", "words"),
    [
        (read_mnli, "a\tb\n", "contains no pairs"),
        (read_mnli, "a\tb\nc\td\n", "x:2: has 2 columns"),
        (read_mnli, "h\n" + "\t".join(glue_row("a", "b", "maybe")), "x:2: the label must be one of"),
        (read_race, None, "must be a directory of RACE"),
        (read_race, "{", "1.txt:1: must be a JSON object"),
        (read_race, race_line(answers=["E"]), "the answer 'E'"),
        (read_race, race_line(options=[["a"]]), "has 1 options"),
        (read_race, race_line(answers=[]), "must be a JSON object"),
    ],
)
def test_invalid_data_is_refused_with_its_line(tmp_path, reader, text, words):
    if reader is read_mnli:
        (tmp_path / "x").write_text(text)
    elif text is not None:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "1.txt").write_text(text)
    with pytest.raises(UsageError, match=words):
        reader(tmp_path / "x")
