"""Compares two checkpoints of any formats and topologies, tensor by tensor, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .._common.console import Tick
from .._common.document import short_repr
from ..huggingface.source_config import stated_fields
from ..io.reading import Reader, open_sources
from ..native.checkpoint import NativeCheckpoint, has_vocabulary_rows
from ..tensors.copy_plan import OutputTensor, sources
from ..tensors.equality import Numbers, aligned, as_numbers
from ..tensors.tiled_copy import panels

# Fields that change no logit of a trained model: losses, and the number of positions, which a shape states elsewhere.
_TRAINING_FIELDS = ("max_position_embeddings", "moe_aux_loss_coeff", "moe_routing")
SETTING = "setting"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor or a setting of the model that differs.

    Attributes:
        name: of the tensor; of a setting, ``model.`` and its field.
        kind: ``only-left``, ``only-right``, ``shape``, ``dtype``, ``values`` or ``setting``.
        message: one sentence.
        elements: number of elements that differ.
        max_abs: largest absolute difference of an element.
    """

    name: str
    kind: str
    message: str
    elements: int = 0
    max_abs: float = 0.0


def differences(
    left: NativeCheckpoint, right: NativeCheckpoint, roles: tuple[str, ...], atol: float, tick: Tick
) -> Iterator[Difference]:
    """Yield every setting of the model and every tensor that differs.

    Equal tensors compute something else with another rotary base, epsilon or number of experts per token. Padding rows
    of the vocabulary are not compared. Where only one side has masks, they are applied to its weights, so that a pruned
    checkpoint equals its dense export.

    Args:
        left: one checkpoint.
        right: the other checkpoint.
        roles: the roles of the tensors to compare, as in a manifest.
        atol: largest absolute difference of an element that counts as equal; a NaN differs from any number.
        tick: advances a progress display, in MB.
    """
    yield from _settings(left, right)
    names = [dict.fromkeys(side.names(*_compared_roles(left, right, roles))) for side in (left, right)]
    pairs = dict(comparable(left, right, roles))
    for name in names[0] | names[1]:
        if name not in names[1]:
            yield Difference(name=name, kind="only-left", message="is on the left only")
        elif name not in names[0]:
            yield Difference(name=name, kind="only-right", message="is on the right only")
        else:
            yield from _compare(name, *pairs[name], atol)
            tick(pairs[name][0].content.num_bytes / 1e6, name)


def _settings(left: NativeCheckpoint, right: NativeCheckpoint) -> Iterator[Difference]:
    one, other = (stated_fields(side.manifest["model"]) for side in (left, right))
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name) and name not in _TRAINING_FIELDS:
            pair = f"{short_repr(one.get(name))} on the left, {short_repr(other.get(name))} on the right"
            yield Difference(name=f"model.{name}", kind=SETTING, message=pair)


def comparable(
    left: NativeCheckpoint, right: NativeCheckpoint, roles: tuple[str, ...]
) -> Iterator[tuple[str, tuple[OutputTensor, OutputTensor]]]:
    """Yield each tensor that both checkpoints have, as they are compared: without padding, with masks of one side.

    Args:
        left: one checkpoint.
        right: the other checkpoint.
        roles: the roles of the tensors to compare, as in a manifest.
    """
    masked = bool(left.names("mask")) != bool(right.names("mask"))
    compared = _compared_roles(left, right, roles)
    on_the_right = set(right.names(*compared))
    for name in left.names(*compared):
        if name in on_the_right:
            yield name, (_without_padding(left, name, masked), _without_padding(right, name, masked))


def _compared_roles(left: NativeCheckpoint, right: NativeCheckpoint, roles: tuple[str, ...]) -> tuple[str, ...]:
    # Where one side has masks, their effect is compared instead: see ``differences``.
    both_masked = bool(left.names("mask")) == bool(right.names("mask"))
    return tuple(role for role in roles if role != "mask" or both_masked)


def _without_padding(checkpoint: NativeCheckpoint, name: str, masked: bool) -> OutputTensor:
    model, entry = checkpoint.manifest["model"], checkpoint.manifest["tensors"][name]
    content, mask = checkpoint.tensors[name], checkpoint.tensors.get(f"{name}.mask") if masked else None
    shape = tuple(entry["shape"])
    if has_vocabulary_rows(name):
        shape = (model["vocab_size"], *shape[1:])
        content = content.narrow(0, 0, shape[0])
        mask = None if mask is None else mask.narrow(0, 0, shape[0])
    return OutputTensor(key=name, shape=shape, content=content, mask=mask)


def _compare(name: str, left: OutputTensor, right: OutputTensor, atol: float) -> Iterator[Difference]:
    if left.shape != right.shape:
        yield Difference(
            name=name, kind="shape", message=f"{list(left.shape)} on the left, {list(right.shape)} on the right"
        )
        return
    dtypes = left.content.dtype, right.content.dtype
    if dtypes[0] != dtypes[1]:
        yield Difference(name=name, kind="dtype", message=f"{dtypes[0]} on the left, {dtypes[1]} on the right")
    count, largest = 0, 0.0
    with open_sources(sources([left, right])) as files:
        for one, other in aligned(numbers_of(left, Reader(files)), numbers_of(right, Reader(files))):
            if np.array_equal(one, other):
                continue
            # In float64: numpy has no difference of booleans, and that of unsigned integers wraps.
            with np.errstate(invalid="ignore"):
                gap = np.abs(one.astype(np.float64) - other.astype(np.float64))
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            # Negated, because the gap to a NaN is NaN: such an element differs.
            far = ~same & ~(gap <= atol)
            count += int(far.sum())
            if far.any():
                largest = max(largest, float(np.nan_to_num(gap[far], nan=math.inf).max()))
    if count:
        total = math.prod(left.shape)
        message = f"{count:,} of {total:,} elements differ by more than {atol:g}, by at most {largest:g}"
        yield Difference(name=name, kind="values", message=message, elements=count, max_abs=largest)


def numbers_of(tensor: OutputTensor, reader: Reader) -> Iterator[Numbers]:
    """The panels of a tensor of any shape as flat arrays of numbers."""
    for panel in panels(tensor, reader):
        yield as_numbers(panel.reshape(-1), tensor.content.dtype)
