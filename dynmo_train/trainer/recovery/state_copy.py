"""A copy of a rank's state as one block of bytes in host memory: it is sent, received and read as it is.

::

    | 8 bytes: length of the header | header, JSON | padding | item 0: tensors | item 1: tensors | ...

The header has everything but the tensors: the progress of the run, and of each item its steps, and name, dtype, shape
and place of each tensor. Places are multiples of 64 bytes, so that a tensor is a view of the block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._common.document import parse_json
from ...optim.item_state import ItemState

_ALIGNMENT = 64
_LENGTH_BYTES = 8
# Number of a branch of the run, and number of completed steps. A loss of ranks and a rollback each begin another
# branch, which repeats steps of earlier ones: a copy of it precedes theirs, also of later steps.
Tag = tuple[int, int]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """The copy of a rank's state after a step.

    Attributes:
        header: ``tag``, ``progress``, and ``items``: name -> ``begin``, ``end`` (bytes), ``steps`` and ``tensors``.
        payload: uint8 ``[bytes]`` on the CPU, to which the places refer.
    """

    header: Mapping[str, Any]
    payload: torch.Tensor

    @property
    def tag(self) -> Tag:
        """Branch and step."""
        branch, step = self.header["tag"]
        return branch, step

    def entry(self, item: str) -> Mapping[str, Any]:
        """The header's entry of an item."""
        entry: Mapping[str, Any] = self.header["items"][item]
        return entry

    def item_bytes(self, item: str) -> torch.Tensor:
        """The tensors of an item, uint8 ``[bytes]``: a view."""
        entry = self.entry(item)
        return self.payload[entry["begin"] : entry["end"]]


def item_state(entry: Mapping[str, Any], content: torch.Tensor) -> ItemState:
    """The state of an item; its tensors are views of ``content``.

    Args:
        entry: entry of the item in a header.
        content: its tensors, uint8 ``[bytes]``.
    """
    tensors = {}
    for each in entry["tensors"]:
        dtype: torch.dtype = getattr(torch, each["dtype"])
        part = content[each["begin"] : each["begin"] + each["bytes"]]
        tensors[each["name"]] = part.view(dtype).reshape(each["shape"])
    return ItemState(tensors=tensors, steps=entry["steps"])


def _entry(state: ItemState, begin: int) -> dict[str, Any]:
    """The header's entry of an item whose tensors begin at ``begin``; the places of tensors count from there."""
    tensors, at = [], 0
    for name, tensor in state.tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "begin": at, "bytes": size})
        at += _aligned(size)
    return {"begin": begin, "end": begin + at, "steps": dict(state.steps), "tensors": tensors}


@dataclass(frozen=True, kw_only=True)
class CopyLayout:
    """The header of a copy, encoded, and the bytes of the whole block.

    Attributes:
        header: as in :class:`StateCopy`.
        encoded: its JSON.
        num_bytes: bytes of the block.
    """

    header: Mapping[str, Any]
    encoded: bytes
    num_bytes: int


def plan_layout(states: Mapping[str, ItemState], tag: Tag, progress: Mapping[str, Any]) -> CopyLayout:
    """The layout of a copy of ``states``, by item.

    Args:
        states: item -> state.
        tag: generation and step.
        progress: state of the run apart from its items, as a JSON document.
    """
    items, begin = {}, 0
    for item, state in states.items():
        items[item] = _entry(state, begin)
        begin = items[item]["end"]
    header = {"tag": list(tag), "progress": dict(progress), "items": items}
    encoded = json.dumps(header).encode()
    return CopyLayout(header=header, encoded=encoded, num_bytes=_aligned(_LENGTH_BYTES + len(encoded)) + begin)


def write_copy(block: torch.Tensor, layout: CopyLayout, states: Mapping[str, ItemState]) -> StateCopy:
    """Copy states into a block.

    Args:
        block: uint8 ``[layout.num_bytes]`` on the CPU.
        layout: layout of ``states``.
        states: item -> state, on any device.
    """
    head = len(layout.encoded).to_bytes(_LENGTH_BYTES, "little") + layout.encoded
    block[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    copy = StateCopy(header=layout.header, payload=block[_aligned(len(head)) :])
    for item, state in states.items():
        views = item_state(copy.entry(item), copy.item_bytes(item)).tensors
        for name, tensor in state.tensors.items():
            views[name].copy_(tensor.detach())
    return copy


def read_copy(block: torch.Tensor) -> StateCopy:
    """The copy in a received block, uint8 ``[bytes]``."""
    length = int.from_bytes(bytes(block[:_LENGTH_BYTES].tolist()), "little")
    header = parse_json(block[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes())
    return StateCopy(header=header, payload=block[_aligned(_LENGTH_BYTES + length) :])


def newest_complete(
    inventories: Sequence[Sequence[tuple[Tag, Sequence[str]]]], items: Sequence[str]
) -> tuple[Tag, dict[str, tuple[int, ...]]] | None:
    """The newest tag whose copies together have all items.

    Args:
        inventories: of each rank the tag and the items of each of its copies.
        items: names of all items.

    Returns:
        The tag, and the ranks that have each item. None without a complete tag.
    """
    for tag in sorted({tag for copies in inventories for tag, _ in copies}, reverse=True):
        by_rank = [{name for of_copy, names in copies if of_copy == tag for name in names} for copies in inventories]
        holders = {name: tuple(rank for rank, names in enumerate(by_rank) if name in names) for name in items}
        if all(holders.values()):
            return tag, holders
    return None
