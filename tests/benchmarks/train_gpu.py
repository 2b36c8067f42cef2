"""One device: a GPT's training in bfloat16, the device's own ceiling, and nanoGPT's compiled model.

The ceiling is the fastest of a few large matrix products, measured in the same run. Model operations are those of
``dynmo_train.models.flops``, of every program alike. Goals on an NVIDIA H200: 60 % of the ceiling, 1.05 x nanoGPT's
model.

    python tests/benchmarks/train_gpu.py --nanogpt DIRECTORY [--shape 1.3B] [--compile] [--repeats 3]
    python tests/benchmarks/train_gpu.py --shape tiny --device cpu --repeats 1

``--nanogpt`` is a directory that holds nanoGPT's ``model.py``; without it that row is left out, with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_batches import random_rows


@dataclass(frozen=True)
class Shape:
    """Layers, width, heads, vocabulary, tokens of a sample, samples of a microbatch, microbatches of a step; sizes of
    the products that measure the ceiling."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    samples: int
    microbatches: int
    products: tuple[int, ...]

    @property
    def step_tokens(self) -> int:
        return self.tokens * self.samples * self.microbatches


SHAPES = {
    # GPT-3 XL (Brown et al. 2020, table 2.1) with 16 heads of 128, as fused attention likes them
    "1.3B": Shape(24, 2048, 16, 50304, 2048, 8, 4, (8192, 16384)),
    "tiny": Shape(2, 32, 2, 128, 32, 2, 2, (128,)),
}
RATE, DECAY, CLIP = 2e-4, 0.1, 1.0


def warm_up(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], Any], device: torch.device, times: int, warm: int = 2) -> float:
    """The median of some calls, each waited for."""
    for _ in range(warm):
        run()
    taken = []
    for _ in range(times):
        warm_up(device)
        begin = time.perf_counter()
        run()
        warm_up(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def ceiling(shape: Shape, device: torch.device) -> float:
    """Operations per second of the fastest square product in bfloat16."""
    best = 0.0
    for size in shape.products:
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        best = max(best, 2 * size**3 / seconds_of(lambda a=left, b=right: a @ b, device, 10))
    return best


def batch(shape: Shape, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = shape.samples * shape.microbatches
    return random_rows(step, rows=rows, tokens=shape.tokens, vocabulary=shape.vocabulary)


def config_of_shape(shape: Shape, device: str, *, compiled: bool) -> Any:
    from dynmo_train.config import DefaultContext, config_of

    return config_of(
        DefaultContext(world_size=1),
        num_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        seq_length=shape.tokens,
        vocab_size=shape.vocabulary,
        micro_batch_size=shape.samples,
        global_batch_size=shape.samples * shape.microbatches,
        train_iters=1000,
        lr=RATE,
        lr_decay_style="constant",
        weight_decay=DECAY,
        adam_beta2=0.95,
        clip_grad=CLIP,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        data_path="-",
        bf16=True,
        device=device,
        torch_compile=compiled,
    )


def ours(shape: Shape, device: torch.device, *, compiled: bool) -> tuple[Callable[[], float], int]:
    """A step of the engine, and its model operations."""
    from plain_engine import engine_batch

    from dynmo_train.models.registry import family_of
    from dynmo_train.parallel.process_groups import init_world
    from dynmo_train.trainer.engine import Engine
    from dynmo_train.trainer.settings_from_config import engine_settings, flops_counter, initial_partition

    config = config_of_shape(shape, device.type, compiled=compiled)
    family = family_of(config)
    engine = Engine(family, engine_settings(config), initial_partition(config, family, None), init_world(device.type))
    engine.build()
    done = [0]

    def step() -> float:
        drawn = batch(shape, done[0])
        done[0] += 1
        return engine.train_step(engine_batch(drawn, done[0], shape.microbatches), sampled=False).loss

    return step, flops_counter(config, family)(shape.samples * shape.microbatches, shape.tokens)


def nanogpt(shape: Shape, device: torch.device, directory: str) -> Callable[[], float]:
    """A step of nanoGPT's model, compiled, in its own loop: bfloat16 by autocast, fused AdamW."""
    sys.path.insert(0, directory)
    import model as peer

    sizes = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.width}
    config = peer.GPTConfig(block_size=shape.tokens, vocab_size=shape.vocabulary, dropout=0.0, bias=True, **sizes)
    network = peer.GPT(config).to(device)
    optimizer = network.configure_optimizers(DECAY, RATE, (0.9, 0.95), device.type)
    compiled, done = torch.compile(network), [0]

    def step() -> float:
        total = torch.zeros((), device=device)
        for ids, labels in zip(*(part.split(shape.samples) for part in batch(shape, done[0])), strict=True):
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(ids.to(device), labels.to(device))[1] / shape.microbatches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done[0] += 1
        return float(total)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", default="", help="directory with nanoGPT's model.py")
    parser.add_argument("--shape", choices=SHAPES, default="1.3B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--compile", action="store_true", help="run the engine with --torch-compile")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here; --shape tiny --device cpu tries the script alone")
    shape, device = SHAPES[options.shape], torch.device(options.device)
    limit = ceiling(shape, device)
    step, operations = ours(shape, device, compiled=options.compile)
    programs: dict[str, Callable[[], float]] = {"ours, compiled" if options.compile else "ours": step}
    if (Path(options.nanogpt) / "model.py").is_file():
        programs["nanoGPT's model, compiled"] = nanogpt(shape, device, options.nanogpt)
    else:
        sys.stderr.write("nanoGPT is left out: --nanogpt names no directory with its model.py\n")
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, run in programs.items():
            taken[name].append(seconds_of(run, device, options.steps))
    sys.stdout.write(f"ceiling: {limit / 1e12:.2f} TFLOP/s; a step: {operations / 1e12:.4f} model TFLOP\n\n")
    sys.stdout.write(f"| {options.shape}, {options.device} | tokens/s | share of the ceiling |\n|---|---|---|\n")
    for name, rounds in taken.items():
        rates = ", ".join(f"{shape.step_tokens / each:.0f}" for each in rounds)
        shares = ", ".join(f"{operations / each / limit:.3f}" for each in rounds)
        sys.stdout.write(f"| {name} | {rates} | {shares} |\n")


if __name__ == "__main__":
    main()
