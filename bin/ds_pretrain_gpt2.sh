#!/usr/bin/env bash
# bin/pretrain_gpt2_distributed.sh with ZeRO and model parallelism, as the DeepSpeed guide's examples/ds_pretrain_gpt2.sh,
# on one machine or on the hosts of a file; its variables, and:
#
# GPUS_PER_NODE 4    MP_SIZE 4 (tensor parallel)    ZERO_STAGE 0    BATCHSIZE 9 (a microbatch)
# CONFIG_JSON        a DeepSpeed configuration (bin/ds_zero_stage_2_config.json is one; its ZeRO stage is then used)
# HOSTFILE           hosts, "HOST slots=N" a line; INCLUDE "10.10.10.102:4,5@10.10.10.105:4,5" picks devices
# LOGDIR             TensorBoard's folder, by default tensorboard_data/ and the sizes
set -euo pipefail

export GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
mp=${MP_SIZE:-4}
batch=${BATCHSIZE:-9}
if [ -n "${HOSTFILE:-}" ]; then
  export DYNMO_LAUNCH="hostfile -H $HOSTFILE ${INCLUDE:+-i $INCLUDE} --master-port ${MASTER_PORT:-6000}"
fi
if [ -n "${CONFIG_JSON:-}" ]; then
  zero=(--deepspeed_config "$CONFIG_JSON")
else
  zero=(--zero-stage "${ZERO_STAGE:-0}")
fi
exec "$(dirname "$0")/pretrain_gpt2_distributed.sh" --model-parallel-size "$mp" --batch-size "$batch" --save-interval 10 \
  --tensorboard-dir "${LOGDIR:-tensorboard_data/24l_1024h_${NNODES:-1}n_${GPUS_PER_NODE}g_${mp}mp_${batch}b_ds4}" \
  --deepspeed "${zero[@]}" --zero-reduce-bucket-size 50000000 --zero-allgather-bucket-size 5000000000 \
  --zero-contigious-gradients --zero-reduce-scatter \
  --checkpoint-num-layers 1 --partition-activations --synchronize-each-layer --contigious-checkpointing "$@"
