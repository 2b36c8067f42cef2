#!/usr/bin/env bash
# Fine-tunes the BERT of 345M parameters on RACE, as Megatron-LM's examples/finetune_race_distributed.sh:
#
#   bin/finetune_race_distributed.sh [options of dynmo-train finetune race, which go before those below]
#
# TRAIN_DATA, VALID_DATA    files or folders with blanks between
#   (data/RACE/train/middle data/RACE/train/high;
#   data/RACE/dev/middle data/RACE/dev/high)
# PRETRAINED_CHECKPOINT checkpoints/bert_345m    CHECKPOINT_PATH checkpoints/bert_345m_race
# VOCAB_FILE bert-vocab.txt    TOKENIZER_TYPE BertWordPieceLowerCase    GPUS_PER_NODE, or WORLD_SIZE on one machine 8
# and those of bin/lib/train.sh
set -euo pipefail
export GPUS_PER_NODE="${GPUS_PER_NODE:-${WORLD_SIZE:-8}}"
. "$(dirname "$0")/lib/train.sh"

read -ra train <<<"${TRAIN_DATA:-data/RACE/train/middle data/RACE/train/high}"
read -ra valid <<<"${VALID_DATA:-data/RACE/dev/middle data/RACE/dev/high}"
start finetune race --seed 1234 --train-data "${train[@]}" --valid-data "${valid[@]}" \
  --tokenizer-type "${TOKENIZER_TYPE:-BertWordPieceLowerCase}" --vocab-file "${VOCAB_FILE:-bert-vocab.txt}" \
  --pretrained-checkpoint "${PRETRAINED_CHECKPOINT:-checkpoints/bert_345m}" \
  --epochs 3 --micro-batch-size 4 --lr 1.0e-5 --lr-decay-style linear --lr-warmup-fraction 0.06 --weight-decay 1.0e-1 \
  --checkpoint-activations --log-interval 10 --save-interval 500000 --eval-interval 100 --eval-iters 50 --fp16 \
  --save "${CHECKPOINT_PATH:-checkpoints/bert_345m_race}" "$@"
