"""What compression costs in quality: validation loss of a small GPT on WikiText, by what is compressed and how.

All stages and replicas in one process: the layers are dynmo_train's, and every gradient that would cross a stage
boundary goes through its codec, microbatch by microbatch, replica by replica, as 1F1B would send it; gradients between
replicas go through PowerSGD. Fused embedding synchronisation changes no number here. ``train_compression_runs.py``
does the same with whole runs of dynmo-train in four processes.

python tests/benchmarks/train_compression.py --text wiki.valid.tokens wiki.test.tokens [--seeds 1,2,3] [--lr 1e-3]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from train_compression_runs import prepare

from dynmo_train._common.console import emit
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.optim.compression.boundary import BoundaryCodec
from dynmo_train.optim.compression.lowrank import FactorShape, initial_factor, orthonormalize
from dynmo_train.optim.compression.settings import CompressionSettings
from dynmo_train.parallel.device_clock import clock_for

CPU = torch.device("cpu")
WARMUP = 0.05


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes of a run; the ranks are the seed's shares: 16 of 1024 rows, 128 of 720 to 1920."""

    layers: int = 4
    width: int = 64
    tokens: int = 32
    stages: int = 4
    replicas: int = 2
    microbatches: int = 16
    steps: int = 1000
    rate: float = 1e-3
    replica_rank: int = 8
    warm_up: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What is compressed: ``epilogue`` only or all microbatches, with LEP, which ends with the step, and SC.

    ``selective`` is the number of first stages whose gradients between replicas are compressed.
    """

    rank: int | None = None
    lep: bool = False
    epilogue: bool = True
    within_step: bool = True
    selective: int = 0


SCHEMES = {
    "baseline": Scheme(),
    "SC": Scheme(selective=3),
    "CB without LEP": Scheme(rank=1),
    "CB+LEP": Scheme(rank=1, lep=True),
    "CB+LEP across steps": Scheme(rank=1, lep=True, within_step=False),
    "CB+LEP+FE+SC": Scheme(rank=1, lep=True, selective=3),
    "CB+LEP+FE+SC across steps": Scheme(rank=1, lep=True, within_step=False, selective=3),
    **{f"CB+LEP+FE+SC, {way} of 4": Scheme(rank=1, lep=True, selective=way) for way in (0, 1, 2, 4)},
    "CB without LEP, every microbatch": Scheme(rank=1, epilogue=False),
    "CB+LEP, every microbatch": Scheme(rank=1, lep=True, epilogue=False),
    "CB+LEP across steps, every microbatch": Scheme(rank=1, lep=True, epilogue=False, within_step=False),
}


class Cut(torch.autograd.Function):
    """The boundary between two stages: whole forth, through the codec back."""

    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, boundary: Boundary) -> torch.Tensor:
        ctx.boundary = boundary
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.boundary.packed(gradients[0]), None


class Boundary:
    """One boundary of one replica; samples are microbatches of one sample."""

    def __init__(self, item: str, codec: BoundaryCodec, microbatches: Iterable[int]) -> None:
        self.item, self.codec, self.microbatches = item, codec, sorted(microbatches)

    def packed(self, gradient_BTD: torch.Tensor) -> torch.Tensor:
        """The gradient as the stage before gets it."""
        result = gradient_BTD.clone()
        for at in self.microbatches:
            part = gradient_BTD[at : at + 1]
            self.codec.decode(self.codec.encode(self.item, "hidden", part), result[at : at + 1], self.item)
        return result


class Replicas:
    """PowerSGD with error feedback over replicas in one process (arXiv:1905.13727), as ``compression/replicas.py``."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._factors: dict[str, torch.Tensor] = {}
        self._owed: dict[str, list[torch.Tensor]] = {}

    def summed(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What all replicas get."""
        shape = FactorShape.of(parts[0].shape, self._rank) if parts[0].dim() == 2 else None
        if shape is None or not shape.is_smaller(4):
            return torch.stack(list(parts)).sum(0)
        owed = self._owed.get(name, [torch.zeros_like(part) for part in parts])
        matrices = [part + each for part, each in zip(parts, owed, strict=True)]
        total = torch.stack(matrices).sum(0)
        factor = self._factors.get(name, initial_factor(shape, CPU, name))
        left = factor @ total.T
        orthonormalize(left)
        self._factors[name] = right = left @ total
        whole = left.T @ right
        self._owed[name] = [matrix - whole / len(parts) for matrix in matrices]
        return whole


class Run:
    """One model, its stages and replicas."""

    def __init__(self, recipe: Recipe, scheme: Scheme, seed: int) -> None:
        self.recipe, self.scheme, self.seed = recipe, scheme, seed
        shape = GptShape(
            num_layers=recipe.layers,
            hidden_size=recipe.width,
            ffn_hidden_size=4 * recipe.width,
            num_attention_heads=4,
            max_position_embeddings=recipe.tokens,
            vocab_size=2000,
            padded_vocab_size=2048,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            seed=seed,
        )
        family = Gpt(shape)
        self.names = [item.name for item in family.items]
        self.modules = {name: family.build(name, CPU) for name in self.names}
        embedding, head = self.modules["embedding"], self.modules["head"]
        head.weight = embedding.word.weight
        per = recipe.layers // recipe.stages
        self.stage_of = {
            name: min(recipe.stages - 1, int(name.split(".")[1]) // per) if name.startswith("layers.") else 0
            for name in self.names
        }
        self.cuts = [self._cuts(replica) for replica in range(recipe.replicas)]
        self.sgd = Replicas(recipe.replica_rank)

    def _cuts(self, replica: int) -> dict[str, Boundary]:
        recipe, scheme = self.recipe, self.scheme
        if scheme.rank is None:
            return {}
        settings = CompressionSettings(
            boundary_rank=scheme.rank, feedback=scheme.lep, feedback_within_step=scheme.within_step
        )
        self.codecs: list[BoundaryCodec] = getattr(self, "codecs", [])
        self.codecs.append(BoundaryCodec(settings, SimpleNamespace(memories={}), self.seed, clock_for(CPU)))  # type: ignore[arg-type]
        cuts = {}
        for stage in range(1, recipe.stages):
            item = f"layers.{stage * recipe.layers // recipe.stages}.attention"
            first = recipe.microbatches - (recipe.stages - (stage - 1)) if scheme.epilogue else 0
            cuts[item] = Boundary(item, self.codecs[-1], range(max(0, first), recipe.microbatches))
        return cuts

    def loss(self, tokens_BT: torch.Tensor, cuts: dict[str, Boundary]) -> torch.Tensor:
        """Mean over the samples."""
        x = self.modules["embedding"](tokens_BT[:, :-1])
        for name in self.names[1:-1]:
            if name in cuts:
                x = Cut.apply(x, cuts[name])
            x = self.modules[name](x)
        return self.modules["head"](x, tokens_BT[:, 1:])  # type: ignore[no-any-return]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Without the head's copy of the table."""
        named = [(f"{item}.{name}", p) for item, m in self.modules.items() for name, p in m.named_parameters()]
        return {name: p for name, p in named if name != "head.weight"}

    def gradients(self, samples_BT: torch.Tensor, step: int) -> None:
        """Of all replicas, as the optimizer gets them."""
        recipe = self.recipe
        parameters = self.parameters()
        for codec in getattr(self, "codecs", []):
            codec.begin_step(1.0)
        parts = []
        for replica, own in enumerate(samples_BT.chunk(recipe.replicas)):
            for parameter in parameters.values():
                parameter.grad = None
            (self.loss(own, self.cuts[replica]) / recipe.replicas).backward()
            parts.append({name: p.grad for name, p in parameters.items()})
        packs = step > recipe.warm_up * recipe.steps
        for name, parameter in parameters.items():
            gradients = [part[name] for part in parts if part[name] is not None]
            item = name.rpartition(".")[0]
            stage = next((s for each, s in self.stage_of.items() if item.startswith(each)), 0)
            # The tied table is added on its own (FE)
            compressed = packs and stage < self.scheme.selective and "word" not in name and "head" not in name
            parameter.grad = self.sgd.summed(name, gradients) if compressed else torch.stack(gradients).sum(0)

    def train(self, tokens: torch.Tensor, stop_after: int | None = None) -> float:
        """The validation loss after all steps or ``stop_after``; the last tenth of the tokens is held out."""
        recipe = self.recipe
        cut = int(len(tokens) * 0.9)
        parameters = self.parameters()
        groups = [
            {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=recipe.rate)
        generator = torch.Generator().manual_seed(1000 + self.seed)
        warm = max(1, int(WARMUP * recipe.steps))
        for step in range(1, (stop_after or recipe.steps) + 1):
            along = (step - warm) / max(1, recipe.steps - warm)
            share = step / warm if step < warm else 0.1 + 0.45 * (1 + math.cos(math.pi * along))
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * share
            count = recipe.replicas * recipe.microbatches
            self.gradients(self.samples(tokens[:cut], count, generator), step)
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            losses = [float(self.loss(self.samples(tokens[cut:], 128, generator), {})) for _ in range(20)]
        return statistics.fmean(losses)

    def samples(self, tokens: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        """``count`` samples at random places, ``[count, T + 1]``."""
        length = self.recipe.tokens + 1
        begins = torch.randint(0, len(tokens) - length, (count,), generator=generator).tolist()
        return torch.stack([tokens[begin : begin + length] for begin in begins])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="NAME;NAME;...")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--lr", type=float, default=Recipe.rate)
    parser.add_argument("--microbatches", type=int, default=Recipe.microbatches)
    parser.add_argument("--results", type=Path, help="JSON lines: what stands there is not run again.")
    parser.add_argument("--seconds", type=float, default=math.inf, help="Begin no further run behind these.")
    return parser.parse_args()


def load_tokens(texts: list[Path], results: Path | None = None) -> torch.Tensor:
    """Tokens of the texts, cached next to the results."""
    cache = results.with_suffix(".tokens.npy") if results is not None else None
    if cache is not None and cache.exists():
        return torch.from_numpy(np.load(cache))
    with tempfile.TemporaryDirectory() as place:
        options = prepare(texts, Path(place))
        found = np.fromfile(f"{options[1]}.bin", dtype=np.uint16).astype(np.int64)
    if cache is not None:
        np.save(cache, found)
    return torch.from_numpy(found)


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    began = time.monotonic()
    tokens = load_tokens(options.text, options.results)
    recipe = replace(Recipe(), steps=options.steps, rate=options.lr, microbatches=options.microbatches)
    done: list[dict[str, Any]] = []
    if options.results is not None and options.results.exists():
        done = [json.loads(line) for line in options.results.read_text().splitlines()]
    names = options.schemes.split(";")
    for seed in (int(word) for word in options.seeds.split(",")):
        for name in names:
            key = [name, seed, options.rank, options.steps, options.lr, options.microbatches]
            if any(one["key"] == key for one in done) or time.monotonic() - began > options.seconds:
                continue
            scheme = SCHEMES[name]
            scheme = replace(scheme, rank=options.rank) if scheme.rank else scheme
            done.append({"key": key, "loss": Run(recipe, scheme, seed).train(tokens)})
            sys.stderr.write(f"{key} {done[-1]['loss']:.4f}\n")
            if options.results is not None:
                with options.results.open("a") as lines:
                    lines.write(json.dumps(done[-1]) + "\n")
    report(done, names, [options.rank, options.steps, options.lr, options.microbatches])


def report(done: list[dict[str, Any]], names: list[str], rest: list[Any]) -> None:
    emit("| scheme | validation loss, mean of seeds | against the baseline of each seed | mean |")
    emit("|---|---|---|---|")
    for name in names:
        losses = {one["key"][1]: one["loss"] for one in done if one["key"][0] == name and one["key"][2:] == rest}
        bases = {
            one["key"][1]: one["loss"] for one in done if one["key"][0] == "baseline" and one["key"][3:] == rest[1:]
        }
        shares = [losses[seed] / bases[seed] - 1 for seed in sorted(losses) if seed in bases]
        if losses and shares:
            each = ", ".join(f"{share:+.2%}" for share in shares)
            emit(f"| {name} | {statistics.fmean(losses.values()):.4f} | {each} | {statistics.fmean(shares):+.2%} |")


if __name__ == "__main__":
    main()
