"""The two ICT towers: a loss over the batch of all replicas, and initialization from a BERT."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.sharding import join_replicas
from dynmo_train.parallel.collectives import replica_gather
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import set_parallel_dims
from tests.distributed.families import SAMPLES
from tests.distributed.test_family_runs import train, write_sentences
from tests.distributed.whole_runs import tensors
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
ROWS = 6


def head_on_rows(world):
    """Run the head on this replica's rows: loss, metrics, and gradients of inputs and (summed) weights."""
    world = set_parallel_dims(world, ParallelDims(data=world.size), 60)
    family = SAMPLES["ict"].family
    head = join_replicas(family.build("head", torch.device("cpu")), replica_gather(world))
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(ROWS, *shape, generator=generator) for shape in ((16, 32), (8,))]
    own = [each.chunk(world.size)[world.data_rank].clone().requires_grad_() for each in inputs]
    result = head(*own)
    (result.output / world.size).backward()  # the mean over the replicas
    for parameter in head.parameters():
        torch.distributed.all_reduce(parameter.grad)
    return {
        "loss": result.output.item(),
        "metrics": {name: value.item() for name, value in result.metrics.items()},
        "inputs": [each.grad.tolist() for each in own],
        "weights": [parameter.grad.tolist() for parameter in head.parameters()],
    }


def test_retrieval_loss_spans_the_batch_of_all_replicas():
    whole = run_workers(head_on_rows, 1)[0]
    first, second = run_workers(head_on_rows, 2)
    assert first["loss"] == second["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert first["metrics"] == second["metrics"] == whole["metrics"]
    for place in range(2):
        parts = torch.tensor(first["inputs"][place] + second["inputs"][place])
        torch.testing.assert_close(parts, torch.tensor(whole["inputs"][place]))
    for got, expected in zip(first["weights"], whole["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))


def test_both_towers_start_from_a_bert_checkpoint(tmp_path):
    sentences, vocabulary = write_sentences(tmp_path)
    data = {"causal": sentences, "sentences": sentences, "vocabulary": vocabulary}
    short = {"train_iters": "1", "eval_iters": "0"}
    train(data, "bert", tmp_path / "bert", 1, **short, num_layers="1")
    still = {"lr": "1e-30", "weight_decay": "0", "num_layers": "1", "bert_load": str(tmp_path / "bert")}
    train(data, "ict", tmp_path / "ict", 2, **short, **still)
    bert, ict = tensors(tmp_path / "bert", 1), tensors(tmp_path / "ict", 1)
    for tower, end in (("query", "query.pooler"), ("context", "head")):
        for name in ("embedding.word.weight", "embedding.tokentype.weight", "layers.0.mlp.fc2.bias"):
            assert ict[f"{tower}.{name}"] == bert[name]
        assert ict[f"{end}.norm.weight"] == bert["head.norm.weight"]
    assert ict["query.pooler.projection.weight"] == ict["head.projection.weight"]
    for wrong, message in (
        ({"num_layers": "2"}, "num_layers is 1 there and 2 here"),
        ({"bert_load": "/nowhere"}, "no BERT checkpoint"),
    ):
        with pytest.raises(AssertionError, match=message) as error:
            train(data, "ict", tmp_path / "other", 1, **short, **still | wrong)
        assert "Traceback" not in str(error.value)
