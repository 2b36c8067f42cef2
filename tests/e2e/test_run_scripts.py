"""``dynmo-train run`` trains, resumes and evaluates: a script of each launcher, as published, with smaller sizes.

The scripts have the form of published ones: their sizes are those of a cluster, and ``--set`` and ``--override`` make
them small. ``test_launchers.py`` has the command lines of many more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_harness import ROWS, model_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    " --log-interval 1 --eval-iters 0"
)
PREPROCESS = """
python tools/preprocess_data.py \\
       --input my-corpus.json \\
       --output-prefix my-gpt2 \\
       --vocab gpt2-vocab.json \\
       --dataset-impl mmap \\
       --tokenizer-type GPT2BPETokenizer \\
       --merge-file gpt2-merges.txt \\
       --append-eod
"""
# As READMEs print it: the model is a placeholder, and values refer to another script.
LAUNCH = """
WORLD_SIZE=8
PIPELINE_MP_SIZE=2
DISTRIBUTED_ARGS="--nproc_per_node $WORLD_SIZE \\
                  --nnodes 1 \\
                  --node_rank 0 \\
                  --master_addr localhost \\
                  --master_port 6000"
CHECKPOINT_PATH=&#60;same as above&#62;
DATA_PATH=my-gpt2_text_document
MODEL_ARGS=&#60;same as above&#62;

python -m torch.distributed.launch $DISTRIBUTED_ARGS ./pretrain_<model>.py \\
                $MODEL_ARGS \\
                --save $CHECKPOINT_PATH \\
                --load $CHECKPOINT_PATH \\
                --data-path $DATA_PATH \\
                --pipeline-model-parallel-size $PIPELINE_MP_SIZE \\
                --DDP-impl torch
"""
MODEL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    " --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 3 --lr-decay-iters 320000"
    " --lr-decay-style cosine --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --lr-warmup-fraction .01 --fp16"
)
TORCHRUN = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_PORT=$(shuf -n 1 -i 10000-65535)
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes 1 --master_addr localhost --master_port $MASTER_PORT)
LLAMA_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 64
    --seq-length 4096 --max-position-embeddings 4096
    --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --bf16 --use-distributed-optimizer
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style WSD --lr-wsd-decay-iters 1 --lr-warmup-iters 1
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${LLAMA_ARGS[@]} ${TRAINING_ARGS[@]} \\
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 \\
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --ckpt-format torch_dist 2>&1 | tee log.txt
"""
DEEPSPEED = """#! /bin/bash
GPUS_PER_NODE=4
mp_size=4
script_dir=$(dirname $(realpath $0))
config_json="$script_dir/ds_config.json"
cat <<EOT > $config_json
{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}
EOT
options=" \\
        --model-parallel-size ${mp_size} --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
        --seq-length 1024 --max-position-embeddings 1024 --train-iters 3 --lr-decay-iters 320000 \\
        --save out --load out --data-path my-gpt2_text_document --vocab-file gpt2-vocab.json \\
        --merge-file gpt2-merges.txt --data-impl mmap --split 900,50,50 --distributed-backend nccl --lr 1.5e-4 \\
        --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01 \\
        --checkpoint-activations --fp16 --deepspeed --deepspeed_config ${config_json} --zero-stage 0"
run_cmd="deepspeed --num_nodes 1 --num_gpus ${GPUS_PER_NODE} ../pretrain_gpt2.py $@ ${options}"
echo ${run_cmd}
eval ${run_cmd}
set +x
"""
SBATCH = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=2
#SBATCH --mem=460000
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
CMD="torchrun --nproc-per-node $GPUS --nnodes $SLURM_NNODES --rdzv_endpoint $MASTER_ADDR:25678 --rdzv_backend c10d \\
    pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \\
    --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-4 --bf16 \\
    --pipeline-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --save out --load out"
srun -lu --wait 60 bash -c "$CMD"
"""
HARNESS = "python main.py --model gpt2 --model_args pretrained={checkpoint_path} --device cuda:0 --tasks lambada,piqa\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the tokenizer's files and the data that a script binarizes."""
    folder = tmp_path_factory.mktemp("scripts")
    model_of(folder / "model")
    for name, target in (("vocab.json", "gpt2-vocab.json"), ("merges.txt", "gpt2-merges.txt")):
        (folder / target).write_bytes((folder / "model" / name).read_bytes())
    rows = (json.dumps({"text": f"the cat sat on the mat and the dog sat on log {n}. " * 4}) for n in range(40))
    (folder / "my-corpus.json").write_text("\n".join(rows) + "\n")
    run(folder, PREPROCESS)
    assert (folder / "my-gpt2_text_document.bin").stat().st_size > 0
    return folder


def run(folder: Path, text: str, *options: str, arguments: tuple[str, ...] = (), **environment: str) -> str:
    """Standard output of ``dynmo-train run`` with a script of this text."""
    (folder / "script.sh").write_text(text)
    command = [sys.executable, "-m", "dynmo_train", "run", *options, "script.sh", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def steps(run_folder: Path) -> list[int]:
    """The steps in the metrics of a run, each of which updated the weights."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "lm_loss" in row]
    assert all(row["updated"] and row["lm_loss"] > 0 for row in trained)
    return [row["step"] for row in trained]


def parallel(run_folder: Path) -> dict[str, int]:
    return json.loads((run_folder / "run.json").read_text())["config"]["parallel"]


@pytest.mark.complete
def test_script_of_torch_distributed_launch_trains_and_resumes(place):
    settings = ("model=gpt", "CHECKPOINT_PATH=launched", f"MODEL_ARGS={MODEL}", "WORLD_SIZE=2")
    options = [word for setting in settings for word in ("--set", setting)]
    run(place, LAUNCH, *options, "--override", f"{SMALL} --loss-scale 1")
    assert steps(place / "launched") == [1, 2, 3]
    assert parallel(place / "launched")["pipeline_model_parallel_size"] == 2
    run(place, LAUNCH, *options, "--override", SMALL, "--override", "--loss-scale 1 --train-iters 5")
    assert steps(place / "launched") == [1, 2, 3, 4, 5]


def test_script_of_torchrun_trains_and_resumes(place):
    for iterations in (2, 4):
        override = f"{SMALL} --train-iters {iterations}"
        run(place, TORCHRUN, "--override", override, arguments=("run by torchrun",), GPUS_PER_NODE="2")
    assert steps(place / "run by torchrun") == [1, 2, 3, 4]
    assert parallel(place / "run by torchrun")["data_parallel_size"] == 2


@pytest.mark.complete
def test_script_of_deepspeed_trains_and_resumes(place):
    folder = place / "deepspeed"
    folder.mkdir()
    for name in ("gpt2-vocab.json", "gpt2-merges.txt", "my-gpt2_text_document.bin", "my-gpt2_text_document.idx"):
        (folder / name).write_bytes((place / name).read_bytes())
    for iterations in (2, 4):
        override = f"{SMALL} --loss-scale 1 --train-iters {iterations}"
        run(folder, DEEPSPEED, "--set", "GPUS_PER_NODE=2", "--set", "mp_size=1", "--override", override)
    assert steps(folder / "out") == [1, 2, 3, 4]
    assert (parallel(folder / "out")["zero_stage"], parallel(folder / "out")["data_parallel_size"]) == (2, 2)


@pytest.mark.complete
def test_script_of_srun_trains_in_a_job(place):
    """The commands of Slurm are stand-ins; ``test_slurm.py`` has the real ones."""
    folder = place / "slurm"
    (folder / "bin").mkdir(parents=True)
    stand_ins = {
        "srun": 'while [[ $1 == -* ]]; do shift; done\nexec "$@"\n',
        "scontrol": "[[ $1 == show ]] && echo localhost || true\n",
        "dynmo-train": f'exec {sys.executable} -m dynmo_train "$@"\n',
    }
    for name, text in stand_ins.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (folder / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "GPUS": "2"}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    run(folder, SBATCH, "--override", SMALL, PATH=path, **job)
    assert steps(folder / "out") == [1, 2, 3]
    assert parallel(folder / "out")["pipeline_model_parallel_size"] == 2


@pytest.mark.complete
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_script_of_the_harness_evaluates(place):
    folder = place / "harness"
    folder.mkdir()
    for task, row in ROWS.items():
        (folder / f"{task}.jsonl").write_text((json.dumps(row) + "\n") * 3)
    text = HARNESS.replace("{checkpoint_path}", str(place / "model" / "native"))
    override = f"--device cpu --task-data {folder} --limit 2 --format json"
    found = json.loads(run(folder, text, "--override", override))
    assert {task: figures["items"] for task, figures in found.items()} == {"lambada": 2, "piqa": 2}
