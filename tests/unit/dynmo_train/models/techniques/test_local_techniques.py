"""Windows, soft caps, sinks and latents with depths, exits and sparse attention, against all scores and one mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.dynamics.pruning_units import PruningRule, units_of
from dynmo_train.models.attention.hashed_attention import hash_directions
from dynmo_train.models.attention.latent_attention import LatentShape
from dynmo_train.models.experts.moe import counting_layers
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.kv_cache import Decoder, DecodingCache
from dynmo_train.models.layer_list import output_of
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.models.techniques.early_exit import EXITED, ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings, SparseAttentionSettings
from tests.tables import table

CPU = torch.device("cpu")
TOKENS = 24
PLAIN = LlamaShape(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    vocab_size=20,
    padded_vocab_size=32,
    init_method_std=0.3,
    attention_scale=0.6,
)
LOCAL, FULL = "sliding_attention", "full_attention"
WINDOW = {"sliding_window": 5}
ALTERNATING = {**WINDOW, "layer_types": (LOCAL, FULL, FULL, LOCAL), "local_rotary_base": 50.0}
LATENT = LatentShape(q_lora_rank=12, kv_lora_rank=16, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=14)
SHAPES = {
    "scale": PLAIN,
    "window": replace(PLAIN, **WINDOW),
    "window and soft cap": replace(PLAIN, **WINDOW, attn_logit_softcapping=0.7, norm_placement="sandwich"),
    "alternating, soft cap": replace(PLAIN, **ALTERNATING, attn_logit_softcapping=0.7),
    "window and sinks": replace(PLAIN, **WINDOW, attention_sinks=True, attention_bias="all"),
    "sinks": replace(PLAIN, attention_sinks=True),
    "latent": replace(PLAIN, latent=LATENT, num_key_value_heads=None, head_dim=None, attention_scale=None),
    "latent and window": replace(
        PLAIN, **WINDOW, latent=LATENT, num_key_value_heads=None, head_dim=None, attention_scale=None
    ),
}
DEPTHS = DepthSettings(capacity=0.5, every=2, aux_weight=0.01)
EXITS = ExitSettings(layers=(0, 1), loss_weight=0.3, threshold=0.3, measure="softmax")
SPARSE = SparseAttentionSettings(buckets=4, block=16)


def made(shape: LlamaShape, **settings):
    family = DynamicFamily(Llama(shape), DynamicSettings(**settings), seed=5, width=32, std=1.0)
    modules = {item.name: family.build(item.name, CPU) for item in family.items}
    for number, module in enumerate(modules.values()):
        for name, parameter in module.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return family, modules


def tokens(samples: int = 3) -> torch.Tensor:
    return torch.randint(0, 20, (samples, TOKENS), generator=torch.Generator().manual_seed(1))


def run(family, modules, ids):
    """The stream after the last block, and the values of each item."""
    values, each = {}, {}
    inputs = {"ids": ids, "labels": ids.roll(-1, 1)}
    for item in family.items[:-1]:
        result = modules[item.name](*(values[n] for n in item.reads), *(inputs[n] for n in item.inputs))
        each[item.name] = values.get("hidden")
        values[item.writes] = output_of(result)
        values.update(getattr(result, "side", {}))
    return values["hidden"], each


def attend(attention, x, keys, is_near=None):
    """The sublayer of all tokens; ``keys`` ``[B, T]`` are visible, and ``is_near`` ``[B, H, T, T]`` allows pairs."""
    q, k, v = attention.project(x)
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    places = torch.arange(x.shape[1])
    distance = places[:, None] - places
    mask = (distance >= 0) & (distance < (attention.window or x.shape[1])) & keys[:, None, None, :]
    mask = mask.expand(len(x), q.shape[1], -1, -1) if is_near is None else mask & is_near
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if attention.scale is None else attention.scale)
    if attention.softcap is not None:
        scores = attention.softcap * (scores / attention.softcap).tanh()
    # A column of large negative scores stands for the sinks where there are none.
    sinks = torch.full((q.shape[1],), -1e9) if attention.sinks is None else attention.sinks
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores.masked_fill(~mask, -1e30), column], dim=-1).softmax(-1)[..., :-1]
    return x + attention.output((weights * mask @ v).transpose(1, 2).flatten(2))


def same_bucket(attention, x):
    """Whether query and key have the same bucket of evaluation, ``[B, H, T, T]``."""
    q, k, _ = attention.project(x)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    axes = attention.sparse.draw_axes(q.shape[1], q.shape[3], CPU, training=False)
    return hash_directions(q, axes)[..., :, None] == hash_directions(k, axes)[..., None, :]


def assert_same(modules, ours, theirs):
    """Equal streams, and equal gradients of all parameters for a random gradient of the stream."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    found = []
    for total in (ours, theirs):
        for module in modules.values():
            module.zero_grad()
        (total * grad).sum().backward()
        found.append(
            {
                f"{name}.{n}": p.grad
                for name, m in modules.items()
                for n, p in m.named_parameters()
                if p.grad is not None
            }
        )
    mine, other = found
    for name, gradient in other.items():
        # The sums have float32's errors of their largest terms.
        largest = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(mine[name] / largest, gradient / largest, rtol=1e-3, atol=5e-4, msg=name)
    assert set(other) <= set(mine)


@pytest.mark.parametrize("shape", SHAPES)
def test_routed_block_attends_within_windows_of_the_sample(shape):
    family, modules = made(SHAPES[shape], depths=DEPTHS)
    ids = tokens()
    ours, before = run(family, modules, ids)
    x = modules["embedding"](ids)
    for layer in range(4):
        if layer % 2 == 0:
            x = output_of(modules[f"layers.{layer}.attention"](x))
            x = output_of(modules[f"layers.{layer}.mlp"](x))
            continue
        block = modules[f"layers.{layer}"]
        torch.testing.assert_close(before[f"layers.{layer}"], x, rtol=1e-4, atol=1e-4)
        scores = torch.nn.functional.linear(x, block.attention.router.weight)[..., 0]
        through = torch.zeros(ids.shape, dtype=torch.bool).scatter(1, scores.topk(12, dim=1).indices, True)
        dense = block.mlp(attend(block.attention, x, through))
        x = torch.where(through[..., None], x + scores.sigmoid()[..., None] * (dense - x), x)
    assert_same(modules, ours, x)


@table("propagate", [False, True], ids=["active keys", "all keys"])
@table("shape", SHAPES)
def test_items_behind_exits_attend_within_windows_of_the_sample(shape, propagate):
    family, modules = made(SHAPES[shape], exits=replace(EXITS, propagate=propagate))
    ids = tokens()
    ours, _ = run(family, modules, ids)
    x, left, shares = modules["embedding"](ids), torch.zeros(ids.shape, dtype=torch.bool), []
    for layer in range(4):
        attention, mlp = modules[f"layers.{layer}.attention"], modules[f"layers.{layer}.mlp"]
        inner = attend(attention, x, torch.ones_like(left) if propagate else ~left)
        y = mlp.transform(mlp.norm(inner))
        y = inner + (y if mlp.post_norm is None else mlp.post_norm(y))
        x = torch.where(left[..., None], x, y)
        if layer in EXITS.layers:
            top = modules["head"].logits(x).softmax(-1).topk(2, dim=-1).values
            left = left | (top[..., 0] - top[..., 1] >= EXITS.threshold)
            shares.append(float(left.float().mean()))
    assert 0 < shares[0] < shares[1] < 1
    assert_same(modules, ours, x)


@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_attention_attends_within_bucket_and_window(shape):
    family, modules = made(SHAPES[shape], sparse_attention=SPARSE)
    for module in modules.values():
        module.eval()
    ids = tokens()
    ours, _ = run(family, modules, ids)
    x, everything = modules["embedding"](ids), torch.ones(ids.shape, dtype=torch.bool)
    for layer in range(4):
        attention = modules[f"layers.{layer}.attention"]
        x = modules[f"layers.{layer}.mlp"](attend(attention, x, everything, same_bucket(attention, x)))
    assert_same(modules, ours, x)


@pytest.mark.parametrize("shape", ["window", "window and sinks", "alternating, soft cap", "latent and window"])
def test_sparse_attention_of_selected_tokens_has_their_windows(shape):
    """Padding of selected tokens, whose places are any, is the reason for evaluation: numbers differ by sample."""
    family, modules = made(SHAPES[shape], sparse_attention=SPARSE, exits=EXITS, depths=DEPTHS)
    for module in modules.values():
        module.eval()
    ids = tokens()
    ours, _ = run(family, modules, ids)
    x, left, selected = modules["embedding"](ids), torch.zeros(ids.shape, dtype=torch.bool), []
    for layer in range(4):
        block = modules.get(f"layers.{layer}")
        attention = modules[f"layers.{layer}.attention"] if block is None else block.attention
        mlp = modules[f"layers.{layer}.mlp"] if block is None else block.mlp
        through = ~left
        if block is not None:
            scores = torch.nn.functional.linear(x, attention.router.weight)[..., 0]
            through = through & (scores > 0)
            selected.append(through.sum(1))
        inner = attend(attention, x, through, same_bucket(attention, x))
        y = mlp.transform(mlp.norm(inner))
        y = inner + (y if mlp.post_norm is None else mlp.post_norm(y))
        y = y if block is None else x + scores.sigmoid()[..., None] * (y - x)
        x = torch.where(through[..., None], y, x)
        if layer in EXITS.layers:
            top = modules["head"].logits(x).softmax(-1).topk(2, dim=-1).values
            left = left | (top[..., 0] - top[..., 1] >= EXITS.threshold)
    assert any(len(counts.unique()) > 1 for counts in selected), "padding in some sample"
    assert 0 < float(left.float().mean()) < 1
    assert_same(modules, ours, x)


TECHNIQUES = {
    "depths": {"depths": DEPTHS},
    "exits": {"exits": EXITS},
    "exits, all keys": {"exits": replace(EXITS, propagate=True)},
    "exits and depths": {"exits": EXITS, "depths": DEPTHS},
}


@table("technique", TECHNIQUES)
@table("shape", SHAPES)
def test_decoding_token_by_token_is_the_whole_sequence(shape, technique):
    family, modules = made(SHAPES[shape], **TECHNIQUES[technique])
    for module in modules.values():
        module.eval()
    ids = tokens(2)
    with torch.no_grad():
        hidden, _ = run(family, modules, ids)
        expected = modules["head"].logits(hidden)
    decoder, cache = Decoder(family, modules, TOKENS), DecodingCache()
    got = [decoder.read(ids[:, :4], cache)] + [decoder.read(ids[:, at : at + 1], cache) for at in range(4, TOKENS)]
    torch.testing.assert_close(torch.stack(got, 1), expected[:, 3:], rtol=1e-3, atol=1e-3)
    assert any(EXITED in item.reads or item.kind == "layer" for item in family.items)


BIASED = MoeShape(num_experts=4, top_k=2, ffn_size=24, router=RouterShape(score_function="sigmoid", expert_bias=True))


@pytest.mark.parametrize("depths", [None, DEPTHS], ids=["exits", "exits and depths"])
def test_expert_biases_count_the_active_tokens_alone(depths):
    """Samples have different numbers of active tokens; the padding between them chooses experts, too."""
    family, modules = made(replace(PLAIN, moe=BIASED), exits=EXITS, depths=depths)
    layers = {name: counting_layers(module) for name, module in modules.items()}
    padded = {name: [] for name, found in layers.items() if found}
    for name, (layer, *_) in ((name, found) for name, found in layers.items() if found):
        layer.counts.begin_step(0)
        layer.counts.microbatch = 0
        layer.router.register_forward_hook(lambda _module, _x, logits, name=name: padded[name].append(len(logits)))
    ids = tokens()
    values, left = {}, {}
    for item in family.items[:-1]:
        left[item.name] = values.get(EXITED, torch.zeros(ids.shape)).bool()
        inputs = {"ids": ids, "labels": ids.roll(-1, 1)}
        result = modules[item.name](*(values[n] for n in item.reads), *(inputs[n] for n in item.inputs))
        values[item.writes] = output_of(result)
        values.update(getattr(result, "side", {}))
    for name in padded:
        active = (~left[name]).sum(1)
        # A routed block selects half of the number of tokens of the fullest sample, as far as they are active.
        counted = active.clamp(max=(int(active.max()) + 1) // 2) if name in ("layers.1", "layers.3") else active
        recorded = layers[name][0].counts.recorded(4, CPU)
        assert int(recorded.sum()) == 2 * int(counted.sum()), name
    assert any(rows[0] > int((~left[name]).sum()) for name, rows in padded.items()), "some padding is computed"


def test_sinks_of_pruned_heads_are_left_out():
    """Structured pruning computes the remaining heads; each has its own sink."""
    narrow, masked = made(SHAPES["sinks"])[1], made(SHAPES["sinks"])[1]
    rule = PruningRule(mode="structured")
    for modules, is_narrow in ((narrow, True), (masked, False)):
        attention = modules["layers.0.attention"]
        [units] = units_of(attention, rule)
        for layer, mask in units.prune(torch.tensor([False, True])):
            layer.weight.data.mul_(mask)
            layer.set_mask(mask, SparseTable(structured=is_narrow))
    x = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(4))
    ours, theirs = (modules["layers.0.attention"](x) for modules in (narrow, masked))
    assert narrow["layers.0.attention"].dense.columns is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
