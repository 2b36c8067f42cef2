"""What torch dispatches per layer in a training step has a ceiling for each family, so that a slow-down is noticed.

Counts depend on neither the machine nor its load. Those of Llama and GPT are below torchtitan's 178 and nanoGPT's 100
(``tests/benchmarks/train_counts.md``). A change that dispatches fewer lowers its ceiling here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.trainer.engine import Engine
from tests.distributed.scenario import MICRO_BATCH, Scenario, batch_of

# Operations of a layer in a step of one microbatch, its part of norm, clipping and update included; and all of a step
# of two layers.
CEILINGS = {
    ("gpt", 0.0): (96, 394),
    ("gpt", 0.1): (192, 610),
    ("llama", 0.0): (153, 514),
    ("mixtral-dropless", 0.0): (452, 1112),
    ("mixtral-padded", 0.0): (449, 1106),
    ("bert", 0.0): (101, 519),
    ("t5-relative", 0.0): (414, 1073),
    ("ict", 0.0): (202, 633),
}


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(world, model, layers, dropout=0.0):
    """Dispatched in the second step of a model with this number of blocks; of a T5 in each stack."""
    scenario = Scenario(model=model, prune=False, freeze=(), schedule="gpipe")
    plain, settings = scenario.family(), scenario.settings()
    names = ("num_encoder_layers", "num_decoder_layers") if model.startswith("t5") else ("num_layers",)
    changes = dict.fromkeys(names, layers) | dict.fromkeys(("hidden_dropout", "attention_dropout"), dropout)
    family = type(plain)(replace(plain.shape, **changes))
    pipeline = replace(settings.pipeline, microbatches=1)
    engine = Engine(family, replace(settings, pipeline=pipeline), uniform_partition(family.items, 1), world)
    engine.build()
    batches = []
    for step in (1, 2):
        batch = batch_of(step, model)
        batches.append(replace(batch, inputs={name: each[:MICRO_BATCH] for name, each in batch.inputs.items()}))
    engine.train_step(batches[0], sampled=False)
    with Operations() as counted:
        engine.train_step(batches[1], sampled=False)
    return counted.names


@pytest.mark.parametrize(("model", "dropout"), CEILINGS)
def test_layer_and_step_dispatch_no_more_operations(world, model, dropout):
    small, large = (operations(world, model, layers, dropout) for layers in (2, 4))
    layer = (large.total() - small.total()) / 2
    at_most_layer, at_most_step = CEILINGS[model, dropout]
    assert layer <= at_most_layer
    assert small.total() <= at_most_step
