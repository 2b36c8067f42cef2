"""Times one completion of each program, each in a new process, as a shell starts it.

Run: ``nice -n -10 python tests/benchmarks/completion_latency.py --repeats 3``.
The programs lie next to the interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LINES = (
    ("dynmo-prep", "binarize", "--"),
    ("dynmo-train", "pre"),
    ("dynmo-train", "pretrain", "gpt", "--"),
    ("dynmo-train", "pretrain", "gpt", "--schedule", ""),
    ("dynmo-plan", "simulate", "--"),
    ("dynmo-ckpt", "convert", "--to", ""),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    here = Path(sys.executable).parent
    sys.stdout.write("| line | completions | median s | min s |\n|---|---|---|---|\n")
    for prog, *words in LINES:
        variable = f"_{prog.replace('-', '_').upper()}_COMPLETE"
        seconds, done = [], None
        for _ in range(repeats):
            begun = time.perf_counter()
            done = subprocess.run(
                [str(here / prog), *words], check=True, capture_output=True, env={**os.environ, variable: "bash"}
            )
            seconds.append(time.perf_counter() - begun)
        found = len(done.stdout.splitlines())
        line = " ".join([prog, *words])
        sys.stdout.write(f"| `{line}` | {found} | {statistics.median(seconds):.3f} | {min(seconds):.3f} |\n")


if __name__ == "__main__":
    main()
