"""Tokenizers: a ``tokenizer.json`` as the ``tokenizers`` library writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, UsageError

# Names under which tokenizers of the field know the token that ends a document.
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eod>", "[SEP]")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    ``vocab_size`` is one above the highest id, added tokens included; ``eod`` is the id that ends a document, None
    where the tokenizer has none of the usual tokens for it.
    """

    inner: Any
    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens around it."""
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a ``tokenizer.json``, or the one in a directory.

    Raises:
        UsageError: no such file, or not a tokenizer.
        MissingExtraError: the ``tokenizers`` library is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "train") from error
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise UsageError(f"no tokenizer at {file}; --tokenizer-model takes the path of a tokenizer.json")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"{file} is not a tokenizer.json: {error}") from error
    highest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
    found = (inner.token_to_id(token) for token in END_OF_DOCUMENT)
    eod = next((token_id for token_id in found if token_id is not None), None)
    return Tokenizer(inner=inner, vocab_size=highest + 1, eod=eod)


def read_vocab_size(path: str) -> int:
    """Number of token ids of the tokenizer at ``path``."""
    return load_tokenizer(path).vocab_size
