#!/usr/bin/env bash
# Trains the BERT of 345M parameters, as Megatron-LM's examples/pretrain_bert.sh, in one process:
#
#   bin/pretrain_bert.sh [options of dynmo-train pretrain bert, which go before those below]
#
# CHECKPOINT_PATH checkpoints/bert_345m    DATA_PATH my-bert_text_sentence
# VOCAB_FILE bert-vocab.txt                TOKENIZER_TYPE BertWordPieceLowerCase
# and those of bin/lib/train.sh
#
# The MLPs have the tanh form of GELU, as Megatron's fused kernel; --activation gelu continues a run of the exact form.
set -euo pipefail
. "$(dirname "$0")/lib/train.sh"

start pretrain bert "${bert_345m[@]}" --activation gelu_tanh \
  --micro-batch-size 4 --global-batch-size 8 \
  --train-iters 2000000 --lr 0.0001 --min-lr 1.0e-5 --lr-decay-iters 990000 --lr-decay-style linear \
  --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 \
  --tokenizer-type "${TOKENIZER_TYPE:-BertWordPieceLowerCase}" --vocab-file "${VOCAB_FILE:-bert-vocab.txt}" \
  --data-path "${DATA_PATH:-my-bert_text_sentence}" --split 949,50,1 \
  --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
  --fp16 \
  --save "${CHECKPOINT_PATH:-checkpoints/bert_345m}" --load "${CHECKPOINT_PATH:-checkpoints/bert_345m}" "$@"
