#!/usr/bin/env bash
# Merges a BERT of several tensor-parallel ranks, as Megatron-LM's examples/merge_mp_bert.sh, for any number of stages:
#
#   bin/merge_mp_bert.sh [options of dynmo-ckpt merge_mp_partitions]
#
# CHECKPOINT_PATH checkpoints/bert_345m    VOCAB_FILE bert-vocab.txt    SAVE (CHECKPOINT_PATH-merged)
# TENSOR_MODEL_PARALLEL_SIZE 2    TARGET_PIPELINE_MODEL_PARALLEL_SIZE 2
set -euo pipefail
. "$(dirname "$0")/environment.sh"

load=${CHECKPOINT_PATH:-checkpoints/bert_345m}
exec dynmo-ckpt merge_mp_partitions --model-type BERT \
  --tensor-model-parallel-size "${TENSOR_MODEL_PARALLEL_SIZE:-2}" --pipeline-model-parallel-size 1 \
  --target-pipeline-model-parallel-size "${TARGET_PIPELINE_MODEL_PARALLEL_SIZE:-2}" \
  --tokenizer-type BertWordPieceLowerCase --vocab-file "${VOCAB_FILE:-bert-vocab.txt}" \
  --load "$load" --save "${SAVE:-$load-merged}" "$@"
