from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers as library

from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.settings import Engine, TokenizerModel, TokenizerType, TrainTokenizerSettings
from dynmo_tools.tokenization.definitions import gpt2_definition
from dynmo_tools.tokenization.tokenizers import (
    GigatokenTokenizer,
    HuggingFaceTokenizer,
    TokenizerFiles,
    load_tokenizer,
    same_ids,
)

PROSE = [
    "The river runs past the old mill and under the bridge of stone, where nobody waits.",
    "Nobody remembers who planted the trees along the road; they were always there.",
    "Grüße, naïve café — it's what they'd planned, isn't it?",
] * 4


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory, train_on):
    """vocab.json and merges.txt of a small byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    definition = json.loads(train_on(PROSE, TrainTokenizerSettings(vocab_size=400)))
    (folder / "vocab.json").write_text(json.dumps(definition["model"]["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in definition["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return TokenizerFiles(kind=TokenizerType.GPT2, vocab=folder / "vocab.json", merges=folder / "merges.txt")


def lists(encoded):
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])]


def test_gpt2_files_match_the_tokenizers_library(gpt2_files, varied_texts):
    reference = library.Tokenizer(library.models.BPE.from_file(str(gpt2_files.vocab), str(gpt2_files.merges)))
    reference.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = [reference.encode(text).ids for text in varied_texts]
    for engine in Engine:
        loaded = load_tokenizer(TokenizerFiles(**{**vars(gpt2_files), "engine": engine}))
        assert lists(loaded.encode_batch(varied_texts)) == expected


def test_gigatoken_returns_the_same_after_recreation(gpt2_files, varied_texts):
    fast = load_tokenizer(gpt2_files).fast
    assert isinstance(fast, GigatokenTokenizer)
    before = fast.encode_batch(varied_texts)
    fast.limit_bytes = 0
    assert same_ids(fast.encode_batch(varied_texts), before)
    assert fast.limit_bytes > 0
    assert same_ids(fast.encode_batch(varied_texts), before)


def test_trained_tokenizer_json_round_trips(tmp_path, train_on):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_on(PROSE, TrainTokenizerSettings(vocab_size=300)))
    loaded = load_tokenizer(TokenizerFiles(model=path))
    decode = library.Tokenizer.from_file(str(path)).decode
    assert [decode(ids) for ids in lists(loaded.encode_batch(PROSE))] == PROSE
    assert (loaded.num_ids, loaded.token_id(None)) == (300, 0)
    assert loaded.token_id("no such token") is None


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece_matches_bert(tmp_path, train_on, varied_texts, lower):
    model = TokenizerModel.WORDPIECE_LOWER if lower else TokenizerModel.WORDPIECE
    trained = json.loads(train_on(PROSE, TrainTokenizerSettings(model=model, vocab_size=200)))
    vocabulary = sorted(trained["model"]["vocab"], key=trained["model"]["vocab"].get)
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    kind = TokenizerType.BERT_LOWER if lower else TokenizerType.BERT_CASE
    loaded = load_tokenizer(TokenizerFiles(kind=kind, vocab=tmp_path / "vocab.txt"))
    from transformers import BertTokenizer

    theirs = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lower)
    for text in PROSE[:3]:
        assert lists(loaded.encode_batch([text]))[0] == theirs.encode(text, add_special_tokens=False)
    assert loaded.token_id(None) == vocabulary.index("[SEP]")


def test_whitespace_tokenizer_maps_unknown_words(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 70_000}))
    loaded = load_tokenizer(TokenizerFiles(kind=TokenizerType.WHITESPACE, vocab=path))
    assert lists(loaded.encode_batch([" a  b\nc ", ""])) == [[2, 70_000, 0], []]
    assert (loaded.num_ids, loaded.token_id(None)) == (70_001, 1)


@pytest.mark.data
def test_gpt2_on_real_text_is_equal_on_both_engines(shared_data):
    folder = shared_data / "tok"
    definition = gpt2_definition(folder / "gpt2-vocab.json", folder / "gpt2-merges.txt")
    texts = (shared_data / "wikitext-2" / "test.txt").read_text().split("\n\n")[:400]
    lines = (shared_data / "web" / "dclm_sample.jsonl").read_text().splitlines()
    texts += [json.loads(line)["text"] for line in lines]
    assert same_ids(
        GigatokenTokenizer(definition).encode_batch(texts), HuggingFaceTokenizer(definition).encode_batch(texts)
    )


@pytest.mark.data
@pytest.mark.parametrize("kind", [TokenizerType.SENTENCE_PIECE, TokenizerType.LLAMA])
def test_sentencepiece_models_match_the_library(shared_data, kind):
    import sentencepiece

    path = shared_data / "tok" / "sp_test_model.model"
    loaded = load_tokenizer(TokenizerFiles(kind=kind, model=path))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    begin = [theirs.bos_id()] if kind is TokenizerType.LLAMA else []
    assert lists(loaded.encode_batch(PROSE)) == [begin + theirs.encode(text) for text in PROSE]
    assert loaded.token_id(None) == theirs.eos_id()
    assert loaded.token_id("no such piece") is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"kind": TokenizerType.GPT2}, "GPT2BPETokenizer: requires --vocab-file"),
        ({"kind": TokenizerType.GPT2, "vocab": "v.json"}, "requires --merge-file"),
        ({"kind": TokenizerType.HUGGING_FACE}, "requires --tokenizer"),
        ({"kind": TokenizerType.LLAMA, "model": "none.model"}, r"none\.model: no such file"),
        ({"kind": TokenizerType.BERT_CASE, "vocab": "v.json"}, r"\[UNK\] is missing"),
        ({"kind": TokenizerType.WHITESPACE, "vocab": "v.json"}, "<unk> is missing"),
        ({"kind": TokenizerType.GPT2, "vocab": "v.json", "merges": "m.txt"}, "merge 0, 'x y', is not"),
        ({"kind": TokenizerType.HUGGING_FACE, "model": "v.json"}, r"not a tokenizer\.json"),
    ],
)
def test_load_tokenizer_with_unsuitable_files_names_them(tmp_path, monkeypatch, files, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.json").write_text('{"a": 0}')
    (tmp_path / "m.txt").write_text("#version: 0.2\nx y\n")
    from pathlib import Path

    made = TokenizerFiles(**{k: Path(v) if isinstance(v, str) and k != "kind" else v for k, v in files.items()})
    with pytest.raises(UsageError, match=message):
        load_tokenizer(made)
