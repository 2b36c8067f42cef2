#!/usr/bin/env bash
# Generates text with the GPT of 345M parameters, as Megatron-DeepSpeed's examples/generate_text.sh:
#
#   bin/generate_text.sh [options of dynmo-train generate, which go before those below]
#   bin/generate_text.sh --sample-input-file prompts.txt    # continues each line of the file
#
# CHECKPOINT_PATH checkpoints/gpt2_345m (a run, or a checkpoint of Megatron or Hugging Face)
# VOCAB_FILE gpt2-vocab.json    MERGE_FILE gpt2-merges.txt
# MAX_OUTPUT_SEQUENCE_LENGTH 1024    TEMPERATURE 1.0    TOP_P 0.9    NUMBER_OF_SAMPLES 2 (1 with --greedy or temperature 0)
# OUTPUT_FILE samples.json
# and those of bin/lib/train.sh
set -euo pipefail
. "$(dirname "$0")/lib/train.sh"

VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
case " $* ${TEMPERATURE:-1.0} " in
  *" --greedy "* | *" 0 " | *" 0.0 ") samples=1 ;; # greedy samples are equal
  *) samples=2 ;;
esac
load=$(readable "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}")

start generate --load "$load" \
  --vocab-file "$VOCAB_FILE" --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
  --out-seq-length "${MAX_OUTPUT_SEQUENCE_LENGTH:-1024}" --temperature "${TEMPERATURE:-1.0}" --top_p "${TOP_P:-0.9}" \
  --num-samples "${NUMBER_OF_SAMPLES:-$samples}" --genfile "${OUTPUT_FILE:-samples.json}" --recompute "$@"
