"""The placement matrix: random layouts with every feature of the engine, each on a random placement, bit for bit.

    python tests/benchmarks/train_exact.py [--layouts 31] [--seed 0] [--processes 4] [--only NUMBER]

``tests/distributed/random_placements.py`` draws each layout from the seed and its number, and trains it without a
pipeline and on the placement. Losses, norms, validation losses and tensors must be the same bits. Progress is on
stderr; stdout has the table of features and a JSON object. A layout that differs prints its command lines; ``--only``
repeats it. The exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.distributed.random_placements import (
    FEATURES,
    Drawn,
    counts_of,
    differences,
    draw,
    report_of,
    write_inputs,
)


def log(line: str) -> None:
    """A line of progress."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def placement_features(drawn: Drawn) -> set[str]:
    """What the placement has, next to the features of the layout."""
    found = {run.options["schedule"] for run in drawn.placed}
    found |= {f"recompute {run.options['recompute_granularity']}" for run in drawn.placed}
    found |= {"CUDA graphs, emulated"} if any(run.is_graphed for run in drawn.placed) else set()
    found |= {"moves"} if any(run.changes for run in drawn.placed) else set()
    found |= {"release"} if any(run.release for run in drawn.placed) else set()
    return found | ({"resume"} if len(drawn.placed) > 1 else set())


def main() -> int:
    """Run the matrix; 1 if a layout differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=31, help="layouts to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=4, help="most processes of a run")
    parser.add_argument("--only", type=int, help="number of the one layout to run")
    options = parser.parse_args()
    numbers = range(options.layouts) if options.only is None else [options.only]
    equal, total = 0, Counter[str]()
    reports = []
    features: dict[str, Counter[bool]] = {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dynmo-exact-") as folder:
        inputs = write_inputs(Path(folder))
        for number in numbers:
            drawn = draw(options.seed, number, max_processes=options.processes)
            run = Path(folder) / str(number)
            problems = list(differences(drawn, run, inputs))
            equal += not problems
            for name in {*drawn.features, drawn.family, *placement_features(drawn)}:
                features.setdefault(name, Counter())[not problems] += 1
            if problems:
                reports.append(report_of(drawn, problems))
                log(reports[-1])
            else:
                total.update(counts_of(run))
            what = f"{drawn.family}, {', '.join(drawn.features)} on {', '.join(sorted(placement_features(drawn)))}"
            log(f"[{time.monotonic() - begin:4.0f} s] layout {number}: {'differs' if problems else 'equal'}; {what}")
    sys.stdout.write("| feature | layouts | equal |\n|---|---|---|\n")
    for name in [*FEATURES, *sorted(set(features) - set(FEATURES))]:
        found = features.get(name, Counter())
        sys.stdout.write(f"| {name} | {found.total()} | {found[True]} |\n")
    sys.stdout.write(json.dumps({"layouts": len(numbers), "equal": equal, **total}) + "\n")
    if reports:
        log(f"{len(reports)} of {len(numbers)} layouts differ; the first (--seed {options.seed}):\n{reports[0]}")
    return int(equal != len(numbers))


if __name__ == "__main__":
    sys.exit(main())
