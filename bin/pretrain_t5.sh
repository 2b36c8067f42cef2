#!/usr/bin/env bash
# Trains the T5 of 220M parameters, as Megatron-LM's examples/pretrain_t5.sh, in one process:
#
#   bin/pretrain_t5.sh [options of dynmo-train pretrain t5, which go before those below]
#
# CHECKPOINT_PATH checkpoints/t5_220m      DATA_PATH my-t5_text_sentence
# VOCAB_FILE t5-vocab.txt                  TOKENIZER_TYPE BertWordPieceCase
# and those of bin/lib/train.sh
#
# The MLPs have the tanh form of GELU, as Megatron's fused kernel; --activation gelu continues a run of the exact form.
set -euo pipefail
. "$(dirname "$0")/lib/train.sh"

start pretrain t5 \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 \
  --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 --vocab-extra-ids 100 --activation gelu_tanh \
  --micro-batch-size 16 --global-batch-size 16 \
  --train-iters 1000000 --lr 0.0001 --min-lr 0.00001 --lr-decay-iters 1000000 --lr-decay-style linear \
  --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 \
  --tokenizer-type "${TOKENIZER_TYPE:-BertWordPieceCase}" --vocab-file "${VOCAB_FILE:-t5-vocab.txt}" \
  --data-path "${DATA_PATH:-my-t5_text_sentence}" --split 949,50,1 \
  --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
  --fp16 \
  --save "${CHECKPOINT_PATH:-checkpoints/t5_220m}" --load "${CHECKPOINT_PATH:-checkpoints/t5_220m}" "$@"
