"""The scenario on any layout of processes; many layouts share one set of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dynmo_train.dynamics.pruning import CubicSchedule
from dynmo_train.formats.plan import V_SCHEDULES
from dynmo_train.models.layer_list import has_vocabulary_rows, parameters_of, vocabulary_rows
from dynmo_train.optim.item_state import parameter_of
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, all_gather_objects, set_parallel_dims
from dynmo_train.pipeline.expert_migration import Placements
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.trainer.engine import Engine
from tests.distributed.scenario import MICROBATCHES, Scenario, batch_of, digest
from tests.distributed.workers import run_workers

D2, T2 = ParallelDims(data=2), ParallelDims(tensor=2)
E2 = ParallelDims(data=2, expert=2)
PE, TE, DE = (replace(E2, pipeline=2), replace(E2, tensor=2), replace(E2, data=4))
PD, PT, TD = ParallelDims(pipeline=2, data=2), ParallelDims(pipeline=2, tensor=2), ParallelDims(tensor=2, data=2)
ZERO, ZERO_3 = ({"zero_stage": stage, "zero_sync_microbatches": True} for stage in (2, 3))
ZERO_1 = {"zero_stage": 1}
OVERLAP, CUT = {"overlap_reduction": True}, {"sequence_parallel": True}
BASE = Scenario(steps=7, freeze=((3, 1), (6, 3)))
PLAIN = replace(BASE, dropout=0.0)

FAMILIES = {
    model: Scenario(model=model, steps=5, dropout=0.0, prune=False, freeze=((3, 1),))
    for model in (
        *("llama", "decoder", "capped", "sinks", "deepseek"),
        *("mixtral", "mixtral-padded", "mixtral-dropless", "bert", "t5", "t5-relative"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A scenario, the axes of its processes, and settings of the engine that go over the scenario's."""

    dims: ParallelDims
    scenario: Scenario = field(default_factory=Scenario)
    settings: dict[str, Any] = field(default_factory=dict)
    keeps_values: bool = False  # return the weights, and not their digests alone
    experts: Mapping[int, Placements] = field(default_factory=dict)
    """Step after which experts move, 0 at the start -> item -> rank of each expert, or its ranks."""


def engine_on(world: World, layout: Layout, *, build: bool = True, kind: type[Engine] = Engine) -> Engine:
    sparsity = CubicSchedule(start=2, end=6, every=2, initial=0.0, final=0.9)
    scenario = replace(layout.scenario, sparsity=sparsity)
    family, settings = scenario.family(), scenario.settings()
    boundary = settings.pipeline.boundary
    if layout.settings.get("sequence_parallel"):
        boundary = boundary.cut_along_tokens(world.dims.tensor)
    boundary = boundary.cut_along_tokens(world.dims.context)
    pipeline = replace(settings.pipeline, microbatches=MICROBATCHES // world.dims.replicas, boundary=boundary)
    start = scenario.start or uniform_partition(
        family.items, world.dims.pipeline, scenario.virtual, v_shaped=scenario.schedule in V_SCHEDULES
    )
    engine = kind(family, replace(settings, pipeline=pipeline, **layout.settings), start, world)
    if build:
        engine.build()
    return engine


def play_layouts(world: World, layouts: list[Layout]) -> list[dict[str, Any]]:
    """Train each scenario; figures as all processes have them, and each tensor's digest by (name, shard)."""
    return [_play(set_parallel_dims(world, layout.dims, 60), layout) for layout in layouts]


def _play(world: World, layout: Layout) -> dict[str, Any]:
    scenario = layout.scenario
    engine = engine_on(world, layout)
    moves = dict(scenario.moves)
    if layout.settings.get("zero_stage"):
        num_local = sum(parameter.numel() for _, _, parameter in engine.item_store.parameters())
        shards = world.dims.data / world.dims.hsdp
        part = sum(
            p.numel() / shards * (world.dims.expert if engine.item_store.sharding.is_expert_local(full) else 1)
            for item in engine.local_names
            for full, p in parameters_of(item, engine.item_store.blueprint(item)).items()
        )
        assert num_local == pytest.approx(part, rel=0.1), "each replica holds its part of the rows"
    losses, norms = [], []
    if 0 in layout.experts:
        engine.place_experts(layout.experts[0])
    for step in range(1, scenario.steps + 1):
        result = engine.train_step(batch_of(step, scenario.model), sampled=step % 5 == 0)
        losses.append(result.loss)
        norms.append(result.grad_norm if result.updated else None)
        engine.after_step(step)
        if step in moves:
            engine.repartition(moves[step])
        if step in layout.experts:
            engine.place_experts(layout.experts[step])
    eval_loss = engine.evaluate([batch_of(9999, scenario.model)])
    rows = vocabulary_rows(engine.family)
    own = {
        # Of an uncut table what a checkpoint stores: the true rows.
        f"{name}@{world.tensor_rank}": digest(
            tensor[:rows] if world.dims.tensor == 1 and has_vocabulary_rows(parameter_of(name)) else tensor
        )
        for item in engine.local_names
        for name, tensor in engine.item_store.export_unsharded(item).tensors.items()
    }
    weights: dict[str, str] = {}
    for local in all_gather_objects(world, own):
        for name, value in local.items():
            assert weights.setdefault(name, value) == value, f"replicas differ in {name}"
    result = {"losses": losses, "norms": norms, "eval_loss": eval_loss, "weights": weights}
    if layout.keeps_values:
        result["values"] = {name: p.detach().flatten().tolist() for _, name, p in engine.item_store.parameters()}
    return result


def play(size: int, layouts: list[Layout]) -> list[dict]:
    """What each layout gave, the same in every process."""
    results = run_workers(play_layouts, size, layouts)
    for other in results[1:]:
        assert other == results[0]
    return results[0]


def play_named(size: int, layouts: Mapping[str, Layout]) -> dict[str, dict[str, Any]]:
    """:func:`play` by name."""
    return dict(zip(layouts, play(size, list(layouts.values())), strict=True))


def play_lists(size: int, named: Mapping[str, Sequence[Layout]]) -> dict[str, list[dict[str, Any]]]:
    """:func:`play` of several layouts for each name."""
    results = iter(play(size, [layout for layouts in named.values() for layout in layouts]))
    return {name: [next(results) for _ in layouts] for name, layouts in named.items()}


def close(got: dict, expected: dict, norms: float = 1e-4, losses: float = 1e-5) -> None:
    assert got["losses"] == pytest.approx(expected["losses"], rel=losses)
    assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=losses)
    skipped = [norm is None for norm in expected["norms"]]
    assert [norm is None for norm in got["norms"]] == skipped
    updated = [[norm for norm in each["norms"] if norm is not None] for each in (got, expected)]
    assert updated[0] == pytest.approx(updated[1], rel=norms)
