"""Experts against a plain loop over tokens: results, gradients, rows that are computed, and reads by the host."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dynmo_train.models.experts.moe import MoeMlp, route
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.models.layers import grouped_linear
from dynmo_train.pipeline.stage_module import save_products
from tests.tables import table

CPU, META = torch.device("cpu"), torch.device("meta")
EXPERTS, WIDTH, INNER = 4, 8, 16
# Operations that make the host wait for a device: their results, or the shapes of them, are values of a tensor.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "equal", "is_nonzero"}
METHODS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
GPT = {"activation": "gelu", "bias": True}
MIXTRAL = {"activation": "swiglu", "bias": False}


def drawn(*shape, seed=1, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def layer(kind=GPT, device=CPU, **options):
    moe = MoeShape(**{"num_experts": EXPERTS, "aux_loss_coeff": 0.1, "z_loss_coeff": 0.01} | options)
    made = MoeMlp(moe=moe, width=WIDTH, inner=INNER, norm=torch.nn.LayerNorm(WIDTH), device=device, **kind)
    if device == CPU:
        with torch.no_grad():
            for number, parameter in enumerate(made.parameters()):
                parameter.copy_(drawn(*parameter.shape, seed=number, scale=0.5))
    return made.to(device)


@pytest.fixture
def grouped(monkeypatch):
    """The grouped product, which CPUs have too, instead of the loop."""
    monkeypatch.setattr(grouped_linear, "is_fast_device", lambda rows: True)


def slots_of_experts(probabilities, moe):
    """For each expert its tokens, by a plain sort of all of them."""
    tokens = probabilities.shape[0]
    choices = [sorted(range(EXPERTS), key=lambda e, n=n: -probabilities[n, e])[: moe.top_k] for n in range(tokens)]
    weights = {
        (n, e): float(probabilities[n, e] / sum(probabilities[n, c] for c in choices[n]))
        for n in range(tokens)
        for e in choices[n]
    }
    chosen = [[n for n in range(tokens) if e in choices[n]] for e in range(EXPERTS)]
    if moe.capacity_factor is None:
        return choices, chosen
    capacity = max(math.ceil(moe.capacity_factor * tokens * moe.top_k / EXPERTS), moe.min_capacity)
    if moe.drop_policy == "probs":
        chosen = [sorted(each, key=lambda n, e=e: (-weights[n, e], n)) for e, each in enumerate(chosen)]
    return choices, [sorted(each[:capacity]) for each in chosen]


def plain(made, x):
    """Every expert on every token, one token after the other, with the losses."""
    moe = made.moe
    flat = made.norm(x).reshape(-1, WIDTH)
    logits = made.router(flat)
    probabilities = logits.softmax(-1)
    choices, chosen_tokens = slots_of_experts(probabilities.detach(), moe)
    rows = []
    for n in range(len(flat)):
        total = torch.zeros(WIDTH)
        for e in choices[n]:
            if n in chosen_tokens[e]:
                weight = probabilities[n, e] / sum(probabilities[n, c] for c in choices[n])
                total = total + weight * made.experts[str(e)](flat[n])
        if moe.shared_ffn_size:
            total = total + made.shared(flat[n]) * (made.shared_router(flat[n]).sigmoid() if moe.shared_gate else 1.0)
        rows.append(total)
    shares = torch.tensor([sum(e in each for each in choices) for e in range(EXPERTS)]) / (len(flat) * moe.top_k)
    losses = {
        "load_balancing": moe.aux_loss_coeff * EXPERTS * (shares * probabilities.mean(0)).sum(),
        "z": moe.z_loss_coeff * logits.logsumexp(-1).square().mean(),
    }
    return x + torch.stack(rows).view_as(x), losses, [len(each) for each in chosen_tokens]


def gradients(made, x, output, losses, grad):
    made.zero_grad()
    x.grad = None
    torch.autograd.backward([output, *losses.values()], [grad, *(torch.ones(()) for _ in losses)])
    found = {"x": x.grad.clone()}
    # An expert without tokens has a gradient of zeros in one of the two ways, and none in the other.
    return found | {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in made.named_parameters()}


MINIMA = [
    {"top_k": 2, "capacity_factor": 0.25, "min_capacity": minimum, "pad_to_capacity": pad, "drop_policy": policy}
    for minimum, pad, policy in itertools.product((1, 7, 1000), (False, True), ("probs", "position"))
]
CASES = [
    {"top_k": top_k, "capacity_factor": factor, "drop_policy": policy, "pad_to_capacity": pad}
    for top_k, (factor, policy, pad) in itertools.product(
        (1, 2),
        [(None, "probs", False)]
        + [(f, policy, pad) for f in (0.25, 1.0, 8.0) for policy in ("probs", "position") for pad in (False, True)],
    )
]


def check_equals_plain(kind, options):
    made = layer(kind, **options)
    x, grad = drawn(2, 13, WIDTH, seed=9).requires_grad_(), drawn(2, 13, WIDTH, seed=10)
    expected, losses, _ = plain(made, x)
    reference = gradients(made, x, expected, losses, grad)
    result = made(x)
    got = gradients(made, x, result.output, result.losses, grad)
    torch.testing.assert_close(result.output, expected, rtol=1e-4, atol=1e-5)
    for name, value in reference.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4, msg=name)


SHARED = [{"shared_ffn_size": 12, "shared_gate": gate} for gate in (False, True)]


@table("options", CASES + MINIMA + SHARED, ids=str)
def test_moe_mlp_equals_a_plain_loop_over_tokens(options):
    check_equals_plain(GPT, options)


@table("kind", [GPT, MIXTRAL], ids=["gpt", "mixtral"])
@table("options", CASES[::3] + MINIMA[::3] + SHARED, ids=str)
def test_moe_mlp_grouped_products_equal_a_plain_loop(grouped, kind, options):
    check_equals_plain(kind, options)


def computed_rows(made, x):
    """The rows of each expert's products, counted at the products."""
    rows = {number: 0 for number in made.experts}
    for number, expert in made.experts.items():
        expert.fc1.register_forward_pre_hook(
            lambda _module, given, number=number: rows.__setitem__(number, rows[number] + len(given[0]))
        )
    made(x)
    return list(rows.values())


@pytest.mark.parametrize(("minimum", "rows"), [(0, 4), (7, 7), (1000, 26)])
def test_padded_experts_compute_the_minimum_capacity(minimum, rows):
    # An even share of 26 tokens with two experts each, times 0.25, is 3.25.
    made = layer(top_k=2, capacity_factor=0.25, min_capacity=minimum, pad_to_capacity=True)
    assert computed_rows(made, drawn(2, 13, WIDTH)) == [rows] * EXPERTS


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_evaluation_has_a_capacity_of_its_own(factor):
    made = layer(top_k=2, capacity_factor=1.0, eval_capacity_factor=factor, drop_policy="position")
    same = layer(top_k=2, capacity_factor=factor, drop_policy="position")
    x = drawn(2, 13, WIDTH, seed=3)
    trained = layer(top_k=2, capacity_factor=1.0, drop_policy="position")(x).output
    assert torch.equal(made(x).output, trained)
    assert torch.equal(made.eval()(x).output, same.eval()(x).output)
    assert not torch.equal(made(x).output, trained)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [None, 1.0, 0.25])
def test_moe_mlp_computes_no_dropped_rows(factor, policy):
    made = layer(capacity_factor=factor, drop_policy=policy)
    x = drawn(2, 64, WIDTH, seed=3)
    rows = computed_rows(made, x)
    assert rows == plain(made, x)[2]
    if factor is None:
        assert sum(rows) == 2 * 128
        assert max(rows) > 64, "the routing is uneven, so that a capacity drops tokens"
    else:
        assert max(rows) == factor * 64


def test_moe_mlp_padding_computes_the_capacity_of_each_expert():
    made = layer(capacity_factor=1.0, pad_to_capacity=True)
    assert computed_rows(made, drawn(2, 64, WIDTH, seed=3)) == [64] * EXPERTS


def test_moe_mlp_capacity_is_at_most_the_tokens():
    made = layer(capacity_factor=100.0, pad_to_capacity=True)
    assert computed_rows(made, drawn(1, 5, WIDTH)) == [5] * EXPERTS


def test_grouped_product_runs_for_all_experts_at_once(grouped):
    made = layer(capacity_factor=1.0)
    assert computed_rows(made, drawn(2, 64, WIDTH, seed=3)) == [0] * EXPERTS


@table("recompute", ["full", "selective"])
@table("options", CASES[::5], ids=str)
def test_moe_mlp_recomputed_gradients_have_the_same_bits(grouped, recompute, options):
    made, grad = layer(**options), drawn(2, 13, WIDTH, seed=10)
    x = drawn(2, 13, WIDTH, seed=9).requires_grad_()
    result = made(x)
    reference = gradients(made, x, result.output, result.losses, grad)
    saved_bytes = []
    contexts = {"context_fn": partial(save_products, saved_bytes)} if recompute == "selective" else {}
    again = checkpoint(made, x, use_reentrant=False, **contexts)
    got = gradients(made, x, again.output, again.losses, grad)
    assert all(torch.equal(got[name], reference[name]) for name in reference)
    # The products of the router, and those of all experts into and out of their inner width.
    rows = route(made.router(made.norm(x).reshape(-1, WIDTH)), made.moe).rows.slot_R
    saved = [26 * EXPERTS * 4, len(rows) * INNER * 4, len(rows) * WIDTH * 4]
    assert saved_bytes == (saved if recompute == "selective" else [])


def test_pruned_expert_is_computed_by_the_loop(grouped):
    made = layer()
    made.experts["1"].fc1.rows = torch.arange(INNER)
    assert sum(computed_rows(made, drawn(1, 6, WIDTH))) == 12


class HostReads(TorchDispatchMode):
    """Counts operations whose results the host reads, and copies between devices."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        target = (kwargs or {}).get("device")
        source = next((each.device for each in args if isinstance(each, torch.Tensor)), target)
        boolean = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if name in READS or boolean or (name == "_to_copy" and target not in (None, source)):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def host_reads(monkeypatch):
    """A function that runs an expert layer forward and backward, and returns how the host read tensors."""
    reads = HostReads()

    def recorded(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args):
            reads.names.append(name)
            return original(tensor, *args)

        return read

    # A CPU tensor is read without an operation.
    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, recorded(name))

    def run(made, x):
        with reads:
            result = made(x)
            torch.autograd.backward([result.output.sum(), *result.losses.values()])
        return reads.names

    return run


@table("options", [*CASES, {"routing": "expert-choice"}], ids=str)
def test_moe_mlp_grouped_products_read_nothing_on_the_host(grouped, host_reads, options):
    assert host_reads(layer(**options), drawn(2, 13, WIDTH).requires_grad_()) == []


ROUTERS = [
    {
        "router": RouterShape(score_function="sigmoid", expert_bias=True, num_groups=2, group_topk=1),
        **{"seq_aux_loss_coeff": 0.1, "global_aux_loss_coeff": 0.1},
    },
    {"routing": "sinkhorn", "aux_loss_coeff": 0.0},
]


@pytest.mark.parametrize("options", ROUTERS, ids=["biased groups", "sinkhorn"])
def test_moe_mlp_routers_and_losses_read_nothing_on_the_host(grouped, host_reads, options):
    made = layer(**options)
    made.counts.begin_step(0)
    made.counts.microbatch = 0
    assert host_reads(made, drawn(2, 13, WIDTH).requires_grad_()) == []


@table("options", [c for c in CASES if c["pad_to_capacity"]] + [{"routing": "expert-choice"}], ids=str)
def test_moe_mlp_fixed_shapes_read_nothing_on_the_host(host_reads, options):
    assert host_reads(layer(**options), drawn(2, 13, WIDTH).requires_grad_()) == []


def test_moe_mlp_loop_reads_its_counts_once(host_reads):
    assert host_reads(layer(capacity_factor=1.0), drawn(2, 13, WIDTH).requires_grad_()) == ["tolist"]


@table("options", CASES + ROUTERS, ids=str)
def test_moe_mlp_runs_without_values(grouped, options):
    """A meta tensor has no values: any shape or branch that depends on them would raise."""
    x = torch.empty(2, 13, WIDTH, device=META, dtype=torch.bfloat16, requires_grad=True)
    result = layer(device=META, **options).to(torch.bfloat16)(x)
    torch.autograd.backward([result.output.sum(), *result.losses.values()])
    assert x.grad.shape == x.shape
    assert all(value.device == META for value in result.metrics.values())


@pytest.mark.parametrize("options", CASES[:4], ids=str)
def test_expert_tokens_count_choices_before_dropping(options):
    made = layer(**options)
    x = drawn(2, 13, WIDTH)
    counts = made(x).metrics["expert_tokens"]
    chosen = made.router(made.norm(x).reshape(-1, WIDTH)).softmax(-1).topk(options["top_k"]).indices
    assert torch.equal(counts, torch.bincount(chosen.reshape(-1), minlength=EXPERTS).float())


def test_route_ties_go_to_the_lower_expert_and_the_earlier_token():
    rows = route(torch.zeros(6, EXPERTS), MoeShape(num_experts=EXPERTS, top_k=1, capacity_factor=2.0)).rows
    assert rows.groups.host_counts() == (3, 0, 0, 0)
    assert rows.computed_M.tolist() == [True] * 3 + [False] * 3
