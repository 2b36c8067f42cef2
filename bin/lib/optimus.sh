# Sourced by the scripts of ASPLOS23: the models and the schemes of Optimus-CC (arXiv:2301.09830), as its scripts have them.
#
# CHECKPOINT_PATH    checkpoints/GPT2-SIZE-SCHEME    DATA_PATH    my-gpt2_text_document
# VOCAB_FILE gpt2-vocab.json    MERGE_FILE gpt2-merges.txt    TENSOR_MP_SIZE 8    PIPELINE_MP_SIZE 4
# CB_RANK 16    DP_RANK 128     WARM_UP 0.0    SC_WAY 3
# GPUS_PER_NODE 8, NNODES 16 (four replicas), and those of bin/lib/train.sh
export GPUS_PER_NODE="${GPUS_PER_NODE:-8}" NNODES="${NNODES:-16}"
. "$(dirname "${BASH_SOURCE[0]}")/train.sh"

usage() {
  echo "usage: $0 335M|2.5B|8.3B ${1:-} [options of dynmo-train pretrain gpt]" >&2
  exit 2
}

# model SIZE: sets `model` to the options of its shape.
model() {
  case ${1:-} in
    335M) model=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16) ;;
    2.5B) model=(--num-layers 52 --hidden-size 1920 --num-attention-heads 24) ;;
    8.3B) model=(--num-layers 72 --hidden-size 3072 --num-attention-heads 24) ;;
    *) return 1 ;;
  esac
}

# scheme NAME: sets `scheme` to the options of compressed backpropagation (CB) with or without lazy error propagation
# (LEP), fused embedding synchronization (FE) and selective stage compression (SC).
scheme() {
  local cb=(--inter_grad_comp --inter_grad_comp_rank "${CB_RANK:-16}" --inter_grad_comp_epilogue_only)
  local sc=(--grad_comp --grad_comp_rank "${DP_RANK:-128}" --grad_comp_warm_up "${WARM_UP:-0.0}"
    --selective_grad_comp --selective_grad_comp_way "${SC_WAY:-3}")
  case ${1:-} in
    Baseline) scheme=() ;;
    CB-NON-LEP) scheme=("${cb[@]}") ;;
    CB | CB-LEP) scheme=("${cb[@]}" --use_error_feedback) ;;
    CB-FE) scheme=("${cb[@]}" --use_error_feedback --emb_comm_opt) ;;
    CB-FE-SC) scheme=("${cb[@]}" "${sc[@]}" --use_error_feedback --emb_comm_opt) ;;
    *) return 1 ;;
  esac
}

# train ITERATIONS NAME [option...]: trains `model` with `scheme`.
train() {
  local iterations=$1 save=${CHECKPOINT_PATH:-checkpoints/$2}
  shift 2
  start pretrain gpt "${model[@]}" --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 8 --global-batch-size 512 --train-iters "$iterations" \
    --lr 0.00015 --min-lr 1.0e-5 --lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-fraction .01 \
    --weight-decay 1e-2 --clip-grad 1.0 \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
    --data-path "${DATA_PATH:-my-gpt2_text_document}" --split 949,50,1 \
    --activations-checkpoint-method uniform --DDP-impl local \
    --tensor-model-parallel-size "${TENSOR_MP_SIZE:-8}" --pipeline-model-parallel-size "${PIPELINE_MP_SIZE:-4}" \
    --log-interval 1 --save-interval 100 --eval-interval 100 --eval-iters 10 \
    --save "$save" --load "$save" "${scheme[@]}" "$@"
}
