"""Checkpoints in repositories of the Hugging Face Hub: contents, hashes, one commit, memory, and faults of the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest
from safetensors.numpy import load as load_safetensors

from tests.cli.checkpoint_files import RECORDS, files_of, hub_directory
from tests.cli.writable_hub import DROP, LOSE, READ_TOKEN, REPOSITORY, blob_id, writable_hub
from tests.levels import complete_but
from tests.unit.dynmo_ckpt import native_checkpoints

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (extra hf)")

ADDRESS = f"hf://{REPOSITORY}"
NEW = {".gitattributes"}  # what a new repository has


@pytest.fixture
def hub(tmp_path):
    with writable_hub(tmp_path / "hub") as found:
        yield found


@pytest.fixture
def checkpoint(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    files = {"tokenizer/vocab.txt": b"a\n", "tokenizer/empty.txt": b""}
    native_checkpoints.save(tmp_path / "in", p, m, tp=2, files=files)
    return tmp_path / "in"


def run(hub, *words, code=0, **changes):
    """Run a command to its end; returns its standard output and its messages."""
    done = subprocess.run(
        [sys.executable, "-m", "dynmo_ckpt", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **hub.environment, "OMP_NUM_THREADS": "1", **changes},
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def sent(hub, branch="main", folder=""):
    """The files of a folder of a branch, without those of a new repository."""
    found = {name.removeprefix(folder): each for name, each in hub.files(branch).items() if name.startswith(folder)}
    return {name: payload for name, payload in found.items() if name not in NEW}


@pytest.mark.complete
@pytest.mark.parametrize("parts", ["one", "several"])
def test_copy_to_the_hub_and_back_has_the_same_bytes(hub, checkpoint, tmp_path, parts):
    """Git LFS in one request, or in parts; the hub refuses contents that do not have the announced SHA-256."""
    hub_directory(tmp_path / "large", 12 << 20)
    hub.multipart_above = 1 << 40 if parts == "one" else 5 << 20
    run(hub, "copy", checkpoint, ADDRESS)
    assert sent(hub) == files_of(checkpoint)
    assert len(hub.commits) == 2
    tree = hub.tree("main")
    assert all(tree[name][1] == name.endswith(".safetensors") for name in sent(hub))
    run(hub, "verify", ADDRESS)
    run(hub, "copy", ADDRESS, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(checkpoint)
    run(hub, "copy", tmp_path / "large", f"{ADDRESS}/large")
    assert sent(hub, folder="large/") == files_of(tmp_path / "large")
    assert (parts == "several") == any("/lfs/part/" in path for _, path in hub.requests)


@pytest.mark.complete
@pytest.mark.parametrize("target", ["native", "hf", "dcp"])
def test_convert_to_the_hub_writes_the_local_files(hub, checkpoint, tmp_path, target):
    messages = run(hub, "convert", checkpoint, f"{ADDRESS}/a/b", "--to", target)[1]
    assert ("logits of input and output differ by at most" in messages) == (target != "native")
    run(hub, "convert", checkpoint, tmp_path / "local", "--to", target, "--no-check-logits")
    local, found = files_of(tmp_path / "local"), sent(hub, folder="a/b/")
    assert found.keys() == local.keys()
    assert all(found[name] == payload for name, payload in local.items() if name not in RECORDS)
    assert "no tensor differs" in run(hub, "diff", checkpoint, f"{ADDRESS}/a/b")[0]


@pytest.mark.complete
def test_memory_on_the_way_to_the_hub_does_not_grow(hub, tmp_path):
    """300 MB, in one file: less than half of it in memory, and nothing remains in the folder of temporary files."""
    tensors = hub_directory(tmp_path / "in", 300 << 20)
    (tmp_path / "temporary").mkdir()
    options = ("--to", "hf", "--no-check-logits", "--format", "json", "--jobs", "1")
    words = ("convert", tmp_path / "in", ADDRESS, *options)
    planned = json.loads(run(hub, *words, "--plan")[0])
    done = json.loads(run(hub, *words, TMPDIR=str(tmp_path / "temporary"))[0])
    assert done["bytes"] > 300 << 20
    assert done["peak_rss_bytes"] < 150e6
    assert done["peak_rss_bytes"] < planned["memory_bytes_at_most"]
    assert not list((tmp_path / "temporary").iterdir())
    found = load_safetensors(hub.files()["model.safetensors"])
    assert all((found[name] == value).all() for name, value in tensors.items())


@pytest.mark.complete
def test_replacement_is_one_commit_without_the_old_files(hub, checkpoint, tmp_path):
    """At each request a reader of the branch sees the old checkpoint; the files of the repository stay."""
    hub_directory(tmp_path / "model", 1 << 20)
    head = dict(hub.tree("main"))
    hub.commit("main", {**head, "README.md": (hub.store(b"# A model\n"), False)})
    card = b"---\nlicense: mit\n---\n# Another model\n"
    (tmp_path / "model" / "README.md").write_bytes(card)
    run(hub, "copy", tmp_path / "model", ADDRESS)
    before = hub.tree("main")
    assert "exists" in run(hub, "copy", checkpoint, ADDRESS, code=2)[1]
    states = []
    hub.hook = lambda *_: states.append(hub.tree("main"))
    run(hub, "copy", checkpoint, ADDRESS, "--overwrite")
    assert sent(hub) == {**files_of(checkpoint), "README.md": card}
    assert [state for k, state in enumerate(states) if state not in states[:k]] == [before, hub.tree("main")]
    run(hub, "verify", ADDRESS)


@pytest.mark.complete
def test_average_is_written_to_the_hub(hub, checkpoint):
    """A command that checks its output before it opens its inputs; a new repository counts as empty."""
    run(hub, "average", checkpoint, checkpoint, "--output", ADDRESS)
    run(hub, "verify", ADDRESS)
    assert "no tensor differs" in run(hub, "diff", checkpoint, ADDRESS)[0]


@pytest.mark.complete
def test_branch_of_an_address_is_written(hub, checkpoint):
    hub.commit("dev", dict(hub.tree("main")))
    run(hub, "copy", checkpoint, f"{ADDRESS}@dev/run")
    assert sent(hub) == {}
    assert sent(hub, "dev", "run/") == files_of(checkpoint)
    run(hub, "verify", f"{ADDRESS}@dev/run")


@pytest.mark.complete
@pytest.mark.parametrize(
    ("address", "changes", "code", "message"),
    [
        (ADDRESS, {"HF_TOKEN": "wrong"}, 6, "does not accept the token"),
        (ADDRESS, {"HF_TOKEN": READ_TOKEN}, 6, "permission to write"),
        (ADDRESS, {"HF_TOKEN": ""}, 6, "set HF_TOKEN"),
        ("hf://account/other", {}, 6, "hf repos create account/other"),
        (f"{ADDRESS}@dev", {}, 6, "with a branch dev"),
        (f"{ADDRESS}@{'a' * 40}", {}, 2, "a commit does not change"),
        ("hf://buckets/account/x", {}, 2, "buckets are only read"),
        (ADDRESS, {"HF_ENDPOINT": "http://127.0.0.1:9"}, 6, "cannot be used"),
    ],
)
def test_hub_that_refuses_has_a_clear_message(hub, checkpoint, address, changes, code, message):
    out, messages = run(hub, "copy", checkpoint, address, code=code, **changes)
    assert message in messages
    assert "hf_" not in messages
    assert out == ""
    assert len(hub.commits) == 1


@pytest.mark.parametrize(
    "path", complete_but(["preupload", "objects/batch", "/lfs/upload", "/lfs/verify", "/commit/"], "/commit/")
)
@pytest.mark.parametrize("fault", complete_but(["status", DROP, LOSE], LOSE))
def test_passing_fault_of_the_hub_is_repeated(hub, checkpoint, path, fault):
    """A status, a connection that ends before the request is served, and one that ends after it."""
    faults = [(500, b"{}") if fault == "status" else fault]
    hub.hook = lambda _method, url: faults.pop() if path in url and faults else None
    run(hub, "copy", checkpoint, ADDRESS)
    assert not faults
    assert sent(hub) == files_of(checkpoint)
    assert len(hub.commits) == 2  # also where the answer to the commit was lost


@pytest.mark.complete
@pytest.mark.parametrize("path", ["preupload", "/lfs/upload", "/commit/"])
def test_lasting_refusal_leaves_the_branch_as_it_was(hub, checkpoint, path):
    hub.hook = lambda _method, url: (403, b'{"error": "Forbidden"}') if path in url else None
    assert "access denied" in run(hub, "copy", checkpoint, ADDRESS, code=6)[1]
    assert len(hub.commits) == 1


def test_branch_that_changes_meanwhile_is_not_overwritten(hub, checkpoint):
    """Another commit arrives between the first upload and ours: it stays, and ours is refused."""

    def hook(_method, path):
        if "/commit/" in path and len(hub.commits) == 1:
            hub.commit("main", {**hub.tree("main"), "other.txt": (hub.store(b"x"), False)})

    hub.hook = hook
    assert "changed by someone else" in run(hub, "copy", checkpoint, ADDRESS, code=6)[1]
    assert set(hub.files()) == NEW | {"other.txt"}


@pytest.mark.complete
def test_file_that_the_repository_ignores_is_refused(hub, checkpoint):
    """The client leaves such files out of a commit without an error."""
    hub.ignored = ("vocab.txt",)
    assert ".gitignore of the repository excludes" in run(hub, "copy", checkpoint, ADDRESS, code=2)[1]
    assert len(hub.commits) == 1


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["model.safetensors", "config.json"])
def test_contents_that_the_hub_altered_are_found(hub, tmp_path, kind):
    hub_directory(tmp_path / "in", 1 << 20)
    commit = hub.commit

    def altered(branch, files):
        payload = bytearray((hub.folder / files[kind][0]).read_bytes())
        payload[-1] ^= 1
        return commit(branch, {**files, kind: (hub.store(bytes(payload)), files[kind][1])})

    hub.commit = altered
    assert f"{kind}: has other contents" in run(hub, "copy", tmp_path / "in", ADDRESS, code=6)[1]


@pytest.mark.complete
def test_altered_input_makes_no_commit(hub, checkpoint):
    path = min(checkpoint.glob("*.safetensors"))
    payload = bytearray(path.read_bytes())
    payload[-3] ^= 4
    path.write_bytes(payload)
    assert "CRC-32" in run(hub, "copy", checkpoint, ADDRESS, code=4)[1]
    assert len(hub.commits) == 1


@pytest.mark.complete
def test_installed_chunk_storage_is_used_unless_disabled(hub, checkpoint):
    """With hf_xet the client asks for a token of the chunk storage instead of Git LFS; a refusal there is reported."""
    pytest.importorskip("hf_xet", reason="hf_xet is not installed")
    hub.hook = lambda _method, path: (403, b'{"error": "Forbidden"}') if "xet-write-token" in path else None
    run(hub, "copy", checkpoint, ADDRESS, code=6, HF_HUB_DISABLE_XET="0")
    assert any("xet-write-token" in path for _, path in hub.requests)
    assert not any("objects/batch" in path for _, path in hub.requests)
    assert len(hub.commits) == 1


def test_blob_id_is_that_of_git(tmp_path):
    (tmp_path / "x").write_bytes(b"hello\n")
    found = subprocess.run(["git", "hash-object", tmp_path / "x"], capture_output=True, text=True, check=True)
    from dynmo_ckpt.io.hub import git_blob_id

    assert git_blob_id(tmp_path / "x") == git_blob_id(b"hello\n") == blob_id(b"hello\n") == found.stdout.strip()
    assert hashlib.sha1(b"blob 0\0").hexdigest() == git_blob_id(b"")
