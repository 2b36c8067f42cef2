"""Definitions from vocabulary files, without an engine."""

from __future__ import annotations

import json

import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.tokenization.definitions import (
    built_in_gpt2,
    characters_of_bytes,
    gpt2_definition,
    read_definition,
)


def test_characters_of_bytes_are_distinct_and_printable_ones_stay():
    characters = characters_of_bytes()
    assert len(set(characters)) == 256
    assert not any(character.isspace() for character in characters)
    assert all(characters[ord(sign)] == sign for sign in "!Az~¡ÿ")


def test_gpt2_files_of_the_built_in_tokenizer_give_its_definition(tmp_path):
    built_in = built_in_gpt2()
    merges = json.loads(built_in.text)["model"]["merges"]
    (tmp_path / "vocab.json").write_text(json.dumps(built_in.ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    read = gpt2_definition(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert (read.ids, read.text) == (built_in.ids, built_in.text)
    assert (len(merges), read.num_ids, read.token_id(None)) == (50_000, 50_257, 50_256)


def test_read_definition_numbers_unigram_pieces_and_added_tokens(tmp_path):
    path = tmp_path / "tokenizer.json"
    added = [{"id": 7, "content": "<|endoftext|>"}]
    path.write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}, "added_tokens": added}))
    read = read_definition(path)
    assert (read.ids, read.num_ids) == ({"<unk>": 0, "a": 1, "<|endoftext|>": 7}, 8)
    assert read.added == ("<|endoftext|>",)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"model": {}}',
        "{",
        '{"model": {"vocab": 3}}',
        '{"model": {"vocab": [3]}}',
        '{"model": {"vocab": {"a": "b"}}}',
    ],
)
def test_read_definition_of_another_document_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match=r"tokenizer\.json: not a tokenizer\.json"):
        read_definition(tmp_path / "tokenizer.json")
