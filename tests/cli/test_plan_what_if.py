"""``dynmo-plan what-if`` and ``repack``: other numbers of workers, schedules, dynamics and speeds than the run had."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tests.cli.cli_files import EVENTS
from tests.tables import table


def test_what_if_prints_the_grid(plan):
    code, out, err = plan(
        "what-if", EVENTS, "--vary", "stages=1:2", "--vary", "sparsity=0:0.9:0.9", "--vary", "microbatches=8"
    )
    assert code == 0
    assert err == "costs: median of 4 records, steps 1 to 4\n"
    lines = out.splitlines()
    assert [line.split()[:3] for line in lines[2:6]] == [
        ["1", "8", "0.00"],
        ["1", "8", "0.90"],
        ["2", "8", "0.00"],
        ["2", "8", "0.90"],
    ]
    assert lines[-1].startswith("2 stages, 8 microbatches, 1f1b, sparsity 0.9: no worker can be released")


def test_what_if_reports_workers_to_release(plan):
    code, out, _ = plan("what-if", EVENTS, "--vary", "stages=4", "--format", "json")
    document = json.loads(out)
    assert code == 0
    assert document["rows"][0]["release_from_balanced"] == 1
    assert "release 1 of 4 workers and gain 0.5%" in document["answer"]
    steps = document["rows"][0]
    assert steps["throughput_fraction_from_balanced"] >= 0.95


def test_what_if_marks_infeasible_cells(plan):
    code, out, _ = plan("what-if", EVENTS, "--vary", "stages=1,2", "--memory", "6MB")
    assert code == 0
    assert "infeasible" in out.splitlines()[2]
    assert "infeasible" not in out.splitlines()[3]


@table(
    ("vary", "message"),
    [
        ("layers=1:3", "NAME one of stages"),
        ("stages=1:3:0", "is empty"),
        ("stages=5:3", "is empty"),
        ("stages=1.5", "must be integers"),
        ("stages=a", "must be numbers"),
        ("stages=1:2:3:4", "4 parts"),
        ("stages=0", "at least 1"),
        ("sparsity=1", "within [0, 1)"),
        ("freeze=-0.5", "within [0, 1)"),
        ("stages=1:100000", "at most 10000"),
        ("schedule=1f1b,2f2b", "2f2b must be one of gpipe"),
        ("skew=-1", "must not be negative"),
    ],
)
def test_what_if_invalid_axis_is_refused(plan, vary, message):
    code, out, err = plan("what-if", EVENTS, "--vary", vary)
    assert (code, out) == (2, "")
    assert message in err


def test_repack_names_the_workers_to_release(plan, tmp_path):
    output = tmp_path / "plan.json"
    code, out, _ = plan("repack", EVENTS, "--stages", "4", "--reference", "static", "-o", output)
    assert code == 0
    document = json.loads(output.read_text())
    assert document["released_workers"] == [2, 3]
    assert "release workers 2, 3" in out
    assert [stage["worker"] for stage in document["stages"]] == [0, 1]


def test_repack_without_a_worker_to_spare_exits_4(plan):
    code, out, err = plan("repack", EVENTS, "--keep", "1.0")
    assert code == 4
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["1", "2"]  # the table that shows why
    assert "2 of 2 workers keep 100.0% of the balanced throughput" in out
    assert "all 2 workers are needed to keep 100% of the throughput" in err
    assert plan("repack", EVENTS, "--reference", "mine")[0] == 2
    code, out, err = plan("repack", EVENTS, "--keep", "1.0", "--format", "json")
    assert (code, out) == (4, "")


@pytest.mark.parametrize(("schedule", "turn"), [("interleaved-1f1b", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])])
def test_repack_keeps_the_stages_per_worker(plan, run_of, tmp_path, schedule, turn):
    profile, output = run_of(schedule), tmp_path / "plan.json"
    options = ("--granularity", "sublayer", "--stages", "3", "--microbatches", "12", "--keep", "0.6")
    code, out, _ = plan("repack", profile, *options, "-o", output)
    document = json.loads(output.read_text())
    assert code == 0
    assert "2 of 3 workers keep" in out
    assert (document["schedule"], document["virtual_stages_per_worker"]) == (schedule, 2)
    assert [stage["worker"] for stage in document["stages"]] == turn
    assert document["released_workers"] == [2]
    checks = ("--granularity", "sublayer", "--microbatches", "12")
    assert plan("verify", output, "--profile", profile, *checks)[0] == 0


def test_repack_lists_impossible_numbers_of_workers(plan, run_of):
    options = ("--granularity", "sublayer", "--stages", "3", "--microbatches", "9")
    reason = "2 workers: 9 microbatches do not divide into 4 equal rounds on 2 workers; use a multiple of 2"
    code, out, _ = plan("repack", run_of("interleaved-1f1b"), *options, "--keep", "0.2")
    assert code == 0
    assert reason in out
    code, out, _ = plan("repack", run_of("interleaved-1f1b"), *options, "--keep", "1.0")
    assert code == 4
    assert reason in out
    code, _, err = plan("repack", run_of("zb-v"), "--stages", "9")
    assert code == 2
    assert "18 stages of at least 1 units need 18 units, but the model has 6; use fewer stages" in err


def test_what_if_varies_schedules_and_dynamics(plan):
    vary = ("--vary", "schedule=gpipe,1f1b", "--vary", "skew=0,2", "--vary", "exit=0,3", "--vary", "freeze=0,0.5")
    code, out, _ = plan("what-if", EVENTS, *vary, "--format", "json")
    rows = {tuple(row[name] for name in ("schedule", "skew", "exit", "freeze")): row for row in json.loads(out)["rows"]}
    assert code == 0
    assert len(rows) == 16
    plain = rows["1f1b", 0.0, 0.0, 0.0]["step_ns"]
    assert rows["1f1b", 2.0, 0.0, 0.0]["step_ns"] > plain
    assert rows["1f1b", 0.0, 3.0, 0.0]["step_ns"] < plain
    assert rows["1f1b", 0.0, 0.0, 0.5]["step_ns"] < plain
    assert rows["gpipe", 0.0, 0.0, 0.0]["peak_memory_bytes"] >= rows["1f1b", 0.0, 0.0, 0.0]["peak_memory_bytes"]


def test_what_if_front_shows_pareto_cells(plan):
    options = ("--vary", "stages=1:4", "--vary", "microbatches=2,8", "--format", "json")
    every = json.loads(plan("what-if", EVENTS, *options)[1])["rows"]
    front = json.loads(plan("what-if", EVENTS, *options, "--front")[1])["rows"]
    assert 0 < len(front) < len(every)
    measures = [(-row["samples_per_s"], row["stages"], row["peak_memory_bytes"]) for row in every]
    for row, mine in zip(every, measures, strict=True):
        beaten = any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in measures)
        assert row["pareto"] != beaten


def test_what_if_speed_slows_the_last_worker(plan, tmp_path):
    picture = tmp_path / "grid.svg"
    grid = ("--vary", "speed=0.5:1:0.25", "--vary", "stages=2", "--granularity", "sublayer")
    code, out, _ = plan("what-if", EVENTS, *grid, "--svg", picture, "--format", "json")
    assert code == 0
    rows = json.loads(out)["rows"]
    steps = [row["step_ns"] for row in rows]
    assert steps == sorted(steps, reverse=True)
    assert rows[0]["static_step_ns"] > 1.5 * rows[-1]["static_step_ns"]  # the even split waits for the slow one
    drawn = ElementTree.fromstring(picture.read_text())
    assert sum(element.tag.endswith("circle") for element in drawn.iter()) == 3
    assert plan("what-if", EVENTS, "--vary", "speed=0")[::2] == (
        2,
        "costs: median of 1 records, steps 9 to 9\ndynmo-plan: error: speed must be above 0, is 0\n",
    )


def test_what_if_svg_without_feasible_cell_is_refused(plan, tmp_path):
    code, _, err = plan("what-if", EVENTS, "--vary", "stages=90", "--svg", tmp_path / "grid.svg")
    assert code == 2
    assert "feasible partition to draw" in err
    assert not (tmp_path / "grid.svg").exists()
