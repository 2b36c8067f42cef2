"""What masked language models need of a vocabulary: its special tokens, and which tokens continue a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError
from ..config import Config
from .tokenizer import TokenizerFiles, open_tokenizer

# Names of the special tokens of each role, the most common one first.
NAMES = {
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "begin": ("[BOS]", "<s>", "[CLS]", "<pad>"),
    "end": ("[EOS]", "</s>", "[SEP]", "<|endoftext|>"),
}
CONTINUATION_PREFIX = "##"
# SentencePiece's mark of a space, and the byte of a space in byte-level BPE.
WORD_PREFIXES = ("\u2581", "\u0120")


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """Token ids by name.

    Attributes:
        source: the tokenizer's files, for messages.
        ids: token -> id.
        continues: for each id whether its token continues the word before it, bool ``[size]``.
    """

    source: str
    ids: Mapping[str, int]
    continues: npt.NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Highest id + 1."""
        return len(self.continues)

    def special(self, *roles: str) -> list[int]:
        """The ids of the special tokens of some roles.

        Raises:
            UsageError: the tokenizer lacks a token; the message names all missing ones.
        """
        found = {role: next((self.ids[name] for name in NAMES[role] if name in self.ids), None) for role in roles}
        missing = [f"{role} ({', '.join(NAMES[role])})" for role, number in found.items() if number is None]
        if missing:
            raise UsageError(
                f"{self.source} has no token for {'; '.join(missing)}: this model needs a tokenizer with such tokens"
            )
        return [number for number in found.values() if number is not None]

    def sentinels(self, extra_ids: int) -> list[int]:
        """Ids of ``extra_ids`` sentinel tokens: the tokenizer's own ``<extra_id_N>``, else ids after its last one."""
        own = [f"<extra_id_{number}>" for number in range(extra_ids)]
        if extra_ids and all(name in self.ids for name in own):
            return [self.ids[name] for name in own]
        return list(range(self.size, self.size + extra_ids))


def make_vocabulary(source: str, ids: Mapping[str, int], size: int) -> Vocabulary:
    """The vocabulary of a tokenizer's tokens.

    WordPiece marks tokens that continue a word; SentencePiece and byte-level BPE mark tokens that begin one. Where no
    token has either mark, each token is a word.

    Args:
        source: the tokenizer's files, for messages.
        ids: token -> id.
        size: highest id + 1.
    """
    continues = np.zeros(size, dtype=np.bool_)
    if any(token.startswith(CONTINUATION_PREFIX) for token in ids):
        marked: Sequence[int] = [number for token, number in ids.items() if token.startswith(CONTINUATION_PREFIX)]
    # Special tokens have no mark of a beginning either, but they continue no word.
    elif any(token.startswith(WORD_PREFIXES) for token in ids):
        special = {name for names in NAMES.values() for name in names}
        marked = [
            number for token, number in ids.items() if not token.startswith(WORD_PREFIXES) and token not in special
        ]
    else:
        marked = []
    continues[np.asarray(marked, dtype=np.int64)] = True
    return Vocabulary(source=source, ids=ids, continues=continues)


def run_vocabulary(config: Config) -> Vocabulary:
    """The vocabulary of a run's tokenizer.

    Raises:
        UsageError: no tokenizer is given, or ``--vocab-size`` is too small for it.
    """
    named = TokenizerFiles.of(vars(config.data))
    if named is None:
        raise UsageError(
            f"pretrain {config.model.family} masks tokens and needs the special tokens of the tokenizer; give"
            " --tokenizer-model or --vocab-file"
        )
    tokenizer = open_tokenizer(named)
    source = ", ".join(str(path) for path in named.files.values())
    vocabulary = make_vocabulary(source, tokenizer.vocabulary(), tokenizer.vocab_size)
    needed = max([vocabulary.size, *(number + 1 for number in vocabulary.sentinels(config.data.vocab_extra_ids))])
    if needed > config.model.vocab_size:
        raise UsageError(
            f"--vocab-size {config.model.vocab_size}: must be at least {needed}, the ids of {source} and of"
            f" --vocab-extra-ids {config.data.vocab_extra_ids}; raise --vocab-size"
        )
    return vocabulary
