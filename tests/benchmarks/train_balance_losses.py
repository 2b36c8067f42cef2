"""Loads of experts after some training with each form of load balancing, of the same model on the same data.

A GPT of bytes on the source files of Python's standard library, sigmoid scores, top-2, in one process; a step has 4
microbatches of 4 sequences. Of the last steps of each run:

* max/mean, microbatch: tokens of the busiest expert over the mean, in each microbatch; what a rank waits for.
* max/mean, step: the same of the whole step.
* lm loss: without the auxiliary losses.

    python tests/benchmarks/train_balance_losses.py [--steps 120] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
from pathlib import Path
from statistics import mean

import torch

from dynmo_train.data.batch import Batch
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layer_list import BoundaryShape
from dynmo_train.models.layers.sparse_formats import BUILT_IN
from dynmo_train.optim.lr_schedule import LearningRate
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.parallel.process_groups import destroy_world, init_world
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.pipeline.schedule import PipelineConfig
from dynmo_train.trainer.engine import Engine, EngineSettings

LAYERS, WIDTH, INNER, EXPERTS, TOKENS = 2, 64, 128, 8, 64
MICROBATCHES, MICRO_BATCH, LAST = 4, 4, 30
SIGMOID = RouterShape(score_function="sigmoid")
# The coefficient that Megatron-LM recommends to start with. The update rate is ten times that of DeepSeek-V3, whose
# runs are far longer: at 1e-3 a bias moves by 0.12 at most in 120 steps.
FORMS: dict[str, MoeShape] = {
    "none": MoeShape(num_experts=EXPERTS, router=SIGMOID),
    "aux_loss 1e-2": MoeShape(num_experts=EXPERTS, router=SIGMOID, aux_loss_coeff=1e-2),
    "seq_aux_loss 1e-2": MoeShape(num_experts=EXPERTS, router=SIGMOID, seq_aux_loss_coeff=1e-2),
    "global_aux_loss 1e-2": MoeShape(num_experts=EXPERTS, router=SIGMOID, global_aux_loss_coeff=1e-2),
    "bias 1e-2": MoeShape(
        num_experts=EXPERTS, router=RouterShape(score_function="sigmoid", expert_bias=True, bias_update_rate=1e-2)
    ),
    "sinkhorn": MoeShape(num_experts=EXPERTS, routing="sinkhorn"),
}


def corpus() -> torch.Tensor:
    """The bytes of the standard library's modules, in alphabetical order, int64."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch_of(data: torch.Tensor, step: int, seed: int) -> Batch:
    """Sequences from random places; a sequence is from one file."""
    rng = random.Random(f"{seed} {step}")
    starts = [rng.randrange(len(data) - TOKENS - 1) for _ in range(MICROBATCHES * MICRO_BATCH)]
    ids = torch.stack([data[start : start + TOKENS + 1] for start in starts])
    inputs = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return Batch(inputs=inputs, first_microbatch=(step - 1) * MICROBATCHES, step=step)


def train(moe: MoeShape, data: torch.Tensor, steps: int, seed: int) -> tuple[float, float, float]:
    """Train; max/mean of microbatches and of steps, and the loss, means over the last steps."""
    shape = GptShape(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        ffn_hidden_size=INNER,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        vocab_size=256,
        padded_vocab_size=256,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        seed=seed,
        moe=moe,
    )
    family, world = Gpt(shape), init_world("cpu")
    boundary = BoundaryShape.hidden(batch=MICRO_BATCH, tokens=TOKENS, width=WIDTH)
    settings = EngineSettings(
        pipeline=PipelineConfig(
            schedule="1f1b", microbatches=MICROBATCHES, boundary=boundary, seed=seed, recompute=False
        ),
        optimizer=AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
        rate=LearningRate(peak=3e-3, floor=3e-4, style="cosine", warmup_steps=20, decay_steps=steps),
        clip=1.0,
        sparse=BUILT_IN,
    )
    try:
        engine = Engine(family, settings, uniform_partition(family.items, 1, 1), world)
        engine.build()
        items = [item.name for item in family.items if item.kind == "mlp"]
        by_microbatch, by_step, losses = [], [], []
        for step in range(1, steps + 1):
            result = engine.train_step(batch_of(data, step, seed), sampled=False)
            if step <= steps - LAST:
                continue
            losses.append(result.loss)
            by_step.append(result.losses["expert_load"])
            for item in items:
                loads = engine.pipeline().metrics_of(item)["expert_tokens"]
                by_microbatch += [float(each.max() / each.mean()) for each in loads]
    finally:
        destroy_world()
    return mean(by_microbatch), mean(by_step), mean(losses)


def write(line: str) -> None:
    """Write a line of the table."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = corpus()
    write("| form | max/mean, microbatch | max/mean, step | lm loss |\n|---|---|---|---|")
    for name, moe in FORMS.items():
        rows = [train(moe, data, options.steps, seed) for seed in options.seeds]
        cells = [
            ", ".join(f"{value:.{digits}f}" for value in column)
            for column, digits in zip(zip(*rows, strict=True), (2, 2, 3), strict=True)
        ]
        write(f"| {name} | {' | '.join(cells)} |")
    write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_utime:.0f} s of processor time, {len(data):,} bytes of text")


if __name__ == "__main__":
    main()
