"""The numbers of a GGUF file that are computed: blocks of Q8_0 and MXFP4, Gemma's norms, Llama 3's rotary divisors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..io.errors import UnsupportedError
from ..io.reading import SourceFiles, Words
from ..tensors.computed import Floats, bits_of, floats_of, rounded
from ..tensors.views import Tensor
from .gguf_package import gguf_package

# The bounds between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of FP4 (E2M1).
_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
Q8_0_LARGEST = 127 * 65504.0
_SMALLEST = 2.0**-100  # of a block in MXFP4 whose values are not all zero


@dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """The rows of ``content`` ``[R, C]`` as blocks of Q8_0; zero where ``mask`` is false."""

    content: Tensor
    mask: Tensor | None

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``; bytes ``[end - begin, C / 32 * 34]``.

        Raises:
            UnsupportedError: a number is beyond the range of Q8_0.
        """
        numbers = _masked_rows(files, self.content, self.mask, begin, end)
        # The scale of a block is float16.
        if numbers.size and np.abs(numbers).max() > Q8_0_LARGEST:
            raise UnsupportedError("GGUF: a weight is beyond the range of Q8_0; use --dtype bf16")
        gguf = gguf_package()
        found: Words = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
        return found


@dataclass(frozen=True, kw_only=True)
class Mxfp4Rows:
    """The rows of ``content`` ``[R, C]`` as blocks of MXFP4; zero where ``mask`` is false.

    32 values are a byte of the exponent of a power of two, plus 127, and 16 bytes of two values of FP4; the first half
    of the values is in the low four bits. Values that were MXFP4 before are stored without loss. The ``gguf`` package
    compares each value with 16 others, which takes 64 times the memory of the rows.
    """

    content: Tensor
    mask: Tensor | None

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``; bytes ``[end - begin, C / 32 * 17]``."""
        numbers = _masked_rows(files, self.content, self.mask, begin, end)
        return mxfp4_blocks(numbers).reshape(end - begin, -1)


def mxfp4_blocks(numbers: Floats) -> Words:
    """Numbers ``[R, C]`` in float32, C a multiple of 32, as blocks of MXFP4: bytes ``[R * C / 32, 17]``."""
    blocks = numbers.reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    is_zero = largest < _SMALLEST
    # The largest value is between 4 and 8 times the scale; OCP Microscaling Formats 1.0, section 6.3.
    exponents = np.where(is_zero, -127, np.frexp(largest)[1] - 3)
    scaled = np.ldexp(blocks, -exponents) * ~is_zero
    codes = np.searchsorted(_BOUNDS, np.abs(scaled)).astype(np.uint8)
    codes |= ((scaled < 0) & (codes > 0)).astype(np.uint8) << 3
    return np.concatenate([(exponents + 127).astype(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _masked_rows(files: SourceFiles, content: Tensor, mask: Tensor | None, begin: int, end: int) -> Floats:
    numbers = floats_of(files, content.narrow(0, begin, end))
    if mask is not None:
        numbers[bits_of(files, mask.narrow(0, begin, end)) == 0] = 0
    return numbers


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
