#!/usr/bin/env bash
# Trains the GPT of 345M parameters, as Megatron-LM's examples/pretrain_gpt.sh, in one process:
#
#   bin/pretrain_gpt.sh [options of dynmo-train pretrain gpt, which go before those below]
#
# CHECKPOINT_PATH checkpoints/gpt2_345m    DATA_PATH my-gpt2_text_document
# VOCAB_FILE gpt2-vocab.json               MERGE_FILE gpt2-merges.txt
# and those of bin/lib/train.sh
set -euo pipefail
. "$(dirname "$0")/lib/train.sh"

start pretrain gpt "${gpt_345m[@]}" \
  --micro-batch-size 4 --global-batch-size 8 \
  --train-iters 500000 --lr 0.00015 --lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-fraction .01 \
  --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
  --data-path "${DATA_PATH:-my-gpt2_text_document}" \
  --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 \
  --checkpoint-activations --fp16 \
  --save "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}" --load "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}" "$@"
