"""Evaluation and generation read the biases of experts, in float32 whatever the compute dtype is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dynmo_train.evaluation.forward_engine import _ItemLoader
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layer_list import expert_biases_of, parameters_of
from dynmo_train.models.layers.sparse_formats import BUILT_IN
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, device=CPU, host="here", dims=ParallelDims())
SHAPE = GptShape(
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=16,
    num_attention_heads=2,
    max_position_embeddings=8,
    vocab_size=32,
    padded_vocab_size=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    seed=1,
    moe=MoeShape(num_experts=4, router=RouterShape(score_function="sigmoid", expert_bias=True)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_item_routes_by_the_stored_biases(dtype):
    family, item = Gpt(SHAPE), "layers.0.mlp"
    trained = family.build(item, CPU)
    trained.expert_bias.copy_(torch.tensor([0.1001, -3.0, 3.0, 0.2003]))
    stored = {name: value.detach() for name, value in parameters_of(item, trained).items()}
    stored |= expert_biases_of(item, trained)
    checkpoint = SimpleNamespace(
        has=stored.__contains__, stored_name=lambda name: name, load=lambda names: {n: stored[n] for n in names}
    )
    loaded = _ItemLoader(checkpoint, family, WORLD, dtype, BUILT_IN).load(item).eval()
    assert torch.equal(loaded.expert_bias, trained.expert_bias)
    assert loaded.expert_bias.dtype == torch.float32
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = loaded(x).metrics["expert_tokens"].tolist()
    assert tokens[2] == 10
    assert tokens[1] == 0
