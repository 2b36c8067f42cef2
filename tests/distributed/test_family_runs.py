"""Runs of every family from the command line: stopped, resumed on other stages, saved, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.sentences import write_sentences
from tests.distributed.whole_runs import run_command, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

COMMON = {
    "hidden-size": "32",
    "num-attention-heads": "4",
    "seq-length": "32",
    "micro-batch-size": "2",
    "global-batch-size": "8",
    "train-iters": "6",
    "lr": "2e-3",
    "split": "70,15,15",
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
    "ict": (
        "ict",
        {
            "num-layers": "1",
            "retriever-report-topk-accuracies": "1 2",
            "biencoder-projection-dim": "8",
            "query-in-block-prob": "0.5",
            **WORDS,
        },
    ),
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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    sentences, vocabulary = write_sentences(folder)
    return {"causal": write_data(folder / "causal"), "sentences": sentences, "vocabulary": vocabulary}


def train(data, family: str, run: Path, workers: int, **options: str) -> None:
    command, own = FAMILIES[family]
    files = {"data-path": str(data["causal"])}
    if command in ("bert", "ict", "t5"):
        files = {"data-path": str(data["sentences"]), "vocab-file": str(data["vocabulary"])}
    merged = COMMON | own | files | {name.replace("_", "-"): value for name, value in options.items()}
    flags = [part for name, value in merged.items() for part in (f"--{name}", value)]
    results = run_workers(run_command, workers, ["pretrain", command, "--run-dir", str(run), *flags], joins=False)
    assert [code for code, _ in results] == [0] * workers, str(results)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("bert", {"vocab_size": "50"}, "--vocab-size 50: must be at least"),
        ("t5", {"vocab_extra_ids": "0"}, "--vocab-extra-ids"),
        ("bert", {"global_batch_size": "4000"}, "is too small"),
        ("ict", {"micro_batch_size": "1"}, "must be at least 2 without replicas"),
        ("ict", {"retriever_report_topk_accuracies": "1 3"}, "must be at most the 2 blocks per query"),
        ("ict", {"titles_data_path": "SENTENCES"}, "one sequence per document"),
        ("mixtral", {"moe_router_topk": "5"}, "--moe-router-topk"),
    ],
)
def test_bad_input_of_a_family_is_one_error_line(data, tmp_path, family, options, message):
    options = {name: str(data["sentences"]) if value == "SENTENCES" else value for name, value in options.items()}
    with pytest.raises(AssertionError, match=message) as error:
        train(data, family, tmp_path / "run", 1, **options)
    assert "Traceback" not in str(error.value)
    assert "(2, " in str(error.value)
