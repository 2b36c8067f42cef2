"""Values that a run derives from its configuration."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dynmo_train.formats.plan as plans
from dynmo_train.config import DefaultContext, config_of
from dynmo_train.models.flops import attention_windows
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.models.registry import family_of
from dynmo_train.trainer.settings_from_config import (
    analytic_keys_of,
    dense_experts_warning,
    dense_products_warning,
    flops_counter,
    plan_problems,
    sparse_attention_warning,
)
from tests.tables import table
from tests.unit.dynmo_train.config.small_config import SMALL


def model_flops(**options):
    config = config_of(**SMALL | {"num_experts": 4, "moe_router_topk": 2} | options)
    return flops_counter(config, family_of(config))(1, 32)


@pytest.mark.parametrize(("factor", "share"), [(0.25, 0.25), (1.0, 1.0), (2.0, 1.0)])
def test_model_flops_count_the_tokens_within_the_capacity(factor, share):
    both, one = (model_flops(moe_router_topk=number, moe_router_pre_softmax=True) for number in (2, 1))
    experts = 2 * (both - one)
    assert model_flops(moe_expert_capacity_factor=factor) == pytest.approx(both - experts * (1 - share), rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "sparsity", "device", "names"),
    [
        ("unstructured", 0.9, "cpu", None),
        ("unstructured", 0.8, "cpu", ["from 0.85", "--pruning-mode block from 0.6"]),
        ("unstructured", 0.9, "cuda", ["from 0.98", "--pruning-mode block from 0.7", "2:4-transposable from 0.5"]),
        ("block", 0.65, "cpu", None),
        ("block", 0.65, "cuda", ["from 0.7"]),
        ("2:4", 0.5, "cpu", ["do not exist", "--pruning-mode block from 0.6"]),
        ("2:4", 0.5, "cuda", None),
        ("structured", 0.1, "cpu", None),
    ],
)
def test_pruned_run_with_dense_products_names_faster_formats(mode, sparsity, device, names):
    config = config_of(**SMALL | {"sparsify": True, "pruning_mode": mode, "final_sparsity": sparsity})
    warning = dense_products_warning(config, SparseTable(), device)
    if names is None:
        assert warning is None
        return
    assert warning is not None
    for name in names:
        assert name in warning


EXPERTS = {"num_experts": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"sparsify": True, "moe_expert_slots": 3}, True),
        ({"sparsify": True}, False),
        ({"moe_expert_slots": 3}, False),
        ({"sparsify": True, "moe_expert_slots": 4, "expert_model_parallel_size": 1}, False),
    ],
)
def test_run_with_slots_states_that_pruned_experts_run_dense(options, warns):
    config = config_of(DefaultContext(world_size=2), **SMALL | EXPERTS | options)
    warning = dense_experts_warning(config)
    assert (warning is not None) is warns
    assert not warns or "pruned experts run dense with --moe-expert-slots" in (warning or "")


@table(
    ("ranks", "slots", "message"),
    [
        ([0, 1, 0, 1], None, None),
        ([0, 1, 0, 0], None, "the same number of its 4 experts"),
        ([[0, 1], [1, 0], 0, 1], None, "requires --moe-expert-slots"),
        ([[0, 1], 1, 0, [1, 0]], 3, None),
        ([0, 0, 0, 1], 3, None),
        ([0, 0, 0, 0], 3, "a rank has 4 experts and copies; --moe-expert-slots is 3"),
        ([[0, 0], 1, 0, 1], 3, "different ones of 2 ranks"),
        ([[0, 2], 1, 0, 1], 3, "different ones of 2 ranks"),
        ([0, 1, 0], 3, "a rank to each of its 4 experts"),
    ],
)
def test_plan_places_experts_within_the_slots_of_the_run(ranks, slots, message):
    config = config_of(DefaultContext(world_size=2), **SMALL | EXPERTS | {"moe_expert_slots": slots})
    family = family_of(config)
    stages = [[item.name for item in family.items]]
    document = plans.initial_plan(
        run_id="r", stages=stages, stage_workers=[0], schedule="1f1b", virtual_stages_per_worker=1
    )
    document |= {"plan_id": 1, "base_plan_id": 0, "x_experts": {"layers": [{"item": "layers.0.mlp", "ranks": ranks}]}}
    plan = plans.parse_plan(document | {"balancer": "exact"}, "p")
    found = plan_problems(plan, config, family, run_id="r", active_plan_id=0, active_stages=stages, workers=[0])
    messages = [each.message for each in found if each.path == "x_experts"]
    assert len(messages) == (message is not None)
    assert message is None or message in messages[0]


@pytest.mark.parametrize(
    ("tokens", "buckets", "device", "names"),
    [
        (511, 16, "cpu", "--seq-length 511: below 512 tokens"),
        (512, 2, "cpu", "--sparse-attention-buckets 2 on cpu; faster than dense attention: 4 or more"),
        (512, 4, "cpu", None),
        (64, 2, "cuda", None),
    ],
)
def test_sparse_attention_that_is_slower_than_dense_names_what_is_faster(tokens, buckets, device, names):
    options = {"seq_length": tokens, "max_position_embeddings": tokens}
    sparse = {"sparse_attention": True, "sparse_attention_buckets": buckets}
    warning = sparse_attention_warning(config_of(**SMALL | options | sparse), device)
    assert warning is None if names is None else names in (warning or "")
    assert sparse_attention_warning(config_of(**SMALL | options), device) is None


def test_model_flops_of_a_window_count_its_keys_only():
    width, layers = SMALL["hidden_size"], SMALL["num_layers"]
    whole, wide, narrow = (model_flops(attention_window=window) for window in (None, 64, 8))
    assert wide == whole
    assert whole - narrow == 32 * 12 * layers * (32 - 8) * width


def counted_flops(config, tokens):
    """Three times what torch counts in the forward of the blocks, and what the run states for the model."""
    family, device = family_of(config), torch.device("cpu")
    blocks = [family.build(item.name, device).train() for item in family.items if item.layer.startswith("layers.")]
    x = torch.randn(1, tokens, config.model.hidden_size)
    # The other kernels of attention on CPUs are not counted.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        for block in blocks:
            block(x)
    return 3 * counted.get_total_flops(), flops_counter(config, family)(1, tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_channels": 4},
        {"kv_channels": 24},
        {"family": "llama", "kv_channels": 24, "num_query_groups": 2},
        {"mod_capacity": 0.25, "mod_every": 2},
        {"mod_capacity": 0.3, "mod_every": 1, "kv_channels": 24},
    ],
)
def test_model_flops_grow_by_what_torch_counts(options):
    plain = SMALL | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "family": options.get("family", "gpt")}
    (by_torch, ours), (more_by_torch, more) = (counted_flops(config_of(**plain | each), 32) for each in ({}, options))
    assert more - ours == more_by_torch - by_torch != 0


def test_model_flops_of_latents_have_the_mean_of_both_widths():
    latent = {"family": "llama", "multi_latent_attention": True, "kv_lora_rank": 8, "qk_pos_emb_head_dim": 4}
    odd, even = (model_flops(**latent, qk_head_dim=8, v_head_dim=width) for width in (7, 8))
    heads, layers, hidden = SMALL["num_attention_heads"], SMALL["num_layers"], SMALL["hidden_size"]
    # A value more in each head: half of it in the two products, a row of the up and a column of the output projection.
    assert even - odd == 32 * layers * heads * (12 * 32 // 2 + 6 * (8 + hidden))


def test_windows_of_some_layers_are_those_of_their_items():
    """The model states none then; FLOPs count the keys of each layer."""
    own = {"family": "llama", "attention_window": 8, "layer_types": "sliding,full"}
    assert "x_attention_window" not in analytic_keys_of(config_of(**SMALL, **own))[0]
    assert attention_windows(family_of(config_of(**SMALL, **own))) == {
        f"layers.{at}.attention": (8, None)[at % 2] for at in range(SMALL["num_layers"])
    }
    whole, narrow, some = (
        model_flops(family="llama", **each)
        for each in ({}, {"attention_window": 8}, {k: v for k, v in own.items() if k != "family"})
    )
    sliding = (SMALL["num_layers"] + 1) // 2
    assert (whole - some) * SMALL["num_layers"] == (whole - narrow) * sliding


def test_profile_keys_state_window_and_context_ranks():
    plain = analytic_keys_of(config_of(**SMALL))
    assert plain == ({"x_num_attention_heads": 4, "x_key_value_width": 128}, {})
    options = {"attention_window": 8, "context_parallel_size": 2, "family": "llama", "num_query_groups": 2}
    keys = analytic_keys_of(config_of(DefaultContext(world_size=2), **SMALL | options))
    model = {"x_num_attention_heads": 4, "x_key_value_width": 64, "x_attention_window": 8}
    assert keys == (model, {"x_context_parallel_size": 2})
