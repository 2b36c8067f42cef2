"""Compression between replicas, the fused sum of tied weights, and all of it together over moves and resume."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynmo_train.optim.compression.lowrank import FactorShape, initial_factor, orthonormalize
from dynmo_train.optim.compression.settings import NO_COMPRESSION, CompressionSettings
from dynmo_train.optim.item_state import memory_name
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, gather_over, set_parallel_dims
from dynmo_train.trainer.engine import Engine
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.plain_stage import PlainEngine
from tests.distributed.scenario import MICRO_BATCH, SHAPE, TOKENS, Scenario, batch_of
from tests.distributed.test_compression import play
from tests.distributed.test_placement import cut, vee
from tests.distributed.whole_runs import figures, lines, tensors, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

FUSED = CompressionSettings(fuse_ties=True)
SGD = CompressionSettings(replica_rank=4, feedback=True)
EVERYTHING = CompressionSettings(
    boundary_rank=4,
    epilogue_only=True,
    feedback=True,
    replica_rank=4,
    replica_warmup_steps=1,
    replica_workers=1,
    fuse_ties=True,
)
BASE = Scenario(steps=3, prune=False, freeze=())
BOTH = ParallelDims(pipeline=2, data=2)
FUSABLE = {
    "1f1b": BASE,
    "both copies on one worker": replace(BASE, schedule="zb-v", virtual=2),
    "moving": replace(BASE, schedule="zb-v", virtual=2, moves=((1, vee(cut(2, 1, 5, 8))),)),
    "frozen front": replace(BASE, freeze=((1, 1),)),
    "t5": replace(BASE, model="t5"),
    "further predictions": replace(BASE, model="deepseek", dropout=0.0),
}


@cache
def fused() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Each of them in two steps and in one."""
    runs = [(Layout(dims=BOTH, scenario=one), kind) for one in FUSABLE.values() for kind in (NO_COMPRESSION, FUSED)]
    results = run_workers(play, 4, runs)[0]
    return dict(zip(FUSABLE, zip(results[::2], results[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", FUSABLE)
def test_fused_exchange_of_tied_gradients_has_the_bits_of_two(name):
    apart, together = fused()[name]
    assert together == apart


def packed_by_hand(world: World, feedback: bool) -> list[float]:
    """Two steps of one item's gradients through the engine, and by the formulas from all replicas' gradients."""
    world = set_parallel_dims(world, ParallelDims(pipeline=1, data=2), 60)
    compression = replace(SGD, feedback=feedback)
    engine = engine_on(world, Layout(dims=world.dims, scenario=BASE, settings={"compression": compression}))
    item, name = "layers.1.mlp", "layers.1.mlp.fc1.weight"
    parameter = engine.item_store.local_parameters(item)[name]
    bias = engine.item_store.local_parameters(item)["layers.1.mlp.fc1.bias"]
    shape = FactorShape.of(parameter.shape, 4)
    factor = initial_factor(shape, world.device, 11, "replicas", name)
    owed = [torch.zeros_like(parameter) for _ in range(2)]
    differences = []
    for step, scale in ((1, 1.0), (2, 4.0)):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + world.rank))
        bias.grad = torch.full_like(bias, world.rank + 1.0)
        gradients = gather_over(world.groups.data, parameter.grad.clone())
        engine.replica_codec.begin_step(step, scale)
        engine.grad_reducer.finish()
        matrices = [g + scale * e for g, e in zip(gradients, owed, strict=True)] if feedback else gradients
        left = factor @ sum(matrices).T
        orthonormalize(left)
        factor = left @ sum(matrices)
        whole = left.T @ factor
        owed = [(matrix - whole / 2) / scale for matrix in matrices]
        differences.append(float((parameter.grad - whole).abs().max() / whole.abs().max()))
        differences.append(float((bias.grad - 3.0).abs().max()))
        if feedback:
            tensor = engine.item_store.memories[item][memory_name(item, "parameter", "fc1.weight", "error")][0]
            differences.append(float((tensor - owed[world.rank]).abs().max()))
        parameter.grad = bias.grad = None
    return differences


@pytest.mark.parametrize("feedback", [True, False])
def test_compressed_sum_and_error_match_the_formulas(feedback):
    for differences in run_workers(packed_by_hand, 2, feedback):
        assert max(differences) < 1e-5


FIRST_ITEMS = {"embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"}
MOVING = ((2, cut(2, 7)),)
KINDS = {
    "whole": (NO_COMPRESSION, {}, BASE),
    "sgd": (replace(SGD, check_ratio=True, check_speed=True), {}, BASE),
    "sgd, overlapped": (replace(SGD, check_ratio=True, check_speed=True), {"overlap_reduction": True}, BASE),
    "warm-up": (replace(SGD, replica_warmup_steps=2), {}, BASE),
    "everything, moving": (replace(EVERYTHING, check_ratio=True), {}, replace(BASE, steps=4, moves=MOVING)),
    "everything again": (replace(EVERYTHING, check_ratio=True), {}, replace(BASE, steps=4, moves=MOVING)),
    "adds its errors": (EVERYTHING, {}, replace(BASE, start=cut(2, 7), moves=((2, cut(2, 5)),))),
    "fp16": (EVERYTHING, {}, replace(BASE, precision="fp16", steps=10)),
    "pruned": (EVERYTHING, {}, replace(BASE, prune=True)),
}


@cache
def packed() -> dict[str, dict[str, Any]]:
    runs = [(Layout(dims=BOTH, scenario=one, settings=more), kind) for kind, more, one in KINDS.values()]
    return dict(zip(KINDS, run_workers(play, 4, runs)[0], strict=True))


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "stats"}


def test_overlapped_reduction_has_the_same_bits():
    assert without_times(packed()["sgd"]) == without_times(packed()["sgd, overlapped"])
    assert without_times(packed()["everything, moving"]) == without_times(packed()["everything again"])
    assert packed()["sgd"]["losses"] != packed()["whole"]["losses"]


def test_warm_up_reduces_uncompressed_gradients():
    whole, warm = packed()["whole"], packed()["warm-up"]
    assert warm["losses"] == whole["losses"]
    assert warm["states"] != whole["states"]
    assert [bool(one[1]) for one in warm["remembered"][0:1]] == [False]


def test_replicas_have_equal_weights_and_their_own_errors():
    for name in ("sgd", "everything, moving", "fp16", "pruned"):
        states = packed()[name]["states"]
        for first, second in ((0, 1), (2, 3)):
            local_state = [
                {key: value for key, value in states[at].items() if not key.endswith(".error")}
                for at in (first, second)
            ]
            shared = [{key: value for key, value in one.items() if ".boundary." not in key} for one in local_state]
            assert shared[0] == shared[1]
        owed = [{value for key, value in states[at].items() if key.endswith(".error")} for at in (0, 1)]
        assert owed[0]
        assert not owed[0] & owed[1]


def test_only_selected_workers_compress():
    stats = packed()["everything, moving"]["stats"]
    items = [set(one["replicas"]) if "replicas" in one else set() for one in stats]
    assert items[0] == set(), "the first step is warm-up"
    # Layer 2 comes to the first worker; of the embedding only the positions, as the tied table is added elsewhere
    assert items[1] == FIRST_ITEMS
    assert items[2] == items[1] | {"layers.2.attention", "layers.2.mlp"}
    speed = packed()["sgd"]["stats"][0]["replicas"]["layers.3.mlp"]
    assert 0 < speed["sent_bytes"] < speed["uncompressed_bytes"]
    assert min(speed["compress_ns"], speed["decompress_ns"]) > 0


def test_error_is_added_where_compression_stops():
    remembered = packed()["adds its errors"]["remembered"]
    name = "layers.2.mlp.memory.parameter.fc1.weight.error"
    holders = [[rank for rank, steps in enumerate(remembered) if name in steps[at]] for at in range(4)]
    # Steps 1 (warm-up), 2, the move to the other worker, 3
    assert holders == [[], [0, 1], [2, 3], []]


def chosen(world: World, compression: CompressionSettings, choice: int | None) -> dict[str, Any]:
    """Three steps; behind the first one it is chosen how many workers compress."""
    engine = engine_on(
        set_parallel_dims(world, BOTH, 60), Layout(dims=BOTH, scenario=BASE, settings={"compression": compression})
    )
    before, results = engine.replica_workers, []
    for step in (1, 2, 3):
        results.append(engine.train_step(batch_of(step), sampled=False))
        if step == 1 and choice is not None:
            engine.choose_replica_workers(choice)
    items = [sorted(one.compression.get("replicas", {})) for one in results]
    return {"losses": [one.loss for one in results], "items": items, "chosen": [before, engine.replica_workers]}


def test_number_of_compressing_workers_can_change_in_a_run():
    given = replace(SGD, check_ratio=True, replica_warmup_steps=1, replica_workers=1)
    choice = replace(given, replica_warmup_steps=0, replica_workers=None, choose_workers=True)
    fixed, auto = run_workers(chosen, 4, given, None)[0], run_workers(chosen, 4, choice, 1)[0]
    assert auto["chosen"] == [None, 1]
    assert fixed["chosen"] == [None, None]
    assert (auto["losses"], auto["items"]) == (fixed["losses"], fixed["items"])
    assert [bool(items) for items in auto["items"]] == [False, True, True]
    assert set(auto["items"][1]) == FIRST_ITEMS


def wire(world: World, compression: CompressionSettings, kind: type[Engine] = Engine) -> list[list[Any]]:
    """What one process hands to torch in two steps: sends, receives and sums, with type and bytes; losses."""
    calls: list[list[Any]] = []
    batched, summed = dist.batch_isend_irecv, dist.all_reduce

    def batch(operations: list[dist.P2POp]) -> Any:
        calls.extend([each.op.__name__, each.peer, each.tensor.nbytes] for each in operations)
        return batched(operations)

    def add(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        calls.append(["all_reduce", 0, tensor.nbytes])
        return summed(tensor, *arguments, **keywords)

    layout = Layout(dims=BOTH, scenario=BASE, settings={"compression": compression})
    engine = engine_on(set_parallel_dims(world, BOTH, 60), layout, kind=kind)
    dist.batch_isend_irecv, dist.all_reduce = batch, add
    try:
        for step in (1, 2):
            loss = engine.train_step(batch_of(step), sampled=False).loss
            calls.append(["loss", loss, 0])
    finally:
        dist.batch_isend_irecv, dist.all_reduce = batched, summed
    return calls


def test_run_without_compression_has_the_same_operations_and_bytes():
    plain = run_workers(wire, 4, NO_COMPRESSION)
    assert run_workers(wire, 4, NO_COMPRESSION, PlainEngine) == plain
    # What a feedback without compression would change is nothing at all
    assert run_workers(wire, 4, CompressionSettings(feedback=True, epilogue_only=True)) == plain
    boundary = MICRO_BATCH * TOKENS * SHAPE.hidden_size * 4
    first, last = plain[0], plain[2]
    assert first.count(["isend", 2, boundary]) > 0
    assert last.count(["isend", 0, boundary]) > 0
    table = SHAPE.padded_vocab_size * SHAPE.hidden_size * 4
    assert first.count(["isend", 2, table]) == 2
    # A bucket an item, and the figures of the step
    assert sum(one[0] == "all_reduce" and one[2] > 1000 for one in first) == 2 * len(FIRST_ITEMS)
    packed = run_workers(wire, 4, EVERYTHING)
    assert sum(one[2] for one in packed[2]) < sum(one[2] for one in last)
    assert packed[2].count(["isend", 0, boundary]) < last.count(["isend", 0, boundary])


FLAGS = [
    *("--inter_grad_comp", "--inter_grad_comp_rank", "4", "--inter_grad_comp_epilogue_only", "--use_error_feedback"),
    *("--grad_comp", "--grad_comp_rank", "4", "--grad_comp_warm_up", "0.2", "--emb_comm_opt"),
    *("--selective_grad_comp", "--selective_grad_comp_way", "1"),
    *("--check_orth_error_acti", "--check_comp_speed", "--check_comp_ratio"),
]


def test_compressed_run_resumes_with_the_same_bits(tmp_path):
    data = write_data(tmp_path / "data")
    options = {
        "train_iters": "8",
        "pipeline_model_parallel_size": "2",
        "freeze_schedule": None,
        "pruning_start_iter": "2",
        "pruning_end_iter": "6",
        "pruning_freq": "2",
        "eval_interval": "8",
        "log_interval": "4",
    }
    train(data, tmp_path / "whole", 4, *FLAGS, **options)
    train(data, tmp_path / "stopped", 4, *FLAGS, exit_interval="4", **options)
    train(data, tmp_path / "stopped", 4, *FLAGS, load=str(tmp_path / "stopped"), **options)
    assert figures(tmp_path / "whole") == figures(tmp_path / "stopped")
    stored = tensors(tmp_path / "whole", 8)
    assert stored == tensors(tmp_path / "stopped", 8)
    assert {name.rpartition(".")[2] for name in stored if ".memory." in name} == {"error", "factor"}
    manifest = json.loads((tmp_path / "whole/checkpoints/step-00000008/manifest.json").read_text())
    shares = manifest["tensors"]["layers.2.attention.memory.boundary.hidden.error"]
    assert (shares["shape"], shares["split_dim"], shares["role"]) == ([2, 2, 32, 32], 0, "buffer")
    records = [line for line in lines(tmp_path / "whole/metrics.jsonl") if "compression" in line]
    boundary = records[-1]["compression"]["boundaries"]["layers.2.attention"]
    assert boundary["sent_bytes"] * 16 == boundary["uncompressed_bytes"] * 3
    assert abs(boundary["error_activation_cosine"]) < 1
    assert json.loads((tmp_path / "whole/run.json").read_text())["engine"]["reproducible"].startswith(
        "bit for bit only for the same sequence of plans"
    )
    # Other numbers of processes take the weights, and begin without memories
    options |= {"load": str(tmp_path / "stopped/checkpoints/step-00000004")}
    train(data, tmp_path / "other", 2, *FLAGS[:4], "--allow-changed-options", **options)
    assert max(figures(tmp_path / "other")) == 8


def test_planner_chooses_compressing_workers_during_training(tmp_path):
    data = write_data(tmp_path / "data")
    steps = "400"
    flags = ("--grad-comp", "--grad-comp-rank", "4", "--selective-grad-comp", "--selective-grad-comp-way", "auto")
    options = {"train_iters": steps, "freeze_schedule": None, "num_layers": "2", "global_batch_size": "4"}
    options["pipeline_model_parallel_size"] = "1"
    train(data, tmp_path / "run", 2, *flags, eval_interval=steps, log_interval=steps, **options)
    [chosen] = [line for line in lines(tmp_path / "run/events.jsonl") if line["kind"] == "selective_grad_comp"]
    assert chosen["workers"] in (0, 1)
    assert "dynmo-plan predicts step times of" in chosen["message"]
    assert 0 < chosen["step"] < int(steps)
