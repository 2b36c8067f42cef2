"""What BERT and T5 must know of a vocabulary beside its size: its special tokens, and where words begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError

# Names of the field for each role, the usual one first.
NAMES = {
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "begin": ("[BOS]", "<s>", "[CLS]", "<pad>"),
    "end": ("[EOS]", "</s>", "[SEP]", "<|endoftext|>"),
}
CONTINUES = "##"
BEGINS = ("\u2581", "\u0120")


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """Special tokens by role, and for each id whether it goes on with the word before it (boolean)."""

    source: str
    ids: Mapping[str, int]
    continues: npt.NDArray[np.bool_]

    @property
    def size(self) -> int:
        """One above the highest id."""
        return len(self.continues)

    def special(self, *roles: str) -> list[int]:
        """The ids of some roles.

        Raises:
            UsageError: the tokenizer has no token for one of them; names every one.
        """
        found = {role: next((self.ids[name] for name in NAMES[role] if name in self.ids), None) for role in roles}
        missing = [f"{role} ({', '.join(NAMES[role])})" for role, number in found.items() if number is None]
        if missing:
            raise UsageError(
                f"{self.source} has no token for {'; '.join(missing)}: this model needs a tokenizer with such tokens"
            )
        return [number for number in found.values() if number is not None]

    def sentinels(self, extra_ids: int) -> list[int]:
        """The ids that stand for masked spans: the tokenizer's own ``<extra_id_N>``, else those behind its last id."""
        own = [f"<extra_id_{number}>" for number in range(extra_ids)]
        if extra_ids and all(name in self.ids for name in own):
            return [self.ids[name] for name in own]
        return list(range(self.size, self.size + extra_ids))


def make_vocabulary(source: str, ids: Mapping[str, int], size: int) -> Vocabulary:
    """From the tokens of a tokenizer.

    WordPiece marks the pieces that go on with a word, SentencePiece and byte-level BPE those that begin one. Where no
    token has either mark, each is a word by itself.
    """
    continues = np.zeros(size, dtype=np.bool_)
    if any(token.startswith(CONTINUES) for token in ids):
        marked: Sequence[int] = [number for token, number in ids.items() if token.startswith(CONTINUES)]
    elif any(token.startswith(BEGINS) for token in ids):
        special = {name for names in NAMES.values() for name in names}
        marked = [number for token, number in ids.items() if not token.startswith(BEGINS) and token not in special]
    else:
        marked = []
    continues[np.asarray(marked, dtype=np.int64)] = True
    return Vocabulary(source=source, ids=ids, continues=continues)
