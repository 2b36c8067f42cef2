#!/usr/bin/env bash
# Table 3 and Table 4 of Optimus-CC: a checkpoint is merged, converted to Hugging Face and evaluated by
# lm-evaluation-harness, as its tools/ckpt_convert.py, convert_megatron_gpt2_checkpoint.py and main.py.
#
#   bin/ASPLOS23/zero_shot.sh CHECKPOINT FOLDER [options of dynmo-train evaluate lm-eval]
#
# CHECKPOINT    a run, or a checkpoint of Megatron on any numbers of tensor- and pipeline-parallel ranks
# FOLDER        gets merged/ and hf/
# TASKS         lambada,hellaswag,piqa,mathqa,winogrande,race    TASK_DATA    folder of their files (FOLDER/tasks)
# VOCAB_FILE gpt2-vocab.json    MERGE_FILE gpt2-merges.txt
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: $0 CHECKPOINT FOLDER [options of dynmo-train evaluate lm-eval]" >&2
  exit 2
fi
. "$(dirname "$0")/../environment.sh"

checkpoint=$1 folder=$2
shift 2
mkdir -p "$folder"
if [ ! -d "$folder/merged" ]; then dynmo-ckpt convert "$checkpoint" "$folder/merged" --to native; fi
if [ ! -d "$folder/hf" ]; then dynmo-ckpt convert "$folder/merged" "$folder/hf" --to hf; fi
exec dynmo-train evaluate lm-eval --load "$folder/hf" \
  --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
  --tasks "${TASKS:-lambada,hellaswag,piqa,mathqa,winogrande,race}" --task-data "${TASK_DATA:-$folder/tasks}" "$@"
