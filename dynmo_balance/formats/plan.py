"""Partition plans: read, validate, write. The specification is ``plan.md`` in this folder.

::

    bytes --read_json--> document --DOCUMENT--> structure --_build--> Plan --_across--> rules across fields
           (bounded)    (envelope)  (generated from plan.schema.json)        |
                                                                             +--header_problems--> rules with a profile
    Plan --to_document--> document --encode_plan (validated again)--> publish: temporary file, flush, link()

``DOCUMENT`` is the structural part; only rules that relate several fields are written here. All problems are reported
at once, each with its path.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.checks import ENVELOPE
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
from .profile import Header

FORMAT = "dynmo.plan"
VERSION = 1
V_SCHEDULES = ("zb-v", "dualpipe-v")
"""The schedules with two stages per worker in a V."""
CUSTOM = "custom"
"""The schedule of a plan with its own order of operations."""
RECORDS_KEY = "x_cost_records"
"""Key: number of step records, up to ``read_to_step``, that the costs are the median of."""
SEGMENT_KEY = "x_segment"
"""Key: segment of the profile in which ``dynmo-plan watch`` made the plan."""
EXPERTS_KEY = "x_experts"
"""Key: the ranks of the experts of each layer, and what of them moves."""
_OPERATION = re.compile(r"(0|[1-9][0-9]{0,6})([FBIW])(0|[1-9][0-9]{0,6})")
_FILE_NAME = re.compile(r"plan-(\d{6,})\.json")


def position_of(schedule: str, stage: int, workers: int) -> int:
    """The index of the worker that executes a stage; workers are in the order of their first stages.

    Looped: ``stage mod workers``. In a V: worker ``p`` of ``P`` executes stages ``p`` and ``2 P - 1 - p``.
    """
    lap, at = divmod(stage, workers)
    return workers - 1 - at if lap % 2 and schedule in V_SCHEDULES else at


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: its number, its worker, and its items in order, possibly none."""

    stage: int
    worker: int
    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The predictions of the planner; times in ns, per worker in the order of their first stages."""

    bottleneck_ns: int
    step_ns: int
    bubble_fraction: float
    gain_fraction: float | None
    busy_ns: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Pin:
    """An item that has to be in a stage."""

    item: str
    stage: int


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The constraints of the partition; ``memory_bytes`` is per worker, in the order of their first stages."""

    microbatches: int
    min_layers: int
    memory_bytes: tuple[int | None, ...]
    pins: tuple[Pin, ...]
    tied_together: bool


@dataclass(frozen=True, kw_only=True)
class Optimality:
    """The certificate of the bottleneck.

    Attributes:
        objective: what was minimized. With ``simulated``, a partition with a lower bottleneck and a longer step may
            exist.
            The first plans of this version do not have it.
        lower_bound_ns: no partition has a lower bottleneck.
        optimal: whether the bottleneck equals the bound.
        blocking_items: the run of items that rules out a lower bottleneck.
    """

    objective: str = "bottleneck"
    lower_bound_ns: int
    optimal: bool
    blocking_items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Move:
    """One item that moves to another worker."""

    item: str
    from_worker: int
    to_worker: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Migration:
    """All moves from the base plan; ``max_link_bytes`` is the largest sum from one worker to another."""

    moves: tuple[Move, ...] = ()
    bytes: int = 0
    max_link_bytes: int = 0
    pause_ns: int | None = 0


@dataclass(frozen=True, kw_only=True)
class ExpertsOfItem:
    """The ranks of a layer's experts in their expert-parallel group.

    Attributes:
        item: the layer's item.
        ranks: the rank of each expert; its ranks, with its owner first, where it has copies.
        tokens: of each expert in a step; empty where the base of the plan has the same ranks.
        max_tokens_before, max_tokens: of the heaviest rank with the base, and with the plan; times of the layer are
            multiplied by their ratio. 0 where ``tokens`` is empty.
    """

    item: str
    ranks: tuple[int | tuple[int, ...], ...]
    tokens: tuple[int, ...] = ()
    max_tokens_before: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ExpertMoves:
    """The experts that move, the bytes that they transfer, and the largest number of bytes of a rank.

    Attributes:
        moves: number of experts.
        bytes: of all ranks.
        max_rank_bytes: sent or received by one rank.
        pause_ns: time of the transfer in ns, apart from that of layers.
        copies: number of copies that ranks get; their weights are transferred in the steps.
    """

    moves: int = 0
    bytes: int = 0
    max_rank_bytes: int = 0
    pause_ns: int = 0
    copies: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One partition plan; the fields are those of ``plan.md``."""

    plan_id: int
    run_id: str
    base_plan_id: int | None
    read_to_step: int
    action: str
    apply_at_step: int | None
    balancer: str
    schedule: str
    virtual_stages_per_worker: int
    stages: tuple[Stage, ...]
    released_workers: tuple[int, ...]
    predicted: Predicted | None
    optimality: Optimality | None
    migration: Migration
    reason: str
    granularity: str | None = None
    constraints: Constraints | None = None
    operations: tuple[str, ...] | None = None
    extra: Mapping[str, Any] | None = None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The position of the first item of each stage, and the number of items: ``len(stages) + 1`` positions."""
        result = [0]
        for stage in self.stages:
            result.append(result[-1] + len(stage.items))
        return tuple(result)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ids of the workers with stages, in the order of their first stages."""
        return tuple(dict.fromkeys(stage.worker for stage in self.stages))

    @property
    def owner(self) -> dict[str, int]:
        """The worker of each item."""
        return {item: stage.worker for stage in self.stages for item in stage.items}

    @property
    def experts(self) -> tuple[ExpertsOfItem, ...]:
        """The placements of experts that differ from the order of their numbers; empty where the key is damaged."""
        found = (self.extra or {}).get(EXPERTS_KEY)
        layers = found.get("layers") if isinstance(found, dict) else None
        try:
            return tuple(_experts_of_item(layer) for layer in layers or ())
        except (AttributeError, KeyError, TypeError):
            return ()

    @property
    def expert_placements(self) -> dict[str, tuple[int | tuple[int, ...], ...]]:
        """The rank of each expert, or its ranks with its owner first, by item."""
        return {layer.item: layer.ranks for layer in self.experts}


def expert_keys(layers: Sequence[ExpertsOfItem], moves: ExpertMoves) -> dict[str, Any]:
    """The key of a plan's experts; empty without placements."""
    return {EXPERTS_KEY: {"layers": [_plain(layer) for layer in layers], **vars(moves)}} if layers else {}


def _experts_of_item(value: Mapping[str, Any]) -> ExpertsOfItem:
    plain = _tuples(value)
    ranks = tuple(tuple(on) if isinstance(on, list) else on for on in plain["ranks"])
    if not all(isinstance(each, int) for on in ranks for each in (on if isinstance(on, tuple) else (on,))):
        raise TypeError("ranks must be integers, or arrays of integers")
    return ExpertsOfItem(**{**plain, "ranks": ranks})


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    # Records are frozen and hashable, hence tuples; nested ``x_`` keys have no field.
    return {key: tuple(v) if isinstance(v, list) else v for key, v in value.items() if not key.startswith("x_")}


def _build(value: Mapping[str, Any]) -> Plan:
    plain = {key: v for key, v in _tuples(value).items() if key not in ENVELOPE}
    predicted, optimality, migration = value["predicted"], value["optimality"], value["migration"]
    plain["stages"] = tuple(Stage(**_tuples(stage)) for stage in value["stages"])
    plain["predicted"] = None if predicted is None else Predicted(**_tuples(predicted))
    plain["optimality"] = None if optimality is None else Optimality(**_tuples(optimality))
    moves = tuple(Move(**_tuples(move)) for move in migration["moves"])
    plain["migration"] = Migration(**{**_tuples(migration), "moves": moves})
    if "constraints" in value:
        constraints = _tuples(value["constraints"])
        constraints["pins"] = tuple(Pin(**_tuples(pin)) for pin in constraints["pins"])
        plain["constraints"] = Constraints(**constraints)
    extra = {key: v for key, v in value.items() if key.startswith("x_")}
    return Plan(**plain, extra=extra or None)


def _across(plan: Plan) -> list[Problem]:
    problems = []
    placed: set[str] = set()
    for index, stage in enumerate(plan.stages):
        if stage.stage != index:
            problems.append(Problem(f"stages[{index}].stage", "order", f"must be {index}, is {stage.stage}"))
        for item in stage.items:
            if item in placed:
                problems.append(Problem(f"stages[{index}].items", "duplicate", f"{short_repr(item)} is in two places"))
            placed.add(item)
        if stage.worker in plan.released_workers:
            message = f"worker {stage.worker} is released but has stage {index}"
            problems.append(Problem(f"stages[{index}].worker", "reference", message))
    problems += _placement_problems(plan) if plan.schedule != CUSTOM else _custom_placement_problems(plan)
    problems += _operation_problems(plan)
    problems += _constraint_problems(plan)
    if plan.action == "keep" and plan.migration.moves:
        problems.append(Problem("migration.moves", "length", "must be empty for a plan that keeps the partition"))
    if plan.balancer == "initial" and plan.base_plan_id is not None:
        problems.append(Problem("base_plan_id", "range", "must be null for the initial partition"))
    return problems


def _constraint_problems(plan: Plan) -> list[Problem]:
    """Constraints that name workers, stages or items that the plan does not have."""
    if plan.constraints is None:
        return []
    problems = []
    workers, limits = len(plan.workers), len(plan.constraints.memory_bytes)
    if workers != limits:
        message = f"must have an entry for each of the {workers} workers, has {limits}"
        problems.append(Problem("constraints.memory_bytes", "length", message))
    items = {item for stage in plan.stages for item in stage.items}
    for at, pin in enumerate(plan.constraints.pins):
        if pin.item not in items or pin.stage >= len(plan.stages):
            message = f"pins {short_repr(pin.item)} to stage {pin.stage}: the plan does not have both"
            problems.append(Problem(f"constraints.pins[{at}]", "reference", message))
    return problems


def _placement_problems(plan: Plan) -> list[Problem]:
    """Stages that are not on the worker of their schedule."""
    problems = []
    virtual = plan.virtual_stages_per_worker
    count, rest = divmod(len(plan.stages), virtual)
    if rest:
        message = f"{len(plan.stages)} stages do not divide into {virtual} per worker"
        return [Problem("stages", "length", message)]
    first = [stage.worker for stage in plan.stages[:count]]
    if len(set(first)) < count:
        problems.append(Problem("stages", "order", f"the first {count} stages must be on different workers: {first}"))
    if plan.schedule in V_SCHEDULES and virtual != 2:
        message = f"{plan.schedule} has 2 stages per worker, the plan has {virtual}"
        problems.append(Problem("virtual_stages_per_worker", "range", message))
    for index, stage in enumerate(plan.stages[count:], start=count):
        at = position_of(plan.schedule, index, count)
        if stage.worker != first[at]:
            message = f"must be {first[at]}, the worker of stage {at}; is {stage.worker}"
            problems.append(Problem(f"stages[{index}].worker", "order", message))
    return problems


def _custom_placement_problems(plan: Plan) -> list[Problem]:
    """Workers with another number of stages; a custom schedule places stages anywhere."""
    count = Counter(stage.worker for stage in plan.stages)
    virtual = plan.virtual_stages_per_worker
    return [
        Problem("stages", "length", f"worker {worker} has {number} stages, must have {virtual}")
        for worker, number in count.items()
        if number != virtual
    ]


def _operation_problems(plan: Plan) -> list[Problem]:
    """Operations that are missing, duplicate or on another worker; only a custom schedule has operations."""
    if (plan.schedule == CUSTOM) != (plan.operations is not None):
        return [Problem("operations", "reference", "must be present with the schedule custom, and with no other")]
    problems = []
    done: dict[int, Counter[str]] = {at: Counter() for at in range(len(plan.stages))}
    workers = plan.workers
    if plan.operations is not None and len(plan.operations) != len(workers):
        return [
            Problem(
                "operations",
                "length",
                f"must have one entry for each of the {len(workers)} workers, have {len(plan.operations)}",
            )
        ]
    for at, line in enumerate(plan.operations or ()):
        for notation in line.split():
            match = _OPERATION.fullmatch(notation)
            stage = int(match[1]) if match else -1
            if match is None or stage >= len(plan.stages) or plan.stages[stage].worker != workers[at]:
                message = f"{short_repr(notation)} is not an operation of a stage of worker {workers[at]}"
                problems.append(Problem(f"operations[{at}]", "reference", message))
            else:
                done[stage][f"{match[2]}{match[3]}"] += 1
    if plan.operations is not None and not problems and len({frozenset(c.items()) for c in done.values()}) > 1:
        problems.append(Problem("operations", "length", "must be the same for every stage"))
    if any(number > 1 for counter in done.values() for number in counter.values()):
        problems.append(Problem("operations", "duplicate", "an operation occurs twice"))
    return problems


def parse_plan(document: Any, source: str) -> Plan:
    """The plan of a JSON document.

    Raises:
        DocumentError: with every problem of the document.
    """
    problems = envelope_problems(document, FORMAT, VERSION)
    if not problems:
        DOCUMENT(document, "", problems)
    if problems:
        raise DocumentError(source, problems)
    plan = _build(document)
    if problems := _across(plan):
        raise DocumentError(source, problems)
    return plan


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        DocumentError: it cannot be read or violates a rule.
    """
    return parse_plan(read_json(path), str(path))


def _plain(value: Any) -> Any:
    """Dataclasses as objects and tuples as arrays, without the copies of ``dataclasses.asdict``."""
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    if is_dataclass(value):
        return {name: _plain(element) for name, element in vars(value).items()}
    return value


def to_document(plan: Plan) -> dict[str, Any]:
    """The JSON document of a plan, created now."""
    content = {name: _plain(value) for name, value in vars(plan).items()}
    extra = content.pop("extra") or {}
    for name in ("granularity", "constraints", "operations"):
        if content[name] is None:
            del content[name]
    return {**envelope(FORMAT, VERSION, f"dynmo-plan {__version__}"), **content, **extra}


def encode_plan(plan: Plan, source: str) -> bytes:
    """The bytes of a plan's document.

    Raises:
        WriterError: the document violates the format that readers check.
    """
    document = to_document(plan)
    with own_document():
        parse_plan(json.loads(payload := encode_json(document)), source)
    return payload


def header_problems(plan: Plan, header: Header) -> list[Problem]:
    """Contradictions of a plan to the profile's header: another run, missing or reordered items, unknown workers."""
    problems = []
    if plan.run_id != header.run_id:
        problems.append(
            Problem("run_id", "reference", f"is {short_repr(plan.run_id)}, the profile's is {header.run_id!r}")
        )
    # Order as well as presence: a stage executes its items in the order of its list, so another one is another model.
    planned = [item for stage in plan.stages for item in stage.items]
    listed = [item.name for item in header.items]
    if planned != listed:
        at = next((i for i, pair in enumerate(zip(planned, listed, strict=False)) if pair[0] != pair[1]), None)
        where = f"they differ at item {at}" if at is not None else f"{len(planned)} items against {len(listed)}"
        problems.append(Problem("stages", "reference", f"must contain the profile's items in its order; {where}"))
    known = {worker.worker for worker in header.workers}
    problems.extend(
        Problem(f"stages[{stage.stage}].worker", "reference", f"the profile has no worker {stage.worker}")
        for stage in plan.stages
        if stage.worker not in known
    )
    return problems


def with_planned_workers(header: Header, plan: Plan) -> Header:
    """The header with the workers that a plan for more workers than the profile has adds.

    Their numbers are those above the profile's highest one, as in ``partition.problem.worker_slots``; they are as the
    first worker, at normal speed. The header as it is where the plan has other unknown workers.
    """
    known = {worker.worker for worker in header.workers}
    added = sorted(set(plan.workers) - known)
    most = max(known)
    if added != list(range(most + 1, most + 1 + len(added))) or known - {*plan.workers, *plan.released_workers}:
        return header
    first = replace(header.workers[0], ranks=(), hosts=(), relative_speed=1.0, releasable=True)
    return replace(header, workers=(*header.workers, *(replace(first, worker=number) for number in added)))


def read_plan_of_profile(path: Path, header: Header) -> tuple[Plan, Header]:
    """A plan that was made from a profile, and the profile's header with the workers that the plan adds.

    Raises:
        DocumentError: the plan cannot be read, violates a rule, or does not fit the header.
    """
    plan = read_plan(path)
    header = with_planned_workers(header, plan)
    if problems := header_problems(plan, header):
        raise DocumentError(str(path), problems)
    return plan, header


def plan_numbers(folder: Path) -> list[int]:
    """The ids of the plan files in a folder, ascending, whatever their contents."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _FILE_NAME.fullmatch(entry.name)))


def plan_path(folder: Path, plan_id: int) -> Path:
    """The path of the plan with id ``plan_id`` in the folder ``plans`` of a run.

    Six digits keep the names in order; larger ids are longer, and readers accept them.
    """
    return folder / f"plan-{plan_id:06d}.json"


def publish(folder: Path, plan: Plan) -> Plan:
    """Publish a plan under the id one above the highest present; returns it with its id.

    The file appears whole or not at all, and never replaces another: if the id is taken meanwhile, the next one is
    tried.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        # ``exclusive`` creates the name by link(), which fails if it exists. Two planners, such as one that was taken
        # for dead and its successor, thus never write the same number, and the trainer never reads half of a plan.
        numbered = replace(plan, plan_id=max(plan_numbers(folder), default=-1) + 1)
        try:
            path = plan_path(folder, numbered.plan_id)
            write_whole(path, encode_plan(numbered, str(path)), exclusive=True)
        except FileExistsError:
            continue
        return numbered
