"""Wall time of dropout by an item's random numbers and of ``F.dropout``: the forward, and forward and backward.

The two take turns in one process; each figure is the median of the calls of a round.

    python tests/benchmarks/train_dropout.py [--device cpu] [--rows 2048] [--columns 1024] [--dtype float32]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from dynmo_train.parallel.random_stream import ItemStream, StreamKeys, drawing_from, item_dropout

CALLS = 25


def of_item(stream: ItemStream) -> Callable[[torch.Tensor], torch.Tensor]:
    """Dropout as an item runs it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with drawing_from(stream):
            return item_dropout(x, 0.1, True)

    return run


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """The median of ``CALLS`` calls."""
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter_ns()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    keys = StreamKeys(1, ["layers.0.mlp"], device)
    keys.begin_step(1, range(1))
    x = torch.randn(options.rows, options.columns, dtype=getattr(torch, options.dtype), device=device).requires_grad_()
    grad = torch.randn_like(x)
    programs = {"F.dropout": lambda x: F.dropout(x, 0.1), "ours": of_item(ItemStream(keys.key(0, 0)))}
    rows: dict[str, list[list[float]]] = {name: [[], []] for name in programs}
    for _ in range(options.repeats):
        for name, program in programs.items():
            rows[name][0].append(median_ms(lambda program=program: program(x), device))
            rows[name][1].append(median_ms(lambda program=program: program(x).backward(grad), device))
    out = sys.stdout.write
    out("| program | forward ms | forward and backward ms |\n|---|---|---|\n")
    for name, columns in rows.items():
        cells = (", ".join(f"{value:.2f}" for value in column) for column in columns)
        out(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
