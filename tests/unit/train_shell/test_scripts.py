"""Scripts of Megatron-LM, DeepSpeed and Optimus-CC: what they start, and what each flag means here."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dynmo_train.cli import app
from dynmo_train.config.scripts import PROGRAMS, read_script

DISTRIBUTED = """#! /bin/bash
# Runs the "345M" parameter model
GPUS_PER_NODE=2
NNODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DATA_PATH=/data/text_sentence
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES"
GPT_ARGS="--num-layers 24 \\
          --hidden-size ${HIDDEN:-1024} \\
          --fp16"
python -m torch.distributed.launch $DISTRIBUTED_ARGS \\
       ../pretrain_gpt2.py \\
       --model-parallel-size 1 \\
       $GPT_ARGS \\
       --data-path $DATA_PATH \\
       --distributed-backend nccl \\
       --num-layers-per-virtual-pipeline-stage 2 \\
       --no-such-flag 3
set +x
"""
DEEPSPEED = """
mp_size=4
PA=true
CPU=false
options=" \\
   --model-parallel-size ${mp_size} \\
   --num-layers 24 "
if [ "${PA}" = "true" ]; then
options="${options} \\
   --partition-activations"
fi
if [ "${CPU}" = "true" ]; then
options="${options} --checkpoint-in-cpu"
else
options="${options} --profile-backward"
fi
run_cmd="deepspeed --hostfile hostfile -i a:4,5@b:4,5 ../pretrain_gpt2.py $@ ${options}"
echo ${run_cmd}
eval ${run_cmd}
"""


def told(tmp_path, text, *words, code=0):
    script = tmp_path / "script.sh"
    script.write_text(text)
    result = CliRunner().invoke(app, ["explain-flags", str(script), *words])
    assert result.exit_code == code, result.output
    return result.output


def test_variables_and_continued_lines_are_followed():
    (command,) = read_script(DISTRIBUTED)
    assert command.ours == "dynmo-train pretrain gpt"
    assert command.launcher == "dynmo-train launch node"
    assert command.arguments[:6] == ("--model-parallel-size", "1", "--num-layers", "24", "--hidden-size", "1024")
    assert "/data/text_sentence" in command.arguments


def test_branches_are_followed_and_echo_starts_nothing():
    (command,) = read_script(DEEPSPEED)
    assert command.launcher == "dynmo-train launch hostfile"
    assert command.arguments == (
        *("--model-parallel-size", "4", "--num-layers", "24", "--partition-activations", "--profile-backward"),
    )


def test_flag_by_flag(tmp_path):
    (found,) = json.loads(told(tmp_path, DISTRIBUTED, "--format", "json", code=3))
    kinds = {one["flag"]: (one["kind"], one["meaning"]) for one in found["flags"]}
    assert kinds["--model-parallel-size"] == ("becomes", "--tensor-model-parallel-size 1")
    assert kinds["--num-layers"][0] == "same"
    assert kinds["--distributed-backend"][0] == "nothing"
    assert kinds["--num-layers-per-virtual-pipeline-stage"][0] == "refused"
    assert "--virtual-stages-per-worker" in kinds["--num-layers-per-virtual-pipeline-stage"][1]
    assert kinds["--no-such-flag"][0] == "unknown"
    text = told(tmp_path, DISTRIBUTED, code=3)
    assert "../pretrain_gpt2.py: dynmo-train pretrain gpt, started by dynmo-train launch node" in text
    told(tmp_path, DEEPSPEED)


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("python tasks/main.py --task WIKITEXT103 --valid-data x --load y", "dynmo-train evaluate wikitext"),
        ("python tasks/main.py --task RACE --epochs 3", "dynmo-train finetune race"),
        ("python main.py --model gpt2 --tasks lambada,piqa", "dynmo-train evaluate lm-eval"),
        ("python tools/preprocess_data.py --input x", "dynmo-prep binarize"),
        ("WORLD_SIZE=8 python tools/ckpt_convert.py --model-type GPT", "dynmo-ckpt merge"),
        ("shuf a.json -o b.json", "dynmo-prep shuffle"),
    ],
)
def test_programs_have_a_command_here(line, ours):
    (command,) = read_script(line)
    assert command.ours == ours


def test_every_command_that_a_program_becomes_exists():
    import importlib

    packages = {"dynmo-train": "dynmo_train", "dynmo-prep": "dynmo_tools", "dynmo-ckpt": "dynmo_ckpt"}
    import typer

    for ours in sorted(set(PROGRAMS.values())):
        program, *names = ours.split()
        command = typer.main.get_command(importlib.import_module(f"{packages[program]}.cli").app)
        for name in names:
            assert name in command.commands, ours
            command = command.commands[name]


def test_a_script_without_any_is_told(tmp_path):
    assert "starts none of the programs" in str(
        CliRunner().invoke(app, ["explain-flags", str(_empty(tmp_path))]).exception
    )


def _empty(tmp_path):
    (tmp_path / "x.sh").write_text("ls\n")
    return tmp_path / "x.sh"
