"""A real Ray cluster on this machine, of one node with two CPUs, and ``dynmo-prep --executor ray`` on it.

Skipped where ray is not installed (``pip install 'dynmo-toolkit[ray]'``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.ports import free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.complete, pytest.mark.timeout(600)]

HOLD = "DYNMO_RAY_TEST_HOLD"
# Of every process of the cluster: the first task that opens an output while a file $HOLD exists waits there, and writes
# its process id next to that file.
SITECUSTOMIZE = f"""
import os, signal, sys
hold = os.environ["{HOLD}"]
def wait(event, arguments):
    if event == "open" and ".tmp-" in str(arguments[0]) and "/parts/" in str(arguments[0]) and os.path.exists(hold):
        descriptor = os.open(hold + ".part", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, str(os.getpid()).encode())
        os.rename(hold + ".part", hold + ".blocked")
        while True:
            signal.pause()
sys.addaudithook(wait)
"""
TEXT = "The river runs past the old mill and the water turns its heavy wheel all day long. "


def prep(folder, *words, address="", code=0):
    """Run dynmo-prep in a folder: stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_ADDRESS": address} if address else {}
    done = subprocess.run(
        [sys.executable, "-m", "dynmo_tools", *map(str, words)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def needs_ray():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray: pip install 'dynmo-toolkit[ray]'")


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """A file that does not exist; where a test makes it, the next task on the cluster waits for ever."""
    return tmp_path_factory.mktemp("ray-hold") / "hold"


@pytest.fixture(scope="module")
def address(needs_ray, hold):
    """The address of a cluster that is started here, in a folder that no command runs in."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray puts sockets below it
    (hold.parent / "sitecustomize.py").write_text(SITECUSTOMIZE)
    paths = [str(hold.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, HOLD: str(hold), "PYTHONPATH": os.pathsep.join(paths)}
    port = free_port()
    words = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    words += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--object-store-memory=100000000"]
    with open(folder / "log", "w") as log:
        head = subprocess.Popen(
            [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *words],
            cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(
                lambda: head.poll() is not None or "Ray runtime started" in (folder / "log").read_text(),
                "start of Ray",
                seconds=120,
            )
            assert head.poll() is None, (folder / "log").read_text()
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            try:
                head.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait()
            shutil.rmtree(folder, ignore_errors=True)


def corpus(folder, documents):
    folder.mkdir()
    rows = [
        {"text": TEXT * 8 + f"Number {number}. " * (number % 5), "url": f"u{number}"} for number in range(documents)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_ray_relative_paths_work_from_another_folder(address, tmp_path):
    folder = corpus(tmp_path / "work", 60)
    common = ("dedup", "in.jsonl", "--task-bytes", 10_000)
    prep(folder, *common, "-o", "local.jsonl")
    prep(folder, *common, "-o", "ray.jsonl", "--executor", "ray", "--save-fingerprints", "prints", address=address)
    assert (folder / "ray.jsonl").read_bytes() == (folder / "local.jsonl").read_bytes() != b""
    assert (folder / "prints" / "header.json").exists()


def test_ray_invalid_input_is_reported_as_locally(address, tmp_path):
    folder = corpus(tmp_path / "work", 3)
    (folder / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    errors = prep(folder, "merge", "cut.jsonl.gz", "-o", "out.jsonl", "--executor", "ray", address=address, code=1)
    assert "is truncated" in errors
    assert "Traceback" not in errors


def test_ray_task_of_a_lost_worker_is_restarted(address, hold, tmp_path):
    folder = corpus(tmp_path / "work", 60)
    words = ("clean", "in.jsonl", "--min-tokens", 10, "--task-bytes", 1 << 30)
    prep(folder, *words, "-o", "local.jsonl")
    command = [sys.executable, "-m", "dynmo_tools", *map(str, words), "-o", "ray.jsonl", "--executor", "ray"]
    hold.touch()
    blocked = Path(f"{hold}.blocked")
    with open(folder / "log", "w") as log:
        run = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "RAY_ADDRESS": address}, stdout=log, stderr=log
        )  # fmt: skip
        try:
            # The first task waits in the middle.
            wait_for(lambda: run.poll() is not None or blocked.exists(), "blocked task", seconds=120)
            assert run.poll() is None, (folder / "log").read_text()
            hold.unlink()
            os.kill(int(blocked.read_text()), signal.SIGKILL)
            assert run.wait(200) == 0, (folder / "log").read_text()
        finally:
            hold.unlink(missing_ok=True)
            run.kill()
            run.wait()
    assert (folder / "ray.jsonl").read_bytes() == (folder / "local.jsonl").read_bytes() != b""
    assert [path.name for path in folder.rglob("*.tmp-*")] == []


def test_ray_refused_connection_is_reported(needs_ray, tmp_path):
    folder = corpus(tmp_path / "work", 3)
    address = f"127.0.0.1:{free_port()}"
    errors = prep(folder, "merge", "in.jsonl", "-o", "out.jsonl", "--executor", "ray", address=address, code=1)
    assert f"RAY_ADDRESS {address}: cannot connect to a Ray cluster" in errors
    assert "Traceback" not in errors


def test_ray_token_hint_names_the_unset_variable(monkeypatch):
    from dynmo_tools.runner import ray as ray_runner

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray_runner, "probe", lambda _address: None)

    def refuse(**_options):
        raise RuntimeError("Failed to connect to Ray cluster at 10.0.0.1:6379\nmore")

    for mode, hint in (("", True), ("token", False)):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        with pytest.raises(ray_runner.DynmoError, match="Failed to connect to Ray cluster") as error:
            ray_runner.connect(SimpleNamespace(init=refuse), 1)
        assert ("set RAY_AUTH_MODE=token" in str(error.value)) is hint


def test_ray_node_without_the_folder_is_reported(tmp_path):
    from dynmo_tools.runner import ray as ray_runner

    with (
        pytest.raises(ray_runner.UsageError, match="all nodes must share it"),
        ray_runner.working_directory(tmp_path / "none"),
    ):
        pass
