"""What compression costs in quality: validation loss of a small GPT on WikiText, whole and compressed.

Two pipeline workers, two replicas, 16 microbatches each, of which the epilogue has two. All runs see the same samples.

python tests/benchmarks/train_compression_runs.py --text wiki.valid.tokens wiki.test.tokens [--steps 600] [--rank 8]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dynmo_train._common.console import emit

MODEL = {
    "num-layers": "4",
    "hidden-size": "128",
    "num-attention-heads": "4",
    "seq-length": "64",
    "micro-batch-size": "1",
    "global-batch-size": "32",
    "lr": "1e-3",
    "lr-warmup-iters": "20",
    "min-lr": "1e-4",
    "lr-decay-style": "cosine",
    "split": "90,10,0",
    "eval-iters": "20",
    "pipeline-model-parallel-size": "2",
    "log-interval": "50",
}


def articles(paths: list[Path]) -> Iterator[str]:
    """The articles of WikiText: a line `` = Title = `` begins one."""
    article: list[str] = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(" = ") and not line.startswith(" = = ") and article:
                yield "\n".join(article)
                article = []
            article.append(line)
    yield "\n".join(article)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr or done.stdout)


def prepare(texts: list[Path], folder: Path) -> list[str]:
    """Tokenizer and data set; the options that name them."""
    corpus, tokenizer, prefix = folder / "text.jsonl", folder / "tokenizer.json", folder / "text"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in articles(texts)))
    prep = str(Path(sys.executable).with_name("dynmo-prep"))
    _run(prep, "train-tokenizer", str(corpus), "-o", str(tokenizer), "--vocab-size", "2000")
    _run(prep, "binarize", str(corpus), "-o", str(prefix), "--tokenizer-model", str(tokenizer), "--append-eod")
    [found] = folder.glob("*.idx")
    return ["--data-path", str(found.with_suffix("")), "--tokenizer-model", str(tokenizer)]


def schemes(rank: int) -> dict[str, list[str]]:
    cb = ["--inter-grad-comp", "--inter-grad-comp-rank", str(rank)]
    epilogue, lep = ["--inter-grad-comp-epilogue-only"], ["--use-error-feedback"]
    sc = ["--grad-comp", "--grad-comp-rank", "16", "--selective-grad-comp", "--selective-grad-comp-way", "1"]
    return {
        "baseline": [],
        "CB without LEP": cb,
        "CB without LEP, epilogue only": cb + epilogue,
        "CB+LEP": cb + lep,
        "CB+LEP, epilogue only": cb + lep + epilogue,
        "CB+LEP+FE+SC": [*cb, *lep, *epilogue, "--emb-comm-opt", *sc],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seeds", default="1234")
    parser.add_argument("--schemes", default="")
    given = parser.parse_args()
    names, known = given.schemes.split(",") if given.schemes else [], schemes(given.rank)
    chosen = {name: flags for name, flags in known.items() if not names or name in names}
    emit("| seed | scheme | validation loss | against baseline | perplexity |")
    emit("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        data = prepare(given.text, Path(place))
        options = {**MODEL, "train-iters": str(given.steps), "eval-interval": str(given.steps)}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        for seed in given.seeds.split(","):
            base = None
            for name, flags in chosen.items():
                run = Path(place) / f"run-{seed}-{name.replace(' ', '-')}"
                train = ["pretrain", "gpt", *words, *data, "--seed", seed, "--run-dir", str(run), *flags]
                launch = ["launch", "local", "--nproc", "4", "--log-dir", f"{run}-logs", "--"]
                _run(sys.executable, "-m", "dynmo_train", *launch, *train)
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                loss = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
                base = base or loss
                emit(f"| {seed} | {name} | {loss:.4f} | {loss / base - 1:+.2%} | {math.exp(loss):.1f} |")


if __name__ == "__main__":
    main()
