"""Times ``dynmo-ckpt convert --to hf`` of a legacy Megatron GPT against transformers' own converters, and compares.

Run: ``python tests/benchmarks/ckpt_peers.py DIRECTORY --peer PYTHON --gigabytes 1.5 --repeats 3``. PYTHON is the
interpreter of an environment with torch and a transformers that still has its converters (4.46.3 is the last whose two
converters work). DIRECTORY is made and removed; with ``--keep`` it stays, and a later call adds rounds. The peers get
what they need to start at all on a present torch and without a network: ``torch.load`` may unpickle, and the tokenizer
that they would fetch, named in the arguments, is nothing. Every tensor of theirs is compared with ours. Results are
kept in ``ckpt_peers.md``.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.ckpt_copy import make

CKPT = [sys.executable, "-c", "from dynmo_ckpt.cli import main; main()"]
START = """
import sys, torch, transformers
own = torch.load
def load(*args, **kwargs):
    state = own(*args, **{**kwargs, "weights_only": False})
    state["args"].tokenizer_type = "GPT2BPETokenizer"
    return state
torch.load = load
class Nothing:
    def save_pretrained(self, *_): pass
transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *_a, **_k: Nothing())
from transformers.models.megatron_gpt2 import MODULE as converter
converter.AutoTokenizer = transformers.AutoTokenizer
converter.main()
"""
SINGLE, SHARDED = "convert_megatron_gpt2_checkpoint", "checkpoint_reshaping_and_interoperability"
COMPARE = """
import sys, torch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.ckpt_copy import make
from safetensors import safe_open
theirs = {}
for path in Path(sys.argv[1]).glob("pytorch_model*.bin"):
    theirs |= torch.load(path, mmap=True, weights_only=True)
seen = different = 0
for path in Path(sys.argv[2]).glob("*.safetensors"):
    with safe_open(path, "pt") as ours:
        for name in ours.keys():
            seen += 1
            mine, other = ours.get_tensor(name), theirs.pop(name)
            different += not torch.equal(mine.to(other.dtype), other[: len(mine)])
print(seen, different, sorted({name.split(".", 3)[-1] for name in theirs}))
"""


def timed(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    begun = time.perf_counter()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout}\n{done.stderr}")
    took = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return took, peak if peak > before else 0, done.stdout


def prepare(directory, gigabytes):
    """The same model as one file, and as those of two stages and two tensor ranks; and a configuration for peers."""
    hidden = make(directory / "in", gigabytes)
    for name, ranks in (("one", 1), ("four", 2)):
        options = [directory / "in", directory / name, "--to", "legacy", "--tp", ranks, "--pp", ranks]
        timed([*CKPT, "convert", *options, "--checkpoint-version", "3.0"])
    shutil.rmtree(directory / "in")
    sizes = {"n_embd": hidden, "n_layer": 24, "n_head": hidden // 64, "n_inner": 4 * hidden, "n_positions": 1024}
    sizes |= {"vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    (directory / "config.json").write_text(json.dumps(sizes))


def peer_command(directory, peer, module):
    start = [peer, "-c", START.replace("MODULE", module)]
    if module == SINGLE:
        (file,) = (directory / "one").rglob("*.pt")
        return [*start, "--config_file", directory / "config.json", file], file.parent
    (step,) = (path.parent.parent for path in (directory / "four").glob("*/mp_rank_00_000/*.pt"))
    options = [
        "--convert_checkpoint_from_megatron_to_transformers",
        "--load_path",
        step,
        "--save_path",
        directory / "theirs",
    ]
    return [*start, *options, "--tokenizer_name", "none"], directory / "theirs"


def one_round(directory, peer):
    found = {}
    for module, source in ((SINGLE, "one"), (SHARDED, "four")):
        target = directory / "ours"
        took, _, output = timed([*CKPT, "convert", directory / source, target, "--to", "hf", "--format", "json"])
        found[f"dynmo-ckpt, {source}"] = [took, json.loads(output)["peak_rss_bytes"] / 1e6]
        command, folder = peer_command(directory, peer, module)
        took, _, _ = timed(["sh", "-c", '"$@" && sync "$0"/*', folder, *command])
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
        found[f"transformers, {source}"] = [took, peak]
        if not (directory / f"compared-{source}").exists():
            _, _, report = timed([peer, "-c", COMPARE, folder, target])
            (directory / f"compared-{source}").write_text(report)
        shutil.rmtree(target)
        for path in [*folder.glob("pytorch_model*"), *folder.glob("*.json")]:
            path.unlink()
    with open(directory / "rounds.jsonl", "a") as lines:
        lines.write(json.dumps(found) + "\n")


def table(directory):
    rounds = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    for source in ("one", "four"):
        report = (directory / f"compared-{source}").read_text().strip()
        sys.stdout.write(f"{source}: tensors, different ones, only of the peer: {report}\n")
    sys.stdout.write("| input | dynmo-ckpt s | MB | transformers s | MB at most | times |\n|---|---|---|---|---|---|\n")
    for source in ("one", "four"):
        mine, theirs = ([found[f"{who}, {source}"] for found in rounds] for who in ("dynmo-ckpt", "transformers"))
        ours_s, theirs_s = (statistics.median(took for took, _ in values) for values in (mine, theirs))
        memory = [max(peak for _, peak in values) for values in (mine, theirs)]
        row = [source, f"{ours_s:.2f}", f"{memory[0]:.0f}", f"{theirs_s:.2f}", f"{memory[1]:.0f}"]
        sys.stdout.write(f"| {' | '.join(row)} | {theirs_s / ours_s:.1f} |\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peer", required=True, help="Python with torch and transformers 4.46.3")
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="keep DIRECTORY, so that a later call adds rounds to it")
    arguments = parser.parse_args()
    directory = arguments.directory
    try:
        if not (directory / "config.json").exists():
            directory.mkdir(parents=True)
            prepare(directory, arguments.gigabytes)
        for _ in range(arguments.repeats):
            one_round(directory, arguments.peer)
        if (directory / "rounds.jsonl").exists():
            table(directory)
    finally:
        if not arguments.keep:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
