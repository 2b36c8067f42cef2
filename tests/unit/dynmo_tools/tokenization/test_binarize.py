# ruff: noqa: RUF001 - punctuation of other scripts
from __future__ import annotations

import io
import random

import numpy as np
import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.tokenization.binarize import SequenceWriter, pack
from dynmo_tools.tokenization.sentences import split_sentences
from dynmo_tools.tokenization.tokenizers import Encoded, from_lists
from tests.tables import table


def packed(documents, eod, *, keep_empty=False):
    encoded = from_lists([sentence for document in documents for sentence in document])
    counts = np.asarray([len(document) for document in documents], dtype=np.int64)
    packed, left = pack(encoded, counts, eod, keep_empty=keep_empty)
    sequences = iter(np.split(packed.ids, np.cumsum(packed.lengths)[:-1]) if len(packed.lengths) else [])
    return [[next(sequences).tolist() for _ in range(count)] for count in left]


def classic(documents, eod):
    """The rule of the classic tool, in loops."""
    made = []
    for document in documents:
        filled = [list(sentence) for sentence in document if sentence]
        if filled:
            if eod is not None:
                filled[-1].append(eod)
            made.append(filled)
    return made


@pytest.mark.parametrize("eod", [None, 9])
def test_pack_matches_megatron(eod):
    rng = random.Random(1)
    for _ in range(200):
        documents = [
            [[rng.randrange(9) for _ in range(rng.randrange(3))] for _ in range(rng.randrange(4))]
            for _ in range(rng.randrange(6))
        ]
        assert packed(documents, eod) == classic(documents, eod)


def test_pack_with_keep_empty_keeps_empty_documents():
    assert packed([[[1]], [[]], []], 9, keep_empty=True) == [[[1, 9]], [], []]


@table(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith met Mr. Jones. They left.", ["Dr. Smith met Mr. Jones.", "They left."]),
        ("It costs 3.5 dollars. Cheap.", ["It costs 3.5 dollars.", "Cheap."]),
        ('He yelled "Go." Then he went.', ['He yelled "Go."', "Then he went."]),
        ("J. S. Bach wrote it. Yes.", ["J. S. Bach wrote it.", "Yes."]),
        ("See p. 5 of vol. 2. Done.", ["See p. 5 of vol. 2.", "Done."]),
        ("The U.S. economy grew. It did.", ["The U.S. economy grew.", "It did."]),
        ("Wait... what? no. yes.", ["Wait... what? no. yes."]),
        ("1. First item\n2. Second item", ["1. First item\n2. Second item"]),
        ("  padded.  Next. ", ["padded.", "Next."]),
        ("你好，世界！今天很好……我们走吧？！好。", ["你好，世界！", "今天很好……我们走吧？！", "好。"]),
        ("“走吧。”他说。真的?是的!Yahoo!ニュース", ["“走吧。”", "他说。", "真的?", "是的!Yahoo!ニュース"]),
        (
            "「行くよ。」と言った。３．５倍（注。）だ。終わり．次",
            ["「行くよ。」と言った。", "３．５倍（注。）だ。", "終わり．", "次"],
        ),
        ("هل أنت بخير؟ نعم، بخير. شكرا؟لا", ["هل أنت بخير؟", "نعم، بخير.", "شكرا؟", "لا"]),
        ("यह घर है। वह स्कूल है।", ["यह घर है।", "वह स्कूल है।"]),
        ("", []),
        (" \n ", []),
    ],
)
def test_split_sentences_follows_the_rules(text, sentences):
    assert split_sentences(text) == sentences


def test_split_sentences_with_keep_newlines_keeps_white_space():
    assert split_sentences("One.\n\nTwo.  Three.\n", keep_newlines=True) == ["One.\n\n", "Two.  ", "Three.\n"]


def test_split_sentences_loses_white_space_only():
    rng = random.Random(2)
    for _ in range(300):
        text = "".join(rng.choices("aB .!?\n\"')1。」あ", k=rng.randrange(80)))
        assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())
        assert "".join(split_sentences(text, keep_newlines=True)) == text.lstrip()


def test_writer_refuses_an_id_that_the_token_type_cannot_hold():
    class Parts:
        def part(self, name):
            return name

        def create(self, path):
            return io.BytesIO()

    writer = SequenceWriter(Parts(), 0, np.dtype(np.uint16))
    one = np.ones(1, dtype=np.int64)
    writer.write(Encoded(ids=np.array([65_535]), lengths=one), one)
    with pytest.raises(UsageError, match="65536, above the maximum of uint16"):
        writer.write(Encoded(ids=np.array([65_536]), lengths=one), one)
