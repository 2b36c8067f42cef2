#!/usr/bin/env bash
# Fig. 10 (and the speed-ups of Table 2) of Optimus-CC, as ASPLOS23/fig10/GPT2-SIZE-SCHEME-Breakdown.sh: time of a step.
#
#   bin/ASPLOS23/fig10.sh 335M|2.5B|8.3B Baseline|CB|CB-FE|CB-FE-SC [options]
#
# bin/ASPLOS23/tables.sh prints the figure over all schemes, `dynmo-train compare BASELINE OTHER` two of them. Where no
# cluster is at hand: `dynmo-plan simulate RUN --inter-grad-comp-rank 16 ...` predicts it for any link (dynmo_balance/README.md).
# The variables are those of bin/lib/optimus.sh.
set -euo pipefail
. "$(dirname "$0")/../lib/optimus.sh"

model "${1:-}" && scheme "${2:-}" || usage "Baseline|CB|CB-FE|CB-FE-SC"
train 10 "GPT2-$1-$2-Breakdown" --eval-iters 0 "${@:3}"
