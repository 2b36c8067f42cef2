"""Fixtures of dynmo_tools: texts that need no files, and the shared data if it exists."""

from __future__ import annotations

import json
import random

import pytest

from dynmo_tools.runner.job import Execution, run_job
from dynmo_tools.runner.task_manifest import Job, Limits
from dynmo_tools.tokenization.train_tokenizer import train_phases
from tests.paths import SHARED_DATA

VARIED = [
    "It's 2024, and they'll see:  12,345.67 things.\n\n\n  Indented. ",
    "Grüße aus der naïve café — “quotes” … 日本語のテキスト 한국어 עברית العربية",
    "def f(x):\n    return x**2  # CamelCase snake_case UPPER\r\n",
    "😀👩‍👩‍👧 e\u0301 \u00a0\u2003\ufeff ½ ² <|endoftext|> <s></s> [CLS] [MASK]",
    "",
    " ",
    "word " * 50,
    "a" * 300 + " b",
]


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data next to the project; the test is skipped if it does not exist."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"{SHARED_DATA}: the shared data is not next to the project (set DYNMO_SHARED_DATA)")
    return SHARED_DATA


@pytest.fixture(scope="session")
def varied_texts():
    """Texts of many scripts and shapes, and some random ones."""
    rng = random.Random(3)
    alphabet = "abc ABC 012 .,!?'\n\té日\u0301😀"
    return VARIED + ["".join(rng.choices(alphabet, k=rng.randrange(200))) for _ in range(100)]


@pytest.fixture(scope="session")
def groups_of():
    """The sets of at least two documents of a union-find, in order, as lists."""

    def groups(sets):
        members = {}
        for document in range(len(sets.parents)):
            members.setdefault(sets.find(document), []).append(document)
        return [group for group in members.values() if len(group) > 1]

    return groups


@pytest.fixture(scope="session")
def train_on(tmp_path_factory):
    """Train a tokenizer on texts, in this process: the ``tokenizer.json``; ``facts`` takes those of the summary."""

    def train(texts, settings, *, task_bytes=1 << 26, facts=None):
        folder = tmp_path_factory.mktemp("trained")
        (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        job = Job(
            step="train-tokenizer",
            inputs=(folder / "in.jsonl",),
            output=folder / "out.json",
            work=folder / "work",
            settings=settings,
            limits=Limits(task_bytes=task_bytes),
        )
        summary = run_job(job, train_phases, Execution())
        if facts is not None:
            facts.update(summary.facts)
        return (folder / "out.json").read_text()

    return train
