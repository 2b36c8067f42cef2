"""Times merge, reshard and export against ``cp -r`` and ``sync`` of the same bytes, in turn, and peak memory.

Run: ``python tests/benchmarks/ckpt_copy.py DIRECTORY --gigabytes 1.5 --repeats 7``. DIRECTORY is made, needs three
times that room, and is removed; with ``--keep`` it stays, and a later call adds rounds. Results are kept as dated rows
in ``ckpt_copy.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.dynmo_ckpt import native_checkpoints

CKPT = [sys.executable, "-c", "from dynmo_ckpt.cli import main; main()"]


def make(directory, gigabytes):
    """A float16 GPT of 24 layers on two stages and two tensor ranks, its width chosen for the size."""
    layers, vocab = 24, 50304
    hidden = 256
    while 2 * (12 * layers * hidden**2 + vocab * hidden) < gigabytes * 1e9:
        hidden += 256
    m = native_checkpoints.model(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=4 * hidden, num_attention_heads=hidden // 64
    )
    m |= {"max_position_embeddings": 1024, "vocab_size": 50257, "padded_vocab_size": vocab}
    shapes = {name: value.shape for name, value in native_checkpoints.parameters(m | {"num_layers": 1}).items()}
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(layers):
        for name, shape in shapes.items():
            if i == 0 or name.startswith("layers.0."):
                words = rng.integers(0, 30000, shape, dtype=np.uint16)
                tensors[name.replace("layers.0.", f"layers.{i}.")] = words.view(np.float16)
    native_checkpoints.save(directory, tensors, m, tp=2)
    return hidden


def timed(command):
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - begun, done.stdout


def commands_for(directory):
    source, merged, target = directory / "in", directory / "merged", directory / "out"
    return {
        "cp -r && sync": ["sh", "-c", f"cp -r {source} {target} && sync {target}/* && sync {target}"],
        "merge": [*CKPT, "merge", source, target],
        "split --tp 2 --pp 2": [*CKPT, "split", merged, target, "--tp", "2", "--pp", "2"],
        "reshard --tp 4 --pp 3": [*CKPT, "reshard", source, target, "--tp", "4", "--pp", "3"],
        "convert --to hf": [*CKPT, "convert", source, target, "--to", "hf"],
    }


def one_round(directory, options):
    """Every command once; one line of results."""
    found = {}
    for name, command in commands_for(directory).items():
        ours = [] if name.startswith("cp") else ["--format", "json", *options]
        took, output = timed([*map(str, command), *ours])
        found[name] = [took, json.loads(output)["peak_rss_bytes"] if ours else 0]
        shutil.rmtree(directory / "out")
    with open(directory / "rounds.jsonl", "a") as lines:
        lines.write(json.dumps(found) + "\n")


def table(directory):
    rounds = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    size = sum(path.stat().st_size for path in (directory / "in").iterdir())
    sys.stdout.write(f"{size / 1e9:.2f} GB, {len(rounds)} rounds, {os.cpu_count()} cores\n")
    sys.stdout.write("| command | median s | min s | of cp | peak MB |\n|---|---|---|---|---|\n")
    base = statistics.median(found["cp -r && sync"][0] for found in rounds)
    for name in rounds[0]:
        seconds = [found[name][0] for found in rounds]
        median, memory = statistics.median(seconds), max(found[name][1] for found in rounds)
        row = [name, f"{median:.2f}", f"{min(seconds):.2f}", f"{median / base:.2f}", f"{memory / 1e6:.0f}"]
        sys.stdout.write(f"| {' | '.join(row)} |\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help="keep DIRECTORY, so that a later call adds rounds to it")
    parser.add_argument("--options", nargs="*", default=[], help="further options for every command of dynmo-ckpt")
    arguments = parser.parse_args()
    directory = arguments.directory
    try:
        if not directory.exists():
            directory.mkdir(parents=True)
            make(directory / "in", arguments.gigabytes)
            timed([*map(str, [*CKPT, "merge", directory / "in", directory / "merged"])])
        for _ in range(arguments.repeats):
            one_round(directory, arguments.options)
        if (directory / "rounds.jsonl").exists():
            table(directory)
    finally:
        if not arguments.keep:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
