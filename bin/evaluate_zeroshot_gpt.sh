#!/usr/bin/env bash
# Evaluates a GPT without fine-tuning, as Megatron-LM's examples/evaluate_zeroshot_gpt.sh:
#
#   TASK=LAMBADA VALID_DATA=lambada_test.jsonl bin/evaluate_zeroshot_gpt.sh [options of dynmo-train evaluate]
#   TASK=WIKITEXT103 VALID_DATA=wiki.test.tokens bin/evaluate_zeroshot_gpt.sh
#
# CHECKPOINT_PATH checkpoints/gpt2_345m    VOCAB_FILE gpt2-vocab.json    MERGE_FILE gpt2-merges.txt
# and those of bin/lib/train.sh; the model's shape is the checkpoint's
set -euo pipefail
. "$(dirname "$0")/lib/train.sh"

VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
load=$(readable "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}")

task=${TASK:-LAMBADA}
if [ "$task" = LAMBADA ]; then set -- --strict-lambada "$@"; fi
start tasks --task "$task" --valid-data "${VALID_DATA:?$0: set VALID_DATA to the task\'s data}" \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$VOCAB_FILE" --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
  --load "$load" --micro-batch-size 8 --log-interval 10 "$@"
