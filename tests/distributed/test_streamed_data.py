"""Whole runs on documents that Hugging Face ``datasets`` streams: the same on any placement and after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.whole_runs import figures, tensors, train
from tests.documents.markdown import blocks
from tests.paths import ROOT

# A mark, because a module that is skipped as a whole has no tests to collect.
pytestmark = [
    pytest.mark.complete,
    pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed"),
]

GUIDE = ROOT / "dynmo_train" / "data" / "README.md"

OPTIONS = {
    "train_iters": "8",
    "eval_interval": "4",
    "vocab_size": "97",
    "tokenizer_type": "WhitespaceVocab",
    "hf_shuffle_buffer": "20",
    "pruning_start_iter": None,
    "pruning_end_iter": None,
    "pruning_freq": None,
    "freeze_schedule": None,
    "split": None,
}
PACKED = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict[str, str | None]:
    folder, random = tmp_path_factory.mktemp("documents"), np.random.default_rng(7)
    for number in range(4):
        texts = [" ".join(f"w{word}" for word in random.integers(95, size=random.integers(5, 60))) for _ in range(40)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"part{number}.jsonl").write_text(lines, encoding="utf-8")
    words = {"<|endoftext|>": 0, "<unk>": 1} | {f"w{number}": number + 2 for number in range(95)}
    (folder / "words.json").write_text(json.dumps(words), encoding="utf-8")
    return OPTIONS | {
        "vocab_file": str(folder / "words.json"),
        "hf_dataset": str(folder / "part[0-2].jsonl"),
        "hf_valid_dataset": str(folder / "part3.jsonl"),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, options):
    run = tmp_path_factory.mktemp("streamed") / "one"
    train(None, run, 1, *PACKED, **options)
    return run


def test_streamed_run_has_the_same_bits_on_two_stages(whole, options, tmp_path):
    train(None, tmp_path / "two", 2, *PACKED, **options, pipeline_model_parallel_size="2")
    assert figures(tmp_path / "two") == figures(whole)


def test_streamed_run_on_two_replicas_reads_the_same_batches(whole, options, tmp_path):
    train(None, tmp_path / "two", 2, *PACKED, **options, pipeline_model_parallel_size="1")
    found, expected = figures(tmp_path / "two"), figures(whole)
    assert found.keys() == expected.keys()
    # The order of sums differs.
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_streamed_run_resumes_with_the_same_bits(whole, options, tmp_path, replicas):
    plain, run = whole, tmp_path / "run"
    options = options | {"pipeline_model_parallel_size": "1"}
    if replicas > 1:
        plain = tmp_path / "whole"
        train(None, plain, replicas, *PACKED, **options)
    train(None, run, replicas, *PACKED, **options, exit_interval="5")
    assert max(figures(run)) == 5
    [manifest] = run.glob("checkpoints/*5/manifest.json")
    stored = json.loads(manifest.read_text())["x_data_position"]
    assert stored["train"]["sample"] == 4 * 16 + 16 // replicas
    assert stored["valid"]["sample"] == 16
    train(None, run, replicas, *PACKED, **options, load=str(run))
    assert figures(run) == figures(plain)
    assert tensors(run, 8) == tensors(plain, 8)


def test_streamed_run_of_the_guide_is_run_as_printed(tmp_path):
    [block] = [each for each in blocks(GUIDE.read_text(encoding="utf-8")) if "--hf-dataset" in each.text]
    first = "dynmo-prep sample-corpus --output data/corpus.jsonl\ndynmo-prep pipeline quickstart --work-dir data\n"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path}
    script = ["bash", "-e", "-c", first + block.text]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(figures(tmp_path / "runs" / "streamed")) == 10
