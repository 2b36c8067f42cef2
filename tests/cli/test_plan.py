"""The commands of ``dynmo-plan``: whole output, exit codes, every kind of bad input."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dynmo_balance import cli
from dynmo_balance.options import Balancer, Policy, Schedule
from dynmo_balance.partition import BALANCERS
from dynmo_balance.policies import POLICIES
from dynmo_balance.schedules import SCHEDULES

CONTRACTS = Path(__file__).parents[1] / "contracts" / "fixtures"
EVENTS = CONTRACTS / "profile/valid/events.jsonl"


@pytest.fixture
def plan(monkeypatch, capfd):
    """Runs a command in this process: exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dynmo-plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capfd.readouterr()
        return stop.value.code, captured.out, captured.err

    return run


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "plans").mkdir()
    shutil.copy(EVENTS, tmp_path / "profile.jsonl")
    shutil.copy(CONTRACTS / "plan/valid/initial.json", tmp_path / "plans/plan-000000.json")
    return tmp_path


def test_help_is_instant():
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "dynmo_balance", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3  # processor time: the wall clock of a busy machine says nothing


def test_choices_match_the_registries():
    assert {balancer.value for balancer in Balancer} == set(BALANCERS)
    assert {policy.value for policy in Policy} == set(POLICIES)
    assert {schedule.value for schedule in Schedule} == set(SCHEDULES)


def test_partition(plan):
    code, out, err = plan("partition", EVENTS, "--granularity", "sublayer")
    assert (code, err) == (0, "")
    assert out == (
        "1f1b, 8 microbatches\n"
        "  stage  worker  items                                ms/microbatch   busy  memory  limit\n"
        "      0       0  embedding .. layers.3.attention (8)          4.700  89.0%  8.4 MB      -\n"
        "      1       1  layers.3.mlp .. head (2)                     4.500  85.2%  1.4 MB      -\n"
        "objective: least simulated step | step 42.24 ms, lower bound 36.80 ms, optimal: not proven\n"
        "bottleneck 4.700 ms; the least possible is 4.700 ms; layers.3.attention .. head (3) forbids less\n"
        "predicted step 42.24 ms, bubble 12.9%; uniform 55.49 ms: 1.31 x\n"
    )


def test_partition_writes_a_plan_that_verifies(plan, run_dir):
    output = run_dir / "plan.json"
    code, out, err = plan("partition", run_dir / "profile.jsonl", "-o", output, "--format", "json")
    assert code == 0
    assert json.loads(out) == json.loads(output.read_text())
    assert err == f"wrote {output}\n"
    assert plan("verify", output, "--profile", run_dir) == (
        0,
        f"{output}: every number holds, with layer granularity, 8 microbatches, at least 1 unit a stage\n",
        "",
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("predicted", "step_ns"), 1),
        (("predicted", "bottleneck_ns"), 1),
        (("predicted", "busy_ns"), [1, 1]),
        (("predicted", "bubble_fraction"), 0.9),
        (("optimality", "lower_bound_ns"), 10**9),
        (("optimality", "optimal"), False),
    ],
)
def test_verify_finds_a_wrong_number(plan, tmp_path, path, value):
    output = tmp_path / "plan.json"
    plan("partition", EVENTS, "-o", output)
    document = json.loads(output.read_text())
    document[path[0]][path[1]] = value
    output.write_text(json.dumps(document))
    code, _, err = plan("verify", output, "--profile", EVENTS)
    assert code == 1
    assert ".".join(path) in err


def test_verify_checks_the_migration(plan, tmp_path):
    output, initial = tmp_path / "plan.json", CONTRACTS / "plan/valid/initial.json"
    assert plan("partition", EVENTS, "--current", initial, "-o", output)[0] == 0
    assert plan("verify", output, "--profile", EVENTS, "--base", initial)[0] == 0
    document = json.loads(output.read_text())
    document["migration"]["bytes"] += 1
    output.write_text(json.dumps(document))
    code, _, err = plan("verify", output, "--profile", EVENTS, "--base", initial)
    assert code == 1
    assert "migration.bytes: is 1440001, recomputed 1440000 [value]" in err


def test_ties_go_to_the_given_plan(plan):
    code, out, _ = plan(
        "partition",
        EVENTS,
        "--current",
        CONTRACTS / "plan/valid/move.json",
        "--format",
        "json",
        "--objective",
        "bottleneck",
    )
    assert code == 0
    assert json.loads(out)["migration"]["moves"] == []
    assert json.loads(out)["base_plan_id"] == 1


def test_compare(plan):
    code, out, _ = plan("compare", EVENTS)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(BALANCERS)
    code, out, _ = plan("compare", EVENTS, "--format", "json")
    rows = json.loads(out)
    assert min(row["gap"] for row in rows) == 0
    assert rows[0]["boundaries"] == [0, 7, 10]


def test_simulate(plan):
    code, out, _ = plan("simulate", EVENTS, "--width", "40")
    assert code == 0
    assert out.splitlines()[-2:] == [
        "   0 |FFFFFF.BFFF.BFFFBFFF.BFFF.FFF.BFFF.....B|",
        "   1 |...FBBBFFBBBFBBBFFBBBFBBBFFBBBFBBBBFBBB.|",
    ]
    code, out, _ = plan("simulate", EVENTS, "--format", "json", "--plan", CONTRACTS / "plan/valid/initial.json")
    document = json.loads(out)
    assert document["step_ns"] == max(span[4] for row in document["spans"] for span in row)
    assert [len(row) for row in document["spans"]] == [8, 16]  # worker 0 is frozen


def test_what_if_table(plan):
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


def test_what_if_says_how_many_workers_to_release(plan):
    code, out, _ = plan("what-if", EVENTS, "--vary", "stages=4", "--format", "json")
    document = json.loads(out)
    assert code == 0
    assert document["rows"][0]["release_from_balanced"] == 1
    assert "release 1 of 4 workers and gain 0.5%" in document["answer"]
    steps = document["rows"][0]
    assert steps["kept_from_balanced"] >= 0.95


def test_what_if_marks_infeasible_cells(plan):
    code, out, _ = plan("what-if", EVENTS, "--vary", "stages=1,2", "--memory", "9MB")
    assert code == 0
    assert "infeasible" in out.splitlines()[2]
    assert "infeasible" not in out.splitlines()[3]


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("layers=1:3", "NAME one of stages"),
        ("stages=1:3:0", "goes nowhere"),
        ("stages=5:3", "goes nowhere"),
        ("stages=1.5", "whole numbers"),
        ("stages=a", "not a list of numbers"),
        ("stages=1:2:3:4", "4 parts"),
        ("stages=0", "at least 1"),
        ("sparsity=1", "within [0, 1)"),
        ("freeze=-0.5", "within [0, 1)"),
        ("stages=1:100000", "at most 10000"),
        ("schedule=1f1b,2f2b", "2f2b is none of gpipe"),
        ("skew=-1", "must not be negative"),
    ],
)
def test_what_if_refuses(plan, vary, message):
    code, out, err = plan("what-if", EVENTS, "--vary", vary)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("objective", ["bottleneck", "simulated"])
def test_partition_compare_and_explain_state_one_objective(plan, objective):
    document = json.loads(plan("partition", EVENTS, "--objective", objective, "--format", "json")[1])
    rows = json.loads(plan("compare", EVENTS, "--objective", objective, "--format", "json")[1])
    words = {"bottleneck": "least bottleneck", "simulated": "least simulated step"}[objective]
    for command in ("partition", "compare", "explain"):
        assert words in plan(command, EVENTS, "--objective", objective)[1]
    exact = next(row for row in rows if row["balancer"] == "exact")
    assert document["optimality"]["objective"] == objective
    assert exact["step_ns"] == document["predicted"]["step_ns"]
    key = "step_ns" if objective == "simulated" else "bottleneck_ns"
    assert all(row["gap"] == pytest.approx(row[key] / exact[key] - 1) for row in rows)


def test_explain(plan):
    code, out, _ = plan("explain", EVENTS)
    assert code == 0
    assert out.splitlines()[0] == "The objective is the least simulated step."
    assert out.splitlines()[1] == (
        "Worker 1 (layers.3.attention to head) is the slowest: 5.100 ms a microbatch, 1.11 x the mean of the workers."
    )
    assert "Cutting inside layers (--granularity sublayer) would make the step 42.24 ms (6.3% less)." in out


def test_explain_of_an_uneven_plan_states_its_gap(plan, tmp_path):
    best = json.loads(plan("partition", EVENTS, "--format", "json")[1])["predicted"]["step_ns"]
    document = json.loads((CONTRACTS / "plan/valid/initial.json").read_text())
    names = [name for stage in document["stages"] for name in stage["items"]]
    for stage, items in zip(document["stages"], (names[:2], names[2:]), strict=True):
        stage["items"] = items
    (tmp_path / "uneven.json").write_text(json.dumps(document))
    code, out, _ = plan("explain", EVENTS, "--plan", tmp_path / "uneven.json")
    assert code == 0
    assert "by the objective this plan is better" not in out
    found = re.search(r"simulated step of (\S+) ms; this plan is (\S+)% above it\.", out)
    assert float(found[1]) == pytest.approx(best / 1e6, abs=0.01)
    assert float(found[2]) > 20


@pytest.mark.parametrize("objective", ["bottleneck", "simulated"])
def test_partition_of_another_balancer_is_measured_by_the_objective(plan, objective):
    options = (EVENTS, "--balancer", "uniform", "--objective", objective)
    document = json.loads(plan("partition", *options, "--format", "json")[1])
    out = plan("partition", *options)[1]
    assert document["optimality"]["objective"] == objective
    assert {"bottleneck": "measured by: bottleneck |", "simulated": "measured by: simulated step |"}[objective] in out
    assert "objective: least" not in out


def test_watch_once(plan, run_dir):
    code, out, err = plan("watch", run_dir, "--once", "--min-records", "1")
    assert (code, out) == (0, "")
    assert "watching" in err


@pytest.mark.parametrize("command", ["partition", "compare", "simulate", "what-if", "explain"])
@pytest.mark.parametrize("fixture", ["newer-version", "negative-time", "no-items"])
def test_a_broken_profile_is_refused_with_its_problems(plan, command, fixture):
    code, out, err = plan(command, CONTRACTS / f"profile/invalid/{fixture}.jsonl")
    assert (code, out) == (2, "")
    assert "line 1" in err or "line 2" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["partition", "compare", "simulate", "what-if", "explain"])
def test_a_profile_without_steps(plan, command):
    code, _, err = plan(command, CONTRACTS / "profile/valid/header-only.jsonl")
    assert code == 2
    assert "no step records to take costs from" in err


def test_an_empty_or_missing_profile(plan, tmp_path):
    (tmp_path / "profile.jsonl").write_text("")
    assert "is empty" in plan("partition", tmp_path)[2]
    code, _, err = plan("partition", tmp_path / "nowhere.jsonl")
    assert code == 2
    assert err == f"dynmo-plan: error: {tmp_path / 'nowhere.jsonl'}: no such file or directory\n"


def test_every_problem_at_once(plan, tmp_path):
    lines = EVENTS.read_text().splitlines()
    first, second = json.loads(lines[1]), json.loads(lines[2])
    first["forward_ns"][0], second["busy_ns"] = -1, [0]
    (tmp_path / "profile.jsonl").write_text("\n".join([lines[0], json.dumps(first), json.dumps(second)]) + "\n")
    code, _, err = plan("partition", tmp_path)
    assert code == 2
    assert "2 problems" in err
    assert "line 2.forward_ns[0]: must be at least 0, is -1 [range]" in err
    assert "line 3.busy_ns: must have 2 elements, has 1 [length]" in err


def test_more_stages_than_layers(plan):
    code, _, err = plan("partition", EVENTS, "--stages", "9")
    assert code == 2
    assert "use fewer stages, --granularity sublayer or --min-layers 0" in err


def test_infeasible_memory_exits_3_and_names_the_limit(plan):
    code, _, err = plan("partition", EVENTS, "--memory", "1MB")
    assert code == 3
    assert "needs" in err
    assert "1,000,000" in err


def test_a_plan_for_another_model(plan, tmp_path):
    document = json.loads((CONTRACTS / "plan/valid/initial.json").read_text())
    document["stages"][1]["items"].pop()
    document["run_id"] = "another"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    code, _, err = plan("simulate", EVENTS, "--plan", tmp_path / "plan.json")
    assert code == 2
    assert "run_id: is 'another', the profile's is 'gpt-small' [reference]" in err
    assert "9 items against 10" in err


@pytest.mark.parametrize("size", ["lots", "12XB", "-5", ""])
def test_sizes_that_are_none(plan, size):
    code, _, err = plan("partition", EVENTS, f"--memory={size}")
    assert code == 2
    assert "is not a size" in err


@pytest.mark.parametrize("pin", ["head", "head:x", "nothing:1"])
def test_pins_that_are_none(plan, pin):
    code, _, err = plan("partition", EVENTS, "--pin", pin)
    assert code == 2
    assert "must be NAME:STAGE" in err


def test_a_pin_is_kept(plan):
    code, out, _ = plan("partition", EVENTS, "--pin", "layers.2.mlp:1", "--format", "json")
    assert code == 0
    assert "layers.2.mlp" in json.loads(out)["stages"][1]["items"]


def test_pin_of_a_layer_pins_all_of_its_items(plan):
    code, out, _ = plan("partition", EVENTS, "--pin", "layers.0:1", "--granularity", "sublayer", "--format", "json")
    assert code == 0
    second = json.loads(out)["stages"][1]["items"]
    assert {"layers.0.attention", "layers.0.mlp"} <= set(second)


def test_contradictory_pins_exit_3_and_name_both(plan):
    code, _, err = plan("partition", EVENTS, "--pin", "head:0", "--pin", "embedding:1")
    assert code == 3
    assert "--pin embedding:1 and --pin head:0 contradict each other" in err


def test_a_pin_to_no_stage(plan):
    code, _, err = plan("partition", EVENTS, "--pin", "head:7")
    assert code == 2
    assert "there are stages 0 to 1" in err


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


@pytest.fixture
def run_of(tmp_path):
    """A profile of a run with two stages a worker, with the schedule that is asked for."""

    def make(schedule):
        records = [json.loads(line) for line in EVENTS.read_text().splitlines()]
        path = tmp_path / "profile.jsonl"
        changes = {"schedule": schedule, "virtual_stages_per_worker": 2}
        lines = (json.dumps({**r, **changes} if r["record"] == "header" else r) + "\n" for r in records)
        path.write_text("".join(lines))
        return path

    return make


@pytest.mark.parametrize(("schedule", "turn"), [("interleaved-1f1b", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])])
def test_repack_keeps_the_stages_a_worker_of_the_run(plan, run_of, tmp_path, schedule, turn):
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


def test_repack_says_which_numbers_of_workers_an_interleaved_run_cannot_have(plan, run_of):
    options = ("--granularity", "sublayer", "--stages", "3", "--microbatches", "9")
    reason = "2 workers: 9 microbatches do not come out even in 4 rounds for 2 workers; use a multiple of 2"
    code, out, _ = plan("repack", run_of("interleaved-1f1b"), *options, "--keep", "0.2")
    assert code == 0
    assert reason in out
    code, out, _ = plan("repack", run_of("interleaved-1f1b"), *options, "--keep", "1.0")
    assert code == 4
    assert reason in out
    code, _, err = plan("repack", run_of("zb-v"), "--stages", "9")
    assert code == 2
    assert "18 stages of at least 1 units need 18 units, the model has 6; use fewer stages" in err


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_gain_is_against_the_base_with_its_own_schedule(plan, run_of, tmp_path, schedule):
    profile, base, output = run_of(schedule), tmp_path / "base.json", tmp_path / "plan.json"
    assert plan("partition", profile, "--balancer", "uniform", "-o", base)[0] == 0
    assert plan("partition", profile, "--schedule", "gpipe", "--current", base, "-o", output)[0] == 0
    before, after = (json.loads(path.read_text())["predicted"] for path in (base, output))
    assert after["gain_fraction"] == round(1 - after["step_ns"] / before["step_ns"], 6)
    assert plan("partition", profile, "--stages", "1", "--current", base, "-o", output)[0] == 0
    assert json.loads(output.read_text())["predicted"]["gain_fraction"] is None


def test_replay_compares_policies_with_hindsight(plan):
    code, out, _ = plan("replay", CONTRACTS / "profile/valid/steps.jsonl", "--format", "json", "--every", "1")
    rows = {row["policy"]: row for row in json.loads(out)}
    assert code == 0
    assert set(rows) == {*POLICIES, "offline optimum"}
    assert rows["never"]["moves"] == 0
    assert rows["offline optimum"]["ratio"] == 1
    assert plan("replay", CONTRACTS / "profile/valid/header-only.jsonl")[0] == 2


def test_export_and_pictures(plan, tmp_path):
    move = CONTRACTS / "plan/valid/move.json"
    assert plan("export", move, "--profile", EVENTS, "--to", "vllm") == (0, "VLLM_PP_LAYER_PARTITION=3,1\n", "")
    code, out, _ = plan("simulate", EVENTS, "--svg", tmp_path / "a.svg", "--trace", tmp_path / "a.json")
    assert code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert "with reductions and the optimizer" in out


def test_slower_communication_takes_longer(plan):
    def step(*options):
        return json.loads(plan("simulate", EVENTS, "--format", "json", *options)[1])

    free = step()["step_ns"]
    assert step("--transfers", "blocking")["step_ns"] > free
    assert step("--optimizer-gbps", "1")["step_with_tail_ns"] > free


def test_partition_searches_schedule_and_granularity(plan, tmp_path):
    output = tmp_path / "plan.json"
    code, _, err = plan("partition", EVENTS, "--schedule", "auto", "--granularity", "auto", "-o", output)
    assert code == 0
    assert "x the bound" in err
    assert "half of it is taken for the weight gradient" in err
    auto = json.loads(output.read_text())["predicted"]["step_ns"]
    alone = json.loads(plan("partition", EVENTS, "--format", "json")[1])["predicted"]["step_ns"]
    assert auto < alone


def test_interleaved_plans_verify(plan, tmp_path):
    output = tmp_path / "plan.json"
    options = ("--schedule", "interleaved-1f1b", "--virtual-stages", "2", "--objective", "bottleneck")
    assert plan("partition", EVENTS, *options, "-o", output)[0] == 0
    assert len(json.loads(output.read_text())["stages"]) == 4
    assert plan("verify", output, "--profile", EVENTS)[0] == 0


def test_report_is_written(plan, run_dir):
    shutil.copy(CONTRACTS / "plan/valid/move.json", run_dir / "plans/plan-000001.json")
    output = run_dir / "report.html"
    code, out, err = plan("report", run_dir, "-o", output)
    assert (code, out) == (0, "")
    assert err == f"wrote {output}: 9 steps, 1 plans, 1 moves\n"
    assert output.read_text().startswith("<!doctype html>")


def test_calibrate_and_import(plan, run_dir):
    code, out, _ = plan("calibrate", run_dir, "--format", "json")
    document = json.loads(out)
    assert code == 0
    assert document["samples"] == 2
    assert document["error_after"] <= document["error_before"]
    (run_dir / "log").write_text("time (ms) | fwd_microstep: 5.00 | bwd_microstep: 9.00\n")
    options = ("--header", run_dir, "--kind", "deepspeed-log", "-o", run_dir / "new.jsonl")
    assert plan("profile", "import", run_dir / "log", *options)[0] == 0
    assert plan("partition", run_dir / "new.jsonl")[0] == 0
    assert plan("profile", "import", run_dir / "log", *options)[0] == 2


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


def test_the_front_has_what_nothing_beats(plan):
    options = ("--vary", "stages=1:4", "--vary", "microbatches=2,8", "--format", "json")
    every = json.loads(plan("what-if", EVENTS, *options)[1])["rows"]
    front = json.loads(plan("what-if", EVENTS, *options, "--front")[1])["rows"]
    assert 0 < len(front) < len(every)
    measures = [(-row["samples_per_s"], row["stages"], row["peak_memory_bytes"]) for row in every]
    for row, mine in zip(every, measures, strict=True):
        beaten = any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in measures)
        assert row["pareto"] != beaten


def test_what_if_a_worker_slows_down(plan, tmp_path):
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


def test_what_if_has_nothing_to_draw(plan, tmp_path):
    code, _, err = plan("what-if", EVENTS, "--vary", "stages=90", "--svg", tmp_path / "grid.svg")
    assert code == 2
    assert "nothing to draw" in err
    assert not (tmp_path / "grid.svg").exists()


def test_a_plan_of_a_variant_records_its_balancer(plan, run_dir):
    code, _, _ = plan("partition", run_dir, "--balancer", "deepspeed_param", "-o", run_dir / "plan.json")
    assert code == 0
    document = json.loads((run_dir / "plan.json").read_text())
    assert document["balancer"] == "deepspeed"
    assert "deepspeed_param" in document["reason"]


def test_simulate_device_replaces_measured_costs(plan, run_dir):
    measured = json.loads(plan("simulate", run_dir, "--format", "json")[1])
    for device in ("h100", "a100"):
        code, out, err = plan("simulate", run_dir, "--device", device, "--format", "json")
        header = CONTRACTS / "profile/valid/header-only.jsonl"
        alone = json.loads(plan("simulate", header, "--device", device, "--format", "json")[1])
        found = json.loads(out)
        assert code == 0
        assert f"costs computed for {device}" in err
        assert found["step_ns"] not in (measured["step_ns"], 0)
        assert sum(found["busy_ns"]) == pytest.approx(sum(alone["busy_ns"]), rel=1e-6)


@pytest.mark.parametrize("command", ["partition", "simulate", "compare", "explain", "repack", "what-if", "replay"])
def test_times_in_another_unit_warn_in_every_command(plan, tmp_path, command):
    path = tmp_path / "profile.jsonl"
    records = [json.loads(line) for line in EVENTS.read_text().splitlines()]
    for record in records:
        for name in ("forward_ns", "backward_ns"):
            if name in record:
                record[name] = [value and max(1, value // 1_000_000) for value in record[name]]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, _, err = plan(command, path)
    assert code in (0, 4)
    assert "is outside 100 ns to 100 s; is it another unit?" in err
    assert err.count("warning:") == 1


def test_watch_with_times_in_another_unit_warns_once_for_each_header(plan, run_dir):
    path = run_dir / "profile.jsonl"
    records = [json.loads(line) for line in EVENTS.read_text().splitlines()]
    for record in records:
        if "forward_ns" in record:
            record["forward_ns"] = [value and max(1, value // 1_000_000) for value in record["forward_ns"]]
    records += [{**records[0], "segment": 1}, *(record for record in records if record["record"] == "step")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, _, err = plan("watch", run_dir, "--once")
    assert code == 0
    assert err.count("is outside 100 ns to 100 s; is it another unit?") == 2
    assert err.count("warning:") == 2


def test_a_dry_run_of_a_header(plan, tmp_path):
    header = CONTRACTS / "profile/valid/header-only.jsonl"
    flags = ("--device", "h100", "--dtype", "bfloat16", "--recompute", "selective", "--balancer", "uniform")
    code, out, _ = plan("simulate", header, *flags, "--memory", "10MB", "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert found["step_with_tail_ns"] > found["step_ns"]
    assert [stage["worker"] for stage in found["stages"]] == [0, 1]
    assert sum(len(stage["items"]) for stage in found["stages"]) == 10
    assert found["memory_limit_bytes"] == [10_000_000] * 2
    assert found["tokens_per_s"] == pytest.approx(128 * found["samples_per_s"])
    assert 0 < found["flops_fraction"] < 1
    code, out, _ = plan("simulate", header, *flags, "--memory", "1MB")
    assert code == 0  # reported, not refused
    assert "worker 0 needs" in out


def test_optional_keys_of_a_header_count(plan, tmp_path):
    document = json.loads((CONTRACTS / "profile/valid/header-only.jsonl").read_text())
    flags = ("--device", "h100", "--dtype", "bfloat16", "--balancer", "uniform", "--format", "json")

    def stages():
        (tmp_path / "profile.jsonl").write_text(json.dumps(document) + "\n")
        return plan("simulate", tmp_path, *flags)

    before = json.loads(stages()[1])["stages"][0]
    document["items"][2] |= {"x_active_param_count": 8 * document["items"][2]["param_count"], "x_activation_bytes": 7}
    after = json.loads(stages()[1])["stages"][0]
    assert after["forward_ns"] > before["forward_ns"]
    assert after["activation_bytes"] != before["activation_bytes"]
    document["model"]["x_num_attention_heads"] = "many"
    code, _, err = stages()
    assert (code, "must be a whole number" in err) == (2, True)
