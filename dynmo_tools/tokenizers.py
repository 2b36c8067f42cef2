"""Tokenizers behind one small face: texts in, arrays of ids out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import MissingExtraError, UsageError

Ids = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What binarize and clean need of a tokenizer.

    Attributes:
        num_ids: one above the largest id that it can give, added tokens included.
    """

    num_ids: int

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text, special tokens of the text's own left out."""

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, or None."""


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "prep") from error
    return tokenizers


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` run by the ``tokenizers`` library."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = _library().Tokenizer.from_file(str(path))
        except Exception as error:
            if isinstance(error, MissingExtraError):
                raise
            raise UsageError(f"{path}: is no tokenizer.json that the tokenizers library reads: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.num_ids = max(vocabulary.values(), default=-1) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``."""
    return HuggingFaceTokenizer(path)


def train_bpe(texts: Iterable[str], *, vocab_size: int, min_frequency: int, special_tokens: Sequence[str]) -> str:
    """Train byte-level BPE; the ``tokenizer.json`` as text.

    Raises:
        UsageError: the vocabulary is too small for the bytes and special tokens.
    """
    library = _library()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special_tokens)
    if vocab_size < least:
        raise UsageError(f"vocab-size is {vocab_size}; the bytes and special tokens alone need {least}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    text: str = tokenizer.to_str(pretty=True)
    return text
