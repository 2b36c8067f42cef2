"""Python configurations of Megatron-Bridge and torchtitan: read without execution, and each field has a meaning."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer

from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app
from dynmo_train.cli.explain_flags.python_commands import command_of_config
from dynmo_train.cli.explain_flags.python_config import PythonConfig, Unknown, config_functions, read_python_config
from dynmo_train.cli.explain_flags.script_commands import explain
from dynmo_train.config.compat.flags import FLAGS
from dynmo_train.config.compat.translate import translate
from tests.unit.dynmo_train.config.compat.test_translate import declared

ROOT = typer.main.get_command(app)
FIXTURE = json.loads((Path(__file__).parents[2] / "config" / "megatron" / "python_configs.json").read_text())
BRIDGE = '''
import torch
from somewhere import AutoBridge, ConfigContainer, _pretrain_common

LENGTH: int = 4 * 1024

def tiny_pretrain_config(lr: float = 3e-4) -> ConfigContainer:
    """A recipe."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("org/Tiny").get_model_config()
    cfg.train.train_iters = 10
    cfg.train.train_iters = 20
    cfg.model.seq_length = LENGTH
    cfg.optimizer.lr = lr
    cfg.optimizer.main_grads_dtype = torch.bfloat16
    cfg.ddp.check_for_nan_in_grad = False
    cfg.ddp.use_megatron_fsdp = False
    cfg.dataset.blend = None
    cfg.model.virtual_pipeline_model_parallel_size = 2
    if cfg.model.context_parallel_size > 1:
        cfg.model.a2a = True
    change(cfg)
    return cfg

def wide_pretrain_config() -> ConfigContainer:
    cfg = tiny_pretrain_config(lr=1e-3)
    cfg.model.tensor_model_parallel_size = 2**3
    return cfg
'''
COMMON = """
def _pretrain_common() -> ConfigContainer:
    cfg = ConfigContainer(train=TrainingConfig(train_iters=3, micro_batch_size=2), mixed_precision="bf16_mixed")
    return cfg
"""
TITAN = """
def base() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(max_context_length=2048, steps=10),
        activation_checkpoint=SelectiveAC.Config(),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="Interleaved1F1B"),
    )

def more() -> Trainer.Config:
    config = base()
    config.training.steps += 1
    config.activation_checkpoint = FullAC.Config()
    config.parallelism.tensor_parallel_degree = 2
    return config
"""


def is_known(flag):
    return flag in FLAGS or any(flag in declared(family) for family in ("gpt", "llama"))


def meanings_of(config):
    command, more = command_of_config(config, is_known, FLAGS)
    family = command.equivalent.rpartition(" ")[2]
    return [*explain(command, declared(family), {}), *more], command


def test_recipe_of_bridge_is_read_with_its_base():
    found = read_python_config(BRIDGE, "wide_pretrain_config", [COMMON])
    assert (found.project, found.function) == ("Megatron-Bridge", "wide_pretrain_config")
    assert found.fields["train.train_iters"] == 20
    assert found.fields["train.micro_batch_size"] == 2
    assert (found.fields["model.seq_length"], found.fields["optimizer.lr"]) == (4096, 1e-3)
    assert found.fields["optimizer.main_grads_dtype"] == "bfloat16"
    assert found.fields["model.tensor_model_parallel_size"] == 8
    assert isinstance(found.fields["model"], Unknown)
    assert found.unread == ["if cfg.model.context_parallel_size > 1:", "change(cfg)"]


def test_recipe_of_bridge_becomes_options():
    meanings, command = meanings_of(read_python_config(BRIDGE, "wide_pretrain_config", [COMMON]))
    words = " ".join(command.arguments)
    assert command.equivalent == "dynmo-train pretrain gpt"
    for part in (
        *("--train-iters 20", "--micro-batch-size 2", "--bf16", "--seq-length 4096", "--lr 0.001", "--mock-data"),
        *("--no-check-for-nan-in-loss-and-grad", "--num-virtual-stages-per-pipeline-rank 2", "--main-grads-dtype bf16"),
    ):
        assert part in words
    refused = {one.flag: one.text for one in meanings if one.kind == "refused"}
    assert set(refused) == {"model", "if cfg.model.context_parallel_size > 1:", "change(cfg)"}
    assert "dynmo-ckpt info" in refused["model"]
    assert translate(command.arguments, "gpt", declared("gpt")).problems == ()


def test_base_without_its_file_is_refused_by_name():
    found = read_python_config(BRIDGE, "tiny_pretrain_config")
    assert found.unread[0] == "_pretrain_common()"
    [meaning] = [one for one in meanings_of(found)[0] if one.flag == "_pretrain_common()"]
    assert meaning.kind == "refused"
    assert "--module" in meaning.text


def test_registry_of_torchtitan_is_read_and_overridden():
    found = read_python_config(TITAN, "more")
    assert found.project == "torchtitan"
    assert found.fields["activation_checkpoint.class"] == "FullAC"
    assert found.fields["parallelism.tensor_parallel_degree"] == 2
    assert found.unread == ["config.training.steps += 1"]
    meanings, command = meanings_of(found)
    words = list(translate(command.arguments, "llama", declared("llama")).arguments)
    assert shlex.join(words) == (
        "--lr 0.0008 --seq-length 2048 --train-iters 10 --schedule interleaved-1f1b"
        " --recompute-granularity full --tensor-model-parallel-size 2"
    )
    assert {one.flag for one in meanings if one.kind == "refused"} == {"model_spec", "config.training.steps += 1"}


@pytest.mark.parametrize("project", ["Megatron-Bridge", "torchtitan"])
def test_each_field_of_published_configurations_has_a_meaning(project):
    fields = FIXTURE[project]
    assert len(fields) > 60
    for name, values in fields.items():
        for value in values:
            inner = Unknown(value["unknown"]) if isinstance(value, dict) else value
            meanings, _ = meanings_of(PythonConfig(project, "f", {name: inner}))
            meanings = [meaning for meaning in meanings if meaning.kind != "default"]
            assert meanings, name
            for meaning in meanings:
                assert meaning.kind in ("same", "becomes", "ignored", "refused"), (name, value, meaning)
                assert meaning.text or meaning.kind == "same", (name, value, meaning)


def test_functions_of_a_file_are_listed():
    assert config_functions(BRIDGE) == ["tiny_pretrain_config", "wide_pretrain_config"]
    with pytest.raises(UsageError, match="--function with one of base, more"):
        read_python_config(TITAN)
    with pytest.raises(UsageError, match="must be one of base, more"):
        read_python_config(TITAN, "other")


@pytest.mark.parametrize(
    "text",
    [
        "def f( -> ConfigContainer:",
        "x = 1",
        "def f() -> int:\n    return 1\n",
        "\0",
        "def f() -> ConfigContainer:\n    return " + "(" * 2000 + "1" + ")" * 2000,
    ],
)
def test_file_without_a_configuration_is_refused(text):
    with pytest.raises(UsageError):
        read_python_config(text)


def test_nothing_of_a_file_is_executed(tmp_path):
    trap = tmp_path / "trap"
    text = f"""
import os
open({str(trap)!r}, "w")
def f(x=open({str(trap)!r}, "w")) -> ConfigContainer:
    cfg = ConfigContainer(a=open({str(trap)!r}, "w"), b=9**9**9**9, c="x" * 10**12)
    cfg.d = [__import__("os").system("true")]
    cfg.e = f"{{open({str(trap)!r}, 'w')}}"
    return cfg
"""
    found = read_python_config(text)
    assert not trap.exists()
    assert all(isinstance(value, Unknown) for value in found.fields.values())
    assert set(found.fields) == set("abcde")


def test_functions_that_call_themselves_end():
    text = "def f() -> ConfigContainer:\n    cfg = f()\n    return cfg\n"
    with pytest.raises(UsageError, match=r"calls more than|nested too deeply"):
        read_python_config(text)


def test_expressions_nested_too_deeply_are_refused_or_unknown():
    deep = "def f() -> ConfigContainer:\n    cfg = ConfigContainer()\n    cfg.a = " + "+".join(["1"] * 5000) + "\n"
    with pytest.raises(UsageError, match=r"recursion|deep"):
        read_python_config(deep)


def run(*arguments):
    from typer.testing import CliRunner

    return CliRunner().invoke(app, ["explain-flags", *map(str, arguments)])


def test_command_explains_a_python_file(tmp_path):
    (tmp_path / "tiny.py").write_text(BRIDGE)
    (tmp_path / "common.py").write_text(COMMON)
    found = run(tmp_path / "tiny.py", "--function", "tiny_pretrain_config", "--module", tmp_path / "common.py")
    assert found.exit_code == 3, "the model is refused"
    assert "Megatron-Bridge: dynmo-train pretrain gpt" in found.output
    assert "--train-iters 20" in found.output
