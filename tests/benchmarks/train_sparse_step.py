"""A step with mixture of depths, sparse attention or pruning next to a dense step: processor time and loss.

Programs take turns in one process, a step each, on the same batch: forward, backward, norm, clipping and AdamW.

* ``depths C``: mixture of depths in every other block at capacity C.
* ``sparse N``: sparse attention with N buckets in every block.
* ``pruned FORM S``: all matrices of the blocks pruned to sparsity S, in CSR format (``csr``) or in blocks of 32
  (``block``), both with sparse products in forward and backward.

With ``--text FILE`` the programs train on the bytes of a file instead, and report their mean losses over the last tenth
of the steps: no sample occurs twice, so these are losses of unseen text.

    python tests/benchmarks/train_sparse_step.py depths [--tokens 512] [--repeats 3]
    python tests/benchmarks/train_sparse_step.py sparse --tokens 2048
    python tests/benchmarks/train_sparse_step.py pruned
    python tests/benchmarks/train_sparse_step.py depths sparse --text input.txt --steps 300 --vocabulary 256 --width 128
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_engine import constant, engine_batch, engine_of, gpt_of
from random_batches import random_rows

from dynmo_train.dynamics.tuning import mask_with
from dynmo_train.models.layer_list import masks_of
from dynmo_train.models.layers.sparse_formats import BLOCK, CSR, SparseTable
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings, SparseAttentionSettings
from dynmo_train.parallel.process_groups import World, init_world

DENSE = "dense"
CAPACITIES = (0.125, 0.25, 0.5)
BUCKETS = (4, 8, 16, 32)
SPARSITIES = {CSR: (0.8, 0.9, 0.95), BLOCK: (0.6, 0.8, 0.9)}


def programs_of(cases: list[str]) -> dict[str, tuple[DynamicSettings | None, tuple[str, float] | None]]:
    """The settings, and format and sparsity, of each program."""
    found: dict[str, tuple[DynamicSettings | None, tuple[str, float] | None]] = {DENSE: (None, None)}
    if "depths" in cases:
        for capacity in CAPACITIES:
            depths = DepthSettings(capacity=capacity, every=2, aux_weight=0.01)
            found[f"depths {capacity:g}"] = DynamicSettings(depths=depths), None
    if "sparse" in cases:
        for buckets in BUCKETS:
            attention = SparseAttentionSettings(buckets=buckets, block=128)
            found[f"sparse {buckets}"] = DynamicSettings(sparse_attention=attention), None
    if "pruned" in cases:
        for form, sparsities in SPARSITIES.items():
            for sparsity in sparsities:
                found[f"pruned {form} {sparsity:g}"] = None, (form, sparsity)
    return found


class Program:
    """An engine, its steps and its losses."""

    def __init__(
        self,
        settings: DynamicSettings | None,
        pruned: tuple[str, float] | None,
        options: argparse.Namespace,
        world: World,
    ) -> None:
        self.steps, self.losses = 0, list[float]()
        family: Any = gpt_of(
            layers=options.layers,
            width=options.width,
            heads=max(1, options.width // 64),
            tokens=options.tokens,
            vocabulary=options.vocabulary,
        )
        if settings is not None:
            family = DynamicFamily(family, settings, seed=1, width=options.width, std=0.02)
        boundary = (options.samples, options.tokens, options.width)
        rate = constant(options.lr)
        self.engine = engine_of(family, world, microbatches=1, boundary=boundary, rate=rate)
        if pruned is not None:
            self._prune(*pruned)

    def _prune(self, form: str, sparsity: float) -> None:
        table = SparseTable(thresholds={form: 0.0})
        for name, module in self.engine.item_store.modules.items():
            for layer in masks_of(name, module).values():
                mask = mask_with(sparsity, *layer.weight.shape, form)
                with torch.no_grad():
                    layer.weight.mul_(mask)
                layer.set_mask(mask, table)

    def step(self, rows: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Milliseconds of processor time."""
        self.steps += 1
        batch = engine_batch(rows, self.steps, 1)
        begin = time.process_time()
        result = self.engine.train_step(batch, sampled=False)
        elapsed = 1000 * (time.process_time() - begin)
        self.engine.after_step(self.steps)
        self.losses.append(result.loss)
        return elapsed


def text_rows(data: np.ndarray, step: int, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a step (from 0): bytes of a file, each used once."""
    count = options.samples * options.tokens
    piece = torch.from_numpy(data[step * count : (step + 1) * count + 1].astype(np.int64))
    size = options.samples, options.tokens
    return piece[:-1].view(size), piece[1:].view(size)


def write(row: dict[str, Any]) -> None:
    """Print a row as a line of JSON."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def measure_times(programs: dict[str, Program], options: argparse.Namespace) -> None:
    """Print the fastest step of each repetition."""
    fastest: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(options.repeats + 1):
        measured: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(options.steps if repeat else 1):
            shape = {"rows": options.samples, "tokens": options.tokens, "vocabulary": options.vocabulary}
            rows = random_rows(repeat * options.steps + number, **shape)
            for name, program in programs.items():
                measured[name].append(program.step(rows))
        for name, times in measured.items():
            # The first round allocates memory and is not counted.
            if repeat:
                fastest[name].append(min(times))
    for name, times in fastest.items():
        shares = [round(own / dense, 2) for own, dense in zip(times, fastest[DENSE], strict=True)]
        row = {"program": name, "tokens": options.tokens, "processor_ms": [round(each) for each in times]}
        write({**row, "of_dense": shares})


def measure_losses(programs: dict[str, Program], options: argparse.Namespace) -> None:
    """Train on text, and print the mean losses of the last tenth of the steps, and the processor time of all."""
    data = np.fromfile(options.text, dtype=np.uint8)
    needed = options.steps * options.samples * options.tokens + 1
    if len(data) < needed:
        raise SystemExit(f"{options.text}: {len(data):,} bytes; {options.steps} steps need {needed:,}")
    spent = dict.fromkeys(programs, 0.0)
    for step in range(options.steps):
        rows = text_rows(data, step, options)
        for name, program in programs.items():
            spent[name] += program.step(rows)
    last = max(1, options.steps // 10)
    for name, program in programs.items():
        loss = sum(program.losses[-last:]) / last
        row = {"program": name, "tokens": options.tokens, "steps": options.steps, "loss": round(loss, 4)}
        write({**row, "processor_s": round(spent[name] / 1000, 1), "of_dense": round(spent[name] / spent[DENSE], 2)})


def main(arguments: list[str]) -> None:
    """Measure the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=("depths", "sparse", "pruned"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument(
        "--steps", type=int, default=2, help="of a repetition, of which the fastest counts; with --text all"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    world = init_world("cpu")
    programs = {name: Program(*each, options, world) for name, each in programs_of(options.cases).items()}
    (measure_times if options.text is None else measure_losses)(programs, options)


if __name__ == "__main__":
    main(sys.argv[1:])
