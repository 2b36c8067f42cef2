"""Costs of the shards of an output layer: measured, computed, and in the header of a profile."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.analysis.explain import explain_plan
from dynmo_balance.costs.analytic import costs_of_header
from dynmo_balance.costs.devices import load_device
from dynmo_balance.costs.vocabulary import ShardTimes, measured_times, shard_costs
from dynmo_balance.formats.plan import to_document
from dynmo_balance.formats.profile import parse_profile
from dynmo_balance.formats.profile_records import Step
from dynmo_balance.inputs.analytic_profile import BuildOptions, build_costs, build_header, build_lines, header_of
from dynmo_balance.inputs.model_config import from_config
from dynmo_balance.inputs.scenarios import ScenarioStep
from dynmo_balance.output.tables import shards_sentence
from dynmo_balance.planning.plan_builder import problem_of_run, propose, to_plan

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
H100 = load_device("h100")
OPTIONS = BuildOptions(workers=2, microbatches=8, dtype="float32")
SHARDED = replace(OPTIONS, vocabulary_parallel=4)


def step(number=1, **vocabulary):
    return Step(
        step=number,
        plan_id=0,
        step_ns=1,
        forward_ns=(1,),
        backward_ns=(1,),
        activation_bytes=(1,),
        busy_ns=(1,),
        peak_memory_bytes=(1,),
        x_vocabulary=vocabulary or None,
    )


def built(options=SHARDED, config=LLAMA):
    spec = from_config(config, "config.json")
    document = build_header(spec, H100, options, "run")
    header = header_of(document)
    return spec, document, header, build_costs(spec, header, H100, options)


def test_measured_times_are_medians_over_shards_and_records():
    steps = [
        step(1, forward_ns=[10, 12, 90], backward_ns=[5, 5, 5]),
        step(2, forward_ns=[20, 20, 20], backward_ns=[6, 6, 6]),
        step(3, forward_ns=[14, None, 16], backward_ns=[7, 7, 7]),
        step(4),
    ]
    assert measured_times(steps) == ShardTimes(forward_ns=36, weight_ns=18)
    assert measured_times([step(1)]) is None


def test_header_of_a_sharded_layer_has_its_sizes_and_a_head_without_weight():
    _, document, header, _ = built()
    _, _, whole, _ = built(OPTIONS)
    shards = document["x_vocabulary"]
    assert (shards["param_count"], shards["output_param_count"]) == (128_000, 64_000)
    assert header.items[-1].param_count == whole.items[-1].param_count - 64_000
    assert header.items[0].param_count == whole.items[0].param_count - 64_000 == 0
    assert sum(item.param_count for item in header.items) + 128_000 == sum(item.param_count for item in whole.items)
    assert shards["lookup_bytes"] == 32 * 64 * 4
    # Exponentials of all logits, and three numbers and two rows of each token for each shard.
    assert shards["activation_bytes"] == 32 * (1000 * 4 + 4 * (64 * 4 + 67 * 4))


def test_computed_passes_take_the_time_of_the_whole_layer():
    """Three products of the layer's size, as with one layer; launches and the norm differ."""
    _, _, header, costs = built(replace(SHARDED, sequence=4096), {**LLAMA, "vocab_size": 100_000})
    _, _, _, whole = built(replace(OPTIONS, sequence=4096), {**LLAMA, "vocab_size": 100_000})
    assert costs.vocabulary is not None
    passes = costs.vocabulary.forward_ns + costs.vocabulary.weight_ns
    assert passes + costs.total_ns[-1] == pytest.approx(whole.total_ns[-1], rel=0.02)
    assert costs.vocabulary.forward_ns > costs.vocabulary.weight_ns
    computed = costs_of_header(header, H100, "float32")
    assert computed.vocabulary == costs.vocabulary


def test_profile_with_shards_is_read_back():
    _, document, header, costs = built()
    lines = build_lines(document, header, iter([ScenarioStep(step=1, costs=costs, event=None)]))
    [segment] = parse_profile([json.dumps(line).encode() for line in lines], "profile")
    times = measured_times(segment.steps)
    assert times is not None
    assert times.forward_ns == pytest.approx(costs.vocabulary.forward_ns, abs=4)


def test_shard_costs_include_the_messages_of_a_microbatch():
    _, _, header, costs = built()
    found = shard_costs(header, costs.vocabulary)
    assert found is not None
    assert (found.stream_bytes, found.part_bytes, found.sums_bytes) == (8192, 8192 + 32 * 67 * 4, 128)
    assert found.static_bytes == 128_000 * 16
    assert found.lookup_bytes == 8192
    earlier = {name: value for name, value in header.x_vocabulary.items() if name != "lookup_bytes"}
    assert shard_costs(replace(header, x_vocabulary=earlier), costs.vocabulary).lookup_bytes == 0
    _, _, cut, _ = built(replace(SHARDED, tensor_parallel=2))
    assert shard_costs(cut, None).static_bytes == 64_000 * 16
    # The table of a tied model is in the shards once.
    _, _, tied, _ = built(config={**LLAMA, "tie_word_embeddings": True})
    assert shard_costs(tied, None).static_bytes == 64_000 * 16


@pytest.mark.parametrize("wrong", [{"shards": 0}, {"param_bytes": None}, {"gradient_bytes": "x"}, {"shards": True}])
def test_invalid_sizes_of_shards_are_refused(wrong):
    _, _, header, _ = built()
    broken = replace(header, x_vocabulary={**header.x_vocabulary, **wrong})
    with pytest.raises(UsageError, match="x_vocabulary must have shards"):
        shard_costs(broken, None)


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (replace(SHARDED, workers=8), LLAMA, "at least the 8 workers"),
        (replace(SHARDED, vocabulary_parallel=1001), LLAMA, "at most the 1,000 tokens"),
    ],
)
def test_shards_that_the_trainer_refuses_are_refused(options, config, message):
    with pytest.raises(UsageError, match=message):
        built(options, config)


def test_plan_and_explanation_state_where_the_shards_are():
    _, _, header, costs = built()
    problem = problem_of_run(header, costs)
    proposal = propose(problem, "exact")
    plan = to_plan(
        proposal, run_id="run", balancer="exact", base=None, read_to_step=0, base_step_ns=None, reason="a test"
    )
    assert to_document(plan)["x_vocabulary"] == {"shards_per_worker": [2, 2]}
    assert shards_sentence(problem).startswith("output layer: 4 shards, 2 on each worker, on which they add ")
    [sentence] = [s for s in explain_plan(header, problem, proposal.solution, proposal.timeline) if "shards" in s]
    assert sentence.startswith("The output layer is outside of the stages: its 4 shards are on all workers")
    _, _, whole, plain = built(OPTIONS)
    assert shards_sentence(problem_of_run(whole, plain)) is None
