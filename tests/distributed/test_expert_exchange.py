"""What expert-parallel ranks exchange and read on the host, and that they compute what one process computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.sharding import shard_experts
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.expert_replicas import token_dispatcher
from dynmo_train.parallel.process_groups import destroy_world, init_world
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(300)]

EXPERTS, WIDTH, TOKENS = 4, 8, 24
CASES = {
    "dropless": {"top_k": 2},
    "capacity": {"top_k": 2, "capacity_factor": 0.75},
    "position": {"top_k": 1, "capacity_factor": 0.75, "drop_policy": "position"},
    "padded": {"top_k": 2, "capacity_factor": 0.75, "pad_to_capacity": True},
    "expert choice": {"top_k": 2, "routing": "expert-choice"},
    "shared": {"top_k": 2, "shared_ffn_size": 12, "shared_gate": True},
    "shared padded": {"top_k": 2, "capacity_factor": 0.75, "pad_to_capacity": True, "shared_ffn_size": 12},
}
CAPACITY = 9  # of 24 tokens with two choices over 4 experts, times 0.75
FIXED = ("padded", "expert choice", "shared padded")


def layer(options):
    made = MoeMlp(
        moe=MoeShape(num_experts=EXPERTS, **options),
        width=WIDTH,
        inner=16,
        activation="gelu",
        norm=torch.nn.LayerNorm(WIDTH),
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.5)
    return made


def batch(rank):
    """The tokens of a replica: mostly along one direction, so that loads are uneven, and differ by replica."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(1, TOKENS, WIDTH, generator=generator) + 2.0 * torch.eye(WIDTH)[rank]


def step(made, x, training=True):
    x = x.clone().requires_grad_()
    output = made.train(training)(x).output
    output.square().sum().backward()
    return output.detach(), x.grad, {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


def play(training):
    """By case: results of this rank, its exchanges as (rows or counts, whether in equal parts), reads, and rows."""
    world = init_world("cpu", dims=ParallelDims(data=2, expert=2))
    exchange, results = dist.all_to_all_single, {}
    reads = torch.Tensor.tolist
    try:
        for name, options in CASES.items():
            calls, read, rows = [], [], []

            def record(output, given, *splits, calls=calls, **group):
                parts = splits and splits[0] is not None
                calls.append(("rows" if given.is_floating_point() else "counts", not parts))
                return exchange(output, given, *splits, **group)

            def count(tensor, read=read):
                read.append(len(tensor))
                return reads(tensor)

            made = shard_experts("mlp", layer(options), token_dispatcher(world))
            for expert in made.experts.values():
                expert.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(len(given[0])))
            dist.all_to_all_single, torch.Tensor.tolist = record, count
            output, grad, gradients = step(made, batch(world.rank), training)
            dist.all_to_all_single, torch.Tensor.tolist = exchange, reads
            results[name] = (output, grad, gradients, calls, len(read) > 0, rows)
        return results
    finally:
        dist.all_to_all_single, torch.Tensor.tolist = exchange, reads
        destroy_world()


def overlap():
    """What happens on this rank, in order, with shared experts: exchanges, their ends, and the shared experts."""
    world = init_world("cpu", dims=ParallelDims(data=2, expert=2))
    exchange, events = dist.all_to_all_single, []

    class Recorded:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            return self.work.wait()

    def record(output, given, *splits, **options):
        work = exchange(output, given, *splits, **options)
        if not given.is_floating_point():
            return work
        events.append("start")
        return Recorded(work)

    made = shard_experts("mlp", layer(CASES["shared"]), token_dispatcher(world))
    made.shared.register_forward_hook(lambda *_: events.append("shared"))
    made.shared.register_full_backward_hook(lambda *_: events.append("shared"))
    try:
        dist.all_to_all_single = record
        output = made(batch(world.rank).requires_grad_()).output
        events.append("backward")
        output.sum().backward()
        return events
    finally:
        dist.all_to_all_single = exchange
        destroy_world()


def test_shared_experts_run_while_rows_travel():
    for events in run_workers(overlap, 2, joins=False):
        there_and_back = ["start", "shared", "wait", "start", "wait"]
        assert events == [*there_and_back, "backward", "start", "wait", "start", "shared", "wait"], events


@pytest.fixture(scope="module")
def ranks():
    return run_workers(play, 2, True, joins=False)


@pytest.fixture(scope="module")
def evaluated():
    return run_workers(play, 2, False, joins=False)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_process_computes(name, ranks, evaluated):
    for training, results in ((True, ranks), (False, evaluated)):
        totals = {}
        for rank, by_case in enumerate(results):
            output, grad, gradients = step(layer(CASES[name]), batch(rank), training)
            torch.testing.assert_close(by_case[name][0], output)
            torch.testing.assert_close(by_case[name][1], grad)
            totals = {key: totals.get(key, 0.0) + value for key, value in gradients.items()}
            for key, value in by_case[name][2].items():
                if ".experts." not in f".{key}":
                    torch.testing.assert_close(value, gradients[key], rtol=1e-4, atol=1e-5)
        for by_case in results:
            for key, value in by_case[name][2].items():
                if ".experts." in f".{key}":
                    torch.testing.assert_close(value, totals[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_fixed_shapes_exchange_equal_parts_and_read_nothing(name, ranks):
    for by_case in ranks:
        _, _, _, calls, has_read, _ = by_case[name]
        if name in FIXED:
            assert calls == [("rows", True)] * 4, "two exchanges forward and two backward"
            assert not has_read
        else:
            assert calls == [("counts", True)] + [("rows", False)] * 4
            assert has_read


@pytest.mark.parametrize("name", CASES)
def test_evaluation_exchanges_counts(name, evaluated):
    """Its number of tokens may differ by replica."""
    assert all(by_case[name][3] == [("counts", True)] + [("rows", False)] * 4 for by_case in evaluated)


def test_capacity_limits_the_rows_of_each_source(ranks):
    rows = {name: [sum(by_case[name][5]) for by_case in ranks] for name in CASES}
    largest = {name: max(max(by_case[name][5]) for by_case in ranks) for name in CASES}
    assert sum(rows["dropless"]) == 2 * 2 * TOKENS
    assert largest["dropless"] > 2 * CAPACITY
    assert largest["capacity"] == 2 * CAPACITY
    assert sum(rows["capacity"]) < sum(rows["dropless"])
    assert rows["padded"] == [2 * 2 * CAPACITY] * 2
