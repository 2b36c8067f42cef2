"""Kinds of trained tokenizers: their words, symbols and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.settings import GPT2_END, TokenizerModel, TrainTokenizerSettings
from .definitions import characters_of_bytes
from .tokenizers import PROBES, import_or_extra
from .word_counts import WordBlock

Ints = npt.NDArray[Any]
Splitter = Callable[[str], Iterable[Hashable]]
"""Returns the pieces of a text."""

NO_SYMBOL = -1


class TokenizerTrainer(ABC):
    """A kind of tokenizer.

    Attributes:
        special: special tokens; they have the first ids.
        prefix: prefix of tokens that continue a word.
    """

    prefix = ""

    def __init__(self, special: Sequence[str]) -> None:
        self.special = tuple(dict.fromkeys(special))

    @abstractmethod
    def splitter(self) -> Splitter:
        """A function that splits text into pieces that are fast to count."""

    @abstractmethod
    def extract_words(self, piece: Any) -> Iterable[bytes]:
        """The words of a piece, in UTF-8; tokens do not extend across words."""

    @abstractmethod
    def characters(self, block: WordBlock) -> tuple[set[int], set[int]]:
        """The characters of the alphabet in some words: those that begin words, and those that continue words."""

    @abstractmethod
    def alphabet(self, begin: Iterable[int], continuing: Iterable[int]) -> list[str]:
        """The initial tokens for the characters of all words; must be called before ``symbols``.

        Tokens are sorted; the ``tokenizers`` library takes those with a prefix in the order of a hash table.
        """

    @abstractmethod
    def symbols(self, block: WordBlock) -> tuple[Ints, Ints]:
        """The ids of the symbols of words ``[symbols]``, and the number of symbols per word ``[words]``."""

    @abstractmethod
    def tokenizer(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
        """The tokenizer of the ``tokenizers`` library."""

    def file(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
        """The text of ``tokenizer.json``."""
        tokenizer = self.tokenizer(vocabulary, merges)
        tokenizer.add_special_tokens(list(self.special))
        text: str = tokenizer.to_str(pretty=True)
        return text


class ByteLevelTrainer(TokenizerTrainer):
    """Byte-level BPE as in GPT-2: every byte is a symbol."""

    def __init__(self, special: Sequence[str]) -> None:
        super().__init__(special or (GPT2_END,))
        self._ids = np.zeros(0, dtype=np.int32)

    def splitter(self) -> Splitter:
        """Splits into words, with gigatoken if it returns the words of ``tokenizers`` for a set of probes."""
        split = import_or_extra("tokenizers").pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str

        def slow(text: str) -> list[bytes]:
            return [text[begin:end].encode() for _, (begin, end) in split(text)]

        try:
            split_bytes = import_or_extra("gigatoken").pretokenizer

            def fast(text: str) -> Iterable[bytes]:
                found: Iterable[bytes] = split_bytes(text.encode())
                return found

            return fast if all(list(fast(text)) == slow(text) for text in PROBES) else slow
        except Exception:  # noqa: BLE001 - tokenizers runs whatever gigatoken cannot
            return slow

    def extract_words(self, piece: bytes) -> Iterable[bytes]:
        """The piece, which is one word."""
        return (piece,)

    def characters(self, _block: WordBlock) -> tuple[set[int], set[int]]:
        """Nothing: the alphabet has all bytes."""
        return set(), set()

    def alphabet(self, _begin: Iterable[int], _continuing: Iterable[int]) -> list[str]:
        """Special tokens, then the characters of bytes."""
        characters = characters_of_bytes()
        tokens = list(dict.fromkeys([*self.special, *sorted(characters)]))
        self._ids = np.array([tokens.index(character) for character in characters], dtype=np.int32)
        return tokens

    def symbols(self, block: WordBlock) -> tuple[Ints, Ints]:
        """One symbol per byte."""
        return self._ids[block.text], block.lengths

    def tokenizer(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
        """GPT-2's tokenizer, without a prefix space."""
        library = import_or_extra("tokenizers")
        tokenizer = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=False)
        return tokenizer


class WordPieceTrainer(TokenizerTrainer):
    """WordPiece as in BERT: every character is a symbol, a different one if it continues a word."""

    prefix = "##"

    def __init__(self, special: Sequence[str], *, lower: bool) -> None:
        super().__init__(special or ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
        self._lower = lower
        library = import_or_extra("tokenizers")
        self.normalizer = library.normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
        self.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        self._ids = np.zeros((2, 0), dtype=np.int32)

    def splitter(self) -> Splitter:
        """Splits at spaces and line ends; BERT's rules never extend across them."""
        return lambda text: text.replace("\n", " ").split(" ")

    def extract_words(self, piece: str) -> Iterable[bytes]:
        """Words and single punctuation marks, after BERT's normalization."""
        # Most words: BERT's normalization only lower-cases them, and they have no punctuation to split at.
        if piece.isascii() and piece.isalnum():
            return ((piece.lower() if self._lower else piece).encode(),)
        cleaned = self.normalizer.normalize_str(piece)
        return [word.encode() for word, _ in self.pre_tokenizer.pre_tokenize_str(cleaned)]

    def _code_points(self, block: WordBlock) -> tuple[Ints, Ints, Ints]:
        """Code points ``[characters]``, whether each continues a word, and characters per word ``[words]``."""
        points = np.frombuffer(block.text.tobytes().decode().encode("utf-32-le"), dtype=np.uint32)
        # In UTF-8, a byte 10xxxxxx continues a character, and any other byte begins one.
        before = np.cumsum(np.concatenate(([0], block.text & 0xC0 != 0x80)))
        ends = before[np.cumsum(block.lengths, dtype=np.int64)]
        lengths = np.diff(ends, prepend=0)
        continues = np.ones(len(points), dtype=np.bool_)
        continues[ends - lengths] = False
        return points, continues, lengths

    def characters(self, block: WordBlock) -> tuple[set[int], set[int]]:
        """Code points."""
        points, continues, _ = self._code_points(block)
        return set(np.unique(points[~continues]).tolist()), set(np.unique(points[continues]).tolist())

    def alphabet(self, begin: Iterable[int], continuing: Iterable[int]) -> list[str]:
        """Special tokens, then all characters, then those that continue words."""
        begin, continuing = set(begin), set(continuing)
        plain = [chr(point) for point in sorted(begin | continuing)]
        # Sorted code points: sets have no order, and ids must be the same in every run.
        tokens = list(
            dict.fromkeys([*self.special, *plain, *(self.prefix + chr(point) for point in sorted(continuing))])
        )
        numbers = {token: number for number, token in enumerate(tokens)}
        self._ids = np.full((2, max(begin | continuing, default=0) + 1), NO_SYMBOL, dtype=np.int32)
        for row, (points, prefix) in enumerate(((begin, ""), (continuing, self.prefix))):
            for point in points:
                self._ids[row, point] = numbers[prefix + chr(point)]
        return tokens

    def symbols(self, block: WordBlock) -> tuple[Ints, Ints]:
        """One symbol per character."""
        points, continues, lengths = self._code_points(block)
        return self._ids[continues.astype(np.intp), points], lengths

    def tokenizer(self, vocabulary: dict[str, int], _merges: list[tuple[str, str]]) -> Any:
        """BERT's tokenizer."""
        library = import_or_extra("tokenizers")
        tokenizer = library.Tokenizer(library.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = self.normalizer
        tokenizer.pre_tokenizer = self.pre_tokenizer
        tokenizer.decoder = library.decoders.WordPiece()
        return tokenizer


def make_trainer(settings: TrainTokenizerSettings) -> TokenizerTrainer:
    """The trainer for the settings."""
    if settings.model is TokenizerModel.BPE:
        return ByteLevelTrainer(settings.special_tokens)
    return WordPieceTrainer(settings.special_tokens, lower=settings.model is TokenizerModel.WORDPIECE_LOWER)
