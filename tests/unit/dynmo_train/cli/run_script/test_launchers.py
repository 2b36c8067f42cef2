"""Launchers and programs of published scripts as commands of this project."""

# Lines are those of scripts.
# ruff: noqa: E501
from __future__ import annotations

import re
import shlex

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.cli.run_script.interpreter import interpret_script
from dynmo_train.cli.run_script.launchers import translate_program
from dynmo_train.cli.run_script.session import StartStep
from tests.tables import table

REPLICAS = "--pipeline-model-parallel-size 1"
GPT = f"pretrain gpt {REPLICAS} --lr 1"


def commands(text, tmp_path, environment=(), settings=None, arguments=()):
    result = interpret_script(text, "run.sh", arguments, dict(environment), tmp_path, settings)
    return [shlex.join(step.words) for step in result.steps if isinstance(step, StartStep)], result


COMMANDS = {
    "python pretrain_gpt.py --lr 1": f"dynmo-train {GPT}",
    "python3 -u ../Megatron/pretrain_gpt.py --lr 1": f"dynmo-train {GPT}",
    "torchrun --nproc_per_node 8 pretrain_gpt.py --lr 1": f"dynmo-train launch local --nproc 8 -- {GPT}",
    "torchrun --nproc-per-node=1 --standalone pretrain_gpt.py --lr 1": f"dynmo-train {GPT}",
    "torchrun --nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr h --master_port 6000 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch node --nproc 8 --nnodes 2 --node-rank 1 --master-addr h --master-port 6000 -- {GPT}"
    ),
    "torchrun --nnodes 1:4 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint=h:29501 --rdzv_id 7 --max_restarts=3"
    " pretrain_gpt.py --lr 1": (
        "dynmo-train launch node --nproc 2 --nnodes 1:4 --master-addr h --master-port 29501 --job 7 --max-restarts 3"
        f" -- {GPT}"
    ),
    "python -m torch.distributed.launch --use_env --nproc_per_node 4 --nnodes 1 --node_rank 0 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch local --nproc 4 -- {GPT}"
    ),
    "python -m torch.distributed.run --nproc_per_node=2 pretrain_bert.py": (
        f"dynmo-train launch local --nproc 2 -- pretrain bert {REPLICAS} --activation gelu_tanh"
    ),
    "deepspeed --num_nodes 1 --num_gpus 4 ../pretrain_gpt2.py --lr 1": (
        "dynmo-train launch hostfile --num-nodes 1 --num-gpus 4 --"
        f" pretrain gpt {REPLICAS} --lr-warmup-fraction 0.01 --lr 1"
    ),
    "deepspeed --master_port 6000 -i 10.1.1.2:4,5@10.1.1.5:4,5 --hostfile hostfile pretrain_gpt.py --lr 1": (
        "dynmo-train launch hostfile --master-port 6000 --include 10.1.1.2:4,5@10.1.1.5:4,5 --hostfile hostfile"
        f" -- {GPT}"
    ),
    "mpirun -np 4 --allow-run-as-root -x NCCL_DEBUG -mca pml ucx python pretrain_gpt.py --lr 1": (
        f"dynmo-train launch local --nproc 4 -- {GPT}"
    ),
    "mpirun -np 8 --hostfile hosts python pretrain_gpt.py --lr 1": (
        f"dynmo-train launch hostfile --hostfile hosts --num-gpus 8 -- {GPT}"
    ),
    "srun -l -N2 --ntasks-per-node=8 --container-image i.sqsh --container-mounts a:b,c:d python -u pretrain_gpt.py --lr 1": (
        "dynmo-train launch slurm --nodes 2 --nproc 8 --image i.sqsh --mount a:b --mount c:d -- " + GPT
    ),
    "srun -l python -m torch.distributed.run --nproc_per_node=8 --nnodes=4 --rdzv_id=5 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch slurm --nodes 4 --nproc 8 -- {GPT}"
    ),
    "srun --mpi=pmix bash -c 'cd /; python pretrain_gpt.py --lr 1'": f"dynmo-train launch slurm --nproc 1 -- {GPT}",
    "mpirun -np 2 -H h1:1,h2:1 singularity run --nv --bind a:b img.sif torchrun --nproc_per_node 8 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch lsf --nodes 2 --nproc 8 --mount a:b --image img.sif -- {GPT}"
    ),
    "srun -n 16 -N 2 python pretrain_gpt.py --lr 1": f"dynmo-train launch slurm --nodes 2 --nproc 8 -- {GPT}",
    "srun --ntasks=2 --nodes=2 torchrun --nproc_per_node 4 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch slurm --nodes 2 --nproc 4 -- {GPT}"
    ),
    "srun -lu -N2 --wait 60 python pretrain_gpt.py --lr 1": f"dynmo-train launch slurm --nodes 2 --nproc 1 -- {GPT}",
    "torchrun --master_addr $(scontrol show hostnames n[07-08,3],m | head -n 1) --nnodes 2 --node_rank 0 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch node --nproc 1 --nnodes 2 --node-rank 0 --master-addr n07 -- {GPT}"
    ),
    "torchrun --max_restarts $(scontrol show hostnames n[07-08,3]-x,m | wc -l) --nproc_per_node 2 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch local --nproc 2 --max-restarts 4 -- {GPT}"
    ),
    "SLURM_NNODES=3; H=$(scontrol show hostnames $SLURM_JOB_NODELIST); dynmo-prep $H": (
        "dynmo-prep localhost localhost localhost"
    ),
    "python pretrain_gpt.py --lr $(shuf -n 1 -i 1-1)": f"dynmo-train {GPT}",
    "python pretrain_gpt.py --lr $(seq -s, 1 3) $(seq -s ' ' 2)": f"dynmo-train pretrain gpt {REPLICAS} --lr 1,2,3 1 2",
    "nohup nsys profile -o out --trace=cuda python pretrain_gpt.py --lr 1": f"dynmo-train {GPT}",
    "numactl --cpunodebind=0 torchrun --nproc_per_node=2 pretrain_gpt.py --lr 1": (
        f"dynmo-train launch local --nproc 2 -- {GPT}"
    ),
    "python main.py --model gpt2 --model_args pretrained=c --device cuda:0 --tasks lambada,piqa": (
        "dynmo-train evaluate lm-eval --load c --device cuda --tasks lambada,piqa"
    ),
    "python -m lm_eval --model hf --model_args pretrained=c,dtype=bfloat16,x=1 --batch_size 4 --tasks piqa": (
        "dynmo-train evaluate lm-eval --load c --dtype bfloat16 --batch-size 4 --tasks piqa"
    ),
    "lm_eval --model=hf --tasks piqa": "dynmo-train evaluate lm-eval --tasks piqa",
    "python t/convert_megatron_gpt2_checkpoint.py --config_file c.json GPT-merged/": (
        "dynmo-ckpt convert GPT-merged/ GPT-merged-hf --to hf"
    ),
    "python t/convert_megatron_gpt2_checkpoint.py w/megatron_lm_345m_v0.0.zip": (
        "dynmo-ckpt convert w/megatron_lm_345m_v0.0.zip w/megatron_lm_345m_v0.0-hf --to hf"
    ),
    "python tasks/main.py --task WIKITEXT103 --valid-data x": "dynmo-train tasks --task WIKITEXT103 --valid-data x",
    "WORLD_SIZE=8 python tools/ckpt_convert.py --model-type GPT": "dynmo-ckpt ckpt_convert --model-type GPT",
    "python tools/preprocess_data.py --input a.json": "dynmo-prep binarize --input a.json",
    "python blacklist_urls.py urls clean.txt": "dynmo-prep blacklist-urls urls clean.txt",
    "shuf a.json -o b.json": "dynmo-prep shuffle a.json -o b.json",
    "dynmo-plan partition x --stages 2": "dynmo-plan partition x --stages 2",
}


@table("line", COMMANDS)
def test_command_line_has_its_equivalent(line, tmp_path):
    assert commands(line, tmp_path)[0] == [COMMANDS[line]]


REFUSED = {
    "torchrun --nproc_per_node 8 pretrain_mamba.py": "Mamba are not supported",
    "torchrun pretrain_hybrid.py": "Mamba are not supported",
    "torchrun --nproc_per_node gpu pretrain_gpt.py": "give the number of GPUs",
    "torchrun --nproc_per_node 0 pretrain_gpt.py": "positive whole number",
    "torchrun --nproc_per_node --nnodes 1 pretrain_gpt.py": "has no value",
    "torchrun --surprise 1 pretrain_gpt.py": "--surprise of torchrun is not known",
    "python -c 'import os'": "not executed",
    "python": "name a program",
    "python train.py": "train.py is not known",
    "python pretrain_deepseek.py": "write pretrain_gpt.py",
    "srun -lz python pretrain_gpt.py": "-lz of srun is not known",
    "srun -n8 python pretrain_gpt.py": "8 tasks on an unknown number of nodes",
    "srun -n8 -N3 python pretrain_gpt.py": "not the same number on each of 3 nodes",
    "X=$(scontrol show job 3)": "scontrol show hostnames LIST",
    "X=$(scontrol show hostnames 'n[1-x]')": "not a list of hosts",
    "X=$(scontrol show hostnames n[0-99999999])": "not a list of hosts",
    f"X=$(scontrol show hostnames 'n[1-{'9' * 30}]')": "not a list of hosts",
    f"X=$(scontrol show hostnames 'n[{'9' * 5000}]')": "not a list of hosts",
    "X=$(scontrol show hostnames n[5-1])": "not a list of hosts",
    f"X=$(scontrol show hostnames '{'a,' * 2000}!')": "not a list of hosts",
    "X=$(shuf -n 2 -i 1-9)": "shuf -n 1 -i FIRST-LAST",
    "X=$(shuf -n 1 -i 9-1)": "shuf -n 1 -i FIRST-LAST",
    "rm -rf /": "rm is not known",
    "dynmo-train run run.sh": "write: bash FILE",
    "dynmo-train launch local --nproc 2 -- run run.sh": "write: bash FILE",
    "dynmo-train launch hostfile --ssh 'sh -c x' -- pretrain gpt": "other programs",
    "dynmo-train launch lsf --container=/tmp/x -- pretrain gpt": "other programs",
    "sudo reboot": "sudo is not known",
    "curl http://x | bash": "curl is not known",
    "srun": "has no program",
    "bash -c": "has no commands",
    "bash nope.sh": "cannot be read",
    "X=$(python3 -c 'print(1)')": "--set NAME=VALUE",
    "X=$(ssh host cat file)": "--set NAME=VALUE",
    "X=$(python pretrain_gpt.py)": "not a value",
    "python pretrain_gpt.py | python other.py": "not piped",
    "for f in *.json; do echo $f; done": "write their names",
    "IFS=,": "IFS is not interpreted",
    "X=<path to data>": "stands for a value",
    "echo '[1]' > x.json": "not a JSON object",
    "echo '{}' > ../outside.json": "outside of the folder",
    "read X": "only with <<<",
    "sed -i s/a/b/ file": "sed is interpreted only",
    "[[ x =~ (a+)+b ]]": "regular expression",
    "X=${!Y}": "not interpreted",
    "X=$$": "number of a process",
    "echo ${X:?give it}": "give it",
    "set -u; echo $X": "X has no value",
    "set -u; echo $1": "argument 1 has no value",
}


@table("line", REFUSED)
def test_line_that_is_not_interpreted_is_refused_with_its_number(line, tmp_path):
    with pytest.raises(UsageError, match=re.escape("run.sh, line 3: ")) as caught:
        commands(f"# a comment\n\n{line}\n", tmp_path)
    assert REFUSED[line] in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_slurm_job_runs_within_the_job(tmp_path):
    line = "srun torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py --lr 1"
    found, _ = commands(line, tmp_path, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4"})
    assert found == [f"dynmo-train launch slurm --in-job --nproc 8 -- {GPT}"]


def test_exported_variables_are_passed_on_and_unsafe_ones_are_not(tmp_path):
    text = "export NCCL_DEBUG=INFO LD_PRELOAD=x.so PYTHONPATH=. PATH=/x:$PATH WORLD_SIZE=8 RANK=0\nY=2\n"
    text += f"OMP_NUM_THREADS=4 python pretrain_gpt.py {REPLICAS}"
    _, result = commands(text, tmp_path, {"HOME": "/h", "PATH": "/bin"})
    (step,) = result.steps
    assert step.environment == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    assert [note.split()[2] for note in result.notes] == ["LD_PRELOAD", "PATH", "PYTHONPATH"]


def test_settings_replace_values_that_cannot_be_computed(tmp_path):
    text = "GPUS=$(ssh host nvidia-smi)\nDATA=<path>_text\nlocal GPUS=3\nfor GPUS in 1; do :; done\nunset GPUS\n"
    text += "torchrun --nproc_per_node $GPUS pretrain_gpt.py --data-path $DATA"
    found, _ = commands(text, tmp_path, settings={"GPUS": "2", "DATA": "d"})
    assert found == [f"dynmo-train launch local --nproc 2 -- pretrain gpt {REPLICAS} --data-path d"]


def test_nested_scripts_see_exports_and_their_arguments(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sizes.sh").write_text("LAYERS=24\nHERE=$(dirname ${BASH_SOURCE[0]})\n")
    (tmp_path / "inner.sh").write_text('source lib/sizes.sh\npython pretrain_gpt.py --a $1 $X $Y $LAYERS $HERE "$0"\n')
    text = "export X=1\nY=2\nbash inner.sh one two\necho $LAYERS\nnohup ./inner.sh 'b c'"
    found, _ = commands(text, tmp_path)
    assert found == [
        f"dynmo-train pretrain gpt {REPLICAS} --a one 1 24 lib inner.sh",
        f"dynmo-train pretrain gpt {REPLICAS} --a b c 1 24 lib ./inner.sh",
    ]


def test_json_file_is_written_before_the_command(tmp_path):
    text = 'M=4\ncat <<EOT > ds/config.json\n{"train_micro_batch_size_per_gpu": $M}\nEOT\n'
    text += 'sed "s/4/8/" ds/config.json > ds/other.json\npython pretrain_gpt.py --deepspeed_config ds/config.json'
    _, result = commands(text, tmp_path)
    first, second, _ = result.steps
    assert (first.path, first.text) == (tmp_path / "ds" / "config.json", '{"train_micro_batch_size_per_gpu": 4}\n')
    assert second.text == '{"train_micro_batch_size_per_gpu": 8}\n'
    assert list(tmp_path.iterdir()) == []


def test_folder_that_the_script_enters_is_that_of_its_command(tmp_path):
    (tmp_path / "data").mkdir()
    _, result = commands("cd data\npython pretrain_gpt.py\ncd nope || cd ..\npython pretrain_gpt.py", tmp_path)
    assert [step.folder for step in result.steps] == [tmp_path / "data", tmp_path]


def test_exit_code_of_the_script_is_returned(tmp_path):
    _, result = commands("if [ -z $1 ]; then echo usage; exit 3; fi\npython pretrain_gpt.py", tmp_path)
    assert (result.exit_code, result.steps, result.printed) == (3, [], ["usage"])


HOSTILE = {
    "endless loop": "while true; do :; done",
    "endless loop of C": "for ((;;)); do :; done",
    "endless recursion": "f() { f; }; f",
    "endless eval": 'X=\'eval "$X"\'; eval "$X"',
    "doubling": "X=aaaaaaaaaaaaaaaa; for i in {1..40}; do X=$X$X; done",
    "doubling array": 'A=(a a a a); for i in {1..40}; do A+=("${A[@]}"); done',
    "doubling replace": "X=aaaaaaaaaaaaaaaa; for i in {1..40}; do X=${X//a/aaaa}; done",
    "doubling sed": "X=aaaa; for i in {1..40}; do X=$(echo $X | sed s/a/aaaaaaaa/g); done",
    "deep parentheses": "X=$((" + "(" * 5000 + "1" + ")" * 5000 + "))",
    "deep power": "X=$((" + "2**" * 900 + "1))",
    "deep substitution": "X=" + "$(echo " * 500 + "a" + ")" * 500,
    "deep if": "if true; then " * 500 + ":" + "; fi" * 500,
    "deep brackets": "[[ " + "( " * 500 + "a" + " )" * 500 + " ]]",
    "deep braces": "X=" + "${A:-" * 500 + "}" * 500,
    "deep subshell": "(" * 500 + ":" + ")" * 500,
    "recursion of variables": "A=B; B=A; X=$((A))",
    "own value": "A=A+1; X=$((A))",
    "huge number": "X=$((99999999999999999999999999))",
    "huge power": "X=$((9**9**9))",
    "huge shift": "X=$((1<<99999999999)); exit 99999999999",
    "division by zero": "X=$((1/0))",
    "nul": "echo a\0b",
    "open single quote": "echo 'a",
    "open double quote": 'echo "a',
    "open backquote": "echo `a",
    "open brace": "echo ${A",
    "open parenthesis": "echo $(a",
    "open array": "A=(a",
    "open here-document": "cat <<EOF\na",
    "open if": "if true; then",
    "open loop": "while true; do",
    "open case": "case a in",
    "open function": "f() {",
    "open bracket": "[ a = b",
    "open brackets": "[[ a == b",
    "only operators": "&& || ;; | & ( ) < >",
    "range": "for i in {1..999999}; do :; done",
    "sequence": "X=$(seq 1 999999999)",
    "slice": "A=(a); echo ${A[999999999999]}; A[99999999]=b",
    "pattern": "X=" + "a" * 5000 + "; echo ${X%%*a*a*a*a*b}",
    "own script": "source run.sh",
    "device": "cat /dev/zero; source /dev/zero",
}


@pytest.mark.timeout(60)
@table("name", HOSTILE)
def test_hostile_script_is_refused_in_bounded_time(name, tmp_path):
    (tmp_path / "run.sh").write_text("source run.sh")
    with pytest.raises(UsageError, match=r"line|too deep"):
        commands(HOSTILE[name], tmp_path)


def test_relative_positions_of_megatron_are_refused():
    words = ["python", "pretrain_t5.py", "--position-embedding-type", "relative"]
    assert "use learned" in translate_program(words, "", {})


MEGATRON_DEFAULTS = {
    "pretrain_gpt.py --num-layers 2": [],
    "pretrain_bert.py --lr 1": ["--activation gelu_tanh"],
    "pretrain_t5.py": ["--activation gelu_tanh"],
    "pretrain_ict.py": ["--activation gelu_tanh"],
    "pretrain_bert.py --no-bias-gelu-fusion": [],
    "pretrain_gpt2.py --lr 1": ["--lr-warmup-fraction 0.01"],
    "pretrain_gpt2.py --warmup .1": [],
    "pretrain_gpt.py --num-experts 8": ["--moe-router-bias"],
    "pretrain_gpt.py --num-experts=8 --swiglu": ["--moe-router-bias"],
    "pretrain_gpt.py --num-experts 8 --disable-bias-linear": [],
    "pretrain_gpt.py --num-experts 8 --no-moe-router-bias": [],
    "pretrain_gpt.py --fp8-format hybrid": ["--fp8-recipe tensorwise"],
    "pretrain_gpt.py --grad_comp --selective_grad_comp": ["--grad-comp-rank 4", "--selective-grad-comp-way 2"],
    "pretrain_gpt.py --num-experts 8 --deepspeed": [
        *("--topk 1", "--expert-interval 2", "--moe-loss-coeff 0.1", "--moe-train-capacity-factor 1.0")
    ],
    "pretrain_gpt.py --num_experts 8 --topk 2 --expert-interval 1 --moe-train-capacity-factor 2": [
        "--moe-loss-coeff 0.1"
    ],
    "main.py --task MNLI --epochs 3": [],
}


@table("line", MEGATRON_DEFAULTS)
def test_command_line_of_a_project_has_its_defaults_and_prints_them(line):
    found = translate_program(["torchrun", "--nproc_per_node", "2", *line.split()], "", {})
    set_here = [REPLICAS, *MEGATRON_DEFAULTS[line]]
    words = shlex.join(found.words).partition(" -- ")[2].split()
    assert sorted(words[1 + (words[0] == "pretrain") :]) == sorted(" ".join([*set_here, *line.split()[1:]]).split())
    assert [note.partition(": ")[0] for note in found.notes] == set_here
    with_pipeline = translate_program(["python", *line.split(), "--pipeline-model-parallel-size", "2"], "", {})
    assert REPLICAS not in shlex.join(with_pipeline.words)


@table(
    ("given", "expected"),
    [
        ("--num-experts 1 --topk 1 --moe-loss-coeff 0.01 --disable-moe-token-dropping --deepspeed", "--deepspeed"),
        (
            "--num-experts 16 --moe-min-capacity 4 --disable-moe-token-dropping --topk 2 --moe-train-capacity-factor 1",
            "--expert-interval 2 --moe-loss-coeff 0.1 --num-experts 16 --topk 2",
        ),
    ],
)
def test_flags_of_experts_that_another_flag_turns_off_are_left_out(given, expected):
    found = translate_program(["python", "pretrain_gpt.py", *given.split()], "", {})
    assert shlex.join(found.words) == f"dynmo-train pretrain gpt {REPLICAS} {expected}"


def test_latents_without_norms_are_refused(tmp_path):
    text = "python pretrain_gpt.py --multi-latent-attention"
    with pytest.raises(UsageError, match="add it"):
        interpret_script(text, "script.sh", [], {}, tmp_path)
    (step,) = interpret_script(f"{text} --qk-layernorm", "script.sh", [], {}, tmp_path).steps
    assert step.words[-2:] == ("--multi-latent-attention", "--qk-layernorm")
