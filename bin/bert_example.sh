#!/usr/bin/env bash
# Trains BERT with gradual pruning on a pipeline that the planner keeps balanced:
#
#   bin/bert_example.sh LAYERS BALANCER WORKERS_PER_NODE NODES [options of dynmo-train pretrain bert]
#   bin/bert_example.sh 24 diffusion 4 1
#
# BALANCER   diffusion, diffusion_param, deepspeed, deepspeed_param, deepspeed_static, exact, time, parameters, uniform; off
# NODES      above 1: run the same command on each node, with NODE_RANK and MASTER_ADDR in the environment
#
# Environment variables, with their defaults:
# PACK_TO            release workers down to this number (none)
# HIDDEN_SIZE 1024   ATTENTION_HEADS 16   SEQ_LENGTH 512   MICRO_BATCH_SIZE 8   GLOBAL_BATCH_SIZE 64
# TRAIN_ITERS 10000  PRUNING_START 2      PRUNING_END 10   PRUNING_FREQ 2
# DATA_PATH          data set of sentences, with TOKENIZER (a tokenizer.json) or VOCAB_FILE (one token a line); the default
#                    is built from the documentation of the installed Python (CORPUS_BYTES 0: all of it)
# DYNMO_BERT_DIR     output directory (runs/bert_example in the project); an existing run is resumed
# DYNMO_VENV, PYTHON see bin/environment.sh
#
# The MLPs have the tanh form of GELU, as Megatron's fused kernel; --activation gelu continues a run of the exact form.
set -euo pipefail

layers=${1:-24}
balancer=${2:-diffusion}
workers=${3:-4}
nodes=${4:-1}
shift $(($# < 4 ? $# : 4))
for number in "$layers" "$workers" "$nodes"; do
  if ! [[ $number =~ ^[1-9][0-9]*$ ]]; then
    echo "$0: LAYERS, WORKERS_PER_NODE and NODES are whole numbers above 0, got $number" >&2
    echo "usage: $0 LAYERS BALANCER WORKERS_PER_NODE NODES [options of dynmo-train pretrain bert]" >&2
    exit 2
  fi
done
. "$(dirname "$0")/environment.sh"

work=${DYNMO_BERT_DIR:-$root/runs/bert_example}
mkdir -p "$work"

if [ -z "${DATA_PATH:-}" ]; then
  DATA_PATH=$work/data/corpus_text_sentence
  TOKENIZER=$work/data/tokenizer.json
  if [ ! -f "$DATA_PATH.idx" ]; then
    corpus=$work/data/corpus.jsonl
    mkdir -p "$work/data"
    dynmo-prep sample-corpus --output "$corpus" --max-bytes "${CORPUS_BYTES:-0}"
    dynmo-prep train-tokenizer "$corpus" --output "$TOKENIZER" --model wordpiece-lower --overwrite
    dynmo-prep binarize "$corpus" --output-prefix "$work/data/corpus" --tokenizer "$TOKENIZER" --split-sentences --overwrite
  fi
fi
tokens=(--tokenizer-model "${TOKENIZER:-}")
if [ -n "${VOCAB_FILE:-}" ]; then
  tokens=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE")
fi

balance=(--balance online --balancer "$balancer" --rebalance-interval "${REBALANCE_INTERVAL:-${PRUNING_FREQ:-2}}")
if [ "$balancer" = off ]; then
  balance=(--balance off)
elif [ -n "${PACK_TO:-}" ]; then
  balance+=(--pack-to "$PACK_TO")
fi

launch=(launch local --nproc "$workers")
if [ "$nodes" -gt 1 ]; then
  launch=(launch node --nproc "$workers" --nnodes "$nodes")
fi

iters=${TRAIN_ITERS:-10000}
exec dynmo-train "${launch[@]}" --log-dir "$work/logs" -- pretrain bert \
  --pipeline-model-parallel-size $((workers * nodes)) \
  --num-layers "$layers" \
  --hidden-size "${HIDDEN_SIZE:-1024}" \
  --num-attention-heads "${ATTENTION_HEADS:-16}" \
  --seq-length "${SEQ_LENGTH:-512}" --activation gelu_tanh \
  --micro-batch-size "${MICRO_BATCH_SIZE:-8}" \
  --global-batch-size "${GLOBAL_BATCH_SIZE:-64}" \
  --train-iters "$iters" \
  --data-path "$DATA_PATH" "${tokens[@]}" --split 949,50,1 \
  --lr 0.0001 --min-lr 1.0e-5 --lr-decay-style linear --lr-decay-iters "$iters" --lr-warmup-fraction .005 \
  --weight-decay 1e-2 --clip-grad 1.0 \
  --log-interval 10 --eval-interval 1000 --save-interval 1000 \
  --sparsify --pruning-start-iter "${PRUNING_START:-2}" --pruning-end-iter "${PRUNING_END:-10}" \
  --pruning-freq "${PRUNING_FREQ:-2}" --final-sparsity 0.9 \
  "${balance[@]}" --save "$work/run" --load "$work/run" "$@"
