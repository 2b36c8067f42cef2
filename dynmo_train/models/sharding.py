"""Turns an item into a tensor-parallel rank's shard of it, and leaves it this process's experts.

``ModelFamily.split_dim`` is the whole sharding plan: the dimension along which each parameter is split.

    split_dim  module           effect
    0          linear layer     column-parallel: input enters the tensor-parallel region
    1          linear layer     row-parallel: partial products are summed on leaving the region, before the bias
    0          embedding        vocabulary-parallel: other ranks' ids give zero, and the sum over ranks is the lookup
    0          head             vocabulary-parallel: the loss is computed over all ranks
    None       any              replicated
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..parallel.collectives import ReplicaGather
from ..parallel.context_parallel import ContextRegion
from ..parallel.expert_parallel import TokenDispatcher
from ..parallel.tensor_parallel import TensorRegion
from .attention.self_attention import SelfAttention
from .experts.moe import Experts, MoeMlp
from .families.bert import BertHead
from .families.ict import RetrievalHead
from .families.multi_token import PredictionLayer
from .families.sharded_prediction import PREDICTIONS, ShardedPrediction
from .layer_list import ItemOutput
from .layers.linear import PrunableLinear
from .techniques.early_exit import ActiveTokens
from .techniques.mixture_of_depths import RoutedBlock
from .vocabulary.embedding import Embedding
from .vocabulary.head import Head
from .vocabulary.vocabulary_shards import SummedEmbedding, TableRows, VocabularyShard

CONTEXT_LAYERS = (Embedding, SummedEmbedding, SelfAttention, MoeMlp, PredictionLayer)
"""Layers that read the tokens of other context-parallel ranks, or their places."""
SplitDim = Callable[[str], int | None]


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of an embedding table; ids of other ranks give zero, and the sum over ranks is the lookup."""

    def __init__(self, weight_VD: nn.Parameter, region: TensorRegion) -> None:
        super().__init__()
        self.weight, self._region = weight_VD, region

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ``ids``, int64 ``[...]``: ``[..., D]``."""
        rows = self.weight.shape[0]
        local = ids - self._region.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._region.leave(found.masked_fill(elsewhere[..., None], 0.0))


def cut_tensor(tensor: torch.Tensor, dim: int | None, region: TensorRegion | None) -> torch.Tensor:
    """This rank's slice of ``tensor``, of any shape ``[...]``, along ``dim``; a view.

    Where the tensor is replicated (``region`` or ``dim`` is None) it is returned itself.
    """
    if region is None or dim is None:
        return tensor
    part = tensor.shape[dim] // region.size
    return tensor.narrow(dim, region.rank * part, part)


def whole_shape(shape: torch.Size, dim: int | None, region: TensorRegion | None) -> tuple[list[int], list[list[int]]]:
    """The global shape of a slice of ``shape``, and the slice's ``[begin, end]`` in each dimension.

    Args:
        shape: local shape, any number of dimensions.
        dim: dimension that ``region`` splits; None where every rank has the whole tensor.
        region: ranks that share the tensor; None for one rank.
    """
    whole = list(shape)
    index = [[0, size] for size in shape]
    if region is not None and dim is not None:
        whole[dim] *= region.size
        index[dim] = [region.rank * shape[dim], (region.rank + 1) * shape[dim]]
    return whole, index


def cut_item(item: str, module: nn.Module, split_dim: SplitDim, region: TensorRegion | None) -> nn.Module:
    """Turn an item into this rank's shard of it, in place; returns the module.

    Args:
        item: name of the item.
        module: the whole item.
        split_dim: the dimension along which a parameter is split, by its global name; None where it is replicated.
        region: the tensor-parallel ranks; None where there is one.

    Raises:
        TypeError: a module whose weight ``split_dim`` splits along 0 has no tensor-parallel form.
    """
    if region is None:
        return module
    if region.sequence and needs_whole_stream(module):
        # Rows that were looked up are those of all tokens.
        gathers = _gather_first if isinstance(module, ShardedPrediction) else _gather_streams
        module.register_forward_pre_hook(gathers(region))
        module.register_forward_hook(_cut_streams(region))
        region = region.without_sequence_parallelism()
    # A list: ``_connect`` replaces embedding tables while the modules are walked.
    for path, child in list(module.named_modules()):
        prefix = f"{item}.{path}" if path else item
        dims = {name: split_dim(f"{prefix}.{name}") for name, _ in child.named_parameters(recurse=False)}
        for name, dim in dims.items():
            if dim is not None:
                whole = getattr(child, name)
                # A copy: a view would keep the whole tensor of all ranks in memory.
                setattr(
                    child,
                    name,
                    nn.Parameter(cut_tensor(whole.detach(), dim, region).clone(memory_format=torch.contiguous_format)),
                )
        _connect(module, path, child, dims.get("weight"), region)
    return module


def needs_whole_stream(module: nn.Module) -> bool:
    """Whether an item reads all tokens outside its tensor-parallel regions.

    With sequence parallelism such an item gathers the stream, computes without sequence parallelism, and scatters its
    output. The gradients of its replicated parameters are then complete on every rank.
    """
    looking = (MoeMlp, RoutedBlock, ActiveTokens, *PREDICTIONS)
    return any(
        isinstance(part, looking) or (isinstance(part, BertHead) and part.binary is not None)
        for part in module.modules()
    )


def shard_experts(item: str, module: nn.Module, dispatcher: TokenDispatcher | None) -> nn.Module:
    """Remove the experts of other expert-parallel ranks from an item, in place; returns it."""
    if dispatcher is not None:
        for experts in experts_of(module):
            experts.keep(dispatcher, dispatcher.hosts_of(item, len(experts)))
    return module


def join_replicas(module: nn.Module, replicas: ReplicaGather | None) -> nn.Module:
    """Give losses over all replicas the collective that gathers them, in place; returns the item."""
    for child in module.modules():
        if isinstance(child, RetrievalHead):
            child.replicas = replicas
    return module


def join_context(module: nn.Module, region: ContextRegion | None) -> nn.Module:
    """Give layers that need them the ranks that share the tokens of a sample, in place; returns the item."""
    for child in module.modules():
        if region is not None and isinstance(child, CONTEXT_LAYERS):
            child.context = region
    return module


def join_step_counts(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Give layers of experts the ranks that have other tokens of a step, in place; returns the item."""
    for child in module.modules():
        if isinstance(child, MoeMlp):
            child.counts.group = group
    return module


def experts_of(module: nn.Module) -> list[Experts]:
    """The modules of an item that contain experts."""
    return [child for child in module.modules() if isinstance(child, Experts)]


def is_of_expert(parameter: str) -> bool:
    """Whether a parameter, by its global name, belongs to a single expert."""
    return ".experts." in parameter


def expert_of(tensor: str) -> int | None:
    """The number of the expert that a tensor belongs to, by its global name; None where it belongs to no expert."""
    _, found, rest = tensor.partition(".experts.")
    return int(rest.partition(".")[0]) if found else None


def _connect(module: nn.Module, path: str, child: nn.Module, dim: int | None, region: TensorRegion) -> None:
    if isinstance(child, PrunableLinear):
        if dim == 0:
            child.enter, child.overlap = region.enter, region if region.overlaps else None
            # Masks and sparse formats have the shape of the local product.
            child.outputs //= region.size
        elif dim == 1:
            child.leave, child.overlap = region.leave, region if region.overlaps else None
    elif isinstance(child, nn.Embedding):
        if dim == 0:
            parent, _, name = path.rpartition(".")
            setattr(
                module.get_submodule(parent), name, VocabParallelEmbedding(nn.Parameter(child.weight.detach()), region)
            )
        else:
            # Replicated tables (positions, token types) give all tokens. With sequence parallelism the output of the
            # word table, to which they are added, has this rank's tokens only.
            child.register_forward_hook(_own_tokens(region))
    elif isinstance(child, SelfAttention) and child.sparse is not None:
        child.sparse = replace(child.sparse, part=region.rank, parts=region.size)
    elif isinstance(child, SummedEmbedding):
        child.region = region
    elif isinstance(child, VocabularyShard):
        child.cut(region.rank, region.size)
    elif isinstance(child, TableRows):
        pass
    elif isinstance(child, (Head, BertHead)) and dim == 0:
        child.region = region
    elif dim == 0:
        raise TypeError(
            f"{type(child).__name__} has no tensor-parallel form, but split_dim splits its weight along dimension 0"
        )


def _map_streams(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``change`` to the values that are streams ``[B, T, D]``; others are returned unchanged."""
    if isinstance(value, ItemOutput):
        return value._replace(output=_map_streams(change, value.output))
    if isinstance(value, tuple):
        return tuple(_map_streams(change, each) for each in value)
    return change(value) if value.dim() == 3 else value


def _gather_streams(region: TensorRegion) -> Callable[[nn.Module, Any], Any]:
    return lambda _module, arguments: _map_streams(region.gather_sequence, arguments)


def _gather_first(region: TensorRegion) -> Callable[[nn.Module, Any], Any]:
    return lambda _module, arguments: (region.gather_sequence(arguments[0]), *arguments[1:])


def _cut_streams(region: TensorRegion) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda _module, _arguments, output: _map_streams(region.scatter_sequence, output)


def _own_tokens(region: TensorRegion) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    def hook(_module: nn.Module, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return region.local_tokens(output)

    return hook
