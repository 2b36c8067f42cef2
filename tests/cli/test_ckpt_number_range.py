"""Weights that the type to write cannot represent are refused, whatever the format; infinity is never written."""

import numpy as np
import pytest
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.io.errors import UnsupportedError
from tests.unit.dynmo_ckpt import native_checkpoints

WIDE = "layers.1.mlp.fc2.weight"


def convert(folder, value, *words):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64}
    m = native_checkpoints.model(**sizes, vocab_size=40, padded_vocab_size=48)
    tensors = native_checkpoints.parameters(m)
    tensors[WIDE][3, 5] = value
    native_checkpoints.save(folder / "in", tensors, m)
    return CliRunner().invoke(app, ["convert", str(folder / "in"), str(folder / "out"), "--no-check-logits", *words])


@pytest.mark.parametrize("form", ["hf", "native", "dcp", "gguf"])
def test_number_beyond_float16_is_refused(tmp_path, form):
    done = convert(tmp_path, 7e4, "--to", form, "--dtype", "fp16")
    assert isinstance(done.exception, UnsupportedError)
    assert "beyond the range of F16; use --dtype bf16" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "dtype"), [(3.4e38, "bf16"), (9e6, "q8_0")])
def test_number_beyond_the_range_of_other_types_is_refused(tmp_path, value, dtype):
    done = convert(tmp_path, value, "--to", "gguf", "--dtype", dtype)
    assert isinstance(done.exception, UnsupportedError)
    assert "beyond the range of" in str(done.exception)


@pytest.mark.parametrize("value", [65504.0, np.inf, np.nan], ids=["largest", "infinity", "nan"])
def test_number_that_float16_has_is_written(tmp_path, value):
    done = convert(tmp_path, value, "--to", "native", "--dtype", "fp16")
    assert done.exit_code == 0, done.exception
