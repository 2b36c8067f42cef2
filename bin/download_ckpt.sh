#!/usr/bin/env bash
# Downloads NVIDIA's GPT-345M of Megatron-LM and unpacks it, as Megatron-DeepSpeed's dataset/download_ckpt.sh:
#
#   bin/download_ckpt.sh [FOLDER]    # checkpoints/gpt2_345m; `--load FOLDER` then reads it as it is
#
# CKPT_URL       where from (NVIDIA's NGC); file:// works as well
# CKPT_SHA256    what its SHA-256 must be; NVIDIA publishes none, so that nothing but the archive's own sums is compared
set -euo pipefail
. "$(dirname "$0")/lib/fetch.sh"
help "$@"

folder=${1:-checkpoints/gpt2_345m}
url=${CKPT_URL:-https://api.ngc.nvidia.com/v2/models/nvidia/megatron_lm_345m/versions/v0.0/zip}
archive=$folder/megatron_lm_345m_v0.0.zip
if [ -f "$folder/latest_checkpointed_iteration.txt" ]; then
  echo "$folder holds a checkpoint"
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
  echo "$0: $url holds no checkpoint of Megatron: there is no latest_checkpointed_iteration.txt in it" >&2
  exit 1
fi
echo "$folder: iteration $(cat "$folder/latest_checkpointed_iteration.txt")"
