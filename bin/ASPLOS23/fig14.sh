#!/usr/bin/env bash
# Fig. 14 of Optimus-CC, as ASPLOS23/fig14: the rate of compression and decompression at the widths of GPT-2.5B, 8.3B and
# 175B, compared with those of the bare matrix products.
#
#   bin/ASPLOS23/fig14.sh [--device cuda] [--rows 8192] [--repeats 3]
#
# In a run, --check_comp_speed logs the same of its own shapes.
set -euo pipefail
. "$(dirname "$0")/../environment.sh"

exec python "$root/tests/benchmarks/train_lowrank.py" "$@"
