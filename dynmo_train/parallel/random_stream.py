"""Random numbers of items without a generator: a hash of (key, position), in integer operations on the device.

A stage makes a key of 128 bits for each item and microbatch, a function of (seed, step, global microbatch index, item),
and activates an :class:`ItemStream` while the item runs. The n-th draw of an item hashes the positions from ``n`` on::

    key [2] int64 ----------------------------+
    positions  (scope, draw, 0, 1, 2, ...) ---+--> 64-bit words --> four 16-bit numbers each --> masks

The *scope* decides whether all tensor-parallel ranks draw the same numbers, or each rank its own (``TensorRegion``).

Nothing is read from the device, no state is advanced on the host, and a key is data: a captured CUDA graph draws other
numbers with another key. A recomputed item activates the same stream again, and draws the same numbers. On CPU,
the forward takes half of the time of ``F.dropout`` (``tests/benchmarks/train_dropout.md``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# SplitMix64 (Steele, Lea and Flood 2014): the increment, and the multipliers of Stafford's 13th finalizer. As signed
# 64-bit integers, because torch has few operations on unsigned ones; products wrap around all the same.
INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIERS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
LEVELS = 1 << 16
NUMBERS_PER_WORD = 4
# A position has 40 bits within a draw, 10 bits for the draw, and the rest for the scope.
POSITION_BITS, DRAW_BITS = 40, 10


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign, which torch's operator copies."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def hash_words(words: torch.Tensor, middle: torch.Tensor | int = 0) -> torch.Tensor:
    """Replace 64-bit words by their hashes, in place.

    Args:
        words: int64, of any shape.
        middle: added between the two rounds: other words than those of a second key are then no shifted copy of them.

    Returns:
        ``words``.
    """
    words.bitwise_xor_(_shifted(words, 30)).mul_(MULTIPLIERS[0]).add_(middle)
    words.bitwise_xor_(_shifted(words, 27)).mul_(MULTIPLIERS[1])
    return words.bitwise_xor_(_shifted(words, 31))


def hashed_numbers(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return 16-bit numbers by a seed, outside of items: int16 ``[count]``, uniform over all values.

    Args:
        count: Of the result.
        seed: 63 bits, as of ``stable_seed``.
        device: Of the result.
    """
    positions = torch.arange(-(-count // NUMBERS_PER_WORD), dtype=torch.int64, device=device)
    return hash_words(positions.mul_(INCREMENT).add_(seed)).view(torch.int16)[:count]


class ItemStream:
    """The random numbers of one run of an item.

    Args:
        key: int64 ``[2]`` on the device of the item.
        seeds_generator: Whether the item also draws from torch's generator, which is then seeded around it.

    Attributes:
        draws: Number of draws so far.
        scope: 0 where all tensor-parallel ranks draw the same numbers.
    """

    def __init__(self, key: torch.Tensor, *, seeds_generator: bool = False) -> None:
        self.key, self.seeds_generator = key, seeds_generator
        self.draws, self.scope = 0, 0

    def next_draw(self) -> int:
        """Return the first position of the next draw."""
        begin = ((self.scope << DRAW_BITS) + self.draws) << POSITION_BITS
        self.draws += 1
        return begin

    def next_words(self, count: int) -> torch.Tensor:
        """Return the next draw: int64 ``[count]``, uniform over all 64-bit words."""
        begin = self.next_draw()
        positions = torch.arange(begin, begin + count, dtype=torch.int64, device=self.key.device)
        # Inductor computes products of positions and constants as integers without bounds, before it makes code.
        increment = (self.key[0] & 0) | INCREMENT if torch.compiler.is_compiling() else INCREMENT
        return hash_words(positions.mul_(increment).add_(self.key[0]), self.key[1])


class _Active:
    """The stream of the item that runs now."""

    stream: ItemStream | None = None


_ACTIVE = _Active()


def active_stream() -> ItemStream | None:
    """Return the stream of the item that runs now; None outside of items."""
    return _ACTIVE.stream


@contextmanager
def drawing_from(stream: ItemStream | None) -> Iterator[None]:
    """Run an item, or its recomputation, with ``stream`` active."""
    outer, _ACTIVE.stream = _ACTIVE.stream, stream
    try:
        yield
    finally:
        _ACTIVE.stream = outer


class StreamKeys:
    """The keys of the items of a stage in one step.

    Args:
        seed: Seed of the run.
        names: Items of the stage.
        device: Device of the items.
    """

    def __init__(self, seed: int, names: Sequence[str], device: torch.device) -> None:
        words = [word for name in names for word in _two_words(seed, name)]
        self._items = torch.tensor(words, dtype=torch.int64).view(1, len(names), 2)
        self._device, self._first = device, 0
        self._keys: Sequence[torch.Tensor] = ()

    def begin_step(self, step: int, microbatches: range) -> None:
        """Make the keys of a step: one copy to the device, which waits for nothing.

        Args:
            step: Optimizer step.
            microbatches: Global indices of the microbatches of this replica.
        """
        # Hashed on the host: a few thousand words, for which kernels would take longer.
        indices = torch.arange(microbatches.start, microbatches.stop, dtype=torch.int64)
        counters = hash_words(hash_words(indices.add_(1).mul_(INCREMENT)).add_(step))
        keys = hash_words(self._items + counters.view(-1, 1, 1))
        if self._device.type == "cuda":
            keys = keys.pin_memory()
        # All views in one operation; an index would be two for each run of an item.
        self._keys = keys.to(self._device, non_blocking=True).view(-1, 2).unbind()
        self._first = microbatches.start

    def key(self, microbatch: int, position: int) -> torch.Tensor:
        """Return the key of the item at ``position`` for a global microbatch index: int64 ``[2]`` on the device."""
        return self._keys[(microbatch - self._first) * self._items.shape[1] + position]


def _two_words(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}\x1f{name}".encode(), digest_size=16).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:], "little", signed=True),
    )


class _DropoutWithMask(torch.autograd.Function):
    """Dropout by a given mask; only the mask is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        # The same product as in the backward: torch has it as one kernel for both.
        output: torch.Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grads[0], mask, ctx.scale), None, None


def item_dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Zero elements with probability ``p`` and scale the others, as ``F.dropout``, by the item's random numbers.

    The probability is rounded to a multiple of 2^-16, and the scale is that of the rounded one, so that the mean stays.
    Outside of items, as where a module is called by itself, ``F.dropout`` draws from torch's generator.

    Args:
        x: Of any shape, floating point.
        p: Dropout probability, 0 to 1.
        training: False returns ``x``.
    """
    if not training or p == 0.0:
        return x
    stream = active_stream()
    if stream is None:
        return F.dropout(x, p)
    dropped = min(round(p * LEVELS), LEVELS - 1)
    words = stream.next_words(-(-x.numel() // NUMBERS_PER_WORD))
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    mask = numbers >= dropped - LEVELS // 2
    dropped_x: torch.Tensor = _DropoutWithMask.apply(x, mask, LEVELS / (LEVELS - dropped))  # type: ignore[no-untyped-call]
    return dropped_x


class BlockDraw(NamedTuple):
    """A draw of a matrix of dropout masks whose blocks are computed one by one.

    Attributes:
        key: Int64 ``[2]``.
        begin: First position.
        dropped: Of 2^16 numbers, how many drop an element.
    """

    key: torch.Tensor
    begin: int
    dropped: int


def draw_blocks(p: float, device: torch.device) -> BlockDraw:
    """Return the next draw of the item; outside of items its key is of torch's generator.

    Args:
        p: Dropout probability, 0 to 1, which is rounded as by :func:`item_dropout`.
        device: Of the masks.
    """
    stream, dropped = active_stream(), min(round(p * LEVELS), LEVELS - 1)
    if stream is None:
        return BlockDraw(torch.randint(-(1 << 63), (1 << 63) - 1, (2,), device=device), 0, dropped)
    return BlockDraw(stream.key, stream.next_draw(), dropped)


def block_mask(draw: BlockDraw, rows: torch.Tensor, columns: slice, width: int) -> torch.Tensor:
    """Return which elements of a block stay: bool, the shape of ``rows`` and the number of columns.

    A number is a function of its row and column, and not of the block.

    Args:
        draw: Of the matrix.
        rows: Int64 numbers of the rows, of any shape.
        columns: Of the block.
        width: Number of columns of the matrix.
    """
    first, last = columns.start // NUMBERS_PER_WORD, -(-columns.stop // NUMBERS_PER_WORD)
    of_row = torch.arange(draw.begin + first, draw.begin + last, dtype=torch.int64, device=rows.device)
    positions = rows[..., None] * -(-width // NUMBERS_PER_WORD) + of_row
    words = hash_words(positions.mul_(INCREMENT).add_(draw.key[0]), draw.key[1])
    skipped = columns.start - first * NUMBERS_PER_WORD
    numbers = words.view(torch.int16)[..., skipped : skipped + columns.stop - columns.start]
    return numbers >= draw.dropped - LEVELS // 2


def normal(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return standard normal numbers of the item, float32 ``shape``, by Box and Muller's transform.

    Outside of items torch's generator draws them.

    Args:
        shape: Of the result.
        device: Of the result.
    """
    stream = active_stream()
    if stream is None:
        return torch.randn(*shape, device=device)
    # 24 bits for the radius and 24 for the angle. The radius is of (0, 1]: the logarithm of 0 does not exist.
    words = stream.next_words(math.prod(shape))
    radius = (_shifted(words, 40) + 1).float() * 2.0**-24
    angle = words.bitwise_and_((1 << 24) - 1).float() * (2.0 * math.pi * 2.0**-24)
    return (radius.log_().mul_(-2.0).sqrt_() * angle.cos_()).view(*shape)


def shared_normal(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return numbers as :func:`normal` does, the same ones on all tensor-parallel ranks.

    For what the ranks decide about all tokens: with sequence parallelism each draws other numbers behind a region.

    Args:
        shape: Of the result.
        device: Of the result.
    """
    stream = active_stream()
    if stream is None:
        return normal(shape, device)
    scope, stream.scope = stream.scope, 0
    try:
        return normal(shape, device)
    finally:
        stream.scope = scope


_OF_TORCH_WITH_GENERATOR = (
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoderLayer,
    nn.RNNBase,
    nn.RReLU,
)
_KNOWN_PACKAGES = ("dynmo_train", "torch", "typing", "builtins", "abc")


def draws_from_generator(module: nn.Module) -> bool:
    """Whether an item may draw from torch's generator, which must then be seeded before each of its runs.

    Attention with dropout does: the kernels of ``scaled_dot_product_attention`` accept no other numbers. Modules of
    other packages may.

    Args:
        module: The item.
    """
    return any(
        isinstance(part, _OF_TORCH_WITH_GENERATOR)
        or getattr(part, "attention_dropout", 0.0) > 0.0
        or any(base.__module__.partition(".")[0] not in _KNOWN_PACKAGES for base in type(part).__mro__)
        for part in module.modules()
    )
