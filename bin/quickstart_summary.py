"""Prints the summary of a quickstart; bin/quickstart calls it at its end with its output directory."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def comparison(work: Path) -> dict[str, Any]:
    """The report of ``dynmo-train compare`` on the two runs; exit code 1 (they differ) is a valid result."""
    command = ["dynmo-train", "compare", str(work / "static"), str(work / "balanced"), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def logits_difference(run: Path, hf: Path) -> float:
    """The largest absolute difference between the run's logits and those of transformers, in float32, on real text."""
    import torch
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    from dynmo_train.data.tokenizer import load_tokenizer
    from dynmo_train.formats.checkpoint import find_checkpoint, open_checkpoint
    from dynmo_train.models.layer_list import parameters_of
    from dynmo_train.models.registry import family_of_manifest

    disable_progress_bar()
    checkpoint = open_checkpoint(find_checkpoint(run))
    tokenizer = load_tokenizer(checkpoint.directory / "tokenizer")
    positions = checkpoint.manifest["model"]["max_position_embeddings"]
    ids = torch.tensor([tokenizer.encode(Path(__file__).read_text())[:positions]])
    with torch.no_grad():
        ours: Any = ids
        family = family_of_manifest(checkpoint.manifest["model"])
        for item in family.items:
            module = family.build(item.name, torch.device("meta")).eval()
            weights = checkpoint.load(parameters_of(item.name, module))
            module.load_state_dict({name[len(item.name) + 1 :]: weights[name] for name in weights}, assign=True)
            ours = module.logits(ours) if item.name == "head" else module(ours)
        theirs = GPT2LMHeadModel.from_pretrained(hf).eval()(ids).logits
    return float((ours - theirs).abs().max())


def main() -> int:
    """Print the summary; exit with 1 where bits, logits or the loss are not as required."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    work: Path = arguments.work
    data = json.loads((work / "data" / "pipeline-summary.json").read_text())
    runs = comparison(work)
    logits = logits_difference(work / "balanced", work / "hf")
    static_ms, balanced_ms = runs["step_ms"]
    steady = runs["steady_ms"]
    same = "identical, bit for bit" if runs["identical"] else f"DIFFERENT from step {runs['first_difference']}"
    rows = [
        ("documents in / out", f"{data['documents_in']:,} / {data['documents_out']:,} ({data['tokens']:,} tokens)"),
        ("tokens/s, balanced", f"{runs['tokens_per_s']:,.0f}"),
        ("training loss, first / last", f"{runs['loss_first']:.3f} / {runs['loss_last']:.3f}"),
        ("held-out loss, first / last", f"{runs['validation_first']:.3f} / {runs['validation_last']:.3f}"),
        ("layers moved", f"{runs['moves'][1]} parts of layers, {runs['moved_bytes'][1]:,} bytes"),
        (
            "step time, static / balanced",
            f"{static_ms:.0f} ms / {balanced_ms:.0f} ms: ratio {static_ms / balanced_ms:.2f}",
        ),
        (
            f"  after step {runs['steady_from']}",
            f"{steady[0]:.0f} ms / {steady[1]:.0f} ms: ratio {runs['ratio_steady']:.2f}",
        ),
        ("losses, static and balanced", same),
        ("logits against transformers", f"{logits:.1e} at most"),
        ("total time", f"{arguments.seconds:.0f} s"),
    ]
    sys.stdout.write("\n== Summary\n")
    for name, value in rows:
        sys.stdout.write(f"  {name:<30}{value}\n")
    sys.stdout.write(f"\nAll output is in {work}. Where to go next: README.md, 'Where to go next'.\n")
    return 0 if runs["identical"] and logits < 1e-4 and runs["loss_last"] < runs["loss_first"] else 1


if __name__ == "__main__":
    sys.exit(main())
