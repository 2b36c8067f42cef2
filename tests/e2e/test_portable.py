"""The quickstart's steps without the calls that macOS lacks, and the helpers that stand in for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dynmo_ckpt._common import portable

pytestmark = pytest.mark.complete

WITHOUT = """
import builtins, os
for name in dir(os):
    if name.startswith(("posix_fa", "POSIX_FADV", "sched_", "SCHED_", "memfd", "MFD_", "eventfd", "EFD_", "pidfd")):
        delattr(os, name)
for name in ("copy_file_range", "preadv", "pwritev", "O_DIRECT", "O_TMPFILE", "getrandom", "setns", "unshare"):
    if hasattr(os, name):
        delattr(os, name)
_open = builtins.open
def open_without_proc(file, *arguments, **options):
    if str(file).startswith("/proc/self/"):
        raise FileNotFoundError(2, "no such file", file)
    return _open(file, *arguments, **options)
builtins.open = open_without_proc
"""
TRAIN = (
    "pretrain gpt --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 3 --lr 1e-3 --eval-iters 0 --split 100,0,0 --data-path data_text_document "
    "--tokenizer-model tokenizer.json --run-dir run"
)
STEPS = (
    ("dynmo_tools", "sample-corpus --output corpus.jsonl --max-bytes 60000"),
    ("dynmo_tools", "merge corpus.jsonl corpus.jsonl --output twice.jsonl"),
    ("dynmo_tools", "train-tokenizer twice.jsonl --output tokenizer.json --vocab-size 400"),
    ("dynmo_tools", "binarize twice.jsonl --output data --tokenizer-model tokenizer.json"),
    ("dynmo_train", TRAIN),
    ("dynmo_balance", "partition run --stages 2 --output plan.json"),
    ("dynmo_ckpt", "merge run merged"),
    ("dynmo_ckpt", "convert merged hf --to hf"),
    ("dynmo_ckpt", "verify merged"),
)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_steps_run_without_linux_calls(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    for package, words in STEPS:
        done = subprocess.run(
            [sys.executable, "-m", package, *words.split()],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{package} {words}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_allocate_without_fallocate_extends_the_file(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with (tmp_path / "file").open("w+b") as handle:
        handle.write(b"abc")
        handle.flush()
        portable.allocate(handle.fileno(), 0, 10)
        portable.allocate(handle.fileno(), 0, 5)
        assert (tmp_path / "file").read_bytes() == b"abc" + bytes(7)


def test_read_into_without_preadv_fills_the_buffer(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "preadv", raising=False)
    (tmp_path / "file").write_bytes(b"0123456789")
    buffer = bytearray(4)
    with (tmp_path / "file").open("rb") as handle:
        assert portable.read_into(handle.fileno(), memoryview(buffer), 8) == 2
        assert buffer == b"89\0\0"
        assert portable.read_into(handle.fileno(), memoryview(buffer), 10) == 0


@pytest.mark.parametrize(("system", "factor"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_bytes_on_each_system(monkeypatch, system, factor):
    class Usage:
        ru_maxrss = 5000

    monkeypatch.setattr(portable.sys, "platform", system)
    monkeypatch.setattr(portable.resource, "getrusage", lambda _: Usage)
    assert portable.peak_memory_bytes() == 5000 * factor
