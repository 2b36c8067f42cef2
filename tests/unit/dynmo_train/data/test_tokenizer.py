"""Tokenizers from their own files: number of ids, encoding and decoding."""

from __future__ import annotations

import json

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.data.tokenizer import TokenizerFiles, count_pieces, load_tokenizer, open_tokenizer, read_vocab_size

WORDS = {"<unk>": 0, "<|endoftext|>": 1, "the": 2, "house": 3}


def values(**given):
    return {"tokenizer_model": None, "vocab_file": None, "merge_file": None} | given


@pytest.fixture
def gpt2(tmp_path):
    letters = ["Ġ", *"abcdefgh"]
    vocabulary = {letter: number for number, letter in enumerate([*letters, "ab", "Ġab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    return {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}


def test_gpt2_files_need_no_tokenizer_type(gpt2, tmp_path):
    assert read_vocab_size(values(**gpt2)) == 12
    tokenizer = open_tokenizer(TokenizerFiles.of(values(**gpt2)))
    assert tokenizer.encode("ab abc") == [9, 10, 3]
    assert tokenizer.decode([9, 10, 3]) == "ab abc"
    assert (tokenizer.vocab_size, tokenizer.eod) == (12, 11)
    assert load_tokenizer(tmp_path).encode("ab") == [9]


@pytest.mark.parametrize(("kind", "ids"), [("BertWordPieceLowerCase", [3, 4]), ("BertWordPieceCase", [0, 4])])
def test_word_piece_tokenizer_encodes_and_decodes(tmp_path, kind, ids):
    (tmp_path / "v.txt").write_text("[UNK]\n[SEP]\n[CLS]\nhello\nworld\n##s\n")
    given = values(vocab_file=str(tmp_path / "v.txt"), tokenizer_type=kind)
    assert read_vocab_size(given) == 6
    tokenizer = open_tokenizer(TokenizerFiles.of(given))
    assert tokenizer.encode("Hello world") == ids
    assert tokenizer.eod == 1


def test_whitespace_tokenizer_encodes_and_decodes(tmp_path):
    (tmp_path / "words.json").write_text(json.dumps(WORDS))
    given = values(vocab_file=str(tmp_path / "words.json"), tokenizer_type="WhitespaceVocab")
    assert read_vocab_size(given) == 4
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the  blue house") == [2, 0, 3]
    assert tokenizer.decode([2, 3, 1]) == "the house"
    assert tokenizer.eod == 1


def piece(text):
    inner = b"\x0a" + bytes([len(text)]) + text
    return b"\x0a" + bytes([len(inner)]) + inner


def test_count_pieces_reads_a_model_without_sentencepiece(tmp_path):
    model = piece(b"<unk>") + piece(b"<s>") + piece(b"a") + b"\x12\x02ab"
    assert count_pieces(model) == 3
    (tmp_path / "m.model").write_bytes(model)
    for kind in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        assert read_vocab_size(values(tokenizer_model=str(tmp_path / "m.model"), tokenizer_type=kind)) == 3
    for broken in (model[:-1], b"", b"\x08\x01", b"text, not a protobuf"):
        with pytest.raises(ValueError, match=r"more bytes than|does not end|has no pieces|wire type"):
            count_pieces(broken)


@pytest.mark.parametrize("family", ["bert", "ict", "t5"])
def test_vocabulary_alone_is_word_pieces_for_bert_families(tmp_path, family):
    (tmp_path / "v.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")
    assert read_vocab_size(values(vocab_file=str(tmp_path / "v.txt"), family=family)) == 6


def test_read_vocab_size_without_file_is_none():
    assert read_vocab_size(values()) is None
    assert read_vocab_size(values(tokenizer_type="NullTokenizer")) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocab_file": "v", "tokenizer_type": "GPT2BPETokenizer"}, "needs --merge-file"),
        ({"vocab_file": "missing", "merge_file": "m"}, "is not a JSON vocabulary"),
        ({"vocab_file": "v"}, "--vocab-file v: several tokenizer types read such a file; give --merge-file"),
        ({"tokenizer_model": "missing.json"}, "no tokenizer at missing.json"),
        ({"tokenizer_model": "missing", "tokenizer_type": "Llama2Tokenizer"}, "is not a SentencePiece model"),
    ],
)
def test_missing_or_invalid_files_are_refused(given, message):
    with pytest.raises(UsageError, match=message):
        read_vocab_size(values(**given))


@pytest.mark.parametrize("text", ["[1]", "{}", '{"a": "b"}', "nonsense"])
def test_invalid_json_vocabulary_is_refused(tmp_path, text):
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(UsageError, match="is not a JSON vocabulary"):
        read_vocab_size(values(vocab_file=str(tmp_path / "w.json"), tokenizer_type="WhitespaceVocab"))


def test_checkpoint_has_every_file_of_a_published_tokenizer(tmp_path):
    """Chat templates, and the SentencePiece model next to tokenizer.json, which an export to GGUF reads."""
    (tmp_path / "additional_chat_templates").mkdir()
    names = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"]
    names.append("additional_chat_templates/tool_use.jinja")
    for name in names:
        (tmp_path / name).write_text("{}")
    found = TokenizerFiles.of(values(tokenizer_model=str(tmp_path / "tokenizer.json")))
    assert found.stored_files == {name: tmp_path / name for name in names}
    assert TokenizerFiles.of_folder(tmp_path).kind == "HuggingFaceTokenizer"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "words.json").write_text("{}")
    words = TokenizerFiles.of(values(vocab_file=str(tmp_path / "words.json"), tokenizer_type="WhitespaceVocab"))
    # Another tokenizer's model would be taken for that of the run.
    assert "tokenizer.model" not in words.stored_files


def test_truncation_and_padding_of_a_tokenizer_json_are_not_applied(tmp_path):
    """``save_pretrained`` stores those of the last call."""
    library = pytest.importorskip("tokenizers")
    inner = library.Tokenizer(library.models.WordLevel(WORDS, unk_token="<unk>"))
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.enable_padding(length=2, pad_id=1, pad_token="<|endoftext|>")
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the house the house") == [2, 3, 2, 3]
    assert tokenizer.encode("the") == [2]
