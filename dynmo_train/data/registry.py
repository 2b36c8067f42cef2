"""The sample format of each model family: one line here, one file with a ``SampleFormat``.

A family of an outside package uses the format of the built-in family that its ``FamilySpec.like`` names.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..config import Config
from . import bert_dataset, chat_dataset, gpt_dataset, ict_dataset, t5_dataset
from .sample_format import SampleFormat

FORMATS: Mapping[str, SampleFormat] = {
    "gpt": gpt_dataset.FORMAT,
    "llama": gpt_dataset.FORMAT,
    "bert": bert_dataset.FORMAT,
    "ict": ict_dataset.FORMAT,
    "t5": t5_dataset.FORMAT,
}


def sample_format(config: Config) -> SampleFormat:
    """The sample format of a run's model family, or of conversations with ``--sft``."""
    if config.data.sft:
        return chat_dataset.FORMAT
    return FORMATS[config.model.base_family]


def zero_microbatch(config: Config) -> dict[str, torch.Tensor]:
    """A microbatch of zeros ``[micro_batch_size, ...]``, with the names, shapes and dtypes of the run's inputs."""
    sample = sample_format(config)
    shape = config.training.micro_batch_size, sample.num_columns(config)
    return sample.to_tensors(config, np.zeros(shape, dtype=np.int64))
