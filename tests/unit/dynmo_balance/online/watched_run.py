"""Records of a run that the online planner watches, and the plans that it wrote."""

from __future__ import annotations

from dynmo_balance._common.document import append_line
from dynmo_balance.formats.plan import plan_numbers, plan_path, read_plan


def step(number, plan=0, front=1, back=1, **changes):
    forward = [ns * front for ns in (200_000, 400_000, 800_000, 400_000, 800_000)]
    forward += [ns * back for ns in (400_000, 800_000, 400_000, 800_000, 1_200_000)]
    record = {
        "record": "step",
        "step": number,
        "plan_id": plan,
        "step_ns": 10**8,
        "forward_ns": forward,
        "backward_ns": [2 * ns for ns in forward],
        "activation_bytes": [0] * 10,
        "busy_ns": [1, 1],
        "peak_memory_bytes": [1, 1],
    }
    return {**record, **changes}


def append(run, *records):
    for record in records:
        append_line(run / "profile.jsonl", record)


def plan_request(number):
    return {"record": "plan_request", "step": number}


def event(number, kind="pruned", following=None):
    return {"record": "event", "step": number, "kind": kind, "detail": {}, "next_expected_step": following}


def result(plan, number, what="applied", pause=10**6):
    return {
        "record": "plan_result",
        "plan_id": plan,
        "step": number,
        "result": what,
        "pause_ns": pause,
        "bytes": 0,
        "reason": what,
    }


def newest(run):
    return read_plan(plan_path(run / "plans", plan_numbers(run / "plans")[-1]))
