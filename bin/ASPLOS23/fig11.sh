#!/usr/bin/env bash
# Fig. 11 of Optimus-CC, as ASPLOS23/fig11/GPT-8.3B-Orth_AVG_Check.sh: means of error and activation, and their cosine.
#
#   bin/ASPLOS23/fig11.sh 335M|2.5B|8.3B [options]
#
# Each step's figures are in the log and in metrics.jsonl under "compression".
# The variables are those of bin/lib/optimus.sh.
set -euo pipefail
. "$(dirname "$0")/../lib/optimus.sh"

model "${1:-}" || usage
scheme=(--inter_grad_comp --inter_grad_comp_rank "${CB_RANK:-16}" --use_error_feedback --check_orth_error_acti)
train 1000 "GPT-$1-Orth_AVG_Check" "${@:2}"
