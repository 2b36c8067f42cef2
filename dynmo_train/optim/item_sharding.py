"""Which part of each tensor this process has, and how it builds an item so that it has just that part.

A tensor is cut up to three times, always in this order::

    global tensor --tensor parallelism--> slice --expert parallelism--> local experts --ZeRO--> local rows
                    ItemSharding.region         .dispatcher                            .fsdp

Masks follow the matrix product that reads them: they are cut by tensor parallelism, never into ZeRO's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from ..models.compiled import CompileSettings, compile_item
from ..models.families.vocabulary_family import StoredRows, stored_rows
from ..models.float8 import Float8Items, Float8Settings
from ..models.layer_list import ModelFamily, vocabulary_rows
from ..models.lora import is_adapter
from ..models.sharding import (
    cut_item,
    cut_tensor,
    is_of_expert,
    join_context,
    join_replicas,
    join_step_counts,
    shard_experts,
)
from ..parallel.collectives import ReplicaGather
from ..parallel.context_parallel import ContextRegion
from ..parallel.expert_parallel import TokenDispatcher
from ..parallel.fsdp import FsdpSharding
from ..parallel.tensor_parallel import TensorRegion
from .apex import fuse_norms
from .item_state import has_token_rows, is_whole, parameter_of, role_of


@dataclass(frozen=True, kw_only=True)
class ItemSharding:
    """The part of each tensor that this process has.

    Attributes:
        family: Model family; its ``split_dim`` decides which dimension tensor parallelism cuts.
        region: Tensor-parallel ranks; None where every matrix product is local.
        fsdp: Replicas that share the rows of each parameter (ZeRO); None where each has all rows.
        dispatcher: Replicas that share the experts of each layer; None where each has all experts.
        adapters_only: Whether checkpoints have the adapters of LoRA alone, and no other parameter.
    """

    family: ModelFamily
    region: TensorRegion | None = None
    fsdp: FsdpSharding | None = None
    dispatcher: TokenDispatcher | None = None
    adapters_only: bool = False

    def split_dim(self, tensor_name: str) -> int | None:
        """Return the dimension along which this process has a slice of a parameter, mask or moment; None: not cut."""
        return None if self.region is None else self.family.split_dim(parameter_of(tensor_name))

    def local_slice(self, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a global tensor, as a view.

        Args:
            tensor_name: Global name.
            tensor: Global tensor ``[rows, ...]``.

        Returns:
            ``[n, ...]``: cut along :meth:`split_dim`, and to ZeRO's rows unless it is whole on each replica.
        """
        part = cut_tensor(tensor, self.split_dim(tensor_name), self.region)
        return part if is_whole(tensor_name) else self.local_rows(tensor_name, part)

    def local_from_checkpoint(self, tensor_name: str, stored: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a stored tensor.

        Args:
            tensor_name: Global name.
            stored: Global tensor of a checkpoint, ``[rows, ...]``. A tensor with vocabulary rows has the true number of
                rows, or in older checkpoints a padded one; it is padded here to the number of rows of this run.
        """
        shard = self.stored_rows(tensor_name)
        if shard is not None:
            # The last shards may have padding, as below.
            real = stored[shard.begin : shard.end]
            stored = stored.new_zeros(shard.end - shard.begin, *stored.shape[1:])
            stored[: len(real)] = real
        elif has_token_rows(tensor_name):
            # Zeros, as in training: padding gets no gradient, and zero rows stay zero under Adam.
            rows = vocabulary_rows(self.family)
            padded = stored.new_zeros(vocabulary_rows(self.family, padded=True), *stored.shape[1:])
            padded[:rows] = stored[:rows]
            stored = padded
        return self.local_slice(tensor_name, stored)

    def stored_rows(self, tensor_name: str) -> StoredRows | None:
        """Return where a checkpoint has a tensor of a shard of the output layer; None for any other tensor."""
        return stored_rows(self.family, tensor_name)

    def stored_name(self, tensor_name: str) -> str:
        """Return the name under which a checkpoint has a tensor: that of the output layer for its shards."""
        rows = self.stored_rows(tensor_name)
        return tensor_name if rows is None else rows.name

    def is_expert_local(self, tensor_name: str) -> bool:
        """Whether a tensor belongs to an expert that other replicas do not have."""
        return self.dispatcher is not None and is_of_expert(tensor_name)

    def local_rows(self, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return ZeRO's rows ``[n, ...]`` of this process of ``tensor`` ``[rows, ...]`` of its replica, as a view."""
        return tensor if self.fsdp is None else self.fsdp.rows(tensor, expert_local=self.is_expert_local(tensor_name))

    def gather_rows(self, tensor_name: str, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the replica's tensor; a collective over all replicas that share the rows.

        Args:
            tensor_name: Global name.
            rows: Local rows, ``[n, ...]``.
            num_rows: Number of rows of the result.

        Returns:
            ``[num_rows, ...]``.
        """
        if self.fsdp is None:
            return rows
        return self.fsdp.gather_rows(rows, num_rows, expert_local=self.is_expert_local(tensor_name))

    def is_writer(self, tensor_name: str) -> bool:
        """Whether this process writes a tensor to a checkpoint: the first of those with the same part of a replica.

        Replicas that share experts count as one replica here.
        """
        # All ranks of a dispatcher write, since each has its own experts; what they share, the first one writes.
        if self.dispatcher is not None and self.dispatcher.rank and not is_of_expert(tensor_name):
            return False
        return self._is_first_in_region(tensor_name)

    def is_stored(self, tensor_name: str) -> bool:
        """As :meth:`is_writer`, without shards of padding alone and weights that checkpoints of adapters refer to."""
        is_base = self.adapters_only and role_of(tensor_name) == "parameter" and not is_adapter(tensor_name)
        shard = self.stored_rows(tensor_name)
        # After a resume the steps of such a shard need not be those of the others.
        is_padding = shard is not None and shard.begin >= vocabulary_rows(self.family)
        return not is_base and not is_padding and self.is_writer(tensor_name)

    def is_counted(self, tensor_name: str) -> bool:
        """Whether sums over processes count this process's part of a tensor; with ZeRO these are its rows."""
        if self.fsdp is None:
            return self.is_writer(tensor_name)
        return self.fsdp.is_first_copy and self._is_first_in_region(tensor_name)

    def _is_first_in_region(self, tensor_name: str) -> bool:
        return self.region is None or self.region.rank == 0 or self.split_dim(tensor_name) is not None


@dataclass(frozen=True, kw_only=True)
class ItemBuilder:
    """Builds the local part of items.

    Attributes:
        sharding: The part of each tensor that this process has.
        device: Device of the items.
        replicas: Gathers the inputs of losses over all replicas; None with one replica.
        context: Ranks that share the tokens of a sample; None with one.
        fused_norms: torch's normalization -> class that replaces it (apex).
        compiling: Settings of torch.compile; None does not compile.
        float8: Products of attention and MLPs that run in float8; None has none.
    """

    sharding: ItemSharding
    device: torch.device
    replicas: ReplicaGather | None = None
    context: ContextRegion | None = None
    fused_norms: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    compiling: CompileSettings | None = None
    float8: Float8Settings | None = None

    def build(self, name: str, device: torch.device | None = None) -> nn.Module:
        """Build this process's part of an item with its initial weights."""
        sharding = self.sharding
        # Cut after the whole item is initialized: a weight does not depend on the tensor- or expert-parallel size.
        module = fuse_norms(sharding.family.build(name, device or self.device), self.fused_norms)
        module = cut_item(name, module, sharding.family.split_dim, sharding.region)
        module = module if self._float8_items is None else self._float8_items.apply(name, module)
        module = shard_experts(name, module, sharding.dispatcher)
        module = join_step_counts(module, None if self.replicas is None else self.replicas.group)
        return join_context(join_replicas(module, self.replicas), self.context)

    @cached_property
    def _float8_items(self) -> Float8Items | None:
        return None if self.float8 is None else Float8Items(self.float8, self.sharding.family.items, self.device)

    def blueprint(self, name: str) -> nn.Module:
        """Build this process's part of an item on the meta device."""
        return self.build(name, torch.device("meta"))

    def compile(self, module: nn.Module) -> None:
        """Compile an item in place, where this run compiles."""
        if self.compiling is not None:
            compile_item(module, self.compiling)
