"""What the frozen front gave for samples seen before, so that it need not run again; bounded, oldest out first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

import torch


def sample_hashes(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A key for each sample by all that the model gets of it but the labels, ``[microbatches * B]`` integers."""
    arrays = [tensor.cpu().contiguous().numpy() for name, tensor in sorted(inputs.items()) if name != "labels"]
    keys = [
        int.from_bytes(hashlib.blake2b(b"".join(row.tobytes() for row in rows), digest_size=8).digest(), "little") >> 1
        for rows in zip(*arrays, strict=True)
    ]
    return torch.tensor(keys, dtype=torch.int64)


class FrozenPrefixCache:
    """Outputs of the frozen items of a worker's stages, sample by sample.

    Args:
        limit_bytes: of all outputs together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self._rows: OrderedDict[tuple[int, int], dict[str, torch.Tensor]] = OrderedDict()

    def get(self, stage: int, keys: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """The values behind a stage's frozen items for a microbatch; None where a sample is missing."""
        found = [self._rows.get((stage, key)) for key in keys.tolist()]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            return None
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def put(self, stage: int, keys: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the values of a microbatch's samples, at the cost of the oldest ones."""
        for place, key in enumerate(keys.tolist()):
            if (stage, key) in self._rows:
                continue
            row = {name: value[place].clone() for name, value in values.items()}
            self._rows[stage, key] = row
            self.held_bytes += _bytes_of(row)
        while self.held_bytes > self.limit_bytes:
            _, row = self._rows.popitem(last=False)
            self.held_bytes -= _bytes_of(row)


def _bytes_of(row: Mapping[str, torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in row.values())
