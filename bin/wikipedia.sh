#!/usr/bin/env bash
# Builds a dataset of a Wikipedia dump: extract text, normalize punctuation, tokenize.
#
#   bin/wikipedia.sh DUMP FOLDER [bert|gpt]
#   bin/wikipedia.sh enwiki-latest-pages-articles.xml.bz2 wiki bert
#
# bert    sentences as sequences (VOCAB_FILE bert-vocab.txt), FOLDER/wiki_text_sentence
# gpt     documents (VOCAB_FILE gpt2-vocab.json, MERGE_FILE gpt2-merges.txt), FOLDER/wiki_text_document
# WORKERS (cores)    LANGUAGE en    MIN_TOKENS 0 (minimum tokens per page)    EXECUTOR local, ray or slurm
#
# A missing dump is downloaded from DUMP_URL (https://dumps.wikimedia.org/enwiki/latest). A second run resumes.
set -euo pipefail

if [ $# -lt 2 ] || [[ ${3:-bert} != @(bert|gpt) ]]; then
  echo "usage: $0 DUMP FOLDER [bert|gpt]" >&2
  exit 2
fi
. "$(dirname "$0")/environment.sh"
. "$(dirname "$0")/lib/fetch.sh"

dump=$1 folder=$2 kind=${3:-bert}
if [ ! -f "$dump" ]; then
  fetch "${DUMP_URL:-https://dumps.wikimedia.org/enwiki/latest}/$(basename "$dump")" "$dump"
fi
run=(--workers "${WORKERS:-$(nproc)}" --executor "${EXECUTOR:-local}")
mkdir -p "$folder"
dynmo-prep extract-wiki "$dump" -o "$folder/pages.jsonl.zst" "${run[@]}"
dynmo-prep clean "$folder/pages.jsonl.zst" -o "$folder/clean.jsonl.zst" --punctuation --language "${LANGUAGE:-en}" \
  --min-tokens "${MIN_TOKENS:-0}" "${run[@]}"
if [ "$kind" = bert ]; then
  tokens=(--tokenizer-type BertWordPieceLowerCase --vocab-file "${VOCAB_FILE:-bert-vocab.txt}" --split-sentences)
else
  tokens=(--tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}")
  tokens+=(--merge-file "${MERGE_FILE:-gpt2-merges.txt}" --append-eod)
fi
dynmo-prep binarize --input "$folder/clean.jsonl.zst" --output-prefix "$folder/wiki" "${tokens[@]}" "${run[@]}"
