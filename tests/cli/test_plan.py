"""The commands of ``dynmo-plan``: whole output, exit codes, every kind of bad input."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys

import pytest

from dynmo_balance.cli.options import Policy, Schedule
from dynmo_balance.inputs.profile_source import load
from dynmo_balance.online.policies import POLICIES
from dynmo_balance.partition.registry import balancer_names
from dynmo_balance.schedules.registry import SCHEDULES
from tests.cli.cli_files import EVENTS
from tests.paths import CONTRACTS
from tests.tables import table


def test_help_takes_less_than_300_ms():
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "dynmo_balance", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3  # processor time: the wall clock depends on the load


def test_options_have_the_choices_of_the_registries():
    assert {policy.value for policy in Policy} == set(POLICIES)
    assert {schedule.value for schedule in Schedule} == set(SCHEDULES)


def test_partition_prints_stages_and_certificate(plan):
    code, out, err = plan("partition", EVENTS, "--granularity", "sublayer")
    assert (code, err) == (0, "")
    assert out == (
        "1f1b, 8 microbatches\n"
        "  stage  worker  items                                ms/microbatch   busy  memory  limit\n"
        "      0       0  embedding .. layers.3.attention (8)          4.700  89.0%  5.5 MB      -\n"
        "      1       1  layers.3.mlp .. head (2)                     4.500  85.2%  1.4 MB      -\n"
        "objective: minimum simulated step | step 42.24 ms, lower bound 36.94 ms, optimal: not proven\n"
        "bottleneck 4.700 ms | minimum: 4.700 ms | blocking run: layers.3.attention .. head (3)\n"
        "predicted step 42.24 ms, bubble 12.9%; uniform 55.49 ms: 1.31 x\n"
    )


def test_partition_plan_passes_verify(plan, run_dir):
    output = run_dir / "plan.json"
    code, out, err = plan("partition", run_dir / "profile.jsonl", "-o", output, "--format", "json")
    assert code == 0
    assert json.loads(out) == json.loads(output.read_text())
    assert err == f"wrote {output}\n"
    assert plan("verify", output, "--profile", run_dir) == (
        0,
        f"{output}: every number is correct | layer granularity, 8 microbatches, at least 1 unit per stage\n",
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
def test_verify_wrong_number_is_found(plan, tmp_path, path, value):
    output = tmp_path / "plan.json"
    plan("partition", EVENTS, "-o", output)
    document = json.loads(output.read_text())
    document[path[0]][path[1]] = value
    output.write_text(json.dumps(document))
    code, _, err = plan("verify", output, "--profile", EVENTS)
    assert code == 1
    assert ".".join(path) in err


def test_verify_wrong_migration_is_found(plan, tmp_path):
    output, initial = tmp_path / "plan.json", CONTRACTS / "plan/valid/initial.json"
    assert plan("partition", EVENTS, "--current", initial, "-o", output)[0] == 0
    assert plan("verify", output, "--profile", EVENTS, "--base", initial)[0] == 0
    document = json.loads(output.read_text())
    document["migration"]["bytes"] += 1
    output.write_text(json.dumps(document))
    code, _, err = plan("verify", output, "--profile", EVENTS, "--base", initial)
    assert code == 1
    assert "migration.bytes: is 1440001, recomputed 1440000 [value]" in err


def test_partition_ties_move_least_from_current(plan):
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


def test_compare_lists_every_balancer(plan):
    code, out, _ = plan("compare", EVENTS)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(balancer_names())
    code, out, _ = plan("compare", EVENTS, "--format", "json")
    rows = json.loads(out)
    assert min(row["gap"] for row in rows) == 0
    assert rows[0]["boundaries"] == [0, 7, 10]


def test_simulate_prints_the_timeline(plan):
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


@pytest.mark.parametrize("objective", ["bottleneck", "simulated"])
def test_partition_compare_and_explain_state_one_objective(plan, objective):
    document = json.loads(plan("partition", EVENTS, "--objective", objective, "--format", "json")[1])
    rows = json.loads(plan("compare", EVENTS, "--objective", objective, "--format", "json")[1])
    words = {"bottleneck": "minimum bottleneck", "simulated": "minimum simulated step"}[objective]
    for command in ("partition", "compare", "explain"):
        assert words in plan(command, EVENTS, "--objective", objective)[1]
    exact = next(row for row in rows if row["balancer"] == "exact")
    assert document["optimality"]["objective"] == objective
    assert exact["step_ns"] == document["predicted"]["step_ns"]
    key = "step_ns" if objective == "simulated" else "bottleneck_ns"
    assert all(row["gap"] == pytest.approx(row[key] / exact[key] - 1) for row in rows)


def test_explain_names_bottleneck_and_remedy(plan):
    code, out, _ = plan("explain", EVENTS)
    assert code == 0
    assert out.splitlines()[0] == "The objective is the minimum simulated step."
    assert out.splitlines()[1] == (
        "Worker 1 (layers.3.attention to head) is the slowest: 5.100 ms per microbatch, 1.11 x the mean of the workers."
    )
    assert "Cutting inside layers (--granularity sublayer) would reduce the step to 42.24 ms (6.3% less)." in out


def test_explain_predicts_shards_of_the_vocabulary(plan, tmp_path):
    """The prediction from whole layers is that of a profile with shards."""
    shape = {"n_layer": 6, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 128_000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "tie_word_embeddings": False} | shape))
    steps = {}
    for name, options in {"whole": (), "shards": ("--vocabulary-parallel", "4")}.items():
        profile = tmp_path / f"{name}.jsonl"
        build = ("profile", "build", tmp_path / "config.json", "-o", profile, "--workers", "4", "--microbatches", "16")
        assert plan(*build, *options)[0] == 0
        steps[name] = json.loads(plan("partition", profile, "--format", "json")[1])["predicted"]["step_ns"]
    assert steps["shards"] < 0.7 * steps["whole"]
    for command in ("explain", "partition --schedule auto"):
        name, *options = command.split()
        out = plan(name, tmp_path / "whole.jsonl", *options)[1]
        found = re.search(r"--vocabulary-parallel 4.* of dynmo-train\) would reduce the step to ([\d.]+) ms", out)
        assert float(found[1]) * 1e6 == pytest.approx(steps["shards"], rel=0.03)
    assert "--vocabulary-parallel" not in plan("explain", tmp_path / "shards.jsonl")[1]


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
    assert "objective: minimum" not in out


def test_watch_once_writes_a_plan(plan, run_dir):
    code, out, err = plan("watch", run_dir, "--once", "--min-records", "1")
    assert (code, out) == (0, "")
    assert "watching" in err


@table("command", ["partition", "compare", "simulate", "what-if", "explain"])
@table("fixture", ["newer-version", "negative-time", "no-items"])
def test_partition_invalid_profile_lists_problems(plan, command, fixture):
    code, out, err = plan(command, CONTRACTS / f"profile/invalid/{fixture}.jsonl")
    assert (code, out) == (2, "")
    assert "line 1" in err or "line 2" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["partition", "compare", "simulate", "what-if", "explain"])
def test_commands_profile_without_steps_is_refused(plan, command):
    code, _, err = plan(command, CONTRACTS / "profile/valid/header-only.jsonl")
    assert code == 2
    assert "has no step records to compute costs from" in err


def test_commands_empty_or_missing_profile_is_refused(plan, tmp_path):
    (tmp_path / "profile.jsonl").write_text("")
    assert "is empty" in plan("partition", tmp_path)[2]
    code, _, err = plan("partition", tmp_path / "nowhere.jsonl")
    assert code == 2
    assert err == f"dynmo-plan: error: {tmp_path / 'nowhere.jsonl'}: no such file or directory\n"


def test_check_reports_every_problem(plan, tmp_path):
    lines = EVENTS.read_text().splitlines()
    first, second = json.loads(lines[1]), json.loads(lines[2])
    first["forward_ns"][0], second["busy_ns"] = -1, [0]
    (tmp_path / "profile.jsonl").write_text("\n".join([lines[0], json.dumps(first), json.dumps(second)]) + "\n")
    code, _, err = plan("partition", tmp_path)
    assert code == 2
    assert "2 problems" in err
    assert "line 2.forward_ns[0]: must be at least 0, is -1 [range]" in err
    assert "line 3.busy_ns: must have 2 elements, has 1 [length]" in err


def test_partition_more_stages_than_layers_is_refused(plan):
    code, _, err = plan("partition", EVENTS, "--stages", "9")
    assert code == 2
    assert "use fewer stages, --granularity sublayer or --min-layers 0" in err


def test_partition_infeasible_memory_exits_3(plan):
    code, _, err = plan("partition", EVENTS, "--memory", "1MB")
    assert code == 3
    assert "needs" in err
    assert "1,000,000" in err


def test_partition_current_of_other_model_is_refused(plan, tmp_path):
    document = json.loads((CONTRACTS / "plan/valid/initial.json").read_text())
    document["stages"][1]["items"].pop()
    document["run_id"] = "another"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    code, _, err = plan("simulate", EVENTS, "--plan", tmp_path / "plan.json")
    assert code == 2
    assert "run_id: is 'another', the profile's is 'gpt-small' [reference]" in err
    assert "9 items against 10" in err


@pytest.mark.parametrize("size", ["lots", "12XB", "-5", ""])
def test_partition_invalid_memory_is_refused(plan, size):
    code, _, err = plan("partition", EVENTS, f"--memory={size}")
    assert code == 2
    assert "must be a size" in err


@pytest.mark.parametrize("pin", ["head", "head:x", "nothing:1"])
def test_partition_invalid_pin_is_refused(plan, pin):
    code, _, err = plan("partition", EVENTS, "--pin", pin)
    assert code == 2
    assert "must be NAME:STAGE" in err


def test_partition_pin_is_satisfied(plan):
    code, out, _ = plan("partition", EVENTS, "--pin", "layers.2.mlp:1", "--format", "json")
    assert code == 0
    assert "layers.2.mlp" in json.loads(out)["stages"][1]["items"]


def test_partition_pin_of_layer_pins_its_items(plan):
    code, out, _ = plan("partition", EVENTS, "--pin", "layers.0:1", "--granularity", "sublayer", "--format", "json")
    assert code == 0
    second = json.loads(out)["stages"][1]["items"]
    assert {"layers.0.attention", "layers.0.mlp"} <= set(second)


def test_partition_contradictory_pins_exit_3(plan):
    code, _, err = plan("partition", EVENTS, "--pin", "head:0", "--pin", "embedding:1")
    assert code == 3
    assert "--pin embedding:1 and --pin head:0 contradict each other" in err


def test_partition_pin_to_missing_stage_is_refused(plan):
    code, _, err = plan("partition", EVENTS, "--pin", "head:7")
    assert code == 2
    assert "there are stages 0 to 1" in err


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_partition_gain_uses_schedule_of_base(plan, run_of, tmp_path, schedule):
    profile, base, output = run_of(schedule), tmp_path / "base.json", tmp_path / "plan.json"
    assert plan("partition", profile, "--balancer", "uniform", "-o", base)[0] == 0
    assert plan("partition", profile, "--schedule", "gpipe", "--current", base, "-o", output)[0] == 0
    before, after = (json.loads(path.read_text())["predicted"] for path in (base, output))
    assert after["gain_fraction"] == round(1 - after["step_ns"] / before["step_ns"], 6)
    assert plan("partition", profile, "--stages", "1", "--current", base, "-o", output)[0] == 0
    assert json.loads(output.read_text())["predicted"]["gain_fraction"] is None


def test_replay_compares_policies_with_offline_optimum(plan):
    code, out, _ = plan("replay", CONTRACTS / "profile/valid/steps.jsonl", "--format", "json", "--every", "1")
    rows = {row["policy"]: row for row in json.loads(out)}
    assert code == 0
    assert set(rows) == {*POLICIES, "offline optimum"}
    assert rows["never"]["moves"] == 0
    assert rows["offline optimum"]["ratio"] == 1
    assert plan("replay", CONTRACTS / "profile/valid/header-only.jsonl")[0] == 2


def test_export_and_simulate_write_files_of_other_programs(plan, tmp_path):
    move = CONTRACTS / "plan/valid/move.json"
    assert plan("export", move, "--profile", EVENTS, "--to", "vllm") == (0, "VLLM_PP_LAYER_PARTITION=3,1\n", "")
    code, out, _ = plan("simulate", EVENTS, "--svg", tmp_path / "a.svg", "--trace", tmp_path / "a.json")
    assert code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert "with reductions and the optimizer" in out


def test_simulate_slower_link_takes_longer(plan):
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
    assert "half of it is assumed to be the weight gradient" in err
    auto = json.loads(output.read_text())["predicted"]["step_ns"]
    alone = json.loads(plan("partition", EVENTS, "--format", "json")[1])["predicted"]["step_ns"]
    assert auto < alone


def test_partition_interleaved_plan_passes_verify(plan, tmp_path):
    output = tmp_path / "plan.json"
    options = ("--schedule", "interleaved-1f1b", "--virtual-stages", "2", "--objective", "bottleneck")
    assert plan("partition", EVENTS, *options, "-o", output)[0] == 0
    assert len(json.loads(output.read_text())["stages"]) == 4
    assert plan("verify", output, "--profile", EVENTS)[0] == 0


def test_plan_for_more_workers_than_the_profile_has_is_read_everywhere(plan, tmp_path):
    path = tmp_path / "three.json"
    assert plan("partition", EVENTS, "--stages", "3", "-o", path)[0] == 0
    stated = json.loads(path.read_text())["predicted"]["step_ns"]
    code, out, _ = plan("simulate", EVENTS, "--plan", path, "--format", "json")
    assert (code, json.loads(out)["step_ns"]) == (0, stated)
    for command in (
        ("explain", EVENTS, "--plan", path),
        ("export", path, "--profile", EVENTS, "--to", "deepspeed"),
        ("partition", EVENTS, "--current", path),
        ("verify", path, "--profile", EVENTS),
    ):
        assert plan(*command)[0] == 0, command
    document = json.loads(path.read_text())
    document["stages"][2]["worker"] = 9
    path.write_text(json.dumps(document))
    code, _, err = plan("simulate", EVENTS, "--plan", path)
    assert code == 2
    assert "stages[2].worker: the profile has no worker 9" in err


def test_report_writes_html(plan, run_dir):
    shutil.copy(CONTRACTS / "plan/valid/move.json", run_dir / "plans/plan-000001.json")
    output = run_dir / "report.html"
    code, out, err = plan("report", run_dir, "-o", output)
    assert (code, out) == (0, "")
    assert err == f"wrote {output}: 9 steps, 1 plan, 1 move\n"
    assert output.read_text().startswith("<!doctype html>")


def test_report_trace_is_written_next_to_the_page(plan, run_dir):
    shutil.copy(CONTRACTS / "plan/valid/move.json", run_dir / "plans/plan-000001.json")
    trace = run_dir / "trace.json"
    assert plan("report", run_dir, "-o", run_dir / "report.html", "--trace", trace)[0] == 0
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])


def test_calibrate_and_import_read_measured_times(plan, run_dir):
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


def test_partition_with_variant_records_its_name(plan, run_dir):
    code, _, _ = plan("partition", run_dir, "--balancer", "deepspeed_param", "-o", run_dir / "plan.json")
    assert code == 0
    document = json.loads((run_dir / "plan.json").read_text())
    assert document["balancer"] == "deepspeed_param"


def test_simulate_device_replaces_measured_costs(plan, run_dir):
    measured = json.loads(plan("simulate", run_dir, "--format", "json")[1])
    for device in ("h100", "a100"):
        code, out, err = plan("simulate", run_dir, "--device", device, "--format", "json")
        header = CONTRACTS / "profile/valid/header-only.jsonl"
        alone = json.loads(plan("simulate", header, "--device", device, "--format", "json")[1])
        found = json.loads(out)
        assert code == 0
        assert f"costs: computed for {device}" in err
        assert found["step_ns"] not in (measured["step_ns"], 0)
        assert sum(found["busy_ns"]) == pytest.approx(sum(alone["busy_ns"]), rel=1e-6)


@pytest.mark.parametrize("command", ["partition", "simulate", "compare", "explain", "repack", "what-if", "replay"])
def test_commands_warn_of_times_in_another_unit(plan, tmp_path, command):
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


def test_times_of_a_slow_worker_are_converted_without_plans(tmp_path, capsys):
    """Under plan 0 worker 1 has the second half of the layers; at half the speed they take twice as long."""
    path = tmp_path / "profile.jsonl"
    records = [json.loads(line) for line in EVENTS.read_text().splitlines()]
    records[0]["workers"][1]["relative_speed"] = 0.5
    for record in records:
        for name in ("forward_ns", "backward_ns"):
            if name in record:
                record[name] = [ns and ns * (1 + (at >= 5)) for at, ns in enumerate(record[name])]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert load(path, at_step=8).costs == load(EVENTS, at_step=8).costs
    assert "measured under the even split" in capsys.readouterr().err
    assert load(path).costs.forward_ns[-1] == 2 * load(EVENTS).costs.forward_ns[-1]
    assert "plan 1, under which the times were measured, is not next to the profile" in capsys.readouterr().err


def test_watch_warns_of_units_once_per_header(plan, run_dir):
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


@pytest.mark.parametrize("options", [(), ("--tensor-parallel", "2", "--sequence-parallel", "--recompute", "full")])
def test_simulate_device_of_a_built_profile_is_what_was_built(plan, tmp_path, options):
    """A token uses two of eight experts, and keys of two of eight heads."""
    shape = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000}
    config, profile = tmp_path / "config.json", tmp_path / "profile.jsonl"
    config.write_text(json.dumps({"model_type": "mixtral", "max_position_embeddings": 512} | shape))
    assert plan("profile", "build", config, "-o", profile, "--workers", "2", *options)[0] == 0
    built, computed = (
        json.loads(plan("simulate", profile, "--format", "json", *more)[1])["step_ns"]
        for more in ((), ("--device", "h100", "--dtype", "bfloat16"))
    )
    assert computed == pytest.approx(built, rel=1e-3)


def test_simulate_device_needs_only_a_header(plan, tmp_path):
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


def test_simulate_device_uses_optional_header_keys(plan, tmp_path):
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
