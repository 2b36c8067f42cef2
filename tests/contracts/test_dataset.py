"""The sidecar of a dataset: owner, reader and schema accept and refuse the same, with equal digests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

import dynmo_tools.formats.dataset as tools
import dynmo_train.formats.dataset as train
from dynmo_tools._common.errors import UsageError as ToolsUsageError
from dynmo_tools.config.settings import TokenizerType
from dynmo_tools.tokenization import tokenizers as tools_tokenizers
from dynmo_train._common.errors import UsageError as TrainUsageError
from dynmo_train.data.tokenizer import TokenizerFiles, open_tokenizer
from tests.paths import SHARED_DATA
from tests.tables import table

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "dataset"
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((HERE.parents[1] / "dynmo_tools/formats/dataset.schema.json").read_text())
)
PARSERS = [
    pytest.param(tools.read_sidecar, Path, ToolsUsageError, id="dynmo_tools"),
    pytest.param(train.read_sidecar, str, TrainUsageError, id="dynmo_train"),
]
ALL = {kind: sorted((FIXTURES / kind).glob("*.json")) for kind in ("valid", "invalid", "invalid-across")}


def parse(read, place, path, folder):
    shutil.copy(path, folder / "data.dataset.json")
    return read(place(folder / "data"))


@pytest.mark.parametrize("path", ALL["valid"], ids=lambda path: path.stem)
def test_schema_valid_sidecar_is_accepted(path):
    assert VALIDATOR.is_valid(json.loads(path.read_text()))
    assert tools.encode_sidecar(json.loads(path.read_text())) == path.read_bytes()


@table("path", ALL["invalid"], ids=lambda path: path.stem)
def test_schema_invalid_sidecar_is_refused(path):
    assert not VALIDATOR.is_valid(json.loads(path.read_text()))
    with pytest.raises(ToolsUsageError):
        tools.encode_sidecar(json.loads(path.read_text()))


@pytest.mark.parametrize("path", ALL["invalid-across"], ids=lambda path: path.stem)
def test_schema_broken_rule_across_fields_is_accepted(path):
    assert VALIDATOR.is_valid(json.loads(path.read_text()))


@pytest.mark.parametrize(("read", "place", "_refusal"), PARSERS)
@pytest.mark.parametrize("path", ALL["valid"], ids=lambda path: path.stem)
def test_readers_valid_sidecar_is_read(read, place, _refusal, path, tmp_path):
    assert parse(read, place, path, tmp_path) == json.loads(path.read_text())


@table(("read", "place", "refusal"), PARSERS)
@table("path", ALL["invalid"] + ALL["invalid-across"], ids=lambda path: path.stem)
def test_readers_invalid_sidecar_is_refused(read, place, refusal, path, tmp_path):
    with pytest.raises(refusal):
        parse(read, place, path, tmp_path)


@pytest.mark.parametrize(("read", "place", "_refusal"), PARSERS)
def test_read_sidecar_without_a_file_is_none(read, place, _refusal, tmp_path):
    assert read(place(tmp_path / "data")) is None


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("GPT2BPETokenizer", {"vocab.json": "gpt2-vocab.json", "merges.txt": "gpt2-merges.txt"}),
        ("HuggingFaceTokenizer", {"tokenizer.json": "gpt2_tokenizer.json"}),
        ("BertWordPieceLowerCase", {"vocab-lower.txt": "bert-base-uncased-vocab.txt"}),
        ("SentencePieceTokenizer", {"tokenizer.model": "sp_test_model.model"}),
        ("Llama2Tokenizer", {"tokenizer.model": "sp_test_model.model"}),
        ("WhitespaceVocab", {"words.json": "words.json"}),
    ],
)
def test_vocabulary_digest_of_both_packages_is_equal(kind, files, tmp_path):
    root = SHARED_DATA
    (tmp_path / "words.json").write_text(json.dumps({"<unk>": 0, "größe": 1, "\ud83d": 2}))
    places = {
        name: tmp_path / file if kind == "WhitespaceVocab" else root / "tok" / file for name, file in files.items()
    }
    if not all(path.is_file() for path in places.values()):
        pytest.skip(f"{root}: the shared data is not next to the project (set DYNMO_SHARED_DATA)")
    first, *rest = places.values()
    model, vocab = (
        (first, None)
        if kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
        else (None, first)
    )
    ours = tools_tokenizers.load_tokenizer(
        tools_tokenizers.TokenizerFiles(
            kind=TokenizerType(kind), model=model, vocab=vocab, merges=rest[0] if rest else None
        )
    )
    theirs = open_tokenizer(TokenizerFiles(kind=kind, files=places))
    assert tools.digest_vocabulary(ours.vocabulary()) == train.digest_vocabulary(theirs.vocabulary())
    assert ours.num_ids == theirs.vocab_size
