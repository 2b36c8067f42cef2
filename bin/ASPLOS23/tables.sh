#!/usr/bin/env bash
# Table 2 and Fig. 10 of Optimus-CC over all schemes, from the runs that are there.
#
#   bin/ASPLOS23/tables.sh [FOLDER]    # FOLDER of the runs of tbl2_fig9_tbl4.sh and fig10.sh: checkpoints
#
# Table 2: validation perplexity, days of 230,000 iterations, speedup over Baseline, from GPT2-SIZE-SCHEME. Fig. 10: time of
# a step relative to Baseline, from GPT2-SIZE-SCHEME-Breakdown. Times are medians without the first step. A scheme without a
# run has a dash; a folder without any run is an error.
set -euo pipefail

case ${1:-} in
  -*) echo "usage: $0 [FOLDER]" >&2; exit 2 ;;
esac
exec "${PYTHON:-python3}" - "${1:-checkpoints}" <<'PROGRAM'
import json, math, sys
from pathlib import Path
from statistics import median

SIZES = ("335M", "2.5B", "8.3B")
SCHEMES = ("Baseline", "CB", "CB-NON-LEP", "CB-FE", "CB-FE-SC")
ITERATIONS = 230_000
folder = Path(sys.argv[1])


def measured(run):
    """Median time of a step in ns, and the last validation loss; None where a run has none."""
    steps, loss = {}, None
    if (run / "metrics.jsonl").is_file():
        for line in (run / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            loss = record.get("validation_loss", loss)
            if "step_ns" in record:  # a step that was repeated after a restart counts once
                steps[record["step"]] = record["step_ns"]
    steps.pop(min(steps, default=None), None)
    return (median(steps.values()) if steps else None), loss


def table(title, columns, suffix, cells):
    rows = []
    for size in SIZES:
        runs = {scheme: measured(folder / f"GPT2-{size}-{scheme}{suffix}") for scheme in SCHEMES}
        for scheme, (step, loss) in runs.items():
            if any(found != (None, None) for found in runs.values()):
                rows.append([f"GPT-{size}", scheme, *cells(step, loss, runs["Baseline"][0])])
    if rows:
        print(f"{title}\n")
        for row in (columns, ["---"] * len(columns), *rows):
            print(f"| {' | '.join(row)} |")
        print()
    return bool(rows)


def shown(value, text):
    return "-" if value is None else text.format(value)


def of_table_2(step, loss, baseline):
    perplexity = None if loss is None else math.exp(min(loss, 700))
    days = None if step is None else step * ITERATIONS / 86_400e9
    speed = None if step is None or baseline is None else baseline / step
    return shown(perplexity, "{:.2f}"), shown(days, "{:.3g}"), shown(speed, "{:.3f}")


def of_fig_10(step, loss, baseline):
    relative = None if step is None or baseline is None else step / baseline
    return shown(None if step is None else step / 1e6, "{:,.1f}"), shown(relative, "{:.3f}")


has_runs = [
    table("Table 2", ["model", "scheme", "validation perplexity", "days", "speed over Baseline"], "", of_table_2),
    table("Fig. 10", ["model", "scheme", "step (ms)", "relative to Baseline"], "-Breakdown", of_fig_10),
]
if not any(has_runs):
    sys.exit(f"{folder}: has no run GPT2-SIZE-SCHEME or GPT2-SIZE-SCHEME-Breakdown with finished steps")
PROGRAM
