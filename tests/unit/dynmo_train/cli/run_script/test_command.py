"""``dynmo-train run``: dry run, messages, execution and exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app
from dynmo_train.cli.run_script.command import command_line, interpret_file
from dynmo_train.cli.run_script.slurm_header import slurm_directives, slurm_variables, submission_options
from tests.tables import table

SBATCH = """#!/bin/bash
#SBATCH --job-name=gpt # the name
#SBATCH -N 4 --exclusive
#SBATCH --gres=gpu:8 --time=1:00:00
# text
#SBATCH --partition a100
: ${X:=1}
#SBATCH --nodes=9
srun -l python -m torch.distributed.run --nproc_per_node=$SLURM_GPUS_PER_NODE --nnodes=$SLURM_JOB_NUM_NODES \\
  --rdzv_id=$SLURM_JOB_ID pretrain_gpt.py --lr $X
"""
REPLICAS = "--pipeline-model-parallel-size 1"


def run(script, *words):
    return CliRunner().invoke(app, ["run", *words[: words.index("--")], str(script), *words[words.index("--") + 1 :]])


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    path = tmp_path / "train.sh"

    def write(text):
        path.write_text(text)
        return path

    return write


def test_dry_run_prints_lines_that_a_shell_reads(script, tmp_path):
    text = "echo start\nexport WANDB_NAME='x y'\n"
    text += 'torchrun --nproc_per_node 2 pretrain_gpt.py --data-path "1 a b" $1 --bf16\n'
    result = run(script(text), "--dry-run", "--", "--bf16", "2")
    assert result.exit_code == 0
    command = f"pretrain gpt {REPLICAS} --data-path '1 a b' --bf16 --bf16"
    assert result.stdout == f"WANDB_NAME='x y' dynmo-train launch local --nproc 2 -- {command}\n"
    assert "start" in result.stderr
    words = shlex.split(result.stdout)
    assert words[0] == "WANDB_NAME=x y"
    assert not list(tmp_path.glob("logs*"))


@table(
    ("line", "message"),
    [
        ("--bogus-flag 3", "line 2: No such option: --bogus-flag"),
        ("--num-layers two", "line 2: Invalid value for '--num-layers'"),
        ("--num-layers", "line 2: Option '--num-layers' requires an argument"),
        ("--pruning-type one_time", "--pruning-type: only gradual pruning is supported"),
        ("--moe-use-legacy-grouped-gemm-of-none", "No such option"),
    ],
)
def test_dry_run_checks_the_commands_that_it_prints(script, line, message):
    for launcher in ("", "torchrun --nproc_per_node 2 ", "srun -N 2 --ntasks-per-node 4 "):
        text = f"set -e\n{launcher or 'python '}pretrain_bert.py {line}\n"
        result = run(script(text), "--dry-run", "--")
        assert isinstance(result.exception, UsageError)
        assert message in str(result.exception)
        assert " pretrain bert" in result.stdout


def test_dry_run_checks_tasks_and_every_line(script):
    text = "python pretrain_gpt.py --help\npython tasks/main.py --task WIKITEXT103 --load x --valid-data y {}\n"
    result = run(script(text.format("--bogus 1")), "--dry-run", "--")
    assert "line 2: No such option: --bogus" in str(result.exception)
    assert run(script(text.format("--overlapping-eval 32")), "--dry-run", "--").exception is None


def test_dry_run_of_dynmos_own_example(script):
    """``bert_example.sh`` of the DynMo repository, with the two lines of packing that it has as comments."""
    text = (
        "torchrun --nproc_per_node ${3:-4} pretrain_bert.py --num-layers $1 --pipeline-model-parallel-size $3"
        " --sparsify --pruning-type gradual --load-balance --balancer $2 \\\n --packing \\\n --packed-num-gpus 2 \\"
    )
    result = run(script(text), "--dry-run", "--", "24", "diffusion", "4", "1")
    assert (result.exit_code, result.exception) == (0, None)
    assert result.stdout.endswith("--balancer diffusion --packing --packed-num-gpus 2\n")


VARIABLES = (
    *("LD_PRELOAD=/x.so", "PYTHONPATH=/x", "PYTHONSTARTUP=/x.py", "BASH_ENV=/x.sh", "PATH=/x", "CXX='touch executed'"),
    *("CC='touch executed'", "NCCL_NET_PLUGIN=/x.so", "NCCL_CONF_FILE=/x", "TORCHINDUCTOR_CACHE_DIR=/x"),
    *("TRITON_CACHE_DIR=/x", "CUDA_HOME=/x", "BROWSER='touch executed'", "PYTHONWARNINGS=all:0:antigravity.x:0:0"),
    *("TORCH_EXTENSIONS_DIR=/x", "GIT_SSH_COMMAND='touch executed'"),
    "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=core.fsmonitor GIT_CONFIG_VALUE_0='touch executed'",
)
HOSTILE = [
    *(f"export {variable}" for variable in VARIABLES),
    "trap 'touch executed' EXIT",
    "X=$(touch executed)",
    "echo x > executed",
    "cat <<< '{}' > executed.json",
    "cat <<EOF > executed.json\n{}\nEOF",
    "A='a[$(touch executed)]'; echo $((A))",
    "eval 'touch executed'",
    'python -c \'open("executed", "w")\'',
    "dynmo-train() { touch executed; }; dynmo-train x",
    "mkdir executed",
    "source <(echo touch executed)",
    "exec touch executed",
]
"""Lines before the training command: variables that execute code, and commands that write."""


@table("line", HOSTILE)
def test_dry_run_of_a_hostile_script_executes_nothing(script, monkeypatch, line):
    def executed(*words, **_options):
        raise AssertionError(f"executed: {words}")

    for name in ("Popen", "run"):
        monkeypatch.setattr(subprocess, name, executed)
    monkeypatch.setattr(os, "system", executed)
    before = dict(os.environ)
    path = script(f"{line}\npython pretrain_gpt.py --bf16\n")
    result = run(path, "--dry-run", "--")
    # A line that is not interpreted is refused; a variable is named, and is not part of a line to paste.
    assert result.exception is None or isinstance(result.exception, UsageError | SystemExit)
    assert list(path.parent.iterdir()) == [path]
    assert dict(os.environ) == before
    commands = [each for each in result.stdout.splitlines() if not each.startswith("# writes ")]
    assert commands in ([], [f"dynmo-train pretrain gpt {REPLICAS} --bf16"])


def test_slurm_header_becomes_the_submission(script):
    result = run(script(SBATCH), "--dry-run", "--")
    assert result.stdout == (
        "dynmo-train launch slurm --nodes 4 --nproc 8 --job-name gpt --time 1:00:00 --partition a100 --gpus 8"
        f" --sbatch --exclusive -- pretrain gpt {REPLICAS} --lr 1\n"
    )


@pytest.mark.parametrize("tasks", ["--ntasks-per-node=4", "--ntasks=8"])
def test_tasks_of_the_slurm_header_are_processes(script, tasks):
    text = f"#!/bin/bash\n#SBATCH --nodes=2 {tasks}\nsrun python pretrain_gpt.py --train-iters $SLURM_NTASKS\n"
    (step,) = interpret_file(script(text), [], {}, {}).steps
    assert (
        command_line(step) == f"dynmo-train launch slurm --nproc 4 --nodes 2 -- pretrain gpt {REPLICAS} --train-iters 8"
    )


def test_tasks_within_a_job_are_processes(script):
    environment = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}
    (step,) = interpret_file(script("srun python pretrain_gpt.py\n"), [], {}, environment).steps
    assert command_line(step) == f"dynmo-train launch slurm --in-job --nproc 4 -- pretrain gpt {REPLICAS}"


def test_slurm_header_within_a_job_is_not_used(script, monkeypatch):
    path = script(SBATCH)
    environment = {"SLURM_JOB_ID": "3", "SLURM_GPUS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "1"}
    (step,) = interpret_file(path, [], {}, environment).steps
    assert command_line(step) == f"dynmo-train launch slurm --in-job --nproc 2 -- pretrain gpt {REPLICAS} --lr 1"


def test_slurm_directives_end_at_the_first_command():
    found = slurm_directives(SBATCH)
    assert found["nodes"] == "4"
    assert slurm_variables(found)["SLURM_GPUS_PER_NODE"] == "8"
    assert submission_options(found, ["--nodes", "1"])[:2] == ["--job-name", "gpt"]
    assert slurm_directives("#SBATCH --a='x\n") == {}


def test_settings_without_equals_sign_are_refused(script):
    result = run(script("python pretrain_gpt.py"), "--set", "A", "--")
    assert isinstance(result.exception, UsageError)
    assert "must be NAME=VALUE" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo a", "starts no known program"),
        ("exit 3", "exits with code 3; nothing was executed"),
        ("python pretrain_gpt.py\nrm x", "line 2: 'rm x' is not executed"),
    ],
)
def test_script_without_commands_is_refused_before_execution(script, text, message):
    result = run(script(text), "--")
    assert message in str(result.exception)


def test_script_that_cannot_be_read_is_refused(tmp_path):
    assert "no such file" in str(CliRunner().invoke(app, ["run", str(tmp_path / "no.sh")]).exception)
    (tmp_path / "big.sh").write_bytes(b"#" * (1 << 20) + b"\n\n")
    assert "bytes" in str(CliRunner().invoke(app, ["run", str(tmp_path / "big.sh")]).exception)
    (tmp_path / "bad.sh").write_bytes(b"echo \xff")
    assert "UTF-8" in str(CliRunner().invoke(app, ["run", str(tmp_path / "bad.sh")]).exception)


MEGATRON = """#!/bin/bash
# A script in the form of Megatron-LM's examples.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS_PER_NODE:-2}
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
SAVE=${1:-"runs/none"}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr localhost
)
mkdir -p "$(dirname "$SAVE")"
cat <<EOT > ds.json
{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
EOT
MODEL=(
    --num-layers 2 --hidden-size 16 # small
    --num-attention-heads 2
    --seq-length 8
    --max-position-embeddings 8
)
DATA=(
    "--mock-data"
    "--tokenizer-type NullTokenizer"
    "--vocab-size 64"
    "--split '99,1,0'"
)
if [ ! -f pretrain_gpt.py ]; then
    echo "run this in a copy of Megatron-LM"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL[@]} \\
    ${DATA[@]} \\
    --deepspeed --deepspeed_config ds.json \\
    --pipeline-model-parallel-size $WORLD_SIZE \\
    --global-batch-size 4 --train-iters 3 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --eval-iters 0 \\
    --attention-backend auto --log-interval 1 --save $SAVE 2>&1 | tee train.log
"""


@pytest.mark.timeout(300)
def test_script_of_megatron_trains(script, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "dynmo_train", "run", str(script(MEGATRON)), str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("step", 0) for line in lines) == 3
    resolved = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    assert resolved["parallel"]["pipeline_model_parallel_size"] == 2
    assert resolved["optimizer"]["clip_grad"] == 1.0
    assert json.loads((tmp_path / "ds.json").read_text())["gradient_clipping"] == 1.0


def test_first_command_that_fails_ends_the_run(script, tmp_path):
    text = "python tools/preprocess_data.py --input no.json --output-prefix x\npython tools/preprocess_data.py --help\n"
    command = [sys.executable, "-m", "dynmo_train", "run", str(script(text))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "line 1: dynmo-prep binarize" in done.stderr
    assert "line 2" not in done.stderr


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys; import dynmo_train.cli.run_script.command; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.split() == ["False", "False"]


def test_options_after_a_missing_backslash_belong_to_the_command_before(script):
    text = "D=x\npython tools/merge_mp_partitions.py \\\n  --load a\n--save $D/merged --model-type GPT\necho end\n"
    result = run(script(text), "--dry-run", "--")
    assert result.stdout == "dynmo-ckpt merge_mp_partitions --load a --save x/merged --model-type GPT\n"
    assert "line 4: --save is an option of the command before" in result.stderr


@pytest.mark.parametrize("text", ["--save x\n", "python pretrain_gpt.py\necho a\n--save x\n"])
def test_options_without_a_command_before_are_refused(script, text):
    result = run(script(text), "--dry-run", "--")
    assert "--save is not known" in str(result.exception)


TWO = "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 24 --lr 1\npython pretrain_bert.py --lr 2\n"


def test_overrides_follow_the_options_of_each_command(script):
    result = run(script(TWO), "--override", "--num-layers 2 --data-path 'a b'", "--override=--lr 3", "--dry-run", "--")
    first, second = result.stdout.splitlines()
    assert first == (
        f"dynmo-train launch local --nproc 2 -- pretrain gpt {REPLICAS} --num-layers 24 --lr 1"
        " --num-layers 2 --data-path 'a b' --lr 3"
    )
    assert second.endswith("--lr 2 --num-layers 2 --data-path 'a b' --lr 3")


def test_overrides_leave_other_programs_alone(script):
    text = "python tools/preprocess_data.py --input a\npython pretrain_gpt.py --lr 1\n"
    result = run(script(text), "--override", "--lr 2", "--dry-run", "--")
    assert result.stdout == f"dynmo-prep binarize --input a\ndynmo-train pretrain gpt {REPLICAS} --lr 1 --lr 2\n"


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("python pretrain_gpt.py", "2 layers", "must be options"),
        ("python pretrain_gpt.py", "", "must be options"),
        ("python pretrain_gpt.py", "--lr 1 -- run x", "must be options"),
        ("python pretrain_gpt.py", "--lr '1", "close the quotes"),
        ("python tools/preprocess_data.py", "--lr 1", "starts no command of dynmo-train"),
        ("python pretrain_gpt.py\npython tools/generate_samples_gpt.py", "--lr 1", "starts generate and pretrain"),
    ],
)
def test_invalid_overrides_are_refused(script, text, override, message):
    result = run(script(text), "--override", override, "--dry-run", "--")
    assert message in str(result.exception)
    assert result.stdout == ""


def test_placeholder_of_a_word_has_a_setting(script):
    path = script("python pretrain_<model>.py --lr <the rate>\n")
    assert "--set model=VALUE for itself" in str(run(path, "--dry-run", "--").exception)
    refused = str(run(path, "--set", "model=gpt", "--dry-run", "--").exception)
    assert "<the rate> stands for a value" in refused
    assert "for itself" not in refused
    path = script("python pretrain_<model>.py --lr 1\n")
    assert run(path, "--set", "model=gpt", "--dry-run", "--").stdout.endswith(f"pretrain gpt {REPLICAS} --lr 1\n")


def test_other_slurm_directives_are_passed_to_sbatch(script):
    text = "#!/bin/bash\n#SBATCH --nodes=2 --mem=460000 --environment=/e.toml\n#SBATCH --no-requeue --gres=gpu:4\n"
    result = run(script(text + "srun torchrun --nproc_per_node 4 pretrain_gpt.py --lr 1\n"), "--dry-run", "--")
    assert result.stdout == (
        "dynmo-train launch slurm --nproc 4 --nodes 2 --gpus 4 --sbatch --mem=460000 --sbatch --environment=/e.toml"
        f" --sbatch --no-requeue -- pretrain gpt {REPLICAS} --lr 1\n"
    )


def test_entities_of_a_page_are_characters(script):
    text = 'A=&#60;wiki path&#62;.txt\nB="&lt;<a href="#x">x</a>&gt;"\npython pretrain_gpt.py --data-path $A\n'
    result = run(script(text), "--dry-run", "--")
    assert "<wiki path> stands for a value" in str(result.exception)
    given = run(script(text), "--set", "A=c", "--set", "B=d", "--dry-run", "--")
    assert given.stdout.endswith(f"dynmo-train pretrain gpt {REPLICAS} --data-path c\n")
    assert "line 1: &#60; and other entities of HTML" in given.stderr
    plain = run(script("python pretrain_gpt.py --data-path 'a&amp;b'\n"), "--dry-run", "--")
    assert plain.stdout == f"dynmo-train pretrain gpt {REPLICAS} --data-path 'a&amp;b'\n"


def test_script_of_another_repository_has_an_equivalent(script):
    result = run(script("bash examples/bert_example.sh 24\n"), "--dry-run", "--")
    assert "or run bin/bert_example.sh, its equivalent" in str(result.exception)
