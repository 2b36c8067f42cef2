"""The dynamic techniques at scale, emulated: many workers on few cores, whose layers sleep for a recipe's times.

Each run is the real trainer, schedule, planner and migration: two steps of the dense model on Megatron's even split,
three steps of the technique on it, then the planner (in lockstep) makes a plan, layers move, and five more steps
follow. Another run has the technique on the exact partition of the dense model, the best static one.
Times come from ``dynmo-plan recipe NAME --layers N --trace FILE``; the assumptions are the recipe's
(``dynmo-plan recipe NAME`` prints them).

    python tests/benchmarks/train_emulated.py [--recipe NAME ...] [--layers 24,32,40,48] [--workers 8] [--repeats 3]

    python tests/benchmarks/train_emulated.py --distance [--recipe NAME ...] [--layers 32] [--workers 8]

measures how far a technique's step is from perfect: 1F1B at layer granularity, and what the planner's search found
(schedule, stages a worker, cuts inside of layers, its own order of operations), over the bound that no schedule can
beat and over all work shared evenly.

    python tests/benchmarks/train_emulated.py --packing [--recipe NAME ...] [--layers 32] [--workers 8]

packs the technique: the fewest workers that keep the throughput of the even split on all of them
(``dynmo-plan repack --reference static --keep 1`` on the profile of a run), then a run that goes there
(``--pack-to``): workers leave, and its later steps are compared with the prediction of the plan.

Each figure is the median of the repetitions with the least and the greatest. "x uniform" and "x dense-optimal" are the
gains of balancing over the two static partitions; "with technique" is the dense model on the even split over the
balanced technique; "predicted" is the simulated value of each, and "x bound" that of the balanced step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path

from train_techniques import run, write_data

from dynmo_balance._common.document import encode_json
from dynmo_balance.analysis.search import Candidate
from dynmo_balance.formats.plan import to_document
from dynmo_balance.planning.plan_builder import make_proposal, problem_of_run, to_plan
from dynmo_balance.recipes.optimality_gap import measure_gap
from dynmo_balance.recipes.recipe import best_static, dense_optimal, final_costs, load_recipe, run_recipe, with_size
from dynmo_balance.recipes.trace import write_trace
from dynmo_train._common.console import emit

RECIPES = ("moe", "pruning", "pruning-block", "freezing", "sparse-attention", "early-exit", "mod")
BASELINE, BEFORE, AFTER = 2, 3, 5
SHAPE = [
    *("--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "4", "--vocab-size", "64"),
    *("--micro-batch-size", "1", "--eval-iters", "0", "--split", "100,0,0", "--log-interval", "1000"),
    *("--lr", "1e-5", "--profile-interval", "1"),
]
ONLINE = ["--balance", "online", "--balance-lockstep", "--balancer", "exact", "--planner-timeout-s", "60"]


def train(folder: Path, layers: int, workers: int, options: list[str], steps: int) -> list[dict]:
    """A run; its metrics, one a step."""
    folder.mkdir(exist_ok=True)
    write_data(folder / "data", vocabulary=64)
    launch = ["dynmo_train", "launch", "local", "--nproc", str(workers), "--log-dir", str(folder / "logs"), "--"]
    where = ["--data-path", str(folder / "data"), "--run-dir", str(folder / "run"), "--train-iters", str(steps)]
    model = ["--num-layers", str(layers), *SHAPE]
    run(*launch, "pretrain", "gpt", *model, *where, *options)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "lm_loss" in line]


def seconds(lines: list[dict], begin: int, end: int) -> float:
    """The median step in seconds from one step to another."""
    return statistics.median(line["step_ns"] for line in lines if begin <= line["step"] <= end) / 1e9


def once(recipe: str, layers: int, workers: int, dense_s: float) -> dict[str, float]:
    """The figures of one repetition, steps in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, technique = folder / "trace.jsonl", folder / "technique.jsonl"
        sized = with_size(load_recipe(recipe), layers, workers)
        write_trace(trace, sized, BASELINE, BEFORE + AFTER)
        write_trace(technique, sized, 0, 1)
        header, first = map(json.loads, trace.read_text().splitlines()[:2])
        scale = dense_s * 1e9 / first["step_ns"]
        options = [
            *("--emulate", str(trace), "--emulate-scale", str(scale)),
            *("--global-batch-size", str(header["microbatches"]), "--granularity", header["granularity"]),
            *("--rebalance-interval", str(BASELINE + BEFORE), *ONLINE),
        ]
        lines = train(folder, layers, workers, options, BASELINE + BEFORE + AFTER)
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
        parsed, dense, last = final_costs(sized)
        problem = problem_of_run(parsed, dense, sized.run.granularity)
        dynamic = problem_of_run(parsed, last, sized.run.granularity)
        best, _ = best_static(dense_optimal(problem), dynamic)
        candidate = Candidate(
            granularity=sized.run.granularity,
            problem=problem,
            solution=best.solution,
            timeline=best.timeline,
        )
        static = steps_of_plan(folder, "dense-optimal", technique, candidate, scale)
    taken = [event for event in events if event.get("kind") == "plan_applied"]
    return {
        "dense": seconds(lines, 1, BASELINE),
        "uniform": seconds(lines, BASELINE + 1, BASELINE + BEFORE),
        "static": static,
        "balanced": seconds(lines, BASELINE + BEFORE + 1, BASELINE + BEFORE + AFTER),
        "moves": sum(len(event["moves"]) for event in taken),
        "pause_ms": sum(event["pause_ns"] for event in taken) / 1e6,
        "bound": run_recipe(sized).bound_ns * scale / 1e9,
    }


def spread(values: list[float], digits: int = 2) -> str:
    """The median with the least and the greatest."""
    each = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.{digits}f}{each}"


def speed_ups(recipe: str, layers: int, workers: int, dense_s: float, repeats: int) -> str:
    """A row of the table."""
    predicted = run_recipe(with_size(load_recipe(recipe), layers, workers))
    all_runs = [once(recipe, layers, workers, dense_s) for _ in range(repeats)]

    def cell(of: Callable[[dict[str, float]], float]) -> str:
        return spread([of(each) for each in all_runs])

    figures = [
        *(recipe, str(layers), str(workers)),
        *(cell(itemgetter(name)) for name in ("dense", "uniform", "static", "balanced")),
        *(cell(lambda each: each["uniform"] / each["balanced"]), f"{predicted.over_uniform:.2f}"),
        *(cell(lambda each: each["static"] / each["balanced"]), f"{predicted.over_dense_optimal:.2f}"),
        cell(lambda each: each["balanced"] / each["bound"]),
        *(cell(lambda each: each["dense"] / each["balanced"]), f"{predicted.with_technique_over_uniform:.2f}"),
        f"up to {predicted.recipe.published:.2f}",
        *(f"{statistics.median(each[name] for each in all_runs):.0f}" for name in ("moves", "pause_ms")),
    ]
    return f"| {' | '.join(figures)} |"


def steps_of_plan(folder: Path, name: str, trace: Path, candidate: Candidate, scale: float) -> float:
    """The median step in seconds of a run with this partition and schedule."""
    problem = candidate.problem
    proposal = make_proposal(problem, candidate.solution)
    plan = to_plan(
        proposal, run_id="-", balancer="exact", base=None, read_to_step=1, base_step_ns=None, reason="the benchmark's"
    )
    path = folder / f"{name}.json"
    path.write_bytes(encode_json(to_document(plan)))
    options = [
        *("--emulate", str(trace), "--emulate-scale", str(scale), "--granularity", candidate.granularity),
        *("--global-batch-size", str(problem.microbatches), "--balance", "offline", "--plan", str(path)),
        *("--schedule", problem.schedule, "--virtual-stages-per-worker", str(problem.virtual_stages)),
    ]
    layers = len({item for item in problem.chain.names if item.endswith(".mlp")})
    lines = train(folder / name, layers, len(problem.slots), options, steps=4)
    return seconds(lines, 2, 4)


def distance(recipe: str, layers: int, workers: int, dense_s: float) -> str:
    """A row of the table of distances."""
    found = measure_gap(with_size(load_recipe(recipe), layers, workers))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        write_trace(trace, found.recipe, 0, 1)
        scale = dense_s * 1e9 / found.plain_ns
        plain = steps_of_plan(folder, "plain", trace, found.plain, scale)
        best = steps_of_plan(folder, "best", trace, found.best, scale)
    bound, work = (ns * scale / 1e9 for ns in (found.bounds.step_ns, found.bounds.work_ns))
    figures = [
        *(recipe, str(layers), str(workers)),
        *(f"{found.plain_ns / found.bounds.step_ns:.3f}", f"{plain / bound:.3f}", f"{plain / work:.3f}"),
        *(f"{found.found_ns / found.bounds.step_ns:.3f}", f"{best / bound:.3f}", f"{best / work:.3f}", found.found),
    ]
    return f"| {' | '.join(figures)} |"


def workers_of(plan: dict) -> int:
    """How many workers hold stages."""
    return len({stage["worker"] for stage in plan["stages"]})


def packing(recipe: str, layers: int, workers: int, dense_s: float) -> str:
    """A row of the table of packing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        command = ["dynmo_balance", "recipe", recipe, "--layers", str(layers), "--workers", str(workers)]
        run(*command, "--trace", str(trace), "--baseline-steps", "1", "--technique-steps", "12")
        header, first = map(json.loads, trace.read_text().splitlines()[:2])
        common = [
            *("--emulate", str(trace), "--emulate-scale", str(dense_s * 1e9 / first["step_ns"])),
            *("--global-batch-size", str(header["microbatches"]), "--granularity", header["granularity"]),
            *("--rebalance-interval", str(1 + BEFORE), *ONLINE),
        ]
        even = train(folder / "even", layers, workers, [*common, "--balance-policy", "never"], 1 + BEFORE)
        options = ["--reference", "static", "--keep", "1", "--format", "json", "--window", str(BEFORE)]
        predicted = json.loads(run("dynmo_balance", "repack", str(folder / "even" / "run"), *options))
        fewest = workers_of(predicted)
        packed = train(folder / "packed", layers, workers, [*common, "--pack-to", str(fewest)], 1 + BEFORE + AFTER)
        plans = [json.loads(path.read_text()) for path in sorted((folder / "packed" / "run" / "plans").glob("*.json"))]
        plan = next(plan for plan in reversed(plans) if plan["released_workers"])
        left = workers_of(plan)
    static = seconds(even, 2, 1 + BEFORE)
    after = seconds(packed, 2 + BEFORE, 1 + BEFORE + AFTER)
    predicted = plan["predicted"]["step_ns"] / 1e9
    figures = [*(recipe, str(layers), str(workers), str(left), f"{static:.2f}", f"{after:.2f}")]
    return f"| {' | '.join([*figures, f'{static / after:.2f}', f'{predicted:.2f}', f'{predicted / after:.3f}'])} |"


def table(columns: list[str], rows: Iterator[str]) -> None:
    """Print a table, each row when it is there."""
    emit(f"| {' | '.join(columns)} |")
    emit("|---" * len(columns) + "|")
    for row in rows:
        emit(row)
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--layers", default="24,32,40,48")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the baseline's step; longer on a busy machine")
    parser.add_argument("--repeats", type=int, default=3, help="of the table of speed-ups")
    parser.add_argument("--distance", action="store_true", help="from perfect, in place of the speed-ups")
    parser.add_argument("--packing", action="store_true", help="onto the fewest workers, in place of the speed-ups")
    given = parser.parse_args()
    function: Callable[[str, int, int, float], str] = partial(speed_ups, repeats=given.repeats)
    columns = ["recipe", "layers", "workers"]
    if given.distance:
        function, columns = distance, ["recipe", "layers", "workers", "1F1B predicted x bound", "x bound", "x work"]
        columns += ["found predicted x bound", "x bound", "x work", "found"]
    elif given.packing:
        function, columns = packing, ["recipe", "layers", "workers", "packed on", "even split s", "packed s"]
        columns += ["throughput kept", "predicted s", "measured throughput / predicted"]
    else:
        columns += ["dense s", "uniform s", "dense-optimal s", "balanced s", "x uniform", "predicted"]
        columns += ["x dense-optimal", "predicted", "x bound", "with technique", "predicted", "published"]
        columns += ["items moved", "pause ms"]
    cases = itertools.product(given.recipe or RECIPES, given.layers.split(","))
    table(columns, (function(recipe, int(layers), given.workers, given.seconds) for recipe, layers in cases))


if __name__ == "__main__":
    main()
