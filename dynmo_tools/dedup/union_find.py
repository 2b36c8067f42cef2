"""Disjoint sets of documents, the earliest document standing for its set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 20

Numbers = npt.NDArray[np.integer[Any]]


def number_type(count: int) -> type[np.signedinteger[Any]]:
    """What holds the numbers of ``count`` documents."""
    return np.int32 if count < 1 << 31 else np.int64


class UnionFind:
    """Disjoint sets over ``0 .. count-1``; 8 bytes a document, 4 below two thousand million of them."""

    def __init__(self, count: int) -> None:
        self.parents: npt.NDArray[np.signedinteger] = np.arange(count, dtype=number_type(count))

    def find(self, index: int) -> int:
        """The document that stands for the set of ``index``."""
        parents = self.parents
        root = index
        while (above := int(parents[root])) != root:
            root = above
        while (above := int(parents[index])) != root:
            parents[index], index = root, above
        return root

    def join(self, first: int, second: int) -> None:
        """Make the sets of both documents one; its earliest document stands for it."""
        a, b = self.find(first), self.find(second)
        if a != b:
            self.parents[max(a, b)] = min(a, b)

    def union_pairs(self, first: Numbers, second: Numbers) -> None:
        """As ``join`` of each pair of two arrays of the same length."""
        parents = self.parents
        while len(first):
            first, second = self._roots(first), self._roots(second)
            apart = first != second
            first, second = first[apart], second[apart]
            np.minimum.at(parents, np.maximum(first, second), np.minimum(first, second).astype(parents.dtype))

    def _roots(self, indices: Numbers) -> Numbers:
        parents = self.parents
        above = parents[indices]
        while not np.array_equal(top := parents[above], above):  # all at once: a chain's length halves each time
            parents[indices] = top
            above = parents[indices]
        return above

    def flatten(self) -> None:
        """Make ``parents`` state of each document the one that stands for its set."""
        parents = self.parents
        for begin in range(0, len(parents), BLOCK):  # a root is never behind its members, so blocks before are done
            block = parents[begin : begin + BLOCK]
            while (above := parents[block]).tobytes() != block.tobytes():
                block[:] = above

    def is_connected(self, first: int, second: int) -> bool:
        """Whether both documents are in one set."""
        return self.find(first) == self.find(second)

    def non_first_members(self) -> tuple[npt.NDArray[np.uint8], int, int]:
        """Which documents are behind the first of their set (1, else 0), the number of sets with such, the largest."""
        self.flatten()
        parents = self.parents
        moved = np.zeros(len(parents), dtype=np.uint8)
        for begin in range(0, len(parents), BLOCK):
            block = parents[begin : begin + BLOCK]
            moved[begin : begin + BLOCK] = block != np.arange(begin, begin + len(block))
        _, counts = np.unique(parents[moved.view(np.bool_)], return_counts=True)
        return moved, len(counts), int(counts.max(initial=0)) + bool(len(counts))


class SparseUnionFind:
    """Disjoint sets of a few documents out of many, in objects: quicker one by one than arrays, and heavier."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, index: int) -> int:
        """The document that stands for the set of ``index``."""
        parents = self._parents
        above = parents.get(index, index)
        while above != index:
            top = parents.get(above, above)
            parents[index] = top
            index, above = above, top
        return index

    def join(self, first: int, second: int) -> None:
        """Make the sets of both documents one; its earliest document stands for it."""
        a, b = self.find(first), self.find(second)
        if a != b:
            self._parents[max(a, b)] = min(a, b)

    def is_connected(self, first: int, second: int) -> bool:
        """Whether both documents are in one set."""
        return self.find(first) == self.find(second)
