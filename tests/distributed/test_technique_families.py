"""The techniques on BERT, Llama and, sparse attention, T5: against dense references, cost, any placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dynmo_train.models.attention.hashed_attention import hash_directions
from dynmo_train.models.layer_list import ItemOutput, output_of
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings, SparseAttentionSettings
from tests.distributed.families import SAMPLES

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

CPU = torch.device("cpu")
FAMILIES = ("bert", "llama")
DEPTHS = DepthSettings(capacity=0.5, every=2, aux_weight=0.01)
EXITS = ExitSettings(layers=(0,), loss_weight=0.3, threshold=0.0008, measure="softmax")


def family(model: str, settings: DynamicSettings) -> DynamicFamily:
    base = SAMPLES[model].family
    base = type(base)(replace(base.shape, hidden_dropout=0.0, attention_dropout=0.0))
    return DynamicFamily(base, settings, seed=5, width=32, std=1.0)


def run(changed: DynamicFamily, inputs, *, layers=None):
    """The values after the last block (or after ``layers`` of them), and the result of each item."""
    values, outputs = {}, {}
    for item in changed.items[:-1][:layers]:
        module = changed.build(item.name, CPU)
        result = module(*(values[n] for n in item.reads), *(inputs[n] for n in item.inputs))
        values[item.writes] = output_of(result)
        if isinstance(result, ItemOutput):
            values.update(result.side)
            outputs[item.name] = result
    return values, outputs


def batch(model: str):
    return SAMPLES[model].inputs(3, torch.Generator().manual_seed(1))


def visible_of(model: str, inputs, shape) -> torch.Tensor:
    return inputs["attention_mask"].bool() if model == "bert" else torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("model", FAMILIES)
def test_routed_block_equals_the_dense_block_with_masks(model):
    changed, inputs = family(model, DynamicSettings(depths=DEPTHS)), batch(model)
    assert [item.name for item in changed.items[1:4]] == ["layers.0.attention", "layers.0.mlp", "layers.1"]
    x = run(changed, inputs, layers=3)[0]["hidden"].detach()
    block = changed.build("layers.1", CPU)
    visible = visible_of(model, inputs, x.shape[:2])
    got = block(x, visible) if model == "bert" else block(x)
    scores = torch.nn.functional.linear(x, block.attention.router.weight)[..., 0]
    through = torch.zeros(x.shape[:2], dtype=torch.bool).scatter(1, scores.topk(8, dim=1).indices, True)
    dense = block.mlp(output_of(block.attention(x, visible & through)))
    expected = torch.where(through[..., None], x + scores.sigmoid()[..., None] * (output_of(dense) - x), x)
    torch.testing.assert_close(got.output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", FAMILIES)
def test_items_after_an_exit_equal_the_dense_items_with_masks(model):
    changed, inputs = family(model, DynamicSettings(exits=EXITS)), batch(model)
    values, outputs = run(changed, inputs, layers=3)
    x, left = values["hidden"].detach(), values["exited"].bool()
    assert 0 < float(left.float().mean()) < 1
    attention, mlp = (changed.build(f"layers.1.{part}", CPU) for part in ("attention", "mlp"))
    inner = attention(x, values["exited"], *([inputs["attention_mask"]] if model == "bert" else []))
    got = mlp(inner.output, values["exited"]).output
    plain_attention, plain_mlp = (changed.base.build(f"layers.1.{part}", CPU) for part in ("attention", "mlp"))
    visible = visible_of(model, inputs, x.shape[:2])
    dense = output_of(plain_mlp(output_of(plain_attention(x, visible & ~left))))
    torch.testing.assert_close(got, torch.where(left[..., None], x, dense), rtol=1e-4, atol=1e-5)
    assert float(outputs["layers.0.mlp"].metrics["exit_loss"]) > 0


class SameBucket:
    """In the place of hashed attention: dense attention whose mask is that of the same buckets."""

    def __init__(self, hashed) -> None:
        self.hashed = hashed

    def attend(self, q, k, v, visible, *, causal, dropout, training, rules):
        B, H, T, K = q.shape
        axes = self.hashed.draw_axes(H, K, q.device, training=training)
        same = hash_directions(q, axes)[..., :, None] == hash_directions(k, axes)[..., None, :]
        same &= torch.ones(T, T, dtype=torch.bool).tril() if causal else True
        same &= torch.ones(B, T, dtype=torch.bool)[:, None, None] if visible is None else visible.bool()[:, None, None]
        assert rules.window is None
        scores = (q @ k.transpose(2, 3) * (rules.scale or K**-0.5)).masked_fill(~same, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("model", [*FAMILIES, "t5"])
def test_sparse_attention_equals_dense_attention_within_buckets(model):
    changed = family(model, DynamicSettings(sparse_attention=SparseAttentionSettings(buckets=4, block=4)))
    values = {}
    inputs, sparse = batch(model), 0
    for item in changed.items[:-1]:
        module = changed.build(item.name, CPU).eval()
        given = (*(values[n] for n in item.reads), *(inputs[n] for n in item.inputs))
        got = output_of(module(*given))
        hashed = getattr(module, "sparse", None)
        if hashed is not None:
            sparse += 1
            module.sparse = SameBucket(hashed)
            torch.testing.assert_close(got, output_of(module(*given)), rtol=1e-4, atol=1e-5)
        values[item.writes] = got.detach()
    assert sparse == sum(item.kind == "attention" for item in changed.items)


def flops(model: str, settings: DynamicSettings, tokens: int = 16) -> int:
    """Operations of all blocks forward."""
    changed, inputs = family(model, settings), batch(model)
    with FlopCounterMode(display=False) as counter:
        run(changed, inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("model", FAMILIES)
def test_technique_reduces_the_cost(model):
    plain = flops(model, DynamicSettings())
    routed = flops(model, DynamicSettings(depths=replace(DEPTHS, capacity=0.25)))
    gone = flops(model, DynamicSettings(exits=replace(EXITS, measure="saturation", threshold=0.0, loss_weight=0.0)))
    blocks = len({item.layer for item in SAMPLES[model].family.items}) - 2
    # Of the routed half of the blocks three quarters are saved; of the blocks behind an exit that all take nearly all
    assert routed < plain * (1 - 0.7 * (blocks // 2) / blocks)
    head = flops(model, DynamicSettings(exits=replace(EXITS, measure="saturation", threshold=1.0, loss_weight=0.0)))
    assert head - gone > 0.8 * plain * (blocks - 1) / blocks
