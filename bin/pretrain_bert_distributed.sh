#!/usr/bin/env bash
# bin/pretrain_bert.sh in several processes, as Megatron-LM's examples/pretrain_bert_distributed.sh; its variables, and:
#
# GPUS_PER_NODE, or WORLD_SIZE on one machine    processes on each machine (8)
set -euo pipefail

export GPUS_PER_NODE="${GPUS_PER_NODE:-${WORLD_SIZE:-8}}"
exec "$(dirname "$0")/pretrain_bert.sh" --micro-batch-size 4 --global-batch-size 32 --DDP-impl torch "$@"
