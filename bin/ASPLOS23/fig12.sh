#!/usr/bin/env bash
# Fig. 12 of Optimus-CC, as ASPLOS23/fig12/GPT-SIZE-SCHEME-Memory.sh: the largest memory of Baseline, CB and CB with LEP.
#
#   bin/ASPLOS23/fig12.sh 335M|2.5B|8.3B Baseline|CB|CB-LEP [options]
#
# --check_comp_ratio logs the bytes of the memories that compression holds; `peak_memory_bytes` of each worker is in
# profile.jsonl. With --dry-run the peak is predicted here, without a device.
# The variables are those of bin/lib/optimus.sh.
set -euo pipefail
. "$(dirname "$0")/../lib/optimus.sh"

model "${1:-}" || usage "Baseline|CB|CB-LEP"
case ${2:-} in
  Baseline | CB-LEP) scheme "$2" ;;
  CB) scheme CB-NON-LEP ;; # here CB stands for the one without LEP
  *) usage "Baseline|CB|CB-LEP" ;;
esac
if [ "$2" != Baseline ]; then scheme+=(--check_comp_ratio); fi
train 10 "GPT-$1-$2-Memory" --eval-iters 0 "${@:3}"
