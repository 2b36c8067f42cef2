"""Numbers are bounded before work starts: on the command line and in configurations, with the bound in the message."""

from __future__ import annotations

import json
import re

import click
import pytest
import typer
from typer.testing import CliRunner

from dynmo_balance._common.errors import UsageError
from dynmo_balance.cli import app
from dynmo_balance.inputs.model_config import from_config
from dynmo_balance.schedules.registry import SCHEDULES, build_order
from dynmo_ckpt.cli import app as ckpt_app
from dynmo_ckpt.converters.assemble import model_from_config
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError
from dynmo_tools.cli import app as prep_app
from dynmo_train._common.errors import UsageError as TrainError
from dynmo_train.cli import app as train_app
from dynmo_train.config import check, resolve
from dynmo_train.config.options import DefaultContext
from dynmo_train.config.parse import batch_sizes_of
from dynmo_train.config.resolve import option_specs

APPS = [app, ckpt_app, train_app, prep_app]
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["partition", "x", "--stages", "100000000"], "1048576"),
        (["simulate", "x", "--microbatches", "5000000"], "65536"),
        (["profile", "build", "x", "-o", "y", "--steps", "100000000000"], "1000000"),
    ],
)
def test_sizes_on_the_command_line_are_bounded(arguments, words):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def commands(command, path=()):
    """The words and the parameters of every command of a group."""
    if not hasattr(command, "commands"):
        return [(path, command.params)]
    return [found for name, each in command.commands.items() for found in commands(each, (*path, name))]


@pytest.mark.parametrize("named", APPS, ids=["dynmo-plan", "dynmo-ckpt", "dynmo-train", "dynmo-prep"])
def test_every_integer_option_shows_its_bounds(named):
    options = [
        (words, option)
        for words, options in commands(typer.main.get_command(named))
        for option in options
        if "int" in str(option.type_descriptor.annotation)
    ]
    unbounded = [
        (*words, option.name)
        for words, option in options
        if (option.min is None or option.max is None)
        and not re.fullmatch(r"\d+ to [\d,]+|at least \d+", getattr(option.rich_help_panel, "bounds", ""))
    ]
    assert options
    assert unbounded == []


def test_every_bound_of_the_trainer_is_checked():
    for spec in option_specs().values():
        if spec.kind is int:
            value, problem = spec.convert(int(spec.maximum) + 1)
            assert value is None
            assert f"at most {spec.maximum:,}" in str(problem)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulated_step_size_is_bounded(schedule):
    with pytest.raises(UsageError, match="at most 1,048,576 forward passes"):
        build_order(schedule, 4096, 2, 65536)


def test_zb_v_of_many_workers_is_bounded_for_one_microbatch():
    with pytest.raises(UsageError, match="at most 1,048,576 forward passes"):
        build_order("zb-v", 100_000, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["local", "--nproc", "5000"], "less than or equal to 1024"),
        (["node", "--nnodes", "99999999999"], "MAX <= 1,048,576"),
        (["kubernetes", "--image", "x", "--nodes", "1:99999999999", "--dry-run"], "MAX <= 1,048,576"),
        (["slurm", "--het", "99999999999:x", "--dry-run"], "at most 1,048,576 nodes"),
    ],
)
def test_launches_are_bounded(arguments, words):
    done = CliRunner().invoke(train_app, ["launch", *arguments, "pretrain", "gpt"])
    assert done.exit_code != 0
    assert words in " ".join(f"{done.output} {done.exception}".split())


@pytest.mark.parametrize("rampup", ["1 1 100000000000000000", "1 1 1000"])
def test_steps_of_a_ramp_up_are_bounded(rampup):
    with pytest.raises(TrainError, match="at most 65,536 sizes and 10,000,000 steps"):
        batch_sizes_of(rampup, 1 << 20)


def test_microbatches_of_a_run_are_bounded():
    flags = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "lr": 1e-3, "train_iters": 1}
    flags |= {"micro_batch_size": 1, "global_batch_size": 65537, "data_path": "x", "vocab_size": 100}
    with pytest.raises(TrainError, match="is 65537, which makes 65,537 microbatches; must make at most 65,536"):
        check(resolve(flags=flags, file={}, context=DefaultContext()), 1)


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
def test_sizes_of_a_configuration_are_bounded(tmp_path, name):
    config = {**LLAMA, name: 10**18}
    with pytest.raises(UsageError, match="must be at most 100,000 layers"):
        from_config(config, "config.json")
    with pytest.raises(CorruptError, match="must be at most"):
        model_from_config(config, tmp_path / "config.json", ReadOptions())


def test_info_of_endless_model_returns(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**18}))
    done = CliRunner().invoke(ckpt_app, ["info", str(tmp_path)])
    assert isinstance(done.exception, CorruptError | SystemExit | click.ClickException)
    assert "num_hidden_layers must be at most 100,000" in str(done.exception)
