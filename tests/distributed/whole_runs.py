"""Small whole training runs from the command line, over a data set made here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from dynmo_train.launch.find_command import program_path
from tests.distributed.workers import run_workers
from tests.paths import ROOT
from tests.waiting import wait_for

FIELDS = json.loads((ROOT / "dynmo_train" / "formats" / "run_lines.schema.json").read_text(encoding="utf-8"))
OPTIONS = {
    "num-layers": "4",
    "hidden-size": "32",
    "num-attention-heads": "4",
    "seq-length": "32",
    "micro-batch-size": "2",
    "global-batch-size": "16",
    "train-iters": "24",
    "lr": "2e-3",
    "vocab-size": "97",
    "split": "80,20,0",
    "eval-iters": "1",
    "eval-interval": "12",
    "log-interval": "8",
    "clip-grad": "0.3",
    "pruning-start-iter": "4",
    "pruning-end-iter": "12",
    "pruning-freq": "4",
    "freeze-schedule": "6:1,14:2",
    "rebalance-interval": "3",
    "granularity": "sublayer",
}


def write_data(prefix: Path, documents: int = 60, lengths: tuple[int, int] = (80, 300)) -> Path:
    """An indexed data set of documents with some structure, in the mmap form."""
    random = np.random.default_rng(5)
    texts = [(np.cumsum(random.integers(1, 4, random.integers(*lengths))) % 97).astype("<u2") for _ in range(documents)]
    prefix.with_suffix(".bin").write_bytes(b"".join(text.tobytes() for text in texts))
    sizes = np.array([len(text) for text in texts])
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    pointers = np.concatenate([[0], sizes.cumsum()[:-1] * 2])
    arrays = (sizes.astype("<i4"), pointers.astype("<i8"), np.arange(documents + 1).astype("<i8"))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return prefix


def arguments(data: Path | None, run: Path, *extra: str, family: str = "gpt", **options: str | None) -> list[str]:
    """The arguments of a run; ``options`` override ``OPTIONS``, underscores for dashes; None leaves one out.

    Without ``data`` the run has no --data-path, and prunes nothing.
    """
    merged = OPTIONS | {name.replace("_", "-"): value for name, value in options.items()}
    flags = [part for name, value in merged.items() if value is not None for part in (f"--{name}", value)]
    given = [] if data is None else ["--data-path", str(data), "--sparsify"]
    return ["pretrain", family, "--run-dir", str(run), *given, *flags, *extra]


def command(data: Path, run: Path, workers: int, *extra: str, **options: str) -> list[str]:
    """The command line of a run, with the launcher where there are several workers."""
    train = arguments(data, run, *extra, **options)
    launch = ["launch", "local", "--nproc", str(workers), "--log-dir", str(run.parent / f"{run.name}-logs"), "--"]
    program = [sys.executable, "-m", "dynmo_train"]
    return [*program, *launch, *train] if workers > 1 else [*program, *train]


def run_command(words: list[str]) -> tuple[int, str]:
    """Run the command in this process; its exit code and stderr."""
    from dynmo_train.cli import main

    sys.argv = ["dynmo-train", *words]
    talk = io.StringIO()
    with contextlib.redirect_stderr(talk), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0), talk.getvalue()
    return 0, talk.getvalue()


def interrupted_command(words: list[str], run: str) -> tuple[int, str]:
    """A run whose first process gets SIGUSR1 after its first steps, and whose second one SIGTERM after that save."""
    rank = int(os.environ["RANK"])
    sign, number = (("metrics.jsonl", signal.SIGUSR1), ("checkpoints/LATEST", signal.SIGTERM))[rank]

    def interrupt() -> None:
        # Empty files may exist before training starts; until then a run ignores these signals.
        wait_for(lambda: (Path(run) / sign).exists() and (Path(run) / sign).stat().st_size, sign, every_s=0.002)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    return run_command(words)


def train(data: Path | None, run: Path, workers: int, *extra: str, **options: str | None) -> str:
    """Run to the end in processes that have torch loaded already; must succeed. Returns the stderr of worker 0."""
    results = run_workers(run_command, workers, arguments(data, run, *extra, **options), joins=False)
    assert [code for code, _ in results] == [0] * workers, str(results)
    check_fields(run)
    return str(results[0][1])


def check_fields(run: Path) -> None:
    """Every line of metrics and events has exactly fields that ``dynmo_train/formats/fields.md`` lists."""
    for name, schema in FIELDS["$defs"].items():
        for line in lines(run / name) if (run / name).exists() else ():
            if not any(jsonschema.Draft202012Validator(each).is_valid(line) for each in schema["anyOf"]):
                raise AssertionError(f"{name}: a record with fields that run_lines.schema.json does not list: {line}")


def lines(path: Path) -> list[dict]:
    """The documents of a file, without a last line that its writer has not completed yet."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def figures(run: Path) -> dict[int, tuple]:
    """Step -> (loss, gradient norm); a resumed step counts once."""
    return {
        line["step"]: (line["lm_loss"], line["grad_norm"]) for line in lines(run / "metrics.jsonl") if "lm_loss" in line
    }


def tensors(run: Path, step: int) -> dict[str, str]:
    """Tensor name -> CRC-32 in the checkpoint of a step."""
    return {name: entry["shards"][0]["crc32"] for name, entry in manifest_of(run, step)["tensors"].items()}


def manifest_of(run: Path, step: int) -> dict:
    """The manifest of the checkpoint of a step."""
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())


def events(run: Path, kind: str) -> list[dict]:
    return [event for event in lines(run / "events.jsonl") if event["kind"] == kind]


def close_losses(run: Path, whole: Path) -> None:
    expected = figures(whole)
    for step, (loss, _) in figures(run).items():
        assert loss == pytest.approx(expected[step][0], rel=1e-5)


def verify(run: Path) -> None:
    """Every checkpoint passes the owner's full check."""
    for path in sorted((run / "checkpoints").glob("step-*")):
        command = [program_path("dynmo-ckpt"), "verify", str(path), "--level", "full"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
