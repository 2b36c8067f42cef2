#!/usr/bin/env bash
# Downloads and unpacks NVIDIA's GPT-345M of Megatron-LM, like Megatron-DeepSpeed's dataset/download_ckpt.sh:
#
#   bin/download_ckpt.sh [FOLDER]    # default: checkpoints/gpt2_345m; `--load FOLDER` reads it without conversion
#
# CKPT_URL       URL of the archive (default: NVIDIA's NGC), also file://
# CKPT_SHA256    SHA-256 of the archive (optional; NVIDIA publishes none, so only its own checksums are compared)
set -euo pipefail
. "$(dirname "$0")/lib/fetch.sh"
help "$@"

folder=${1:-checkpoints/gpt2_345m}
url=${CKPT_URL:-https://api.ngc.nvidia.com/v2/models/nvidia/megatron_lm_345m/versions/v0.0/zip}
archive=$folder/megatron_lm_345m_v0.0.zip
if [ -f "$folder/latest_checkpointed_iteration.txt" ]; then
  echo "$folder already has a checkpoint"
  exit 0
fi
fetch "$url" "$archive" "${CKPT_SHA256:-}"
python=${PYTHON:-python3}
if ! "$python" -m zipfile --test "$archive" >/dev/null; then
  echo "$0: $archive is not an archive, or is damaged; remove it and run this script again" >&2
  exit 1
fi
"$python" -m zipfile --extract "$archive" "$folder"
rm "$archive"
if [ ! -f "$folder/latest_checkpointed_iteration.txt" ]; then
  echo "$0: $url is not a checkpoint of Megatron: latest_checkpointed_iteration.txt is missing; set CKPT_URL" >&2
  exit 1
fi
echo "$folder: iteration $(cat "$folder/latest_checkpointed_iteration.txt")"
