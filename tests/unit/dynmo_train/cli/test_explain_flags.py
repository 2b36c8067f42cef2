"""``explain-flags``: programs and flags of scripts of Megatron-LM, DeepSpeed and Optimus-CC."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from dynmo_train.cli import app
from dynmo_train.cli.explain_flags.command_help import parse_help
from dynmo_train.cli.explain_flags.script_commands import read_script
from dynmo_train.cli.published_scripts import SOURCES, TABLE, find, markdown
from tests.paths import ROOT
from tests.tables import table

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


def explain(tmp_path, text, *words, code=0):
    script = tmp_path / "script.sh"
    script.write_text(text)
    result = CliRunner().invoke(app, ["explain-flags", str(script), *words])
    assert result.exit_code == code, result.output
    return result.output


def test_read_script_variables_and_continued_lines_are_expanded():
    (command,) = read_script(DISTRIBUTED)
    assert command.equivalent == "dynmo-train pretrain gpt"
    assert command.launcher == "dynmo-train launch node"
    assert command.arguments[:6] == ("--model-parallel-size", "1", "--num-layers", "24", "--hidden-size", "1024")
    assert "/data/text_sentence" in command.arguments


ARRAYS = """
MODEL_ARGS=(
    --num-layers 32  # blocks
    --data-path "$(get_data)"
    --swiglu \\
    --tensorboard-dir "${OUT}/tensorboard"
)
LOGGING_ARGS=(--log-interval 1)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
    )
fi
ALL=("${MODEL_ARGS[@]}" "${LOGGING_ARGS[@]}")
NONE=()
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    ${ALL[@]} ${NONE[@]} \\
    "${MODEL_ARGS[*]}"
"""


def test_read_script_arrays_are_expanded():
    (command,) = read_script("OUT=out\n" + ARRAYS)
    model = ["--num-layers", "32", "--data-path", "$(...)", "--swiglu", "--tensorboard-dir", "out/tensorboard"]
    assert list(command.arguments) == [*model, *["--log-interval", "1", "--wandb-project", "Mixtral"], *model]
    assert command.before == ("torchrun", "--nproc_per_node", "8")


def test_read_script_branches_are_evaluated_and_echo_skipped():
    (command,) = read_script(DEEPSPEED)
    assert command.launcher == "dynmo-train launch hostfile"
    assert command.arguments == (
        *("--model-parallel-size", "4", "--num-layers", "24", "--partition-activations", "--profile-backward"),
    )


def test_explain_flags_every_flag_has_a_kind(tmp_path):
    (found,) = json.loads(explain(tmp_path, DISTRIBUTED, "--format", "json", code=3))
    kinds = {one["flag"]: (one["kind"], one["meaning"]) for one in found["flags"]}
    assert kinds["--model-parallel-size"] == ("becomes", "--tensor-model-parallel-size 1")
    assert kinds["--num-layers"][0] == "same"
    assert kinds["--distributed-backend"][0] == "ignored"
    assert kinds["--num-layers-per-virtual-pipeline-stage"][0] == "same"
    assert kinds["--no-such-flag"][0] == "unknown"
    text = explain(tmp_path, DISTRIBUTED, code=3)
    assert "../pretrain_gpt2.py: dynmo-train pretrain gpt, launched by dynmo-train launch node" in text
    explain(tmp_path, DEEPSPEED)


def test_flags_of_sourced_files_and_nested_commands_are_explained(tmp_path):
    (tmp_path / "sizes.sh").write_text('ARGS="--num-layers 2 --no-such-flag"\n')
    text = f"""source {tmp_path}/sizes.sh
if [ -n "$NEVER" ]; then ARGS="$ARGS --wandb-project p"; fi
CMD="torchrun --nproc_per_node 2 pretrain_gpt.py $ARGS --lr 1"
srun -lu bash -c "numactl --membind=0 $CMD"
"""
    (found,) = json.loads(explain(tmp_path, text, "--format", "json", code=3))
    assert found["command"] == "dynmo-train pretrain gpt"
    kinds = {one["flag"]: one["kind"] for one in found["flags"]}
    pipeline = {"--pipeline-model-parallel-size": "default"}
    assert kinds == {"--num-layers": "same", "--no-such-flag": "unknown", "--lr": "same"} | pipeline


def test_flags_of_branches_that_are_not_taken_are_explained(tmp_path):
    text = 'A="--lr 1"\nif [ -n "$NEVER" ]; then\nA="$A --wandb-project p"\nfi\npython pretrain_gpt.py $A --bf16\n'
    (found,) = json.loads(explain(tmp_path, text, "--format", "json"))
    assert [one["flag"] for one in found["flags"][:3]] == ["--lr", "--bf16", "--wandb-project"]


def test_script_that_run_refuses_is_explained_with_the_reason(tmp_path):
    script = tmp_path / "script.sh"
    script.write_text("rm -rf x\npython pretrain_gpt.py --lr 1 $MORE --data-path $DATA\n")
    result = CliRunner().invoke(app, ["explain-flags", str(script)])
    assert "--lr 1" in result.stdout
    assert "line 1: 'rm -rf x' is not executed" in result.stderr
    assert "MORE has no value here; flags in it are not explained" in result.stderr
    assert "DATA has no value" not in result.stderr


@table(
    ("line", "equivalent"),
    [
        ("python tasks/main.py --task WIKITEXT103 --valid-data x --load y", "dynmo-train evaluate wikitext"),
        ("python tasks/main.py --task RACE --epochs 3", "dynmo-train finetune race"),
        ("python main.py --model gpt2 --tasks lambada,piqa", "dynmo-train evaluate lm-eval"),
        ("python tools/preprocess_data.py --input x", "dynmo-prep binarize"),
        ("WORLD_SIZE=8 python tools/ckpt_convert.py --model-type GPT", "dynmo-ckpt ckpt_convert"),
        ("shuf a.json -o b.json", "dynmo-prep shuffle"),
        ("bash examples/pretrain_gpt.sh", "bin/pretrain_gpt.sh"),
        ("sbatch 2.distributed-training.sbatch", "bin/2.distributed-training.sbatch"),
        ("bash ASPLOS23/fig10/GPT2-8.3B-CB-Breakdown.sh", "bin/ASPLOS23/fig10.sh"),
    ],
)
def test_read_script_program_has_equivalent_command(line, equivalent):
    (command,) = read_script(line)
    assert command.equivalent == equivalent


def test_table_every_equivalent_command_exists():
    import importlib

    packages = {"dynmo-train": "dynmo_train", "dynmo-prep": "dynmo_tools", "dynmo-ckpt": "dynmo_ckpt"}
    import typer

    for ours in sorted({row.equivalent for row in TABLE}):
        program, *names = ours.split()
        if program not in packages:
            assert (ROOT / ours).is_file(), ours
            continue
        command = typer.main.get_command(importlib.import_module(f"{packages[program]}.cli").app)
        for name in names:
            assert name in command.commands, ours
            command = command.commands[name]


def explain_toml(tmp_path, text):
    (tmp_path / "job.toml").write_text(text)
    return CliRunner().invoke(app, ["explain-flags", str(tmp_path / "job.toml"), "--format", "json"])


def test_explain_flags_torchtitan_file_has_a_row_for_each_key(tmp_path):
    text = """
[training]
seq_len = 4096
dataset = "c4"
no_such_key = 1
dataloader.num_workers = 2
[parallelism]
pipeline_parallel_schedule = "1F1B"
data_parallel_shard_degree = -1
[compile]
enable = true
components = ["model", "loss"]
[validation]
enable = false
[quantize.grouped_mm.float8]
fqns = []
"""
    result = explain_toml(tmp_path, text)
    assert result.exit_code == 3
    (command,) = json.loads(result.stdout)
    assert command["command"] == "dynmo-train pretrain llama"
    defaults = {row["flag"]: row["values"] for row in command["flags"] if row["kind"] == "default"}
    rows = {row["flag"]: (row["kind"], row["meaning"]) for row in command["flags"] if row["kind"] != "default"}
    assert rows.pop("--training.dataset")[0] == "refused"
    assert rows.pop("--compile.components")[0] == "ignored"
    assert rows.pop("--training.no_such_key")[0] == "unknown"
    assert rows == {
        "--training.seq_len": ("becomes", "--seq-length 4096"),
        "--training.dataloader.num_workers": ("becomes", "--num-workers 2"),
        "--parallelism.pipeline_parallel_schedule": ("becomes", "--schedule 1f1b"),
        "--compile.enable": ("becomes", "--torch-compile"),
        "--parallelism.data_parallel_shard_degree": ("becomes", "--zero-stage 3"),
    }
    assert defaults == {
        "--micro-batch-size": ["8"],
        "--lr": ["0.0008"],
        "--lr-warmup-iters": ["200"],
        "--adam-beta2": ["0.95"],
        "--weight-decay": ["0.1"],
        "--bf16": [],
        "--pipeline-model-parallel-size": ["1"],
        "--recompute-granularity": ["selective"],
        "--log-interval": ["10"],
        "--train-iters": ["10000"],
        "--eval-iters": ["0"],
    }


def test_explain_flags_invalid_toml_file_is_refused(tmp_path):
    assert "is not TOML" in str(explain_toml(tmp_path, "[training\n").exception)


def test_explain_flags_script_without_program_is_refused(tmp_path):
    assert "must start a known program" in str(
        CliRunner().invoke(app, ["explain-flags", str(_empty(tmp_path))]).exception
    )


def _empty(tmp_path):
    (tmp_path / "x.sh").write_text("ls\n")
    return tmp_path / "x.sh"


def test_readme_table_is_generated_and_names_are_unique():
    readme = (ROOT / "dynmo_train" / "launch" / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- scripts: begin -->\n", "<!-- scripts: end -->"
    written = readme[readme.index(begin) + len(begin) : readme.index(end)]
    assert written == markdown(), "print it again: python -m dynmo_train.cli.published_scripts"
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
    assert {row.source for row in TABLE} == set(SOURCES)
    assert find("megatron/arguments.py") is None


def test_bin_every_script_is_in_the_table_or_our_own(tmp_path):
    ours = {row.equivalent.removeprefix("bin/") for row in TABLE if row.equivalent.startswith("bin/")}
    own = {"bench", "constraints", "environment.sh", "generate.py", "quickstart", "quickstart_summary.py", "test"}
    own |= {
        "fault-campaign",
        "fuzz",
        "readme_picture.py",
        "assets/picture.json",
        "assets/balance-light.svg",
        "assets/balance-dark.svg",
    }
    own |= {"getdata.sh", "openwebtext.sh", "wikipedia.sh", "ASPLOS23/zero_shot.sh", "ASPLOS23/tables.sh"}
    own |= {"lib/fetch.sh", "lib/optimus.sh", "lib/train.sh"}
    files = {str(path.relative_to(ROOT / "bin")) for path in (ROOT / "bin").rglob("*") if path.is_file()}
    files = {name for name in files if not name.startswith("shared/") and "__pycache__" not in name}
    assert files == ours | own


def test_explain_flags_table_is_printed(tmp_path):
    result = CliRunner().invoke(app, ["explain-flags", "--table", "--format", "json"])
    rows = json.loads(result.output)
    assert {
        "source": "AWS test case",
        "name": "pytorchjob.yaml-template",
        "equivalent": "bin/pytorchjob.yaml-template",
    } in rows
    assert "bin/download_ckpt.sh" in CliRunner().invoke(app, ["explain-flags", "--table"]).output


def test_explain_flags_other_packages_are_explained_by_help(tmp_path):
    line = "python tools/preprocess_data.py --input a.json --vocab v.txt --json_key body --split-sentences --no-such 1"
    (found,) = json.loads(explain(tmp_path, line, "--format", "json", code=3))
    kinds = {one["flag"]: (one["kind"], one["values"], one["meaning"]) for one in found["flags"]}
    assert kinds["--vocab"][:2] == ("same", ["v.txt"])
    assert "ocabulary of the GPT2" in kinds["--vocab"][2]
    assert kinds["--json_key"][2].startswith("--json-key: Key of the text")
    assert kinds["--no-such"][0] == "unknown"


def test_parse_help_continued_lines_are_joined():
    text = "Options:\n  -o, --output <path>  The\n                       file.\n  --long-name, --other <int range>\n"
    text += "                                  Of the input.  [x>=1]\n\nMore:\n  none\n"
    assert parse_help(text) == {
        **dict.fromkeys(("-o", "--output"), "The file."),
        **dict.fromkeys(("--long-name", "--other"), "Of the input.  [x>=1]"),
    }


def test_explain_flags_published_script_prints_equivalent(tmp_path):
    script = tmp_path / "pretrain_gpt.sh"
    script.write_text("python pretrain_gpt.py --num-layers 2\n")
    assert (
        f"{script}: equivalent to bin/pretrain_gpt.sh" in CliRunner().invoke(app, ["explain-flags", str(script)]).output
    )
    assert "SCRIPT is missing" in str(CliRunner().invoke(app, ["explain-flags"]).exception)
