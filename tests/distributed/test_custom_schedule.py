"""The schedule ``custom``: the trainer runs an order of operations that the planner made, with the same bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from dynmo_train.pipeline.partition import Partition
from tests.distributed.scenario import MICROBATCHES, Scenario, merged, play
from tests.distributed.test_placement import cut, reference
from tests.distributed.whole_runs import arguments, figures, run_command, tensors, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

SHORT = {"train_iters": "10", "eval_interval": "10", "freeze_schedule": "6:1"}


def operations(partition: Partition) -> tuple[str, ...]:
    """An order of no schedule by name: forwards by turns of two microbatches, weight gradients in turns of four."""
    rows = []
    for worker in range(partition.num_ranks):
        stages = partition.stages_of_rank(worker)
        words = []
        for pair in range(0, MICROBATCHES, 2):
            words += [f"{stage}F{m}" for stage in stages for m in (pair, pair + 1)]
        for four in range(0, MICROBATCHES, 4):
            some = range(four, four + 4)
            words += [f"{stage}I{m}" for m in some for stage in reversed(stages)]
            words += [f"{stage}W{m}" for stage in reversed(stages) for m in some]
        rows.append(" ".join(words))
    return tuple(rows)


@pytest.mark.parametrize(
    ("boundaries", "placed"),
    [((2, 5, 8), (0, 1, 1, 0)), ((1, 4, 9), (0, 0, 1, 1))],
    ids=["down and up", "side by side"],
)
def test_custom_order_and_placement_have_the_same_bits(boundaries, placed):
    partition = Partition(stages=cut(2, *boundaries).stages, stage_ranks=placed)
    scenario = Scenario(schedule="custom", virtual=2, start=partition, operations=operations(partition))
    assert merged(run_workers(play, 2, scenario)) == reference(Scenario())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set and a run on two workers in 1F1B."""
    folder = tmp_path_factory.mktemp("custom")
    write_data(folder / "data")
    train(folder / "data", folder / "plain", 2, **SHORT)
    return folder


@pytest.fixture(scope="module")
def made(folder):
    """What ``dynmo-plan partition --schedule custom`` makes of that run."""
    path = folder / "plan.json"
    words = ["partition", str(folder / "plain"), "--schedule", "custom", "--granularity", "sublayer", "-o", str(path)]
    subprocess.run([sys.executable, "-m", "dynmo_balance", *words], check=True, capture_output=True)
    return path


@pytest.fixture
def plan(made, tmp_path):
    """The same, to be changed."""
    return shutil.copy(made, tmp_path / "plan.json")


def custom(plan, **more):
    stages = json.loads(plan.read_text())["virtual_stages_per_worker"]
    requested = {
        "schedule": "custom",
        "balance": "offline",
        "plan": str(plan),
        "virtual_stages_per_worker": str(stages),
    }
    return SHORT | requested | more


def test_plan_with_operations_has_the_bits_of_1f1b(folder, plan, tmp_path):
    document = json.loads(plan.read_text())
    assert document["schedule"] == "custom"
    train(folder / "data", tmp_path / "run", 2, **custom(plan))
    assert figures(tmp_path / "run") == figures(folder / "plain")
    assert tensors(tmp_path / "run", 10) == tensors(folder / "plain", 10)
    initial = json.loads((tmp_path / "run" / "plans" / "plan-000000.json").read_text())
    assert (initial["operations"], initial["stages"]) == (document["operations"], document["stages"])


@pytest.mark.parametrize(
    ("backward_first", "options", "message"),
    [
        (False, {"global_batch_size": "32"}, "operations: have 8 microbatches; the run has 16"),
        (False, {"schedule": "1f1b", "virtual_stages_per_worker": "1"}, "is custom; this run has 1f1b"),
        (True, {}, "cannot run in this order"),
    ],
)
def test_operations_that_do_not_fit_the_run_are_an_error(folder, plan, tmp_path, backward_first, options, message):
    if backward_first:
        document = json.loads(plan.read_text())
        document["operations"] = [" ".join(reversed(line.split())) for line in document["operations"]]
        plan.write_text(json.dumps(document))
    line = arguments(folder / "data", tmp_path / "run", **custom(plan, **options))
    results = run_workers(run_command, 2, line, joins=False)
    assert [code for code, _ in results] == [2, 2]
    assert message in results[0][1]
    assert "Traceback" not in results[0][1]
