"""A step with early exits, and one with a frozen front, next to a step of the dense model: processor and wall time.

Programs take turns in one process, a step each, always on the same batch: forward, backward, norm, clipping and AdamW.

* ``dense``: GPT with tied embeddings.
* ``exits by saturation``, ``exits by softmax``, ``exits by classifier``: one exit after a third of the blocks, whose
  loss takes an eighth of the tokens and 2,048 ids. Its threshold is the quantile of the untrained model's confidence at
  which ``--share`` of the tokens exit; the classifier's weights are random for that.
* ``frozen front``: the embedding and 0.6 of the blocks are frozen, without a cache of their outputs.

    python tests/benchmarks/train_gains.py [--share 0.3] [--layers 12] [--steps 3] [--repeats 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace

import torch
from plain_engine import constant, engine_batch, gpt_of
from random_batches import random_rows

from dynmo_train.dynamics.freezing import LayerFreezing
from dynmo_train.models.families.gpt import Gpt
from dynmo_train.models.layer_list import BoundaryShape
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.models.techniques.early_exit import Exit, ExitSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.parallel.process_groups import World, init_world
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.pipeline.schedule import PipelineConfig
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.engine_settings import EngineSettings

DENSE, FROZEN = "dense", "frozen front"
EXITS = {f"exits by {measure}": measure for measure in ("saturation", "softmax", "classifier")}
FROZEN_SHARE = 0.6


class Program:
    """An engine, and its steps so far."""

    def __init__(self, name: str, options: argparse.Namespace, world: World) -> None:
        self.options, self.steps = options, 0
        self.family, techniques = _model(name, options)
        settings = EngineSettings(
            pipeline=PipelineConfig(
                schedule="1f1b",
                microbatches=1,
                boundary=BoundaryShape.hidden(batch=1, tokens=options.tokens, width=options.width),
                seed=1,
                recompute=False,
            ),
            optimizer=AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
            # Weights that do not change: neither do the confidences, so that the share of tokens stays.
            rate=constant(1e-12),
            clip=1.0,
            sparse=SparseTable(),
            techniques=techniques,
        )
        self.engine = Engine(self.family, settings, uniform_partition(self.family.items, 1), world)
        self.engine.build()
        self.exit_share = 0.0
        if name in EXITS:
            self._set_threshold()

    def _set_threshold(self) -> None:
        exits = [
            each
            for module in self.engine.item_store.modules.values()
            for each in module.modules()
            if isinstance(each, Exit)
        ]
        (exit_,) = exits
        if exit_.classifier is not None:
            torch.nn.init.normal_(exit_.classifier.weight, std=0.1)
        measured: list[torch.Tensor] = []

        def confidences(_module: torch.nn.Module, arguments: tuple) -> None:
            measured.append(exit_.confidence(*arguments[:2]))

        hook = exit_.register_forward_pre_hook(confidences)
        self.step()
        hook.remove()
        threshold = torch.cat(measured).quantile(1.0 - self.options.share).item()
        exit_.settings = replace(exit_.settings, threshold=threshold)

    def step(self) -> tuple[float, float]:
        """Milliseconds of processor time and of wall time."""
        options = self.options
        # One batch: with another one in each step the fastest would be that with the most exits.
        rows = random_rows(1, rows=1, tokens=options.tokens, vocabulary=options.vocabulary)
        batch = engine_batch(rows, self.steps + 1, 1)
        self.steps += 1
        processor, wall = time.process_time(), time.perf_counter()
        result = self.engine.train_step(batch, sampled=False)
        times = 1000 * (time.process_time() - processor), 1000 * (time.perf_counter() - wall)
        self.engine.after_step(self.steps)
        self.exit_share = result.losses.get("exit_share", 0.0)
        return times


def _model(name: str, options: argparse.Namespace) -> tuple[Gpt | DynamicFamily, dict]:
    gpt = gpt_of(
        layers=options.layers,
        width=options.width,
        heads=options.width // 64,
        tokens=options.tokens,
        vocabulary=options.vocabulary,
    )
    if name == FROZEN:
        schedule = ((1, round(FROZEN_SHARE * options.layers)),)
        # The word embedding is tied: the head trains it.
        return gpt, {"freezing": lambda context: LayerFreezing(schedule, False, context)}
    if name not in EXITS:
        return gpt, {}
    exits = ExitSettings(
        layers=(options.layers // 3 - 1,),
        loss_weight=0.3,
        # No token exits, until the threshold is set.
        threshold=1.0,
        measure=EXITS[name],  # type: ignore[arg-type]
        token_share=1 / 8,
        vocabulary_samples=2048,
    )
    return DynamicFamily(gpt, DynamicSettings(exits=exits), seed=1, width=options.width, std=0.02), {}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.3, help="tokens that exit")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=3, help="of a repetition, of which the fastest counts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    world = init_world("cpu")
    programs = {name: Program(name, options, world) for name in (DENSE, *EXITS, FROZEN)}
    for program in programs.values():
        # The second step of the frozen front is its first frozen one.
        for _ in range(2):
            program.step()
    fastest: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
        for _ in range(options.steps):
            for name, program in programs.items():
                measured[name].append(program.step())
        for name, times in measured.items():
            fastest[name].append((min(each[0] for each in times), min(each[1] for each in times)))
    for name, times in fastest.items():
        row = {
            "program": name,
            "processor_ms": [round(each[0]) for each in times],
            "wall_ms": [round(each[1]) for each in times],
            "processor_gain": [round(dense[0] / own[0], 2) for dense, own in zip(fastest[DENSE], times, strict=True)],
            "wall_gain": [round(dense[1] / own[1], 2) for dense, own in zip(fastest[DENSE], times, strict=True)],
            "exit_share": round(programs[name].exit_share, 3),
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
