"""The configuration and the samples of a run, from options of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dynmo_train.config import Config, DefaultContext, config_of
from dynmo_train.data.batch import Batch

EPOCH = 2
"""Steps after which samples come again, for the cache of frozen outputs."""


def resolved(options: Mapping[str, Any], world_size: int = 1) -> Config:
    return config_of(DefaultContext(world_size=world_size), **options)


def batch(config: Config, step: int) -> Batch:
    """The samples of a step."""
    samples, tokens = config.training.global_batch_size, config.model.seq_length
    generator = torch.Generator().manual_seed(1 + step % EPOCH)
    ids = torch.randint(0, config.model.vocab_size, (samples, tokens + 1), generator=generator)
    inputs = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    first = (step - 1) * samples // config.training.micro_batch_size
    return Batch(inputs=inputs, first_microbatch=first, step=step)
