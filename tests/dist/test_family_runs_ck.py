"""Whole runs of every family from the command line: stopped, gone on with on other stages, saved, verified."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from whole_runs import figures, lines, run_command, tensors, write_data
from workers import run_workers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
COMMON = {
    "hidden-size": "32",
    "num-attention-heads": "4",
    "seq-length": "32",
    "micro-batch-size": "2",
    "global-batch-size": "8",
    "train-iters": "6",
    "lr": "2e-3",
    "split": "80,20,0",
    "eval-iters": "1",
    "eval-interval": "3",
    "log-interval": "3",
}
WORDS = {"tokenizer-type": "BertWordPieceLowerCase"}
FAMILIES = {
    "mixtral": (
        "llama",
        {
            "num-layers": "2",
            "num-query-groups": "2",
            "vocab-size": "97",
            "num-experts": "4",
            "moe-aux-loss-coeff": "0.01",
            "moe-z-loss-coeff": "0.001",
        },
    ),
    "bert": ("bert", {"num-layers": "2", **WORDS}),
    "t5": (
        "t5",
        {
            "encoder-num-layers": "2",
            "decoder-num-layers": "1",
            "decoder-seq-length": "16",
            "vocab-extra-ids": "10",
            "position-embedding-type": "relative",
            **WORDS,
        },
    ),
}


def write_sentences(folder: Path) -> tuple[Path, Path]:
    """An indexed data set of 80 documents of several sentences, and the vocabulary of its tokens."""
    random = np.random.default_rng(5)
    counts = random.integers(4, 12, 80)
    lengths = random.integers(4, 16, counts.sum())
    tokens = (5 + np.cumsum(random.integers(1, 4, lengths.sum())) % 90).astype("<u2")
    prefix = folder / "sentences"
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(counts) + 1)
    pointers = np.concatenate([[0], lengths.cumsum()[:-1] * 2])
    documents = np.concatenate([[0], counts.cumsum()])
    arrays = (lengths.astype("<i4"), pointers.astype("<i8"), documents.astype("<i8"))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    vocabulary = folder / "vocab.txt"
    words = [f"w{number}" if number % 3 else f"##p{number}" for number in range(90)]
    vocabulary.write_text("\n".join([*SPECIAL, *words]) + "\n")
    return prefix, vocabulary


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    sentences, vocabulary = write_sentences(folder)
    return {"causal": write_data(folder / "causal"), "sentences": sentences, "vocabulary": vocabulary}


def train(data, family: str, run: Path, workers: int, **options: str) -> None:
    command, own = FAMILIES[family]
    files = {"data-path": str(data["causal"])}
    if command in ("bert", "t5"):
        files = {"data-path": str(data["sentences"]), "vocab-file": str(data["vocabulary"])}
    merged = COMMON | own | files | {name.replace("_", "-"): value for name, value in options.items()}
    flags = [part for name, value in merged.items() for part in (f"--{name}", value) if part]
    told = run_workers(run_command, workers, ["pretrain", command, "--run-dir", str(run), *flags], joins=False)
    assert [code for code, _ in told] == [0] * workers, told


@pytest.mark.parametrize("family", FAMILIES)
def test_stopped_and_gone_on_with_gives_the_same_bits(data, tmp_path, family):
    train(data, family, tmp_path / "whole", 1)
    train(data, family, tmp_path / "parts", 2, exit_interval="3", granularity="sublayer")
    train(data, family, tmp_path / "parts", 3, load=str(tmp_path / "parts"))
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")
    assert tensors(tmp_path / "parts", 6) == tensors(tmp_path / "whole", 6)
    metrics = [line for line in lines(tmp_path / "parts" / "metrics.jsonl") if "lm_loss" in line]
    if family == "mixtral":
        assert all(len(line["expert_tokens"]) == 2 and line["load_balancing_loss"] > 0.9 for line in metrics)
    if family == "bert":
        assert all(0.3 < line["sop_loss"] < 1.5 for line in metrics)
    program = Path(sys.executable).parent / "dynmo-ckpt"
    checked = subprocess.run(
        [str(program), "verify", str(tmp_path / "parts"), "--level", "full"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def convert(*told: str | Path) -> None:
    program = Path(sys.executable).parent / "dynmo-ckpt"
    done = subprocess.run([str(program), *map(str, told)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("family", ["t5", "mixtral"])
def test_training_goes_on_from_what_dynmo_ckpt_wrote(data, tmp_path, family):
    """From a split with its optimizer's state the same bits follow; from an export to transformers its weights count."""
    train(data, family, tmp_path / "whole", 1, train_iters="4", save_interval="2")
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    convert("split", half, tmp_path / "split", "--tp", 2, "--pp", 2)
    train(data, family, tmp_path / "on", 1, train_iters="4", load=str(tmp_path / "split"))
    whole, on = figures(tmp_path / "whole"), figures(tmp_path / "on")
    assert {step: on[step] for step in (3, 4)} == {step: whole[step] for step in (3, 4)}
    convert("convert", half, tmp_path / "hf", "--to", "hf")
    convert("merge", half, tmp_path / "weights", "--no-optimizer")
    losses = []
    for source in ("hf", "weights"):
        train(data, family, tmp_path / f"from-{source}", 1, train_iters="1", load=str(tmp_path / source), finetune="")
        losses.append(figures(tmp_path / f"from-{source}")[1])
    assert losses[0] == losses[1]
    assert losses[0] != whole[1]


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("bert", {"vocab_size": "50"}, "--vocab-size 50 is too small"),
        ("t5", {"vocab_extra_ids": "0"}, "--vocab-extra-ids"),
        ("bert", {"global_batch_size": "4000"}, "is too small"),
        ("mixtral", {"moe_router_topk": "5"}, "--moe-router-topk"),
    ],
)
def test_bad_input_is_told_in_one_line(data, tmp_path, family, options, told):
    with pytest.raises(AssertionError, match=told) as error:
        train(data, family, tmp_path / "run", 1, **options)
    assert "Traceback" not in str(error.value)
    assert "(2, " in str(error.value)
