"""A checkpoint resumes on any other layout: no state is lost, and training continues as without a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynmo_train.formats.checkpoint import open_checkpoint
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from dynmo_train.pipeline.partition import Partition
from dynmo_train.trainer.checkpoint.async_checkpoint import Checkpointer
from dynmo_train.trainer.checkpoint.engine_checkpoint import save, state_reader
from dynmo_train.trainer.checkpoint.metadata import CheckpointMetadata
from tests.distributed.layouts import (
    CUT,
    D2,
    DE,
    FAMILIES,
    OVERLAP,
    PD,
    PE,
    PLAIN,
    PT,
    TD,
    TE,
    ZERO,
    ZERO_3,
    Layout,
    engine_on,
    play,
)
from tests.distributed.scenario import MICRO_BATCH, MICROBATCHES, batch_of, digest
from tests.distributed.test_placement import cut
from tests.distributed.whole_runs import close_losses, figures, lines, train, verify, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def facts(step: int) -> CheckpointMetadata:
    return CheckpointMetadata(
        run_id="chain",
        step=step,
        consumed_train_samples=step * MICROBATCHES * MICRO_BATCH,
        data=None,
        tokenizer={},
        keep=None,
    )


def whole_state(path: Path) -> dict:
    """The contents of a checkpoint that do not depend on its layout."""
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    state = {name: manifest[name] for name in ("step", "consumed_train_samples", "rng", "dynamic", "x_progress")}
    # What a log line shows after a resume is what was aimed at; the masks are among the tensors.
    state["dynamic"] = {name: each for name, each in state["dynamic"].items() if name != "pruning"}
    steps = manifest["optimizer"]["steps"]
    tensors = {name: digest(tensor) for name, tensor in checkpoint.load(checkpoint.names()).items()}
    return {**state, "steps": dict(sorted(steps.items())), "tensors": dict(sorted(tensors.items()))}


def lost(before: dict, after: dict) -> list[str]:
    """What differs between two states: facts, and tensors by name."""
    names = before["tensors"].keys() | after["tensors"].keys()
    differing = [name for name in sorted(names) if before["tensors"].get(name) != after["tensors"].get(name)]
    return differing + [fact for fact in before if fact != "tensors" and before[fact] != after[fact]]


def chain(world: World, layouts: list[Layout], folder: str) -> list[float]:
    """Train a step on each layout, from the checkpoint of the one before; what is loaded is saved again, the same."""
    losses = []
    last: Path | None = None
    for number, layout in enumerate(layouts, start=1):
        there = set_parallel_dims(world, layout.dims, 60)
        engine = engine_on(there, layout, build=last is None)
        if last is not None:
            checkpoint = open_checkpoint(last)
            read = state_reader(checkpoint, engine.item_store, there)
            engine.restore(read, number - 1, **checkpoint.manifest["x_progress"])
            again = save(engine, Path(folder) / f"again-{number}", facts(number - 1))
            if world.is_rank0:
                assert lost(whole_state(last), whole_state(again)) == [], f"on layout {number}"
        result = engine.train_step(batch_of(number, layout.scenario.model), sampled=False)
        losses.append(result.loss)
        engine.after_step(number)
        last = save(engine, Path(folder), facts(number))
    return losses


EXPERTS = replace(FAMILIES["mixtral"], freeze=())
EVERY_AXIS = [
    Layout(dims=PE, scenario=EXPERTS, settings=ZERO),
    Layout(dims=TE, scenario=EXPERTS, settings=CUT),
    Layout(dims=DE, scenario=EXPERTS, settings=ZERO_3),
    Layout(dims=PT, scenario=replace(EXPERTS, schedule="dualpipe-v", virtual=2), settings=CUT),
    Layout(dims=ParallelDims(pipeline=4), scenario=replace(EXPERTS, schedule="zero-bubble")),
    Layout(dims=TD, scenario=EXPERTS, settings=ZERO | OVERLAP),
    Layout(dims=replace(DE, hsdp=2), scenario=EXPERTS, settings=ZERO_3),
]
DROPPING = replace(PLAIN, dropout=0.1, precision="fp16", steps=6, freeze=())
REPLICAS = [
    Layout(dims=PD, scenario=DROPPING, settings=ZERO_3),
    Layout(dims=PD, scenario=replace(DROPPING, schedule="zero-bubble")),
    Layout(dims=PD, scenario=replace(DROPPING, schedule="interleaved-1f1b", virtual=2), settings=OVERLAP),
    Layout(dims=PD, scenario=replace(DROPPING, schedule="gpipe", recompute=True), settings=ZERO),
    Layout(dims=PD, scenario=replace(DROPPING, schedule="zb-v", virtual=2), settings=ZERO_3),
    Layout(dims=PD, scenario=DROPPING),
]


def test_checkpoint_loads_with_any_axis_changed(tmp_path):
    """Experts, tensor, data, ZeRO and pipeline: moments, steps, ties and samples come along."""
    results = run_workers(chain, 4, EVERY_AXIS, str(tmp_path / "checkpoints"))
    assert all(losses == results[0] for losses in results)
    [whole] = play(1, [Layout(dims=ParallelDims(), scenario=replace(EXPERTS, steps=len(EVERY_AXIS)))])
    assert results[0] == pytest.approx(whole["losses"], rel=1e-5)
    manifest = open_checkpoint(tmp_path / "checkpoints" / "step-00000003").manifest
    assert {name for name in manifest["files"] if "-e" in name} >= {"model-p000-t00-e00.safetensors"}
    verify(tmp_path)


@pytest.mark.complete
def test_resume_with_equal_replicas_has_the_same_bits(tmp_path):
    """With dropout, pruning and a loss scale that falls on the way: random numbers and scale come along too."""
    results = run_workers(chain, 4, REPLICAS, str(tmp_path / "checkpoints"))
    [whole] = play(2, [Layout(dims=D2, scenario=DROPPING)])
    assert results[0] == whole["losses"]
    assert None in whole["norms"], "a step was skipped"
    last = whole_state(tmp_path / "checkpoints" / "step-00000006")
    assert last["tensors"].items() <= {name.removesuffix("@0"): each for name, each in whole["weights"].items()}.items()
    assert last["x_progress"]["loss_scale"]["scale"] < 2.0**24
    verify(tmp_path)


STAGES = [{"zero_stage": stage} for stage in (0, 1, 2, 3)]


def resume_and_move(world: World, settings: dict, folder: str, moves: dict[int, Partition]) -> dict:
    """Resume from a checkpoint of step 2 and train to step 5; moves come before the step by which they are named."""
    layout = Layout(dims=PD, scenario=replace(DROPPING, precision="fp32"), settings=settings)
    there = set_parallel_dims(world, layout.dims, 60)
    engine = engine_on(there, layout)
    for step in (1, 2):
        engine.train_step(batch_of(step), sampled=False)
        engine.after_step(step)
    checkpoint = open_checkpoint(save(engine, Path(folder), facts(2)))
    engine = engine_on(there, layout, build=False)
    engine.restore(state_reader(checkpoint, engine.item_store, there), 2, **checkpoint.manifest["x_progress"])
    losses, moved = [], 0
    for step in (3, 4, 5):
        if step in moves:
            moved += engine.repartition(moves[step]).total_bytes
        losses.append(engine.train_step(batch_of(step), sampled=False).loss)
        engine.after_step(step)
    return {"losses": losses, "moved": moved, "state": whole_state(save(engine, Path(folder) / "moved", facts(5)))}


@pytest.mark.complete
@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_moves_after_a_resume_transfer_sharded_moments(tmp_path, settings):
    """Before the first step on the new rank, where nothing has used the moments, and back after one."""
    moves = {3: cut(2, 2), 4: cut(2, 4), 5: cut(2, 3)}
    staying = run_workers(resume_and_move, 4, settings, str(tmp_path / "staying"), {})[0]
    moving = run_workers(resume_and_move, 4, settings, str(tmp_path / "moving"), moves)[0]
    assert moving["moved"] > 0
    assert moving["losses"] == staying["losses"]
    assert lost(staying["state"], moving["state"]) == []


def prepare_and_save(world: World, layout: Layout, folder: str) -> tuple[int, int, list[str]]:
    """Save asynchronously; numbers of allocated and of used buffers, and the names whose memory differs."""
    there = set_parallel_dims(world, layout.dims, 60)
    engine = engine_on(there, layout)
    engine.train_step(batch_of(1, layout.scenario.model), sampled=False)
    saving = Checkpointer(engine, Path(folder), async_save=True, on_saved=lambda _: None, on_failure=lambda *_: None)
    saving.at_boundary()
    saving.allocation.join()
    prepared = {name: copy.data_ptr() for name, copy in saving.buffers.tensors.items()}
    saving.save(facts(1))
    saving.wait()
    used = {name: copy.data_ptr() for name, copy in saving.buffers.tensors.items()}
    return len(prepared), len(used), [name for name in used if used[name] != prepared.get(name)]


@pytest.mark.complete
@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_host_buffers_are_allocated_as_they_are_saved(tmp_path, settings):
    scenarios = {PD: replace(DROPPING, precision="fp32"), PE: EXPERTS}
    for number, (dims, scenario) in enumerate(scenarios.items()):
        layout = Layout(dims=dims, scenario=scenario, settings=settings)
        for prepared, used, elsewhere in run_workers(prepare_and_save, 4, layout, str(tmp_path / str(number))):
            assert (prepared, elsewhere) == (used, [])


@pytest.mark.complete
def test_resume_of_sharded_experts_on_other_axes_continues_losses(tmp_path):
    """Mixtral with ZeRO and sharded experts, resumed with other sizes of every axis, and last by one process."""
    data = write_data(tmp_path / "data")
    options = {
        "num_experts": "4",
        "moe_aux_loss_coeff": "0.01",
        "attention_dropout": "0",
        "hidden_dropout": "0",
        "make_vocab_size_divisible_by": "64",
        "train_iters": "8",
        "eval_interval": "8",
        "global_batch_size": "8",
    }
    one = options | {"make_vocab_size_divisible_by": "128"}
    cut = {"tensor_model_parallel_size": "2", "pipeline_model_parallel_size": "1"}
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(data, whole, 1, **one)
    experts = {"expert_model_parallel_size": "2", "zero_stage": "2", "exit_interval": "3", **cut}
    train(data, run, 4, "--sequence-parallel", **options | experts)
    train(
        data,
        run,
        2,
        **one,
        load=str(run),
        exit_interval="5",
        pipeline_model_parallel_size="1",
        expert_model_parallel_size="2",
        zero_stage="3",
    )
    train(data, run, 1, **one, load=str(run))
    assert len(figures(run)) == 8
    close_losses(run, whole)
    files = {path.name for path in (run / "checkpoints" / "step-00000003").glob("*.safetensors")}
    assert {
        f"{kind}-p000-t{t:02d}-e{e:02d}.safetensors" for kind in ("model", "optimizer") for t in (0, 1) for e in (0, 1)
    } <= files
    header = next(line for line in lines(run / "profile.jsonl") if line["record"] == "header")
    assert header["expert_parallel_size"] == 2
    verify(run)
