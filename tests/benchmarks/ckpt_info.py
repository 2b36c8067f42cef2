"""Times ``dynmo-ckpt info`` on a checkpoint of many files: ``ckpt_info.py PATH [--repeats 5]``."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

INFO = [sys.executable, "-c", "import sys; from dynmo_ckpt.cli import main; main()", "info"]
LOADED = "import sys\nfrom dynmo_ckpt.cli import app\nfrom typer.testing import CliRunner\n"
LOADED += "assert CliRunner().invoke(app, ['info', sys.argv[1]]).exit_code == 0\n"
LOADED += "sys.stdout.write(str('torch' in sys.modules))"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    seconds = []
    for _ in range(arguments.repeats):
        begun = time.perf_counter()
        subprocess.run([*INFO, str(arguments.path)], check=True, capture_output=True)
        seconds.append(time.perf_counter() - begun)
    files = sum(path.suffix in (".pt", ".safetensors") for path in arguments.path.rglob("*"))
    command = [sys.executable, "-c", LOADED, str(arguments.path)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True)
    told = ", ".join(f"{each:.3f}" for each in seconds)
    sys.stdout.write(
        f"{files} files: {told} s, median {statistics.median(seconds):.3f}; torch loaded: {loaded.stdout}\n"
    )


if __name__ == "__main__":
    main()
