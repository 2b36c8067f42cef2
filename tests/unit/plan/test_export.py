"""Exports, read back by the rules of their targets; and pictures and traces of the timeline."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo_balance.drawing import as_svg, as_trace
from dynmo_balance.errors import UsageError
from dynmo_balance.export import TARGETS
from dynmo_balance.formats.plan import read_plan, stages_of
from dynmo_balance.formats.profile import read_profile
from dynmo_balance.options import Target
from dynmo_balance.schedules import SCHEDULES, order_of
from dynmo_balance.simulate import Communication, StageCosts, predict, run
from dynmo_balance.tail import TailOptions, tail_of

CONTRACTS = Path(__file__).parents[2] / "contracts" / "fixtures"


@pytest.fixture(scope="module")
def header():
    return read_profile(CONTRACTS / "profile/valid/header-only.jsonl")[0].header


@pytest.fixture(scope="module")
def plan():
    return read_plan(CONTRACTS / "plan/valid/move.json")


def test_targets_match_the_registry():
    assert {target.value for target in Target} == set(TARGETS)


# The three layouts below were read by Megatron's own PipelineParallelLayerLayout (megatron-core 0.16.1) on 2026-11-21,
# whose validate_layer_layout accepted them for four layers.
def test_megatron(plan, header):
    assert TARGETS["megatron"](plan, header, 8) == (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E,t*3|t*1,L'"
    )


def test_megatron_with_an_empty_stage(header):
    plan = read_plan(CONTRACTS / "plan/valid/empty-stage.json")
    assert TARGETS["megatron"](plan, header, 8).endswith("'|E,t*4,L'")


def test_megatron_interleaved(header):
    plan = read_plan(CONTRACTS / "plan/valid/interleaved.json")
    names = [item.name for item in header.items]
    plan = replace(plan, stages=stages_of(names, (0, 3, 5, 7, 10), [0, 1]))
    assert TARGETS["megatron"](plan, header, 8).endswith(
        "size 2 --pipeline-model-parallel-layout 'E,t*1|t*1|t*1|t*1,L'"
    )


def test_torchtitan_names_every_module_once(plan, header):
    parts = json.loads(TARGETS["torchtitan"](plan, header, 8))["module_fqns_per_model_part"]
    assert parts == [["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["layers.3", "norm", "lm_head"]]


def test_deepspeed_parts(plan, header):
    text = TARGETS["deepspeed"](plan, header, 8)
    compile(text, "planned.py", "exec")
    assert "parts = [0, 4, 6]" in text


def test_vllm(plan, header):
    assert TARGETS["vllm"](plan, header, 8) == "VLLM_PP_LAYER_PARTITION=3,1"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_reads_the_schedule_table(plan, header, schedule):
    actions = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    virtual = 2 if schedule == "zb-v" else 1
    text = TARGETS["torch-csv"](replace(plan, schedule=schedule, virtual_stages_per_worker=virtual), header, 4)
    for row, operations in zip(csv.reader(io.StringIO(text)), order_of(schedule, 2, virtual, 4), strict=True):
        read = [actions.from_str(cell) for cell in row]
        assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in read] == [
            (op.stage, op.kind.value, op.microbatch) for op in operations
        ]


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)])
def test_torch_loads_the_file_and_adds_the_transfers(plan, header, tmp_path, schedule, virtual):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    file = tmp_path / "schedule.csv"
    planned = replace(plan, schedule=schedule, virtual_stages_per_worker=virtual)
    file.write_text(TARGETS["torch-csv"](planned, header, 4) + "\n")
    # torch's own loader, on a runtime that has everything but processes
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 2, 2 * virtual, 4
    runtime.pipeline_order, runtime._defer_pp_recv, runtime._stages = {}, False, []
    runtime._load_csv(str(file), format="compute_only")
    orders = order_of(schedule, 2, virtual, 4)
    for rank, operations in enumerate(orders):
        computed = [a for a in runtime.pipeline_order_with_comms[rank] if a.is_compute_op]
        assert [(a.stage_index, a.microbatch_index) for a in computed if a.microbatch_index is not None] == [
            (op.stage, op.microbatch) for op in operations
        ]
    sends = [a for row in runtime.pipeline_order_with_comms.values() for a in row if "SEND_F" in str(a)]
    apart = 2 * virtual - 1 - (1 if schedule == "zb-v" else 0)  # the two stages at the bottom of the V are neighbours
    assert len(sends) == 4 * apart


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed", "vllm"])
def test_cuts_inside_a_layer_are_refused(plan, header, target):
    inside = replace(plan, stages=stages_of([item.name for item in header.items], (0, 6, 10), [0, 1]))
    with pytest.raises(UsageError, match=r"stage 1 begins inside layers\.2"):
        TARGETS[target](inside, header, 8)


def test_svg_is_well_formed_and_has_a_box_for_each_operation(chain_factory, problem_factory):
    timeline = predict(problem_factory(chain_factory([1, 2], backward=[2, 4]), 2, microbatches=4), (0, 1, 2))
    root = ET.fromstring(as_svg(timeline, [0, 1], "a < b"))
    assert sum(element.tag.endswith("title") for element in root.iter()) == 16


def test_trace_holds_every_operation_in_microseconds(chain_factory, problem_factory):
    timeline = predict(problem_factory(chain_factory([1000, 2000]), 2, microbatches=4), (0, 1, 2))
    events = [event for event in as_trace(timeline, [0, 1])["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 16
    assert max(event["ts"] + event["dur"] for event in events) == timeline.step_ns / 1000


def uneven(*forward, send=100):
    return [StageCosts(forward_ns=f, backward_input_ns=f, backward_weight_ns=0, send_ns=send) for f in forward]


def test_a_serial_link_carries_one_tensor_at_a_time():
    order = order_of("gpipe", 2, 1, 4)
    free = run(order, uneven(10, 10)).step_ns
    serial = run(order, uneven(10, 10), communication=Communication.SERIAL).step_ns
    # forward: 10, then four transfers of 100 one after the other, the last forward and backwards; then four back
    assert free == 10 * 4 + 100 + 10 + 4 * 10 + 100 + 10
    assert serial == 10 + 4 * 100 + 10 + 10 + 4 * 100 + 10


def test_blocking_transfers_keep_both_workers_busy():
    order = order_of("gpipe", 2, 1, 2)
    blocking = run(order, uneven(10, 10), communication=Communication.BLOCKING)
    # worker 0 sends from 10 to 110 and from 120 to 220; worker 1 receives meanwhile
    assert [span.start_ns for span in blocking.spans[1][:2]] == [110, 220]
    assert blocking.step_ns > run(order, uneven(10, 10), communication=Communication.SERIAL).step_ns


def test_tail(chain_factory, problem_factory):
    chain = chain_factory([10, 10], sizes=[1000, 2000])
    items = tuple(replace(item, gradient_bytes=item.param_bytes) for item in chain.items)
    items = (items[0], replace(items[1], tied_to=items[0].name))
    problem = problem_factory(replace(chain, items=items), 2, microbatches=1, link_bandwidth=10**9)
    timeline = predict(problem, (0, 1, 2))
    ends = [row[-1].end_ns for row in timeline.spans]
    options = TailOptions(data_parallel=4, data_parallel_bandwidth=10**9, memory_bandwidth=10**9)
    tail = tail_of(problem, (0, 1, 2), timeline, options)
    assert tail.reduced_ns == (ends[0] + 1500, ends[1] + 3000)
    assert tail.tied_ns == (max(tail.reduced_ns) + 2000,) * 2
    assert tail.step_ns == tail.tied_ns[0] + 4000
    assert tail_of(problem, (0, 1, 2), timeline, TailOptions()).reduced_ns == tuple(ends)
