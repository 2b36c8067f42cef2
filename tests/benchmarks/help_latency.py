"""Times ``--help`` of every command of the four programs, each in a new process.

Run: ``nice -n -10 python tests/benchmarks/help_latency.py --repeats 7``. The programs lie next to the interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
import time
from pathlib import Path

from typer.main import get_command

PROGRAMS = {
    "dynmo-prep": "dynmo_tools",
    "dynmo-train": "dynmo_train",
    "dynmo-plan": "dynmo_balance",
    "dynmo-ckpt": "dynmo_ckpt",
}


def paths(command, words=()):
    """Every command, groups included, as the words that name it."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*words, name))


def timed(command):
    """Seconds of wall clock, from the start of the process to its end."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit-s", type=float, default=0.3, help="mark medians above this many seconds")
    arguments = parser.parse_args()
    here = Path(sys.executable).parent
    commands = [
        (program, *words)
        for program, package in PROGRAMS.items()
        for words in paths(get_command(importlib.import_module(f"{package}.cli").app))
    ]
    rows = {
        ("python -c pass",): [sys.executable, "-c", "pass"],
        ("import typer, rich",): [sys.executable, "-c", "import typer, rich"],
    }
    rows |= {words: [str(here / words[0]), *words[1:], "--help"] for words in commands}
    seconds = {name: [] for name in rows}
    for _ in range(arguments.repeats):  # in turn, so that a busy moment falls on all alike
        for name, command in rows.items():
            seconds[name].append(timed(command))
    sys.stdout.write("| command | median s | min s | |\n|---|---|---|---|\n")
    for name, values in seconds.items():
        median = statistics.median(values)
        mark = "above" if median > arguments.limit_s else ""
        sys.stdout.write(f"| {' '.join(name)} | {median:.3f} | {min(values):.3f} | {mark} |\n")


if __name__ == "__main__":
    main()
