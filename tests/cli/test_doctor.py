"""``dynmo-train doctor`` as a program: its exit codes, JSON, and measurements that ``dynmo-plan`` reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dynmo_balance.costs.devices import load_device
from tests.paths import CONTRACTS


def doctor(*words, launch=(), **environment):
    return subprocess.run(
        [sys.executable, "-m", "dynmo_train", *launch, "doctor", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


@pytest.mark.complete
def test_doctor_reports_every_component_and_exits_with_0(tmp_path):
    done = doctor("--run-dir", tmp_path, "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    found = {each["name"]: each for each in document["findings"]}
    assert document["usable"]
    assert {"torch", "gloo", "NCCL", "apex", "fused AdamW", "flash attention", "torch.compile"} <= found.keys()
    assert {"open files", "shared memory", "run directory", "processors", "interfaces", "dynmo-plan"} <= found.keys()
    assert all(each["cost"] and each["remedy"] for each in document["findings"] if each["status"] != "ok")


def test_doctor_without_torch_exits_with_1(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    done = doctor("--bandwidth", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "libtorch_cpu.so: cannot open shared object file" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not usable | error: 1")


@pytest.mark.complete
def test_doctor_reports_a_program_of_another_version(tmp_path):
    path = tmp_path / "dynmo-plan"
    path.write_text("#!/bin/sh\necho 'dynmo-plan 9.9 | distribution: other'\n")
    path.chmod(0o755)
    done = doctor(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert f"9.9 ({path})" in done.stdout


@pytest.mark.complete
def test_doctor_bandwidth_writes_a_device_for_the_planner(tmp_path):
    file = tmp_path / "here.toml"
    words = ["--bandwidth", "--nproc", 2, "--max-bytes", 65536, "--device", "cpu", "--format", "json"]
    done = doctor(*words, "--device-file", file)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["bandwidth"]
    assert [row["bytes"] for row in measured["pairs"]] == [1, 65536]
    assert all(row["ns"] > 0 for row in [*measured["pairs"], *measured["all_reduce"]])
    device = load_device(str(file))
    assert device.link_bandwidth_bytes_per_s == measured["link"]["bandwidth_bytes_per_s"]
    assert device.node_size == 2
    profile = CONTRACTS / "profile/valid/events.jsonl"
    command = [sys.executable, "-m", "dynmo_balance", "simulate", str(profile), "--device", str(file)]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0


@pytest.mark.complete
def test_doctor_under_a_launcher_reports_once():
    launch = ("launch", "local", "--nproc", "2", "--")
    done = doctor("--bandwidth", "--max-bytes", 65536, "--device", "cpu", launch=launch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks on 1 machine, gloo") == 1
    assert "slowest link within a machine: " in done.stdout


def test_doctor_device_file_without_bandwidth_is_refused(tmp_path):
    done = doctor("--device-file", tmp_path / "x.toml")
    assert done.returncode == 2
    assert "--device-file: needs --bandwidth" in done.stderr
