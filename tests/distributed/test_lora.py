"""Runs with LoRA adapters: the same bits on any placement and after a resume, and exports that others read."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from dynmo_train.config.fields import values_of
from dynmo_train.config.sections.evaluation import InferenceConfig
from dynmo_train.dynamics.lora import FrozenBase
from dynmo_train.evaluation.model_checkpoint import open_causal_model
from dynmo_train.evaluation.scoring import ScoredSequence, score_model
from dynmo_train.formats.checkpoint import find_checkpoint, open_checkpoint
from dynmo_train.launch.find_command import program_path
from dynmo_train.models.lora import LoraFamily, LoraSettings, is_adapter
from dynmo_train.parallel.process_groups import destroy_world, init_world
from tests.distributed.scenario import Scenario, merged, play
from tests.distributed.test_families import cut as family_cut
from tests.distributed.test_placement import WANDER
from tests.distributed.whole_runs import figures, manifest_of, run_command, tensors, train, verify
from tests.distributed.workers import run_workers
from tests.levels import complete_but

SHAPE = {
    "pruning_start_iter": None,
    "pruning_end_iter": None,
    "pruning_freq": None,
    "freeze_schedule": None,
    "rebalance_interval": None,
    "train_iters": "8",
    "eval_interval": "4",
}
FLAGS = ("--mock-data",)
PIPELINE = {"pipeline_model_parallel_size": "2", "schedule": "zero-bubble"}
LORA = (*FLAGS, "--lora-rank", "4", "--lora-dropout", "0.1")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    run = tmp_path_factory.mktemp("lora") / "base"
    train(None, run, 1, *FLAGS, **(SHAPE | {"train_iters": "4"}))
    return run


def tune(base, run, workers=1, *extra, **options):
    return train(None, run, workers, *LORA, "--finetune", *extra, **(SHAPE | {"load": str(base)} | options))


@pytest.fixture(scope="module")
def tuned(base):
    tune(base, base.parent / "tuned")
    return base.parent / "tuned"


def test_only_adapters_are_trained_and_have_optimizer_state(base, tuned):
    before, after = tensors(base, 4), tensors(tuned, 8)
    weights = {name for name, entry in manifest_of(tuned, 8)["tensors"].items() if entry["role"] == "parameter"}
    assert {name for name in before if name in weights and before[name] != after[name]} == set()
    manifest = manifest_of(tuned, 8)
    trained = set(manifest["optimizer"]["steps"])
    assert trained == {name for name in weights if is_adapter(name)}
    assert len(trained) == 4 * 2 * 6
    loaded = open_checkpoint(find_checkpoint(tuned)).load(sorted(trained))
    assert all(bool(tensor.any()) for tensor in loaded.values())


@pytest.mark.complete
def test_adapters_have_the_same_bits_on_two_stages(base, tuned, tmp_path):
    tune(base, tmp_path / "two", 2, pipeline_model_parallel_size="2", schedule="zero-bubble")
    assert figures(tmp_path / "two") == figures(tuned)


@dataclass(frozen=True, kw_only=True)
class Adapted(Scenario):
    """The scenario with adapters in place of pruning and freezing."""

    targets: tuple[str, ...] = ("q_proj", "v_proj", "fc1")

    def _changed(self, plain):
        return LoraFamily(plain, LoraSettings(rank=2, alpha=4.0, targets=self.targets, dropout=0.1), seed=5)

    def _techniques(self):
        return {"lora": partial(FrozenBase, replace(self, shards=None).family().frozen_front)}


@pytest.mark.complete
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj", "fc1"), ("down_proj",)])
def test_adapters_move_with_their_layers(precision, targets):
    (expected,) = run_workers(play, 1, Adapted(precision=precision, targets=targets))
    for schedule, recompute in (("1f1b", False), ("zero-bubble", True)):
        moving = Adapted(precision=precision, targets=targets, moves=WANDER, schedule=schedule, recompute=recompute)
        got = merged(run_workers(play, 2, moving))
        assert got == expected
    assert any(".lora_B." in name and name.endswith("exp_avg") for name in expected["weights"])
    assert not any(name.endswith("exp_avg") and not is_adapter(name) for name in expected["weights"])


@pytest.mark.complete
@pytest.mark.parametrize(("model", "precision"), [("gpt", "bf16"), ("deepseek", "fp32")])
def test_adapters_move_with_a_sharded_vocabulary(model, precision):
    """Depths of multi-token prediction have none, and read a table that does not train."""
    scenario = Adapted(precision=precision, model=model, shards=4, steps=6, targets=("o_proj",), dropout=0.0)
    moves = ((2, family_cut(model, 2, 3)), (4, family_cut(model, 2, -2))) if model != "gpt" else WANDER[:2]
    [whole] = run_workers(play, 1, replace(scenario, shards=None))
    [expected] = run_workers(play, 1, scenario)
    for schedule in ("1f1b", "zero-bubble"):
        assert merged(run_workers(play, 2, replace(scenario, schedule=schedule, moves=moves))) == expected
    assert expected["losses"] == pytest.approx(whole["losses"], rel=1e-5 if precision == "fp32" else 2e-3)
    assert expected["norms"] == pytest.approx(whole["norms"], rel=1e-5 if precision == "fp32" else 1e-2)
    trained = [name.removesuffix(".exp_avg") for name in expected["weights"] if name.endswith("exp_avg")]
    assert trained
    assert all(map(is_adapter, trained))


@pytest.mark.complete
@pytest.mark.parametrize(
    ("flags", "options"), [((), {}), (("--lora-save-adapters",), {}), (("--zero-stage", "2"), {"zero": "2"})]
)
def test_adapters_of_a_run_with_a_sharded_vocabulary(base, undropped, tmp_path, flags, options):
    """Resumed on another pipeline; near the run with whole tables, which are unchanged in the checkpoint."""
    shards = {"vocabulary_parallel": "4"} | ({"data_parallel_size": None} if options else {})
    run = tmp_path / "run"
    first = 2 if options else 1
    tune(base, run, first, *UNDROPPED, *flags, exit_interval="5", **shards)
    train(None, run, 2 * first, *LORA, *UNDROPPED, *flags, **SHAPE, **shards, load=str(run), **PIPELINE)
    for step, (loss, norm) in figures(run).items():
        assert (loss, norm) == pytest.approx(figures(undropped)[step], rel=1e-4), step
    found, before = (open_checkpoint(find_checkpoint(each)) for each in (run, base))
    assert all(map(is_adapter, found.manifest["optimizer"]["steps"]))
    name = "embedding.word.weight"
    assert torch.equal(found.load([name])[name], before.load([name])[name])
    # A run with whole tables resumes from it.
    train(None, tmp_path / "more", 1, *LORA, *UNDROPPED, **(SHAPE | {"train_iters": "9"}), load=str(run))


@pytest.mark.complete
def test_adapters_resume_with_the_same_bits(base, tuned, tmp_path):
    run = tmp_path / "run"
    tune(base, run, exit_interval="5")
    train(None, run, 1, *LORA, **SHAPE, load=str(run))
    assert figures(run) == figures(tuned)
    assert tensors(run, 8) == tensors(tuned, 8)


@pytest.mark.complete
def test_adapters_on_two_replicas_have_nearly_the_same_losses(base, tuned, tmp_path):
    tune(base, tmp_path / "run", 2, data_parallel_size=None)
    for step, (loss, _) in figures(tmp_path / "run").items():
        assert loss == pytest.approx(figures(tuned)[step][0], rel=1e-5)


LAYOUTS = {
    "tensor": (2, ("--tensor-model-parallel-size", "2"), {}),
    "sequence": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel"), {}),
    "zero-1": (2, ("--zero-stage", "1"), {"data_parallel_size": None}),
    "zero-3": (2, ("--zero-stage", "3"), {"data_parallel_size": None}),
    "compiled": (1, ("--torch-compile", "--torch-compile-backend", "aot_eager"), {}),
}
# Dropout draws other numbers on tensor ranks.
UNDROPPED = ("--lora-dropout", "0", "--attention-dropout", "0", "--hidden-dropout", "0")


@pytest.fixture(scope="module")
def undropped(base):
    tune(base, base.parent / "undropped", 1, *UNDROPPED)
    return base.parent / "undropped"


@pytest.mark.parametrize("layout", complete_but(LAYOUTS, "tensor"))
def test_adapters_of_a_sharded_run_are_those_of_one_process(base, undropped, tmp_path, layout):
    workers, flags, options = LAYOUTS[layout]
    tune(base, tmp_path / "run", workers, *UNDROPPED, *flags, **options)
    for step, (loss, norm) in figures(tmp_path / "run").items():
        assert (loss, norm) == pytest.approx(figures(undropped)[step], rel=1e-4), step
    found, expected = (open_checkpoint(find_checkpoint(run)) for run in (tmp_path / "run", undropped))
    trained = sorted(expected.manifest["optimizer"]["steps"])
    assert sorted(found.manifest["optimizer"]["steps"]) == trained
    for name, tensor in found.load(trained).items():
        torch.testing.assert_close(tensor, expected.load([name])[name], rtol=1e-3, atol=2e-5)
    # On another layout: the optimizer state of the adapters, too.
    again = {**SHAPE, "train_iters": "10"}
    train(None, tmp_path / "more", 1, *LORA, *UNDROPPED, **again, load=str(tmp_path / "run"))
    assert sorted(figures(tmp_path / "more")) == [9, 10]


@pytest.mark.complete
def test_adapters_alone_are_saved_and_resumed_with_the_same_bits(base, tuned, tmp_path):
    run = tmp_path / "run"
    tune(base, run, 1, "--lora-save-adapters", exit_interval="5")
    stored = manifest_of(run, 5)
    parameters = [name for name, entry in stored["tensors"].items() if entry["role"] == "parameter"]
    assert parameters
    assert all(map(is_adapter, parameters))
    assert sorted(stored["optimizer"]["steps"]) == sorted(parameters)
    # On two stages, and without the option once more: from adapters alone to a checkpoint with all weights.
    shutil.copytree(run, tmp_path / "whole")
    train(None, tmp_path / "whole", 1, *LORA, **SHAPE, load=str(tmp_path / "whole"))
    assert tensors(tmp_path / "whole", 8) == tensors(tuned, 8)
    layout = {"pipeline_model_parallel_size": "2", "schedule": "zero-bubble"}
    train(None, run, 2, *LORA, "--lora-save-adapters", **(SHAPE | layout), load=str(run))
    assert figures(run) == figures(tuned)
    expected, found = tensors(tuned, 8), tensors(run, 8)
    assert found == {name: expected[name] for name in found}
    assert len(found) < len(expected)
    whole = open_checkpoint(find_checkpoint(tuned))
    loaded = open_checkpoint(find_checkpoint(run))
    names = whole.names("parameter")
    assert sorted(loaded.names("parameter")) == sorted(names)
    for name, tensor in whole.load(names).items():
        assert torch.equal(loaded.load([name])[name], tensor)
    # Merged weights are those of the run that has saved all of them.
    for name, source in (("one", run), ("other", tuned)):
        command("dynmo-train", "export-adapter", "--load", source, "-o", tmp_path / name, "--merge")
    one, other = (open_checkpoint(find_checkpoint(tmp_path / name)) for name in ("one", "other"))
    assert one.names() == other.names()
    for name in one.names():
        assert torch.equal(one.load([name])[name], other.load([name])[name])
    code, text = run_program("dynmo-ckpt", "convert", run, tmp_path / "hf", "--to", "hf")
    assert code == 5
    assert "--merge" in text


def test_adapters_over_pruned_weights_are_evaluated_whole(tmp_path):
    pruned = {"pruning_start_iter": "1", "pruning_end_iter": "3", "pruning_freq": "1", "train_iters": "4"}
    train(None, tmp_path / "base", 1, *FLAGS, "--sparsify", "--final-sparsity", "0.7", **(SHAPE | pruned))
    tune(tmp_path / "base", tmp_path / "run", lr="0.1")
    command("dynmo-train", "export-adapter", "--load", tmp_path / "run", "-o", tmp_path / "merged", "--merge")
    world, numbers = init_world("cpu"), torch.Generator().manual_seed(3)
    sequences = [ScoredSequence(tokens=torch.randint(97, (33,), generator=numbers).numpy(), first_scored=1)]
    losses = []
    for name in ("run", "merged"):
        inference = values_of(InferenceConfig, {"load": str(tmp_path / name), "device": "cpu"})
        source = open_causal_model(inference, world, {})
        # The weights under the adapters are pruned, those of the export are products with every column.
        assert bool(source.checkpoint.names("mask")) == (name == "run")
        losses += score_model(source, inference, world, sequences, 32).losses
    destroy_world()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("damage", complete_but(["manifest", "missing", "weights"], "manifest"))
def test_adapters_alone_on_another_base_are_refused(base, tmp_path, damage):
    shutil.copytree(base, tmp_path / "base")
    tune(tmp_path / "base", tmp_path / "run", 1, "--lora-save-adapters", train_iters="2", eval_interval="2")
    place = find_checkpoint(tmp_path / "base")
    if damage == "missing":
        shutil.rmtree(place)
    elif damage == "manifest":
        # Another model of the same shape: that of another step.
        train(None, tmp_path / "more", 1, *FLAGS, **(SHAPE | {"train_iters": "5"}), load=str(base))
        shutil.rmtree(place)
        shutil.copytree(find_checkpoint(tmp_path / "more"), place)
    else:
        file = next(place.glob("model-*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    code, text = run_program(
        "dynmo-train", "export-adapter", "--load", tmp_path / "run", "-o", tmp_path / "out", "--merge"
    )
    assert code != 0
    assert {"missing": "put it back", "manifest": "not the base", "weights": "the bytes were altered"}[damage] in text


@pytest.mark.complete
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lora-save-adapters",), "without --lora-rank"),
        (("--lora-rank", "2", "--lora-save-adapters"), "give --load BASE"),
    ],
)
def test_adapters_alone_need_a_base(tmp_path, flags, words):
    sizes = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8"]
    rest = [
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "1",
        "--train-iters",
        "1",
        "--vocab-size",
        "9",
        "--lr",
        "1",
    ]
    code, text = run_command(
        ["pretrain", "gpt", "--mock-data", *sizes, *rest, "--run-dir", str(tmp_path / "r"), *flags]
    )
    assert code == 2
    assert words in text


@pytest.mark.complete
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ((), "--lora-rank"),
        (("--lora-rank", "8"), "x_lora"),
    ],
)
def test_checkpoint_of_other_adapters_is_refused(tuned, tmp_path, extra, words):
    options = {key: value for key, value in SHAPE.items() if value is not None}
    flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
    shape = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
    sizes = ["--micro-batch-size", "2", "--global-batch-size", "16", "--lr", "1e-3", "--vocab-size", "97"]
    run = ["--run-dir", str(tmp_path / "run"), "--load", str(tuned), "--allow-changed-options"]
    code, text = run_command(["pretrain", "gpt", "--mock-data", *shape, *sizes, *flags, *run, *extra])
    assert code == 2
    assert words in text


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def check_exports(base, adapter, merged):
    """The merged model differs from the base, and has the logits of the adapter in PEFT."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(base)
    plain, expected = logits_of(model, ids), logits_of(AutoModelForCausalLM.from_pretrained(merged), ids)
    assert not torch.allclose(plain, expected, atol=1e-3)
    peft = pytest.importorskip("peft", reason="peft is not installed (an optional peer)")
    tuned = peft.PeftModel.from_pretrained(model, adapter)
    torch.testing.assert_close(logits_of(tuned, ids), expected, rtol=0, atol=1e-5)


def run_program(*words):
    done = subprocess.run([program_path(words[0]), *map(str, words[1:])], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def command(*words):
    code, text = run_program(*words)
    assert code == 0, text
    return text


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_exported_adapter_has_the_logits_of_the_merged_model(tmp_path):
    pytest.importorskip("transformers")
    llama = {"family": "llama", "num_query_groups": "2"}
    flags = ("--mock-data", "--untie-embeddings-and-output-weights")
    train(None, tmp_path / "base", 1, *flags, **(SHAPE | {"train_iters": "2"} | llama))
    options = SHAPE | llama | {"load": str(tmp_path / "base"), "lora_target_modules": "q_proj,k_proj,o_proj,up_proj"}
    train(None, tmp_path / "run", 1, *flags, "--finetune", "--lora-rank", "3", **options)
    command("dynmo-train", "export-adapter", "--load", tmp_path / "run", "-o", tmp_path / "merged", "--merge")
    verify(tmp_path / "merged")
    for name, source in (("base-hf", "base"), ("merged-hf", "merged")):
        command("dynmo-ckpt", "convert", tmp_path / source, tmp_path / name, "--to", "hf")
    found = command("dynmo-train", "export-adapter", "--load", tmp_path / "run", "-o", tmp_path / "adapter")
    assert "32 tensors" in found
    check_exports(tmp_path / "base-hf", tmp_path / "adapter", tmp_path / "merged-hf")


@pytest.mark.complete
def test_export_of_a_model_without_adapters_is_refused(base, tmp_path):
    code, text = run_command(["export-adapter", "--load", str(base), "-o", str(tmp_path / "out")])
    assert code == 2
    assert "has no adapters" in text


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_exported_adapter_of_a_gpt_has_the_logits_of_the_merged_model(base, tuned, tmp_path):
    pytest.importorskip("transformers")
    command("dynmo-train", "export-adapter", "--load", tuned, "-o", tmp_path / "merged", "--merge")
    command("dynmo-train", "export-adapter", "--load", tuned, "-o", tmp_path / "adapter")
    for name, source in (("base-hf", base), ("merged-hf", tmp_path / "merged")):
        command("dynmo-ckpt", "convert", source, tmp_path / name, "--to", "hf")
    check_exports(tmp_path / "base-hf", tmp_path / "adapter", tmp_path / "merged-hf")


@pytest.mark.complete
def test_export_to_a_directory_with_files_is_refused(tuned, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for merge in ((), ("--merge",)):
        code, text = run_command(["export-adapter", "--load", str(tuned), "-o", str(tmp_path / "full"), *merge])
        assert code == 2
        assert "already exists" in text
