"""The files of a tokenizer by its type, in the directory of a model. Imports nothing heavy."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from .._common.errors import UsageError


class TokenizerType(StrEnum):
    """Tokenizer types of binarize, with Megatron's names."""

    HUGGING_FACE = "HuggingFaceTokenizer"
    GPT2 = "GPT2BPETokenizer"
    BERT_LOWER = "BertWordPieceLowerCase"
    BERT_CASE = "BertWordPieceCase"
    SENTENCE_PIECE = "SentencePieceTokenizer"
    LLAMA = "Llama2Tokenizer"
    WHITESPACE = "WhitespaceVocab"


OTHER_TOKENIZER_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "qwen.tiktoken")
"""Tokenizer files of models without a ``tokenizer.json``."""


def tokenizer_in(path: Path, kind: TokenizerType = TokenizerType.HUGGING_FACE) -> Path:
    """The tokenizer's file in a directory, such as a model's of Hugging Face; another path itself.

    Raises:
        UsageError: the directory has the files of another type, or the path is the name of a model of the hub.
    """
    has_pieces = kind in (TokenizerType.SENTENCE_PIECE, TokenizerType.LLAMA)
    name = "tokenizer.model" if has_pieces else "tokenizer.json"
    if not path.is_dir():
        check_is_local(path, name)
        return path
    found = path / name
    if not found.is_file():
        others = [other for other in ("tokenizer.json", *OTHER_TOKENIZER_FILES) if (path / other).is_file()]
        kinds = {
            "tokenizer.json": "HuggingFaceTokenizer",
            "tokenizer.model": "SentencePieceTokenizer, or Llama2Tokenizer with a begin token",
            "vocab.json": "GPT2BPETokenizer, --vocab-file and --merge-file",
            "vocab.txt": "BertWordPieceCase or BertWordPieceLowerCase, and --vocab-file",
        }
        if others and others[0] in kinds:
            remedy = f"it has {', '.join(others)}, which binarize reads with --tokenizer-type {kinds[others[0]]}"
        else:
            remedy = (
                f"it has {', '.join(others) or 'no file of a tokenizer'}; transformers writes it: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        raise UsageError(f"{path}: the folder has no {name}; {remedy}")
    return found


def check_is_local(path: Path, name: str) -> None:
    """Refuse the name of a model of the Hugging Face Hub, which is downloaded first.

    Args:
        path: what the user named.
        name: file of the tokenizer.

    Raises:
        UsageError: there is no such path, and it has the form of such a name.
    """
    if len(path.parts) == 2 and not path.suffix.endswith((".json", ".model")) and not path.parent.exists():
        raise UsageError(
            f"{path}: no such file or folder; download a model's tokenizer first: "
            f"hf download {path} {name} --local-dir {path.name}"
        )
