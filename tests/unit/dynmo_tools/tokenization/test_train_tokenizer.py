"""Trained tokenizers compared with those of the ``tokenizers`` library."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import tokenizers as library

from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.options import build
from dynmo_tools.config.settings import TokenizerModel, TrainTokenizerSettings
from dynmo_tools.tokenization import trainers

BERT = [pytest.param(TokenizerModel.WORDPIECE, id="cased"), pytest.param(TokenizerModel.WORDPIECE_LOWER, id="lower")]


@pytest.fixture(scope="module")
def texts(varied_texts):
    """The varied ones, and runs of equal characters, of which tokens are made in several ways."""
    rng = random.Random(0)
    runs = ["".join(rng.choice("= -#\n0") * rng.randint(1, 20) for _ in range(30)) for _ in range(60)]
    return [*varied_texts, *runs] * 2


def of_library(texts, *, vocab_size, least):
    """A file as the library's own trainer makes it of GPT-2's words."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=least,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer.to_str(pretty=True)


def test_byte_level_bpe_is_byte_identical_to_the_library(train_on, texts):
    for vocab_size, least in ((300, 2), (3000, 2), (700, 0)):
        settings = TrainTokenizerSettings(vocab_size=vocab_size, min_frequency=least)
        assert train_on(texts, settings) == of_library(texts, vocab_size=vocab_size, least=least)


@pytest.mark.parametrize("model", list(TokenizerModel))
def test_trained_file_does_not_depend_on_the_slices(train_on, texts, model):
    settings = TrainTokenizerSettings(model=model, vocab_size=600)
    facts: dict[str, object] = {}
    whole = train_on(texts, settings, facts=facts)
    cut: dict[str, object] = {}
    assert train_on(texts, settings, task_bytes=2000, facts=cut) == whole
    assert facts == cut
    assert facts["vocab_size"] == len(json.loads(whole)["model"]["vocab"]) == 600


def test_words_without_gigatoken_match_the_library(train_on, texts, monkeypatch):
    settings = TrainTokenizerSettings(vocab_size=500)
    with_it = train_on(texts, settings)
    real = trainers.import_or_extra

    def without(name):
        if name == "gigatoken":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(trainers, "import_or_extra", without)
    assert train_on(texts, settings) == with_it


@pytest.mark.parametrize("model", BERT)
def test_bert_words_of_pieces_match_those_of_the_text(texts, model):
    kind = trainers.make_trainer(TrainTokenizerSettings(model=model))
    split = kind.splitter()
    odd = ["a\u0301 \u00a0b\x1cc\td\r\ne\u3000f", "x\u2028y\x85z \ufffd\x00", "中文 字a字", "I\u0307 ΑΣ ΑΣ."]
    for text in [*texts, *odd]:
        found = Counter(word for piece in split(text) for word in kind.extract_words(piece))
        whole = kind.pre_tokenizer.pre_tokenize_str(kind.normalizer.normalize_str(text))
        assert found == Counter(word.encode() for word, _ in whole), text


@pytest.mark.parametrize("model", BERT)
def test_wordpiece_has_all_characters_before_merges(train_on, texts, model):
    trained = json.loads(train_on(texts, TrainTokenizerSettings(model=model, vocab_size=800)))
    vocabulary = sorted(trained["model"]["vocab"], key=trained["model"]["vocab"].get)
    lower = model is TokenizerModel.WORDPIECE_LOWER
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=800, min_frequency=2, special_tokens=vocabulary[:5], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    theirs = tokenizer.get_vocab()
    symbols = {token for token in theirs if len(token.removeprefix("##")) == 1}
    assert vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert set(vocabulary[5 : 5 + len(symbols)]) == symbols
    # The library numbers symbols as a hash table gives them, which ends ties between pairs in one way or another.
    assert len(vocabulary) == len(theirs) == 800
    assert "word" in vocabulary


def test_rare_words_above_max_word_bytes_are_excluded(train_on):
    rng = random.Random(2)
    texts = [f"the quick brown fox {''.join(rng.choices('qxyzjkvw', k=9))}" for _ in range(3000)]
    facts: dict[str, object] = {}
    trained = json.loads(train_on(texts, TrainTokenizerSettings(vocab_size=2000, max_word_bytes=5000), facts=facts))
    left = facts["excluded"]
    assert facts["distinct_words"] > left["rare words"] > 0.5 * facts["distinct_words"]
    assert left["of all words"].endswith(" %")
    assert 10 < float(left["of all words"][:-2]) < 20
    assert {"the", "Ġquick", "Ġbrown", "Ġfox"} <= set(trained["model"]["vocab"])
    all_of_it: dict[str, object] = {}
    train_on(texts, TrainTokenizerSettings(vocab_size=300), facts=all_of_it)
    assert "excluded" not in all_of_it


@pytest.mark.parametrize(("name", "value"), [("max_word_bytes", 0), ("max_word_bytes", 1 << 31), ("vocab_size", 256)])
def test_train_settings_out_of_range_are_refused(name, value):
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        build(TrainTokenizerSettings, {name: value})
