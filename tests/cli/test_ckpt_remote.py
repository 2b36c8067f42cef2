"""Checkpoints under addresses: bytes, memory, faults of the store and of the connection, and what a kill leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from tests.cli import hub
from tests.cli.checkpoint_files import MARKERS, RECORDS, files_of, hub_directory
from tests.cli.object_store import BUCKET, CUT, DROP, NEEDED, object_store, proxy
from tests.levels import complete_but
from tests.unit.dynmo_ckpt import native_checkpoints


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request):
    for module in NEEDED[request.param]:
        pytest.importorskip(module, reason=f"{module} is not installed (extras remote, gs and dev)")
    with object_store(request.param) as found:
        yield found


# The client of Google's store repeats each failed request for half a minute.
S3_ONLY = pytest.mark.parametrize("server", ["s3"], indirect=True)


@pytest.fixture
def place(server, request):
    """An address of this test alone, and its prefix in the bucket."""
    prefix = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"{server.scheme}://{BUCKET}/{prefix}", prefix


@pytest.fixture
def checkpoint(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    state = native_checkpoints.optimizer_state(p)
    files = {"tokenizer/vocab.txt": b"a\n", "tokenizer/empty.txt": b""}
    native_checkpoints.save(tmp_path / "in", {**p, **state}, m, tp=2, files=files)
    return tmp_path / "in"


def command(store, *words, **changes):
    return subprocess.Popen(
        [sys.executable, "-m", "dynmo_ckpt", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **changes} if store is None else store.environment(**changes),
    )


def run(store, *words, code=0, **changes):
    """Run a command to its end; returns its standard output and its messages."""
    with command(store, *words, **changes) as process:
        out, messages = process.communicate(timeout=300)
    assert process.returncode == code, (process.returncode, out, messages)
    assert "Traceback" not in messages
    return out, messages


def test_copy_there_and_back_has_the_same_bytes(server, place, checkpoint, tmp_path):
    address, prefix = place
    run(server, "copy", checkpoint, address)
    assert {key.removeprefix(f"{prefix}/"): server.get(key) for key in server.keys(prefix)} == files_of(checkpoint)
    run(server, "verify", address)
    run(server, "copy", address, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(checkpoint)
    described = [json.loads(run(server, "info", path, "--format", "json")[0]) for path in (checkpoint, address)]
    assert {**described[0], "path": ""} == {**described[1], "path": ""}
    assert described[1]["path"] == address


@pytest.mark.complete
@pytest.mark.parametrize("target", ["native", "hf", "legacy", "dcp", "deepspeed"])
def test_convert_to_an_address_and_from_it(server, place, checkpoint, tmp_path, target):
    address, prefix = place
    run(server, "convert", checkpoint, address, "--to", target)
    assert f"{prefix}/.dynmo-upload" not in server.keys(prefix)
    assert "no tensor differs" in run(server, "diff", checkpoint, address)[0]
    run(server, "convert", address, tmp_path / "back", "--to", "native", "--no-check-logits")
    assert "no tensor differs" in run(server, "diff", checkpoint, tmp_path / "back")[0]
    run(server, "convert", checkpoint, tmp_path / "local", "--to", target, "--no-check-logits")
    local = {name: payload for name, payload in files_of(tmp_path / "local").items() if name not in RECORDS}
    sent = {key.removeprefix(f"{prefix}/"): server.get(key) for key in server.keys(prefix)}
    assert {name: payload for name, payload in sent.items() if name not in RECORDS} == local


@pytest.mark.complete
def test_memory_does_not_grow_with_the_checkpoint(server, place, tmp_path):
    """300 MB go from one address to another, in one object, in less memory than half of that."""
    address, _ = place
    tensors = hub_directory(tmp_path / "in", 300 << 20)
    options = ("--format", "json", "--jobs", "1")
    up = json.loads(run(server, "copy", tmp_path / "in", f"{address}/a", *options)[0])
    words = ("convert", f"{address}/a", f"{address}/b", "--to", "hf", "--no-check-logits", *options)
    planned = json.loads(run(server, *words, "--plan")[0])
    through = json.loads(run(server, *words)[0])
    down = json.loads(run(server, "copy", f"{address}/b", tmp_path / "back", *options)[0])
    assert through["bytes"] > 300 << 20
    peaks = {name: each["peak_rss_bytes"] / 1e6 for name, each in (("up", up), ("through", through), ("down", down))}
    assert max(peaks.values()) < planned["memory_bytes_at_most"] / 1e6 < 250, (peaks, planned)
    assert max(peaks.values()) < 170, peaks
    assert planned["seconds"] is None
    found = load_safetensors((tmp_path / "back" / "model.safetensors").read_bytes())
    assert all(np.array_equal(found[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("info", "STORE://nowhere/x"), 4, "there is no bucket nowhere"),
        (("info", f"STORE://{BUCKET}/nothing"), 4, "nothing is stored under this address"),
        (("copy", "IN", "STORE://nowhere/x"), 6, "there is no bucket nowhere"),
        (("copy", "IN", f"STORE://{BUCKET}"), 2, "is a bucket"),
        (("copy", "IN", "ftp://host/x"), 2, "not a supported address"),
        (("info", f"STORE://key:secret@{BUCKET}/x"), 2, "credentials are read from the environment"),
        (("info", f"STORE://{BUCKET}/a/../b"), 2, "relative"),
    ],
)
def test_wrong_address_has_a_clear_message(server, checkpoint, words, code, message):
    named = [word.replace("STORE", server.scheme) for word in words]
    out, messages = run(server, *(checkpoint if word == "IN" else word for word in named), code=code)
    assert message in messages
    assert "secret" not in messages
    assert out == ""


@pytest.mark.complete
def test_without_credentials_or_permission(server, place, checkpoint):
    address, prefix = place
    if server.scheme == "s3":
        _, messages = run(server, "info", address, code=6, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
        assert f"{address}: no credentials" in messages
    with proxy(server, lambda *_: server.denial()) as store:
        for words in (("info", address), ("copy", checkpoint, address)):
            _, messages = run(store, *words, code=6)
            assert "access denied" in messages
    assert server.keys(prefix) == []


@pytest.mark.complete
def test_missing_package_names_the_extra(tmp_path):
    blocked = "import sys; sys.modules['s3fs'] = None; from dynmo_ckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "info", "s3://bucket/x"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'dynmo-toolkit[remote]'" in done.stderr


@pytest.mark.complete
@pytest.mark.parametrize("how", [CUT, DROP])
@S3_ONLY
def test_connection_that_is_cut_while_reading(server, place, tmp_path, how):
    address, _ = place
    hub_directory(tmp_path / "in", 4 << 20)
    run(server, "copy", tmp_path / "in", address)
    # Range requests only: listings and the like work.
    hook = lambda method, path, _: how if server.is_read(method, path, "model.safetensors") else None  # noqa: E731
    with proxy(server, hook) as store:
        _, messages = run(store, "copy", address, tmp_path / "out", code=6)
    assert "try again" in messages
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@S3_ONLY
def test_cut_upload_is_not_a_checkpoint(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 40 << 20)
    parts = []

    def hook(method, path, _number):
        if server.is_part(method, path) and (server.scheme == "gs" or "model.safetensors" in path):
            parts.append(path)
        return DROP if len(parts) > 2 else None  # and everything after it

    with proxy(server, hook) as store:
        _, messages = run(store, "copy", tmp_path / "in", address, code=6)
    assert "try again" in messages
    assert server.keys(prefix) == [f"{prefix}/.dynmo-upload"]
    assert "was cut" in run(server, "info", address, code=4)[1]
    assert "--overwrite" in run(server, "copy", tmp_path / "in", address, code=2)[1]
    run(server, "copy", tmp_path / "in", address, "--overwrite")
    run(server, "info", address)


@pytest.mark.complete
@pytest.mark.parametrize("number", [2, 6, 10, 14, 18, 22])
def test_killed_upload_is_not_a_checkpoint(server, place, checkpoint, number):
    """The process is killed at one of its requests; whatever is there, nothing takes it for a model."""
    if server.scheme == "gs":
        number = number * 18 // 22  # it has 18 such requests, S3 at least 22
    address, prefix = place
    started = []

    def hook(method, _path, _number):
        writes = started and method in ("PUT", "POST")
        hook.writes += bool(writes)
        if hook.writes == number and started[0].poll() is None:
            started[0].kill()
            return DROP
        return None

    hook.writes = 0
    with proxy(server, hook) as store:
        started.append(command(store, "convert", checkpoint, address, "--to", "native", "--jobs", "1"))
        started[0].communicate(timeout=300)
    assert started[0].returncode == -signal.SIGKILL
    there = server.keys(prefix)
    assert not {key.rpartition("/")[2] for key in there} & set(MARKERS)
    if there:
        assert "was cut" in run(server, "info", address, code=4)[1]


@pytest.mark.complete
def test_terminated_upload_leaves_nothing(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 60 << 20)
    started, parts = [], []

    def hook(method, path, _number):
        if server.is_part(method, path):
            parts.append(path)
            if len(parts) == 3:
                started[0].send_signal(signal.SIGTERM)

    with proxy(server, hook) as store:
        started.append(command(store, "copy", tmp_path / "in", address))
        started[0].communicate(timeout=300)
    assert started[0].returncode == 143
    assert server.keys(prefix) == []


def test_object_that_is_replaced_while_it_is_read(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 40 << 20)
    run(server, "copy", tmp_path / "in", address)
    key = f"{prefix}/model.safetensors"
    other = bytearray(server.get(key))
    other[-1] ^= 1
    ranges = []

    def hook(method, path, _number):
        if server.is_read(method, path, "model.safetensors"):
            ranges.append(path)
            if len(ranges) == 3:
                server.put(key, bytes(other))

    with proxy(server, hook) as store:
        _, messages = run(store, "copy", address, tmp_path / "out", code=4)
    assert "was replaced" in messages
    assert not (tmp_path / "out").exists()


@pytest.mark.complete
def test_altered_object_is_not_copied(server, place, checkpoint, tmp_path):
    address, prefix = place
    run(server, "copy", checkpoint, address)
    key = next(key for key in server.keys(prefix) if key.endswith("model-p000-t00.safetensors"))
    payload = bytearray(server.get(key))
    payload[-3] ^= 4
    server.put(key, bytes(payload))
    for words in (("copy", address, tmp_path / "out"), ("convert", address, f"{address}-hf", "--to", "hf")):
        assert "CRC-32" in run(server, *words, code=4)[1]
    assert not (tmp_path / "out").exists()
    assert server.keys(f"{prefix}-hf") == []


def test_failed_upload_removes_the_objects_before(server, place, checkpoint):
    """The smallest file is sent last, and is altered: those before it are removed."""
    address, prefix = place
    files = sorted(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    payload = bytearray(files[0].read_bytes())
    payload[-3] ^= 4
    files[0].write_bytes(payload)
    assert "CRC-32" in run(server, "copy", checkpoint, address, "--jobs", "1", code=4)[1]
    assert server.keys(prefix) == []


# The emulator of Google's store ends at such a name.
@pytest.mark.complete
@S3_ONLY
def test_names_that_lead_elsewhere_are_refused(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 1 << 20)
    run(server, "copy", tmp_path / "in", address)
    server.put(f"{prefix}/../../escaped", b"x")
    server.put(f"{prefix}/%2E%2E/escaped", b"x")
    _, messages = run(server, "copy", address, tmp_path / "out", code=4)
    assert "not a file name" in messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.complete
def test_existing_address_is_replaced_only_on_request(server, place, checkpoint, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "hub", 1 << 20)
    run(server, "copy", tmp_path / "hub", address)
    before = server.keys(prefix)
    assert "exists" in run(server, "copy", checkpoint, address, code=2)[1]
    assert server.keys(prefix) == before
    assert "overlaps" in run(server, "copy", address, f"{address}/inside", "--overwrite", code=2)[1]
    run(server, "copy", checkpoint, address, "--overwrite")
    assert {key.removeprefix(f"{prefix}/") for key in server.keys(prefix)} == set(files_of(checkpoint))


@pytest.mark.complete
def test_torch_opens_what_was_sent(server, place, checkpoint):
    torch = pytest.importorskip("torch")
    address, prefix = place
    run(server, "convert", checkpoint, address, "--to", "legacy", "--no-check-logits")
    key = next(key for key in server.keys(prefix) if key.endswith("model_optim_rng.pt"))
    model = torch.load(io.BytesIO(server.get(key)), weights_only=False)["model"]["language_model"]
    stored = load_safetensors((checkpoint / "model-p000-t00.safetensors").read_bytes())["embedding.position.weight"]
    assert np.array_equal(model["embedding"]["position_embeddings"]["weight"].numpy(), stored)


@pytest.mark.complete
def test_model_of_the_hub_is_read_by_ranges(tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (extra hf)")
    tensors = hub_directory(tmp_path / "model", 12 << 20)
    changes = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    with hub.hub("account/model", tmp_path / "model") as (port, requests):
        changes["HF_ENDPOINT"] = f"http://127.0.0.1:{port}"
        described = json.loads(run(None, "info", "hf://account/model", "--format", "json", **changes)[0])
        assert described["path"] == "hf://account/model"
        assert not [path for path, part in requests if "/resolve/" in path and "safetensors" in path and part is None]
        run(None, "convert", "hf://account/model", tmp_path / "native", "--to", "native", **changes)
        assert "no such model" in run(None, "info", "hf://account/other", code=4, **changes)[1]
    # Nothing was downloaded as a whole file into the cache of the hub.
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    run(None, "diff", tmp_path / "model", tmp_path / "native")
    stored = load_safetensors(next((tmp_path / "native").glob("model-*.safetensors")).read_bytes())
    assert np.array_equal(stored["embedding.word.weight"], tensors["transformer.wte.weight"])


def test_replacement_stages_first_and_leaves_nothing_else(server, place, checkpoint, tmp_path):
    """Until the mark, a reader has the old checkpoint; afterwards there are the new objects and no others."""
    address, prefix = place
    hub_directory(tmp_path / "hub", 1 << 20)
    run(server, "copy", tmp_path / "hub", address)
    before = {key: server.get(key) for key in server.keys(prefix)}
    states = []

    def hook(method, path, _number):
        if method in ("PUT", "POST", "DELETE") and not any(".dynmo-upload" in each for each in states[-1:]):
            there = {key for key in server.keys(prefix) if "/.dynmo-staging/" not in key}
            states.append(there)
            if f"{prefix}/.dynmo-upload" not in there:
                assert {key: server.get(key) for key in there} == before

    with proxy(server, hook) as store:
        run(store, "copy", checkpoint, address, "--overwrite")
    assert len(states) > 5
    assert {key.removeprefix(f"{prefix}/"): server.get(key) for key in server.keys(prefix)} == files_of(checkpoint)
    run(server, "verify", address)


def other_checkpoint(directory):
    """A checkpoint with the names of ``checkpoint`` and other numbers, and one more file."""
    m = native_checkpoints.model()
    changed = {name: value + 1 for name, value in native_checkpoints.parameters(m).items()}
    native_checkpoints.save(directory, changed, m, tp=2, files={"old.txt": b"old\n"})


def test_failed_replacement_leaves_the_old_checkpoint(server, place, checkpoint, tmp_path):
    address, prefix = place
    other_checkpoint(tmp_path / "old")
    run(server, "copy", tmp_path / "old", address)
    path = min(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    payload = bytearray(path.read_bytes())
    payload[-3] ^= 4
    path.write_bytes(payload)
    assert "CRC-32" in run(server, "copy", checkpoint, address, "--overwrite", "--jobs", "1", code=4)[1]
    found = {key.removeprefix(f"{prefix}/"): server.get(key) for key in server.keys(prefix)}
    assert found == files_of(tmp_path / "old")


@pytest.mark.complete
@pytest.mark.parametrize("number", [2, 13, 18, 24, 30, 40])
def test_killed_replacement_is_the_old_or_no_checkpoint(server, place, checkpoint, tmp_path, number):
    """Whatever a kill leaves is the old checkpoint, the new one, or refused and without markers; never a mixture."""
    address, prefix = place
    other_checkpoint(tmp_path / "old")
    run(server, "copy", tmp_path / "old", address)
    started = []

    def hook(method, _path, _number):
        hook.writes += bool(started and method in ("PUT", "POST", "DELETE"))
        if hook.writes == number and started[0].poll() is None:
            started[0].kill()
            return DROP
        return None

    hook.writes = 0
    with proxy(server, hook) as store:
        started.append(command(store, "copy", checkpoint, address, "--overwrite", "--jobs", "1"))
        started[0].communicate(timeout=300)
    there = [key.removeprefix(f"{prefix}/") for key in server.keys(prefix)]
    visible = {name: server.get(f"{prefix}/{name}") for name in there if not name.startswith(".dynmo-")}
    if ".dynmo-upload" in there:
        assert "was cut" in run(server, "info", address, code=4)[1]
        if "manifest.json" in visible:  # the first object that is removed, and the last one that is copied
            assert visible in (files_of(tmp_path / "old"), files_of(checkpoint))
    else:
        assert visible in (files_of(tmp_path / "old"), files_of(checkpoint))
        run(server, "verify", address)
    run(server, "copy", checkpoint, address, "--overwrite")
    assert {key.removeprefix(f"{prefix}/"): server.get(key) for key in server.keys(prefix)} == files_of(checkpoint)


@pytest.mark.parametrize("target", complete_but(["hf", "legacy"], "hf"))
def test_logits_of_addresses_are_compared(server, place, checkpoint, tmp_path, target):
    """Through a local copy for transformers, through the reader for other formats; nothing remains of the copies."""
    pytest.importorskip("transformers")
    address, _ = place
    (tmp_path / "temporary").mkdir()
    changes = {"TMPDIR": str(tmp_path / "temporary")}
    done = run(server, "convert", checkpoint, f"{address}/a", "--to", target, "--format", "json", **changes)[0]
    assert json.loads(done)["logits"]["max_abs"] < 1e-5
    done = run(server, "convert", f"{address}/a", f"{address}/b", "--to", "hf", "--check-logits", **changes)[1]
    assert "logits of input and output differ by at most" in done
    assert not list((tmp_path / "temporary").glob("dynmo-ckpt-*"))  # torch has a folder of its own there


@pytest.mark.complete
def test_unlike_logits_leave_no_objects(server, place, checkpoint):
    """The objects have the bytes that were planned, and compute something else."""
    pytest.importorskip("transformers")
    address, prefix = place
    program = (
        "import sys; from dynmo_ckpt.operations import logits; found = logits.hf_logits;"
        "logits.hf_logits = lambda *a, **k: [each if each is None else each + 1 for each in found(*a, **k)];"
        "from dynmo_ckpt.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "convert", str(checkpoint), address, "--to", "hf"],
        capture_output=True,
        text=True,
        timeout=120,
        env=server.environment(),
    )
    assert "logits of input and output differ by" in done.stderr
    assert done.returncode == 5
    assert server.keys(prefix) == []
