"""The arithmetic of quantized weights: rows of plain weights from stored codes, zero points and scales.

All of it is computed in float32 and rounded once. Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3), OCP
Microscaling Formats 1.0 (E2M1, E8M0), GPTQ (Frantar et al. 2023, arXiv:2210.17323), AWQ (Lin et al. 2024,
arXiv:2306.00978).

Shapes: O outputs, I inputs, G groups of inputs, E experts, b bits of a code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..io.errors import CorruptError, UnsupportedError, short_name
from ..io.reading import SourceFiles, Words
from ..tensors.computed import Floats, bits_of, floats_of, rounded
from ..tensors.views import Tensor

Codes = NDArray[np.int32]
# E2M1: a sign, two bits of exponent, one of mantissa.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FLOAT4 = np.concatenate([_FLOAT4, -_FLOAT4])
# The column of each nibble of a word, from the lowest nibble.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def _float8_table() -> Floats:
    """The number of each code of E4M3: exponent bias 7, no infinity, NaN where all other bits are 1."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    numbers = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    numbers = np.where(codes & 128, -numbers, numbers)
    numbers[(codes & 127) == 127] = np.nan
    return numbers.astype(np.float32)


FLOAT8 = _float8_table()


def scale_numbers(files: SourceFiles, tensor: Tensor) -> Floats:
    """Scales of any shape as float32; bytes are exponents (E8M0): 2^(byte - 127), and NaN for 255.

    Args:
        files: the open files.
        tensor: the scales, of a floating-point type or U8.
    """
    if tensor.dtype != "U8":
        return floats_of(files, tensor)
    exponents = bits_of(files, tensor).astype(np.int32)
    numbers = np.ldexp(np.float32(1), exponents - 127, dtype=np.float32)
    return np.where(exponents == 255, np.float32(np.nan), numbers)


def unpack(words: Words, bits: int) -> Codes:
    """The codes of words along their first dimension, from the lowest bit; a code may lie in two words.

    Args:
        words: ``[W, N]`` unsigned 32-bit integers; W * 32 is a multiple of ``bits``.
        bits: of a code, 1 to 8.

    Returns:
        ``[W * 32 / bits, N]`` int32.
    """
    begin = np.arange(len(words) * 32 // bits) * bits
    low, shift = begin // 32, (begin % 32).astype(np.uint64)[:, None]
    wide = words.astype(np.uint64)
    # The last word has no next one, and no code that needs it.
    pairs = wide | (np.concatenate([wide[1:], np.zeros_like(wide[:1])]) << np.uint64(32))
    return ((pairs[low] >> shift) & np.uint64((1 << bits) - 1)).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class BlockScaledRows:
    """Float8 times the scale of its block: ``weight`` U8 ``[O, I]``, ``scale`` ``[ceil(O/block), ceil(I/block)]``.

    With ``is_integer`` the bytes are signed integers, from which ``zero`` I8, of the shape of ``scale``, is subtracted.
    """

    weight: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: str
    is_integer: bool = False
    zero: Tensor | None = None

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        high, wide = self.block
        codes = bits_of(files, self.weight.narrow(0, begin, end))
        numbers = codes.view(np.int8).astype(np.float32) if self.is_integer else FLOAT8[codes]
        first = begin // high
        scale = scale_numbers(files, self.scale.narrow(0, first, -(-end // high)))
        rows = np.arange(begin, end) // high - first
        columns = np.arange(self.weight.shape[1]) // wide
        if self.zero is not None:
            zeros = bits_of(files, self.zero.narrow(0, first, -(-end // high))).view(np.int8).astype(np.float32)
            numbers = numbers - zeros[rows][:, columns]
        with np.errstate(over="ignore", invalid="ignore"):
            return rounded(numbers * scale[rows][:, columns], self.dtype)


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Integers of ``bits`` bits, packed along the inputs from the lowest bit, times the scale of their group.

    ``packed`` I32 ``[O, ceil(I * bits / 32)]``, ``scale`` ``[O, G]``; a code is the integer plus 2^(bits - 1). Zero
    points ``zero`` I32 ``[ceil(O * bits / 32), G]`` are packed along the outputs; ``index`` I32 ``[I]`` has the groups
    of the inputs.
    """

    packed: Tensor
    scale: Tensor
    bits: int
    columns: int
    dtype: str
    zero: Tensor | None = None
    index: Tensor | None = None

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        codes_IO = unpack(bits_of(files, self.packed.narrow(0, begin, end)).T, self.bits)[: self.columns]
        scale_OG = scale_numbers(files, self.scale.narrow(0, begin, end))
        count = scale_OG.shape[1]
        groups_I = input_groups(files, self.index, self.columns, self.columns // count, count)
        # The offset of codes is that of zero points, too.
        zeros_OG = np.full((end - begin, count), 1 << (self.bits - 1), np.int32)
        if self.zero is not None:
            first = begin * self.bits // 32
            words = bits_of(files, self.zero.narrow(0, first, -(-end * self.bits // 32)))
            skipped = begin - first * 32 // self.bits
            zeros_OG = unpack(words, self.bits)[skipped : skipped + end - begin]
        with np.errstate(all="ignore"):
            centered = (codes_IO.T - zeros_OG[:, groups_I]).astype(np.float32)
            return rounded(centered * scale_OG[:, groups_I], self.dtype)


@dataclass(frozen=True, kw_only=True)
class Float4Rows:
    """Float4, two in a byte, times the scale of their group: ``packed`` U8 ``[O, I/2]``, ``scale`` U8 ``[O, G]``.

    Scales are float8 that are divided by ``divisor`` F32 ``[1]`` (NVFP4), or without one exponents (MXFP4).
    """

    packed: Tensor
    scale: Tensor
    divisor: Tensor | None
    dtype: str

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        codes = bits_of(files, self.packed.narrow(0, begin, end))
        numbers_OGI = FLOAT4[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(
            *codes.shape[:1], self.scale.shape[1], -1
        )
        scale = self.scale.narrow(0, begin, end)
        with np.errstate(all="ignore"):
            if self.divisor is None:
                scale_OG = scale_numbers(files, scale)
            else:
                scale_OG = FLOAT8[bits_of(files, scale)] / floats_of(files, self.divisor)[0]
            return rounded((numbers_OGI * scale_OG[..., None]).reshape(end - begin, -1), self.dtype)


def input_groups(
    files: SourceFiles, index: Tensor | None, inputs: int, group_size: int, count: int
) -> NDArray[np.intp]:
    """The group of each input, ``[I]``.

    Args:
        files: the open files.
        index: the groups, I32 ``[I]``; None: consecutive inputs have one.
        inputs: number of inputs I.
        group_size: inputs of a group, where there is no index.
        count: number of groups.

    Raises:
        CorruptError: the index names a missing group.
    """
    if index is None:
        return np.arange(inputs) // group_size
    groups = bits_of(files, index).view(np.int32).astype(np.intp)
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise CorruptError(f"g_idx: names a group beyond {count}")
    return groups


@dataclass(frozen=True, kw_only=True)
class MicroscaledRows:
    """Float4 with a scale for 32 values: ``blocks`` U8 ``[E, O, I/32, 16]``, ``scales`` U8 ``[E, O, I/32]``."""

    blocks: Tensor
    scales: Tensor
    dtype: str

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``; a row is an output of an expert."""
        outputs = self.blocks.shape[1]
        parts = []
        # A chunk of rows may begin in one expert and end in another.
        for expert in range(begin // outputs, -(-end // outputs)):
            first, last = max(0, begin - expert * outputs), min(outputs, end - expert * outputs)
            pair = (
                tensor.narrow(0, expert, expert + 1).narrow(1, first, last) for tensor in (self.blocks, self.scales)
            )
            blocks, scales = (bits_of(files, tensor)[0] for tensor in pair)
            numbers = FLOAT4[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, 32)
            with np.errstate(over="ignore"):
                values = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127)
            parts.append(values.reshape(last - first, -1))
        return rounded(np.concatenate(parts), self.dtype)


@dataclass(frozen=True, kw_only=True)
class GptqRows:
    """GPTQ: ``qweight`` ``[I*b/32, O]``, ``qzeros`` ``[G, O*b/32]``, ``scales`` ``[G, O]``, ``index`` ``[I]`` or None.

    ``zero_offset`` is added to the stored zero points; a group has ``group_size`` inputs where there is no index.
    """

    name: str
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    index: Tensor | None
    bits: int
    group_size: int
    zero_offset: int
    dtype: str

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``.

        Raises:
            CorruptError: the index names a missing group.
            UnsupportedError: a zero point that programs read differently.
        """
        outputs = self.scales.shape[1]
        # Zero points are packed in groups of up to 32 outputs, so complete groups are read.
        packed = min(outputs, -(-end // 32) * 32)
        codes_IO = unpack(bits_of(files, self.qweight.narrow(1, begin, end)), self.bits)
        words = bits_of(files, self.qzeros.narrow(1, begin * self.bits // 32, packed * self.bits // 32))
        zeros_GO = unpack(words.T, self.bits).T[:, : end - begin]
        if self.zero_offset and (zeros_GO == (1 << self.bits) - 1).any():
            raise UnsupportedError(
                f"{short_name(self.name)}.qzeros: has the largest number of {self.bits} bits, which programs read as "
                f"the zero point 0 or {1 << self.bits}; convert the weights to the format gptq_v2"
            )
        groups_I = input_groups(files, self.index, len(codes_IO), self.group_size, self.scales.shape[0])
        scales_GO = floats_of(files, self.scales.narrow(1, begin, end))
        centered = (codes_IO - (zeros_GO + self.zero_offset)[groups_I]).astype(np.float32)
        with np.errstate(all="ignore"):
            return rounded((centered * scales_GO[groups_I]).T, self.dtype)


@dataclass(frozen=True, kw_only=True)
class AwqRows:
    """AWQ's gemm layout: ``qweight`` ``[I, O/8]``, ``qzeros`` ``[G, O/8]``, ``scales`` ``[G, O]``; four bits."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    group_size: int
    dtype: str

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        codes_IO, zeros_GO = (
            self._codes(bits_of(files, tensor.narrow(1, begin // 8, -(-end // 8))))[:, : end - begin]
            for tensor in (self.qweight, self.qzeros)
        )
        groups_I = np.arange(len(codes_IO)) // self.group_size
        scales_GO = floats_of(files, self.scales.narrow(1, begin, end))
        centered = (codes_IO - zeros_GO[groups_I]).astype(np.float32)
        with np.errstate(all="ignore"):
            return rounded((centered * scales_GO[groups_I]).T, self.dtype)

    @staticmethod
    def _codes(words: Words) -> Codes:
        """``[N, W]`` words as ``[N, 8 W]`` codes in the order of the outputs."""
        nibbles = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
        codes = np.empty(nibbles.shape, np.int32)
        codes[:, :, list(AWQ_COLUMNS)] = nibbles
        return codes.reshape(len(words), -1)
