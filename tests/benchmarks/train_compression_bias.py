"""Bias and noise of compressed gradients at fixed weights, with and without lazy error propagation.

A model trains exactly for ``--steps`` steps. At its weights then, each scheme computes the gradients of the same
batches. With g the exact gradient of a batch and d the difference of the compressed one::

    bias   |mean of d|             does not become smaller by a larger batch or a longer run
    noise  standard deviation of d  averages out

Both are shares of |mean of g|, estimated without their own bias from the products of different batches:
``|mean|^2 = (|sum|^2 - sum of |.|^2) / (n (n - 1))``. The noise of g itself, by the choice of samples, is the scale for
the noise of d. Only parameters before the last boundary are counted, since the others have exact gradients.

python tests/benchmarks/train_compression_bias.py --text wiki.valid.tokens wiki.test.tokens [--microbatches 16,64]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from train_compression import SCHEMES, Recipe, Run, load_tokens

from dynmo_train._common.console import emit

GROUPS = ("matrices", "vectors")
LR_STEPS = 1000


class Moments:
    """The squared norm of a mean and the variance, over batches."""

    def __init__(self) -> None:
        self._sum: Mapping[str, torch.Tensor] = {}
        self._squares, self._count = 0.0, 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add one batch, name -> tensor."""
        if not self._count:
            self._sum = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in tensors.items()}
        for name, each in tensors.items():
            self._sum[name].add_(each)
            self._squares += float(each.double().square().sum())
        self._count += 1

    def norm_of_mean(self) -> float:
        """The norm of the mean; 0 where the estimate is below 0."""
        of_sum = sum(float(each.square().sum()) for each in self._sum.values())
        return math.sqrt(max(0.0, (of_sum - self._squares) / (self._count * (self._count - 1))))

    def deviation(self) -> float:
        """The standard deviation of one batch around the mean."""
        return math.sqrt(max(0.0, self._squares / self._count - self.norm_of_mean() ** 2))


def of_group(gradients: Mapping[str, torch.Tensor], group: str) -> dict[str, torch.Tensor]:
    """The matrices, or the vectors."""
    return {name: each for name, each in gradients.items() if (each.dim() > 1) == (group == "matrices")}


def affected_names(run: Run) -> list[str]:
    """The parameters before the last boundary; the tied table is also in the last stage, and is left out."""
    last = run.recipe.stages - 1
    items = [name for name in run.names if run.stage_of[name] < last and name != "head"]
    return [name for name in run.parameters() if "word" not in name and any(name.startswith(f"{i}.") for i in items)]


def gradients_of(run: Run, samples_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a batch by the scheme of a run."""
    run.gradients(samples_BT, 0)
    parameters = run.parameters()
    return {name: parameters[name].grad.clone() for name in affected_names(run)}  # type: ignore[union-attr]


def measure(trained: Run, microbatches: int, schemes: list[str], rank: int, batches: int, tokens: torch.Tensor) -> None:
    """Emit the rows of one number of microbatches."""
    recipe = replace(trained.recipe, microbatches=microbatches)
    exact = Run(recipe, SCHEMES["baseline"], trained.seed)
    runs = {name: Run(recipe, replace(SCHEMES[name], rank=rank), trained.seed) for name in schemes}
    for run in (exact, *runs.values()):
        for name, module in run.modules.items():
            module.load_state_dict(trained.modules[name].state_dict())
    whole = {group: Moments() for group in GROUPS}
    wrong = {name: {group: Moments() for group in GROUPS} for name in schemes}
    generator = torch.Generator().manual_seed(7)
    for _ in range(batches):
        samples_BT = exact.samples(tokens, recipe.replicas * microbatches, generator)
        gradients = gradients_of(exact, samples_BT)
        for group in GROUPS:
            whole[group].add(of_group(gradients, group))
        for name, run in runs.items():
            compressed = gradients_of(run, samples_BT)
            difference = {each: compressed[each] - gradients[each] for each in gradients}
            for group in GROUPS:
                wrong[name][group].add(of_group(difference, group))
    unit = {group: whole[group].norm_of_mean() for group in GROUPS}
    sampling = [f"- | {whole[group].deviation() / unit[group]:.2f}" for group in GROUPS]
    emit(f"| {microbatches} | exact gradient | {' | '.join(sampling)} |")
    for name in schemes:
        cells = [
            f"{moments.norm_of_mean() / unit[group]:.3f} | {moments.deviation() / unit[group]:.2f}"
            for group, moments in wrong[name].items()
        ]
        emit(f"| {microbatches} | {name} | {' | '.join(cells)} |")


def main() -> None:
    default = [name for name, scheme in SCHEMES.items() if scheme.rank and not scheme.selective]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--schemes", default=";".join(default), help="NAME;NAME;...")
    parser.add_argument("--microbatches", default="16,64", help="of a replica and step: N,...")
    parser.add_argument("--ranks", default="1,4")
    parser.add_argument("--steps", type=int, default=300, help="of exact training before")
    parser.add_argument("--batches", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = load_tokens(options.text)
    # The learning rate of a longer run: the weights are those of its first steps.
    recipe = replace(Recipe(), steps=max(LR_STEPS, options.steps))
    trained = Run(recipe, SCHEMES["baseline"], options.seed)
    sys.stderr.write(f"loss after {options.steps} steps: {trained.train(tokens, options.steps):.4f}\n")
    for rank in (int(word) for word in options.ranks.split(",")):
        emit(f"\nRank {rank}:\n")
        emit("| microbatches | scheme | matrices: bias | noise | vectors: bias | noise |")
        emit("|---|---|---|---|---|---|")
        for microbatches in (int(word) for word in options.microbatches.split(",")):
            measure(trained, microbatches, options.schemes.split(";"), rank, options.batches, tokens)


if __name__ == "__main__":
    main()
