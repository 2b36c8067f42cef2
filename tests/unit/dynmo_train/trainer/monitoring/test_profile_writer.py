"""Links and items in the profile's header."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dynmo_train.dynamics.technique import Event
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layer_list import BoundaryShape
from dynmo_train.optim.optimizers.adamw import AdamWSettings
from dynmo_train.trainer.monitoring.profile_writer import RunLogger, describe_copies, describe_items, link_from
from dynmo_train.trainer.run_directory import RunDirectory

ADAMW = AdamWSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize(
    ("latency", "payload", "bandwidth"),
    [
        (50_000, 1_050_000, 4_194_304_000),  # 4 MiB in 1 ms beyond the latency
        (900_000, 1_000_000, 8_388_608_000),  # the latency takes nearly all: half of the time is the transfer
        (2_000_000, 1_000_000, 8_388_608_000),
    ],
)
def test_link_from_times_bounds_the_bandwidth(latency, payload, bandwidth):
    link = link_from(1 << 22, latency, payload)
    assert link.bandwidth_bytes_per_s == bandwidth
    assert link.latency_ns == latency


def test_described_items_count_their_parameters():
    shape = GptShape(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=4,
        vocab_size=11,
        padded_vocab_size=16,
    )
    family = Gpt(shape)
    boundary = BoundaryShape.hidden(batch=3, tokens=4, width=8)
    described = describe_items(family, boundary, ADAMW, lambda name: family.build(name, torch.device("meta")))
    infos = {info.name: info for info in described}
    for name, info in infos.items():
        real = sum(p.numel() for p in family.build(name, torch.device("cpu")).parameters())
        assert info.param_count == real
        assert (info.param_bytes, info.gradient_bytes, info.optimizer_bytes) == (4 * real, 4 * real, 8 * real)
    assert infos["layers.0.mlp"].boundary_bytes == 3 * 4 * 8 * 4
    assert infos["head"].boundary_bytes == 4
    assert infos["head"].tied_to == "embedding"


def test_described_copies_are_one_expert_of_a_rank_in_the_compute_dtype():
    shape = GptShape(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=4,
        vocab_size=11,
        padded_vocab_size=16,
        moe=MoeShape(num_experts=4),
    )
    family = Gpt(shape)
    boundary = replace(BoundaryShape.hidden(batch=3, tokens=4, width=8), dtype=torch.bfloat16)

    def build(name):
        return family.build(name, torch.device("meta"))

    # Two linear layers with biases.
    counts = {"layers.0.mlp": 2 * 8 * 32 + 32 + 8}
    described = describe_copies(family, boundary, 3, build)
    assert described == {"slots": 3, "weight_bytes": 2, "param_count": counts}
    assert describe_copies(family, boundary, None, build) is None


def test_event_of_frozen_items_has_last_measured_activations_by_rank(tmp_path):
    logger = RunLogger(RunDirectory(path=tmp_path, run_id="a", segment=0), SimpleNamespace(is_rank0=True))
    event = Event(kind="frozen", step=3, message="frozen", freed_items=("a", "b", "c"))
    logger.log_technique_event(event)

    def costs(items, sizes):
        unmeasured = dict.fromkeys(("forward_ns", "backward_ns", "backward_weight_ns", "busy_ns", "peak_memory_bytes"))
        return unmeasured | {"items": items, "activation_bytes": sizes}

    logger.log_costs(2, 0, 1000, [costs(["a", "b"], [10, 20]), costs(["c", "d"], [40, 80]), costs(["e"], None)])
    logger.log_technique_event(event)
    logger.log_costs(4, 0, 1000, [costs(["a", "b"], [10, None]), costs(["c", "d"], [40, 80])])
    logger.log_technique_event(event)
    logger.log_technique_event(Event(kind="pruned", step=3, message="pruned"))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [each.get("freed_activation_bytes") for each in lines] == [[], [30, 40, 0], [None, 40], None]
