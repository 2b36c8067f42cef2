"""The kinds of tokenizer that are trained here: what their words and symbols are, and how their file is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.settings import GPT2_END, Model, TrainTokenizerSettings
from .tokenizers import PROBES, import_or_extra
from .word_counts import WordBlock

Ints = npt.NDArray[Any]
Splitter = Callable[[str], Iterable[Hashable]]
"""Gives the pieces of a text."""

NO_SYMBOL = -1


class TokenizerTrainer(ABC):
    """A kind of tokenizer.

    Attributes:
        special: the tokens that take the first ids.
        prefix: what stands before a token that continues a word.
    """

    prefix = ""

    def __init__(self, special: Sequence[str]) -> None:
        self.special = tuple(dict.fromkeys(special))

    @abstractmethod
    def splitter(self) -> Splitter:
        """Cuts text into pieces that are quick to count."""

    @abstractmethod
    def words_of(self, piece: Any) -> Iterable[bytes]:
        """The words of a piece, in UTF-8: no token reaches from one into another."""

    @abstractmethod
    def characters(self, block: WordBlock) -> tuple[set[int], set[int]]:
        """The symbols that words begin with, and those that continue them, as far as the alphabet depends on them."""

    @abstractmethod
    def alphabet(self, begin: Iterable[int], continuing: Iterable[int]) -> list[str]:
        """The first tokens, given the characters of all words; ``symbols`` can be asked from then on.

        Tokens are sorted, where the ``tokenizers`` library takes those with a prefix as a hash table gives them.
        """

    @abstractmethod
    def symbols(self, block: WordBlock) -> tuple[Ints, Ints]:
        """The ids of the symbols of words ``[symbols]``, and how many each word has ``[words]``."""

    @abstractmethod
    def tokenizer(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
        """A tokenizer of the ``tokenizers`` library."""

    def file(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
        """The ``tokenizer.json``."""
        tokenizer = self.tokenizer(vocabulary, merges)
        tokenizer.add_special_tokens(list(self.special))
        text: str = tokenizer.to_str(pretty=True)
        return text


class ByteLevelTrainer(TokenizerTrainer):
    """Byte-level BPE as GPT-2's: every byte is a symbol."""

    def __init__(self, special: Sequence[str]) -> None:
        super().__init__(special or (GPT2_END,))
        self._ids = np.zeros(0, dtype=np.int32)

    def splitter(self) -> Splitter:
        """The words themselves, by gigatoken where it gives those of ``tokenizers`` on a set of probes."""
        split = import_or_extra("tokenizers").pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str

        def slow(text: str) -> list[bytes]:
            return [text[begin:end].encode() for _, (begin, end) in split(text)]

        try:
            split_bytes = import_or_extra("gigatoken").pretokenizer

            def fast(text: str) -> Iterable[bytes]:
                found: Iterable[bytes] = split_bytes(text.encode())
                return found

            return fast if all(list(fast(text)) == slow(text) for text in PROBES) else slow
        except Exception:  # noqa: BLE001 - whatever gigatoken cannot do, tokenizers does
            return slow

    def words_of(self, piece: bytes) -> Iterable[bytes]:
        """It is one."""
        return (piece,)

    def characters(self, _block: WordBlock) -> tuple[set[int], set[int]]:
        """None: the alphabet is that of all bytes."""
        return set(), set()

    def alphabet(self, _begin: Iterable[int], _go_on: Iterable[int]) -> list[str]:
        """Special tokens, then the characters that stand for bytes."""
        characters = _characters_of_bytes()
        tokens = list(dict.fromkeys([*self.special, *sorted(characters)]))
        self._ids = np.array([tokens.index(character) for character in characters], dtype=np.int32)
        return tokens

    def symbols(self, block: WordBlock) -> tuple[Ints, Ints]:
        """One a byte."""
        return self._ids[block.text], block.lengths

    def tokenizer(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
        """GPT-2's, without a prefix space."""
        library = import_or_extra("tokenizers")
        tokenizer = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=False)
        return tokenizer


def _characters_of_bytes() -> list[str]:
    """What GPT-2 writes for each byte: itself where it is printable in Latin-1, else one of the characters from 256."""
    others = iter(range(256, 512))
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class WordPieceTrainer(TokenizerTrainer):
    """WordPiece as BERT's: every character is a symbol, another one where it continues a word."""

    prefix = "##"

    def __init__(self, special: Sequence[str], *, lower: bool) -> None:
        super().__init__(special or ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
        self._lower = lower
        library = import_or_extra("tokenizers")
        self._normalizer = library.normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
        self._pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        self._ids = np.zeros((2, 0), dtype=np.int32)

    def splitter(self) -> Splitter:
        """What stands between spaces and ends of lines: BERT's rules never look beyond those."""
        return lambda text: text.replace("\n", " ").split(" ")

    def words_of(self, piece: str) -> Iterable[bytes]:
        """WordSymbols and single punctuation marks, after BERT's clean-up."""
        if piece.isascii() and piece.isalnum():
            return ((piece.lower() if self._lower else piece).encode(),)
        cleaned = self._normalizer.normalize_str(piece)
        return [word.encode() for word, _ in self._pre_tokenizer.pre_tokenize_str(cleaned)]

    def _code_points(self, block: WordBlock) -> tuple[Ints, Ints, Ints]:
        """Code points ``[characters]``, whether each continues a word, and how many each word has ``[words]``."""
        points = np.frombuffer(block.text.tobytes().decode().encode("utf-32-le"), dtype=np.uint32)
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
        """Special tokens, then every character, then those that continue words."""
        begin, continuing = set(begin), set(continuing)
        plain = [chr(point) for point in sorted(begin | continuing)]
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
        """One a character."""
        points, continues, lengths = self._code_points(block)
        return self._ids[continues.astype(np.intp), points], lengths

    def tokenizer(self, vocabulary: dict[str, int], _merges: list[tuple[str, str]]) -> Any:
        """BERT's."""
        library = import_or_extra("tokenizers")
        tokenizer = library.Tokenizer(library.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = self._normalizer
        tokenizer.pre_tokenizer = self._pre_tokenizer
        tokenizer.decoder = library.decoders.WordPiece()
        return tokenizer


def make_trainer(settings: TrainTokenizerSettings) -> TokenizerTrainer:
    """The kind of tokenizer that settings ask for."""
    if settings.model is Model.BPE:
        return ByteLevelTrainer(settings.special_tokens)
    return WordPieceTrainer(settings.special_tokens, lower=settings.model is Model.WORDPIECE_LOWER)
