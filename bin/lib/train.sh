# Sourced by the scripts of this folder that train or evaluate: how the command is launched, and the published sizes.
#
# GPUS_PER_NODE    processes on each machine (1)
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
#                  several machines: run the same script on each with its own NODE_RANK (1, 0, localhost, 6000)
# DYNMO_LAUNCH     another launcher, as arguments of `dynmo-train launch`: "slurm --nodes 4 --gpus 8 --time 24:00:00",
#                  "hostfile -H hostfile", "lsf --nodes 4 --image dynmo.sif", "kubernetes --image IMAGE --nodes 2"
# DYNMO_VENV, PYTHON, DYNMO_SETUP
#                  see bin/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

gpt_345m=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024)
bert_345m=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512)

# readable CHECKPOINT: where dynmo-train reads it; a checkpoint of Megatron is converted once, into CHECKPOINT/native, with
# the true size of the JSON vocabulary VOCAB_FILE where that is there.
readable() {
  local size=()
  if [ -f "$1/latest_checkpointed_iteration.txt" ]; then
    if [ ! -d "$1/native" ]; then
      if [[ ${VOCAB_FILE:-} == *.json && -f $VOCAB_FILE ]]; then
        size=(--vocab-size "$("${PYTHON:-python3}" -c 'import json, sys; print(len(json.load(open(sys.argv[1], "rb"))))' "$VOCAB_FILE")")
      fi
      dynmo-ckpt convert "$1" "$1/native" --to native "${size[@]}" >&2
    fi
    echo "$1/native"
  else
    echo "$1"
  fi
}

# start COMMAND...: runs a command of dynmo-train in the number of processes that the variables set. With --dry-run (of
# pretrain), one process reports the memory and time of all of them.
start() {
  local nproc=${GPUS_PER_NODE:-1} nodes=${NNODES:-1} word how=()
  [ -n "${RANK:-}" ] || unset WORLD_SIZE # the classic scripts set it; the launcher sets its own
  for word in "$@"; do
    if [ "$word" = --dry-run ]; then
      exec dynmo-train "$@" --dry-run-processes "${DRY_RUN_PROCESSES:-$((nproc * nodes))}"
    fi
  done
  if [ -n "${DYNMO_LAUNCH:-}" ]; then
    read -ra how <<<"$DYNMO_LAUNCH"
    if [ "${how[0]}" != hostfile ]; then how+=(--nproc "$nproc"); fi # a hostfile has slots
    exec dynmo-train launch "${how[@]}" -- "$@"
  elif [ "$nodes" -gt 1 ]; then
    exec dynmo-train launch node --nproc "$nproc" --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" \
      --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" -- "$@"
  elif [ "$nproc" -gt 1 ]; then
    exec dynmo-train launch local --nproc "$nproc" -- "$@"
  fi
  exec dynmo-train "$@"
}
