#!/usr/bin/env bash
# bin/pretrain_gpt.sh in several processes, as Megatron-LM's examples/pretrain_gpt_distributed.sh; its variables, and:
#
# GPUS_PER_NODE, or WORLD_SIZE on one machine    processes on each machine (8)
set -euo pipefail

export GPUS_PER_NODE="${GPUS_PER_NODE:-${WORLD_SIZE:-8}}"
exec "$(dirname "$0")/pretrain_gpt.sh" --micro-batch-size 8 --global-batch-size 64 --DDP-impl torch "$@"
