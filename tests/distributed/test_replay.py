"""Steps of a run executed again: the same bits and digests on any number of ranks, and faults named by tensor."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.distributed.whole_runs import run_command, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

WEIGHT, ITEM = "layers.1.mlp.fc1.weight", "layers.2.attention"
SHORT = {"train_iters": "8", "save_interval": "4", "eval_iters": "0"}
STEP = 7


def output_of(words: list[str], fault=None) -> tuple[int, str]:
    """Run a command in this process, with a fault; its exit code and stdout."""
    import contextlib
    import io

    from dynmo_train.cli import main

    if fault is not None:
        fault()
    sys.argv = ["dynmo-train", *words]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0), text.getvalue()
    return 0, text.getvalue()


def flip_bit() -> None:
    """Flip the lowest bit of one element of a weight after step 4."""
    from dynmo_train.trainer.engine import Engine

    after_step = Engine.after_step

    def flipping(engine, step):
        events = after_step(engine, step)
        for _, name, parameter in engine.item_store.parameters():
            if step == 4 and name == WEIGHT:
                parameter.data.view(torch.int32)[3, 5] ^= 1
        return events

    Engine.after_step = flipping


def inject_nan() -> None:
    """Make one element of the output of an item NaN, in one microbatch of one step."""
    from dynmo_train.pipeline.stage_module import StageModule

    run = StageModule._run

    def failing(stage, name, module, index, *arguments):
        output = run(stage, name, module, index, *arguments)
        # Steps of 8 microbatches: the third one of the step.
        if name == ITEM and stage.step == STEP and index == 8 * (STEP - 1) + 2:
            output = output.clone()
            output.view(-1)[0] = float("nan")
        return output

    StageModule._run = failing


def flip_gradient_bit() -> None:
    """Flip a bit of the gradient of a weight after the third microbatch of a step."""
    from dynmo_train.pipeline.pipeline_stage import ItemStage

    observe = ItemStage._observe_gradients

    def flipping(stage, bwd_chunk_id):
        module = stage.module
        if module.step == STEP and module.first_microbatch + bwd_chunk_id == 8 * (STEP - 1) + 2:
            for name, layer in zip(module.names, module.layers, strict=True):
                if f"{name}.fc1.weight" == WEIGHT:
                    layer.fc1.weight.grad.view(torch.int32)[3, 5] ^= 1 << 22
        observe(stage, bwd_chunk_id)

    ItemStage._observe_gradients = flipping


def forget_memories() -> None:
    """Load checkpoints without the state of the compression."""
    from dynmo_train.optim.item_store import ItemStore

    load_state = ItemStore.load_state

    def forgetting(store, item, state, **options):
        load_state(store, item, state, **options)
        store.memories.pop(item, None)

    ItemStore.load_state = forgetting


def run_on(workers: int, words: list[str], fault=None) -> tuple[int, str]:
    return run_workers(output_of, workers, words, fault, joins=False)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Data, and a run on two pipeline ranks with pruning and freezing."""
    folder = tmp_path_factory.mktemp("replay")
    data = write_data(folder / "data")
    train(data, folder / "run", 2, **SHORT)
    return folder, data


@pytest.fixture(scope="module")
def digests(trained):
    """Digests of a step, executed again in one process."""
    folder, _ = trained
    code, text = run_on(1, ["replay-step", str(folder / "run"), str(STEP), "--output", str(folder / "one.jsonl")])
    assert code == 0, text
    return folder / "one.jsonl"


def files_of(run):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("workers", "options"), [(2, []), (3, ["--schedule", "gpipe"]), (2, ["--schedule", "zero-bubble"])]
)
def test_replay_step_on_other_ranks_has_the_same_digests(trained, digests, workers, options):
    folder, _ = trained
    before, other = files_of(folder / "run"), folder / "other.jsonl"
    words = ["replay-step", str(folder / "run"), str(STEP), "--output", str(other), "--format", "json", *options]
    code, text = run_on(workers, words)
    assert code == 0, text
    assert json.loads(text)["matches"]
    assert json.loads(text)["loaded_step"] == 4
    assert other.read_text().splitlines()[1:] == digests.read_text().splitlines()[1:]
    assert files_of(folder / "run") == before


def test_replay_step_before_the_first_checkpoint_starts_from_step_0(trained):
    folder, _ = trained
    code, text = run_on(1, ["replay-step", str(folder / "run"), "3", "--format", "json"])
    assert code == 0, text
    assert json.loads(text)["matches"]
    assert json.loads(text)["loaded_step"] == 0


def test_replay_step_unlike_the_metrics_exits_1(trained):
    folder, _ = trained
    metrics = folder / "run" / "metrics.jsonl"
    text = metrics.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if line["step"] == STEP:
            line["grad_norm"] *= 1 + 2**-50
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        code, report = run_on(1, ["replay-step", str(folder / "run"), str(STEP)])
    finally:
        metrics.write_text(text)
    assert code == 1
    assert "grad_norm" in report
    assert "differs: metrics.jsonl has" in report


def test_replay_step_nan_in_one_layer_is_named(trained, digests):
    folder, _ = trained
    faulty = folder / "nan.jsonl"
    words = ["replay-step", str(folder / "run"), str(STEP), "--output", str(faulty), "--format", "json"]
    code, text = run_on(2, words, inject_nan)
    assert code == 1
    found = json.loads(text)["first_nonfinite_tensor"]
    assert (found["direction"], found["item"], found["microbatch"]) == ("activation", ITEM, 8 * (STEP - 1) + 2)
    assert found["nonfinite"] == [1]
    code, text = run_on(1, ["compare-digests", str(digests), str(faulty), "--format", "json"])
    different = json.loads(text)["first_different_tensor"]
    assert code == 1
    assert {name: different[name] for name in ("direction", "item", "microbatch")} == {
        name: found[name] for name in ("direction", "item", "microbatch")
    }


def test_replay_step_flipped_bit_of_a_gradient_has_its_microbatch(trained, digests):
    folder, _ = trained
    faulty = folder / "gradient.jsonl"
    words = ["replay-step", str(folder / "run"), str(STEP), "--output", str(faulty), "--format", "json"]
    code, text = run_on(2, words, flip_gradient_bit)
    assert code == 1, text
    code, text = run_on(1, ["compare-digests", str(digests), str(faulty), "--format", "json"])
    different = json.loads(text)["first_different_tensor"]
    assert code == 1
    assert (different["step"], different["direction"], different["parameter"], different["microbatch"]) == (
        STEP,
        "accumulated_gradient",
        WEIGHT,
        8 * (STEP - 1) + 2,
    )


def test_replay_step_against_flipped_bit_is_named(trained):
    folder, data = trained
    from tests.distributed.whole_runs import arguments

    words = arguments(data, folder / "flipped", **SHORT)
    assert [code for code, _ in run_workers(output_of, 2, words, flip_bit, joins=False)] == [0, 0]
    command = ["replay-step", str(folder / "run"), "8", "--against", str(folder / "flipped")]
    code, text = run_on(1, [*command, "--format", "json"])
    found = json.loads(text)
    assert code == 1
    assert found["first_different_logged_step"] == 5
    assert (found["last_equal_checkpoint"], found["first_different_checkpoint"]) == (0, 4)
    first = found["first_different_tensor"]
    assert (first["step"], first["direction"], first["item"]) == (5, "initial_weight", "layers.1.mlp")
    assert (first["parameter"], first["microbatch"]) == (WEIGHT, None)
    assert (first["different_elements"], first["first_index"]) == (1, [3, 5])
    assert found["first_step_unlike_its_metrics"] == {}
    code, text = run_on(2, command)
    assert code == 1
    assert f"{WEIGHT}: 1 of 4,096 elements differs; first at [3, 5]" in text


def test_replay_step_against_run_without_difference_exits_0(trained):
    folder, _ = trained
    code, text = run_on(1, ["replay-step", str(folder / "run"), "8", "--against", str(folder / "run")])
    assert code == 0, text
    assert "first difference: none" in text


def test_replay_step_of_compressed_run_has_its_bits_on_its_placement_only(tmp_path):
    data = write_data(tmp_path / "data")
    flags = [
        *("--inter-grad-comp", "--inter-grad-comp-rank", "4", "--use-error-feedback", "--error-feedback-across-steps"),
        *("--grad-comp", "--grad-comp-rank", "4", "--grad-comp-warm-up", "0.2"),
    ]
    options = SHORT | {"pipeline_model_parallel_size": "2", "freeze_schedule": None}
    train(data, tmp_path / "run", 4, *flags, **options)
    words = ["replay-step", str(tmp_path / "run"), str(STEP), "--format", "json"]
    code, text = run_on(4, words)
    assert code == 0, text
    assert json.loads(text)["matches"]
    assert json.loads(text)["loaded_step"] == 4
    [(code, text), *_] = run_workers(run_command, 4, [*words, "--schedule", "gpipe"], joins=False)
    assert code == 2
    assert "the replay of step 7 needs the placement of the run: 2 pipeline ranks, 1f1b" in text
    assert "not 2 pipeline ranks, gpipe" in text
    # Without the error feedback of the checkpoint the step has other bits.
    code, text = run_on(4, words, forget_memories)
    assert code == 1, text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["9"], "has 8 steps, not 9"),
        (["8", "--output", "{run}/digests.jsonl"], "a replay does not change; give another path"),
        (["8", "--output", "d.jsonl", "--against", "{run}"], "--output: has no effect with --against"),
    ],
)
def test_replay_step_impossible_request_exits_2(trained, words, message):
    folder, _ = trained
    run = str(folder / "run")
    words = ["replay-step", run, *(word.format(run=run) for word in words)]
    [(code, text)] = run_workers(run_command, 1, words, joins=False)
    assert code == 2
    assert message in text
