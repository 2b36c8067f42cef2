"""A model family with a sharded vocabulary: its layer list, its shards, and where a checkpoint has their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import nn

from ..layer_list import HIDDEN, ItemSpec, ModelFamily, has_vocabulary_rows, vocabulary_rows
from ..vocabulary.embedding import Embedding
from ..vocabulary.head import Head
from ..vocabulary.vocabulary_shards import (
    SHARD,
    WORD_ROWS,
    WORDS,
    FinalNorm,
    SummedEmbedding,
    VocabularyShard,
    shard_index,
)
from .multi_token import PredictionLayer, is_prediction
from .sharded_prediction import JoinedFeatures, ShardedPrediction, sharded_items

Kind = TypeVar("Kind", bound=nn.Module)


class VocabularyShardedFamily:
    """A model family whose word table and output layer are split into shards; satisfies ``layer_list.ModelFamily``.

    The layer list stays, except that ``embedding`` reads the rows of the word table and ``head`` only normalizes. The
    shards are further items, which have no place in the list: ``vocabulary.0``, ``vocabulary.1``, ...

    Args:
        base: family with one residual stream, an ``Embedding``, and a ``Head`` without bias.
        count: number of shards.
        parts: tensor-parallel ranks, which share each shard.
    """

    def __init__(self, base: ModelFamily, count: int, parts: int = 1) -> None:
        self.base, self.count, self.parts = base, count, parts

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """The layer list of the family; the embedding reads ``WORDS``, the head writes the normalized stream."""
        embedding, *between, head = self.base.items
        return sharded_items(
            (
                replace(embedding, reads=(WORDS,)),
                *between,
                replace(head, writes=HIDDEN, inputs=(), tied_to=None),
            )
        )

    @cached_property
    def depths(self) -> tuple[float, ...]:
        """Weights of the losses of multi-token prediction, by depth."""
        names = [item.name for item in self.base.items if is_prediction(item)]
        meta = torch.device("meta")
        return tuple(_of_kind(self.base.build(name, meta), PredictionLayer).weight_of_loss for name in names)

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """Names of the batch tensors that the loss reads: labels and, where it has one, the mask."""
        return self.base.items[-1].inputs

    @property
    def ids_input(self) -> str:
        """Name of the batch tensor of token ids."""
        return self.base.items[0].inputs[0]

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards, in the order of the vocabulary."""
        return tuple(f"{SHARD}.{index}" for index in range(self.count))

    @property
    def ties(self) -> Mapping[str, str]:
        """Those of whole weights: a shard has tied rows once."""
        return {copy: owner for copy, owner in self.base.ties.items() if not has_vocabulary_rows(copy)}

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the word table."""
        return has_tied_output(self.base)

    def rows(self, index: int) -> tuple[int, int]:
        """First and last row, exclusive, of the shard ``index``; shards that ranks share have rows of padding."""
        # Each of the ranks has the same number of rows.
        units = vocabulary_rows(self.base, padded=self.parts > 1) // self.parts
        begin, end = (at * units // self.count for at in (index, index + 1))
        return begin * self.parts, end * self.parts

    def local_rows(self, index: int, rank: int) -> tuple[int, int]:
        """First and last row, exclusive, of the slice of a tensor-parallel ``rank`` of the shard ``index``."""
        begin, end = self.rows(index)
        part = (end - begin) // self.parts
        return begin + rank * part, begin + (rank + 1) * part

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item or shard with its initial weights, those of the family's embedding and output layer.

        Raises:
            TypeError: the family's embedding or head has no form without its table.
        """
        index, first, last = shard_index(name), self.base.items[0].name, self.base.items[-1].name
        if index is None and name not in (first, last):
            module = self.base.build(name, device)
            return ShardedPrediction(module) if isinstance(module, PredictionLayer) else module
        # Drawn as a whole, on the CPU: the initial weights do not depend on the number of shards.
        host = device if device.type == "meta" else torch.device("cpu")
        if name == first:
            return SummedEmbedding(_of_kind(self.base.build(first, host), Embedding)).to(device)
        if name == last:
            kind = JoinedFeatures if self.depths else FinalNorm
            return kind(_of_kind(self.base.build(last, host), Head)).to(device)
        begin, end = self.rows(index or 0)

        def cut(table_VD: torch.Tensor) -> torch.Tensor:
            return table_VD.detach()[begin:end].to(device, copy=True)

        words_VD = _of_kind(self.base.build(first, host), Embedding).word.weight
        # On the meta device a head is its settings alone.
        head = _of_kind(self.base.build(last, torch.device("meta") if self.is_tied else host), Head)
        output_VD = None if self.is_tied else cut(head.weight)
        shard = VocabularyShard(begin, cut(words_VD), output_VD, vocabulary_rows(self.base), head.softcap)
        # A family with adapters has frozen tables.
        return shard.requires_grad_(words_VD.requires_grad)

    def split_dim(self, parameter: str) -> int | None:
        """The dimension along which tensor parallelism splits a parameter; see ``layer_list.split_dim``."""
        return self.base.split_dim(parameter)

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest: that of the family, since shards are stored as one layer."""
        return self.base.manifest()


def has_tied_output(family: ModelFamily) -> bool:
    """Whether the output layer of a model is its word table."""
    return f"{family.items[-1].name}.weight" in stored_ties(family)


def _of_kind(module: nn.Module, kind: type[Kind]) -> Kind:
    """The module, which must be of this class.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(module, kind):
        raise TypeError(f"{type(module).__name__} has no form without its table")
    return module


def stored_ties(family: ModelFamily) -> Mapping[str, str]:
    """The ties of a model as a checkpoint states them: with shards those of the whole tables."""
    return family.base.ties if isinstance(family, VocabularyShardedFamily) else family.ties


def family_parts(family: ModelFamily) -> int:
    """Number of tensor-parallel ranks that share each shard; 1 without shards."""
    return family.parts if isinstance(family, VocabularyShardedFamily) else 1


def prediction_depths(family: ModelFamily) -> int:
    """Number of further tokens whose losses shards compute; 0 without shards."""
    return len(family.depths) if isinstance(family, VocabularyShardedFamily) else 0


def word_parameters(family: ModelFamily, items: Iterable[str]) -> set[str]:
    """Names of the parameters of the word table in the shards among ``items``."""
    if not isinstance(family, VocabularyShardedFamily):
        return set()
    return {f"{name}.{WORD_ROWS}" for name in items if shard_index(name) is not None}


def shard_names(family: ModelFamily) -> tuple[str, ...]:
    """Names of the shards of the output layer; empty for a family that has it whole."""
    return family.shards if isinstance(family, VocabularyShardedFamily) else ()


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Where a checkpoint has a tensor of a shard.

    Attributes:
        name: name of the stored tensor.
        begin: first row.
        end: last row, exclusive; beyond the stored rows is padding.
    """

    name: str
    begin: int
    end: int


def stored_rows(family: ModelFamily, tensor_name: str) -> StoredRows | None:
    """Where a checkpoint has a tensor of a shard, by its name; None where it is stored as it is."""
    index = shard_index(tensor_name)
    if index is None or not isinstance(family, VocabularyShardedFamily):
        return None
    begin, end = family.rows(index)
    name = tensor_name.removeprefix(f"{SHARD}.{index}.")
    return StoredRows(name=name, begin=begin, end=end)
