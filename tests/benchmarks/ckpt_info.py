"""Times ``dynmo-ckpt info`` on a checkpoint of many files: ``ckpt_info.py PATH [--repeats 7]``.

Where nothing is at PATH, a legacy Megatron checkpoint of 24 layers on 8 tensor ranks and 4 stages is made there first.
Python keeps compiled modules in a directory of the run, as an installed package has them; one call comes before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.dynmo_ckpt import legacy_gpt, native_checkpoints

INFO = [sys.executable, "-c", "import sys; from dynmo_ckpt.cli import main; main()", "info"]
LOADED = "import sys\nfrom dynmo_ckpt.cli import app\nfrom typer.testing import CliRunner\n"
LOADED += "assert CliRunner().invoke(app, ['info', sys.argv[1]]).exit_code == 0\n"
LOADED += "sys.stdout.write(str([name for name in ('torch', 'numpy') if name in sys.modules]))"


def make(path):
    """A checkpoint of 32 files."""
    sizes = {"num_layers": 24, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 64}
    model = native_checkpoints.model(**sizes, vocab_size=60, padded_vocab_size=64)

    def plain(document):
        del document["args"].model_type
        return document

    legacy_gpt.save(path, native_checkpoints.parameters(model), model, tp=8, stages=[6] * 4, rename=plain)


def timed(path, environment):
    begun = time.perf_counter()
    subprocess.run([*INFO, str(path)], check=True, capture_output=True, env=environment)
    return time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if not arguments.path.exists():
        make(arguments.path)
    with tempfile.TemporaryDirectory() as compiled:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = compiled
        timed(arguments.path, environment)
        seconds = [timed(arguments.path, environment) for _ in range(arguments.repeats)]
    files = sum(path.suffix in (".pt", ".safetensors") for path in arguments.path.rglob("*"))
    command = [sys.executable, "-c", LOADED, str(arguments.path)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True)
    listed = ", ".join(f"{each:.3f}" for each in seconds)
    median = statistics.median(seconds)
    sys.stdout.write(f"{files} files: {listed} s, median {median:.3f}; of torch and numpy loaded: {loaded.stdout}\n")


if __name__ == "__main__":
    main()
