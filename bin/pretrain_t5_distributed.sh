#!/usr/bin/env bash
# bin/pretrain_t5.sh in several processes, as Megatron-LM's examples/pretrain_t5_distributed.sh; its variables, and:
#
# GPUS_PER_NODE, or WORLD_SIZE on one machine    processes on each machine (8)
set -euo pipefail

export GPUS_PER_NODE="${GPUS_PER_NODE:-${WORLD_SIZE:-8}}"
exec "$(dirname "$0")/pretrain_t5.sh" --micro-batch-size 16 --global-batch-size 2048 --DDP-impl torch "$@"
