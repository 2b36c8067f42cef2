"""Products in float8: near those of the compute dtype, equal to torchao's own layer, and only where they belong."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest
import torch

from dynmo_train._common.errors import UsageError
from dynmo_train.models import float8
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.float8 import Float8Items, Float8Product, Float8Settings, layers_in_bf16
from dynmo_train.models.layers.feed_forward import FeedForward
from dynmo_train.models.layers.linear import PrunableLinear
from dynmo_train.models.layers.sparse_formats import SparseTable
from tests.tables import table

pytest.importorskip("torchao", reason="the extra fp8 is not installed")

CPU = torch.device("cpu")
SETTINGS = Float8Settings()
RECIPES = [
    SETTINGS,
    Float8Settings(form="e4m3"),
    Float8Settings(recipe="rowwise", form="e4m3"),
    Float8Settings(recipe="rowwise_with_gw_hp", form="e4m3"),
]
SHAPE = GptShape(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=16,
    vocab_size=50,
    padded_vocab_size=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    seed=11,
)


def gradients(product, rows=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(48, 32, generator=generator).bfloat16().requires_grad_()
    y = product(x, weight)
    y.backward(torch.randn(rows, 48, generator=generator).bfloat16())
    return y.detach(), x.grad, weight.grad


@table("settings", RECIPES, ids=lambda each: f"{each.recipe}-{each.form}")
@table(("rows", "emulate"), [(32, True), (7, True), (32, False), (7, False)])
def test_float8_product_is_near_the_exact_one(settings, rows, emulate):
    product = Float8Product(settings, emulate=emulate)
    for ours, exact in zip(gradients(product, rows), gradients(torch.nn.functional.linear, rows), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).norm() / exact.norm() < 0.08, "rounded to 8 bits, and not further"
        if not (settings.recipe.endswith("gw_hp") and ours.shape == (48, 32)):
            assert (ours - exact).norm() / exact.norm() > 1e-3


def test_float8_recipes_differ():
    results = [gradients(Float8Product(settings, emulate=True)) for settings in RECIPES]
    assert len({tuple(float(each.float().sum()) for each in result) for result in results}) == len(RECIPES)
    exact = gradients(torch.nn.functional.linear)
    assert torch.equal(results[-1][2], exact[2])  # weight gradients in the compute dtype


@pytest.mark.parametrize("settings", RECIPES, ids=lambda each: f"{each.recipe}-{each.form}")
def test_one_scale_of_a_tensor_lets_samples_depend_on_others(settings):
    """The rule over the cache of activations by sample, which refuses this recipe alone."""
    generator = torch.Generator().manual_seed(0)
    own, weight = (torch.randn(rows, 32, generator=generator).bfloat16() for rows in (16, 48))
    product = Float8Product(settings, emulate=True)
    found = [product(torch.cat([own, factor * own]), weight)[:16] for factor in (1, 77)]
    assert torch.equal(*found) == (settings.recipe != "tensorwise")


def test_float8_layer_equals_that_of_torchao():
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layer = PrunableLinear(32, 48, CPU)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    layer.float8 = Float8Product(SETTINGS, emulate=True)
    theirs = Float8Linear(32, 48, config=Float8LinearConfig(emulate=True))
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(2, 16, 32)
    assert torch.equal(layer(x), theirs(x))


def test_float8_gated_mlp_multiplies_gate_and_up_in_float8():
    torch.manual_seed(0)
    mlp = FeedForward(width=32, inner=48, activation="swiglu", device=CPU, bias=False)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(16, 32)
    exact = mlp(x)
    mlp.gate.float8 = mlp.up.float8 = Float8Product(SETTINGS, emulate=True)
    apart = mlp(x)
    both = torch.cat([mlp.gate.weight.detach(), mlp.up.weight.detach()])
    mlp.gate.weight.data, mlp.up.weight.data = both[:48], both[48:]
    together = mlp(x)
    for ours in (apart, together):
        assert 1e-3 < (ours - exact).norm() / exact.norm() < 0.1


def test_float8_of_no_rows_is_empty():
    layer = PrunableLinear(32, 48, CPU)
    layer.float8 = Float8Product(SETTINGS, emulate=True)
    assert layer(torch.empty(0, 32)).shape == (0, 48)
    mlp = FeedForward(width=32, inner=48, activation="swiglu", device=CPU)
    for each in mlp.linear_layers():
        each.float8 = layer.float8
    assert mlp(torch.empty(0, 32)).shape == (0, 32)


def test_float8_pruned_weights_stay_zero():
    layer = PrunableLinear(32, 48, CPU)
    torch.nn.init.normal_(layer.weight)
    layer.float8 = Float8Product(SETTINGS, emulate=True)
    mask = torch.rand(48, 32) > 0.5
    layer.weight.data.mul_(mask)
    layer.set_mask(mask, SparseTable())
    exact = torch.nn.functional.linear(torch.ones(16, 32), layer.weight, layer.bias)
    ours = layer(torch.ones(16, 32))
    assert 0 < (ours - exact).norm() / exact.norm() < 0.1
    layer.rows = torch.arange(5)
    # Fewer rows than the weight has are multiplied as without float8.
    torch.testing.assert_close(layer(torch.ones(16, 32)), exact[:, :5])


def with_float8(family, settings=SETTINGS):
    """Names of the linear layers with float8 products, by item."""
    items = Float8Items(settings, family.items, CPU)
    return {
        item.name: [
            path
            for path, child in items.apply(item.name, family.build(item.name, torch.device("meta"))).named_modules()
            if getattr(child, "float8", None) is not None
        ]
        for item in family.items
    }


def test_float8_items_are_attention_and_mlp():
    found = with_float8(Gpt(SHAPE))
    assert found["layers.2.attention"] == ["qkv", "dense"]
    assert found["layers.2.mlp"] == ["fc1", "fc2"]
    assert not found["embedding"]
    assert not found["head"]


def test_float8_experts_stay_in_the_compute_dtype():
    moe = MoeShape(num_experts=2, top_k=1, shared_ffn_size=32)
    found = with_float8(Gpt(replace(SHAPE, moe=moe)))
    assert found["layers.0.mlp"]
    assert not any("experts" in path.split(".") or "router" in path for path in found["layers.0.mlp"])


def test_float8_first_and_last_layers_stay_in_bf16():
    found = with_float8(Gpt(SHAPE), Float8Settings(first_in_bf16=1, last_in_bf16=2))
    assert [name for name, layers in found.items() if layers] == ["layers.1.attention", "layers.1.mlp"]


def test_layers_in_bf16_are_those_of_each_stack():
    from tests.distributed.families import SAMPLES

    excluded = layers_in_bf16(SAMPLES["t5"].family.items, Float8Settings(first_in_bf16=1))
    assert excluded == {"encoder.layers.0", "decoder.layers.0"}


def test_check_float8_names_extra_and_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UsageError, match=r"8\.9 or later, and NVIDIA A100 has 8\.0; leave it out"):
        float8.check_float8(torch.device("cuda"))
    float8.check_float8(CPU)
    real = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.startswith("torchao"):
            raise ModuleNotFoundError("No module named 'torchao'", name="torchao")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=r"'torchao' is not installed; run: pip install 'dynmo-toolkit\[fp8\]'"):
        float8.check_float8(CPU)
