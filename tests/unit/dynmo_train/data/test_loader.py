"""Batches that are built ahead of time are those that are built on request."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from dynmo_train.config import DefaultContext, config_of
from dynmo_train.data.batch import Batch
from dynmo_train.data.batches import RunData, open_run_data
from dynmo_train.data.gpt_dataset import GptDataset, TokenError
from dynmo_train.data.loader import BatchLoader
from tests.distributed.sentences import write_sentences
from tests.tables import table
from tests.unit.dynmo_train.data.test_batches import write_numbers

COMMON = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 10,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 6,
    "lr": 1e-3,
    "split": "100,0,0",
    "eval_iters": 0,
    "pipeline_model_parallel_size": 1,
}


@pytest.fixture(scope="module", params=["gpt", "gpt, rising batch and length", "bert", "t5"])
def runs(request, tmp_path_factory) -> tuple[RunData, RunData]:
    """The data of a run with one replica and with two."""
    folder = tmp_path_factory.mktemp("loader")
    options = COMMON | {"family": request.param.split(",")[0]}
    if "gpt" in request.param:
        options |= {"data_path": str(write_numbers(folder / "data", 100)), "vocab_size": 100}
    else:
        sentences, vocabulary = write_sentences(folder)
        options |= {"data_path": str(sentences), "vocab_file": str(vocabulary), "seq_length": 32}
        options |= {"tokenizer_type": "BertWordPieceLowerCase", "vocab_size": 95}
        if request.param == "t5":
            options |= {"decoder_seq_length": 16, "vocab_extra_ids": 10, "vocab_size": 105}
    if "rising" in request.param:
        del options["train_iters"]
        options |= {"rampup_batch_size": "4 4 12", "train_samples": 36, "curriculum_shortest": 4, "curriculum_steps": 4}
        options |= {"curriculum_multiple": 2}
    return tuple(open_run_data(config_of(DefaultContext(world_size=world), **options)) for world in (1, 2))


@pytest.fixture
def run(runs) -> RunData:
    return runs[1]


def positions(data: RunData, steps: int) -> list[tuple[int, int]]:
    consumed, found = 0, []
    for step in range(1, steps + 1):
        found.append((consumed, step))
        consumed += data.config.batch_sizes.at(consumed)
    return found


def loader(data: RunData, num_workers: int, replica: int = 0) -> BatchLoader:
    return BatchLoader(
        lambda consumed, step: data.train_shard(consumed, step, replica),
        data.config.batch_sizes.at,
        data.config.training.train_iters,
        num_workers=num_workers,
        pin_memory=False,
    )


def same(first, second) -> bool:
    if first.inputs.keys() != second.inputs.keys():
        return False
    tensors = all(first.inputs[name].equal(second.inputs[name]) for name in first.inputs)
    names = ("first_microbatch", "step", "microbatches", "tokens", "replica")
    return tensors and all(getattr(first, name) == getattr(second, name) for name in names)


@pytest.mark.parametrize("replica", [0, 1])
def test_shard_is_the_part_of_the_whole_batch(runs, replica):
    alone, two = runs
    for consumed, step in positions(two, 5):
        whole = replace(alone.train_shard(consumed, step, 0), replica=None)
        part = whole.of_replica(replica, 2, whole.microbatches // 2)
        assert same(two.train_shard(consumed, step, replica), replace(part, microbatches=whole.microbatches // 2))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on fewer than three cores
@table("num_workers", [0, 1, 3])
def test_loader_gives_the_shards_in_any_order(run, num_workers):
    batches = loader(run, num_workers, replica=1)
    order = positions(run, 5)
    for consumed, step in [*order, *order[1:3]]:  # the run went back
        assert same(batches.batch(consumed, step), run.train_shard(consumed, step, 1))
    batches.close()


def test_loader_reads_ahead_in_another_process(run):
    here: list[int] = []

    def shard(consumed: int, step: int):
        here.append(step)
        return replace(run.train_shard(consumed, step, 0), problem=str(os.getpid()))

    batches = BatchLoader(shard, run.config.batch_sizes.at, 3, num_workers=1, pin_memory=False)
    built_by = batches.batch(0, 1).problem
    batches.close()
    assert built_by != str(os.getpid())
    assert here == []


def test_invalid_token_is_a_problem_of_its_replica(tmp_path):
    prefix = str(write_numbers(tmp_path / "data", 100))
    options = COMMON | {"data_path": prefix, "vocab_size": 99, "train_iters": 13}
    alone, two = (open_run_data(config_of(DefaultContext(world_size=world), **options)) for world in (1, 2))
    message = "the token id 99"
    with pytest.raises(TokenError, match=message):
        _ = [alone.train_shard(*at, 0) for at in positions(alone, 13)]
    problems = [two.train_shard(*at, replica).problem for at in positions(two, 13) for replica in (0, 1)]
    assert any(problem and message in problem for problem in problems)
    assert None in problems


@pytest.mark.parametrize("case", ["plain", "blend", "eod_mask_loss", "reset_position_ids"])
def test_context_shard_has_its_tokens_of_the_whole(tmp_path, case):
    options = COMMON | {"seq_length": 16, "vocab_size": 100, "mock_data": True, "micro_batch_size": 4}
    if case == "blend":
        first, second = (write_numbers(tmp_path / name, 100) for name in ("a", "b"))
        options |= {"mock_data": False, "data_path": f"0.3 {first} 0.7 {second}"}
    elif case != "plain":
        options |= {case: True}
    alone = open_run_data(config_of(DefaultContext(world_size=1), **options))
    parts = open_run_data(config_of(DefaultContext(world_size=4), **options, context_parallel_size=4))
    for consumed, step in positions(alone, 3):
        whole = alone.train_shard(consumed, step, 0)
        for rank in range(4):
            part = parts.train_shard(consumed, step, 0, rank)
            assert same(part, whole.of_context(rank, 4, whole.microbatches))
            assert part.context == rank
            chunk = [*range(2 * rank, 2 * rank + 2), *range(14 - 2 * rank, 16 - 2 * rank)]
            for name in {"ids", "labels", "document_starts"} & part.inputs.keys():
                assert part.inputs[name].equal(whole.inputs[name][:, chunk])


def test_context_ranks_weights_are_those_of_their_microbatch():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    whole = Batch(inputs={"loss_mask": mask}, first_microbatch=0, step=1)
    first, second = (whole.of_context(rank, 2, 2).inputs["loss_mask"] for rank in (0, 1))
    assert first.flatten().tolist() == pytest.approx([2 / 3, 0, 2 / 3, 0, 0, 0, 0, 0])
    assert second.flatten().tolist() == pytest.approx([2 / 3, 0, 0, 0, 0, 0, 0, 0])


def test_context_rank_reads_no_other_tokens(tmp_path, monkeypatch):
    options = COMMON | {"seq_length": 16, "vocab_size": 100, "data_path": str(write_numbers(tmp_path / "data", 100))}
    data = open_run_data(config_of(DefaultContext(world_size=2), **options, context_parallel_size=2))
    read, own = [], GptDataset.batch_columns
    monkeypatch.setattr(
        GptDataset, "batch_columns", lambda *arguments: read.append(arguments[2].tolist()) or own(*arguments)
    )
    data.train_shard(0, 1, 0, 1)
    assert read == [[*range(4, 9), *range(8, 13)]]


def test_invalid_token_is_a_problem_of_its_context_rank(tmp_path):
    options = COMMON | {"seq_length": 16, "data_path": str(write_numbers(tmp_path / "data", 100)), "vocab_size": 99}
    data = open_run_data(config_of(DefaultContext(world_size=2), **options, context_parallel_size=2))
    problems = [data.train_shard(*at, 0, rank).problem for at in positions(data, 6) for rank in (0, 1)]
    assert any(problem and "the token id 99" in problem for problem in problems)
    assert None in problems
