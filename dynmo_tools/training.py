"""Train a tokenizer on the documents of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .plan import Plan
from .settings import TrainTokenizerSettings
from .tasks import Phase, Task
from .tokenizers import train_bpe


def train_phases(_plan: Plan) -> list[Phase]:
    """The one phase of ``train-tokenizer``."""
    return [Phase(name="train", run="training:train", tasks=1, reads=True)]


def train(task: Task) -> None:
    """Task function: reads all slices and writes ``tokenizer.json``."""
    settings: TrainTokenizerSettings = task.job.settings

    def texts() -> Iterator[str]:
        for part in task.plan.tasks:
            for _, text in task.documents(settings.json_key, part):
                task.tally.documents_kept += 1
                yield text

    trained = train_bpe(
        texts(),
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=settings.special_tokens,
    )
    task.create(task.job.output).write(trained.encode())
    vocabulary = json.loads(trained)
    task.facts.update(
        vocab_size=len(vocabulary["model"]["vocab"]),
        merges=len(vocabulary["model"]["merges"]),
        special_tokens={token["content"]: token["id"] for token in vocabulary["added_tokens"]},
    )
