#!/usr/bin/env bash
# Trains the GPT of 345M parameters on data cut into words beforehand, as the DeepSpeed guide's
# examples/pretrain_gpt2_distributed.sh: one machine with several devices, or several machines by NODE_RANK:
#
#   bin/pretrain_gpt2_distributed.sh [options of dynmo-train pretrain gpt, which go before those below]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.10.10.102 bin/pretrain_gpt2_distributed.sh    # and NODE_RANK=1 on the other
#
# GPUS_PER_NODE 2    DATA_PATH train_text_document    CHECKPOINT_PATH checkpoints/gpt2_345m
# VOCAB_FILE vocab.json, with TOKENIZER_TYPE WhitespaceVocab; with MERGE_FILE it is GPT2BPETokenizer
# and those of bin/lib/train.sh
set -euo pipefail
export GPUS_PER_NODE="${GPUS_PER_NODE:-2}"
. "$(dirname "$0")/lib/train.sh"

tokens=(--tokenizer-type "${TOKENIZER_TYPE:-WhitespaceVocab}" --vocab-file "${VOCAB_FILE:-vocab.json}")
if [ -n "${MERGE_FILE:-}" ]; then
  tokens=(--tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB_FILE:-vocab.json}" --merge-file "$MERGE_FILE")
fi

start pretrain gpt "${gpt_345m[@]}" --model-parallel-size 1 --batch-size 8 \
  --train-iters 500 --lr 0.00015 --min-lr 1.0e-5 --lr-decay-iters 320000 --lr-decay-style cosine --warmup .01 \
  --weight-decay 1e-2 --clip-grad 1.0 \
  "${tokens[@]}" --data-path "${DATA_PATH:-train_text_document}" --data-impl mmap --split 900,50,50 \
  --checkpoint-activations --log-interval 10 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16 \
  --save "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}" --load "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}" "$@"
