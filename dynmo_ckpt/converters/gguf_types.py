"""The numbers of a GGUF file that are computed: blocks of Q8_0, Gemma's norms, Llama 3's rotary divisors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..io.reading import SourceFiles, Words
from ..tensors.computed import Floats, bits_of, floats_of, rounded
from ..tensors.views import Tensor
from .gguf_package import gguf_package

BLOCK_BYTES = 34  # of 32 values in Q8_0: a float16 scale and 32 signed bytes


@dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """The rows of ``content`` ``[R, C]`` as blocks of Q8_0; zero where ``mask`` is false."""

    content: Tensor
    mask: Tensor | None

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``; bytes ``[end - begin, C / 32 * 34]``."""
        numbers = floats_of(files, self.content.narrow(0, begin, end))
        if self.mask is not None:
            numbers[bits_of(files, self.mask.narrow(0, begin, end)) == 0] = 0
        gguf = gguf_package()
        found: Words = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
        return found


@dataclass(frozen=True, kw_only=True)
class OnePlus:
    """1 + ``vector`` ``[C]`` in float32."""

    vector: Tensor

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        return rounded(floats_of(files, self.vector).reshape(1, -1) + 1, "F32")


def llama3_divisors(width: int, base: float, scaling: Mapping[str, Any]) -> Floats:
    """The divisors of rotary frequencies of Llama 3.1 (as ``rope_type`` llama3 of transformers).

    Args:
        width: the head dimension.
        base: of the frequencies.
        scaling: ``factor``, ``low_freq_factor``, ``high_freq_factor``, ``original_max_position_embeddings``.

    Returns:
        ``[width / 2]``.
    """
    lengths = 2 * math.pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width)
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # Between the two wavelengths, the scaled and the plain frequency are mixed.
    share = np.clip((trained / lengths - low) / (high - low), 0, 1)
    divisors: Floats = (1 / ((1 - share) / factor + share)).astype(np.float32)
    return divisors
