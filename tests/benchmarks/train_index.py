"""The sample index of a large data set: seconds and peak memory to open it, build its index, and draw a batch.

The data set is real on disk (a sparse ``.bin``); each repetition runs in a process of its own with an empty cache, then
again with the cache filled.

    python tests/benchmarks/train_index.py [--documents 10000000] [--repeats 3] [--peer DIRECTORY]

``--peer`` is a directory that holds the package ``megatron.core``; its ``GPTDataset`` then builds the same index.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SEQ_LENGTH, BATCH, SEED = 1024, 32, 1234


def write_data(prefix: Path, documents: int) -> int:
    """A data set with documents of 1 to 1,000 tokens; returns the number of its tokens."""
    lengths = np.random.default_rng(0).integers(1, 1001, documents).astype("<i4")
    ends = lengths.cumsum(dtype="<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    with open(f"{prefix}.idx", "wb") as handle:
        handle.write(header)
        for array in (lengths, (ends - lengths) * 2, np.arange(documents + 1, dtype="<i8")):
            handle.write(array.tobytes())
    with open(f"{prefix}.bin", "wb") as handle:
        handle.truncate(int(ends[-1]) * 2)
    return int(ends[-1])


def ours(prefix: str, samples: int, order: str, cache: Path) -> None:
    from dynmo_train.data.gpt_dataset import build_gpt_dataset
    from dynmo_train.formats.indexed import open_indexed

    data = build_gpt_dataset(
        open_indexed(prefix),
        part="train",
        shares=(0.969, 0.03, 0.001),
        seq_length=SEQ_LENGTH,
        seed=SEED,
        num_samples=samples,
        batch_size=BATCH,
        vocab_size=50257,
        order=order,
        cache=cache,
    )
    data.batch(range(BATCH))


def peer(prefix: str, documents: int, samples: int, cache: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, pad, vocab_size = 0, 0, 50257
        unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - the shape of the peer's tokenizers

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        split="969,30,1",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(cache),
    )
    chosen = np.arange(0, round(0.969 * documents), dtype=np.int32)
    data = GPTDataset(IndexedDataset(prefix), prefix, chosen, samples, Split.train, config)
    for index in range(BATCH):
        data[index]


def child(what: str, prefix: str, documents: int, samples: int, cache: str) -> None:
    if what == "peer":
        import torch  # noqa: F401 - loaded by both, so not counted
    begun = time.perf_counter()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if what == "peer":
        peer(prefix, documents, samples, Path(cache))
    else:
        ours(prefix, samples, what, Path(cache))
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"{seconds} {peak} {base}\n")


def measure(what: str, arguments: list[str], peer_path: str | None) -> tuple[float, float]:
    """Seconds and peak MB of one process."""
    environment = {"PYTHONPATH": peer_path} if what == "peer" and peer_path else {}
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peak, _ = done.stdout.split()[-3:]
    return float(seconds), float(peak) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer")
    parser.add_argument("--builders", nargs="+", default=["stable", "megatron"])
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.child:
        what, prefix, documents, samples, cache = arguments.child
        child(what, prefix, int(documents), int(samples), cache)
        return
    folder = Path(tempfile.mkdtemp())
    try:
        tokens = write_data(folder / "data", arguments.documents)
        samples = int(tokens * 0.95) // SEQ_LENGTH
        out = sys.stdout.write
        out(f"{arguments.documents:,} documents, {tokens:,} tokens, {samples:,} samples of {SEQ_LENGTH}\n")
        out("| builder | cache | seconds | peak MB |\n|---|---|---|---|\n")
        for what in (*arguments.builders, *(("peer",) if arguments.peer else ())):
            for state in ("empty", "filled"):
                results = []
                for repeat in range(arguments.repeats):
                    cache = folder / (f"cache-{what}" if state == "filled" else f"cache-{what}-{repeat}")
                    command = [str(folder / "data"), str(arguments.documents), str(samples), str(cache)]
                    if state == "filled" and repeat == 0:
                        measure(what, command, arguments.peer)
                    results.append(measure(what, command, arguments.peer))
                    if state == "empty":
                        shutil.rmtree(cache, ignore_errors=True)
                seconds = ", ".join(f"{each:.2f}" for each, _ in results)
                out(f"| {what} | {state} | {seconds} | {max(peak for _, peak in results):.0f} |\n")
                sys.stdout.flush()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
