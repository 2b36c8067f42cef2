"""Cache of the frozen prefix's outputs by sample, so that repeated samples skip it; bounded, oldest entries dropped."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

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


def joined_hashes(hashes: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the hash of each sample from those of its parts; a collective over the ranks that share the tokens.

    A part alone may occur in two samples. Its rank would skip the prefix where the others wait for its keys and values,
    and what it had cached would be of other tokens.

    Args:
        hashes: Those of the parts of this rank, int64 ``[microbatches * B]``.
        group: Ranks that share the tokens of a sample.
        device: Device of the collective.
    """
    size = dist.get_world_size(group)
    parts = torch.empty(size * len(hashes), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(parts, hashes.to(device), group=group)
    rows = parts.view(size, -1).T.contiguous().cpu().numpy()
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return torch.tensor([int.from_bytes(digest, "little") >> 1 for digest in digests], dtype=torch.int64)


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
        # Rows that a step reads, although outputs of its earlier microbatches may displace them.
        self._pinned: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def agree(
        self,
        stages: Sequence[int],
        keys: torch.Tensor,
        microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> torch.Tensor:
        """Return the keys of a step, those negated that some rank of ``group`` would have to compute.

        What is sharded over replicas, or sends tokens between them, is computed by all of them or by none.

        Args:
            stages: Indices of the stages of this rank that have frozen items.
            keys: Hashes of the samples, int64 ``[microbatches * B]``.
            microbatches: Number of microbatches.
            group: Replicas.
            device: Device of the collective.
        """
        rows = keys.view(microbatches, -1)
        found = [all((stage, key) in self._rows for stage in stages for key in row) for row in rows.tolist()]
        flags = torch.tensor(found, dtype=torch.int32, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
        is_cached = flags.cpu().bool()
        self._pinned = {
            (stage, key): self._rows[stage, key] for stage in stages for key in rows[is_cached].flatten().tolist()
        }
        return torch.where(is_cached[:, None], rows, ~rows).flatten()

    def get(self, stage: int, keys: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Return the outputs of a stage's frozen items for a microbatch; None if a sample is not cached.

        Args:
            stage: Index of the stage.
            keys: Hashes of the samples, int64 ``[B]``; negated ones are not read (:meth:`agree`).
        """
        pinned, rows_of = self._pinned, self._rows
        found = [pinned.get((stage, key)) or rows_of.get((stage, key)) for key in keys.tolist()]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            return None
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def put(self, stage: int, keys: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Cache the outputs of a microbatch's samples, and drop the oldest ones above the limit.

        Args:
            stage: Index of the stage.
            keys: Hashes of the samples, int64 ``[B]``, or negated ones.
            values: Outputs by name, ``[B, ...]``; copied.
        """
        for index, signed in enumerate(keys.tolist()):
            key = signed if signed >= 0 else ~signed
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
