"""Word counts in files compared with a plain Counter."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dynmo_tools.tokenization.word_counts import (
    BLOCK_WORDS,
    WordBlock,
    WordCountWriter,
    read_blocks,
    select_words,
    sum_blocks,
)

TABLE_WORDS = 50


def some_texts(seed=0, texts=200):
    """Lists of words: some of them often, many once, a few empty or with line ends and zeros in them."""
    rng = random.Random(seed)
    often = [b"", b" the", b"\n\n", b"\x00\xff", *(f" w{number}".encode() for number in range(40))]
    return [
        [*rng.choices(often, k=20), *(rng.randbytes(rng.randint(1, 9)).hex().encode() for _ in range(5))]
        for _ in range(texts)
    ]


def summed(folder, texts, num_shards, max_words):
    """A file of sums for each share."""
    with open(folder / "words", "wb") as target:
        writer = WordCountWriter(target, num_shards, lambda word: (word,), max_words=max_words)
        for words in texts:
            writer.add(words, sum(map(len, words)))
        writer.flush()
    paths = []
    for shard in range(num_shards):
        blocks = (block for at in writer.bounds for block in read_blocks(folder / "words", at[shard], at[shard + 1]))
        paths.append(folder / f"sums-{shard}")
        with open(paths[-1], "wb") as target:
            for block in sum_blocks(blocks, folder, max_words=max_words):
                block.write(target)
    return paths, writer


def counted(paths):
    return [
        pair
        for path in paths
        for block in read_blocks(path)
        for pair in zip(block.words(), block.counts.tolist(), strict=True)
    ]


@pytest.mark.parametrize("max_words", [TABLE_WORDS, 1 << 20])
@pytest.mark.parametrize("num_shards", [1, 5])
def test_word_counts_are_exact_for_any_table_size(tmp_path, num_shards, max_words):
    texts = some_texts()
    paths, writer = summed(tmp_path, texts, num_shards, max_words)
    found = counted(paths)
    assert len(found) == len(dict(found))
    assert dict(found) == Counter(word for words in texts for word in words)
    assert (len(writer.bounds) > 10) == (max_words == TABLE_WORDS)


def test_word_counts_split_pieces_into_words(tmp_path):
    with open(tmp_path / "words", "wb") as target:
        writer = WordCountWriter(target, 1, lambda piece: piece.encode().split(b"-"))
        writer.add(["a-b", "b", "a-b", "c-c"], 9)
        writer.flush()
    assert dict(counted([tmp_path / "words"])) == {b"a": 2, b"b": 3, b"c": 2}


def test_word_counts_flush_after_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_tools.tokenization.word_counts.MAX_BYTES_IN_MEMORY", 100)
    with open(tmp_path / "words", "wb") as target:
        writer = WordCountWriter(target, 1, lambda word: (word,))
        for _ in range(10):
            writer.add([b"a" * 60], 60)
    assert len(writer.bounds) == 5


def test_read_blocks_can_skip_the_texts(tmp_path):
    many = [(str(number).encode(), 1) for number in range(BLOCK_WORDS + 5)]
    with open(tmp_path / "sums", "wb") as target:
        for block in sum_blocks([WordBlock.of(*zip(*many, strict=True))], tmp_path):
            block.write(target)
    assert counted([tmp_path / "sums"]) == many
    plain = list(read_blocks(tmp_path / "sums", texts=False))
    assert [len(block.lengths) for block in plain] == [BLOCK_WORDS, 5]
    assert not any(len(block.text) for block in plain)


@pytest.mark.parametrize("max_bytes", [1, 100, 777, 5000])
def test_select_words_takes_the_most_frequent_and_counts_the_rest(tmp_path, max_bytes):
    paths, _ = summed(tmp_path, some_texts(), 3, 1 << 20)
    everything = dict(counted(paths))
    choice = select_words(paths, max_bytes)
    blocks = [block.only(choice.selected(block)) for path in paths for block in read_blocks(path)]
    selected = [word for block in blocks for word in block.words()]
    assert (len(selected), sum(map(len, selected))) == (choice.words, choice.size)
    assert choice.size <= max_bytes
    left = {word: count for word, count in everything.items() if word not in set(selected)}
    assert (choice.num_excluded_words, choice.excluded_occurrences) == (len(left), sum(left.values()))
    assert choice.occurrences == sum(everything.values())
    assert max(left.values()) <= min((everything[word] for word in selected if word), default=1000)
    if max_bytes == 5000:  # within the words that occur once, and nearly full
        assert choice.count == 1
        assert choice.size > 4900


def test_select_words_does_not_depend_on_the_shards(tmp_path):
    selected = []
    for num_shards in (1, 4):
        paths, _ = summed(tmp_path, some_texts(), num_shards, TABLE_WORDS)
        choice = select_words(paths, 3000)
        selected.append(
            {
                word
                for path in paths
                for block in read_blocks(path)
                for word in block.only(choice.selected(block)).words()
            }
        )
    assert selected[0] == selected[1]


def test_select_words_within_the_limit_selects_all(tmp_path):
    paths, _ = summed(tmp_path, some_texts(), 2, TABLE_WORDS)
    everything = dict(counted(paths))
    choice = select_words(paths, sum(map(len, everything)))
    assert (choice.words, choice.num_excluded_words, choice.excluded_occurrences) == (len(everything), 0, 0)
    assert all(choice.selected(block).all() for path in paths for block in read_blocks(path))
