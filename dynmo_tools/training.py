"""Train a tokenizer on the documents of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .errors import UsageError
from .plan import Plan
from .settings import Model, TrainTokenizerSettings
from .tasks import Phase, Task
from .tokenizers import import_or_extra

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_phases(_plan: Plan) -> list[Phase]:
    """The one phase of ``train-tokenizer``."""
    return [Phase(name="train", run="training:train", tasks=1, reads=True)]


def _bpe(special_tokens: Sequence[str], settings: TrainTokenizerSettings) -> tuple[Any, Any]:
    library = import_or_extra("tokenizers")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special_tokens)
    if settings.vocab_size < least:
        raise UsageError(f"vocab-size is {settings.vocab_size}; the bytes and special tokens alone need {least}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    return tokenizer, trainer


def _wordpiece(special_tokens: Sequence[str], settings: TrainTokenizerSettings) -> tuple[Any, Any]:
    library = import_or_extra("tokenizers")
    lower = settings.model is Model.WORDPIECE_LOWER
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    return tokenizer, trainer


def train_on(texts: Iterable[str], settings: TrainTokenizerSettings) -> str:
    """Train on ``texts``; the ``tokenizer.json`` as text.

    Raises:
        UsageError: the vocabulary is too small for the bytes and special tokens.
    """
    if settings.model is Model.BPE:
        tokenizer, trainer = _bpe(settings.special_tokens or ("<|endoftext|>",), settings)
    else:
        tokenizer, trainer = _wordpiece(settings.special_tokens or BERT_TOKENS, settings)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    text: str = tokenizer.to_str(pretty=True)
    return text


def train(task: Task) -> None:
    """Task function: reads all slices and writes ``tokenizer.json``."""
    settings: TrainTokenizerSettings = task.job.settings

    def texts() -> Iterator[str]:
        for part in task.plan.tasks:
            for _, text in task.documents(settings.json_key, part):
                task.tally.documents_kept += 1
                yield text

    trained = train_on(texts(), settings)
    task.create(task.job.output).write(trained.encode())
    definition = json.loads(trained)
    task.facts.update(
        vocab_size=len(definition["model"]["vocab"]),
        special_tokens={token["content"]: token["id"] for token in definition["added_tokens"]},
    )
