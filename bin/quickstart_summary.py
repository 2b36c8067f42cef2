"""Prints the summary of a quickstart on one screen; bin/quickstart calls it at its end with its output directory."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

WIDTH = 80
BAR = 20  # characters of a full bar


def comparison(work: Path) -> dict[str, Any]:
    """The report of ``dynmo-train compare`` on the two runs; exit code 1 (they differ) is a valid result."""
    command = ["dynmo-train", "compare", str(work / "static"), str(work / "balanced"), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def records(path: Path) -> list[dict[str, Any]]:
    """All records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def busy_fractions(run: Path, first_step: int) -> list[float]:
    """For each stage the median share of a step in which it computes, from ``first_step`` on."""
    steps = [r for r in records(run / "profile.jsonl") if r["record"] == "step" and r["step"] >= first_step]
    stages = range(len(steps[0]["busy_ns"]))
    return [median(min(1.0, step["busy_ns"][stage] / step["step_ns"]) for step in steps) for stage in stages]


def migrations(run: Path) -> list[dict[str, Any]]:
    """The events of the applied plans, with their moves, bytes and pauses."""
    return [event for event in records(run / "events.jsonl") if event["kind"] == "plan_applied"]


def bar(fraction: float) -> str:
    """``fraction`` (0 to 1) as a bar and in percent."""
    return f"{'#' * round(fraction * BAR):<{BAR}} {fraction:4.0%}"


def main() -> int:
    """Print the summary; exit with 1 where bits, logits or the loss are not as required."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    work: Path = arguments.work
    data = json.loads((work / "data" / "pipeline-summary.json").read_text())
    runs = comparison(work)
    # convert prints a sentence for people first; the document starts with the first brace
    converted = (work / "logs" / "convert.log").read_text()
    logits = json.loads(converted[converted.index("{") :])["logits"]["max_abs"]
    static_ms, balanced_ms = runs["step_ms"]
    static_steady_ms, balanced_steady_ms = runs["steady_ms"]
    moves = migrations(work / "balanced")
    moved_mb = sum(event["bytes"] for event in moves) / 1e6
    pause_ms = sum(event["pause_ns"] for event in moves) / 1e6
    loads = [busy_fractions(work / name, runs["steady_from"]) for name in ("static", "balanced")]
    difference = f"DIFFERENT LOSSES from step {runs['first_difference']}"
    losses = "losses equal bit for bit" if runs["identical"] else difference
    rule = "=" * WIDTH
    headline = f"  {runs['ratio_steady']:.2f} times as fast as the best fixed partition; {losses}"
    loss = f"{runs['loss_first']:.3f} -> {runs['loss_last']:.3f}"
    validation = f"{runs['validation_first']:.3f} -> {runs['validation_last']:.3f}"
    rows = [
        ("", f"{'static':<27}balanced by DynMo"),
        ("step after the last move", f"{f'{static_steady_ms:.0f} ms':<27}{balanced_steady_ms:.0f} ms"),
        ("step, mean of the run", f"{f'{static_ms:.0f} ms':<27}{balanced_ms:.0f} ms (ratio {runs['ratio']:.2f})"),
        *((f"load of stage {stage}", "  ".join(map(bar, load))) for stage, load in enumerate(zip(*loads, strict=True))),
        ("layers moved", f"{runs['moves'][1]} parts of layers, {moved_mb:.1f} MB, {pause_ms:.0f} ms of pause in all"),
        ("loss, first -> last step", f"{loss}; held out {validation}"),
        ("tokens/s, balanced", f"{runs['tokens_per_s']:,.0f}"),
        ("logits in transformers", f"differ by at most {logits:.1e}"),
        ("documents in / out", f"{data['documents_in']:,} / {data['documents_out']:,} ({data['tokens']:,} tokens)"),
        ("total time", f"{arguments.seconds:.0f} s"),
    ]
    closing = [
        f"  Open the report   {(work / 'report.html').resolve().as_uri()}",
        f"  All output        {work}",
        "  Where to go next  README.md",
    ]
    lines = ["", rule, headline, rule, *(f"  {name:<26}{value}" for name, value in rows), "", *closing]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if runs["identical"] and logits < 1e-4 and runs["loss_last"] < runs["loss_first"] else 1


if __name__ == "__main__":
    sys.exit(main())
