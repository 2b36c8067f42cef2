"""Shards of the vocabulary that ranks of other axes share: nearly the losses of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.layouts import Layout, play_layouts
from tests.distributed.scenario import Scenario
from tests.distributed.whole_runs import manifest_of, train, write_data
from tests.distributed.workers import run_workers
from tests.levels import complete_but, of_level

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

PLAIN = Scenario(steps=7, freeze=(), tied=False, shards=4, schedule="gpipe", dropout=0.0, prune=False)
T2, C2, D2 = ParallelDims(tensor=2), ParallelDims(data=2, context=2), ParallelDims(data=2)
# A quarter of the padded vocabulary is padding: the slice of the second rank of the last shard has no token.
CUT = {"shard_parts": 2}
TOKENS = {"sequence_parallel": True}
NEAR = {
    "tensor": Layout(dims=T2, scenario=replace(PLAIN, **CUT)),
    "sequence, tied": Layout(dims=T2, scenario=replace(PLAIN, tied=True, **CUT), settings=TOKENS),
    "context": Layout(dims=C2, scenario=PLAIN),
    "zero 3, tied": Layout(dims=D2, scenario=replace(PLAIN, tied=True), settings={"zero_stage": 3}),
}


def played(size: int, layouts: list[Layout]) -> list[dict]:
    results = run_workers(play_layouts, size, layouts)
    for other in results[1:]:
        assert other == results[0]
    return results[0]


@pytest.fixture(scope="module")
def two(request):
    layouts = of_level(request.config, NEAR, "tensor", "zero 3, tied")
    return dict(zip(layouts, played(2, list(layouts.values())), strict=True))


# Two copies of the shards of two replicas.
HYBRID = Layout(dims=ParallelDims(data=4, hsdp=2), scenario=replace(PLAIN, tied=True), settings={"zero_stage": 2})


@pytest.fixture(scope="module")
def hybrid():
    return played(4, [HYBRID])[0]


@pytest.fixture(scope="module")
def whole():
    """One process, without shards: by whether the tables are tied."""
    scenarios = [replace(PLAIN, tied=tied, shards=None) for tied in (False, True)]
    return played(1, [Layout(dims=ParallelDims(), scenario=each) for each in scenarios])


@pytest.mark.parametrize("name", complete_but([*NEAR, "hybrid, tied"], "tensor", "zero 3, tied"))
def test_shards_that_ranks_share_are_near_one_process(request, two, whole, name):
    expected, found = whole["tied" in name], two[name] if name in NEAR else request.getfixturevalue("hybrid")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_shard_of_padding_alone_leaves_the_steps_of_a_resumed_run_alone(tmp_path):
    """97 rows are 256 with padding on two tensor-parallel ranks: the last of seven shards have none of them."""
    data, run, untied = write_data(tmp_path / "data"), tmp_path / "run", "--untie-embeddings-and-output-weights"
    for options in ({"exit_interval": "2"}, {"load": str(run)}):
        train(
            data, run, 2, untied, "--tensor-model-parallel-size=2", vocabulary_parallel="7", train_iters="4", **options
        )
    assert set(manifest_of(run, 4)["optimizer"]["steps"].values()) == {4}
