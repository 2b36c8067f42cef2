#!/usr/bin/env bash
# Builds a dataset of web pages like Megatron-LM's tools/openwebtext: filter URLs, fetch pages, clean, deduplicate,
# decontaminate, shuffle, tokenize.
#
#   bin/openwebtext.sh URLS FOLDER        # URLS: a file of URLs, one per line, or a folder of such files
#   PAGES='pages/*.jsonl' bin/openwebtext.sh - FOLDER    # pages that are already fetched ({"text": ..., "url": ...})
#
# USER_AGENT          User-Agent header, such as "me (me@site.org)"; required with URLS
# VOCAB_FILE gpt2-vocab.json    MERGE_FILE gpt2-merges.txt    WORKERS (cores)    EXECUTOR local, ray or slurm
# MIN_TOKENS 128      minimum tokens per document             SIMILARITY 0.9     minimum Jaccard index of duplicates
# TASKS               test sets to remove, as NAME=FILE separated by spaces, such as "lambada=lambada_test.jsonl"
# SEED 1234           seed of the shuffle
#
# The result is FOLDER/openwebtext_text_document. The same command resumes an interrupted run.
set -euo pipefail

if [ $# -ne 2 ]; then
  echo "usage: $0 URLS FOLDER, or PAGES=... $0 - FOLDER" >&2
  exit 2
fi
. "$(dirname "$0")/environment.sh"

urls=$1 folder=$2 start=$PWD
# given PATH: a path of the caller, in FOLDER; addresses and absolute paths stay.
given() {
  case $1 in
    /* | *://*) echo "$1" ;;
    *) echo "$start/$1" ;;
  esac
}
run=(--workers "${WORKERS:-$(nproc)}" --executor "${EXECUTOR:-local}")
mkdir -p "$folder"
cd "$folder"

if [ "$urls" != - ]; then
  dynmo-prep blacklist-urls "$(given "$urls")" -o clean_urls.txt --overwrite
  dynmo-prep fetch-urls clean_urls.txt -o pages.jsonl.zst \
    --user-agent "${USER_AGENT:?$0: set USER_AGENT to who you are, such as \'me (me@site.org)\'}"
  pages=pages.jsonl.zst
else
  pages=$(given "${PAGES:?$0: set PAGES to the files of pages}")
fi
dynmo-prep merge "$pages" -o merged.jsonl.zst "${run[@]}"
dynmo-prep clean merged.jsonl.zst -o clean.jsonl.zst --normalize --min-tokens "${MIN_TOKENS:-128}" "${run[@]}"
dynmo-prep find-duplicates clean.jsonl.zst -o pairs.jsonl "${run[@]}"
dynmo-prep group-duplicates pairs.jsonl -o groups.jsonl --threshold "${SIMILARITY:-0.9}" --overwrite
dynmo-prep remove-duplicates clean.jsonl.zst -o unique.jsonl.zst --groups groups.jsonl "${run[@]}"
last=unique.jsonl.zst
if [ -n "${TASKS:-}" ]; then
  tasks=()
  for task in $TASKS; do tasks+=(--task "${task%%=*}=$(given "${task#*=}")"); done
  dynmo-prep decontaminate unique.jsonl.zst -o safe.jsonl.zst "${tasks[@]}" "${run[@]}"
  last=safe.jsonl.zst
fi
dynmo-prep shuffle "$last" -o train_data.jsonl.zst --seed "${SEED:-1234}" "${run[@]}"
tokens=()
for file in "${VOCAB_FILE:-gpt2-vocab.json}" "${MERGE_FILE:-gpt2-merges.txt}"; do
  tokens+=("$(given "$file")")
done
dynmo-prep binarize --input train_data.jsonl.zst --output-prefix openwebtext --tokenizer-type GPT2BPETokenizer \
  --vocab-file "${tokens[0]}" --merge-file "${tokens[1]}" --append-eod "${run[@]}"
