#!/usr/bin/env bash
# Table 3 and Table 4 of Optimus-CC: a checkpoint is merged, converted to Hugging Face and evaluated by
# lm-evaluation-harness, as its tools/ckpt_convert.py, convert_megatron_gpt2_checkpoint.py and main.py.
#
#   bin/ASPLOS23/zero_shot.sh CHECKPOINT FOLDER [options of dynmo-train evaluate lm-eval]
#
# CHECKPOINT    a run, or a checkpoint of Megatron on any numbers of tensor- and pipeline-parallel ranks
# FOLDER        gets merged/ and hf/
# TASKS         lambada,hellaswag,piqa,mathqa,winogrande,race    TASK_DATA    folder of their files (FOLDER/tasks)
# VOCAB_FILE gpt2-vocab.json    MERGE_FILE gpt2-merges.txt    for a checkpoint that has no tokenizer with it
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: $0 CHECKPOINT FOLDER [options of dynmo-train evaluate lm-eval]" >&2
  exit 2
fi
. "$(dirname "$0")/../lib/train.sh"

checkpoint=$1 folder=$2
shift 2
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json} tokenizer=()
mkdir -p "$folder"
if [ ! -d "$folder/merged" ]; then dynmo-ckpt convert "$(readable "$checkpoint")" "$folder/merged" --to native; fi
if [ ! -d "$folder/hf" ]; then
  if [ -z "$(find "$folder/merged" -name vocab.json -o -name tokenizer.json)" ] && [ -f "$VOCAB_FILE" ]; then
    mkdir -p "$folder/tokenizer"
    cp "$VOCAB_FILE" "$folder/tokenizer/vocab.json"
    cp "${MERGE_FILE:-gpt2-merges.txt}" "$folder/tokenizer/merges.txt"
    tokenizer=(--tokenizer "$folder/tokenizer")
  fi
  dynmo-ckpt convert "$folder/merged" "$folder/hf" --to hf "${tokenizer[@]}"
fi
exec dynmo-train evaluate lm-eval --load "$folder/hf" \
  --tasks "${TASKS:-lambada,hellaswag,piqa,mathqa,winogrande,race}" --task-data "${TASK_DATA:-$folder/tasks}" "$@"
