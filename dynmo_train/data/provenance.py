"""Checks that a data set was made with the vocabulary of the run, where its sidecar states one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.errors import MissingExtraError, UsageError
from ..formats.dataset import digest_vocabulary, read_sidecar
from ..formats.indexed import prefix_of
from .tokenizer import TokenizerFiles, open_tokenizer

if TYPE_CHECKING:
    from ..config import Config


def check_vocabulary(config: Config, prefix: str) -> None:
    """Compare the vocabulary of a data set with the run's tokenizer and ``--vocab-size``.

    A data set without a sidecar, or with an unknown tokenizer, passes.

    Args:
        config: the run's options.
        prefix: the data set, or its ``.bin`` or ``.idx`` file.

    Raises:
        UsageError: the run's tokenizer has another vocabulary, or the model has fewer rows than the data set has ids.
        DocumentError: the sidecar breaks a rule of its format.
    """
    sidecar = read_sidecar(prefix_of(prefix))
    tokenizer = sidecar["tokenizer"] if sidecar is not None else None
    if tokenizer is None:
        return
    made_by = _describe(tokenizer)
    named = TokenizerFiles.of(vars(config.data))
    if named is not None:
        source = ", ".join(str(path) for path in named.files.values())
        digest = _digest_of(named.kind, tuple(sorted(named.files.items())))
        if digest not in (None, tokenizer["vocab_sha256"]):
            raise UsageError(
                f"{prefix} was made with {made_by}; the run's tokenizer, {source}, has another vocabulary: give the"
                " data set's tokenizer, or binarize the text with this one"
            )
    if config.model.vocab_size < tokenizer["vocab_size"]:
        raise UsageError(
            f"{prefix} was made with {made_by}; --vocab-size {config.model.vocab_size} is too small: give"
            f" --vocab-size {tokenizer['vocab_size']} or the data set's tokenizer"
        )


def _describe(tokenizer: dict[str, Any]) -> str:
    files = ", ".join(file["name"] for file in tokenizer["files"]) or "no file"
    return (
        f"a {tokenizer['type']} ({files}; {tokenizer['vocab_size']:,} ids; vocabulary {tokenizer['vocab_sha256'][:8]})"
    )


@functools.lru_cache(maxsize=1)
def _digest_of(kind: str, files: tuple[tuple[str, Path], ...]) -> str | None:
    """Digest of a tokenizer's vocabulary, cached over data sets; None where the tokenizer's library is missing."""
    try:
        return digest_vocabulary(open_tokenizer(TokenizerFiles(kind=kind, files=dict(files))).vocabulary())
    except MissingExtraError:
        return None
