"""Files that name the newest checkpoint are read up to the length of a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynmo_ckpt._common.document import WriterError
from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.converters.deepspeed import step_directory
from dynmo_ckpt.converters.torch_dcp import is_dcp
from dynmo_ckpt.megatron.read import find_iteration
from dynmo_ckpt.native.checkpoint import read_latest
from dynmo_ckpt.operations.write import conversion_record


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (read_latest, "LATEST"),
        (lambda folder: find_iteration(folder, None), "latest_checkpointed_iteration.txt"),
        (is_dcp, "latest_checkpointed_iteration.txt"),
        (lambda folder: step_directory(folder, None), "latest"),
    ],
)
@pytest.mark.parametrize("length", [300, 5000])
def test_read_tracker_above_length_limit_is_refused(tmp_path, read, name, length):
    (tmp_path / name).write_text("1" * length)
    with pytest.raises(UsageError, match=rf"{name}.*\n.*the limit is 200"):
        read(tmp_path)


def test_conversion_record_is_checked():
    assert json.loads(conversion_record(Path("in"), {"tied": True}))["decisions"] == {"tied": True}
    with pytest.raises(WriterError, match="source: must not be empty"):
        conversion_record("", {})
