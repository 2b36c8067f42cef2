"""A small data set of sentences for BERT, T5 and ICT."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_sentences(folder: Path) -> tuple[Path, Path]:
    """An indexed data set of 80 documents of several sentences, and the vocabulary of its tokens."""
    random = np.random.default_rng(5)
    counts = random.integers(4, 12, 80)
    lengths = random.integers(4, 16, counts.sum())
    tokens = (5 + np.cumsum(random.integers(1, 4, lengths.sum())) % 90).astype("<u2")
    prefix = folder / "sentences"
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(counts) + 1)
    pointers = np.concatenate([[0], lengths.cumsum()[:-1] * 2])
    documents = np.concatenate([[0], counts.cumsum()])
    arrays = (lengths.astype("<i4"), pointers.astype("<i8"), documents.astype("<i8"))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    vocabulary = folder / "vocab.txt"
    words = [f"w{number}" if number % 3 else f"##p{number}" for number in range(90)]
    vocabulary.write_text("\n".join([*SPECIAL, *words]) + "\n")
    return prefix, vocabulary
