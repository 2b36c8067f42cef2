"""Benchmarks of ``dynmo-prep`` against its peers: the same input, in the same run, equal outputs checked first.

    python tests/benchmarks/prep_benchmarks.py binarize --text corpus.jsonl --vocab vocab.json --merges merges.txt

Peers are installed elsewhere and named by environment variables; one that is not named is left out, and said to be:

    PEER_CLASSIC    a checkout of Megatron-LM with the classic tools/ (preprocess_data.py, openwebtext/)
    PEER_MEGATRON   a checkout of a current Megatron-LM
    PEER_HF_GPT2    a folder with GPT-2's tokenizer.json and tokenizer_config.json, for the latter
    PEER_PATH       folders for PYTHONPATH that the peers need (nltk, triton, mattilyra's lsh)

Each figure is the best of three (or of REPEATS); "CPU" is user and system time of the whole command with its children.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
PREP = [sys.executable, "-c", "from dynmo_tools.cli import main; main()"]
REPEATS = int(os.environ.get("REPEATS", "3"))


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds on the clock and of the processors, and the largest memory of a process in MB."""

    wall_s: float
    cpu_s: float
    rss_mb: float = 0.0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(command: list[str], cwd: Path, *, python_path: str = "") -> Took:
    """Run a command to its end; its time and memory."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join([python_path, os.environ.get("PEER_PATH", "")])
    started = time.monotonic()
    with open(cwd / "log.txt", "w") as log:
        process = subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{(cwd / 'log.txt').read_text()[-2000:]}")
    return Took(wall_s=wall, cpu_s=usage.ru_utime + usage.ru_stime, rss_mb=usage.ru_maxrss / 1e3)


def best(once: Callable[[], Took]) -> Took:
    """The run that took the least processor time of all repeats."""
    return min((once() for _ in range(REPEATS)), key=lambda took: took.cpu_s)


def function_time(function: Callable[[], object]) -> Took:
    """The time of a function in this process."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(wall_s=time.monotonic() - started, cpu_s=cpu)


def row(name: str, ours: Took, peer: Took, note: str = "") -> None:
    """One line of the report."""
    say(
        f"| {name} | {ours.wall_s:.2f} / {ours.cpu_s:.2f} | {peer.wall_s:.2f} / {peer.cpu_s:.2f} "
        f"| {peer.wall_s / ours.wall_s:.1f} x | {peer.cpu_s / ours.cpu_s:.1f} x | {note} |"
    )


def head(what: str) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if "model name" in line), "?")
    machine = f"Python {platform.python_version()}, {os.cpu_count()} x {model}"
    say(f"\n## {what}\n{datetime.datetime.now(datetime.UTC).date()}, {commit}, {machine}")
    say(f"command: {' '.join(sys.argv)}\n")
    say("| peer | ours wall / CPU s | peer wall / CPU s | wall | CPU | |\n|---|---|---|---|---|---|")


def same(first: Path, second: Path) -> str:
    """``same bytes``, or an end of the run: a figure of unequal outputs says nothing."""
    if first.read_bytes() != second.read_bytes():
        raise SystemExit(f"{first} and {second} differ")
    return "same bytes"


def peer(name: str) -> Path | None:
    """The folder that an environment variable names."""
    found = os.environ.get(name)
    if not found:
        say(f"| ({name} is not set: left out) | | | | | |")
    return Path(found) if found else None


def bench_binarize(options: argparse.Namespace, folder: Path) -> None:
    text, vocab, merges = (str(Path(p).resolve()) for p in (options.text, options.vocab, options.merges))
    files = ["--vocab-file", vocab, "--merge-file", merges, "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]

    def ours(workers: int = 1) -> Took:
        shutil.rmtree(folder / "ours.work", ignore_errors=True)
        more = ["--workers", str(workers), "--task-bytes", str(-(-Path(text).stat().st_size // workers))]
        return run([*PREP, "binarize", "--input", text, "--output-prefix", "ours", *files, *more], folder)

    one = best(ours)
    size = Path(text).stat().st_size / 1e6
    figures = f"{size / one.wall_s:.1f} MB/s of {size:.0f} MB, {one.rss_mb:.0f} MB of memory"
    say(f"| (ours, one process: {figures}) | | | | | |")
    two = best(lambda: ours(2))
    row("ours, 2 workers, as the faster", two, one, "the other way round: wall is the speed-up of two workers")

    def check(name: str) -> str:
        for ending in ("bin", "idx"):
            same(folder / f"ours_text_document.{ending}", folder / f"{name}_text_document.{ending}")
        return "same bytes"

    if (classic := peer("PEER_CLASSIC")) is not None:
        command = [
            sys.executable,
            str(classic / "tools/preprocess_data.py"),
            "--input",
            text,
            "--output-prefix",
            "classic",
        ]
        took = best(
            lambda: run(
                [*command, *files, "--workers", "1", "--log-interval", "100000"], folder, python_path=str(classic)
            )
        )
        row("classic preprocess_data.py, 1 worker", one, took, check("classic"))
    if (current := peer("PEER_MEGATRON")) is not None and (model := peer("PEER_HF_GPT2")) is not None:
        common = [
            "--input",
            text,
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(model),
            "--append-eod",
        ]
        for name, script, more in (
            ("core", "preprocess_data.py", ["--workers", "2", "--log-interval", "100000"]),
            ("fast", "preprocess_data_fast.py", ["--use-gigatoken"]),
        ):
            command = [sys.executable, str(current / "tools" / script), *common, "--output-prefix", name, *more]
            took = best(lambda command=command: run(command, folder, python_path=str(current)))
            row(f"core {script} ({took.rss_mb:.0f} MB)", one, took, check(name))


def bench_signatures(options: argparse.Namespace, folder: Path) -> None:
    from datasketch import MinHash

    from dynmo_tools.minhash import permutations, shingle_hashes, sign

    texts = [json.loads(line)["text"] for line in Path(options.text).read_text().splitlines()][:400]
    perms = permutations(100, 1234)
    made = sign(texts, 5, perms)

    def batch() -> None:
        for text, signature in zip(texts, made, strict=True):
            sketch = MinHash(num_perm=100, seed=1234, scheme="affine32", hashfunc=int)
            sketch.update_batch(shingle_hashes(text, 5).tolist())
            if not np.array_equal(sketch.hashvalues, signature):
                raise SystemExit("a signature differs")

    def own_hash() -> None:
        for text in texts:
            grams = [text[at : at + 5].encode() for at in range(len(text) - 4)]
            MinHash(num_perm=100, seed=1234).update_batch(grams)

    def each() -> None:
        for text in texts[:20]:
            sketch = MinHash(num_perm=100, seed=1234)
            for at in range(len(text) - 4):
                sketch.update(text[at : at + 5].encode())

    ours = best(lambda: function_time(lambda: sign(texts, 5, perms)))
    few = best(lambda: function_time(lambda: sign(texts[:20], 5, perms)))
    row(
        "datasketch update_batch (affine32) of hashes given to it: permutations alone, ours with shingling and hashing",
        ours, best(lambda: function_time(batch)), "bit-equal",
    )  # fmt: skip
    row(
        "datasketch update_batch, default scheme and hash, shingling included",
        ours,
        best(lambda: function_time(own_hash)),
    )
    row("datasketch update per shingle (20 documents)", few, function_time(each))


def bench_clean(options: argparse.Namespace, folder: Path) -> None:
    import ftfy

    from dynmo_tools.cleaning import count_pieces
    from dynmo_tools.language import LanguageJudge

    source = Path(options.text).resolve()
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    LanguageJudge(0)
    from langdetect import detector_factory
    from langdetect.lang_detect_exception import LangDetectException

    factory = detector_factory.DetectorFactory()
    profiles = sorted(Path(detector_factory.PROFILES_DIRECTORY).iterdir())
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
    factory.set_seed(0)
    kept: list[str] = []

    def classic() -> None:
        """The loop of the classic cleanup_dataset: it cannot be started itself, its tokenizer module is gone."""
        kept.clear()
        for one in rows:
            text = ftfy.fix_text(one["text"])
            detector = factory.create()
            detector.append(text)
            try:
                if detector.detect() != "en":
                    continue
            except LangDetectException:
                continue
            if len(text) < 8 * 128 and count_pieces(text) + 1 < 128:
                continue
            kept.append(text)

    def ours() -> Took:
        shutil.rmtree(folder / "ours.jsonl.work", ignore_errors=True)
        return run([*PREP, "clean", str(source), "-o", "ours.jsonl"], folder)

    took = best(ours)
    slow = function_time(classic)
    if [json.loads(line)["text"] for line in (folder / "ours.jsonl").read_text().splitlines()] != kept:
        raise SystemExit("the kept texts differ")
    row("the classic loop (ours: whole command)", took, slow, f"the same {len(kept)} texts of {len(rows)}")


def bench_decontaminate(options: argparse.Namespace, folder: Path) -> None:
    source, task = str(Path(options.text).resolve()), str(Path(options.task).resolve())

    def ours() -> Took:
        shutil.rmtree(folder / "ours.jsonl.work", ignore_errors=True)
        return run([*PREP, "decontaminate", source, "-o", "ours.jsonl", "--task", f"lambada={task}"], folder)

    took = best(ours)
    if (classic := peer("PEER_CLASSIC")) is not None:
        script = str(classic / "tools/openwebtext/filter_ngrams.py")
        command = [
            sys.executable, script, "--tasks", "lambada", "--lambada-path", task, "--dedup-dataset", source, "text",
            "--output", "classic.jsonl", "--num-threads", "1",
        ]  # fmt: skip
        slow = best(lambda: run(command, folder, python_path=str(classic)))
        row("filter_ngrams.py, 1 thread", took, slow, same(folder / "ours.jsonl", folder / "classic.jsonl"))


def bench_dedup(options: argparse.Namespace, folder: Path) -> None:
    """Recall is measured against every pair's true index, of documents that share a rare shingle."""
    source = Path(options.text).resolve()

    def ours() -> Took:
        shutil.rmtree(folder / "ours.jsonl.work", ignore_errors=True)
        return run([*PREP, "dedup", str(source), "-o", "ours.jsonl"], folder)

    took = best(ours)
    rows = source.read_text().count("\n")
    left = (folder / "ours.jsonl").read_text().count("\n")
    say(f"| (ours: {rows} documents, {rows - left} removed, {rows / took.wall_s:.0f} documents/s) | | | | | |")
    if (classic := peer("PEER_CLASSIC")) is not None:
        command = [
            sys.executable, str(classic / "tools/openwebtext/find_duplicates.py"), "--inputs", str(source), "id",
            "--output", "pairs.jsonl",
        ]  # fmt: skip
        slow = best(lambda: run(command, folder, python_path=str(classic)))
        row("find_duplicates.py (pairs only)", took, slow)


def bench_merge(options: argparse.Namespace, folder: Path) -> None:
    from dynmo_tools.formats.indexed import Index, encode_index

    for name in ("a", "b"):
        lengths = np.full(1 << 16, 1 << 12, dtype=np.int64)
        documents = np.arange(len(lengths) + 1)
        index = Index(form="mmap", dtype=np.dtype(np.uint16), lengths=lengths, documents=documents)
        (folder / f"{name}.idx").write_bytes(b"".join(encode_index(index)))
        np.random.default_rng(0).integers(0, 65_535, 1 << 28, dtype=np.uint16).tofile(folder / f"{name}.bin")
    ours = best(lambda: run([*PREP, "merge-indexed", "a", "b", "-o", "all"], folder))
    copy = best(lambda: run(["bash", "-c", "cat a.bin b.bin > copy.bin && sync copy.bin"], folder))
    row("cat and sync of the same 1.07 GB", ours, copy, same(folder / "all.bin", folder / "copy.bin"))


BENCHES = {
    "binarize": bench_binarize,
    "signatures": bench_signatures,
    "clean": bench_clean,
    "decontaminate": bench_decontaminate,
    "dedup": bench_dedup,
    "merge": bench_merge,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--text", help="JSON lines with a text (and an id for dedup)")
    parser.add_argument("--vocab", help="GPT-2's vocab.json")
    parser.add_argument("--merges", help="GPT-2's merges.txt")
    parser.add_argument("--task", help="the task's file, for decontaminate")
    options = parser.parse_args()
    head(options.bench)
    with tempfile.TemporaryDirectory() as folder:
        BENCHES[options.bench](options, Path(folder))


if __name__ == "__main__":
    main()
