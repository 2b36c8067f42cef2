"""Every reader of a document refuses deep nesting, sizes above its limit and files that are not regular."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

import dynmo_balance._common.document as document
from dynmo_balance.costs import devices
from dynmo_balance.formats import plan as balance_plan
from dynmo_balance.formats import profile as balance_profile
from dynmo_balance.inputs import import_profile, model_config, profile_source
from dynmo_balance.online import profile_follower
from dynmo_balance.recipes import recipe as plan_recipe
from dynmo_ckpt._common.errors import DynmoError as CkptError
from dynmo_ckpt.huggingface import files
from dynmo_ckpt.io.files import open_file
from dynmo_ckpt.io.safetensors import read_index
from dynmo_ckpt.native import checkpoint
from dynmo_tools._common.errors import DynmoError as PrepError
from dynmo_tools.config import options
from dynmo_tools.io import jsonl
from dynmo_tools.runner import recipe, task_manifest
from dynmo_tools.tokenization import definitions
from dynmo_train._common.errors import DynmoError as TrainError
from dynmo_train.config.compat.deepspeed import read_deepspeed
from dynmo_train.config.resolve import read_config_file
from dynmo_train.data import finetune_dataset
from dynmo_train.data import tokenizer as train_tokenizer
from dynmo_train.dynamics.tuning import read_sparse_table
from dynmo_train.evaluation import lambada, lm_eval_data
from dynmo_train.formats import plan as train_plan
from dynmo_train.formats import profile as train_profile
from dynmo_train.formats import run as train_run
from dynmo_train.formats.checkpoint import reader as train_reader
from dynmo_train.formats.checkpoint.shards import decode_header
from dynmo_train.pipeline import emulation_trace
from dynmo_train.trainer.monitoring import compare_runs
from tests.tables import table

LEVELS = 2000
PlanError = document.UsageError
ERRORS = (PlanError, CkptError, PrepError, TrainError)
UNCLOSED, OBJECTS, CLOSED = b"[" * LEVELS, b'{"a":' * LEVELS, b'{"a":' + b"[" * LEVELS + b"]" * LEVELS + b"}"
TOML = b"[balance]\nbalancer = " + b"[" * LEVELS + b"]" * LEVELS + b"\n"


def imported_trace(path: Path) -> bytes:
    """A trace imported on the items of a profile of the fixtures."""
    profile = Path(__file__).parent / "fixtures/profile/valid/steps.jsonl"
    loaded = profile_source.load(profile)
    header_line = profile.read_bytes().partition(b"\n")[0]
    return import_profile.import_lines("chrome-trace", path, header_line, loaded.header, loaded.costs)


READERS = {
    "plan of dynmo-train": train_plan.read_plan,
    "run.json": train_run.read_run,
    "resize.json": train_run.read_resize_request,
    "DeepSpeed": read_deepspeed,
    "sparse table": read_sparse_table,
    "trace": lambda path: emulation_trace.read_trace(path, ["embedding"]),
    "segment": train_profile.next_segment,
    "metrics": lambda path: list(compare_runs.read_records(path)),
    "vocabulary of dynmo-train": lambda path: train_tokenizer.read_vocabulary(path),
    "lambada": lambda path: lambada.read_passages(path),
    "harness": lambda path: lm_eval_data.read_rows("piqa", path),
    "plan of dynmo-plan": balance_plan.read_plan,
    "profile": balance_profile.read_profile,
    "config.json": model_config.load_spec,
    "recipe of dynmo-plan": lambda path: plan_recipe.load_recipe(str(path)),
    "device": lambda path: devices.load_device(str(path)),
    "chrome trace": lambda path: imported_trace(path),
    "safetensors": lambda path: read_index(path),
    "groups": lambda path: list(jsonl.read_objects(path)),
    "vocabulary of dynmo-prep": lambda path: definitions.read_vocabulary(path),
}
FOLDERS = {
    "manifest of dynmo-ckpt": ("manifest.json", checkpoint.load_manifest),
    "manifest of dynmo-train": ("manifest.json", train_reader.load_manifest),
    "Hugging Face config": ("config.json", files.read_config),
    "weight index": ("model.safetensors.index.json", files.read_tensors),
    "task manifest": ("manifest.json", task_manifest.load_manifest),
    "RACE": ("1.txt", finetune_dataset.read_race),
}
TOML_READERS = {
    "configuration": read_config_file,
    "device": lambda path: devices.load_device(str(path)),
    "recipe of dynmo-plan": lambda path: plan_recipe.load_recipe(str(path)),
    "recipe of dynmo-prep": lambda path: recipe.parse_recipe(*recipe.recipe_text(str(path))),
}


class Waited(BaseException):
    """Not an ``OSError``, which readers report as their own."""


@contextmanager
def at_most(seconds: int):
    """Fail where the block waits; a FIFO without a writer waits for ever."""

    def fail(*_):
        raise Waited(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(read, path: Path) -> str:
    with at_most(20), pytest.raises(ERRORS) as caught:
        read(path)
    return str(caught.value)


@table("name", READERS)
@table("payload", [UNCLOSED, OBJECTS, CLOSED], ids=["unclosed", "objects", "closed"])
def test_readers_deep_nesting_is_refused(tmp_path, name, payload):
    path = tmp_path / "document.json"
    header = b"" if name != "safetensors" else len(payload).to_bytes(8, "little")
    marked = b'"header"\n' if name == "segment" else b"\n"
    path.write_bytes(header + payload + (b"" if header else b" " + marked))
    if name == "segment":
        path.write_bytes(b'{"header": ' + payload + b', "x": "header"}\n')
    message = refused(READERS[name], path)
    if name not in ("config.json",):
        assert "nested deeper than 100 levels" in message or "TOML" in message or "Invalid" in message, message


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_readers_deep_nesting_is_refused(tmp_path, name):
    file, read = FOLDERS[name]
    seal = b'"manifest_crc32": "00000000"' if file == "manifest.json" else b""
    (tmp_path / file).write_bytes(UNCLOSED + seal)
    refused(read, tmp_path)


@pytest.mark.parametrize("name", TOML_READERS)
def test_toml_readers_deep_nesting_is_refused(tmp_path, name):
    path = tmp_path / "document.toml"
    for payload in (TOML, b"a = " + b"{a = " * LEVELS, b".".join([b"a"] * LEVELS) + b" = 1\n"):
        path.write_bytes(payload)
        assert "nested deeper than 100 levels" in refused(TOML_READERS[name], path)


@table("name", READERS)
def test_readers_fifo_is_refused_without_waiting(tmp_path, name):
    path = tmp_path / "document.json"
    os.mkfifo(path)
    if name in ("device", "recipe of dynmo-plan"):
        assert "TOML file" in refused(READERS[name], path)
    else:
        assert "FIFO" in refused(READERS[name], path)


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_readers_fifo_is_refused_without_waiting(tmp_path, name):
    file, read = FOLDERS[name]
    os.mkfifo(tmp_path / file)
    assert "FIFO" in refused(read, tmp_path)


def test_open_file_device_is_refused():
    assert "a device; must be a regular file" in refused(open_file, Path("/dev/zero"))


def test_profile_follower_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "profile.jsonl")
    assert "FIFO" in refused(lambda path: profile_follower.ProfileFollower(path).poll(), tmp_path / "profile.jsonl")


def test_readers_file_above_the_limit_is_refused_unread(tmp_path):
    path = tmp_path / "plan-000001.json"
    with path.open("wb") as handle:
        handle.truncate(document.MAX_DOCUMENT_BYTES + 1)
    assert "has 67,108,865 bytes; the limit is 67,108,864" in refused(train_plan.read_plan, path)
    grow = tmp_path / "resize.json"
    grow.write_bytes(b" " * (document.MAX_CONFIG_BYTES + 1))
    assert "the limit is 1,048,576" in refused(train_run.read_resize_request, grow)


def test_read_lines_line_above_the_limit_is_refused(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 100 + b"\n")
    with pytest.raises(document.DocumentError, match=r"line 2: is longer than 50 bytes"):
        list(document.read_lines(path, 50))


def test_read_lines_incomplete_last_line_is_ignored(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2')
    assert list(document.read_lines(path)) == [b'{"a": 1}\n']


@pytest.mark.parametrize(
    "text",
    ['{"a": "' + "[" * 500 + '"}', '{"a": "\\"' + "{[" * 500 + '"}', "[" * 100 + "]" * 100, "[" + "[{}]," * 500 + "1]"],
)
def test_parse_json_brackets_in_strings_and_rows_are_not_depth(text):
    assert document.parse_json(text) is not None


def test_parse_json_unterminated_string_takes_linear_time():
    with at_most(5), pytest.raises(ValueError, match="Unterminated"):
        document.parse_json('"' + '\\"' * 2_000_000 + "[" * 200)


def test_parse_json_other_encoding_is_refused():
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        with pytest.raises(ValueError):  # noqa: PT011 - one of two
            document.parse_json(("[" * LEVELS).encode(encoding))


def test_parse_json_number_above_the_largest_float_is_refused():
    with pytest.raises(ValueError, match="1e400 is not a finite number"):
        document.parse_json('{"a": 1e400}')
    assert document.parse_any_json('{"a": Infinity}') == {"a": float("inf")}


def test_decode_header_deep_nesting_is_refused():
    with pytest.raises(ValueError, match="nested deeper"):
        decode_header(len(UNCLOSED).to_bytes(8, "little"), UNCLOSED, 8 + len(UNCLOSED))


def test_parse_assignment_deep_value_is_text():
    assert options.parse_assignment("step.key=" + "[" * LEVELS)[2] == "[" * LEVELS
