"""gigatoken runs real SentencePiece models: the same ids as sentencepiece, and no silent fallback."""

from __future__ import annotations

import io
import json
import random

import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.settings import Engine, TokenizerType
from dynmo_tools.tokenization import tokenizers
from dynmo_tools.tokenization.definitions import characters_of_bytes
from dynmo_tools.tokenization.tokenizers import (
    PROBES,
    FastSentencePieceTokenizer,
    HuggingFaceTokenizer,
    RoutedTokenizer,
    TokenizerFiles,
    load_tokenizer,
    piece_kinds,
    same_ids,
)

ATOMS = ["a", "b ", "  ", "\n", "é", "<s>", "</s>", "<unk>", "<mask>", "[INST]", "hello world", "12", "<", "s>", "日本"]
ATOMS += [
    "\t",
    "x<y",
    "  <mask>",
    "\uff1cs\uff1e",
    "\ufb01",
    "A",
    "\u2581",
    "\u2581\u2581",
    "<0x0A>",
    "\x00",
    "The cat sat",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """SentencePiece models in Llama's form, one of them with user-defined pieces, and a unigram one."""
    library = pytest.importorskip("sentencepiece", reason="the extra 'prep' is not installed")
    rng = random.Random(1)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "hello", "world", "12", "345", "é", "-", "dogs", "ran"]
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(400)]
    folder = tmp_path_factory.mktemp("models")
    common = {
        "vocab_size": 350,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
        "hard_vocab_limit": False,
    }
    for name, more in {
        "llama": {"model_type": "bpe"},
        "defined": {
            "model_type": "bpe",
            "user_defined_symbols": ["<mask>", "[INST]", "  "],
            "control_symbols": ["<c>"],
        },
        "unigram": {"model_type": "unigram"},
    }.items():
        target = io.BytesIO()
        library.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=target, **common, **more)
        (folder / f"{name}.model").write_bytes(target.getvalue())
    return folder


def load(path, engine, kind=TokenizerType.LLAMA):
    return load_tokenizer(TokenizerFiles(kind=kind, model=path, engine=engine))


@pytest.mark.parametrize("kind", [TokenizerType.LLAMA, TokenizerType.SENTENCE_PIECE])
@pytest.mark.parametrize("name", ["llama", "defined"])
def test_gigatoken_with_llama_models_returns_the_same_ids(models, name, kind):
    path = models / f"{name}.model"
    fast, exact = load(path, Engine.GIGATOKEN, kind), load(path, Engine.TOKENIZERS, kind)
    assert isinstance(fast, RoutedTokenizer)
    assert isinstance(load(path, Engine.AUTO, kind), RoutedTokenizer)
    rng = random.Random(2)
    texts = ["".join(rng.choices(ATOMS, k=rng.randrange(7))) for _ in range(3000)]
    for batch in (texts, texts[:1], [], list(PROBES)):
        assert same_ids(fast.encode_batch(batch), exact.encode_batch(batch))
    assert (fast.num_ids, fast.token_id(None), fast.vocabulary()) == (
        exact.num_ids,
        exact.token_id(None),
        exact.vocabulary(),
    )


def test_only_texts_with_special_strings_use_sentencepiece(models, monkeypatch):
    fast, exact = [], []
    tokenizer = load(models / "llama.model", Engine.GIGATOKEN)
    inner, reference = tokenizer.fast.encode_batch, tokenizer.exact.encode_batch
    monkeypatch.setattr(tokenizer.fast, "encode_batch", lambda texts: fast.extend(texts) or inner(texts))
    monkeypatch.setattr(tokenizer.exact, "encode_batch", lambda texts: exact.extend(texts) or reference(texts))
    tokenizer.encode_batch(["one < two", "an </s> here", "[INST]", "<s>"])
    assert (fast, exact) == (["one < two", "[INST]"], ["an </s> here", "<s>"])


def test_piece_kinds_are_read_from_the_model(models):
    kinds = dict(piece_kinds((models / "defined.model").read_bytes()))
    assert [kinds[piece] for piece in ("<unk>", "<s>", "<c>", "<mask>", "  ", "<0x0A>", "\u2581the")] == [
        *(2, 3, 3, 4, 4, 6, 1)
    ]


@pytest.mark.parametrize("kind", [TokenizerType.LLAMA, TokenizerType.SENTENCE_PIECE])
def test_gigatoken_is_refused_if_it_cannot_run_a_model(models, monkeypatch, kind):
    with pytest.raises(UsageError, match=r"gigatoken cannot run it .*use --engine tokenizers"):
        load(models / "unigram.model", Engine.GIGATOKEN, kind)
    original = FastSentencePieceTokenizer.encode_batch
    monkeypatch.setattr(
        FastSentencePieceTokenizer, "encode_batch", lambda self, texts: original(self, [text + "x" for text in texts])
    )
    with pytest.raises(UsageError, match="it returns other ids"):
        load(models / "llama.model", Engine.GIGATOKEN, kind)
    assert not isinstance(load(models / "llama.model", Engine.AUTO, kind), RoutedTokenizer)


@pytest.mark.parametrize("kind", [TokenizerType.BERT_LOWER, TokenizerType.BERT_CASE, TokenizerType.WHITESPACE])
def test_gigatoken_is_refused_for_tokenizers_that_are_not_bpe(tmp_path, kind):
    (tmp_path / "vocab").write_text("[UNK]\n" if kind is not TokenizerType.WHITESPACE else '{"<unk>": 0}')
    with pytest.raises(UsageError, match="gigatoken: runs BPE only"):
        load_tokenizer(TokenizerFiles(kind=kind, vocab=tmp_path / "vocab", engine=Engine.GIGATOKEN))


def test_added_tokens_that_gigatoken_reads_differently_are_routed(tmp_path):
    library = pytest.importorskip("tokenizers", reason="the extra 'prep' is not installed")
    alphabet = sorted(characters_of_bytes())
    made = library.Tokenizer(library.models.BPE({"<m>": 0, **{c: n for n, c in enumerate(alphabet, 1)}}, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([library.AddedToken("<m>", single_word=True)])
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    loaded = load_tokenizer(TokenizerFiles(model=tmp_path / "tokenizer.json"))
    exact = load_tokenizer(TokenizerFiles(model=tmp_path / "tokenizer.json", engine=Engine.TOKENIZERS))
    assert isinstance(exact, HuggingFaceTokenizer)
    assert isinstance(loaded, RoutedTokenizer)
    texts = ["a <m> b", "a<m>b", "<m>", "a  <m>", "abc", "<m> <m>", "a b"]
    assert same_ids(loaded.encode_batch(texts), exact.encode_batch(texts))


def test_real_tokenizers_are_equal_on_both_engines(shared_data):
    texts = [json.loads(line)["text"] for line in (shared_data / "web" / "dclm_sample.jsonl").read_text().splitlines()]
    texts += [f"{text[:50]}<|endoftext|>{text[50:90]}" for text in texts]
    files = TokenizerFiles(model=shared_data / "tok" / "gpt2_tokenizer.json")
    fast = load_tokenizer(files)
    assert not isinstance(fast, tokenizers.HuggingFaceTokenizer)
    exact = load_tokenizer(TokenizerFiles(model=files.model, engine=Engine.TOKENIZERS))
    assert same_ids(fast.encode_batch(texts), exact.encode_batch(texts))


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_recent_characters_have_the_ids_of_tokenizers(tmp_path):
    """Letters and digits of Unicode 15 to 17, which are unknown to the tables of one library."""
    signs = characters_of_bytes()
    # A merge across the boundary of a word that one table has: the ids depend on it.
    merges = [[first, signs[lead]] for first in "a1!" for lead in range(0xC2, 0xF5)]
    ids = {token: number for number, token in enumerate([*signs, *map("".join, merges)])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": {"type": "BPE", "vocab": ids, "merges": merges},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    kind = TokenizerType.HUGGING_FACE
    exact, fast = (load(tmp_path / "tokenizer.json", engine, kind) for engine in (Engine.TOKENIZERS, Engine.GIGATOKEN))
    assert isinstance(fast, RoutedTokenizer)
    recent = [
        *range(0x1C80, 0x1C90),
        0x1E6C0,
        0x11F02,
        0x16D50,
        0x2FFC,
        *range(0x323B0, 0x323C0),
        *range(0x10D40, 0x10D66),
    ]
    texts = [f"a{chr(code)}1{chr(code)}!{chr(code)} a" for code in [*recent, *range(0xC0, 0x3000, 7)]]
    assert same_ids(fast.encode_batch(texts), exact.encode_batch(texts))
    assert not same_ids(fast.fast.encode_batch(texts), exact.encode_batch(texts))
    common = ["plain", "naïve café", "日本語のテキスト", "😀👍🏽", "Ελληνικά", "हिन्दी", "한국어", "\ue000"]
    assert [fast._is_special(text) for text in common] == [False] * len(common)
