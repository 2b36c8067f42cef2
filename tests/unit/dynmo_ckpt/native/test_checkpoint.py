"""Finding the checkpoints of a run."""

import pytest

from dynmo_ckpt.native.checkpoint import find_checkpoint, step_names
from tests.unit.dynmo_ckpt import native_checkpoints


@pytest.mark.parametrize("first", [0, 1])
def test_step_names_of_equal_steps_are_ordered_by_digits(tmp_path, first):
    names = ["step-00000010", "step-000000010", "step-100000000", "step-00000009"]
    for name in names[first:] + names[:first]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-10").mkdir()
    assert step_names(tmp_path) == ["step-100000000", "step-00000010", "step-000000010", "step-00000009"]


def test_find_checkpoint_of_equal_steps_prefers_fewer_digits(tmp_path):
    m = native_checkpoints.model()
    for name in ("step-000000010", "step-00000010"):
        native_checkpoints.save(tmp_path / name, native_checkpoints.parameters(m), m, step=10)
    directory, remarks = find_checkpoint(tmp_path)
    assert directory.name == "step-00000010"
    assert "LATEST" in remarks[0]
