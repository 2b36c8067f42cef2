#!/usr/bin/env bash
# Table 2, Fig. 9 and Table 4 of Optimus-CC, as ASPLOS23/tbl2_fig9_tbl4/GPT2-SIZE-SCHEME.sh: the pre-training of each scheme.
#
#   bin/ASPLOS23/tbl2_fig9_tbl4.sh 335M|2.5B|8.3B Baseline|CB|CB-NON-LEP|CB-FE|CB-FE-SC [options]
#
# Table 2 over all schemes: bin/ASPLOS23/tables.sh; the losses of two runs: `dynmo-train compare BASELINE OTHER`; the tasks of
# Table 4: bin/ASPLOS23/zero_shot.sh.
# The variables are those of bin/lib/optimus.sh.
set -euo pipefail
. "$(dirname "$0")/../lib/optimus.sh"

model "${1:-}" && scheme "${2:-}" || usage "Baseline|CB|CB-NON-LEP|CB-FE|CB-FE-SC"
train 230000 "GPT2-$1-$2" "${@:3}"
