"""Early exit on CUDA: products of active tokens on the device near those by the host, without a synchronization."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layer_list import output_of
from dynmo_train.models.layers import grouped_linear
from dynmo_train.models.techniques.early_exit import EXITED
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings
from tests.unit.dynmo_train.models.techniques.test_early_exit import EXITS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in grouped_linear.FAST_CAPABILITIES,
    reason="no CUDA device of compute capability 9 or 10 is here",
)
SHAPE = GptShape(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=2,
    max_position_embeddings=32,
    vocab_size=64,
    padded_vocab_size=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


@pytest.mark.parametrize("item", ["layers.1.attention", "layers.1.mlp"])
def test_items_on_active_tokens_are_near_those_by_the_host(item, monkeypatch):
    model = DynamicFamily(Gpt(SHAPE), DynamicSettings(exits=EXITS), seed=5, width=64, std=0.2)
    module = model.build(item, torch.device("cuda")).bfloat16()
    [spec] = [each for each in model.items if each.name == item]
    assert EXITED in spec.reads
    x = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    exited = (torch.rand(4, 32, device="cuda") < 0.5).to(x.dtype)
    more = [torch.zeros(4, 32, dtype=torch.int64, device="cuda") for _ in spec.inputs]
    if "exit" in module._modules:
        del module._modules["exit"]

    def run():
        module.zero_grad()
        x.grad = None
        output = output_of(module(x, exited.clone(), *more))
        output.square().sum().backward()
        return [output.detach(), x.grad, *(each.grad for each in module.parameters() if each.grad is not None)]

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(grouped_linear, "is_fast_device", lambda _rows: False)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))
