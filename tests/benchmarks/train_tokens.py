"""Tokens per second and peak memory of training a small GPT in one CPU process: ours, nanoGPT, transformers.

Each program trains the same model (learned positions, tied embeddings, no dropout, float32, AdamW, clipping) on the
same batches in a process of its own; they take turns. Peak memory is the process's largest resident set.
On a machine with other programs compare processor time.

    python tests/benchmarks/train_tokens.py --nanogpt DIRECTORY [--shape 30M-256] [--repeats 3] [--threads 2]

``--nanogpt`` is a directory that holds nanoGPT's ``model.py``; without it that row is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from random_batches import random_rows


@dataclass(frozen=True)
class Shape:
    """Layers, width, heads, vocabulary, tokens of a sample, samples of a microbatch, microbatches of a step."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    samples: int
    microbatches: int

    @property
    def step_tokens(self) -> int:
        return self.tokens * self.samples * self.microbatches


SHAPES = {
    "30M-256": Shape(6, 384, 6, 50304, 256, 4, 2),
    "30M-1024": Shape(6, 384, 6, 50304, 1024, 2, 1),
    "11M-512": Shape(4, 384, 6, 8192, 512, 4, 2),
}
RATE, DECAY, CLIP = 6e-4, 0.1, 1.0


def batch(shape: Shape, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = shape.samples * shape.microbatches
    return random_rows(step, rows=rows, tokens=shape.tokens, vocabulary=shape.vocabulary)


def ours(shape: Shape) -> Callable[[int], float]:
    from plain_engine import constant, engine_batch, engine_of, gpt_of

    from dynmo_train.parallel.process_groups import init_world

    sizes = {"layers": shape.layers, "width": shape.width, "heads": shape.heads}
    engine = engine_of(
        gpt_of(**sizes, tokens=shape.tokens, vocabulary=shape.vocabulary),
        init_world("cpu"),
        microbatches=shape.microbatches,
        boundary=(shape.samples, shape.tokens, shape.width),
        rate=constant(RATE),
    )

    def step(number: int) -> float:
        return engine.train_step(engine_batch(batch(shape, number), number + 1, shape.microbatches), sampled=False).loss

    return step


def _accumulated(
    shape: Shape, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], model: torch.nn.Module, optimizer
) -> Callable[[int], float]:
    """The usual loop: microbatches one after another, gradients clipped, one update."""

    def step(number: int) -> float:
        total = 0.0
        for ids, labels in zip(*(part.split(shape.samples) for part in batch(shape, number)), strict=True):
            loss = loss_of(ids, labels) / shape.microbatches
            total += loss.item()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def nanogpt(shape: Shape, directory: str) -> Callable[[int], float]:
    sys.path.insert(0, directory)
    import model as peer

    config = peer.GPTConfig(
        block_size=shape.tokens,
        vocab_size=shape.vocabulary,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        dropout=0.0,
        bias=True,
    )
    network = peer.GPT(config)
    optimizer = network.configure_optimizers(DECAY, RATE, (0.9, 0.95), "cpu")
    return _accumulated(shape, lambda ids, labels: network(ids, labels)[1], network, optimizer)


def transformers(shape: Shape) -> Callable[[int], float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.tokens,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    network = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = network(ids).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))

    return _accumulated(shape, loss_of, network, optimizer)


def run_one(program: str, shape: Shape, threads: int, steps: int, directory: str) -> None:
    torch.set_num_threads(threads)
    step = {"ours": ours, "transformers": transformers, "nanogpt": lambda s: nanogpt(s, directory)}[program](shape)
    step(0)
    times, processor_times = [], []
    for number in range(1, steps + 1):
        begin, processor_begin = time.perf_counter(), time.process_time()
        loss = step(number)
        times.append(time.perf_counter() - begin)
        processor_times.append(time.process_time() - processor_begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(
        json.dumps(
            {
                "tokens_per_s": shape.step_tokens / statistics.median(times),
                "processor_s": min(processor_times),
                "peak_mb": peak,
                "loss": loss,
            }
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", default="", help="directory with nanoGPT's model.py")
    parser.add_argument("--shape", choices=SHAPES, default="30M-256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.run:
        run_one(options.run, shape, options.threads, options.steps, options.nanogpt)
        return
    programs = ["ours", "transformers"]
    if (Path(options.nanogpt) / "model.py").is_file():
        programs.insert(1, "nanogpt")
    else:
        sys.stderr.write("nanoGPT is left out: --nanogpt names no directory with its model.py\n")
    results: dict[str, list[dict]] = {program: [] for program in programs}
    for _ in range(options.repeats):
        for program in programs:
            command = [sys.executable, __file__, "--run", program, "--shape", options.shape]
            command += ["--threads", str(options.threads), "--steps", str(options.steps), "--nanogpt", options.nanogpt]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            results[program].append(json.loads(done.stdout.splitlines()[-1]))
    lines = [
        f"| {options.shape}, {options.threads} threads | tokens/s | processor s of the fastest step | peak MB |"
        f" loss after {options.steps + 1} steps |"
    ]
    lines.append("|---|---|---|---|---|")
    for program, rows in results.items():
        rates = ", ".join(f"{row['tokens_per_s']:.0f}" for row in rows)
        peaks = ", ".join(f"{row['peak_mb']:.0f}" for row in rows)
        processor = ", ".join(f"{row['processor_s']:.2f}" for row in rows)
        lines.append(f"| {program} | {rates} | {processor} | {peaks} | {rows[0]['loss']:.3f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
