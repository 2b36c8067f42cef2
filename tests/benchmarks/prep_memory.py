"""Memory of the processes of a command: the largest one of the process tree, for several input sizes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PREP = [sys.executable, "-c", "from dynmo_tools.cli import main; main()"]
SAMPLE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest process of a command and its children.

    Attributes:
        resident_mb: resident memory with mapped files, which the kernel can evict.
        own_mb: private memory, sampled every 50 ms.
        wall_s: wall time of the command.
    """

    resident_mb: float
    own_mb: float
    wall_s: float


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _kilobytes(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "RssAnon"))}
    return int(found.get("VmHWM", 0)), int(found.get("RssAnon", 0))


def peak_of(command: list[str], cwd: Path, accepted: tuple[int, ...] = (0,)) -> Peak:
    """Run a command to its end and sample its processes."""
    started = time.monotonic()
    with open(cwd / "log.txt", "w") as log:
        process = subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log)
        largest = [0, 0]
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLE_S):
                for pid in _tree(process.pid):
                    for at, size in enumerate(_kilobytes(pid)):
                        largest[at] = max(largest[at], size)

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        ended.set()
        watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in accepted:
        raise SystemExit(f"{command[:5]} failed:\n{(cwd / 'log.txt').read_text()[-2000:]}")
    return Peak(
        resident_mb=max(largest[0], usage.ru_maxrss) / 1e3,
        own_mb=largest[1] / 1e3,
        wall_s=time.monotonic() - started,
    )


def write_documents(target: Path, source: Path, size: int, characters: int) -> int:
    """Write documents of about ``characters`` characters, words of another file in random order; returns the count.

    Every tenth document is a near-copy of the one nine before it: its last word differs.
    """
    words: list[str] = []
    with open(source, encoding="utf-8") as handle:
        for line in handle:
            words += json.loads(line)["text"].split()
            if len(words) > 1 << 20:
                break
    each = max(characters // 6, 1)
    draws = np.random.default_rng(0)
    written = count = 0
    with open(target, "wb", buffering=1 << 20) as out:
        while written < size:
            places = draws.integers(len(words), size=(10_000, each))
            places[9::10, :-1] = places[:-1:10, :-1]
            for row_of_places in places.tolist():
                text = " ".join([words[at] for at in row_of_places])
                row = json.dumps({"id": str(count), "text": text}, ensure_ascii=False).encode() + b"\n"
                out.write(row)
                written += len(row)
                count += 1
    return count


def commands(options: argparse.Namespace, data: str) -> dict[str, list[str]]:
    """The arguments of each step for one input file."""
    gpt2 = ["--vocab-file", options.vocab, "--merge-file", options.merges]
    return {
        "binarize": ["--input", data, "--output-prefix", "out", "--tokenizer-type", "GPT2BPETokenizer", *gpt2],
        "merge": [data, "-o", "out.jsonl"],
        "add-id": [data, "-o", "out.jsonl", "--id-prefix", "a"],
        "clean": [data, "-o", "out.jsonl"],
        "fix": [data, "-o", "out.jsonl", "--tasks", "remove_512", "ftfy_fix_text", "general_cleaning"],
        "train-tokenizer": [data, "-o", "out", "--vocab-size", "5000"],
        "shuffle": [data, "-o", "out.jsonl"],
        "split-sentences": [data, "-o", "out.jsonl"],
        "find-duplicates": [data, "-o", "out.jsonl"],
        "dedup": [data, "-o", "out.jsonl"],
        "decontaminate": [data, "-o", "out.jsonl", "--task", f"lambada={options.task}"],
        "merge-indexed": ["half_text_document", "half_text_document", "-o", "out"],
    }


def measure(step: str, megabytes: int, options: argparse.Namespace, folder: Path) -> tuple[int, Peak]:
    """Run one step with one input size; returns the number of documents and the peak. Outputs are deleted."""
    data = folder / f"data-{megabytes}-{options.characters}.jsonl"
    count = data.with_suffix(".count")
    if not count.exists():
        documents = write_documents(data, Path(options.text), megabytes * 10**6, options.characters)
        count.write_text(str(documents))
    every = commands(options, str(data))
    if step == "merge-indexed":
        peak_of([*PREP, "binarize", *every["binarize"], "--output-prefix", "half"], folder)
    more = [] if step == "merge-indexed" else ["--workers", str(options.workers)]
    peak = peak_of([*PREP, step, *every[step], *more], folder)
    for path in [*folder.glob("out*"), *folder.glob("half*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return int(count.read_text()), peak
