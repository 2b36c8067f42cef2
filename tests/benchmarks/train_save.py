"""How long training stands still for a checkpoint: written at the boundary, or aside from a copy of the state.

Beside each: a copy of the same state into memory that was used before, and a plain synced write of the same bytes.
While a checkpoint is written aside the training goes on, so that its whole time is not the disk's alone.

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

from dynmo_train.checkpointing import Checkpointing, Saved
from dynmo_train.engine import Engine, EngineSettings
from dynmo_train.models.gpt import Gpt, GptShape
from dynmo_train.models.items import BoundaryShape
from dynmo_train.models.sparse_forms import SparseTable
from dynmo_train.optim.adamw import AdamWSettings
from dynmo_train.optim.schedule import LearningRate
from dynmo_train.parallel.world import join_world, leave_world
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.pipeline.schedule import Batch, PipelineShape
from dynmo_train.saving import SavedRun

TOKENS, MICRO_BATCH = 128, 2


def engine_of(layers: int, width: int) -> Engine:
    family = Gpt(
        GptShape(
            num_layers=layers,
            hidden_size=width,
            ffn_hidden_size=4 * width,
            num_attention_heads=8,
            max_position_embeddings=TOKENS,
            vocab_size=8000,
            padded_vocab_size=8064,
        )
    )
    boundary = BoundaryShape.hidden(batch=MICRO_BATCH, tokens=TOKENS, width=width)
    settings = EngineSettings(
        pipeline=PipelineShape(schedule="1f1b", microbatches=1, boundary=boundary, seed=1, recompute=False),
        adamw=AdamWSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1),
        rate=LearningRate(peak=1e-4, floor=0.0, style="constant", warmup_steps=0, decay_steps=10),
        clip=1.0,
        freeze_steps=(),
        freeze_tied=False,
        pruning=None,
        sparse=SparseTable(),
    )
    engine = Engine(family, settings, uniform_partition(family.items, 1), join_world("cpu"))
    engine.build()
    return engine


def batch_of(step: int) -> Batch:
    ids = torch.randint(0, 8000, (MICRO_BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    inputs = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return Batch(inputs=inputs, first_microbatch=step, step=step)


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
    tensors = [t for item in engine.local_names for t in engine.held.export(item).tensors.values()]
    size = sum(tensor.nbytes for tensor in tensors)
    folder = Path(tempfile.mkdtemp())
    out = sys.stdout.write
    try:
        out(f"state of {size / 1e6:.0f} MB\n")
        out("| way | copy of the state s | stalled s | of the copy | whole s | the disk's s | of its speed |\n")
        out("|---|---|---|---|---|---|---|\n")
        copies = [tensor.clone() for tensor in tensors]
        for aside in (False, True):
            told: list[Saved] = []
            saver = Checkpointing(engine, folder / "checkpoints", aside=aside, tell=told.append)
            for repeat in range(arguments.repeats):
                told.clear()
                disk_s = synced_s(folder / "plain", copies)
                begun = time.perf_counter()
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor)
                copied = time.perf_counter() - begun
                run = SavedRun(
                    run_id="b",
                    step=repeat + 1,
                    consumed_train_samples=0,
                    data=None,
                    tokenizer={},
                    keep=1,  # type: ignore[arg-type]
                )
                saver.save(run)
                step = 2
                while not told:
                    engine.train_step(batch_of(step), sampled=False)
                    step += 1
                    saver.at_boundary()
                way = "aside (--async-save)" if aside else "at the boundary"
                stalled, whole = told[0].stalled_s, told[0].seconds
                out(f"| {way} | {copied:.3f} | {stalled:.3f} | {stalled / copied:.2f} ")
                out(f"| {whole:.2f} | {disk_s:.2f} | {disk_s / whole:.2f} |\n")
    finally:
        leave_world()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
