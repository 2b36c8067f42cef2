"""Checkpoints under addresses: bytes, memory, faults of the store and of the connection, and what a kill leaves."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save_file

from tests.cli import hub, object_store
from tests.cli.object_store import BUCKET, CUT, DROP, environment, get, keys, proxy, request
from tests.unit.dynmo_ckpt import native_checkpoints

for _module in ("moto", "s3fs", "flask"):
    pytest.importorskip(_module, reason=f"{_module} is not installed (extras remote and dev)")

MARKERS = ("config.json", "manifest.json", ".metadata", "latest", "latest_checkpointed_iteration.txt")


@pytest.fixture(scope="module")
def server():
    with object_store.moto_server() as port:
        yield port


@pytest.fixture
def place(server, request):
    """An address of this test alone, and its prefix in the bucket."""
    prefix = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"s3://{BUCKET}/{prefix}", prefix


@pytest.fixture
def checkpoint(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    state = native_checkpoints.optimizer_state(p)
    native_checkpoints.save(tmp_path / "in", {**p, **state}, m, tp=2, files={"tokenizer/vocab.txt": b"a\n"})
    return tmp_path / "in"


def command(port, *words, **changes):
    return subprocess.Popen(
        [sys.executable, "-m", "dynmo_ckpt", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(port, **changes),
    )


def run(port, *words, code=0, **changes):
    """Run a command to its end; returns its standard output and its messages."""
    with command(port, *words, **changes) as process:
        out, messages = process.communicate(timeout=300)
    assert process.returncode == code, (process.returncode, out, messages)
    assert "Traceback" not in messages
    return out, messages


def files_of(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_copy_there_and_back_has_the_same_bytes(server, place, checkpoint, tmp_path):
    address, prefix = place
    run(server, "copy", checkpoint, address)
    assert {key.removeprefix(f"{prefix}/"): get(server, key) for key in keys(server, prefix)} == files_of(checkpoint)
    run(server, "verify", address)
    run(server, "copy", address, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(checkpoint)
    described = [json.loads(run(server, "info", path, "--format", "json")[0]) for path in (checkpoint, address)]
    assert {**described[0], "path": ""} == {**described[1], "path": ""}
    assert described[1]["path"] == address


@pytest.mark.parametrize("target", ["native", "hf", "legacy", "dcp", "deepspeed"])
def test_convert_to_an_address_and_from_it(server, place, checkpoint, tmp_path, target):
    address, prefix = place
    run(server, "convert", checkpoint, address, "--to", target)
    assert f"{prefix}/.dynmo-upload" not in keys(server, prefix)
    assert "no tensor differs" in run(server, "diff", checkpoint, address)[0]
    run(server, "convert", address, tmp_path / "back", "--to", "native", "--no-check-logits")
    assert "no tensor differs" in run(server, "diff", checkpoint, tmp_path / "back")[0]
    run(server, "convert", checkpoint, tmp_path / "local", "--to", target, "--no-check-logits")
    local = {name: payload for name, payload in files_of(tmp_path / "local").items() if name not in RECORDS}
    sent = {key.removeprefix(f"{prefix}/"): get(server, key) for key in keys(server, prefix)}
    assert {name: payload for name, payload in sent.items() if name not in RECORDS} == local


# They have the time of the command.
RECORDS = ("conversion.json", "manifest.json")


def hub_directory(directory, num_bytes):
    """A GPT-2 of about this size, whose word embedding has most of it."""
    hidden = 512
    rows = num_bytes // (hidden * 4)
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": hidden, "n_positions": 8, "vocab_size": rows}
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (rows, hidden), "wpe.weight": (8, hidden), "ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    for name, shape in {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    for name in ("ln_1", "ln_2"):
        shapes |= {f"h.0.{name}.weight": (hidden,), f"h.0.{name}.bias": (hidden,)}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    tensors = {f"transformer.{name}": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


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
        (("info", "s3://nowhere/x"), 4, "there is no bucket nowhere"),
        (("info", f"s3://{BUCKET}/nothing"), 4, "nothing is stored under this address"),
        (("copy", "IN", "s3://nowhere/x"), 6, "there is no bucket nowhere"),
        (("copy", "IN", f"s3://{BUCKET}"), 2, "is a bucket"),
        (("copy", "IN", "hf://account/model"), 2, "is only read"),
        (("copy", "IN", "ftp://host/x"), 2, "not a supported address"),
        (("info", f"s3://key:secret@{BUCKET}/x"), 2, "credentials are read from the environment"),
        (("info", f"s3://{BUCKET}/a/../b"), 2, "relative"),
    ],
)
def test_wrong_address_has_a_clear_message(server, checkpoint, words, code, message):
    out, messages = run(server, *(checkpoint if word == "IN" else word for word in words), code=code)
    assert message in messages
    assert "secret" not in messages
    assert out == ""


def test_without_credentials_or_permission(server, place, checkpoint):
    address, prefix = place
    _, messages = run(server, "info", address, code=6, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert f"{address}: no credentials" in messages
    page = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    with proxy(server, lambda *_: (403, [("Content-Type", "application/xml")], page)) as port:
        for words in (("info", address), ("copy", checkpoint, address)):
            _, messages = run(port, *words, code=6)
            assert "access denied" in messages
    assert keys(server, prefix) == []


def test_missing_package_names_the_extra(tmp_path):
    blocked = "import sys; sys.modules['s3fs'] = None; from dynmo_ckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "info", "s3://bucket/x"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'dynmo-toolkit[remote]'" in done.stderr


@pytest.mark.parametrize("how", [CUT, DROP])
def test_connection_that_is_cut_while_reading(server, place, tmp_path, how):
    address, _ = place
    hub_directory(tmp_path / "in", 4 << 20)
    run(server, "copy", tmp_path / "in", address)
    # Range requests only: listings and the like work.
    hook = lambda method, path, _: how if method == "GET" and path.endswith("model.safetensors") else None  # noqa: E731
    with proxy(server, hook) as port:
        _, messages = run(port, "copy", address, tmp_path / "out", code=6)
    assert "try again" in messages
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_cut_upload_is_not_a_checkpoint(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 40 << 20)
    parts = []

    def hook(method, path, _number):
        if "partNumber" in path and "model.safetensors" in path:
            parts.append(path)
        return DROP if len(parts) > 2 else None  # and everything after it

    with proxy(server, hook) as port:
        _, messages = run(port, "copy", tmp_path / "in", address, code=6)
    assert "try again" in messages
    assert keys(server, prefix) == [f"{prefix}/.dynmo-upload"]
    assert "was cut" in run(server, "info", address, code=4)[1]
    assert "--overwrite" in run(server, "copy", tmp_path / "in", address, code=2)[1]
    run(server, "copy", tmp_path / "in", address, "--overwrite")
    run(server, "info", address)


@pytest.mark.parametrize("number", [2, 6, 10, 14, 18, 22])
def test_killed_upload_is_not_a_checkpoint(server, place, checkpoint, number):
    """The process is killed at one of its requests; whatever is there, nothing takes it for a model."""
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
    with proxy(server, hook) as port:
        started.append(command(port, "convert", checkpoint, address, "--to", "native", "--jobs", "1"))
        started[0].communicate(timeout=300)
    assert started[0].returncode == -signal.SIGKILL
    there = keys(server, prefix)
    assert not {key.rpartition("/")[2] for key in there} & set(MARKERS)
    if there:
        assert "was cut" in run(server, "info", address, code=4)[1]


def test_terminated_upload_leaves_nothing(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 60 << 20)
    started, parts = [], []

    def hook(_method, path, _number):
        if "partNumber" in path:
            parts.append(path)
            if len(parts) == 3:
                started[0].send_signal(signal.SIGTERM)

    with proxy(server, hook) as port:
        started.append(command(port, "copy", tmp_path / "in", address))
        started[0].communicate(timeout=300)
    assert started[0].returncode == 143
    assert keys(server, prefix) == []


def test_object_that_is_replaced_while_it_is_read(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 40 << 20)
    run(server, "copy", tmp_path / "in", address)
    key = f"{prefix}/model.safetensors"
    other = bytearray(get(server, key))
    other[-1] ^= 1
    ranges = []

    def hook(method, path, _number):
        if method == "GET" and path.endswith("model.safetensors"):
            ranges.append(path)
            if len(ranges) == 3:
                request(server, "PUT", f"/{BUCKET}/{key}", bytes(other))

    with proxy(server, hook) as port:
        _, messages = run(port, "copy", address, tmp_path / "out", code=4)
    assert "was replaced" in messages
    assert not (tmp_path / "out").exists()


def test_altered_object_is_not_copied(server, place, checkpoint, tmp_path):
    address, prefix = place
    run(server, "copy", checkpoint, address)
    key = next(key for key in keys(server, prefix) if key.endswith("model-p000-t00.safetensors"))
    payload = bytearray(get(server, key))
    payload[-3] ^= 4
    request(server, "PUT", f"/{BUCKET}/{key}", bytes(payload))
    for words in (("copy", address, tmp_path / "out"), ("convert", address, f"{address}-hf", "--to", "hf")):
        assert "CRC-32" in run(server, *words, code=4)[1]
    assert not (tmp_path / "out").exists()
    assert keys(server, f"{prefix}-hf") == []


def test_failed_upload_removes_the_objects_before(server, place, checkpoint):
    """The smallest file is sent last, and is altered: those before it are removed."""
    address, prefix = place
    files = sorted(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    payload = bytearray(files[0].read_bytes())
    payload[-3] ^= 4
    files[0].write_bytes(payload)
    assert "CRC-32" in run(server, "copy", checkpoint, address, "--jobs", "1", code=4)[1]
    assert keys(server, prefix) == []


def test_names_that_lead_elsewhere_are_refused(server, place, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "in", 1 << 20)
    run(server, "copy", tmp_path / "in", address)
    request(server, "PUT", f"/{BUCKET}/{prefix}/../../escaped", b"x")
    request(server, "PUT", f"/{BUCKET}/{prefix}/%2E%2E/escaped", b"x")
    _, messages = run(server, "copy", address, tmp_path / "out", code=4)
    assert "not a file name" in messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_existing_address_is_replaced_only_on_request(server, place, checkpoint, tmp_path):
    address, prefix = place
    hub_directory(tmp_path / "hub", 1 << 20)
    run(server, "copy", tmp_path / "hub", address)
    before = keys(server, prefix)
    assert "exists" in run(server, "copy", checkpoint, address, code=2)[1]
    assert keys(server, prefix) == before
    assert "overlaps" in run(server, "copy", address, f"{address}/inside", "--overwrite", code=2)[1]
    run(server, "copy", checkpoint, address, "--overwrite")
    assert {key.removeprefix(f"{prefix}/") for key in keys(server, prefix)} == set(files_of(checkpoint))


def test_torch_opens_what_was_sent(server, place, checkpoint):
    torch = pytest.importorskip("torch")
    address, prefix = place
    run(server, "convert", checkpoint, address, "--to", "legacy", "--no-check-logits")
    key = next(key for key in keys(server, prefix) if key.endswith("model_optim_rng.pt"))
    model = torch.load(io.BytesIO(get(server, key)), weights_only=False)["model"]["language_model"]
    stored = load_safetensors((checkpoint / "model-p000-t00.safetensors").read_bytes())["embedding.position.weight"]
    assert np.array_equal(model["embedding"]["position_embeddings"]["weight"].numpy(), stored)


def test_model_of_the_hub_is_read_by_ranges(tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (extra hf)")
    tensors = hub_directory(tmp_path / "model", 12 << 20)
    changes = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    with hub.hub("account/model", tmp_path / "model") as (port, requests):
        changes["HF_ENDPOINT"] = f"http://127.0.0.1:{port}"
        described = json.loads(run(0, "info", "hf://account/model", "--format", "json", **changes)[0])
        assert described["path"] == "hf://account/model"
        assert not [path for path, part in requests if "/resolve/" in path and "safetensors" in path and part is None]
        run(0, "convert", "hf://account/model", tmp_path / "native", "--to", "native", **changes)
        assert "no such model" in run(0, "info", "hf://account/other", code=4, **changes)[1]
    # Nothing was downloaded as a whole file into the cache of the hub.
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    run(0, "diff", tmp_path / "model", tmp_path / "native")
    stored = load_safetensors(next((tmp_path / "native").glob("model-*.safetensors")).read_bytes())
    assert np.array_equal(stored["embedding.word.weight"], tensors["transformer.wte.weight"])
