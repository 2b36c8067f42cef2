"""The checkpoint format of CONTRIBUTING.md, installed as an outside package."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.extensions.outside_package import environment, install, install_section
from tests.unit.dynmo_ckpt import native_checkpoints

BROKEN = """\
[project]
name = "broken-checkpoints"
version = "2.5"

[project.entry-points."dynmo_ckpt.formats"]
"""


@pytest.fixture
def installed(tmp_path):
    return install_section("A checkpoint format", tmp_path / "site")


def run(site, *arguments, code=0):
    program = "from dynmo_ckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(site),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def saved(directory):
    model = native_checkpoints.model()
    parameters = native_checkpoints.parameters(model)
    tensors = native_checkpoints.true_rows(model["vocab_size"], parameters)
    native_checkpoints.save(directory, tensors, model)
    return model


@pytest.mark.complete
def test_outside_format_is_written_detected_and_read(installed, tmp_path):
    model = saved(tmp_path / "in")
    done = run(installed, "convert", tmp_path / "in", tmp_path / "packed", "--to", "packed")
    assert "logits of input and output differ by at most 0" in done.stderr
    summary = json.loads(run(installed, "info", tmp_path / "packed", "--format", "json").stdout)
    assert summary["model"] == model
    assert summary["files"] == {"weights.bin": {"bytes": (tmp_path / "packed/weights.bin").stat().st_size}}
    assert "no tensor differs" in run(installed, "diff", tmp_path / "in", tmp_path / "packed").stdout
    assert ": ok (full)" in run(installed, "verify", tmp_path / "packed").stdout
    run(
        installed,
        "convert",
        tmp_path / "packed",
        tmp_path / "hf",
        "--from",
        "packed",
        "--to",
        "hf",
        "--no-check-logits",
    )
    run(installed, "reshard", tmp_path / "packed", tmp_path / "native", "--pp", 2)
    for name in ("hf", "native"):
        assert "no tensor differs" in run(installed, "diff", tmp_path / "in", tmp_path / name).stdout


@pytest.mark.complete
def test_outside_format_cast_and_changed_weights_are_detected(installed, tmp_path):
    saved(tmp_path / "in")
    run(installed, "convert", tmp_path / "in", tmp_path / "half", "--to", "packed", "--dtype", "fp16")
    assert (
        "F32 on the left, F16 on the right" in run(installed, "diff", tmp_path / "in", tmp_path / "half", code=1).stdout
    )
    run(installed, "convert", tmp_path / "in", tmp_path / "out", "--to", "packed")
    payload = bytearray((tmp_path / "out/weights.bin").read_bytes())
    payload[40] ^= 64
    (tmp_path / "out/weights.bin").write_bytes(payload)
    assert "1 of 464 elements differ" in run(installed, "diff", tmp_path / "in", tmp_path / "out", code=1).stdout


def test_outside_format_is_listed_with_its_package(installed):
    listed = json.loads(run(installed, "formats", "--format", "json").stdout)
    assert listed["failures"] == []
    last = listed["formats"][-1]
    assert (last["name"], last["package"], last["reads"], last["writes"]) == (
        "packed",
        "packed-checkpoints 1.0",
        True,
        True,
    )
    assert {row["package"] for row in listed["formats"][:-1]} == {"dynmo-toolkit"}


def test_outside_format_options_that_it_lacks_are_refused(installed, tmp_path):
    saved(tmp_path / "in")
    to = ("convert", tmp_path / "in", tmp_path / "out", "--to", "packed")
    assert "--tp: does not apply to --to packed" in run(installed, *to, "--tp", 2, code=2).stderr
    assert "do not store optimizer state" in run(installed, *to, "--with-optimizer", code=2).stderr
    assert (
        "choose from native, dcp, hf, legacy, deepspeed, titan, gguf, packed"
        in run(installed, *to[:-1], "other", code=2).stderr
    )


@pytest.mark.complete
@pytest.mark.parametrize(
    ("point", "source", "message"),
    [
        ("broken = 'broken:FORMAT'", "import nowhere", "cannot be imported (ModuleNotFoundError"),
        ("broken = 'broken:FORMAT'", "FORMAT = 3", "must be a CheckpointFormat with the name 'broken'"),
        ("hf = 'broken:FORMAT'", "FORMAT = 3", "the name is taken by a built-in format"),
    ],
)
def test_broken_outside_format_names_its_package(installed, tmp_path, point, source, message):
    install(installed, {"pyproject.toml": BROKEN + point.replace("'", '"') + "\n", "broken.py": source + "\n"})
    saved(tmp_path / "in")
    run(installed, "convert", tmp_path / "in", tmp_path / "out", "--to", "packed")
    assert "gpt, 3 layers" in run(installed, "info", tmp_path / "out").stdout
    (tmp_path / "nothing").mkdir()
    error = run(installed, "info", tmp_path / "nothing", code=4).stderr
    assert "of the package broken-checkpoints 2.5" in error
    assert message in error
    assert message in run(installed, "formats").stderr
    if point.startswith("broken"):
        named = run(installed, "convert", tmp_path / "in", tmp_path / "x", "--to", "broken", code=2).stderr
        assert "broken-checkpoints 2.5" in named


@pytest.mark.complete
def test_two_packages_with_one_format_name_are_both_named(installed, tmp_path):
    point = 'packed = "packed_checkpoints:PACKED"\n'
    install(installed, {"pyproject.toml": BROKEN + point})
    saved(tmp_path / "in")
    error = run(installed, "convert", tmp_path / "in", tmp_path / "x", "--to", "packed", code=2).stderr
    assert "broken-checkpoints 2.5 and packed-checkpoints 1.0; uninstall one" in error
