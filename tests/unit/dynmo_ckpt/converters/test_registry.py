"""The registry of checkpoint formats; outside packages are in tests/extensions."""

import functools
import json
from pathlib import Path

import pytest

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.converters import BUILTIN, NOT_READ, NOT_WRITTEN
from dynmo_ckpt.converters.registry import CheckpointFormat, detect, get_format, open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions, WriteOptions
from dynmo_ckpt.huggingface.tokenizer import copied_tokenizer
from dynmo_ckpt.io.errors import CorruptError
from tests.tables import table


@pytest.mark.parametrize("name", BUILTIN)
def test_get_format_builtin_has_its_name_and_known_fields(name):
    found = get_format(name)
    assert isinstance(found, CheckpointFormat)
    assert found.name == name
    assert (found.read is None, found.write is None) == (name in NOT_READ, name in NOT_WRITTEN)
    assert all(hasattr(WriteOptions(), field) for field in found.topology)


def test_get_format_unknown_name_is_shortened_and_names_the_choices():
    with pytest.raises(UsageError, match="not a checkpoint format; choose from native, dcp, hf") as error:
        get_format("x" * 5000, NOT_WRITTEN)
    assert len(str(error.value)) < 400
    assert not any(name in str(error.value) for name in NOT_WRITTEN)
    assert {get_format(word).name for word in ("torch_dist", "megatron", "mcore", "distcp", "DCP")} == {"dcp"}


# Files and links below a folder without a checkpoint, and what the message has.
FOLDERS = [
    ({"models--a--b/snapshots/1/config.json": "{}"}, "models--OWNER--NAME/snapshots/REVISION of models--a--b"),
    ({"snapshots/1/config.json": "{}", "snapshots/2/config.json": "{}", "refs/main": "2"}, "give .*/snapshots/2"),
    ({"config.json": None}, "links to missing files, config.json; download it again"),
    ({"adapter_config.json": "{}"}, "is an adapter; give its base model"),
    ({"checkpoint-500/config.json": "{}", "notes/x": ""}, "is a folder of checkpoints; give one of checkpoint-500"),
]


@table(("files", "message"), FOLDERS)
def test_detect_names_what_is_there_instead(tmp_path, files, message):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.symlink_to("nothing")
        else:
            path.write_text(text)
    with pytest.raises(CorruptError, match=message):
        detect(tmp_path)


def test_detect_names_the_hub_for_its_models():
    with pytest.raises(CorruptError, match=r"hf://Qwen/Qwen3-0\.6B is a model of the hub"):
        detect(Path("Qwen/Qwen3-0.6B"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@table("name", ["model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.json"])
@table("contents", [POINTER, "<!DOCTYPE html>", None])
def test_file_that_was_not_downloaded_is_named(tmp_path, name, contents):
    """A pointer of Git LFS, the page of a login, and a link to a file that is not there."""
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).unlink(missing_ok=True)
    if contents is None:
        (tmp_path / name).symlink_to("blob")
    else:
        (tmp_path / name).write_text(contents)
    message = {POINTER: "pointer of Git LFS", None: "missing"}.get(contents, name)
    read = functools.partial(copied_tokenizer, vocab_size=8, max_length=8) if "tokenizer" in name else open_checkpoint
    with pytest.raises(CorruptError, match=message) as error:
        read(tmp_path)
    assert name in str(error.value)


def test_detect_empty_directory_names_every_marker(tmp_path):
    with pytest.raises(CorruptError) as error:
        detect(tmp_path)
    assert all(get_format(name).marker in str(error.value) for name in BUILTIN if get_format(name).read is not None)


def test_open_checkpoint_step_of_a_format_without_steps_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="hf checkpoints have one step"):
        open_checkpoint(tmp_path, options=ReadOptions(step=3))
