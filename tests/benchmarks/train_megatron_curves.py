"""Loss curves of Megatron's command lines against megatron-core: the table of the largest differences.

    PYTHONPATH=DIR python tests/benchmarks/train_megatron_curves.py [--kind NAME ...]

DIR has megatron-core (``pip install --no-deps --target DIR megatron-core``). ``tests/parity/megatron_curves.py`` has
the models, options and schedules, and ``tests/parity/test_megatron_curves.py`` tests the same cases. Prints the table;
ends with 1 where a difference is not below 1e-4.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity.megatron_curves import CASES, FAMILIES, curves

TOLERANCE = 1e-4


def main() -> int:
    """Run the cases; 1 if one is not within the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=FAMILIES, help="model to run; repeat; default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.stdout.write("| model | schedule | loss, first -> last | clipped steps of 50 | largest difference |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    worst = 0.0
    for kind, schedule in CASES:
        if options.kind and kind not in options.kind:
            continue
        found = curves(kind, schedule)
        worst = max(worst, found.difference)
        clipped = sum(norm > 1.0 for norm in found.norms)
        losses = f"{found.ours[0]:.3f} -> {found.ours[-1]:.3f}"
        sys.stdout.write(f"| {kind} | {schedule} | {losses} | {clipped} | {found.difference:.1e} |\n")
        sys.stdout.flush()
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
