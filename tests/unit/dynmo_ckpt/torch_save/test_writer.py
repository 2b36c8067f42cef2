import pickle
import zipfile

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.torch_save import writer
from dynmo_ckpt.torch_save.pickles import GlobalName, load_pickle
from dynmo_ckpt.torch_save.writer import NewObject, dump_pickle
from tests.tables import table
from tests.unit.dynmo_ckpt import native_checkpoints

NUMBERS = [0, -1, 255, 256, -129, 2**31, -(2**40), 0.1]
VALUES = [None, True, False, *NUMBERS, "größer", [1, [2]], (1, "a"), {"a": {"b": (1.5,)}}, (), [], {}]


@table("value", VALUES, ids=repr)
def test_dump_pickle_is_read_by_pickle(value):
    payload = dump_pickle(value)
    assert pickle.loads(payload) == value  # noqa: S301 - our own bytes
    assert load_pickle(payload, "x") == value


def test_dump_pickle_namespace_is_unpickled():
    value = NewObject(GlobalName("argparse", "Namespace"), {"a": 1})
    assert vars(pickle.loads(dump_pickle(value))) == {"a": 1}  # noqa: S301 - our own bytes


def test_dump_pickle_other_object_raises_type_error():
    with pytest.raises(TypeError, match="complex"):
        dump_pickle(1j)


@pytest.mark.parametrize("limit", [1, 3000, 1 << 20])
def test_entries_beyond_the_limit_of_32_bits_are_read_by_torch(tmp_path, monkeypatch, limit):
    """With a lower limit: sizes and offsets become 64-bit numbers, and every storage is at its place."""
    monkeypatch.setattr(writer, "ZIP32_LIMIT", limit)
    m = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "in", native_checkpoints.parameters(m), m)
    done = CliRunner().invoke(app, ["convert", f"{tmp_path / 'in'}", f"{tmp_path / 'out'}", "--to", "legacy"])
    assert done.exit_code == 0, (done.output, done.exception)
    path = next((tmp_path / "out").rglob("*.pt"))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    word = torch.load(path, weights_only=False)["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
    expected = native_checkpoints.parameters(m)["embedding.word.weight"]
    assert np.array_equal(word.numpy()[: m["vocab_size"]], expected[: m["vocab_size"]])
    done = CliRunner().invoke(app, ["diff", f"{tmp_path / 'in'}", f"{tmp_path / 'out'}"])
    assert "no tensor differs" in done.output
