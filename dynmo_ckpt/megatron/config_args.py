"""Megatron's arguments of a model that a ``config.json`` describes, for files that record none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..formats.choices import ReadOptions
from ..huggingface.files import read_config
from ..huggingface.models import hf_model
from ..io.errors import errors_of
from .write_core import described_args


def config_args(options: ReadOptions, iteration: Path) -> dict[str, Any]:
    """The arguments of the model of ``--config``, or of a ``config.json`` in the iteration; empty without one.

    Files of Megatron-Bridge and of 2019 record none.

    Raises:
        CorruptError: it is not a configuration.
        UnsupportedError: its model is not implemented.
    """
    places = [options.config] if options.config is not None else [iteration, iteration / "tokenizer"]
    place = next((each for each in places if each == options.config or (each / "config.json").is_file()), None)
    if place is None:
        return {}
    config = read_config(place)
    with errors_of(place / "config.json"):
        return described_args(hf_model(config, options.make_vocab_size_divisible_by, options.ignore_config))
