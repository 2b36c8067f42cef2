"""Data parallelism: the same bits at a fixed number of replicas, on any partition, and one process's figures."""

from __future__ import annotations

import subprocess
from functools import cache

import pytest
from layouts import Layout, play_layouts
from scenario import Scenario
from test_placement import WANDER, cut
from whole_runs import figures, lines, tensors, train, write_data
from workers import run_workers

from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.programs import program_path

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

OVERLAP = {"overlap_reduction": True}
TWO, FOUR = ParallelDims(data=2), ParallelDims(data=2, pipeline=2)


def played(size: int, layouts: list[Layout]) -> list[dict]:
    """What each layout gave, the same in every process."""
    results = run_workers(play_layouts, size, layouts)
    for other in results[1:]:
        assert other == results[0]
    return results[0]


def close(got: list[float], expected: list[float], relative: float = 1e-5) -> None:
    assert got == pytest.approx(expected, rel=relative)


@cache
def one_process(scenario: Scenario) -> dict:
    return played(1, [Layout(dims=ParallelDims(), scenario=scenario)])[0]


def test_replicas_give_the_same_bits_on_any_partition_and_those_of_one_process_nearly():
    alone = one_process(Scenario())
    two, two_overlapped = played(2, [Layout(dims=TWO), Layout(dims=TWO, settings=OVERLAP)])
    assert two == two_overlapped
    close(two["losses"], alone["losses"])
    close(two["norms"], alone["norms"], 1e-4)
    close([two["held_out"]], [alone["held_out"]])
    looped = Scenario(schedule="interleaved-1f1b", virtual=2, moves=((6, cut(2, 1, 5, 8)), (11, cut(2, 3, 4, 7))))
    scenarios = [
        Scenario(moves=WANDER),
        Scenario(schedule="gpipe", recompute=True),
        Scenario(schedule="zero-bubble", moves=WANDER),
        looped,
    ]
    layouts = [Layout(dims=FOUR, scenario=each, settings=OVERLAP) for each in scenarios]
    for got in played(4, [Layout(dims=FOUR), *layouts]):
        assert got == two


def test_a_run_of_replicas_saves_goes_on_and_is_profiled(tmp_path):
    """From the command line: whole, stopped and gone on with a pipeline, and gone on with one process."""
    data = write_data(tmp_path / "data")
    whole, stopped, child = (tmp_path / name for name in ("whole", "stopped", "child"))
    train(data, whole, 2, pipeline_model_parallel_size="1")
    train(data, stopped, 2, pipeline_model_parallel_size="1", exit_interval="11", DDP_impl="torch")
    train(data, stopped, 4, pipeline_model_parallel_size="2", load=str(stopped))
    assert figures(stopped) == figures(whole)
    assert tensors(stopped, 24) == tensors(whole, 24)
    train(data, child, 1, load=str(stopped / "checkpoints" / "step-00000011"))
    for step, (loss, _) in figures(child).items():
        close([loss], [figures(whole)[step][0]])
    header = [line for line in lines(stopped / "profile.jsonl") if line["record"] == "header"][-1]
    assert header["data_parallel_size"] == 2
    assert [worker["ranks"] for worker in header["workers"]] == [[0, 1], [2, 3]]
    step = [line for line in lines(stopped / "profile.jsonl") if line["record"] == "step"][-1]
    assert len(step["busy_ns"]) == 2
    assert min(step["forward_ns"]) > 0
    verify(stopped)


def verify(run):
    """Every checkpoint passes the owner's full check."""
    for path in sorted((run / "checkpoints").glob("step-*")):
        command = [program_path("dynmo-ckpt"), "verify", str(path), "--level", "full"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


T2, TP, TD = ParallelDims(tensor=2), ParallelDims(tensor=2, pipeline=2), ParallelDims(tensor=2, data=2)
CUT = {"sequence_parallel": True}


def test_cut_products_give_one_process_s_figures():
    """Without dropout, whose draws differ by rank, the losses are those of one process; pruned and frozen on the way."""
    plain = Scenario(dropout=0.0)
    alone = one_process(plain)
    for got in played(2, [Layout(dims=T2, scenario=plain), Layout(dims=T2, scenario=plain, settings=CUT)]):
        close(got["losses"], alone["losses"])
        close(got["norms"], alone["norms"], 1e-4)
        close([got["held_out"]], [alone["held_out"]])


def test_cut_products_give_the_same_bits_on_any_partition():
    for settings in ({}, CUT):
        two = played(2, [Layout(dims=T2, settings=settings)])[0]
        scenarios = [
            Scenario(moves=WANDER),
            Scenario(schedule="gpipe", recompute=True),
            Scenario(schedule="zero-bubble", moves=WANDER),
        ]
        for got in played(4, [Layout(dims=TP, scenario=each, settings=settings) for each in scenarios]):
            assert got == two
