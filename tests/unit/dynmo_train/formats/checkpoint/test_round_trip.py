import os
import zlib

import pytest
import torch
from safetensors import safe_open

from dynmo_train._common.document import DocumentError
from dynmo_train._common.errors import UsageError
from dynmo_train.formats.checkpoint import (
    CheckpointError,
    find_checkpoint,
    new_staging,
    open_checkpoint,
    prune,
    remove_stale_staging,
    write_shard,
)
from dynmo_train.formats.checkpoint.writer import commit
from tests.tables import table
from tests.unit.dynmo_train.formats.checkpoint import small_run


def equal(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_load_returns_all_written_tensors(tmp_path):
    step_dir = small_run.save(tmp_path, 7)
    assert step_dir.name == "step-00000007"
    assert (tmp_path / "LATEST").read_text() == "step-00000007\n"
    checkpoint = open_checkpoint(step_dir)
    state = small_run.state(7)
    assert set(checkpoint.names()) == set(state)
    loaded = checkpoint.load(state)
    assert all(equal(loaded[name], tensor) for name, (_, tensor) in state.items())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_files_match_safetensors_and_manifest(tmp_path):
    step_dir = small_run.save(tmp_path, 1)
    manifest = open_checkpoint(step_dir).manifest
    state = small_run.state(1)
    for name, entry in manifest["files"].items():
        payload = (step_dir / name).read_bytes()
        assert entry == {"bytes": len(payload), "crc32": f"{zlib.crc32(payload):08x}"}
        with safe_open(step_dir / name, framework="pt") as handle:
            assert all(equal(handle.get_tensor(key), state[key][1]) for key in handle.keys())  # noqa: SIM118


@table(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8],
)
@table("shape", [(), (0, 3), (3,), (2, 3, 5)])
def test_write_shard_every_dtype_and_shape_round_trips(tmp_path, dtype, shape):
    tensors = dict(small_run.state(1))
    tensors["head.extra"] = ("buffer", (torch.rand(shape) * 3).to(dtype))
    checkpoint = open_checkpoint(small_run.save(tmp_path, 1, tensors))
    assert equal(checkpoint.load(["head.extra"])["head.extra"], tensors["head.extra"][1])


def test_write_shard_of_a_strided_view_keeps_its_order(tmp_path):
    tensor = torch.arange(12.0).reshape(3, 4).T
    write_shard(tmp_path, "a.safetensors", {"x": tensor})
    with safe_open(tmp_path / "a.safetensors", framework="pt") as handle:
        assert torch.equal(handle.get_tensor("x"), tensor)


def test_load_of_a_tied_name_reads_its_owner(tmp_path):
    checkpoint = open_checkpoint(small_run.save(tmp_path, 1))
    word = small_run.state(1)
    loaded = checkpoint.load(["head.weight", "head.weight.exp_avg"])
    assert equal(loaded["head.weight"], word["embedding.word.weight"][1])
    assert equal(loaded["head.weight.exp_avg"], word["embedding.word.weight.exp_avg"][1])
    assert checkpoint.has("head.weight")
    assert not checkpoint.has("head.bias")


def test_load_of_a_split_tensor_concatenates_its_shards(tmp_path):
    state = small_run.state(1)
    name = "layers.0.mlp.fc1.weight"
    staging = new_staging(tmp_path, 1)
    whole = {key: value for key, value in state.items() if key != name and value[0] != "optimizer"}
    reports = [small_run.write_rank(staging, "model-p000-t00.safetensors", whole)]
    for rank, part in enumerate(state[name][1].chunk(2)):
        (report,) = small_run.write_rank(
            staging, f"model-p000-t{rank + 1:02d}.safetensors", {name: ("parameter", part)}
        )
        reports.append([report | {"shape": [32, 8], "index": [[16 * rank, 16 * rank + 16], [0, 8]]}])
    manifest = small_run.build_manifest(small_run.facts(1, optimizer=None), reports, written_by="test")
    checkpoint = open_checkpoint(commit(tmp_path, 1, staging, manifest))
    assert checkpoint.manifest["tensors"][name]["split_dim"] == 0
    assert equal(checkpoint.load([name])[name], state[name][1])


def test_load_with_an_altered_byte_names_file_and_tensor(tmp_path):
    step_dir = small_run.save(tmp_path, 1)
    path = step_dir / "model-p001-t00.safetensors"
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)
    checkpoint = open_checkpoint(step_dir)
    with pytest.raises(CheckpointError, match=r"model-p001-t00\.safetensors: .*CRC-32"):
        checkpoint.load(checkpoint.names())
    assert checkpoint.load(["embedding.word.weight"])


def test_load_of_a_truncated_file_is_refused(tmp_path):
    step_dir = small_run.save(tmp_path, 1)
    path = step_dir / "model-p000-t00.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(step_dir).load(["embedding.word.weight"])
    with pytest.raises(CheckpointError, match=r"step-00000001/model-p000-t00\.safetensors"):
        find_checkpoint(tmp_path)


def test_open_checkpoint_with_an_altered_manifest_is_refused(tmp_path):
    step_dir = small_run.save(tmp_path, 1)
    path = step_dir / "manifest.json"
    payload = path.read_bytes()
    begin = payload.index(b"manifest_crc32")
    for at in [*range(begin - 2, begin + 30), *range(0, len(payload), 997)]:
        path.write_bytes(payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
        with pytest.raises(DocumentError):
            open_checkpoint(step_dir)


def test_find_checkpoint_accepts_run_checkpoints_and_step(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    older, newer = small_run.save(folder, 3), small_run.save(folder, 4)
    assert [find_checkpoint(path) for path in (tmp_path / "run", folder, older)] == [newer, newer, older]
    (folder / "LATEST").write_text("step-00000003\n")
    assert find_checkpoint(folder) == older
    (newer / "manifest.json").unlink()
    (folder / "LATEST").unlink()
    assert find_checkpoint(folder) == older


def test_find_checkpoint_with_a_broken_latest_falls_back(tmp_path):
    older, newer = small_run.save(tmp_path, 3), small_run.save(tmp_path, 4)
    (newer / "optimizer-p000-t00.safetensors").unlink()
    assert find_checkpoint(tmp_path) == older


@pytest.mark.parametrize("present", [True, False])
def test_find_checkpoint_without_any_lists_accepted_paths(tmp_path, present):
    path = tmp_path if present else tmp_path / "absent"
    with pytest.raises(CheckpointError, match="give a run directory"):
        find_checkpoint(path)


def test_commit_of_the_same_step_replaces_it(tmp_path):
    small_run.save(tmp_path, 1)
    changed = small_run.state(99)
    step_dir = small_run.save(tmp_path, 1, changed)
    assert equal(open_checkpoint(step_dir).load(["head.norm.bias"])["head.norm.bias"], changed["head.norm.bias"][1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000001"]


def test_commit_with_an_invalid_manifest_keeps_the_older_one(tmp_path):
    older = small_run.save(tmp_path, 1)
    staging = new_staging(tmp_path, 2)
    reports = [small_run.write_rank(staging, "model-p000-t00.safetensors", {"elsewhere.x": ("buffer", torch.ones(2))})]
    manifest = small_run.build_manifest(small_run.facts(2, optimizer=None, ties={}), reports, written_by="test")
    with pytest.raises(DocumentError, match="belongs to no item"):
        commit(tmp_path, 2, staging, manifest)
    assert find_checkpoint(tmp_path) == older
    assert remove_stale_staging(tmp_path) == [staging.name]


def test_commit_with_unreported_tensors_is_refused(tmp_path):
    staging = new_staging(tmp_path, 2)
    write_shard(staging, "model-p000-t00.safetensors", {"head.a": torch.ones(2), "head.b": torch.ones(2)})
    report = small_run.write_rank(staging, "other.safetensors", {"head.a": ("buffer", torch.ones(2))})
    report[0]["file"] = "model-p000-t00.safetensors"
    manifest = small_run.build_manifest(small_run.facts(2, optimizer=None, ties={}), [report], written_by="test")
    with pytest.raises(UsageError, match=r"head\.b"):
        commit(tmp_path, 2, staging, manifest)


def test_prune_removes_all_but_the_newest(tmp_path):
    for step in (1, 2, 10):
        small_run.save(tmp_path, step)
    assert prune(tmp_path, 2) == ["step-00000001"]
    assert prune(tmp_path, 0) == ["step-00000002"]
    assert find_checkpoint(tmp_path).name == "step-00000010"


def test_prune_keeps_what_latest_names(tmp_path):
    for step in (8, 9, 3):
        small_run.save(tmp_path, step)
    assert prune(tmp_path, 1) == ["step-00000008", "step-00000009"]
    assert find_checkpoint(tmp_path).name == "step-00000003"


@pytest.mark.parametrize(
    ("steps", "keep", "remaining"),
    [
        ((1, 2, 8, 9, 3), 2, [2, 3]),  # 8 and 9 are of a branch that was abandoned at 2
        ((1, 2, 8, 9, 3), 4, [1, 2, 3, 9]),
        ((1, 2, 8, 3, 10), 3, [2, 3, 10]),  # the active branch is past 8
        ((1, 4, 2, 6, 3, 9), 4, [1, 2, 3, 9]),  # abandoned twice
    ],
)
def test_prune_counts_the_active_branch_first(tmp_path, steps, keep, remaining):
    for written, step in enumerate(steps):
        os.utime(small_run.save(tmp_path, step) / "manifest.json", ns=(written, written))
    prune(tmp_path, keep)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == remaining


def test_unknown_tensor_and_unknown_dtype_are_refused(tmp_path):
    checkpoint = open_checkpoint(small_run.save(tmp_path, 1))
    with pytest.raises(CheckpointError, match="has no tensor nothing"):
        checkpoint.load(["nothing"])
    with pytest.raises(UsageError, match=r"torch\.complex64"):
        write_shard(tmp_path, "a.safetensors", {"x": torch.zeros(1, dtype=torch.complex64)})
