"""Disjoint sets of documents; the earliest document represents its set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 20

Numbers = npt.NDArray[np.integer[Any]]


def number_type(count: int) -> type[np.signedinteger[Any]]:
    """The integer type for numbers of ``count`` documents."""
    # Files of components have this type; their readers compute it from the same count.
    return np.int32 if count < 1 << 31 else np.int64


class UnionFind:
    """Disjoint sets over ``0 .. count-1``; 8 bytes per document, 4 below 2^31 documents.

    Attributes:
        parents: parent of each document ``[count]``; a root is its own parent and the smallest number of its set.
    """

    def __init__(self, count: int) -> None:
        self.parents: npt.NDArray[np.signedinteger] = np.arange(count, dtype=number_type(count))

    def find(self, index: int) -> int:
        """The document that represents the set of ``index``."""
        parents = self.parents
        root = index
        while (above := int(parents[root])) != root:
            root = above
        # Path compression: each document on the way refers to the root directly.
        while (above := int(parents[index])) != root:
            parents[index], index = root, above
        return root

    def join(self, first: int, second: int) -> None:
        """Merge the sets of the documents ``first`` and ``second``."""
        a, b = self.find(first), self.find(second)
        if a != b:
            # By number, not by size: the smallest number is the root, whatever the order of the pairs is.
            self.parents[max(a, b)] = min(a, b)

    def union_pairs(self, first: Numbers, second: Numbers) -> None:
        """Merge the sets of the documents of each pair.

        Args:
            first: document numbers ``[pairs]``.
            second: document numbers ``[pairs]``.
        """
        parents = self.parents
        # numpy applies ``minimum.at`` to roots of this moment. Where a root gets several smaller parents, only the
        # smallest one remains, so the pairs are checked again until all have one root.
        while len(first):
            first, second = self._roots(first), self._roots(second)
            apart = first != second
            first, second = first[apart], second[apart]
            np.minimum.at(parents, np.maximum(first, second), np.minimum(first, second).astype(parents.dtype))

    def _roots(self, indices: Numbers) -> Numbers:
        parents = self.parents
        above = parents[indices]
        while not np.array_equal(top := parents[above], above):  # path halving of all chains
            parents[indices] = top
            above = parents[indices]
        return above

    def flatten(self) -> None:
        """Make ``parents`` refer to the root of each document directly."""
        parents = self.parents
        for begin in range(0, len(parents), BLOCK):  # roots precede their members, so earlier blocks are flat
            block = parents[begin : begin + BLOCK]
            while (above := parents[block]).tobytes() != block.tobytes():
                block[:] = above

    def is_connected(self, first: int, second: int) -> bool:
        """Whether the documents ``first`` and ``second`` are in one set."""
        return self.find(first) == self.find(second)

    def non_first_members(self) -> tuple[npt.NDArray[np.uint8], int, int]:
        """The documents that are not the first of their set.

        Returns:
            1 or 0 per document ``[count]``, uint8; the number of sets with several documents; the size of the largest.
        """
        self.flatten()
        parents = self.parents
        moved = np.zeros(len(parents), dtype=np.uint8)
        for begin in range(0, len(parents), BLOCK):
            block = parents[begin : begin + BLOCK]
            moved[begin : begin + BLOCK] = block != np.arange(begin, begin + len(block))
        _, counts = np.unique(parents[moved.view(np.bool_)], return_counts=True)
        return moved, len(counts), int(counts.max(initial=0)) + bool(len(counts))


class SparseUnionFind:
    """Disjoint sets of a few documents out of many, in a dictionary: faster per operation, larger per document."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, index: int) -> int:
        """The document that represents the set of ``index``."""
        parents = self._parents
        above = parents.get(index, index)
        while above != index:
            top = parents.get(above, above)
            parents[index] = top
            index, above = above, top
        return index

    def join(self, first: int, second: int) -> None:
        """Merge the sets of the documents ``first`` and ``second``."""
        a, b = self.find(first), self.find(second)
        if a != b:
            self._parents[max(a, b)] = min(a, b)

    def is_connected(self, first: int, second: int) -> bool:
        """Whether the documents ``first`` and ``second`` are in one set."""
        return self.find(first) == self.find(second)
