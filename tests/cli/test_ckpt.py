"""The commands of dynmo-ckpt: outputs, exit codes, files on disk."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from tests.unit.dynmo_ckpt import native_checkpoints
from tests.unit.dynmo_train.formats.checkpoint import small_run


@pytest.fixture
def checkpoint(tmp_path):
    """A run of two stages and two tensor ranks with masks and optimizer state; its directory, model and tensors."""
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    tensors = p | native_checkpoints.masks(p) | native_checkpoints.optimizer_state(p)
    files = {"tokenizer/tokenizer.json": b'{"model": {"vocab": {"a": 0}}}'}
    native_checkpoints.save(tmp_path / "run" / "checkpoints" / "step-00000008", tensors, m, tp=2, files=files)
    (tmp_path / "run" / "checkpoints" / "LATEST").write_text("step-00000008\n")
    return tmp_path / "run", m, tensors


def step_of(run_dir):
    return run_dir / "checkpoints" / "step-00000008"


def stored(directory):
    arrays = {}
    for path in directory.glob("*.safetensors"):
        arrays |= load_file(path)
    return arrays


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def cut(m, tensors):
    """What is written of tensors with rows of padding, as older versions stored them."""
    return native_checkpoints.true_rows(m["vocab_size"], tensors)


def test_info_of_a_run_prints_sizes_and_tensors(ckpt, checkpoint):
    run_dir, m, tensors = checkpoint
    document = json.loads(ckpt("info", run_dir, "--format", "json", "--tensors", "layers.0.mlp.fc?.weight").stdout)
    assert document["step"] == 8
    assert document["model"] == m
    parameters = [value for name, value in tensors.items() if native_checkpoints.role_of(name) == "parameter"]
    assert document["roles"]["parameter"]["elements"] == sum(value.size for value in parameters)
    assert document["bytes"] == sum(
        p.stat().st_size for p in step_of(run_dir).rglob("*.*") if p.name != "manifest.json"
    )
    assert sorted(document["tensors"]) == ["layers.0.mlp.fc1.weight", "layers.0.mlp.fc2.weight"]
    text = ckpt("info", run_dir, "--tensors", "head.*").stdout
    assert "step 8" in text
    assert "embedding ... layers.0" not in text
    assert "head.norm.bias.exp_avg_sq" in text
    assert "layers.0.mlp" not in text.partition("tensors")[2]


def test_verify_intact_checkpoint_is_ok(ckpt, checkpoint):
    run_dir, _, _ = checkpoint
    for path in (run_dir, run_dir / "checkpoints", step_of(run_dir)):
        for level in ("header", "full"):
            assert "ok" in ckpt("verify", path, "--level", level).stdout
    document = json.loads(ckpt("verify", run_dir, "--format", "json").stdout)
    assert document == {"path": str(step_of(run_dir)), "level": "full", "ok": True, "findings": []}


def test_verify_header_reports_findings(ckpt, checkpoint):
    run_dir, _, _ = checkpoint
    step = step_of(run_dir)
    (step / "extra.txt").write_text("x")
    (step / "tokenizer" / "tokenizer.json").unlink()
    found = ckpt("verify", run_dir, "--level", "header", code=1).stdout
    assert "extra.txt: the manifest does not name it" in found
    assert "tokenizer.json: is missing" in found
    assert "2 findings" in found


def test_verify_invalid_latest_is_found(ckpt, checkpoint):
    run_dir, _, _ = checkpoint
    for text in ("step-00000009\n", "", "step-0000000\n", "step-00000008x\n"):
        (run_dir / "checkpoints" / "LATEST").write_text(text)
        assert "LATEST" in ckpt("verify", run_dir, "--level", "header", code=1).stdout


def test_verify_without_checkpoint_is_refused(ckpt, tmp_path):
    assert "no checkpoint here" in ckpt("verify", tmp_path, code=4).stderr
    assert "no checkpoint here" in ckpt("info", tmp_path / "absent", code=4).stderr


def test_merge_of_all_ranks_has_equal_tensors_on_one(ckpt, checkpoint, tmp_path):
    run_dir, m, tensors = checkpoint
    result = json.loads(ckpt("merge", run_dir, tmp_path / "out", "--format", "json").stdout)
    assert result["tensors"] == len(tensors)
    assert result["verified"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "conversion.json",
        "manifest.json",
        "model-p000-t00.safetensors",
        "optimizer-p000-t00.safetensors",
        "tokenizer",
    ]
    assert same(stored(tmp_path / "out"), cut(m, tensors))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["topology"]["world_size"] == 1
    assert len(manifest["topology"]["partition"]) == 1
    assert manifest["optimizer"]["steps"]["head.norm.bias"] == 8
    assert "ok" in ckpt("verify", tmp_path / "out").stdout


def test_merge_is_opened_by_the_trainer(ckpt, checkpoint, tmp_path):
    from dynmo_train.formats.checkpoint import find_checkpoint, open_checkpoint

    run_dir, m, tensors = checkpoint
    ckpt("merge", run_dir, tmp_path / "out")
    tensors = cut(m, tensors)
    loaded = open_checkpoint(find_checkpoint(tmp_path / "out")).load(tensors)
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in tensors.items())


def test_commands_checkpoint_of_the_trainer_is_converted(ckpt, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    small_run.save(tmp_path / "run" / "checkpoints", 3)
    assert "ok" in ckpt("verify", tmp_path / "run", "--level", "full").stdout
    ckpt("merge", tmp_path / "run", tmp_path / "merged")
    expected = {name: value.numpy() for name, (_, value) in small_run.state(3).items()}
    assert same(stored(tmp_path / "merged"), cut({"vocab_size": 10}, expected))
    ckpt("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf")


def test_overwrite_replaces_one_checkpoint_and_nothing_else(ckpt, checkpoint, tmp_path):
    run_dir, _, _ = checkpoint
    out = tmp_path / "out"
    ckpt("merge", run_dir, out)
    assert "--overwrite" in ckpt("merge", run_dir, out, code=2).stderr
    (out / "old.safetensors").write_bytes(b"x")
    ckpt("merge", run_dir, out, "--overwrite")
    assert not (out / "old.safetensors").exists()
    # Each is the folder with these files, next to or in place of a checkpoint.
    others = {
        "text": ["docs/thesis.txt"],
        "config": ["config.json", "tokenizer.json"],
        "code": ["config.json", "model.safetensors", ".git/HEAD"],
        "notes": ["config.json", "model.safetensors", "notes.md"],
        "two": ["config.json", "model.safetensors", "tuned/config.json", "tuned/model.safetensors"],
        "steps": ["checkpoints/step-00000001/manifest.json", "checkpoints/step-00000002/a.safetensors"],
    }
    unchanged = []
    for name, paths in others.items():
        for path in paths:
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text("{}")
        message = ckpt("merge", run_dir, tmp_path / name, "--overwrite", code=2).stderr
        if "replaces one checkpoint only" in message and all((tmp_path / name / path).exists() for path in paths):
            unchanged.append(name)
    assert unchanged == list(others)
    (tmp_path / "file").write_text("x")
    ckpt("merge", run_dir, tmp_path / "file", "--overwrite", code=2)
    (tmp_path / "empty").mkdir()
    ckpt("merge", run_dir, tmp_path / "empty", "--overwrite")
    assert not list(tmp_path.glob(".*"))


def test_convert_never_replaces_its_input(ckpt, checkpoint):
    run_dir, _, _ = checkpoint
    for target in (run_dir, run_dir / "checkpoints", step_of(run_dir)):
        assert "replace the input" in ckpt("merge", run_dir, target, "--overwrite", code=2).stderr
    ckpt("convert", run_dir, run_dir.parent / "hf", "--to", "hf", "--no-check-logits")
    convert = ("convert", run_dir, run_dir.parent / "hf", "--to", "hf", "--overwrite")
    assert "replace the input" in ckpt(*convert, "--tokenizer", run_dir.parent / "hf", code=2).stderr
    ckpt("convert", run_dir, run_dir.parent / "core", "--to", "dcp")
    convert = ("convert", run_dir.parent / "core", run_dir.parent / "hf", "--to", "hf", "--overwrite")
    assert "replace the input" in ckpt(*convert, "--config", run_dir.parent / "hf", code=2).stderr
    page = ckpt("diff", run_dir, run_dir, "--html", step_of(run_dir) / "manifest.json", code=2)
    assert "not a page" in page.stderr


def test_convert_with_plan_writes_nothing(ckpt, checkpoint, tmp_path):
    run_dir, _, _ = checkpoint
    before = sorted(tmp_path.rglob("*"))
    text = ckpt("merge", run_dir, tmp_path / "out", "--plan").stdout
    assert "nothing was written" in text
    assert "model-p000-t00.safetensors" in text
    document = json.loads(ckpt("convert", run_dir, tmp_path / "out", "--to", "hf", "--plan", "--format", "json").stdout)
    assert sorted(tmp_path.rglob("*")) == before
    assert document["seconds"] == pytest.approx(document["bytes"] / document["bytes_per_s"], abs=1e-3)
    ckpt("convert", run_dir, tmp_path / "out", "--to", "hf")
    assert document["files"] == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("command", [["merge"], ["convert", "--to", "hf"]])
def test_merge_altered_source_is_refused_without_output(ckpt, checkpoint, tmp_path, command):
    run_dir, _, _ = checkpoint
    path = step_of(run_dir) / "model-p001-t01.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    for at in (header, -1):
        payload = bytearray(path.read_bytes())
        payload[at] ^= 4
        path.write_bytes(payload)
        done = ckpt(command[0], run_dir, tmp_path / "out", *command[1:], code=4)
        assert "the bytes were altered" in done.stderr
        assert "model-p001-t01.safetensors" in done.stderr
        assert sorted(child.name for child in tmp_path.iterdir()) == ["run"]
        payload[at] ^= 4
        path.write_bytes(payload)


def test_convert_tokenizer_above_vocabulary_is_refused(ckpt, checkpoint, tmp_path):
    run_dir, _, _ = checkpoint
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 29}}}))
    done = ckpt("convert", run_dir, tmp_path / "out", "--to", "hf", "--tokenizer", tmp_path / "big", code=2)
    assert "has the token id 29; the vocabulary of the model ends at 28" in done.stderr


def test_commands_invalid_option_exits_2_with_the_rule(ckpt, checkpoint, tmp_path):
    run_dir, _, _ = checkpoint
    assert "has no step 9" in ckpt("info", run_dir, "--step", 9, code=2).stderr
    assert (
        "not a size" in ckpt("convert", run_dir, tmp_path / "o", "--to", "hf", "--max-shard-size", "x", code=2).stderr
    )
    assert (
        "not a directory" in ckpt("convert", run_dir, tmp_path / "o", "--to", "hf", "--tokenizer", "no", code=2).stderr
    )


def test_convert_unknown_tensor_is_refused(ckpt, tmp_path):
    m = native_checkpoints.model()
    tensors = native_checkpoints.parameters(m) | {"layers.0.mlp.gate.weight": np.zeros(2, np.float32)}
    native_checkpoints.save(tmp_path / "in", tensors, m)
    done = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "hf", code=5)
    assert "layers.0.mlp.gate.weight" in done.stderr
    assert not (tmp_path / "out").exists()


def test_commands_error_is_one_message_without_traceback(tmp_path):
    program = "from dynmo_ckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "info", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.startswith("dynmo-ckpt: error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["info", "convert", "verify", "diff"])
def test_help_names_every_input_format(command):
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"})
    text = " ".join(done.output.split())
    for name in (
        "Hugging Face",
        "legacy Megatron",
        "Megatron-core",
        "DCP",
        "torchtitan",
        "Megatron-DeepSpeed",
        "llama2.c",
    ):
        assert name in text
