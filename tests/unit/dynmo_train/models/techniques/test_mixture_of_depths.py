"""A routed block against the same block computed densely, with masks in place of gathers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.kv_cache import Decoder, DecodingCache
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings

CPU = torch.device("cpu")
SHAPE = GptShape(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=2,
    max_position_embeddings=24,
    vocab_size=50,
    padded_vocab_size=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.3,
)
DEPTHS = DepthSettings(capacity=0.375, every=2, aux_weight=0.01)


def family(capacity: float = 0.375, shape: GptShape = SHAPE) -> DynamicFamily:
    settings = DynamicSettings(depths=replace(DEPTHS, capacity=capacity))
    return DynamicFamily(Gpt(shape), settings, seed=5, width=shape.hidden_size, std=1.0)


def block(**options):
    return family(**options).build("layers.1", CPU)


def dense(module, x, keep):
    """The block on all tokens, keys that are not kept hidden, the update of tokens that are not kept thrown away."""
    attention = module.attention
    q, k, v = attention.project(x)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    T = x.shape[1]
    visible = torch.ones(T, T, dtype=torch.bool).tril() & keep[:, None, None, :]
    visible = visible | torch.eye(T, dtype=torch.bool)
    y = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
    y = module.mlp(x + attention.dense(y.transpose(1, 2).flatten(2)))
    weight = F.linear(x, attention.router.weight).sigmoid()
    return torch.where(keep[..., None], x + weight * (y - x), x)


@pytest.mark.parametrize("masked", [True, False])
def test_routed_block_padded_to_whole_tiles_changes_nothing(masked):
    module = block().train()
    x = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(1))
    key_mask = torch.ones(3, 20, dtype=torch.bool) if masked else None
    found = []
    for devices in ((), ("cpu",)):
        module.padded_devices = devices
        module.zero_grad()
        x_BTD = x.clone().requires_grad_()
        rows = []
        hook = module.mlp.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(given[0].shape[1]))
        result = module(x_BTD, key_mask)
        hook.remove()
        result.output.sin().sum().backward()
        values = [result.output, x_BTD.grad, result.losses["router"], *result.metrics.values()]
        found.append((rows, [*values, *(p.grad.clone() for p in module.parameters())]))
    (plain_rows, plain), (padded_rows, padded) = found
    assert (plain_rows, padded_rows) == ([8], [20])
    torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_routed_block_equals_dense_block_with_masks(training):
    module = block().train(training)
    x = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    scores = F.linear(plain, module.attention.router.weight)[..., 0].detach()
    keep = scores > 0
    if training:
        keep = torch.zeros_like(keep).scatter(1, scores.topk(6, dim=1).indices, True)
    grad = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(2))
    result = module(x)
    result.output.backward(grad)
    got = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    expected = dense(module, plain, keep)
    expected.backward(grad)
    torch.testing.assert_close(result.output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert float(result.metrics["depth_share"]) == pytest.approx(float(keep.float().mean()))
    assert set(result.losses) == ({"router"} if training else set())


def test_routed_block_skipped_tokens_cost_nothing():
    x = torch.randn(2, 16, 16)
    counted = {}
    for capacity in (1.0, 0.25):
        module = block(capacity=capacity)
        with FlopCounterMode(display=False) as counter:
            module(x)
        router = 2 * 2 * 2 * 16 * 16  # twice: for the block, and for the router's own loss
        counted[capacity] = counter.get_total_flops() - router
    # Matrices cost a quarter, attention scores a sixteenth.
    assert counted[0.25] <= counted[1.0] / 4


def test_router_learns_to_predict_the_selection():
    """The loss pulls the scores of the chosen tokens above 0 and the others below."""
    module = block()
    x = torch.randn(8, 16, 16, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.Adam([module.attention.router.weight], lr=0.05)
    with torch.no_grad():
        module.attention.router.weight.mul_(0.01)
    first = last = 0.0
    for _ in range(60):
        loss = module(x).losses["router"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss.detach())
        first = first or last
    assert last < first


def test_routed_block_is_causal_in_evaluation_only():
    module = block()
    x = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(4))
    other = x.clone()
    other[:, 8:] = 10 * module.attention.router.weight.detach()  # all of the highest scores
    module.eval()
    torch.testing.assert_close(module(x).output[:, :8], module(other).output[:, :8])
    module.train()
    assert not torch.allclose(module(x).output[:, :8], module(other).output[:, :8])


def test_routed_block_decoding_equals_whole_sequence():
    model = family()
    modules = {item.name: model.build(item.name, CPU).eval() for item in model.items}
    decoder = Decoder(model, modules, 24)
    ids = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(6))
    cache = DecodingCache()
    logits = [decoder.read(ids[:, :7], cache)]
    logits += [decoder.read(ids[:, at : at + 1], cache) for at in range(7, 20)]
    with torch.inference_mode():
        x = ids
        for item in model.items[:-1]:
            result = modules[item.name](x)
            x = getattr(result, "output", result)
        whole = modules["head"].logits(x)
    torch.testing.assert_close(torch.stack(logits, 1), whole[:, 6:], rtol=1e-4, atol=1e-4)


def test_layer_list_routed_block_is_one_item():
    names = [item.name for item in family().items]
    assert names == ["embedding", "layers.0.attention", "layers.0.mlp", "layers.1", "head"]
    parameters = {f"layers.1.{name}" for name, _ in block().named_parameters()}
    assert "layers.1.attention.router.weight" in parameters
    assert "layers.1.mlp.fc1.weight" in parameters
