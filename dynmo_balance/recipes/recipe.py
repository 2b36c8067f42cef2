"""Recipes: one TOML file per dynamic technique, with its assumptions, and the predicted speed-up of balancing.

All steps are those of the technique, at the end of its trajectory, on four partitions::

    uniform static         Megatron's even split of the layers
    dense-optimal static   our exact partition of the dense model: the best that a user has without balancing; with the
                           minimum bottleneck or the minimum step, whichever is better for the technique
    balanced               our exact partition of the technique
    bound                  below which no schedule and no partition can be

The gain of balancing is the first or the second over the third. A gain over the uniform partition contains what a
static plan has for nothing, such as room for the head. The gain of technique and balancing together is the step of the
dense model, on either partition, over the balanced step. The balanced step over the bound is the product of two
distances: to the bound of all partitions under 1F1B, and of that bound to the one of any schedule.

``--search`` also searches schedule, stages per worker, granularity and orders of operations made for the costs; and
all of it once more with the output layer in shards on all workers, where the trainer can split it.

A recipe has ``technique`` and ``assumptions`` (sentences), and optionally ``published`` (a speed-up for comparison),
``device`` and ``steps``. ``[model]`` is a model configuration as for ``profile build``, ``[run]`` the fields of
``BuildOptions``, ``[script]`` those of ``TrajectorySettings``. ``[ranges]`` has, for parameters of ``[script]``, other
values that are plausible, and the source of all of them.

With ``costs``, a table in ``recipes/costs`` or a file of ``dynmo-train measure-costs``, all times of items are measured
ones: dense, and of the technique. Width, heads, vocabulary, tokens, microbatch and type are then those of the table;
``[model]`` has the rest. ``form`` selects the format of pruned layers (else the fastest), ``[exit]`` the exit. Without
a table, times are computed for ``device``, and the technique has the formulas of ``StatedCosts``.

Published speed-ups are "up to" figures over static training, of runs whose settings are not known. The end of the
trajectory counts, where the imbalance is largest, not the mean over a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .._common.document import MAX_CONFIG_BYTES, parse_toml, read_text
from .._common.errors import UsageError
from ..analysis.search import search
from ..costs.cost_window import ItemCosts
from ..costs.devices import load_device
from ..costs.measured_costs import MeasuredCosts
from ..costs.model_spec import ModelSpec
from ..costs.sparsity import SparsityModel
from ..formats.operator_costs import read_operator_costs
from ..formats.plan import CUSTOM
from ..formats.profile import Header
from ..inputs.analytic_profile import BuildOptions, build_costs, build_header, header_of
from ..inputs.model_config import from_config
from ..inputs.scenarios import DEFAULT_STRENGTH, TECHNIQUES, ScenarioStep, TrajectorySettings, scenario_steps
from ..partition import uniform
from ..partition.problem import PartitionProblem
from ..planning.plan_builder import Proposal, problem_of_run, propose
from ..schedules.registry import SCHEDULES
from ..simulation.bounds import bounds_of, partition_bound_ns
from ..simulation.order_bound import order_bound_ns
from ..simulation.simulator import predict

FOLDER = Path(__file__).parent
COSTS = FOLDER / "costs"
"""Tables of ``dynmo-train measure-costs``."""
SHARDED_FAMILIES = ("gpt", "llama", "mixtral")
"""Families of models whose output layer ``dynmo-train --vocabulary-parallel`` splits; Mixtral is Llama with experts."""
SHARDED_ROUNDS = 8
"""Rounds of the search with shards. Their passes wait for all workers, so that partitions are simulated one by one:
local search would take minutes."""
_KEYS = {"technique", "published", "assumptions", "device", "steps", "model", "run", "script", "ranges"}
_KEYS |= {"costs", "exit", "form"}


@dataclass(frozen=True, kw_only=True)
class ParameterRange:
    """Plausible values of a parameter of a trajectory.

    Attributes:
        values: ascending; they need not contain the recipe's.
        source: where they come from; ``assumed`` where nothing published states them.
    """

    values: tuple[float, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A technique with everything that its predictions depend on."""

    name: str
    technique: str
    published: float | None
    assumptions: tuple[str, ...]
    device: str
    spec: ModelSpec
    run: BuildOptions
    trajectory: TrajectorySettings
    ranges: Mapping[str, ParameterRange] = field(default_factory=dict)
    measured: MeasuredCosts | None = None


@dataclass(frozen=True, kw_only=True)
class SearchedStep:
    """The shortest step that a search found, and its bounds, in ns.

    Attributes:
        step_ns: the step.
        label: a short description of schedule, stages per worker and granularity.
        bound_ns: lower bound for any schedule and partition.
        limit: what that bound counts: ``work``, ``fill``, ``unit``, ``packing``, ``path`` or ``memory``.
        order_bound_ns: lower bound of the partition found, over all orders of operations.
    """

    step_ns: int
    label: str
    bound_ns: int
    limit: str
    order_bound_ns: int

    @property
    def over_bound(self) -> float:
        """The step over its bound."""
        return self.step_ns / self.bound_ns

    @property
    def over_order_bound(self) -> float:
        """The step over the bound of its partition."""
        return self.step_ns / self.order_bound_ns

    def document(self, name: str) -> dict[str, Any]:
        """The step for JSON; the keys begin with ``name``."""
        return {
            f"{name}_ns": self.step_ns,
            name: self.label,
            f"{name}_bound_ns": self.bound_ns,
            f"{name}_bound": self.limit,
            f"{name}_order_bound_ns": self.order_bound_ns,
        }


@dataclass(frozen=True, kw_only=True)
class RecipeResult:
    """Steps in ns, and the speed-ups.

    Attributes:
        recipe: the technique and its assumptions.
        dense_uniform_ns, dense_optimal_ns: the dense model on the uniform and on its own exact partition.
        uniform_ns, static_ns, balanced_ns: the technique on the uniform partition, on the exact one of the dense model,
            and on its own exact one.
        bound_ns: lower bound of the technique's step, for any schedule and partition.
        partition_bound_ns: lower bound for any partition with one stage per worker under the schedule of the recipe;
            None if that has several stages per worker, or the output layer is in shards.
        searched: the best schedule, stages per worker, granularity and order of operations; None if not searched.
        sharded: the same with the output layer in shards; None if not searched, or if the trainer cannot split it.
    """

    recipe: Recipe
    dense_uniform_ns: int
    dense_optimal_ns: int
    uniform_ns: int
    static_ns: int
    balanced_ns: int
    bound_ns: int
    partition_bound_ns: int | None = None
    searched: SearchedStep | None = None
    sharded: SearchedStep | None = None

    @property
    def over_uniform(self) -> float:
        """The gain of balancing over the uniform partition."""
        return self.uniform_ns / self.balanced_ns

    @property
    def over_dense_optimal(self) -> float:
        """The gain of balancing over the exact partition of the dense model."""
        return self.static_ns / self.balanced_ns

    @property
    def with_technique(self) -> float:
        """The dense model on its exact partition over the technique on its own."""
        return self.dense_optimal_ns / self.balanced_ns

    @property
    def with_technique_over_uniform(self) -> float:
        """The dense model on the uniform partition over the technique on its exact one."""
        return self.dense_uniform_ns / self.balanced_ns

    def document(self) -> dict[str, Any]:
        """The outcome for JSON."""
        return {
            "recipe": self.recipe.name,
            "technique": self.recipe.technique,
            "assumptions": list(self.recipe.assumptions),
            "costs": None if self.recipe.measured is None else self.recipe.measured.table.label,
            "dense_uniform_ns": self.dense_uniform_ns,
            "dense_optimal_ns": self.dense_optimal_ns,
            "uniform_static_ns": self.uniform_ns,
            "dense_optimal_static_ns": self.static_ns,
            "balanced_ns": self.balanced_ns,
            "bound_ns": self.bound_ns,
            "over_uniform_static": self.over_uniform,
            "over_dense_optimal_static": self.over_dense_optimal,
            "with_technique_over_uniform": self.with_technique_over_uniform,
            "with_technique_over_dense_optimal": self.with_technique,
            "partition_bound_ns": self.partition_bound_ns,
            **(self.searched.document("searched") if self.searched else {"searched_ns": None, "searched": None}),
            **(self.sharded.document("sharded") if self.sharded else {"sharded_ns": None, "sharded": None}),
            "published_up_to": self.recipe.published,
        }


def recipe_names() -> list[str]:
    """The built-in recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def _from_table(kind: type, content: Any, source: str, part: str) -> Any:
    """A dataclass from a TOML table.

    Raises:
        UsageError: with every key that does not fit.
    """
    if not isinstance(content, dict):
        raise UsageError(f"{source}: [{part}] must be a table")
    known = {field.name: field for field in fields(kind)}
    # The types of the defaults are the schema. A TOML true is a Python int, so booleans are compared first.
    problems = [f"{part}.{key} is unknown" for key in content if key not in known]
    for key, value in content.items():
        default = known[key].default if key in known else None
        if isinstance(default, bool) != isinstance(value, bool) and isinstance(default, bool | int | float):
            problems.append(f"{part}.{key} is {value!r}, must have the type of {default!r}")
        elif _is_numeric(known.get(key), default) and not isinstance(value, int | float):
            problems.append(f"{part}.{key} must be a number, is {value!r}")
    if problems:
        raise UsageError(f"{source}: {'; '.join(problems)}")
    return kind(**content)


def _is_numeric(field: Field[Any] | None, default: Any) -> bool:
    return isinstance(default, int | float) or (field is not None and field.type in ("int", "float"))


def load_recipe(name: str, costs: Path | None = None) -> Recipe:
    """A built-in recipe by name, or one from a TOML file.

    Args:
        name: of the recipe, or its path.
        costs: table of ``dynmo-train measure-costs`` instead of the recipe's own.

    Raises:
        UsageError: the name is neither, or the file or the table is invalid.
    """
    path = FOLDER / f"{name}.toml" if name in recipe_names() else Path(name)
    if not path.is_file():
        raise UsageError(f"unknown recipe {name!r}: choose one of {', '.join(recipe_names())} or a TOML file")
    try:
        content = parse_toml(read_text(path, MAX_CONFIG_BYTES))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    # An unknown key is refused: a misspelled assumption would otherwise silently be the default.
    if unknown := sorted(content.keys() - _KEYS):
        raise UsageError(f"{path}: unknown keys {', '.join(unknown)}; the keys are {', '.join(sorted(_KEYS))}")
    technique = content.get("technique")
    if not isinstance(technique, str) or technique not in TECHNIQUES:
        raise UsageError(f"{path}: technique must be one of {', '.join(TECHNIQUES)}, is {technique!r}")
    model = _table(content, "model", path)
    run = _from_table(BuildOptions, _optional_table(content, "run", path), str(path), "run")
    device = str(content.get("device", "h100"))
    measured = _measured(content, costs, path)
    if measured is not None:
        model, run = _of_table(measured, content, path)
        device = "cpu" if measured.table.device_type == "cpu" else device
    return Recipe(
        name=path.stem,
        technique=technique,
        published=content.get("published"),
        assumptions=_assumptions(content, path),
        device=device,
        spec=from_config(model, str(path)),
        run=run,
        trajectory=_script(content, technique, path),
        ranges=_ranges(content.get("ranges", {}), path),
        measured=measured,
    )


def _measured(content: Mapping[str, Any], costs: Path | None, path: Path) -> MeasuredCosts | None:
    """The measured costs of a recipe, at the longest sequence of its table; None without a table."""
    stated = content.get("costs")
    if stated is None and costs is None:
        return None
    built_in = COSTS / f"{stated}.json"
    table = costs or (built_in if os.path.isfile(built_in) else path.parent / str(stated))
    exit_setting = _optional_table(content, "exit", path)
    measured = read_operator_costs(table)
    model = _table(content, "model", path)
    experts = model.get("num_experts", 1)
    return MeasuredCosts(
        measured,
        max(measured.sequence_lengths),
        form=content.get("form"),
        exit_setting=exit_setting,
        experts_per_token=model.get("moe_router_topk") if type(experts) is int and experts > 1 else None,
    )


def _of_table(measured: MeasuredCosts, content: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], BuildOptions]:
    """Model configuration and run with the shape of the measured table.

    Raises:
        UsageError: the recipe states a part of the shape, too.
    """
    table = measured.table
    shape = {
        "hidden_size": table.hidden_size,
        "ffn_hidden_size": table.ffn_hidden_size,
        "num_attention_heads": table.num_attention_heads,
        "vocab_size": table.vocab_size,
        "max_position_embeddings": measured.tokens,
    }
    run = {"micro_batch_size": table.micro_batch_size, "dtype": table.dtype}
    model, stated_run = _table(content, "model", path), _optional_table(content, "run", path)
    if twice := sorted({*shape, "seq_length"} & model.keys()) + sorted({*run, "sequence"} & stated_run.keys()):
        raise UsageError(f"{path}: {', '.join(twice)}: the measured table has the shape of the model; remove them")
    return {**model, **shape}, _from_table(BuildOptions, {**stated_run, **run}, str(path), "run")


def _ranges(content: Any, path: Path) -> dict[str, ParameterRange]:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: [ranges] must be a table")
    ranges = {}
    for name, entry in content.items():
        values, source = (entry.get("values"), entry.get("source")) if isinstance(entry, dict) else (None, None)
        numbers = [value for value in values if type(value) in (int, float)] if isinstance(values, list) else []
        if not numbers or numbers != values or not isinstance(source, str) or len(entry) != 2:
            raise UsageError(f"{path}: ranges.{name} must have values, a list of numbers, and source, a text")
        if name not in script_parameters():
            raise UsageError(f"{path}: ranges.{name} is unknown; parameters are {', '.join(script_parameters())}")
        ranges[name] = ParameterRange(values=tuple(sorted(numbers)), source=source)
    return ranges


def script_parameters() -> tuple[str, ...]:
    """The numbers of ``[script]`` that may have a range; those of ``[script.sparsity]`` with a prefix."""
    own = [each.name for each in fields(TrajectorySettings) if each.type == "float"]
    return (*own, *(f"sparsity.{each.name}" for each in fields(SparsityModel) if each.type == "float"))


def _table(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = content.get(name)
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [{name}] is missing")
    return table


def _assumptions(content: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    stated = content.get("assumptions", [])
    if not isinstance(stated, list):
        raise UsageError(f"{path}: assumptions must be a list of texts")
    return tuple(map(str, stated))


def _optional_table(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [{name}] must be a table")
    return table


def _script(content: Mapping[str, Any], technique: str, path: Path) -> TrajectorySettings:
    steps = content.get("steps", 400)
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"{path}: steps must be a positive integer, is {steps!r}")
    stated = dict(_optional_table(content, "script", path))
    model = _from_table(SparsityModel, stated.pop("sparsity", {}), str(path), "script.sparsity")
    values = {"steps": steps, "strength": DEFAULT_STRENGTH[technique], "seed": 1, **stated}
    trajectory: TrajectorySettings = replace(
        _from_table(TrajectorySettings, values, str(path), "script"), sparsity=model
    )
    if not 0 <= trajectory.strength < 1:
        raise UsageError(f"{path}: script.strength must be within [0, 1), is {trajectory.strength}")
    return trajectory


def with_size(recipe: Recipe, layers: int | None, workers: int | None) -> Recipe:
    """The recipe with other numbers of ``layers`` (blocks) and ``workers``; None leaves one as it is."""
    spec = replace(recipe.spec, layers=recipe.spec.layers if layers is None else layers)
    run = replace(recipe.run, workers=recipe.run.workers if workers is None else workers)
    if (spec, run) == (recipe.spec, recipe.run):
        return recipe
    other = f"here with {spec.layers} layers on {run.workers} workers, in place of the numbers below"
    return replace(recipe, spec=spec, run=run, assumptions=(other, *recipe.assumptions))


@dataclass(frozen=True, kw_only=True)
class RecipeCosts:
    """The header of a recipe's profile, as document and parsed, and its dense costs."""

    document: dict[str, Any]
    header: Header
    dense: ItemCosts


def dense_costs(recipe: Recipe) -> RecipeCosts:
    """The header of a recipe's profile and its dense costs, measured or computed."""
    device = load_device(recipe.device)
    document = build_header(recipe.spec, device, recipe.run, recipe.name)
    header = header_of(document)
    dense = build_costs(recipe.spec, header, device, recipe.run)
    if recipe.measured is not None:
        dense = recipe.measured.dense(header, dense)
    return RecipeCosts(document=document, header=header, dense=dense)


def steps_of(recipe: Recipe, costs: RecipeCosts) -> Iterator[ScenarioStep]:
    """The costs of every step of a recipe's technique."""
    return scenario_steps(recipe.technique, costs.header, costs.dense, recipe.trajectory, recipe.measured)


def final_costs(recipe: Recipe) -> tuple[Header, ItemCosts, ItemCosts]:
    """The header of a recipe's profile, its costs without the technique, and the costs at the end of its trajectory."""
    costs = dense_costs(recipe)
    last = costs.dense
    for scenario_step in steps_of(recipe, costs):
        last = scenario_step.costs
    return costs.header, costs.dense, last


def run_recipe(recipe: Recipe, *, searching: bool = False) -> RecipeResult:
    """The steps of a recipe at the end of its trajectory.

    Args:
        recipe: the technique and its assumptions.
        searching: whether to search schedule, stages per worker and granularity as well; takes seconds.

    Raises:
        InfeasibleError: no partition satisfies the constraints.
    """
    header, dense, last = final_costs(recipe)
    before, after = (problem_of_run(header, costs, recipe.run.granularity) for costs in (dense, last))
    optimal = dense_optimal(before)
    single = after.virtual_stages == 1 and after.chain.vocabulary is None
    outcome = RecipeResult(
        recipe=recipe,
        dense_uniform_ns=predict(before, uniform.boundaries(before)).step_ns,
        dense_optimal_ns=min(each.timeline.step_ns for each in optimal),
        uniform_ns=predict(after, uniform.boundaries(after)).step_ns,
        static_ns=best_static(optimal, after)[1],
        balanced_ns=propose(after, "exact").timeline.step_ns,
        bound_ns=bounds_of(after).step_ns,
        partition_bound_ns=partition_bound_ns(after) if single else None,
    )
    if not searching:
        return outcome
    searched = _search(header, last, recipe.run.granularity)
    shards = _in_shards(recipe)
    if shards is not None:
        header, _, last = final_costs(shards)
    return replace(
        outcome,
        searched=searched,
        sharded=None if shards is None else _search(header, last, recipe.run.granularity),
        # A unit of finer granularity has a smaller bound, which holds for all.
        bound_ns=min(outcome.bound_ns, searched.bound_ns),
    )


def dense_optimal(problem: PartitionProblem) -> tuple[Proposal, ...]:
    """The partitions of the dense model that have the minimum bottleneck, and the minimum simulated step.

    They are equally good for the dense model, and differ for a technique: the opponent is the better one.
    """
    return tuple(propose(problem, "exact", objective=objective) for objective in ("bottleneck", "auto"))


def best_static(optimal: Iterable[Proposal], technique: PartitionProblem) -> tuple[Proposal, int]:
    """The partition that is the best for a technique, and its step in ns.

    Args:
        optimal: partitions of the dense model, see :func:`dense_optimal`.
        technique: the technique on the same items.
    """
    steps = [(each, predict(technique, each.solution.boundaries).step_ns) for each in optimal]
    return min(steps, key=lambda found: found[1])


def _in_shards(recipe: Recipe) -> Recipe | None:
    """The recipe with one shard of the output layer per worker; None if the trainer cannot split it."""
    # Exits need the whole output layer.
    if recipe.technique == "early-exit" or recipe.spec.family not in SHARDED_FAMILIES or recipe.run.vocabulary_parallel:
        return None
    return replace(recipe, run=replace(recipe.run, vocabulary_parallel=recipe.run.workers))


def _search(header: Header, costs: ItemCosts, granularity: str) -> SearchedStep:
    """The shortest step over schedules, stages per worker, granularities and orders made for the costs."""
    problem = problem_of_run(header, costs, granularity)
    limits = {} if problem.chain.vocabulary is None else {"rounds": SHARDED_ROUNDS, "num_improved": 0}
    found = search(header, problem, (*SCHEDULES, CUSTOM), ("layer", "sublayer"), **limits)
    best = found.best
    return SearchedStep(
        step_ns=best.timeline.step_ns,
        label=best.label,
        bound_ns=found.bounds.step_ns,
        limit=found.bounds.limit,
        order_bound_ns=order_bound_ns(best.problem, best.solution.boundaries),
    )
