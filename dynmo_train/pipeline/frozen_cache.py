"""Cache of the frozen prefix's outputs by sample, so that repeated samples skip it; bounded, oldest entries dropped."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

import torch

# Inputs of losses alone; weights of tokens may differ by step.
OF_LOSSES = ("labels", "loss_mask")


def sample_hashes(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a hash of each sample's inputs except its labels and their weights, int64 ``[microbatches * B]``.

    Args:
        inputs: Tensors of the batch by name, ``[microbatches * B, ...]``.
    """
    arrays = [tensor.cpu().contiguous().numpy() for name, tensor in sorted(inputs.items()) if name not in OF_LOSSES]
    hashes = [
        # 63 bits, so that the hash is a non-negative int64.
        int.from_bytes(hashlib.blake2b(b"".join(row.tobytes() for row in rows), digest_size=8).digest(), "little") >> 1
        for rows in zip(*arrays, strict=True)
    ]
    return torch.tensor(hashes, dtype=torch.int64)


class FrozenPrefixCache:
    """Outputs of the frozen items of a rank's stages, sample by sample.

    Args:
        limit_bytes: Size of all outputs together.

    Attributes:
        num_bytes: Current size.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.num_bytes = limit_bytes, 0
        self._rows: OrderedDict[tuple[int, int], dict[str, torch.Tensor]] = OrderedDict()

    def get(self, stage: int, keys: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Return the outputs of a stage's frozen items for a microbatch; None if a sample is not cached.

        Args:
            stage: Index of the stage.
            keys: Hashes of the samples, int64 ``[B]``.
        """
        found = [self._rows.get((stage, key)) for key in keys.tolist()]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            return None
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def put(self, stage: int, keys: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Cache the outputs of a microbatch's samples, and drop the oldest ones above the limit.

        Args:
            stage: Index of the stage.
            keys: Hashes of the samples, int64 ``[B]``.
            values: Outputs by name, ``[B, ...]``; copied.
        """
        for index, key in enumerate(keys.tolist()):
            if (stage, key) not in self._rows:
                # A view of the row would keep the outputs of the whole microbatch alive.
                row = {name: value[index].clone() for name, value in values.items()}
                self._rows[stage, key] = row
                self.num_bytes += _bytes_of(row)
        while self.num_bytes > self.limit_bytes:
            _, row = self._rows.popitem(last=False)
            self.num_bytes -= _bytes_of(row)


def _bytes_of(row: Mapping[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in row.values())
