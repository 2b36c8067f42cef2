"""Costs of techniques from measured operators, on a table whose times are chosen by hand."""

from __future__ import annotations

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.costs.cost_window import ItemCosts
from dynmo_balance.costs.devices import PRESETS
from dynmo_balance.costs.measured_costs import MeasuredCosts
from dynmo_balance.formats.operator_costs import parse_operator_costs
from dynmo_balance.inputs.analytic_profile import BuildOptions, build_costs, build_header, header_of
from dynmo_balance.inputs.model_config import from_config

DENSE = {
    "embedding": (2, 0, 4),
    "attention": (100, 200, 50),
    "mlp": (300, 300, 300),
    "layer": (400, 500, 350),
    "head": (1000, 0, 0),
}
CASES = [
    ("frozen", "attention", {}, (90, 0, 0)),
    ("frozen", "mlp", {}, (300, 0, 0)),
    ("pruned", "mlp", {"form": "csr", "sparsity": 0.8}, (450, 450, 300)),
    ("pruned", "mlp", {"form": "csr", "sparsity": 0.9}, (150, 210, 90)),
    ("pruned", "mlp", {"form": "block", "sparsity": 0.9}, (30, 60, 90)),
    ("pruned", "attention", {"form": "csr", "sparsity": 0.9}, (50, 100, 25)),
    ("depths", "layer", {"capacity": 0.5}, (200, 300, 210)),
    ("depths", "layer", {"capacity": 0.25}, (100, 150, 140)),
    ("exited", "layer", {"active_share": 0.5}, (240, 250, 175)),
    ("exit", "mlp", {"measure": "softmax", "loss_token_share": 1, "loss_vocabulary": 50}, (900, 700, 500)),
    ("exit", "mlp", {"measure": "saturation", "loss_token_share": 0.125, "loss_vocabulary": 25}, (320, 310, 290)),
    ("sparse", "attention", {"buckets": 4, "block": 32}, (60, 120, 50)),
    ("sparse", "attention", {"buckets": 8, "block": 32}, (50, 100, 50)),
    ("experts", "mlp", {"experts": 4, "experts_per_token": 2}, (600, 610, 620)),
]
NAMES = ("forward_ns", "backward_input_ns", "backward_weight_ns")
MODEL = {
    "family": "gpt",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def table_of(cases=CASES, tokens=64):
    def row(case, operator, setting, times):
        return {
            "case": case,
            "operator": operator,
            "setting": setting,
            "sequence_length": tokens,
            **dict(zip(NAMES, times, strict=True)),
            "dense": dict(zip(NAMES, DENSE[operator], strict=True)),
            "spread": 0.0,
        }

    return parse_operator_costs(
        {
            "format": "dynmo.operator_costs",
            "version": 1,
            "written_by": "a test",
            "created_utc": "2026-11-24T00:00:00Z",
            "device": {"name": "a processor", "type": "cpu", "threads": 1},
            "torch": "2",
            "dtype": "float32",
            "shape": {
                "hidden_size": 32,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "vocab_size": 50,
                "num_experts": 4,
                "micro_batch_size": 1,
                "sequence_lengths": [tokens],
            },
            "rows": [row("dense", name, {}, times) for name, times in DENSE.items()] + [row(*case) for case in cases],
        },
        "costs.json",
    )


def built(shards=None):
    """Header and computed costs of embedding, two blocks and head."""
    options = BuildOptions(dtype="float32", vocabulary_parallel=shards)
    spec = from_config(MODEL, "config.json")
    header = header_of(build_header(spec, PRESETS["cpu"], options, "run"))
    return header, build_costs(spec, header, PRESETS["cpu"], options)


HEADER, COMPUTED = built()
MEASURED = MeasuredCosts(table_of(), 64)
BASE = MEASURED.dense(HEADER, COMPUTED)


def of(costs: ItemCosts, index: int) -> tuple[int, int, int]:
    return costs.forward_ns[index], costs.backward_input_ns[index], costs.backward_weight_ns[index]


def test_dense_times_are_the_measured_ones():
    kinds = ["embedding", "attention", "mlp", "attention", "mlp", "head"]
    assert [item.kind for item in HEADER.items] == kinds
    assert [of(BASE, index) for index in range(6)] == [DENSE[kind] for kind in kinds]
    assert BASE.activation_bytes == COMPUTED.activation_bytes


def test_pruned_passes_have_their_own_ratios():
    costs = MeasuredCosts(table_of(), 64, form="csr").pruned(HEADER, BASE, [0.0, 0.9, 0.9, 0.0, 0.85, 0.9])
    assert of(costs, 1) == (50, 100, 25)
    assert of(costs, 2) == (150, 210, 90)
    assert of(costs, 3) == DENSE["attention"]
    assert of(costs, 4) == (300, 330, 195), "halfway between two measured sparsities"
    assert of(costs, 5) == DENSE["head"]


def test_pruned_uses_the_fastest_form_and_never_a_slower_one_than_dense():
    csr = MeasuredCosts(table_of(), 64, form="csr")
    assert of(csr.pruned(HEADER, BASE, [0.8] * 6), 2) == DENSE["mlp"]
    assert of(csr.pruned(HEADER, BASE, [0.7] * 6), 1) == DENSE["attention"], "below what was measured"
    assert of(csr.pruned(HEADER, BASE, [0.99] * 6), 2) == (150, 210, 90), "above what was measured"
    assert of(MEASURED.pruned(HEADER, BASE, [0.9] * 6), 2) == (30, 60, 90)


def test_frozen_front_has_a_forward_pass_only():
    costs = MEASURED.frozen(HEADER, BASE, 3, 0.0)
    assert [of(costs, index) for index in range(4)] == [(2, 0, 0), (90, 0, 0), (300, 0, 0), DENSE["attention"]]
    assert costs.activation_bytes[:3] == (0, 0, 0)
    assert costs.activation_bytes[3:] == COMPUTED.activation_bytes[3:]
    cached = MEASURED.frozen(HEADER, BASE, 3, 0.5)
    assert [cached.forward_ns[index] for index in range(4)] == [1, 45, 150, 100]


def test_routed_blocks_have_the_measured_ratios_of_the_layer():
    costs = MEASURED.routed(HEADER, BASE, [1.0, 1.0, 1.0, 0.5, 0.5, 1.0])
    assert of(costs, 2) == DENSE["mlp"]
    assert of(costs, 3) == (50, 120, 30)
    assert of(costs, 4) == (150, 180, 180)


def test_exit_adds_its_cost_for_the_tokens_that_reach_it():
    exits = MeasuredCosts(table_of(), 64, exit_setting={"measure": "softmax"})
    costs = exits.exited(HEADER, BASE, [1.0, 1.0, 1.0, 0.75, 0.5, 1.0], {2: 0.5})
    assert of(costs, 1) == DENSE["attention"]
    assert of(costs, 2) == (300 + 300, 300 + 200, 300 + 100)
    assert of(costs, 3) == (80, 150, 38), "between half of the tokens and all"
    assert of(costs, 4) == (180, 150, 150)
    cheap = MeasuredCosts(table_of(), 64, exit_setting={"measure": "saturation"})
    assert of(cheap.exited(HEADER, BASE, [1.0] * 6, {2: 1.0}), 2) == (320, 310, 300), "an exit saves nothing"


def test_sparse_attention_follows_the_share_of_its_scores():
    costs = MEASURED.sparse(HEADER, BASE, [1.0, 0.25, 0.25, 0.1875, 1.0, 1.0])
    assert of(costs, 1) == (60, 120, 50)
    assert of(costs, 2) == DENSE["mlp"]
    assert of(costs, 3) == (55, 110, 50)
    wide = MEASURED.sparse(HEADER, BASE, [1.0, 0.5, 1.0, 0.01, 1.0, 1.0])
    assert of(wide, 1) == (80, 160, 50), "the line through the last two"
    assert of(wide, 3) == (50, 100, 50)


def test_experts_replace_the_dense_mlp():
    measured = MeasuredCosts(table_of(), 64, experts_per_token=2)
    base = measured.dense(HEADER, COMPUTED)
    assert of(base, 2) == (600, 610, 620)
    costs = measured.experts(HEADER, base, [0.0, 0.5, 0.5, 0.0, 0.1, 0.5])
    assert [of(costs, index) for index in (1, 2, 4)] == [DENSE["attention"], (900, 915, 930), (660, 671, 682)]


def test_head_in_shards_has_the_time_of_the_whole_head():
    header, computed = built(shards=2)
    costs = MEASURED.dense(header, computed)
    assert costs.vocabulary.forward_ns + costs.vocabulary.weight_ns == sum(DENSE["head"])
    assert of(costs, 5) == of(computed, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeasuredCosts(table_of(), 128), "sequence lengths 64, not 128"),
        (lambda: MeasuredCosts(table_of([]), 64).pruned(HEADER, BASE, [0.9] * 6), "no row of pruned attention"),
        (
            lambda: MeasuredCosts(table_of(), 64, form="2:4").pruned(HEADER, BASE, [0.9] * 6),
            "no row of pruned attention with 64 tokens, form 2:4",
        ),
        (
            lambda: MeasuredCosts(table_of(), 64, exit_setting={"measure": "x"}).exited(
                HEADER, BASE, [1.0] * 6, {2: 1}
            ),
            "no row of exit mlp with 64 tokens, measure x",
        ),
        (lambda: MeasuredCosts(table_of(), 64, experts_per_token=4).dense(HEADER, COMPUTED), "experts_per_token 4"),
    ],
)
def test_missing_rows_are_refused_with_the_command(make, message):
    with pytest.raises(UsageError, match=message) as error:
        make()
    assert "dynmo-train measure-costs" in str(error.value)
