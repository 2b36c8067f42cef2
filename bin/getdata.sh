#!/usr/bin/env bash
# Downloads the training data of the AWS test case (its getdata job): 1 GB of OSCAR, GPT-2's vocabulary and merges:
#
#   bin/getdata.sh [FOLDER]    # default: gpt2
#
# DATA_URL     URL of the folder of oscar-1GB.jsonl.xz, also file://    DATA_SHA256    SHA-256 of that file (optional)
# VOCAB_URL    see bin/download_vocab.sh                                VOCABS         its NAMEs (gpt2; "" for none)
set -euo pipefail
. "$(dirname "$0")/lib/fetch.sh"

folder=${1:-gpt2}
url=${DATA_URL:-https://huggingface.co/bigscience/misc-test-data/resolve/main/stas}
read -ra vocabularies <<<"${VOCABS-gpt2}"
if [ ${#vocabularies[@]} -gt 0 ]; then
  "$(dirname "$0")/download_vocab.sh" "$folder" "${vocabularies[@]}"
fi
if [ -f "$folder/oscar-1GB.jsonl" ]; then
  echo "$folder/oscar-1GB.jsonl exists"
  exit 0
fi
fetch "$url/oscar-1GB.jsonl.xz" "$folder/oscar-1GB.jsonl.xz" "${DATA_SHA256:-}"
"${PYTHON:-python3}" - "$folder/oscar-1GB.jsonl" <<'UNPACK'
import lzma, os, shutil, sys

target = sys.argv[1]
try:
    with lzma.open(target + ".xz") as packed, open(target + ".part", "wb") as plain:
        shutil.copyfileobj(packed, plain, 1 << 20)
except (OSError, EOFError, lzma.LZMAError) as error:
    sys.exit(f"{target}.xz is damaged: {error}; remove it and run this command again")
os.replace(target + ".part", target)
os.remove(target + ".xz")
UNPACK
echo "$folder/oscar-1GB.jsonl: $(wc -c <"$folder/oscar-1GB.jsonl") bytes"
