"""Benchmarks of ``dynmo-prep`` and its peers: same input, in the same run, after comparing the outputs.

    python tests/benchmarks/prep_benchmarks.py binarize --text corpus.jsonl --vocab vocab.json --merges merges.txt

Peers are installed elsewhere and selected by environment variables; peers without a variable are reported as skipped:

    PEER_CLASSIC    a checkout of Megatron-LM with the original tools/ (preprocess_data.py, openwebtext/)
    PEER_MEGATRON   a checkout of a current Megatron-LM
    PEER_HF_GPT2    a folder with GPT-2's tokenizer.json and tokenizer_config.json, for the latter
    PEER_PATH       folders for PYTHONPATH that the peers need (nltk, triton, mattilyra's lsh)
    PEER_PYTHON     the interpreter with the peers (datatrove, requirements of text-dedup, torch) [default: this one]
    PEER_TEXT_DEDUP a checkout of text-dedup
    PEER_DATATROVE  any value if PEER_PYTHON has datatrove

Each value is the best of three (or of REPEATS); "CPU" is user and system time of the command and its children.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
PREP = [sys.executable, "-c", "from dynmo_tools.cli import main; main()"]
PEER_PYTHON = os.environ.get("PEER_PYTHON", sys.executable)
REPEATS = int(os.environ.get("REPEATS", "3"))


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """Wall and CPU time in seconds, and the maximum memory of a process in MB."""

    wall_s: float
    cpu_s: float
    rss_mb: float = 0.0


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(command: list[str], cwd: Path, *, python_path: str = "") -> RunStats:
    """Run a command to its end; returns its time and memory."""
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
    return RunStats(wall_s=wall, cpu_s=usage.ru_utime + usage.ru_stime, rss_mb=usage.ru_maxrss / 1e3)


def best(once: Callable[[], RunStats]) -> RunStats:
    """The run with the least CPU time."""
    return min((once() for _ in range(REPEATS)), key=lambda stats: stats.cpu_s)


def function_time(function: Callable[[], object]) -> RunStats:
    """The time of a function in this process."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return RunStats(wall_s=time.monotonic() - started, cpu_s=cpu)


def row(name: str, ours: RunStats, peer: RunStats, note: str = "") -> None:
    """Print one row of the report."""
    print_line(
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
    print_line(f"\n## {what}\n{datetime.datetime.now(datetime.UTC).date()}, {commit}, {machine}")
    print_line(f"command: {' '.join(sys.argv)}\n")
    print_line("| peer | ours wall / CPU s | peer wall / CPU s | wall | CPU | |\n|---|---|---|---|---|---|")


def documents_of(path: Path) -> list[dict[str, Any]]:
    """The documents of a file of JSON lines; only newlines separate lines."""
    with open(path, "rb") as lines:
        return [json.loads(line) for line in lines]


def same(first: Path, second: Path) -> str:
    """``same bytes``; exits if the outputs differ, because times of different outputs are not comparable."""
    if first.read_bytes() != second.read_bytes():
        raise SystemExit(f"{first} and {second} differ")
    return "same bytes"


def peer(name: str) -> Path | None:
    """The folder in an environment variable."""
    found = os.environ.get(name)
    if not found:
        print_line(f"| ({name} is not set: skipped) | | | | | |")
    return Path(found) if found else None


def bench_binarize(options: argparse.Namespace, folder: Path) -> None:
    text, vocab, merges = (str(Path(p).resolve()) for p in (options.text, options.vocab, options.merges))
    files = ["--vocab-file", vocab, "--merge-file", merges, "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]

    def ours(workers: int = 1) -> RunStats:
        shutil.rmtree(folder / "ours.work", ignore_errors=True)
        more = ["--workers", str(workers), "--task-bytes", str(-(-Path(text).stat().st_size // workers))]
        return run([*PREP, "binarize", "--input", text, "--output-prefix", "ours", *files, *more], folder)

    one = best(ours)
    size = Path(text).stat().st_size / 1e6
    figures = f"{size / one.wall_s:.1f} MB/s of {size:.0f} MB, {one.rss_mb:.0f} MB of memory"
    print_line(f"| (ours, one process: {figures}) | | | | | |")
    two = best(lambda: ours(2))
    row("ours, 2 workers against 1", two, one, "reversed: wall is the speedup of two workers")

    def check(name: str) -> str:
        for ending in ("bin", "idx"):
            same(folder / f"ours_text_document.{ending}", folder / f"{name}_text_document.{ending}")
        return "same bytes"

    if (classic := peer("PEER_CLASSIC")) is not None:
        command = [
            PEER_PYTHON,
            str(classic / "tools/preprocess_data.py"),
            "--input",
            text,
            "--output-prefix",
            "classic",
        ]
        stats = best(
            lambda: run(
                [*command, *files, "--workers", "1", "--log-interval", "100000"], folder, python_path=str(classic)
            )
        )
        row("classic preprocess_data.py, 1 worker", one, stats, check("classic"))
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
            command = [PEER_PYTHON, str(current / "tools" / script), *common, "--output-prefix", name, *more]
            stats = best(lambda command=command: run(command, folder, python_path=str(current)))
            row(f"core {script} ({stats.rss_mb:.0f} MB)", one, stats, check(name))


def bench_signatures(options: argparse.Namespace, folder: Path) -> None:
    from datasketch import MinHash

    from dynmo_tools.dedup.minhash import joined_hashes, permutations, sign

    texts = [document["text"] for document in documents_of(Path(options.text))][:400]
    perms = permutations(100, 1234)
    made = sign(texts, 5, perms)

    def batch() -> None:
        for text, signature in zip(texts, made, strict=True):
            sketch = MinHash(num_perm=100, seed=1234, scheme="affine32", hashfunc=int)
            sketch.update_batch(joined_hashes([text], 5)[0].tolist())
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


BUCKETS = """
import sys

import numpy as np

from dynmo_tools.dedup.lsh import repeated
from dynmo_tools.dedup.minhash import band_keys

kind, count = sys.argv[1], int(sys.argv[2])
signatures = np.random.default_rng(0).integers(0, 1 << 32, (count, 100), dtype=np.uint32)
# Every tenth document has half of the bands of the one before it.
signatures[1::10, :50] = signatures[::10, :50]
pairs = set()
if kind == "ours":
    for band in range(10):
        members, sizes = repeated(band_keys(signatures, band, 10), np.arange(count))
        ends = np.cumsum(sizes)
        for begin, end in zip(ends - sizes, ends):
            pairs |= {(int(one), int(members[begin])) for one in members[begin + 1 : end]}
else:
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=100, params=(10, 10))
    rows = signatures if kind == "sketches" else []
    sketches = [MinHash(num_perm=100, seed=1, hashvalues=row, scheme="affine32") for row in rows]
    with index.insertion_session() as session:
        for number, sketch in enumerate(sketches):
            session.insert(number, sketch, check_duplication=False)
    for number, sketch in enumerate(sketches):
        pairs |= {(number, other) for other in index.query(sketch) if other < number}
print(len(pairs))
"""


def bench_buckets(options: argparse.Namespace, folder: Path) -> None:
    """Documents that share a band, of given signatures: our sorted keys, and ``datasketch.MinHashLSH``."""
    for count in (20_000, 100_000):
        commands = {kind: [sys.executable, "-c", BUCKETS, kind, str(count)] for kind in ("ours", "sketches", "import")}
        runs: dict[str, list[RunStats]] = {kind: [] for kind in commands}
        pairs: dict[str, str] = {}
        for _ in range(REPEATS):
            for kind, command in commands.items():
                runs[kind].append(run(command, folder))
                pairs[kind] = (folder / "log.txt").read_text().strip()
        if pairs["ours"] != pairs["sketches"]:
            raise SystemExit(f"{pairs['ours']} and {pairs['sketches']} pairs")
        for ours, theirs, empty in zip(runs["ours"], runs["sketches"], runs["import"], strict=True):
            note = f"{count} signatures, {pairs['ours']} pairs; {ours.rss_mb:.0f} and {theirs.rss_mb:.0f} MB"
            row("datasketch.MinHashLSH, insert and query", ours, theirs, f"{note}; its import {empty.cpu_s:.2f} s")


def bench_clean(options: argparse.Namespace, folder: Path) -> None:
    import ftfy

    from dynmo_tools.filters.clean import token_counter
    from dynmo_tools.filters.language import LanguageDetector

    source = Path(options.text).resolve()
    rows = documents_of(source)
    LanguageDetector(0)
    count = token_counter(None)
    from langdetect import detector_factory
    from langdetect.lang_detect_exception import LangDetectException

    factory = detector_factory.DetectorFactory()
    profiles = sorted(Path(detector_factory.PROFILES_DIRECTORY).iterdir())
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
    factory.set_seed(0)
    documents: list[str] = []

    def classic() -> None:
        """The loop of Megatron's cleanup_dataset, which cannot run: its tokenizer module was removed."""
        documents.clear()
        for one in rows:
            text = ftfy.fix_text(one["text"])
            detector = factory.create()
            detector.append(text)
            try:
                if detector.detect() != "en":
                    continue
            except LangDetectException:
                continue
            if len(text) < 8 * 128 and count(text) + 1 < 128:
                continue
            documents.append(text)

    def ours() -> RunStats:
        shutil.rmtree(folder / "ours.jsonl.work", ignore_errors=True)
        return run([*PREP, "clean", str(source), "-o", "ours.jsonl", "--normalize"], folder)

    stats = best(ours)
    slow = function_time(classic)
    if [document["text"] for document in documents_of(folder / "ours.jsonl")] != documents:
        raise SystemExit("the kept texts differ")
    row("the loop of Megatron (ours: complete command)", stats, slow, f"the same {len(documents)} texts of {len(rows)}")


def bench_decontaminate(options: argparse.Namespace, folder: Path) -> None:
    source, task = str(Path(options.text).resolve()), str(Path(options.task).resolve())

    def ours() -> RunStats:
        shutil.rmtree(folder / "ours.jsonl.work", ignore_errors=True)
        return run([*PREP, "decontaminate", source, "-o", "ours.jsonl", "--task", f"lambada={task}"], folder)

    stats = best(ours)
    if (classic := peer("PEER_CLASSIC")) is not None:
        script = str(classic / "tools/openwebtext/filter_ngrams.py")
        command = [
            PEER_PYTHON, script, "--tasks", "lambada", "--lambada-path", task, "--dedup-dataset", source, "text",
            "--output", "classic.jsonl", "--num-threads", "1",
        ]  # fmt: skip
        slow = best(lambda: run(command, folder, python_path=str(classic)))
        row("filter_ngrams.py, 1 thread", stats, slow, same(folder / "ours.jsonl", folder / "classic.jsonl"))


TEXT_DEDUP = """
[input]
input_type = "local_files"
file_type = "json"
read_arguments = {{ path = "json", data_files = "{source}", split = "train" }}
[algorithm]
algorithm_name = "minhash"
text_column = "text"
num_proc = 2
num_perm = 100
bands = 10
rows = 10
threshold = 0.9
ngram_size = 5
check_false_positive = true
[output]
output_dir = "text_dedup"
save_clusters = true
[debug]
enable_profiling = false
"""

DATATROVE = """
from datatrove.executor.local import LocalPipelineExecutor as Run
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter

def main():
    rules = MinhashConfig(n_grams=5, num_buckets=10, hashes_per_bucket=10)
    read = JsonlReader("halves")
    steps = (
        (2, [read, MinhashDedupSignature(output_folder="dt/sig", config=rules)]),
        (10, [MinhashDedupBuckets(input_folder="dt/sig", output_folder="dt/buckets", config=rules)]),
        (1, [MinhashDedupCluster(input_folder="dt/buckets", output_folder="dt/remove", config=rules)]),
        (2, [read, MinhashDedupFilter(input_folder="dt/remove"), JsonlWriter("dt/out", compression=None)]),
    )
    for number, (tasks, pipeline) in enumerate(steps):
        Run(pipeline=pipeline, tasks=tasks, workers=2, logging_dir=f"dt/logs/{number}").run()

if __name__ == "__main__":
    main()
"""


def true_pairs(texts: list[str], threshold: float) -> list[tuple[int, int, float]]:
    """Pairs with an exact Jaccard index of character 5-grams of at least ``threshold``, and the index.

    Two such sets share one of the ``size - ceil(threshold * size) + 1`` rarest elements of each (the prefix filter of
    Chaudhuri, Ganti, Kaushik 2006), so no pair is missed. Pairs that also share half of every 16th element are compared
    exactly; this may miss pairs of short documents with few sampled elements. No signature or band is used, so no tool
    is favored.
    """
    from dynmo_tools.dedup.shingles import code_points, hash_windows, jaccard

    found = [np.unique(hash_windows(code_points(text), 5)) for text in texts]
    values, counts = np.unique(np.concatenate(found), return_counts=True)
    prefixes = []
    for grams in found:
        order = np.lexsort((grams, counts[np.searchsorted(values, grams)]))
        prefixes.append(grams[order][: len(grams) - int(np.ceil(threshold * len(grams))) + 1])
    owners = np.repeat(np.arange(len(texts)), [len(prefix) for prefix in prefixes])
    keys = np.concatenate(prefixes)
    order = np.lexsort((owners, keys))
    keys, owners = keys[order], owners[order]
    candidates: list[Any] = []
    step = 1
    while (same := keys[step:] == keys[:-step]).any():
        candidates.append(np.unique(owners[:-step][same] * len(texts) + owners[step:][same]))
        step += 1
    sizes = np.asarray([len(grams) for grams in found])
    first, second = np.divmod(np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *candidates])), len(texts))
    near = np.minimum(sizes[first], sizes[second]) >= threshold * np.maximum(sizes[first], sizes[second])
    pairs = zip(first[near].tolist(), second[near].tolist(), strict=True)
    few = [frozenset(grams[grams % 16 == 0].tolist()) for grams in found]
    likely = ((one, two) for one, two in pairs if 2 * len(few[one] & few[two]) >= len(few[one]))
    compared = ((one, two, jaccard(texts[one], texts[two], 5)) for one, two in likely)
    return [pair for pair in compared if pair[2] >= threshold]


def bench_dedup(options: argparse.Namespace, folder: Path) -> None:
    """Recall: the fraction of pairs with an index of at least 0.95 of which at most one document remains."""
    source = Path(options.text).resolve()
    rows = documents_of(source)
    place = {row["id"]: number for number, row in enumerate(rows)}
    texts = [row["text"] for row in rows]
    truth = Path(options.truth) if options.truth else folder / "truth.json"
    if not truth.exists():
        truth.write_text(json.dumps(true_pairs(texts, 0.9)))
    found = json.loads(truth.read_text())
    near = [(first, second) for first, second, index in found if index >= 0.95]
    similar = {document for first, second, _ in found for document in (first, second)}
    print_line(
        f"| ({len(rows)} documents, {len(near)} pairs at 0.95 or more, {len(similar)} in pairs at 0.9) | | | | | |"
    )

    def summarize(name: str, documents: list[str]) -> str:
        remaining = {place[one] for one in documents}
        recall = sum(not (first in remaining and second in remaining) for first, second in near) / max(len(near), 1)
        wrong = len(set(range(len(rows))) - remaining - similar)
        return (
            f"{name} removed {len(rows) - len(remaining)}, {wrong} of them without a pair at 0.9; recall {recall:.4f}"
        )

    def ours() -> RunStats:
        shutil.rmtree(folder / "ours.jsonl.work", ignore_errors=True)
        return run(
            [*PREP, "dedup", str(source), "-o", "ours.jsonl", "--workers", "2", "--task-bytes", "10000000"], folder
        )

    stats = best(ours)
    own = summarize("ours", ids_of([folder / "ours.jsonl"]))
    print_line(f"| ({own}; {len(rows) / stats.wall_s:.0f} documents/s, {stats.rss_mb:.0f} MB) | | | | | |")
    if (checkout := peer("PEER_TEXT_DEDUP")) is not None:
        (folder / "config.toml").write_text(TEXT_DEDUP.format(source=source))
        os.environ["HF_HOME"] = str(folder / "cache")

        def text_dedup() -> RunStats:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            command = [PEER_PYTHON, "-m", "text_dedup.minhash"]
            return run(command, folder, python_path=str(checkout / "src"))

        slow = best(text_dedup)
        remaining = [
            PEER_PYTHON,
            "-c",
            "import datasets, sys; sys.stdout.write('\\n'.join(datasets.load_from_disk('text_dedup')['id']))",
        ]
        documents = subprocess.run(remaining, cwd=folder, capture_output=True, text=True, check=True).stdout.split()
        row("text-dedup, check on, 2 processes", stats, slow, summarize("it", documents))
    if peer("PEER_DATATROVE") is not None:
        (folder / "datatrove_run.py").write_text(DATATROVE)
        (folder / "halves").mkdir()
        lines = source.read_bytes().split(b"\n")
        for number in range(2):
            (folder / "halves" / f"{number}.jsonl").write_bytes(b"\n".join(lines[number::2]))

        def datatrove() -> RunStats:
            shutil.rmtree(folder / "dt", ignore_errors=True)
            return run([PEER_PYTHON, "datatrove_run.py"], folder)

        slow = best(datatrove)
        row("datatrove, no check, 2 processes", stats, slow, summarize("it", ids_of((folder / "dt" / "out").iterdir())))
    if (classic := peer("PEER_CLASSIC")) is not None:
        command = [
            PEER_PYTHON, str(classic / "tools/openwebtext/find_duplicates.py"), "--inputs", str(source), "id",
            "--output", "pairs.jsonl",
        ]  # fmt: skip
        slow = best(lambda: run(command, folder, python_path=str(classic)))
        row("find_duplicates.py (pairs only)", stats, slow)


def ids_of(paths: Iterable[Path]) -> list[str]:
    """The ids of the documents in some files of JSON lines."""
    return [document["id"] for path in paths for document in documents_of(path)]


def bench_merge(options: argparse.Namespace, folder: Path) -> None:
    from dynmo_tools.formats.indexed import Index, encode_index
    from dynmo_tools.formats.int_columns import arange, in_memory

    tokens = int(options.gigabytes * 1e9) >> 14 << 12  # of each half
    for name in ("a", "b"):
        lengths = in_memory(np.full(tokens >> 12, 1 << 12))
        index = Index(form="mmap", dtype=np.dtype(np.uint16), lengths=lengths, documents=arange(len(lengths) + 1))
        (folder / f"{name}.idx").write_bytes(b"".join(encode_index(index)))
        with open(folder / f"{name}.bin", "wb") as handle:
            noise = np.random.default_rng(0).bytes(8192)
            for _ in range(tokens >> 12):
                handle.write(noise)
    for name in ("all.bin", "copy.bin"):
        (folder / name).unlink(missing_ok=True)

    def ours() -> RunStats:
        for name in ("all.bin", "all.idx"):
            (folder / name).unlink(missing_ok=True)
        os.sync()
        return run([*PREP, "merge-indexed", "a", "b", "-o", "all"], folder)

    def copy() -> RunStats:
        for name in ("a.copy", "b.copy"):
            (folder / name).unlink(missing_ok=True)
        os.sync()
        return run(["bash", "-c", "cp a.bin a.copy && cp b.bin b.copy && sync a.copy b.copy"], folder)

    pairs = [(ours(), copy()) for _ in range(REPEATS)]
    for one, other in pairs:
        row(f"cp and sync of the same {tokens * 4 / 1e9:.2f} GB", one, other)
    check = ["bash", "-c", "cat a.copy b.copy | cmp - all.bin"]
    subprocess.run(check, cwd=folder, check=True)
    print_line("| (same bytes) | | | | | |")


TRAINER = """
import json, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
trainer = trainers.BpeTrainer(
    vocab_size=int(sys.argv[3]), min_frequency=2, special_tokens=["<|endoftext|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
)
texts = (json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8"))
tokenizer.train_from_iterator(texts, trainer=trainer)
open(sys.argv[2], "w", encoding="utf-8").write(tokenizer.to_str(pretty=True))
"""


def bench_tokenizer(options: argparse.Namespace, folder: Path) -> None:
    """A vocabulary of 32,000 by ``tokenizers``, which counts in one thread per core, and by dynmo-prep."""
    text, size = str(Path(options.text).resolve()), "32000"
    for number in range(REPEATS):
        theirs = run([PEER_PYTHON, "-c", TRAINER, text, "theirs.json", size], folder)
        for workers in (1, 2):
            arguments = [text, "-o", "ours.json", "--vocab-size", size, "--workers", str(workers), "--overwrite"]
            ours = run([*PREP, "train-tokenizer", *arguments], folder)
            note = same(folder / "ours.json", folder / "theirs.json")
            memory = f"{ours.rss_mb:.0f} against {theirs.rss_mb:.0f} MB"
            row(f"tokenizers' trainer, run {number + 1}, our workers: {workers}", ours, theirs, f"{note}, {memory}")


def bench_workers(options: argparse.Namespace, folder: Path) -> None:
    """Two workers against one for each parallel step, with equal outputs; ``--folder`` keeps the inputs."""
    import prep_workers

    for name in ("text", "vocab", "merges", "task", "dump"):
        setattr(options, name, str(Path(getattr(options, name)).resolve()))
    for step in options.steps or prep_workers.cases(options):
        arguments = prep_workers.commands(step, options, folder)
        for number in range(REPEATS):
            order = (2, 1) if number % 2 else (1, 2)
            stats = {count: run([*PREP, *arguments(count)], folder) for count in order}
            one, two = stats[1], stats[2]
            prep_workers.check(step, options, folder)
            size = prep_workers.cases(options)[step].megabytes
            row(f"{step} {size} MB: two workers (ours) against one", two, one, "same bytes")


def bench_memory(options: argparse.Namespace, folder: Path) -> None:
    """The largest process of each step at each size; ``--folder`` keeps the inputs."""
    from prep_memory import commands, measure

    for name in ("text", "vocab", "merges", "task"):
        setattr(options, name, str(Path(getattr(options, name)).resolve()))
    print_line("| step | MB | documents | largest process | private | s |\n|---|---|---|---|---|---|")
    for step in options.steps or commands(options, ""):
        for megabytes in options.megabytes:
            count, peak = measure(step, megabytes, options, folder)
            figures = f"{peak.resident_mb:.0f} MB | {peak.own_mb:.0f} MB | {peak.wall_s:.1f}"
            print_line(f"| {step}, {options.workers} worker | {megabytes:,} | {count:,} | {figures} |")


BENCHES = {
    "binarize": bench_binarize,
    "signatures": bench_signatures,
    "buckets": bench_buckets,
    "clean": bench_clean,
    "decontaminate": bench_decontaminate,
    "dedup": bench_dedup,
    "memory": bench_memory,
    "merge": bench_merge,
    "tokenizer": bench_tokenizer,
    "workers": bench_workers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--text", help="JSON lines with a text (and an id for dedup)")
    parser.add_argument("--vocab", help="GPT-2's vocab.json")
    parser.add_argument("--merges", help="GPT-2's merges.txt")
    parser.add_argument("--truth", help="for dedup: file that caches the exact pairs, the slowest part")
    parser.add_argument("--gigabytes", type=float, default=1.07, help="size of the merged dataset")
    parser.add_argument("--task", help="task file, for decontaminate and memory")
    parser.add_argument("--steps", nargs="*", help="for memory and workers: commands [default: all]")
    parser.add_argument("--megabytes", nargs="+", type=int, default=[100, 2000], help="for memory: input sizes")
    parser.add_argument("--characters", type=int, default=100, help="for memory: characters per document")
    parser.add_argument("--dump", help="for workers: MediaWiki dump, .xml.bz2")
    parser.add_argument("--workers", type=int, default=1, help="for memory")
    parser.add_argument("--folder", type=Path, help="work folder, not deleted [default: a temporary folder]")
    options = parser.parse_args()
    head(options.bench)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        BENCHES[options.bench](options, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        BENCHES[options.bench](options, Path(folder))


if __name__ == "__main__":
    main()
