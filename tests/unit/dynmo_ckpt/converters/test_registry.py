"""The registry of checkpoint formats; outside packages are in tests/extensions."""

import pytest

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.converters import BUILTIN
from dynmo_ckpt.converters.registry import CheckpointFormat, detect, get_format, open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions, WriteOptions
from dynmo_ckpt.io.errors import CorruptError


@pytest.mark.parametrize("name", BUILTIN)
def test_get_format_builtin_has_its_name_and_known_fields(name):
    found = get_format(name)
    assert isinstance(found, CheckpointFormat)
    assert found.name == name
    assert found.read is not None or name == "gguf"
    assert found.write is not None or name == "llama2c"
    assert all(hasattr(WriteOptions(), field) for field in found.topology)


def test_get_format_unknown_name_is_shortened_and_names_the_choices():
    with pytest.raises(UsageError, match="not a checkpoint format; choose from native, dcp, hf") as error:
        get_format("x" * 5000)
    assert len(str(error.value)) < 400


def test_detect_empty_directory_names_every_marker(tmp_path):
    with pytest.raises(CorruptError) as error:
        detect(tmp_path)
    assert all(get_format(name).marker in str(error.value) for name in BUILTIN if get_format(name).read is not None)


def test_open_checkpoint_step_of_a_format_without_steps_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="hf checkpoints have one step"):
        open_checkpoint(tmp_path, options=ReadOptions(step=3))
