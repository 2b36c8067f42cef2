"""Reading plans, and refusing the ones that do not fit the run."""

from __future__ import annotations

import json

import jsonschema
import pytest

import dynmo_train.formats.plan as plans
from dynmo_train._common.document import DocumentError
from dynmo_train.formats.plan_check import validate_plan
from tests.paths import ROOT
from tests.tables import table

SCHEMA = json.loads((ROOT / "dynmo_balance" / "formats" / "plan.schema.json").read_text())
NAMES = ["embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "head"]
STAGES = [NAMES[:3], NAMES[3:]]
CUTS = {"layers.0.attention", "layers.1.attention", "head"}


def initial(**changes):
    given = {
        "run_id": "r1",
        "stages": STAGES,
        "stage_workers": [0, 1],
        "schedule": "1f1b",
        "virtual_stages_per_worker": 1,
    }
    return plans.initial_plan(**given | changes)


def proposal(**changes):
    """A plan on the initial one, as a planner would write it."""
    moved = initial(stages=[NAMES[:1], NAMES[1:]]) | {"plan_id": 1, "base_plan_id": 0, "balancer": "exact"}
    moved["predicted"] = {
        "bottleneck_ns": 1,
        "step_ns": 2,
        "bubble_fraction": 0.5,
        "gain_fraction": None,
        "busy_ns": [1, 1],
        "peak_memory_bytes": [10, 20],
    }
    return moved | changes


def faults(document, **changes):
    given = {
        "run_id": "r1",
        "item_names": NAMES,
        "cut_allowed": CUTS,
        "workers": [0, 1],
        "active_plan_id": 0,
        "active_stages": STAGES,
        "schedule": "1f1b",
        "virtual_stages_per_worker": 1,
    }
    return [problem.kind for problem in validate_plan(plans.parse_plan(document, "p"), **given | changes)]


def stages_document(*stages):
    return [{"stage": at, "worker": worker, "items": items} for at, (worker, items) in enumerate(stages)]


def test_initial_plan_is_valid_and_round_trips(tmp_path):
    document = initial()
    jsonschema.validate(document, SCHEMA)
    path = plans.write_plan(tmp_path / "plans", document)
    assert path.name == "plan-000000.json"
    plan = plans.read_plan(path)
    assert plan.stages == tuple(map(tuple, STAGES))
    assert (plan.stage_workers, plan.workers, plan.plan_id, plan.base_plan_id) == ((0, 1), (0, 1), 0, None)


def test_write_plan_never_overwrites_a_number(tmp_path):
    plans.write_plan(tmp_path, initial())
    with pytest.raises(FileExistsError):
        plans.write_plan(tmp_path, initial(reason="another"))
    assert plans.read_plan(plans.plan_path(tmp_path, 0)).reason == "the partition that the run started with"
    plans.write_plan(tmp_path, initial(plan_id=12))
    (tmp_path / "plan-000003.json").write_text("garbage")
    (tmp_path / "plan-x.json").write_text("")
    assert plans.plan_ids(tmp_path) == [0, 3, 12]


def test_parse_plan_interleaved_stages_are_in_rotation():
    document = initial(stages=[[name] for name in NAMES[:4]], stage_workers=[3, 5, 3, 5], virtual_stages_per_worker=2)
    plan = plans.parse_plan(document, "p")
    assert plan.stage_workers == (3, 5, 3, 5)
    assert plan.workers == (3, 5)


def test_read_plan_number_must_match_the_file_name(tmp_path):
    (tmp_path / "plan-000002.json").write_text(json.dumps(proposal()))
    with pytest.raises(DocumentError, match="the file name has 2"):
        plans.read_plan(tmp_path / "plan-000002.json")


def test_validate_plan_accepts_a_fitting_plan():
    assert faults(proposal()) == []
    assert faults(initial() | {"plan_id": 1, "base_plan_id": 0, "balancer": "exact", "action": "keep"}) == []


@table(
    ("changes", "kinds"),
    [
        ({"run_id": "r2"}, ["run"]),
        ({"base_plan_id": 3}, ["stale"]),
        ({"base_plan_id": None}, ["stale"]),
        ({"schedule": "gpipe"}, ["schedule"]),
        ({"stages": stages_document((0, NAMES[:2]), (1, NAMES[2:]))}, ["cut"]),
        ({"stages": stages_document((0, NAMES[:1]), (1, NAMES[2:]))}, ["missing", "cut"]),
        ({"stages": stages_document((0, ["ghost", *NAMES[:1]]), (1, NAMES[1:]))}, ["unknown"]),
        ({"stages": stages_document((0, NAMES[:1]), (1, [*NAMES[1:4], "head", "layers.1.mlp"]))}, ["order"]),
        ({"stages": stages_document((0, []), (1, NAMES))}, ["empty"]),
        ({"stages": stages_document((0, NAMES), (1, []))}, ["empty"]),
        ({"stages": stages_document((1, NAMES[:1]), (0, NAMES[1:]))}, ["worker"]),
        ({"stages": stages_document((0, NAMES[:1]), (7, NAMES[1:]))}, ["worker"]),
        ({"stages": stages_document((0, NAMES))}, ["worker"]),
        ({"stages": stages_document((0, NAMES)), "released_workers": [1]}, ["release"]),
        ({"action": "keep"}, ["keep"]),
    ],
)
def test_validate_plan_refuses_an_unfitting_plan(changes, kinds):
    assert faults(proposal(**changes)) == kinds


def test_validate_plan_accepts_an_allowed_release():
    document = proposal(stages=stages_document((0, NAMES)), released_workers=[1], predicted=None)
    assert faults(document, releasable=[1]) == []


def test_validate_plan_other_virtual_stages_are_refused():
    assert faults(proposal(), virtual_stages_per_worker=2) == ["schedule"]


def test_validate_plan_checks_known_memory():
    assert faults(proposal(), memory_bytes={1: 20}) == []
    assert faults(proposal(), memory_bytes={1: 19}) == ["memory"]
    assert faults(proposal(predicted=None), memory_bytes={1: 19}) == []


def test_validate_plan_reports_every_problem():
    assert faults(proposal(run_id="r2", base_plan_id=9, action="keep")) == ["run", "stale", "keep"]
