"""Processes that were started differently end at the start, each with exit code 2, and rank 0 prints what differs."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of
from dynmo_train.trainer import fingerprint
from dynmo_train.trainer.fingerprint import config_properties, installed, require_same
from tests.distributed.whole_runs import arguments, run_command, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "vocab_size": 97}
SIZES |= {"micro_batch_size": 1, "train_iters": 3}


def different_option(arguments_by_rank: list[list[str]]) -> tuple[int, str]:
    """A whole command; each process has its own command line."""
    return run_command(arguments_by_rank[int(os.environ["RANK"])])


def starts(world, first: str, copy: str, other: str) -> dict[str, str]:
    """What ``require_same`` does where rank 1 differs from rank 0 in one thing."""
    second = not world.is_rank0
    values = SIZES | {"data_path": first, "lr": 2e-3}

    def start(**changes) -> str:
        properties = {**config_properties(config_of(**{**values, **(changes if second else {})})), **installed()}
        try:
            require_same(world, properties)
        except UsageError as error:
            return str(error)
        except SystemExit as end:
            return f"exit {end.code}"
        return "same"

    found = {
        "same": start(),
        "copied data": start(data_path=copy, run_dir="elsewhere", data_cache_path="/var/cache"),
        "lr": start(lr=1e-3),
        "seed": start(seed=7),
        "data": start(data_path=other),
        "missing data": start(data_path=f"{other}.none"),
    }
    if second:
        fingerprint.torch.__version__ = "2.11.0"
    found["torch"] = start()
    return found


def test_start_with_other_lr_ends_both_ranks_with_a_table(tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    arguments_by_rank = [arguments(data, run, lr=lr) for lr in ("2e-3", "1e-3")]
    (code, text), (other_code, other_text) = run_workers(different_option, 2, arguments_by_rank, joins=False)
    assert (code, other_code) == (2, 2)
    rows = text[text.index("rank 0") :].splitlines()
    lines = [line.split() for line in [f"  {rows[0]}", *rows[1:]] if line.startswith("  ")]
    assert lines[0][:2] == ["rank", "0"]
    assert lines[1:] == [["--lr", "0.002", "0.001"]]
    assert other_text == ""
    assert not run.exists()


@pytest.mark.complete
def test_start_with_other_options_data_or_torch_ends(tmp_path):
    data = write_data(tmp_path / "data")
    for folder, flipped in (("copy", 0), ("other", 1)):
        (tmp_path / folder).mkdir()
        payload = bytearray(data.with_suffix(".bin").read_bytes())
        payload[len(payload) // 2] ^= flipped
        (tmp_path / folder / "data.bin").write_bytes(payload)
        (tmp_path / folder / "data.idx").write_bytes(data.with_suffix(".idx").read_bytes())
    places = [str(tmp_path / folder / "data") for folder in ("", "copy", "other")]
    first, second = run_workers(starts, 2, *places, fresh=True)  # it patches torch's own version
    assert [first.pop("same"), first.pop("copied data")] == ["same", "same"]
    assert [second.pop("same"), second.pop("copied data")] == ["same", "same"]
    assert set(second.values()) == {"exit 2"}
    rows = {name: text.splitlines()[2:] for name, text in first.items()}
    assert [row.split() for row in rows["lr"]] == [["--lr", "0.002", "0.001"]]
    assert [row.split() for row in rows["seed"]] == [["--seed", "1234", "7"]]
    assert len(rows["data"]) == 1
    assert "--data-path" in rows["data"][0]
    assert "missing" in rows["missing data"][0]
    assert len(rows["torch"]) == 1
    assert rows["torch"][0].startswith("  torch version")
    assert rows["torch"][0].endswith("2.11.0")


def write_sidecar(prefix: Path) -> None:
    """What ``dynmo-prep`` writes next to a data set, as far as digests go."""
    pieces = {
        name: {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        for name, payload in ((name, prefix.with_suffix(f".{name}").read_bytes()) for name in ("bin", "idx"))
    }
    document = {"format": "dynmo.dataset", "version": 1, "written_by": "test", "created_utc": "2026-11-22T10:00:00Z"}
    document |= {"tokenizer": None, "eod_id": None, "inputs": [], "bin": {"pieces": [pieces["bin"]]}}
    document |= {"recipe": {"sha256": "0" * 64, "steps": [{"step": "binarize", "settings": {}}]}, "idx": pieces["idx"]}
    Path(f"{prefix}.dataset.json").write_text(json.dumps(document))


def compare_data(world, one: str, other: str) -> str:
    """What two processes that read these data sets report."""
    place = one if world.is_rank0 else other
    try:
        require_same(world, config_properties(config_of(**SIZES, data_path=place, lr=2e-3)))
    except UsageError as error:
        return str(error)
    except SystemExit as end:
        return f"exit {end.code}"
    return "same"


@pytest.mark.complete
def test_sidecars_detect_one_other_token_of_large_data(tmp_path):
    """The token lies between the places that are sampled; without sidecars it passes."""
    places = write_two(tmp_path, (64 << 20) + 1)
    assert run_workers(compare_data, 2, *map(str, places)) == ["same", "same"]
    properties = config_properties(config_of(**SIZES, data_path=str(places[0]), lr=2e-3))
    assert fingerprint.sampled_warning(properties).startswith(
        "--data-path: hosts compare only 256 blocks of a file above 64 MiB"
    )
    for place in places:
        write_sidecar(place)
    first, second = run_workers(compare_data, 2, *map(str, places))
    assert second == "exit 2"
    (row,) = first.splitlines()[2:]
    assert row.split()[0] == "--data-path"
    assert row.count("sidecar") == 2


def write_two(folder: Path, size: int) -> list[Path]:
    """Two data sets, all zeros but for one token of the second, in a place that is not sampled."""
    places = []
    for name, token in (("one", b"\0"), ("other", b"\1")):
        (folder / name).mkdir()
        with (folder / name / "data.bin").open("wb") as handle:
            handle.truncate(size)
            handle.seek(6000)
            handle.write(token)
        (folder / name / "data.idx").write_bytes(b"index")
        places.append(folder / name / "data")
    return places


@pytest.mark.complete
def test_one_other_token_of_data_up_to_64_mib_is_detected(tmp_path):
    places = write_two(tmp_path, 64 << 20)
    first, second = run_workers(compare_data, 2, *map(str, places))
    assert second == "exit 2"
    assert "67,108,864 bytes" in first
    assert fingerprint.sampled_warning(config_properties(config_of(**SIZES, data_path=str(places[0]), lr=2e-3))) is None


def warned_of(world, data: str, hosts: list[str]) -> list[str]:
    """What is printed where equal processes are on these hosts."""
    printed: list[str] = []
    fingerprint.print_message = printed.append
    require_same(replace(world, host=hosts[world.rank]), config_properties(config_of(**SIZES, data_path=data, lr=2e-3)))
    return printed


@pytest.mark.complete
def test_hosts_with_large_data_get_one_warning(tmp_path):
    data, _ = write_two(tmp_path, (64 << 20) + 1)
    first, second = run_workers(warned_of, 2, str(data), ["a", "b"])
    assert len(first) == 1
    assert "hosts compare only 256 blocks" in first[0]
    assert second == []
    assert run_workers(warned_of, 2, str(data), ["a", "a"]) == [[], []]
    write_sidecar(data)
    assert run_workers(warned_of, 2, str(data), ["a", "b"]) == [[], []]


def test_differences_groups_equal_ranks_in_a_column():
    same, other, third = {"--lr": "1", "--seed": "2"}, {"--lr": "2", "--seed": "2"}, {"--lr": "3", "--seed": "2"}
    gathered = [("a", same), ("a", same), ("b", other), ("b", same), ("c", third)]
    lines = fingerprint.differences(gathered).splitlines()
    assert "ranks 0-1, 3 (a and 1 more)" in lines[1]
    assert "rank 2 (b)" in lines[1]
    assert [line.split() for line in lines[2:]] == [["--lr", "1", "2", "3"]]


def test_identity_of_large_file_covers_start_middle_and_end(tmp_path):
    size = (64 << 20) + 1
    path = Path(tmp_path / "large")
    path.write_bytes(bytes(size))
    before = fingerprint.identity_of(path)
    for place in (0, size - 1):
        changed = bytearray(size)
        changed[place] = 1
        path.write_bytes(changed)
        assert fingerprint.identity_of(path) != before
