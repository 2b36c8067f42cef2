#!/usr/bin/env bash
# bin/pretrain_bert_distributed.sh with the model cut both ways, as Megatron-LM's script of this name; its variables, and:
#
# TENSOR_MP_SIZE 2    PIPELINE_MP_SIZE 2
set -euo pipefail

exec "$(dirname "$0")/pretrain_bert_distributed.sh" --micro-batch-size 2 --global-batch-size 16 \
  --tensor-model-parallel-size "${TENSOR_MP_SIZE:-2}" --pipeline-model-parallel-size "${PIPELINE_MP_SIZE:-2}" "$@"
