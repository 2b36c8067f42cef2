"""What binarize and merge-indexed write, read by Megatron-core's own ``IndexedDataset``: the same tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynmo_tools import cli
from dynmo_tools.formats.indexed import IndexedReader


@pytest.fixture(scope="module")
def theirs():
    name = "megatron.core.datasets.indexed_dataset"
    return pytest.importorskip(name, reason="megatron-core is not installed (an optional peer)")


def call(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["dynmo-prep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert not stop.value.code, arguments


@pytest.mark.parametrize("words", [300, 70_000])
def test_indexed_dataset_is_read_by_megatron(tmp_path, words, theirs):
    vocabulary = {f"w{number}": number for number in range(words)} | {"<unk>": words}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    rng = np.random.default_rng(2)
    texts = [[f"w{n}" for n in rng.integers(0, words, size)] for size in (5, 1, 700, 33)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": " ".join(text)}) + "\n" for text in texts))
    files = ("--tokenizer-type", "WhitespaceVocab", "--vocab-file", tmp_path / "vocab.json")
    for name in ("one", "two"):
        call("binarize", "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / name, *files)
    one, two = tmp_path / "one_text_document", tmp_path / "two_text_document"
    call("merge-indexed", one, two, "-o", tmp_path / "both")
    for prefix, repeats in ((one, 1), (tmp_path / "both", 2)):
        read, own = theirs.IndexedDataset(str(prefix)), IndexedReader(prefix)
        expected = [[vocabulary[word] for word in text] for text in texts] * repeats
        assert [read[at].tolist() for at in range(len(read))] == expected
        assert read.document_indices.tolist() == own.index.documents.tolist() == list(range(len(expected) + 1))
        assert read.sequence_lengths.tolist() == own.index.lengths.tolist()
        assert read.index.dtype == (np.uint16 if words < 65_500 else np.int32)
