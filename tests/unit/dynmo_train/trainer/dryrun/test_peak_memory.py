"""The dry run: activations as the profiler measures them, parameters of known models, the command."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dynmo_train.cli import app
from dynmo_train.config import DefaultContext, config_of
from dynmo_train.config.resolve import DRY_RUN_VALUES, dry_run_processes, dry_run_values
from dynmo_train.models.attention.eager_attention import CHUNK_SCORES, eager_attention
from dynmo_train.models.layer_list import BoundaryShape, ItemSpec
from dynmo_train.models.registry import boundary_of, family_of
from dynmo_train.parallel.device_clock import CpuClock
from dynmo_train.parallel.random_stream import ItemStream, drawing_from
from dynmo_train.pipeline.profiler import LayerProfiler
from dynmo_train.trainer.dryrun.item_memory import ItemMemory, item_memory, single_bytes, transient_bytes
from dynmo_train.trainer.dryrun.peak_memory import item_memories, recompute_runner
from dynmo_train.trainer.dryrun.report import dry_run, profile_header_of_run

SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 100,
    "micro_batch_size": 2,
    "train_iters": 5,
    "lr": 0.1,
    "data_path": "d",
}


SHARED = {"num_experts": 8, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "global_batch_size": 8}
EXPERT = 2 * 64 * 256 + 256 + 64


def shared_experts(**options):
    return dry_run(config_of(DefaultContext(world_size=2), **SMALL | SHARED | options), "cpu")


@pytest.mark.parametrize(
    ("slots", "options", "num_copies", "weight_bytes"),
    [(4, {}, 0, 4), (6, {}, 2, 4), (100, {}, 4, 4), (6, {"bf16": True}, 2, 2)],
)
def test_peak_memory_counts_copies_of_experts_and_float64_gradients(slots, options, num_copies, weight_bytes):
    """Two layers, four experts of eight on a rank, whose gradients take 8 bytes instead of 4."""
    without, found = shared_experts(**options), shared_experts(moe_expert_slots=slots, **options)
    expected = 2 * EXPERT * (num_copies * (weight_bytes + 8) + 4 * 4)
    assert found.expert_copies_bytes == expected
    assert found.peak_memory_bytes[0] - without.peak_memory_bytes[0] == expected
    assert without.expert_copies_bytes == 0


def test_dry_run_counts_the_experts_of_one_rank():
    whole, part = shared_experts(expert_model_parallel_size=1), shared_experts()
    assert whole.parameters == part.parameters
    assert whole.parameters_per_worker - part.parameters_per_worker == 2 * 4 * EXPERT
    assert whole.step_s == pytest.approx(part.step_s)


@pytest.mark.parametrize("family_name", ["gpt", "llama"])
def test_computed_activations_equal_profiled_ones(family_name):
    """The profiler counts the inputs of an item, the dry run its outputs; the sums over the layer list are equal."""
    config = config_of(**SMALL, family=family_name)
    family, boundary = family_of(config), boundary_of(config)
    rows = torch.Size((2, 32))
    values = {"ids": torch.zeros(rows, dtype=torch.int64), "labels": torch.zeros(rows, dtype=torch.int64)}
    expected = item_memories(config, family, boundary)
    profiler = LayerProfiler(CpuClock(1))
    profiler.begin_step(True, 1)
    for item in family.items:
        module = family.build(item.name, torch.device("cpu")).train()
        read = [torch.randn(boundary.shapes[name], requires_grad=True) for name in item.reads]
        ignored = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        # As a stage runs it: dropout saves a mask of bytes.
        stream = ItemStream(torch.zeros(2, dtype=torch.int64))
        with drawing_from(stream), profiler.saved_tensors(item.name, lambda ignored=ignored: ignored):
            module(*read, *(values[name] for name in item.inputs))
    names = tuple(item.name for item in family.items)
    measured = sum(profiler.measurements().result(names, 1)["activation_bytes"])
    assert sum(memory.saved for memory in expected.values()) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "cap", "dropout", "forward", "backward"),
    [
        (torch.float32, None, 0.0, 2, 4),
        (torch.float32, 50.0, 0.1, 3, 7),
        (torch.bfloat16, 50.0, 0.1, 3, 7),
    ],
)
def test_eager_attention_has_the_tensors_that_its_module_lists(dtype, cap, dropout, forward, backward):
    """In units of the scores of a chunk; queries and keys are small next to them."""

    class Item(nn.Module):
        def forward(self, hidden_BTD):
            x_BHTK = hidden_BTD.unflatten(-1, (8, 16)).transpose(1, 2)
            return eager_attention(x_BHTK, x_BHTK, x_BHTK, causal=True, cap=cap, dropout=dropout).flatten()

    item = ItemSpec(name="a", layer="a", kind="layer", cut_before=True, reads=("hidden",))
    boundary = BoundaryShape(shapes={"hidden": (1, 4096, 128)}, dtype=dtype)
    found = item_memory(item, Item(), boundary, {}, recompute_runner("none"))
    assert forward - 1 < found.forward / (4 * CHUNK_SCORES) < forward + 0.3
    assert backward - 1 < found.backward / (4 * CHUNK_SCORES) < backward + 0.3


def test_transient_memory_of_an_item():
    """A stage of three items, of which the second has the peak in its backward."""
    items = [
        ItemMemory(saved=4, forward=5, backward=6),
        ItemMemory(saved=3, forward=9, backward=20),
        ItemMemory(saved=1, forward=2, backward=3),
    ]
    assert transient_bytes(items) == 4 + 20 - 8
    assert single_bytes(items, [10, 10, 10]) == 4 + 20 + 10
    assert single_bytes(items, [100, 10, 10]) == 120


def test_saved_and_recomputed_products_are_counted():
    """Two matrix products of 8 rows: saved memory, and the peaks within forward and backward."""
    item = ItemSpec(name="two", layer="two", kind="layer", cut_before=True)
    module = nn.Sequential(nn.Linear(4, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    boundary = BoundaryShape(shapes={"hidden": (1, 8, 4)})
    saved = item_memory(item, module, boundary, {}, recompute_runner("none"))
    recomputed = item_memory(item, module, boundary, {}, recompute_runner("full"))
    assert saved.saved == 4 * (8 * 16 + 8 * 4), "the activation behind the ReLU, and the output"
    assert recomputed.saved == 4 * 8 * 4, "the output"
    assert saved.forward == 4 * (2 * 8 * 16), "both sides of the ReLU"
    assert recomputed.backward > saved.saved


def test_peak_memory_depends_on_recomputation_and_stages():
    def peaks(processes: int = 1, **options) -> list[int]:
        config = config_of(DefaultContext(world_size=processes), **SMALL | {"global_batch_size": 8} | options)
        return dry_run(config, "cpu").peak_memory_bytes

    [plain], [full], [low] = peaks(), peaks(recompute_granularity="full"), peaks(bf16=True)
    assert full < plain
    assert low < plain + 2 * 4 * 60_000
    stages = peaks(2, pipeline_model_parallel_size=2)
    assert len(stages) == 2
    assert max(stages) < 1.3 * plain


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"), [({"optimizer": "sgd"}, 4), ({"optimizer": "sgd", "sgd_momentum": 0.0}, 8)]
)
def test_peak_memory_falls_by_the_state_that_an_optimizer_lacks(options, bytes_per_parameter):
    def report(**changes):
        return dry_run(config_of(DefaultContext(world_size=1), **SMALL | {"num_layers": 64} | changes), "cpu")

    adam, other = report(), report(**options)
    saved = adam.peak_memory_bytes[0] - other.peak_memory_bytes[0]
    # Weights of the tied output layer share memory and state with the embedding.
    assert saved == bytes_per_parameter * adam.parameters


@pytest.mark.parametrize("replicas", [8, 512])
def test_peak_memory_of_zero_stages_is_near_the_floor(replicas):
    """Parameters, gradients and moments as in arXiv 1910.02054; activations and the gathers of one item aside."""

    def peak(stage: int) -> int:
        options = {"num_layers": 256, "global_batch_size": 4 * replicas, "recompute_granularity": "full"}
        options |= {"pipeline_model_parallel_size": 1, "zero_stage": stage}
        return dry_run(config_of(DefaultContext(world_size=replicas), **SMALL | options), "cpu").peak_memory_bytes[0]

    count = dry_run(config_of(DefaultContext(world_size=1), **SMALL | {"num_layers": 256}), "cpu").parameters
    sharded, whole = 4 * count / replicas, 4 * count
    # Between two stages nothing else differs: gradients from 1 to 2, gathered parameters from 2 to 3.
    assert peak(1) - peak(2) == pytest.approx(whole - sharded, rel=0.05)
    assert peak(2) - peak(3) == pytest.approx(whole, rel=0.05)


def test_peak_memory_of_hybrid_sharding_is_that_of_its_shards():
    """The activations of a replica do not depend on the number of replicas."""

    def peak(replicas: int, **options: int) -> int:
        options |= {"num_layers": 64, "global_batch_size": 4 * replicas, "pipeline_model_parallel_size": 1}
        return dry_run(config_of(DefaultContext(world_size=replicas), **SMALL | options), "cpu").peak_memory_bytes[0]

    for stage in (1, 2, 3):
        assert peak(16, zero_stage=stage, hsdp=4) == peak(4, zero_stage=stage)


def test_header_counts_the_state_of_muon_by_parameter():
    config = config_of(**SMALL, optimizer="muon")
    adam = {item["name"]: item for item in profile_header_of_run(config_of(**SMALL), family_of(config), {})["items"]}
    muon = {item["name"]: item for item in profile_header_of_run(config, family_of(config), {})["items"]}
    assert muon["embedding"]["optimizer_bytes"] == adam["embedding"]["optimizer_bytes"]
    # One momentum instead of two moments of qkv (64 x 192) and dense (64 x 64).
    saved = 4 * (64 * 192 + 64 * 64)
    assert muon["layers.0.attention"]["optimizer_bytes"] == adam["layers.0.attention"]["optimizer_bytes"] - saved


def test_header_describes_one_tensor_parallel_rank():
    plain = profile_header_of_run(one := config_of(**SMALL), family_of(one), {})
    halved_config = config_of(DefaultContext(world_size=2), **SMALL, tensor_model_parallel_size=2)
    halved = profile_header_of_run(halved_config, family_of(halved_config), {})
    whole = {item["name"]: item["param_count"] for item in plain["items"]}
    half = {item["name"]: item["param_count"] for item in halved["items"]}
    # Of attention: qkv 64 x 192 + 192 and dense 64 x 64 are sharded; the norm (128)
    # and the bias of dense (64) are replicated.
    assert whole["layers.0.attention"] == 64 * 192 + 192 + 64 * 64 + 64 + 128
    assert half["layers.0.attention"] == (64 * 192 + 192 + 64 * 64) // 2 + 64 + 128


def test_dry_run_of_streamed_text_needs_no_other_data():
    assert "data_path" in dry_run_values("gpt", {}, {})
    for flags, file in (({"hf_dataset": "a"}, {}), ({}, {"hf_dataset": "a"})):
        assert "data_path" not in dry_run_values("gpt", flags, file)


def test_dry_run_of_context_ranks_divides_time_and_activations():
    sizes = SMALL | {"seq_length": 512, "max_position_embeddings": 512, "attention_dropout": 0.0}
    # On a GPU launches dominate at this size, which are not divided.
    whole = dry_run(config_of(DefaultContext(world_size=1), **sizes), "cpu")
    halves = dry_run(config_of(DefaultContext(world_size=2), **sizes | {"context_parallel_size": 2}), "cpu")
    assert halves.processes == 2
    assert 0.5 < halves.step_s / whole.step_s < 0.6, "half, and the exchange that nothing hides"
    assert halves.flops_per_step == whole.flops_per_step
    assert halves.peak_memory_bytes[0] < whole.peak_memory_bytes[0]


def test_dry_run_processes_follow_from_the_parallel_sizes():
    assert dry_run_processes({"tensor_model_parallel_size": 8}, {"pipeline_model_parallel_size": 16}) == 128
    assert dry_run_processes({"dry_run_processes": 4, "tensor_model_parallel_size": None}, {}) == 4
    assert set(DRY_RUN_VALUES) <= set(SMALL)


def test_dry_run_of_gpt_345m():
    words = (
        "pretrain gpt --dry-run --dry-run-format json --num-layers 24 --hidden-size 1024 --num-attention-heads 16"
        " --seq-length 1024 --vocab-size 50257 --micro-batch-size 4 --global-batch-size 8 --fp16"
    )
    done = CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["parameters"] == 354_871_296
    assert result["flops_per_step"] == pytest.approx(8 * 2.48e12, rel=0.01)
    # 18 bytes a parameter, and the activations of four samples
    assert result["peak_memory_bytes"][0] > 18 * 354_871_296
    assert result["step_s"] > 0


@pytest.mark.parametrize(("recipe", "parameters"), [("gpt-345m", "354,871,296"), ("llama-2-7b", "6,738,415,616")])
def test_recipe_needs_no_other_options(recipe, parameters):
    family = recipe.partition("-")[0]
    done = CliRunner().invoke(app, ["pretrain", family, "--recipe", recipe, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"parameters: {parameters}" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"family": "bert"},
        {"family": "ict"},
        {"family": "t5", "decoder_seq_length": 16},
        {"family": "t5", "decoder_seq_length": 16, "position_embedding_type": "relative"},
        {"family": "llama", "num_experts": 4, "moe_expert_capacity_factor": 1.0},
        {"num_experts": 4, "moe_routing": "expert-choice"},
    ],
)
def test_item_memory_is_known_for_every_family(options):
    """On one tensor-parallel rank, and less on each of two."""
    one = config_of(**SMALL | options)
    family, whole = family_of(one), item_memories(one, family_of(one), boundary_of(one))
    assert set(whole) == {item.name for item in family.items}
    if options.get("family") == "ict":
        return
    halved = config_of(DefaultContext(world_size=2), **SMALL | options | {"tensor_model_parallel_size": 2})
    parts = item_memories(halved, family_of(halved), boundary_of(halved))
    assert set(parts) == set(whole)
    assert all(parts[name].saved < whole[name].saved for name in whole if name.endswith(("attention", "mlp")))


def test_data_dependent_memory_follows_the_assumptions():
    """BERT's head follows the share of masked tokens; items with unpredictable memory are omitted."""
    few, many = (config_of(**SMALL, family="bert", mask_prob=share) for share in (0.1, 0.9))
    few_bytes, many_bytes = (item_memories(c, family_of(c), boundary_of(c))["head"].saved for c in (few, many))
    assert few_bytes < many_bytes
    balanced = config_of(**SMALL, num_experts=4, moe_routing="balanced")
    memories = item_memories(balanced, family_of(balanced), boundary_of(balanced))
    assert "layers.0.attention" in memories
    assert "layers.0.mlp" not in memories
    assert dry_run(balanced, "cpu").peak_memory_bytes[0] > 0


@pytest.mark.parametrize(("untie", "tensor", "zero"), [(True, 1, 0), (False, 1, 0), (False, 2, 0), (False, 1, 2)])
def test_shards_of_the_vocabulary_leave_the_first_stage(untie, tensor, zero):
    """A table has a million parameters; blocks and messages are small next to it."""
    options = SMALL | {"vocab_size": 16_384, "num_layers": 4, "global_batch_size": 8, "micro_batch_size": 1}
    options |= {"pipeline_model_parallel_size": 4, "untie_embeddings_and_output_weights": untie, "seq_length": 8}
    options |= {"tensor_model_parallel_size": tensor, "zero_stage": zero}
    replicas = 2 if zero else 1
    world = DefaultContext(world_size=4 * tensor * replicas)
    whole, shards = (dry_run(config_of(world, **options | more), "cpu") for more in ({}, {"vocabulary_parallel": 8}))
    # Weight and gradient in float32, and two moments, which replicas share with ZeRO.
    table = (8 + 8 // replicas) * 16_384 * 64 // tensor
    tables = 2 if untie else 1
    share = table * tables / 4
    # Next to a block, as in the second stage of whole tables.
    assert max(shards.peak_memory_bytes) == pytest.approx(share + whole.peak_memory_bytes[1], rel=0.1)
    assert shards.peak_memory_bytes[0] < 0.6 * whole.peak_memory_bytes[0]
    # A first and a last stage with a copy each of a tied table count it once.
    assert shards.parameters == whole.parameters
