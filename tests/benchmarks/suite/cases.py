"""What ``bin/bench`` measures: for each case our program, and its peers where they are installed.

Peers are looked for in the environment of the benchmark and in these variables:

    PEER_MEGATRON     a checkout of Megatron-LM, for tools/preprocess_data.py
    PEER_NANOGPT      a directory that holds nanoGPT's model.py
    PEER_PYTHON       interpreter of an environment with the peers' packages [default: the one that runs the benchmark]

The loops in ``peers.py`` are the peers that need nothing but libraries that this project installs too: what a user
writes in an afternoon.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.suite.measure import Case, Program

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(sys.executable).parent
PEER_PYTHON = os.environ.get("PEER_PYTHON", sys.executable)
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
CORPUS_COPIES = 8
EXACT_LAYOUTS = 31
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@functools.cache
def lacks(module: str) -> str | None:
    """Why the peers' interpreter cannot import a module; None if it can."""
    text = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    done = subprocess.run([PEER_PYTHON, "-c", text], capture_output=True, check=False)
    return f"not installed: {module}" if done.returncode else None


def loop(name: str, *arguments: object, printed: str | None = None, needs: str | None = None) -> Program:
    """A loop of ``peers.py`` as a program; one that needs a module runs in the peers' interpreter."""
    python = sys.executable if needs is None else PEER_PYTHON
    command = [python, "-m", "tests.benchmarks.suite.peers", name, *map(str, arguments)]
    return Program(command=command, printed=printed, environment=PATHS, missing=None if needs is None else lacks(needs))


def ours(name: str, *arguments: object) -> Program:
    """One of our commands."""
    return Program(command=[str(PROGRAMS / name), *map(str, arguments)])


def prepare(*command: object, cwd: Path) -> None:
    """Run a command that makes an input; its time does not count."""
    words = list(map(str, command))
    if words[0].startswith("dynmo-"):
        words[0] = str(PROGRAMS / words[0])
    subprocess.run(words, cwd=cwd, check=True, capture_output=True, env={**os.environ, **PATHS})


def corpus_in(work: Path, copies: int) -> Path:
    """The documentation of the standard library, repeated with a line that makes each document another one."""
    prepare("dynmo-prep", "sample-corpus", "--output", "sample.jsonl", cwd=work)
    rows = [json.loads(line) for line in (work / "sample.jsonl").read_text().splitlines()]
    with open(work / "corpus.jsonl", "w") as file:
        for copy in range(copies):
            for number, row in enumerate(rows):
                text = f"Part {copy}, chapter {number}.\n{row['text'][copy * 40 :]}"
                file.write(json.dumps({"text": text, "url": f"{copy}-{number}"}) + "\n")
    return work / "corpus.jsonl"


def binarize(work: Path) -> dict[str, Program]:
    corpus = corpus_in(work, CORPUS_COPIES)
    prepare("dynmo-prep", "train-tokenizer", "sample.jsonl", "-o", "tok.json", "--vocab-size", 8192, cwd=work)
    # transformers' form of the same tokenizer, for Megatron-LM
    (work / "hf").mkdir()
    shutil.copy(work / "tok.json", work / "hf" / "tokenizer.json")
    (work / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    megatron = os.environ.get("PEER_MEGATRON")
    tool = Path(megatron or "") / "tools" / "preprocess_data.py"
    return {
        "dynmo-prep": ours(
            *("dynmo-prep", "binarize", corpus, "-o", "{out}", "--tokenizer-model", work / "tok.json"),
            *("--append-eod", "--workers", 2, "--work-dir", "{out}.work"),
        ),
        "tokenizers and numpy": loop("binarize", corpus, work / "tok.json", "{out}"),
        "Megatron-LM": Program(
            command=[
                *(PEER_PYTHON, str(tool), "--input", str(corpus), "--output-prefix", "{out}", "--append-eod"),
                *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(work / "hf"), "--workers", "2"),
            ],
            environment={"PYTHONPATH": megatron or ""},
            missing=None if tool.is_file() else "PEER_MEGATRON names no checkout with tools/preprocess_data.py",
        ),
    }


def dedup(work: Path) -> dict[str, Program]:
    corpus = corpus_in(work, 2)
    command = ("dynmo-prep", "dedup", corpus, "-o", "{out}.jsonl", "--workers", 2, "--work-dir", "{out}.work")
    return {"dynmo-prep": ours(*command), "datasketch": loop("dedup", corpus, "{out}.jsonl")}


def clean(work: Path) -> dict[str, Program]:
    corpus = corpus_in(work, 1)
    own = ("--language", "en", "--min-tokens", 128, "--normalize")
    command = ("dynmo-prep", "clean", corpus, "-o", "{out}.jsonl", *own)
    return {
        "dynmo-prep": ours(*command, "--workers", 2, "--work-dir", "{out}.work"),
        "ftfy and langdetect": loop("clean", corpus, "{out}.jsonl"),
    }


def plan_time(work: Path) -> dict[str, Program]:
    return {
        "dynmo-plan": loop("plan_ours", 400, 32, printed="ms"),
        "dynamic program in numpy": loop("plan_program", 400, 32, printed="ms"),
        "DeepSpeed partition_balanced": loop("plan_deepspeed", 400, 32, printed="ms", needs="deepspeed"),
    }


def bottleneck_of(family: str) -> Callable[[Path], dict[str, Program]]:
    def programs(work: Path) -> dict[str, Program]:
        peers = {"Megatron even": None, "Megatron, ends counted; torchtitan": None, "DeepSpeed by time": "deepspeed"}
        found = {"dynmo-plan": loop("bottleneck", family, "exact", printed="relative")}
        for name, needs in peers.items():
            found[name] = loop("bottleneck", family, name, printed="relative", needs=needs)
        return found

    return programs


def tokens(work: Path) -> dict[str, Program]:
    script = str(ROOT / "tests" / "benchmarks" / "train_tokens.py")
    nanogpt = os.environ.get("PEER_NANOGPT", "")

    def program(name: str, missing: str | None = None) -> Program:
        command = [sys.executable, script, "--run", name, "--shape", "30M-256", "--nanogpt", nanogpt]
        return Program(command=command, printed="tokens_per_s", missing=missing)

    no_nanogpt = None if (Path(nanogpt) / "model.py").is_file() else "PEER_NANOGPT names no directory with model.py"
    return {
        "dynmo-train": program("ours"),
        "transformers": program("transformers"),
        "nanoGPT": program("nanogpt", no_nanogpt),
    }


def balance(work: Path) -> dict[str, Program]:
    """The quickstart's model, frozen from step 4 on; the value is the median time of a later step."""
    (work / "data").mkdir()
    prepare("dynmo-prep", "sample-corpus", "--output", "data/corpus.jsonl", cwd=work)
    prepare("dynmo-prep", "pipeline", "quickstart", "--work-dir", "data", cwd=work)
    launch = ("dynmo-train", "launch", "local", "--nproc", "2", "--", "pretrain", "gpt", "--recipe", "quickstart")
    dense = ("--train-iters", "3", "--global-batch-size", "8", "--lr-warmup-iters", "0", "--run-dir", "dense")
    prepare(*launch, *dense, cwd=work)
    prepare("dynmo-plan", "partition", "dense", "--output", "dense.json", cwd=work)

    def program(*more: str) -> Program:
        command = [str(PROGRAMS / "dynmo-train"), *launch[1:], "--train-iters", "24", "--run-dir", "{out}", *more]
        reader = (
            "import json, statistics, subprocess, sys; subprocess.run(sys.argv[2:], check=True, stdout=sys.stderr);"
            "rows = map(json.loads, open(sys.argv[1] + '/metrics.jsonl'));"
            "times = [row['step_ns'] for row in rows if 'step_ns' in row and row['step'] > 14];"
            "print(json.dumps({'ms': statistics.median(times) / 1e6}))"
        )
        return Program(command=[sys.executable, "-c", reader, "{out}", *command], printed="ms", environment=ONE_THREAD)

    return {
        "dynmo-train --balance online": program("--plan", "dense.json", "--balance", "online"),
        "best fixed partition of the dense model": program("--plan", "dense.json"),
        "uniform partition": program(),
    }


def exact(work: Path) -> dict[str, Program]:
    """The placement matrix; a layout that differs fails the case, and its command lines are on stderr."""
    command = [
        sys.executable,
        "-m",
        "tests.distributed.random_placements",
        "--layouts",
        str(EXACT_LAYOUTS),
        "--compiler",
    ]
    environment = ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    return {"dynmo-train": Program(command=command, printed="equal", environment=environment)}


def convert(work: Path) -> dict[str, Program]:
    make = "from tests.benchmarks.ckpt_copy import make; from pathlib import Path; make(Path('in'), 0.4)"
    prepare(sys.executable, "-c", make, cwd=work)
    legacy = ("in", "legacy", "--to", "legacy", "--tp", 2, "--pp", 2, "--checkpoint-version", "3.0")
    prepare("dynmo-ckpt", "convert", *legacy, cwd=work)
    return {
        "dynmo-ckpt": ours("dynmo-ckpt", "convert", work / "legacy", "{out}", "--to", "hf"),
        "torch.load and safetensors": loop("convert", work / "legacy", "{out}"),
    }


def merge(work: Path) -> dict[str, Program]:
    make = "from tests.benchmarks.ckpt_copy import make; from pathlib import Path; make(Path('in'), 0.8)"
    prepare(sys.executable, "-c", make, cwd=work)
    copy = ["sh", "-c", f"cp -r {work}/in {{out}} && sync {{out}}/* && sync {{out}}"]
    return {"dynmo-ckpt": ours("dynmo-ckpt", "merge", work / "in", "{out}"), "cp and sync": Program(command=copy)}


def help_time(work: Path) -> dict[str, Program]:
    torchrun = PROGRAMS / "torchrun"
    return {
        "dynmo-train": ours("dynmo-train", "pretrain", "gpt", "--help"),
        "torchrun": Program(
            command=[str(torchrun), "--help"], missing=None if torchrun.exists() else "not installed: torchrun"
        ),
    }


def case(
    name: str, text: str, unit: str, our_name: str, programs: Callable[[Path], dict[str, Program]], **more: bool
) -> Case:
    area = name.split("-")[0]
    return Case(name=name, area=area, text=text, unit=unit, ours=our_name, programs=programs, **more)


FAMILIES = ("pruned", "frozen", "early exit", "mixture of experts", "mixture of depths", "sparse attention")
CASES = (
    case("prep-binarize", "Binarize 23 MB of text with a BPE tokenizer, 2 processes", "s", "dynmo-prep", binarize),
    case("prep-dedup", "Remove near-duplicates of 2,312 documents, 2 processes", "s", "dynmo-prep", dedup),
    case("prep-clean", "Repair and filter 1,156 documents by language, 2 processes", "s", "dynmo-prep", clean),
    case("plan-time", "Best partition of 400 layers over 32 stages", "ms", "dynmo-plan", plan_time),
    *(
        case(
            f"plan-{family.replace(' ', '-')}",
            f"Slowest stage over the exact optimum, 20 models, {family}",
            "x",
            "dynmo-plan",
            bottleneck_of(family),
        )
        for family in FAMILIES
    ),
    case(
        "train-tokens",
        "Training of a 30M GPT, one process, 2 threads",
        "tokens/s",
        "dynmo-train",
        tokens,
        higher_is_better=True,
    ),
    case(
        "train-balance",
        "Step of a GPT whose lower half is frozen, 2 stages",
        "ms",
        "dynmo-train --balance online",
        balance,
        warm_up=False,  # its first steps are not counted
    ),
    case(
        "train-exact",
        f"Random layouts with the bits of one pipeline rank, of {EXACT_LAYOUTS}",
        "equal",
        "dynmo-train",
        exact,
        higher_is_better=True,
        quick=False,
        warm_up=False,
        repeatable=False,  # the same bits each time
    ),
    case("ckpt-convert", "Legacy Megatron checkpoint of 0.4 GB to Hugging Face", "s", "dynmo-ckpt", convert),
    case("ckpt-merge", "Merge two tensor ranks, 0.8 GB", "s", "dynmo-ckpt", merge),
    case("help-pretrain", "Help with 200 options", "s", "dynmo-train", help_time),
)
