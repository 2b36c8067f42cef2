"""Checkpoints hold the true rows of the vocabulary, so that they load at any tensor-parallel size."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from dynmo_train.config import DefaultContext, config_of
from dynmo_train.data.batch import Batch
from dynmo_train.formats.checkpoint import open_checkpoint
from dynmo_train.models.registry import family_of
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from dynmo_train.trainer.checkpoint.engine_checkpoint import check_same_model, save, state_reader
from dynmo_train.trainer.checkpoint.metadata import CheckpointMetadata
from dynmo_train.trainer.checkpoint.unread_tensors import check_all_weights_are_read
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.settings_from_config import engine_settings, initial_partition
from tests.distributed.scenario import digest
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(300)]

# GPT-2's vocabulary. --make-vocab-size-divisible-by is left at 128, so that each size pads it to other rows.
VOCABULARY = 50257
PADDED = {1: 50304, 2: 50432, 4: 50688}
SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "seq_length": 8}


def engine_at(world: World, tensor: int) -> Engine:
    config = config_of(
        DefaultContext(world_size=world.size),
        **SIZES,
        family="gpt",
        vocab_size=VOCABULARY,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=1,
        micro_batch_size=1,
        global_batch_size=4,
        train_iters=9,
        lr=1e-2,
        weight_decay=0.1,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        data_path="none",
    )
    assert config.padded_vocab_size == PADDED[tensor]
    family = family_of(config)
    there = set_parallel_dims(world, ParallelDims(tensor=tensor, data=world.size // tensor), 60)
    return Engine(family, engine_settings(config), initial_partition(config, family, None), there)


def step(engine: Engine, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (4, SIZES["seq_length"] + 1), generator=generator)
    inputs = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return engine.train_step(Batch(inputs=inputs, first_microbatch=4 * number, step=number), sampled=False).loss


def stored(engine: Engine, folder: Path, number: int) -> Path:
    run = CheckpointMetadata(run_id="x", step=number, consumed_train_samples=0, data=None, tokenizer={}, keep=None)
    return save(engine, folder, run)


def digests(path: Path) -> dict[str, str]:
    checkpoint = open_checkpoint(path)
    return {name: digest(tensor) for name, tensor in checkpoint.load(checkpoint.names()).items()}


def every_pair(world: World, folder: str) -> dict[tuple[int, int], float]:
    """The loss that follows at one size from a checkpoint of another; what is loaded is stored again, the same."""
    losses = {}
    for before in PADDED:
        engine = engine_at(world, before)
        engine.build()
        step(engine, 1)
        path = stored(engine, Path(folder) / f"{before}", 1)
        for after in PADDED:
            engine, checkpoint = engine_at(world, after), open_checkpoint(path)
            check_same_model(checkpoint, engine.family)
            check_all_weights_are_read(checkpoint, engine.item_store, world)
            engine.restore(state_reader(checkpoint, engine.item_store, engine.world), 1)
            again = stored(engine, Path(folder) / f"{before}-{after}", 1)
            if world.is_rank0:
                assert digests(again) == digests(path), f"from {before} to {after}"
            losses[before, after] = step(engine, 2)
    return losses


def test_checkpoints_load_at_every_tensor_parallel_size(tmp_path):
    losses = run_workers(every_pair, 4, str(tmp_path))[0]
    assert set(losses) == set(itertools.product(PADDED, PADDED))
    assert list(losses.values()) == pytest.approx([losses[1, 1]] * len(losses), rel=1e-5)
    for tensor, rows in PADDED.items():
        manifest = open_checkpoint(tmp_path / f"{tensor}" / "step-00000001").manifest
        assert manifest["model"]["padded_vocab_size"] == rows
        for name in ("embedding.word.weight", "embedding.word.weight.exp_avg"):
            assert manifest["tensors"][name]["shape"] == [VOCABULARY, SIZES["hidden_size"]]
