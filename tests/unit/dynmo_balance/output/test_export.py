"""Exports, read back by the rules of their targets; and pictures and traces of the timeline."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.cli.options import Target
from dynmo_balance.formats.plan import V_SCHEDULES, Stage, position_of, read_plan
from dynmo_balance.formats.profile import read_profile
from dynmo_balance.output.export import TARGETS
from dynmo_balance.output.timeline import as_svg, as_trace
from dynmo_balance.schedules.registry import SCHEDULES, build_order
from dynmo_balance.simulation.simulator import Communication, StageCosts, predict, run
from dynmo_balance.simulation.step_tail import TailOptions, tail_of
from tests.paths import CONTRACTS


def stages_of(items, boundaries, workers, schedule="1f1b"):
    """The stages of a partition, placed by the schedule."""
    return tuple(
        Stage(stage=s, worker=workers[position_of(schedule, s, len(workers))], items=tuple(items[begin:end]))
        for s, (begin, end) in enumerate(pairwise(boundaries))
    )


@pytest.fixture(scope="module")
def header():
    return read_profile(CONTRACTS / "profile/valid/header-only.jsonl")[0].header


@pytest.fixture(scope="module")
def plan():
    return read_plan(CONTRACTS / "plan/valid/move.json")


def test_export_targets_match_the_options():
    assert {target.value for target in Target} == set(TARGETS)


def megatron_ranks(flags):
    """The layers of each rank and virtual stage, by the rules of Megatron's PipelineParallelLayerLayout."""
    size, layout = re.fullmatch(
        r"--pipeline-model-parallel-size (\d+) --pipeline-model-parallel-layout '([^']*)'", flags
    ).groups()
    stages = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), layout.replace(",", "")).split("|")
    assert len(stages) % int(size) == 0
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    return {(at % int(size), at // int(size)): stage for at, stage in enumerate(stages)}


# The layouts below were read by Megatron's own PipelineParallelLayerLayout (megatron-core 0.16.1) on 2026-11-21 and
# 2026-11-22, whose validate_layer_layout accepted them for four layers.
def test_megatron_export_gives_layout(plan, header):
    flags = TARGETS["megatron"](plan, header, 8, None)
    assert flags == "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E,t*3|t*1,L'"
    assert megatron_ranks(flags) == {(0, 0): "Ettt", (1, 0): "tL"}


def test_megatron_export_interleaved_gives_layout(header):
    plan = read_plan(CONTRACTS / "plan/valid/interleaved.json")
    names = [item.name for item in header.items]
    plan = replace(plan, stages=stages_of(names, (0, 3, 5, 7, 10), [0, 1]))
    flags = TARGETS["megatron"](plan, header, 8, None)
    assert flags.endswith("size 2 --pipeline-model-parallel-layout 'E,t*1|t*1|t*1|t*1,L'")
    by_worker = {stage.worker: [] for stage in plan.stages}
    for (rank, _), layers in megatron_ranks(flags).items():
        by_worker[rank].append(layers)
    assert by_worker == {0: ["Et", "t"], 1: ["t", "tL"]}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("zb-v", {}, "Megatron does not support zb-v; plan with --schedule 1f1b or interleaved-1f1b"),
        ("custom", {}, "Megatron does not support custom"),
        ("move", {"schedule": "gpipe"}, "Megatron does not support gpipe"),
        ("move", {"schedule": "zero-bubble"}, "Megatron does not support zero-bubble"),
        ("move", {"schedule": "interleaved-1f1b"}, "interleaves several stages per worker"),
        ("empty-stage", {}, "Megatron builds the embedding on the first stage"),
    ],
)
def test_megatron_export_refuses_other_pipelines(header, name, changes, words):
    plan = replace(read_plan(CONTRACTS / f"plan/valid/{name}.json"), **changes)
    with pytest.raises(UsageError, match=words):
        TARGETS["megatron"](plan, header, 8, None)


def test_megatron_export_refuses_uneven_rounds(header):
    plan = read_plan(CONTRACTS / "plan/valid/interleaved.json")
    names = [item.name for item in header.items]
    plan = replace(plan, stages=stages_of(names, (0, 3, 5, 7, 10), [0, 1]))
    with pytest.raises(UsageError, match="7 is not a multiple"):
        TARGETS["megatron"](plan, header, 7, None)


@pytest.mark.parametrize(("version", "head"), [(None, "lm_head"), ("main", "lm_head"), ("0.2.2", "output")])
def test_torchtitan_names_every_module_once(plan, header, version, head):
    section = json.loads(TARGETS["torchtitan"](plan, header, 8, version))
    assert section == {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
            ["layers.3", "norm", head],
        ],
    }


@pytest.mark.parametrize("version", ["0.1.0", "0.3.0", "nightly"])
def test_torchtitan_versions_without_the_names_are_refused(plan, header, version):
    with pytest.raises(UsageError, match=version):
        TARGETS["torchtitan"](plan, header, 8, version)


def planned_as(header, schedule, boundaries=(0, 3, 5, 7, 10)):
    """Four stages on two workers."""
    plan = read_plan(CONTRACTS / f"plan/valid/{'zb-v' if schedule in V_SCHEDULES else 'interleaved'}.json")
    names = [item.name for item in header.items]
    return replace(plan, schedule=schedule, stages=stages_of(names, boundaries, [0, 1], schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zero-bubble", "zb-v", "dualpipe-v", "custom"])
def test_torchtitan_places_stages_as_the_plan_does(header, schedule):
    plan = planned_as(header, schedule)
    section = json.loads(TARGETS["torchtitan"](plan, header, 8, None))
    is_v = section["pipeline_parallel_schedule"] in ("ZBVZeroBubble", "DualPipeV")
    ranks = ((0, 3), (1, 2)) if is_v else ((0, 2), (1, 3))  # as torchtitan's pipeline_module_split gives them out
    stage_items_of = [[stage.stage for stage in plan.stages if stage.worker == rank] for rank in (0, 1)]
    assert stage_items_of == [list(stages) for stages in ranks]
    assert ("pipeline_parallel_schedule_csv" in section) == (schedule == "custom")


def test_torchtitan_export_refuses_other_pipelines(header):
    with pytest.raises(UsageError, match="torch has no schedule gpipe with 2 stages per worker"):
        TARGETS["torchtitan"](planned_as(header, "gpipe"), header, 8, None)
    with pytest.raises(UsageError, match="stage 1 is empty, which torchtitan does not support"):
        TARGETS["torchtitan"](planned_as(header, "1f1b", (0, 3, 3, 7, 10)), header, 8, None)


class FakePipelineModule:
    """DeepSpeed's PipelineModule, as far as its parts go: specifications, and how types are found among them."""

    num_stages, global_rank = 2, 1

    def __init__(self, names, method):
        self._layer_specs = names
        self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
        self._partition_layers(method=method)

    def _find_layer_type(self, layername):
        return [at for at, name in enumerate(self._layer_specs) if re.search(layername, name, re.IGNORECASE)]

    def _set_bounds(self, start, stop):
        self.bounds = start, stop


PLAIN = ["EmbeddingPipe", *["ParallelTransformerLayerPipe"] * 4, "LMHeadPipe"]
MEGATRON_DEEPSPEED = ["_to_float16", *PLAIN[:-1], "LayerNorm", "EmbeddingPipe", "float16_to_fp32"]


def planned_module(plan, header, monkeypatch):
    fake = ModuleType("deepspeed.pipe")
    fake.PipelineModule = FakePipelineModule
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", fake)
    scope = {}
    exec(compile(TARGETS["deepspeed"](plan, header, 8, None), "planned.py", "exec"), scope)
    return scope["PlannedPipelineModule"]


@pytest.mark.parametrize(("specs", "parts"), [(PLAIN, [0, 4, 6]), (MEGATRON_DEEPSPEED, [0, 5, 9])])
def test_deepspeed_parts_count_from_the_blocks(plan, header, monkeypatch, specs, parts):
    module = planned_module(plan, header, monkeypatch)(specs, "type:transformer")
    assert module.parts == parts
    assert module.bounds == (parts[1], parts[2])
    assert specs[parts[0] : parts[1]].count("ParallelTransformerLayerPipe") == 3


def test_deepspeed_parts_with_the_embedding_alone(plan, header, monkeypatch):
    names = [item.name for item in header.items]
    alone = replace(plan, stages=stages_of(names, (0, 1, 10), [0, 1]))
    assert planned_module(alone, header, monkeypatch)(MEGATRON_DEEPSPEED, "type:transformer").parts == [0, 2, 9]


def test_deepspeed_parts_of_another_model_are_refused(plan, header, monkeypatch):
    planned = planned_module(plan, header, monkeypatch)
    with pytest.raises(ValueError, match="planned for 4 blocks in a row on 2 stages"):
        planned(PLAIN[:3] + PLAIN[-1:], "type:transformer")
    with pytest.raises(ValueError, match="partition_method must be type:REGEX, is parameters"):
        planned(PLAIN, "parameters")


@pytest.mark.parametrize("target", ["deepspeed", "vllm"])
@pytest.mark.parametrize("name", ["zb-v", "interleaved", "custom"])
def test_export_refuses_several_stages_per_worker(header, target, name):
    plan = read_plan(CONTRACTS / f"plan/valid/{name}.json")
    with pytest.raises(UsageError, match="one stage per worker"):
        TARGETS[target](plan, header, 8, None)


@pytest.mark.parametrize(
    ("target", "words"),
    [("deepspeed", "stage 0 is empty"), ("vllm", "vLLM builds the embedding on the first stage")],
)
def test_export_refuses_empty_stages(header, target, words):
    plan = read_plan(CONTRACTS / "plan/valid/empty-stage.json")
    with pytest.raises(UsageError, match=words):
        TARGETS[target](plan, header, 8, None)


def test_deepspeed_refuses_other_schedules(plan, header):
    with pytest.raises(UsageError, match="DeepSpeed does not support zero-bubble; plan with --schedule 1f1b"):
        TARGETS["deepspeed"](replace(plan, schedule="zero-bubble"), header, 8, None)


def test_torch_csv_custom_plan_has_its_own_microbatches(header):
    plan = read_plan(CONTRACTS / "plan/valid/custom.json")
    with pytest.raises(UsageError, match="the plan's operations are for"):
        TARGETS["torch-csv"](plan, header, 99, None)


def test_vllm_export_gives_layer_counts(plan, header):
    assert TARGETS["vllm"](plan, header, 8, None) == "VLLM_PP_LAYER_PARTITION=3,1"


def test_vllm_export_stage_with_head_only_is_refused(plan, header):
    names = [name for stage in plan.stages for name in stage.items]
    stages = tuple(
        replace(stage, items=tuple(items)) for stage, items in zip(plan.stages, (names[:-1], names[-1:]), strict=True)
    )
    with pytest.raises(UsageError, match=r"stage 1 has no layer, .* plan with --min-layers 2"):
        TARGETS["vllm"](replace(plan, stages=stages), header, 8, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_reads_the_schedule_table(plan, header, schedule):
    actions = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    virtual = 2 if schedule in V_SCHEDULES else 1
    text = TARGETS["torch-csv"](replace(plan, schedule=schedule, virtual_stages_per_worker=virtual), header, 4, None)
    for row, operations in zip(csv.reader(io.StringIO(text)), build_order(schedule, 2, virtual, 4), strict=True):
        read = [actions.from_str(cell) for cell in row]
        assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in read] == [
            (op.stage, op.kind.value, op.microbatch) for op in operations
        ]


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipe-v", 2)]
)
def test_torch_loads_the_file_and_adds_the_transfers(plan, header, tmp_path, schedule, virtual):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    file = tmp_path / "schedule.csv"
    planned = replace(plan, schedule=schedule, virtual_stages_per_worker=virtual)
    file.write_text(TARGETS["torch-csv"](planned, header, 4, None) + "\n")
    # torch's own loader, on a runtime that has everything but processes
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 2, 2 * virtual, 4
    runtime.pipeline_order, runtime._defer_pp_recv, runtime._stages = {}, False, []
    runtime._load_csv(str(file), format="compute_only")
    orders = build_order(schedule, 2, virtual, 4)
    for rank, operations in enumerate(orders):
        computed = [a for a in runtime.pipeline_order_with_comms[rank] if a.is_compute_op]
        assert [(a.stage_index, a.microbatch_index) for a in computed if a.microbatch_index is not None] == [
            (op.stage, op.microbatch) for op in operations
        ]
    sends = [a for row in runtime.pipeline_order_with_comms.values() for a in row if "SEND_F" in str(a)]
    apart = (
        2 * virtual - 1 - (1 if schedule in V_SCHEDULES else 0)
    )  # the two stages at the bottom of the V are neighbours
    assert len(sends) == 4 * apart


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed", "vllm"])
def test_export_refuses_cuts_inside_a_layer(plan, header, target):
    inside = replace(plan, stages=stages_of([item.name for item in header.items], (0, 6, 10), [0, 1]))
    with pytest.raises(UsageError, match=r"stage 1 begins inside layers\.2"):
        TARGETS[target](inside, header, 8, None)


def test_svg_is_well_formed_with_one_box_per_operation(chain_factory, problem_factory):
    timeline = predict(problem_factory(chain_factory([1, 2], backward=[2, 4]), 2, microbatches=4), (0, 1, 2))
    root = ET.fromstring(as_svg(timeline, [0, 1], "a < b"))
    assert sum(element.tag.endswith("title") for element in root.iter()) == 16


def test_trace_has_every_operation_in_microseconds(chain_factory, problem_factory):
    timeline = predict(problem_factory(chain_factory([1000, 2000]), 2, microbatches=4), (0, 1, 2))
    events = [event for event in as_trace(timeline, [0, 1])["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 16
    assert max(event["ts"] + event["dur"] for event in events) == timeline.step_ns / 1000


def uneven(*forward, send=100):
    return [StageCosts(forward_ns=f, backward_input_ns=f, backward_weight_ns=0, send_ns=send) for f in forward]


def test_serial_link_carries_one_tensor_at_a_time():
    order = build_order("gpipe", 2, 1, 4)
    free = run(order, uneven(10, 10)).step_ns
    serial = run(order, uneven(10, 10), communication=Communication.SERIAL).step_ns
    # forward: 10, then four transfers of 100 one after the other, the last forward and backwards; then four back
    assert free == 10 * 4 + 100 + 10 + 4 * 10 + 100 + 10
    assert serial == 10 + 4 * 100 + 10 + 10 + 4 * 100 + 10


def test_blocking_transfers_keep_both_workers_busy():
    order = build_order("gpipe", 2, 1, 2)
    blocking = run(order, uneven(10, 10), communication=Communication.BLOCKING)
    # worker 0 sends from 10 to 110 and from 120 to 220; worker 1 receives meanwhile
    assert [span.start_ns for span in blocking.spans[1][:2]] == [110, 220]
    assert blocking.step_ns > run(order, uneven(10, 10), communication=Communication.SERIAL).step_ns


def test_tail_of_adds_reductions_and_optimizer(chain_factory, problem_factory):
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
