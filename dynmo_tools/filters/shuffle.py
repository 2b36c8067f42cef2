"""The step ``shuffle``: shuffle a dataset of any size in two passes over disk.

The first pass sends each document to a random bucket, the second one shuffles each bucket in memory. The result is a
uniformly random permutation. The draws depend on the seed, the task and the bucket, not on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..config.settings import ShuffleSettings
from ..io.codecs import is_compressed
from ..io.concat_files import append_files
from ..runner.parts import records_ending
from ..runner.task import Phase, Task, read_marker
from ..runner.task_manifest import TaskManifest

# A bucket is shuffled as objects in memory; short documents need more than the bytes of their text.
BUCKET_BYTES = 32 << 20
# A task of the second pass opens the file of every slice, and a marker lists runs for every bucket.
MAX_BUCKETS = 1024
MAX_BYTES_IN_MEMORY = 64 << 20
# Of compressed text, approximately. An error only makes buckets larger or smaller, the order stays random.
COMPRESSION_RATIO = 4
DRAWN_AT_ONCE = 4096
# Keys of the generators of both passes: without them, task 0 of each would draw the same numbers.
SCATTER_STREAM, ORDER_STREAM = 0, 1


def num_buckets(manifest: TaskManifest) -> int:
    """The number of buckets, for about 32 MiB per bucket."""
    size = sum(s.size_bytes * (COMPRESSION_RATIO if is_compressed(s.path) else 1) for s in manifest.sources)
    return min(max(1, -(-size // BUCKET_BYTES)), MAX_BUCKETS)


def shuffle_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``shuffle``."""
    return [
        Phase(name="scatter", run="filters.shuffle:scatter", tasks=len(manifest.tasks), reads=True),
        Phase(name="order", run="filters.shuffle:order", tasks=num_buckets(manifest)),
        Phase(name="join", run="filters.shuffle:join", tasks=1),
    ]


def _draws(generator: np.random.Generator, count: int) -> Iterator[int]:
    """Endless random integers below ``count``."""
    # In blocks: a call of numpy per document would take longer than the copy of a short document.
    while True:
        yield from generator.integers(count, size=DRAWN_AT_ONCE).tolist()


def scatter(task: Task) -> None:
    """Task function: write one slice as runs of documents of one bucket."""
    settings: ShuffleSettings = task.job.settings
    count = num_buckets(task.manifest)
    # A generator for each task: the draws do not depend on the order in which workers run the tasks.
    draws = _draws(np.random.default_rng([settings.seed, SCATTER_STREAM, task.index]), count)
    writer = task.create(task.part("scattered.jsonl"))
    runs: list[list[int]] = [[] for _ in range(count)]  # of each bucket: begin, bytes, begin, bytes, ...
    buffered: list[list[bytes]] = [[] for _ in range(count)]
    buffered_bytes = position = 0

    def flush(position: int) -> int:
        """Write the buffered documents at byte ``position``, one run per bucket; returns the new position."""
        for bucket, lines in enumerate(buffered):
            if lines:
                payload = b"".join(lines)
                writer.write(payload)
                runs[bucket] += [position, len(payload)]
                position += len(payload)
                lines.clear()
        return position

    for row in task.rows():
        line = row.raw + b"\n"
        buffered[next(draws)].append(line)
        buffered_bytes += len(line)
        task.counts.documents_out += 1
        task.counts.bytes_out += len(line)
        if buffered_bytes >= MAX_BYTES_IN_MEMORY:
            position, buffered_bytes = flush(position), 0
    flush(position)
    task.result["runs"] = runs


def order(task: Task) -> None:
    """Task function: the documents of one bucket from all slices, shuffled."""
    settings: ShuffleSettings = task.job.settings
    lines: list[bytes] = []
    # In the order of slices and runs: the permutation is applied to the same list in every run.
    for index in range(len(task.manifest.tasks)):
        runs = read_marker(task, "scatter", index)["result"]["runs"][task.index]
        with open(task.part("scattered.jsonl", index), "rb") as handle:
            for begin, size in zip(runs[::2], runs[1::2], strict=True):
                handle.seek(begin)
                # not splitlines(), which also splits at carriage returns within a row
                lines += [line + b"\n" for line in handle.read(size).split(b"\n")[:-1]]
    permutation = np.random.default_rng([settings.seed, ORDER_STREAM, task.index]).permutation(len(lines))
    writer = task.create(task.part("ordered" + records_ending(task.job.output)))
    for at in permutation:
        writer.write(lines[at])


def join(task: Task) -> None:
    """Task function: concatenate the buckets."""
    parts = [task.part("ordered" + records_ending(task.job.output), i) for i in range(num_buckets(task.manifest))]
    append_files(task.create(task.job.output, plain=True), parts)
