"""One device: training in bfloat16 against the device's own ceiling, nanoGPT's compiled model, and published numbers.

The ceiling is the fastest of a few large matrix products, measured in the same run. Model operations are those of
``dynmo_train.models.flops``, of every program alike. Goals on an NVIDIA H200: 60 % of the ceiling, 1.05 x nanoGPT's
model.

    python tests/benchmarks/train_gpu.py --nanogpt DIRECTORY [--shape 1.3B] [--compile] [--repeats 3]
    python tests/benchmarks/train_gpu.py --shape llama-8B [--compile]
    python tests/benchmarks/train_gpu.py --shape tiny --device cpu --repeats 1
    python tests/benchmarks/train_gpu.py --shape tiny-llama --device cpu --repeats 1

``--nanogpt`` is a directory that holds nanoGPT's ``model.py``; without it that row is left out, with the reason.

``llama-8B`` has the layers of Llama 3 8B at full width, but two and four of them, since the optimizer state of 32 does
not fit in one device. A layer is half of the difference; 32 of them and the rest of the step are *extrapolated*. MFU is
as torchtitan counts it: ``6 (N - N_embedding) + 12 layers width tokens`` operations per token, over the peak of the
device. The peer is what torchtitan publishes in its ``benchmarks`` for 8 H100 with FSDP, which includes their
communication; one device has none. The cost of each dynamic technique next to the dense layer
is ``dynmo-train measure-costs``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from random_batches import random_rows


@dataclass(frozen=True)
class Shape:
    """A model and its batches.

    Attributes:
        layers: layers of the model; of one that is extrapolated, layers of the whole model.
        width: model width.
        heads: attention heads.
        vocabulary: tokens of the vocabulary.
        tokens: tokens of a sample.
        samples: samples of a microbatch.
        microbatches: microbatches of a step.
        products: sizes of the square products that measure the ceiling.
        llama: further options of a Llama; None for a GPT.
        measured: the two depths that are measured where the model is extrapolated.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    samples: int
    microbatches: int
    products: tuple[int, ...]
    llama: dict[str, int] | None = None
    measured: tuple[int, int] | None = None

    @property
    def step_tokens(self) -> int:
        return self.tokens * self.samples * self.microbatches


SHAPES = {
    # GPT-3 XL (Brown et al. 2020, table 2.1) with 16 heads of 128, as fused attention likes them
    "1.3B": Shape(24, 2048, 16, 50304, 2048, 8, 4, (8192, 16384)),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3
    "llama-8B": Shape(
        32, 4096, 32, 128256, 8192, 1, 1, (8192, 16384), {"ffn_hidden_size": 14336, "num_query_groups": 8}, (2, 4)
    ),
    "tiny": Shape(2, 32, 2, 128, 32, 2, 2, (128,)),
    "tiny-llama": Shape(8, 32, 4, 128, 32, 2, 2, (128,), {"ffn_hidden_size": 96, "num_query_groups": 2}, (1, 2)),
}
# Dense bfloat16 operations per second by a part of the device's name (torchtitan/tools/utils.py).
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2.25e15}
# torchtitan on 8 H100 with FSDP: published tokens per second and device, and the MFU that follows from them.
PUBLISHED = {"eager": (5762, 0.337), "compiled": (6667, 0.390)}
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

    own: dict[str, Any] = {} if shape.llama is None else {"family": "llama", **shape.llama}
    return config_of(
        DefaultContext(world_size=1),
        **own,
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


def mfu_operations(shape: Shape) -> int:
    """Operations per token as torchtitan counts them: no discount for the causal mask, lookup of words not counted.

    Worked: Llama 3 8B at 8,192 tokens: 6 x 7.50e9 + 12 x 32 x 4,096 x 8,192 = 5.79e10.
    """
    from dynmo_train.models.flops import step_flops
    from dynmo_train.models.registry import family_of

    family = family_of(config_of_shape(shape, "cpu", compiled=False))
    return step_flops(family, width=shape.width, samples=1, tokens=shape.tokens) // shape.tokens


def whole_step_s(measured_s: dict[int, float], layers: int) -> float | None:
    """Seconds of a step of a model, from those of two depths; None where the deeper one took less time.

    Args:
        measured_s: layers -> seconds, of two models that differ in their layers only.
        layers: of the model.
    """
    (few, few_s), (more, more_s) = sorted(measured_s.items())
    layer_s = (more_s - few_s) / (more - few)
    return few_s + (layers - few) * layer_s if layer_s > 0 else None


def extrapolated(shape: Shape, device: torch.device, *, compiled: bool, repeats: int, steps: int) -> None:
    """Measure a model at two depths, and print what the whole one would take."""
    import gc

    from dynmo_train.parallel.process_groups import destroy_world

    depths = shape.measured or (shape.layers, shape.layers)
    taken: dict[int, list[float]] = {}
    for depth in depths:
        run, _ = ours(replace(shape, layers=depth), device, compiled=compiled)
        taken[depth] = [seconds_of(run, device, steps) for _ in range(repeats)]
        # The optimizer state of the next depth needs the memory of this one.
        del run
        destroy_world()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    step_s = whole_step_s({depth: min(rounds) for depth, rounds in taken.items()}, shape.layers)
    operations = mfu_operations(shape)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    sys.stdout.write(f"{operations / 1e9:.4g} GFLOP per token; {name}: peak {peak or 'unknown'}\n\n")
    sys.stdout.write("| program | layers | s per step | tokens/s | MFU |\n|---|---|---|---|---|\n")
    for depth in depths:
        rounds = ", ".join(f"{each:.4f}" for each in taken[depth])
        sys.stdout.write(f"| ours, measured | {depth} | {rounds} | {shape.step_tokens / min(taken[depth]):.0f} | |\n")
    if step_s is None:
        sys.stdout.write(f"| ours, not extrapolated: the deeper model took less time | {shape.layers} | | | |\n")
    else:
        rate = shape.step_tokens / step_s
        share = "" if peak is None else f"{operations * rate / peak:.3f}"
        sys.stdout.write(f"| ours, extrapolated | {shape.layers} | {step_s:.4f} | {rate:.0f} | {share} |\n")
    for mode, (published, mfu) in PUBLISHED.items() if shape.layers == 32 else ():
        sys.stdout.write(f"| torchtitan, {mode}, published for 8 H100 | 32 | | {published} | {mfu} |\n")


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
    if shape.measured is not None:
        extrapolated(shape, device, compiled=options.compile, repeats=options.repeats, steps=options.steps)
        return
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
