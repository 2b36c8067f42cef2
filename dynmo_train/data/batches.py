"""Training and validation batches of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..config import Config
from ..formats.indexed import IndexedDataset, open_indexed
from ..pipeline.schedule import Batch
from .gpt import GptDataset, build_gpt_dataset


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Training and validation batches as pure functions of the consumed samples."""

    train: GptDataset
    valid: GptDataset | None
    global_batch: int
    micro_batch: int

    def batch(self, part: GptDataset, consumed: int, step: int) -> Batch:
        """The batch after ``consumed`` samples."""
        tokens = torch.from_numpy(part.batch(range(consumed, consumed + self.global_batch)))
        return Batch(
            inputs={"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()},
            first_microbatch=consumed // self.micro_batch,
            step=step,
        )


def open_samples(config: Config) -> Samples:
    """Open the data set of a run; raises ``UsageError`` where it is not one, or holds too few samples."""
    source: IndexedDataset = open_indexed(config.data.data_path)
    training = config.training

    def part(name: Any, batches: int) -> GptDataset:
        return build_gpt_dataset(
            source,
            part=name,
            shares=config.data.split_shares,
            seq_length=config.model.seq_length,
            seed=training.seed,
            num_samples=batches * training.global_batch_size,
            batch_size=training.global_batch_size,
            vocab_size=config.model.vocab_size,
        )

    return Samples(
        train=part("train", training.train_iters),
        valid=part("valid", training.eval_iters) if training.eval_iters else None,
        global_batch=training.global_batch_size,
        micro_batch=training.micro_batch_size,
    )
