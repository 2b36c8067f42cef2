"""Reads partition plans, and writes the plan of the partition that a run starts with.

The format belongs to ``dynmo_balance``; the specification is ``dynmo_balance/formats/plan.md``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.document import (
    DocumentError,
    Problem,
    encode_json,
    envelope,
    envelope_problems,
    own_document,
    read_json,
    short_repr,
    write_whole,
)
from .plan_fields import DOCUMENT

FORMAT = "dynmo.plan"
VERSION = 1
V_SCHEDULES = ("zb-v", "dualpipe-v")
"""Schedules with two stages per pipeline rank, one on the way down the ranks and one on the way up."""
PLAN_NAME = re.compile(r"plan-(\d{6,})\.json")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A partition plan; fields are those of the document.

    Attributes:
        stages: Item names of each stage.
        stage_workers: Worker of each stage.
        operations: With the schedule ``custom``: the operations of each worker.
        selective_grad_comp_way: Number of pipeline ranks that compress between replicas; None where the plan has none.
        expert_ranks: Item -> ranks of each of its experts in the expert-parallel group, the owner first, for the items
            that the plan places.
    """

    plan_id: int
    run_id: str
    base_plan_id: int | None
    read_to_step: int
    action: str
    apply_at_step: int | None
    balancer: str
    schedule: str
    virtual_stages_per_worker: int
    stages: tuple[tuple[str, ...], ...]
    stage_workers: tuple[int, ...]
    released_workers: tuple[int, ...]
    predicted: Mapping[str, Any] | None
    migration: Mapping[str, Any]
    reason: str
    granularity: str | None = None
    operations: tuple[str, ...] | None = None
    selective_grad_comp_way: int | None = None
    expert_ranks: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers that have stages, in the order of their first stage."""
        return tuple(dict.fromkeys(self.stage_workers))


def _stage_workers(schedule: str, workers: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the worker of each stage: in rotation, or in a V down the workers and back up."""
    cycle = (*workers, *reversed(workers)) if schedule in V_SCHEDULES else tuple(workers)
    return cycle * (stages // max(1, len(cycle)))


def _custom(plan: Plan) -> list[Problem]:
    """Check a plan's own operations: equal stages per worker, each operation once, on the worker of its stage."""
    problems = []
    if set(Counter(plan.stage_workers).values()) != {plan.virtual_stages_per_worker}:
        message = f"each worker must have {plan.virtual_stages_per_worker} stages; are on {list(plan.stage_workers)}"
        problems.append(Problem("stages", "length", message))
    operations = [line.split() for line in plan.operations or ()]
    if len(operations) != len(plan.workers):
        problems.append(
            Problem("operations", "length", f"must have an entry for each of the {len(plan.workers)} workers")
        )
    # Operation without its stage (F0, B0, ...) by stage: every stage must have the same ones.
    kinds: dict[str, list[str]] = {str(stage): [] for stage in range(len(plan.stages))}
    for worker, words in zip(plan.workers, operations, strict=False):
        for word in words:
            match = re.fullmatch(r"(0|[1-9][0-9]{0,6})([FBIW](?:0|[1-9][0-9]{0,6}))", word)
            if match is None or match[1] not in kinds or plan.stage_workers[int(match[1])] != worker:
                message = f"{short_repr(word)} is not an operation of a stage of worker {worker}"
                problems.append(Problem("operations", "reference", message))
            else:
                kinds[match[1]].append(match[2])
    if not problems and any(sorted(one) != sorted(kinds["0"]) or len(set(one)) < len(one) for one in kinds.values()):
        problems.append(Problem("operations", "duplicate", "must be the same for every stage, each once"))
    return problems


def _across(plan: Plan, numbers: Sequence[int]) -> list[Problem]:
    """Check the rules across fields; ``numbers`` are the stages' own."""
    problems = [
        Problem(f"stages[{at}].stage", "order", f"must be {at}, is {number_}")
        for at, number_ in enumerate(numbers)
        if number_ != at
    ]
    count = Counter(item for items in plan.stages for item in items)
    problems += [
        Problem("stages", "duplicate", f"{short_repr(item)} is in {n} places") for item, n in count.items() if n > 1
    ]
    for worker in sorted(set(plan.released_workers) & set(plan.stage_workers)):
        problems.append(Problem("released_workers", "reference", f"worker {worker} is released but has a stage"))
    positions, rest = divmod(len(plan.stages), plan.virtual_stages_per_worker)
    rotation = plan.stage_workers[:positions]
    if rest:
        words = f"{len(plan.stages)} stages cannot be {plan.virtual_stages_per_worker} on each worker"
        problems.append(Problem("stages", "length", words))
    elif plan.schedule == "custom":
        problems += _custom(plan)
    elif plan.schedule in V_SCHEDULES and plan.virtual_stages_per_worker != 2:
        words = f"{plan.schedule} has 2 stages on each worker, the plan has {plan.virtual_stages_per_worker}"
        problems.append(Problem("virtual_stages_per_worker", "range", words))
    elif len(set(rotation)) < positions or plan.stage_workers != _stage_workers(
        plan.schedule, rotation, len(plan.stages)
    ):
        pattern = "down and back up the" if plan.schedule in V_SCHEDULES else f"s mod {positions} of"
        words = f"stage s must be on worker {pattern} {positions} workers; are on workers {list(plan.stage_workers)}"
        problems.append(Problem("stages", "order", words))
    if plan.action == "keep" and plan.migration["moves"]:
        problems.append(Problem("migration.moves", "length", "a plan that keeps the partition moves nothing"))
    if (plan.schedule == "custom") != (plan.operations is not None):
        words = "must be there with the schedule custom, and with no other"
        problems.append(Problem("operations", "reference", words))
    if plan.balancer == "initial" and plan.base_plan_id is not None:
        problems.append(Problem("base_plan_id", "range", "must be null for the initial partition"))
    return problems


def _constrained(plan: Plan, constraints: Mapping[str, Any] | None) -> list[Problem]:
    """Check that constraints name workers, stages and items of the plan."""
    if constraints is None:
        return []
    problems = []
    limits = constraints["memory_bytes"]
    if len(limits) != len(plan.workers):
        words = f"must have an entry for each of the {len(plan.workers)} workers, has {len(limits)}"
        problems.append(Problem("constraints.memory_bytes", "length", words))
    items = {item for stage in plan.stages for item in stage}
    for at, pin in enumerate(constraints["pins"]):
        if pin["item"] not in items or pin["stage"] >= len(plan.stages):
            words = f"pins {short_repr(pin['item'])} to stage {pin['stage']}: the plan lacks one of them"
            problems.append(Problem(f"constraints.pins[{at}]", "reference", words))
    return problems


def parse_plan(document: Any, source: str) -> Plan:
    """Return the plan in a JSON document.

    Args:
        document: Parsed JSON.
        source: Name of the document in messages.

    Raises:
        DocumentError: The document breaks the format; with every problem.
    """
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if problems:
        raise DocumentError(source, problems)
    stages = document["stages"]
    same = "plan_id run_id base_plan_id read_to_step action apply_at_step balancer schedule virtual_stages_per_worker"
    plan = Plan(
        **{name: document[name] for name in (*same.split(), "predicted", "migration", "reason")},
        stages=tuple(tuple(stage["items"]) for stage in stages),
        stage_workers=tuple(stage["worker"] for stage in stages),
        released_workers=tuple(document["released_workers"]),
        granularity=document.get("granularity"),
        operations=tuple(document["operations"]) if "operations" in document else None,
        selective_grad_comp_way=_compressing_stages(document.get("x_selective_grad_comp_way")),
        expert_ranks=_expert_ranks(document.get("x_experts"), problems),
    )
    problems += _across(plan, [stage["stage"] for stage in stages])
    problems += _constrained(plan, document.get("constraints"))
    if problems:
        raise DocumentError(source, problems)
    return plan


def _compressing_stages(value: Any) -> int | None:
    """Return the number of pipeline ranks that compress between replicas; None where the plan has none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _expert_ranks(value: Any, problems: list[Problem]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the ranks of each expert by item; adds a problem where ``x_experts`` has another form."""
    if value is None:
        return {}
    try:
        ranks = {
            layer["item"]: tuple(tuple(on) if isinstance(on, list) else (on,) for on in layer["ranks"])
            for layer in value["layers"]
        }
    except (TypeError, KeyError):
        ranks = {"": ((-1,),)}
    is_valid = all(
        isinstance(item, str) and all(on and all(type(rank) is int and rank >= 0 for rank in on) for on in placed)
        for item, placed in ranks.items()
    )
    if is_valid:
        return ranks
    problems.append(Problem("x_experts", "type", "must have layers, each with item and ranks"))
    return {}


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        DocumentError: It cannot be read, breaks the format, or has another number than its file name.
    """
    plan = parse_plan(read_json(path), str(path))
    match = PLAN_NAME.fullmatch(path.name)
    if match and int(match[1]) != plan.plan_id:
        words = f"is {plan.plan_id}; the file name has {int(match[1])}"
        raise DocumentError(str(path), [Problem("plan_id", "name", words)])
    return plan


def plan_path(plans: Path, plan_id: int) -> Path:
    """Return the path of the plan with the number ``plan_id``; numbers above 999,999 have more digits."""
    return plans / f"plan-{plan_id:06d}.json"


def plan_ids(plans: Path) -> list[int]:
    """Return the numbers of the plans in a directory, ascending; files are not read."""
    return sorted(int(match[1]) for path in plans.iterdir() if (match := PLAN_NAME.fullmatch(path.name)))


def initial_plan(
    *,
    run_id: str,
    stages: Sequence[Sequence[str]],
    stage_workers: Sequence[int],
    schedule: str,
    virtual_stages_per_worker: int,
    plan_id: int = 0,
    read_to_step: int = 0,
    reason: str = "the partition that the run started with",
    granularity: str | None = None,
    operations: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the document of the partition that a run starts with.

    Args:
        run_id: ID of the run.
        stages: Item names of each stage.
        stage_workers: Worker of each stage.
        schedule: Pipeline schedule.
        virtual_stages_per_worker: Stages on each worker.
        plan_id: Number of the plan.
        read_to_step: Step after which the run starts.
        reason: One sentence.
        granularity: ``layer`` or ``sublayer``: where this run lets a stage begin.
        operations: With the schedule ``custom``: the operations of each worker.
    """
    return {
        **envelope(FORMAT, VERSION, f"dynmo-train {__version__}"),
        "plan_id": plan_id,
        "run_id": run_id,
        "base_plan_id": None,
        "read_to_step": read_to_step,
        "action": "move",
        "apply_at_step": None,
        "balancer": "initial",
        "schedule": schedule,
        "virtual_stages_per_worker": virtual_stages_per_worker,
        "stages": [
            {"stage": stage, "worker": worker, "items": list(items)}
            for stage, (worker, items) in enumerate(zip(stage_workers, stages, strict=True))
        ],
        "released_workers": [],
        "predicted": None,
        "optimality": None,
        "migration": {"moves": [], "bytes": 0, "max_link_bytes": 0, "pause_ns": 0},
        "reason": reason,
        **({} if granularity is None else {"granularity": granularity}),
        **({} if operations is None else {"operations": list(operations)}),
    }


def write_plan(plans: Path, document: Mapping[str, Any]) -> Path:
    """Write a plan under its number and return its path.

    Raises:
        FileExistsError: The number is taken.
        WriterError: The document breaks the format; nothing is written.
    """
    plans.mkdir(parents=True, exist_ok=True)
    path = plan_path(plans, document["plan_id"])
    with own_document():
        parse_plan(document, str(path))
    # Exclusive: the planner may have taken the same number meanwhile.
    write_whole(path, encode_json(document), exclusive=True)
    return path
