"""Pause of training for a checkpoint: written at the boundary, or asynchronously from a copy of the state.

In the same run: a copy of the same state into memory that was used before, and a plain synced write of the same bytes.
Training continues during an asynchronous write, so its duration is not that of the disk alone.

python tests/benchmarks/train_save.py [--layers 12] [--width 512] [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from plain_engine import constant, engine_batch, gpt_of
from plain_engine import engine_of as plain_engine_of
from random_batches import random_rows

from dynmo_train.data.batch import Batch
from dynmo_train.parallel.process_groups import destroy_world, init_world
from dynmo_train.trainer.checkpoint.async_checkpoint import Checkpointer, SavedCheckpoint
from dynmo_train.trainer.checkpoint.metadata import CheckpointMetadata
from dynmo_train.trainer.engine import Engine

TOKENS, MICRO_BATCH, VOCABULARY = 128, 2, 8064


def engine_of(layers: int, width: int) -> Engine:
    family = gpt_of(layers=layers, width=width, heads=8, tokens=TOKENS, vocabulary=VOCABULARY)
    world, boundary = init_world("cpu"), (MICRO_BATCH, TOKENS, width)
    return plain_engine_of(family, world, microbatches=1, boundary=boundary, rate=constant(1e-4), beta2=0.99)


def batch_of(step: int) -> Batch:
    return engine_batch(random_rows(step, rows=MICRO_BATCH, tokens=TOKENS, vocabulary=VOCABULARY), step, 1)


def synced_s(path: Path, tensors: list[torch.Tensor]) -> float:
    """Seconds to write the bytes of ``tensors`` to a preallocated file, without checksums, and to flush them."""
    begun = time.perf_counter()
    with open(path, "wb", buffering=0) as handle:
        os.posix_fallocate(handle.fileno(), 0, sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            handle.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(handle.fileno())
    took = time.perf_counter() - begun
    path.unlink()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = engine_of(arguments.layers, arguments.width)
    engine.train_step(batch_of(1), sampled=False)
    tensors = [t for item in engine.local_names for t in engine.item_store.export(item).tensors.values()]
    size = sum(tensor.nbytes for tensor in tensors)
    folder = Path(tempfile.mkdtemp())
    out = sys.stdout.write
    try:
        out(f"state of {size / 1e6:.0f} MB\n")
        out("| way | copy of the state s | stalled s | of the copy | whole s | the disk's s | of its speed |\n")
        out("|---|---|---|---|---|---|---|\n")
        copies = [tensor.clone() for tensor in tensors]
        for aside in (False, True):
            saved: list[SavedCheckpoint] = []
            saver = Checkpointer(
                engine, folder / "checkpoints", async_save=aside, on_saved=saved.append, on_failure=lambda *_: None
            )
            for repeat in range(arguments.repeats):
                saved.clear()
                disk_s = synced_s(folder / "plain", copies)
                begun = time.perf_counter()
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor)
                copied = time.perf_counter() - begun
                run = CheckpointMetadata(
                    run_id="b",
                    step=repeat + 1,
                    consumed_train_samples=0,
                    data=None,
                    tokenizer={},
                    keep=1,  # type: ignore[arg-type]
                )
                saver.save(run)
                step = 2
                while not saved:
                    engine.train_step(batch_of(step), sampled=False)
                    step += 1
                    saver.at_boundary()
                way = "aside (--async-save)" if aside else "at the boundary"
                stalled, whole = saved[0].stalled_s, saved[0].duration_s
                out(f"| {way} | {copied:.3f} | {stalled:.3f} | {stalled / copied:.2f} ")
                out(f"| {whole:.2f} | {disk_s:.2f} | {disk_s / whole:.2f} |\n")
    finally:
        destroy_world()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
