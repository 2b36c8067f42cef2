"""CUDA graphs of items: what can be captured, how many slots there are, and whose memory gradients have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynmo_train._common.errors import UsageError
from dynmo_train.models.attention.self_attention import SelfAttention
from dynmo_train.models.layers.feed_forward import Mlp
from dynmo_train.parallel.random_stream import ItemStream, StreamKeys, drawing_from
from dynmo_train.pipeline import graphed_items
from dynmo_train.pipeline.graphed_items import (
    GraphedItem,
    GraphedStage,
    capture_obstacle,
    check_graph_device,
    most_in_flight,
)
from tests.distributed.test_graphed_items import on_static_memory

CPU = torch.device("cpu")


def mlp(**changes) -> Mlp:
    options = {"width": 8, "inner": 16, "activation": "gelu", "norm": nn.LayerNorm(8), "device": CPU, "dropout": 0.2}
    made = Mlp(**options | changes)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.train()


def attention(**changes) -> SelfAttention:
    options = {"width": 8, "heads": 2, "norm": nn.LayerNorm(8), "device": CPU, "dropout": 0.2}
    return SelfAttention(**options | changes)


def with_hook() -> Mlp:
    made = mlp()
    made.fc1.register_forward_hook(lambda *_: None)
    return made


def pruned() -> Mlp:
    made = mlp()
    made.fc1.mask = torch.ones_like(made.fc1.weight, dtype=torch.bool)
    return made


def cut() -> Mlp:
    made = mlp()
    made.fc2.leave = lambda x: x
    return made


def hashed() -> SelfAttention:
    made = attention()
    made.sparse = object()
    return made


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (mlp(), None),
        (attention(), None),
        (attention(attention_dropout=0.1), "attention dropout"),
        (hashed(), "hashed attention"),
        (with_hook(), "hooks"),
        (pruned(), "pruned"),
        (cut(), "collectives"),
        (nn.Linear(2, 2), "only attention and MLP"),
    ],
)
def test_capture_obstacle_names_the_reason(module, words):
    found = capture_obstacle(module, is_frozen=False)
    assert found is None if words is None else words in found


def test_cuda_graphs_need_a_gpu():
    check_graph_device("cuda")
    with pytest.raises(UsageError, match="--cuda-graph requires a GPU, and this process runs on cpu; leave it out"):
        check_graph_device("cpu")


def test_frozen_items_are_not_captured():
    assert "frozen" in capture_obstacle(mlp(), is_frozen=True)


@pytest.mark.parametrize(
    ("order", "most"),
    [("F F B F B B", 2), ("F F F B B B", 3), ("F I F W I W", 2), ("F SEND_F B", 1)],
)
def test_most_in_flight_counts_from_forward_to_last_backward(order, most):
    operations = [(3, kind, 0) for kind in order.split()] + [(4, "F", 0)] * 9
    assert most_in_flight(operations, 3) == most


@pytest.fixture
def stage(monkeypatch) -> tuple[GraphedStage, Mlp, StreamKeys]:
    monkeypatch.setattr(graphed_items, "make_graphed_callables", on_static_memory)
    module = mlp()
    item = GraphedItem(
        module=module,
        parameters=lambda: dict(module.named_parameters()),
        samples=(torch.empty(2, 3, 8),),
        stage_inputs=(0,),
    )
    keys = StreamKeys(1, ["layers.0.mlp"], CPU)
    keys.begin_step(1, range(8))
    return GraphedStage({"layers.0.mlp": item}, 2, CPU), module, keys


def run(stage: GraphedStage, keys: StreamKeys, microbatch: int) -> torch.Tensor:
    """Forward and backward of a microbatch; the gradient of its input, as of a value that a view reads."""
    x = torch.full((2, 3, 8), float(microbatch + 1)).requires_grad_()
    stage.run("layers.0.mlp", microbatch, keys.key(microbatch, 0), x.view_as(x)).square().sum().backward()
    stage.release(microbatch)
    return x.grad


def test_gradients_outlive_the_next_microbatch_of_their_slot(stage):
    graphs, module, keys = stage
    first = run(graphs, keys, 0)
    input_bits, weight_bits = first.clone(), module.fc1.weight.grad.clone()
    second = run(graphs, keys, 1)
    assert torch.equal(first, input_bits)
    assert not torch.equal(second, input_bits)
    assert not torch.equal(module.fc1.weight.grad, 2 * weight_bits)


def test_microbatches_beyond_the_slots_are_an_error(stage):
    graphs, _, keys = stage
    x = torch.ones(2, 3, 8, requires_grad=True)
    for microbatch in (4, 5):
        graphs.run("layers.0.mlp", microbatch, keys.key(microbatch, 0), x)
    with pytest.raises(RuntimeError, match="microbatch 6: 2 microbatches are in flight already"):
        graphs.run("layers.0.mlp", 6, keys.key(6, 0), x)
    graphs.release(4)
    graphs.run("layers.0.mlp", 6, keys.key(6, 0), x)


def test_activation_bytes_are_those_of_the_profiler(stage):
    graphs, module, keys = stage
    x = torch.ones(2, 3, 8, requires_grad=True)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        drawing_from(ItemStream(keys.key(0, 0))),
    ):
        output = module(x)
    expected = sum(size for pointer, size in saved.items() if pointer not in parameters)
    assert output.requires_grad
    assert graphs.activation_bytes == {"layers.0.mlp": expected}
