#!/usr/bin/env bash
#SBATCH --nodes=128 --exclusive --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --job-name=megatron_gpt3_175b --requeue --open-mode=append
# Trains GPT-3 with 175 billion parameters on 1024 GPUs, as Megatron-LM's examples/pretrain_gpt3_175B.sh. A copy may lie
# anywhere that all nodes see; dynmo-train must be on PATH.
#
#   sbatch bin/pretrain_gpt3_175B.sh             # on Slurm, in IMAGE where that is given (Pyxis)
#   bin/pretrain_gpt3_175B.sh --dry-run          # memory of each worker and time of a step on DRY_RUN_DEVICE, here
#
# DATASET_1, DATASET_2, DATASET_3    data sets, taken with the weights 0.2, 0.3, 0.5
# VOCAB_FILE gpt2-vocab.json    MERGE_FILE gpt2-merges.txt    CHECKPOINT_PATH checkpoints/gpt3_175b
# TENSORBOARD_DIR tensorboard/gpt3_175b    IMAGE    MOUNTS (FROM:TO)    DRY_RUN_DEVICE a100
set -euo pipefail

save=${CHECKPOINT_PATH:-checkpoints/gpt3_175b}
train=(pretrain gpt
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
  --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
  --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
  --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
  --data-path 0.2 "${DATASET_1:-dataset_1}" 0.3 "${DATASET_2:-dataset_2}" 0.5 "${DATASET_3:-dataset_3}" --split 98,2,0
  --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}"
  --log-interval 10 --eval-iters 40 --eval-interval 1000 --save-interval 1000 --save "$save" --load "$save"
  --tensorboard-dir "${TENSORBOARD_DIR:-tensorboard/gpt3_175b}" --fp16 --checkpoint-activations "$@")

for word in "$@"; do
  if [[ $word == @(--dry-run|--help) ]]; then
    exec dynmo-train "${train[@]}" --dry-run-processes 1024 --dry-run-device "${DRY_RUN_DEVICE:-a100}"
  fi
done
container=()
if [ -n "${IMAGE:-}" ]; then container+=(--image "$IMAGE"); fi
if [ -n "${MOUNTS:-}" ]; then container+=(--mount "$MOUNTS"); fi
if [ -n "${SLURM_JOB_ID:-}" ]; then container+=(--in-job); else container+=(--nodes 128 --gpus 8 --sbatch=--exclusive); fi
exec dynmo-train launch slurm --job-name megatron_gpt3_175b --nproc 8 "${container[@]}" -- "${train[@]}"
