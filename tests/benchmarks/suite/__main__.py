"""``bin/bench``: runs cases of the suite and writes ``results.json`` and ``results.md``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.suite import results  # noqa: E402  the root is put on the path first
from tests.benchmarks.suite.cases import CASES  # noqa: E402
from tests.benchmarks.suite.cases import __doc__ as PEERS  # noqa: E402
from tests.benchmarks.suite.measure import BenchmarkError, run_case  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """Options of ``bin/bench``."""
    listing = "\n".join(f"  {case.name:<26}{case.text}" for case in CASES)
    parser = argparse.ArgumentParser(
        prog="bin/bench",
        description="Run the benchmark suite; write results as JSON and Markdown.",
        epilog=f"cases:\n{listing}\n\npeers:\n{PEERS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    areas = list(dict.fromkeys(case.area for case in CASES))
    parser.add_argument("--area", action="append", choices=areas, help="area to run; repeat; default: all")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="case to run; repeat")
    parser.add_argument("--quick", action="store_true", help="leave out long cases: ten minutes on two cores")
    parser.add_argument("--peers", action="store_true", help="measure installed peers in turns with ours")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each program [default: 3]")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the results [runs/bench]")
    parser.add_argument("--merge", action="store_true", help="keep cases of an existing results.json that do not run")
    parser.add_argument("--readme", action="store_true", help="write the figures of results.json into the README")
    return parser


def main() -> int:
    """Run the selected cases; 1 if one of our programs failed, 2 for wrong options."""
    options = parser().parse_args()
    if options.repeats < 1:
        sys.stderr.write("bin/bench: --repeats must be at least 1\n")
        return 2
    selected = [
        case
        for case in CASES
        if (not options.area or case.area in options.area)
        and (not options.case or case.name in options.case)
        and (case.quick or not options.quick)
    ]
    target = options.output / "results.json"
    if options.readme:
        write_readme(results.read(target))
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def log(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - started:4.0f} s] {line}\n")

    found, failed = [], 0
    for case in selected:
        with tempfile.TemporaryDirectory(prefix="dynmo-bench-") as folder:
            try:
                found.append(run_case(case, Path(folder), repeats=options.repeats, with_peers=options.peers, log=log))
            except (BenchmarkError, OSError) as error:
                failed += 1
                log(f"{case.name} failed: {error}")
    result = results.document(found, command=command_line(sys.argv[1:]), repeats=options.repeats)
    if options.merge and target.exists():
        result = results.merged(results.read(target), result)
    results.write(result, options.output)
    sys.stdout.write(results.markdown(result))
    log(f"results: {target}")
    return 1 if failed else 0


def command_line(words: list[str]) -> str:
    """The command without ``--output``, which changes no figure and names a folder of the user's machine."""
    remaining = [word for before, word in zip(["", *words], words, strict=False) if "--output" not in (before, word)]
    return " ".join(["bin/bench", *(word for word in remaining if not word.startswith("--output="))])


def write_readme(result: dict) -> None:
    """Replace the table of figures in the READMEs by that of a result."""
    for name in ("README.md", "README.zh.md"):
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        if results.MARKS[0] in text:
            path.write_text(results.with_figures(text, result), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
