"""Merges compared with those of the ``tokenizers`` library."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tokenizers as library

from dynmo_tools.tokenization import bpe_trainer


def ours(folder, words, alphabet, *, vocab_size, min_frequency, prefix="", max_pairs=bpe_trainer.MAX_PAIRS_IN_MEMORY):
    """Tokens, pairs and the merger that found them."""
    tokens = list(alphabet)
    ids = {token: number for number, token in enumerate(tokens)}
    symbols = [ids[(prefix if at else "") + letter] for word in words for at, letter in enumerate(word)]
    with bpe_trainer.WordSymbols(folder, len(words), len(symbols)) as word_symbols:
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        word_symbols.add(np.array(symbols, dtype=np.int32), lengths, np.array(list(words.values())))
        merger = bpe_trainer.PairMerger(word_symbols, tokens, prefix=prefix, max_pairs=max_pairs)
        pairs = merger.merges(vocab_size, min_frequency)
    return tokens, [(tokens[left], tokens[right]) for left, right in pairs], merger


def theirs(words, alphabet, *, vocab_size, min_frequency, prefix=""):
    """The same of the library's trainer."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        show_progress=False,
        initial_alphabet=[token for token in alphabet if len(token) == 1],
        continuing_subword_prefix=prefix,
    )
    tokenizer.train_from_iterator([" ".join([word] * count) for word, count in words.items()], trainer=trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(pair) for pair in model["merges"]]


def drawn(seed):
    """Few letters, so that tokens are often made in two ways and pairs of equal tokens overlap."""
    rng = random.Random(seed)
    alphabet = "abcdefgh"[: rng.randint(1, 8)]
    longest = rng.choice([4, 12, 30])
    words = {
        "".join(rng.choices(alphabet, k=rng.randint(1, longest))): rng.randint(1, rng.choice([1, 3, 20]))
        for _ in range(rng.randint(1, 60))
    }
    return words, alphabet, {"vocab_size": rng.randint(len(alphabet), 200), "min_frequency": rng.choice([0, 1, 2, 3])}


@pytest.mark.parametrize("max_pairs", [bpe_trainer.MAX_PAIRS_IN_MEMORY, 16, 2])
def test_merges_with_any_table_size_match_the_library(tmp_path, max_pairs):
    for seed in range(60):
        words, alphabet, options = drawn(seed)
        tokens, pairs, merger = ours(tmp_path, words, alphabet, max_pairs=max_pairs, **options)
        assert (tokens, pairs) == theirs(words, alphabet, **options), seed
        assert merger.num_candidates <= max_pairs


def test_merges_with_small_chunks_match_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(bpe_trainer, "CHUNK", 7)
    for seed in range(40):
        words, alphabet, options = drawn(seed)
        tokens, pairs, _ = ours(tmp_path, words, alphabet, **options)
        assert (tokens, pairs) == theirs(words, alphabet, **options), seed


def test_merges_with_a_prefix_match_the_library(tmp_path):
    rng = random.Random(1)
    # One word whose letters continue in alphabetical order: the library numbers them in the order of occurrence.
    word = "a" + "abcdef" + "".join(rng.choices("abcdef", k=400))
    alphabet = [*"abcdef", *("##" + letter for letter in "abcdef")]
    options = {"vocab_size": 150, "min_frequency": 2, "prefix": "##"}
    tokens, pairs, _ = ours(tmp_path, {word: 3}, alphabet, **options)
    assert (tokens, pairs) == theirs({word: 3}, alphabet, **options)
    assert any(left.startswith("##") and len(left + right) > 8 for left, right in pairs)


def test_merges_without_words_are_empty(tmp_path):
    assert ours(tmp_path, {}, "ab", vocab_size=10, min_frequency=1)[:2] == (["a", "b"], [])
