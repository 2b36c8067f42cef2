"""Gated MLPs: one product for gate and up against two, what is saved, and which layout joins them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynmo_train.models.layers.feed_forward import ACTIVATIONS, FeedForward, Mlp, join_gated_layers
from dynmo_train.models.layers.gated import GATED, ClampedSwiglu, are_stacked, gated_activation, join_gated, stack
from dynmo_train.models.layers.linear import PrunableLinear
from dynmo_train.models.layers.sparse_formats import BUILT_IN, SparseTable
from dynmo_train.optim.precision import ComputeCopies

D, F_ = 16, 24
CPU = torch.device("cpu")


class Products(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
        name = function._schema.name.removeprefix("aten::")
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*arguments, **(keywords or {}))

    @property
    def products(self):
        return sum(self.counts.get(name, 0) for name in ("mm", "addmm"))


def made(activation="swiglu", bias=False):
    torch.manual_seed(0)
    mlp = FeedForward(width=D, inner=F_, activation=activation, device=CPU, bias=bias)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    return mlp


def reference(mlp, x):
    """The formula, on copies of the parameters."""
    activate = GATED[mlp.activation][0]
    return mlp.fc2(activate(nn.Module.__call__(mlp.gate, x)) * nn.Module.__call__(mlp.up, x))


def gradients(mlp, output):
    mlp.zero_grad()
    output.square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in mlp.named_parameters()}


@pytest.mark.parametrize("whole", [True, False])
def test_clamped_swiglu_equals_its_formula(whole):
    """Values on both sides of both limits."""
    activation, generator = ClampedSwiglu(alpha=1.3, limit=0.8), torch.Generator().manual_seed(0)
    both = torch.randn(5, 2 * F_, generator=generator, dtype=torch.float64, requires_grad=True)
    gate, up = both.chunk(2, dim=-1)
    ours = gated_activation(both, None, activation) if whole else gated_activation(gate, up, activation)
    low, inner = (
        torch.minimum(gate, torch.tensor(0.8)),
        torch.maximum(torch.minimum(up, torch.tensor(0.8)), -torch.tensor(0.8)),
    )
    theirs = (inner + 1) * low / (1 + torch.exp(-1.3 * low))
    torch.testing.assert_close(ours, theirs)
    weights = torch.rand(ours.shape, generator=generator, dtype=torch.float64)
    grads = [torch.autograd.grad((each * weights).sum(), both, retain_graph=True)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gated_mlp_equals_the_formula(activation, joined, bias):
    mlp = made(activation, bias)
    if joined:
        join_gated(mlp.gate, mlp.up)
    x = torch.randn(3, 5, D, requires_grad=True)
    y = mlp(x)
    got = gradients(mlp, y) | {"x": x.grad.clone()}
    x.grad = None
    expected_y = reference(mlp, x)
    expected = gradients(mlp, expected_y) | {"x": x.grad}
    torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-4)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-2)


def test_joined_mlp_has_two_thirds_of_the_products():
    """Forward 3 to 2; backward, inputs and weights, 6 to 4."""
    counts = []
    for joined in (False, True):
        mlp = made()
        if joined:
            join_gated(mlp.gate, mlp.up)
        x = torch.randn(4, D, requires_grad=True)
        with Products() as products:
            mlp(x).sum().backward()
        counts.append(products.products)
    assert counts == [9, 6]


def test_gated_activation_saves_gate_and_up_alone():
    saved = 0

    def count(tensor):
        nonlocal saved
        saved += tensor.numel()
        return tensor

    y = torch.randn(7, 2 * F_, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        gated_activation(y, None, "swiglu")
    assert saved == 7 * 2 * F_


def test_join_gated_keeps_parameters_and_values():
    mlp = made(bias=True)
    before = {name: (id(parameter), parameter.detach().clone()) for name, parameter in mlp.named_parameters()}
    join_gated(mlp.gate, mlp.up)
    assert are_stacked(mlp.gate.weight, mlp.up.weight)
    assert are_stacked(mlp.gate.bias, mlp.up.bias)
    for name, parameter in mlp.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    address = mlp.gate.weight.data_ptr()
    join_gated(mlp.gate, mlp.up)
    assert mlp.gate.weight.data_ptr() == address, "joined once"


def test_join_gated_layers_leaves_routed_experts():
    module = nn.ModuleDict({"experts": nn.ModuleDict({"0": made()}), "shared": made()})
    join_gated_layers(module)
    assert not are_stacked(module["experts"]["0"].gate.weight, module["experts"]["0"].up.weight)
    assert are_stacked(module["shared"].gate.weight, module["shared"].up.weight)


def test_are_stacked_refuses_other_layouts():
    first, second = stack(torch.ones(3, 4), torch.ones(3, 4), torch.float32)
    assert are_stacked(first, second)
    assert not are_stacked(second, first)
    assert not are_stacked(first, second.clone())
    assert not are_stacked(first[:2], second[:2])
    assert not are_stacked(first, second[:2])


def test_joined_weights_accumulate_gradients_over_microbatches():
    mlp, plain = made(), made()
    join_gated(mlp.gate, mlp.up)
    for seed in range(3):
        x = torch.randn(5, D, generator=torch.Generator().manual_seed(seed))
        mlp(x).sum().backward()
        plain(x).sum().backward()
    for one, other in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)


def test_compute_copies_of_joined_weights_are_joined():
    mlp = Mlp(width=D, inner=F_, activation="swiglu", norm=nn.RMSNorm(D), device=CPU, bias=False)
    copies = ComputeCopies(mlp, torch.bfloat16)
    x = torch.randn(1, 4, D, dtype=torch.bfloat16)
    counts = []
    for _ in range(2):
        copies.refresh()
        with Products() as products, torch.no_grad():
            copies(x)
        counts.append(products.products)
        join_gated_layers(mlp)
    assert counts == [3, 2]


def test_pruned_gate_is_its_own_product():
    """Structured masks narrow the products; a joined one would read pruned rows."""
    mlp = made()
    join_gated(mlp.gate, mlp.up)
    mask = torch.ones(F_, D, dtype=torch.bool)
    mask[::2] = False
    x = torch.randn(4, D)
    for layer in (mlp.gate, mlp.up):
        layer.weight.data.mul_(mask)
        layer.set_mask(mask, SparseTable(thresholds=BUILT_IN, structured=True))
    columns = mask.t().new_ones(D, F_) & mask[:, 0]
    mlp.fc2.set_mask(columns, SparseTable(thresholds=BUILT_IN, structured=True))
    assert isinstance(mlp.gate, PrunableLinear)
    torch.testing.assert_close(mlp(x), reference(mlp, x))
    with Products() as products, torch.no_grad():
        mlp(x)
    assert products.products == 3


def test_mlp_knows_every_activation_once():
    assert not GATED.keys() & ACTIVATIONS.keys()


@pytest.mark.parametrize(("limit", "offset"), [(float("inf"), 0.0), (float("inf"), 1.0), (0.8, 0.0), (0.8, 0.5)])
@pytest.mark.parametrize("whole", [True, False])
def test_limit_and_offset_of_a_gate_are_those_of_its_formula(limit, offset, whole):
    """Autograd of the formula is the reference of the gradients."""
    activation, generator = ClampedSwiglu(alpha=1.7, limit=limit, offset=offset), torch.Generator().manual_seed(1)
    given = [(2 * torch.randn(5, F_, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    gate, up = given
    low, inner = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = low * torch.sigmoid(1.7 * low) * (inner + offset)
    found = gated_activation(torch.cat(given, -1), None, activation) if whole else gated_activation(*given, activation)
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(expected.square().sum(), given)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), given), theirs)
