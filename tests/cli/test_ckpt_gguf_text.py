"""dynmo-ckpt convert --to gguf: what llama.cpp does otherwise with text is reported or refused."""

import json

import pytest

from tests.cli.test_ckpt_gguf import (
    MODELS,
    SIZES,
    byte_level,
    gguf,
    key,
    llama_cpp,
    opened,
    save,
    sentencepiece_model,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(gguf is None, reason="the gguf package is not installed")


def with_added(directory, *tokens):
    """Add tokens after the others to a tokenizer.json."""
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    for token in tokens:
        listed = document["added_tokens"]
        listed.append({**listed[-1], "id": 1 + max(each["id"] for each in listed), **token})
    path.write_text(json.dumps(document))
    return pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))


@pytest.mark.parametrize("side", [None, "lstrip", "rstrip"])
def test_added_token_that_takes_spaces_is_reported(tmp_path, ckpt, monkeypatch, side):
    """Those of Phi-4 do; llama.cpp removes spaces for a few models that it knows by name."""
    monkeypatch.setitem(MODELS, "wider", (transformers.Qwen2Config, {**SIZES, "vocab_size": 300}))
    save("wider", tmp_path / "in")
    byte_level(tmp_path / "in")
    tokenizer = with_added(tmp_path / "in", {"content": "<sep>", **({} if side is None else {side: True})})
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--format", "json")
    differs = json.loads(result.stdout)["decisions"].get("differs")
    assert differs is None if side is None else "spaces next to <sep>" in differs
    model = llama_cpp().Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    text = "cat <sep> mat"
    found = model.tokenize(text.encode(), add_bos=False, special=True)
    assert (found == tokenizer.encode(text).ids) == (side is None)


def test_two_ids_of_one_text_are_refused(tmp_path, ckpt, monkeypatch):
    """llama.cpp aborts the process that loads such a file."""
    monkeypatch.setitem(MODELS, "wider", (transformers.Qwen2Config, {**SIZES, "vocab_size": 300}))
    save("wider", tmp_path / "in")
    byte_level(tmp_path / "in")
    with_added(tmp_path / "in", {"content": "<tool>"})
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=4)
    assert "several ids have the text <tool>" in result.stderr


def template(*parts):
    """A post-processor that puts special tokens around a text, which is None among the parts."""
    single = [{"Sequence" if p is None else "SpecialToken": {"id": p or "A", "type_id": 0}} for p in parts]
    ids = {"<b>": 281, "<e>": 282, "<|end|>": 0}
    special = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in ids.items()}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


@pytest.mark.parametrize(
    ("parts", "added", "named"),
    [
        ((None,), (False, False), None),
        (("<b>", None), (True, False), None),
        ((None, "<e>"), (False, True), None),
        (("<b>", None, "<e>"), (True, True), None),
        (("<|end|>", None), (False, False), "puts no <|end|> at the begin of a text"),
    ],
)
def test_tokens_around_a_text_are_those_of_the_tokenizer(tmp_path, ckpt, monkeypatch, parts, added, named):
    monkeypatch.setitem(MODELS, "wider", (transformers.Qwen2Config, {**SIZES, "vocab_size": 300}))
    save("wider", tmp_path / "in")
    byte_level(tmp_path / "in", post_processor=template(*parts))
    tokenizer = with_added(tmp_path / "in", {"content": "<b>"}, {"content": "<e>"})
    settings = {"bos_token": "<b>", "eos_token": "<e>"}
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(settings))
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--format", "json")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    assert tuple(key(reader, f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")) == added
    differs = json.loads(result.stdout)["decisions"].get("differs")
    assert differs is None if named is None else named in differs
    model = llama_cpp().Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    found = model.tokenize(b"cat", add_bos=True, special=True)
    assert (found == tokenizer.encode("cat").ids) == (named is None)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (None, [1, ...]),  # llama.cpp's default for sentencepiece, and that of transformers
        ((None,), [...]),
        (("<s>", None), [1, ...]),
        ((None, "</s>"), [..., 2]),
    ],
)
def test_tokens_around_a_text_of_sentencepiece_are_those_of_its_template(tmp_path, ckpt, parts, expected):
    save("llama", tmp_path / "in")
    tokenizer = sentencepiece_model(tmp_path / "in")
    if parts is not None:
        document = {"model": {"vocab": {}}, "added_tokens": [], "post_processor": template(*parts)}
        (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(document))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(settings))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    fields = [reader.fields.get(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")]
    found = [None if field is None else field.contents() for field in fields]
    assert found == ([None, None] if parts is None else [expected[0] == 1, expected[-1] == 2])
    model = llama_cpp().Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    ids = tokenizer.encode("the cat")
    around = [number for each in expected for number in (ids if each is ... else [each])]
    assert model.tokenize(b"the cat", add_bos=True, special=True) == around


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "unigram"}, "model_type is not BPE"),
        ({"model_type": "word"}, "model_type is not BPE"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"byte_fallback": False}, "byte_fallback"),
    ],
)
def test_sentencepiece_that_llama_cpp_does_not_compute_is_refused(tmp_path, ckpt, settings, named):
    """llama.cpp merges pairs as BPE does, with the space first, and has bytes for characters without a piece."""
    save("llama", tmp_path / "in")
    sentencepiece_model(tmp_path / "in", **settings)
    assert named in ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=5).stderr
    (tmp_path / "none").mkdir()
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--tokenizer", tmp_path / "none")


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    ("settings", "text", "named"),
    [
        (PLAIN, "the  cat", None),
        ({**PLAIN, "remove_extra_whitespaces": True}, "the  cat", "has a token for each space"),
        ({**PLAIN, "normalization_rule_name": "nmt_nfkc"}, "\uff43at", "does not normalize the characters"),
    ],
)
def test_normalization_that_llama_cpp_lacks_is_reported(tmp_path, ckpt, settings, text, named):
    save("llama", tmp_path / "in")
    tokenizer = sentencepiece_model(tmp_path / "in", **settings)
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--format", "json")
    differs = json.loads(result.stdout)["decisions"].get("differs")
    assert named in differs if named else differs is None
    library = llama_cpp()
    model = library.Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    found = model.tokenize(text.encode(), add_bos=False)
    assert (found == tokenizer.encode(text)) == (named is None)
