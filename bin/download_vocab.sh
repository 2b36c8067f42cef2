#!/usr/bin/env bash
# Downloads vocabularies, like Megatron-DeepSpeed's dataset/download_vocab.sh, and compares their SHA-256:
#
#   bin/download_vocab.sh [FOLDER [NAME...]]    # default: . gpt2
#
# NAME is gpt2 (gpt2-vocab.json, gpt2-merges.txt), bert-large-uncased or bert-large-cased (NAME-vocab.txt).
#
# VOCAB_URL    URL of the folder of the files, also file://
set -euo pipefail
. "$(dirname "$0")/lib/fetch.sh"
help "$@"

url=${VOCAB_URL:-https://s3.amazonaws.com/models.huggingface.co/bert}
folder=${1:-.}
shift $(($# < 1 ? $# : 1))
for name in "${@:-gpt2}"; do
  case $name in
    gpt2)
      fetch "$url/gpt2-vocab.json" "$folder/gpt2-vocab.json" \
        196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
      fetch "$url/gpt2-merges.txt" "$folder/gpt2-merges.txt" \
        1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
      ;;
    bert-large-uncased)
      fetch "$url/$name-vocab.txt" "$folder/$name-vocab.txt" \
        07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3
      ;;
    bert-large-cased) fetch "$url/$name-vocab.txt" "$folder/$name-vocab.txt" ;;
    *)
      echo "$0: $name: must be gpt2, bert-large-uncased or bert-large-cased" >&2
      exit 2
      ;;
  esac
done
