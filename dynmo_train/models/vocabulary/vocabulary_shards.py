"""Output layer and word table as a fixed number of shards that are items of their own: vocabulary parallelism.

Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, MLSys 2025 (arXiv 2411.05288), section 4.
Shard ``k`` of ``n`` has the rows ``[k V / n, (k + 1) V / n)`` of both; where they are tied, once. A token's embedding
is a row of one shard, and its gradient belongs to that shard alone. Of the output layer, for each token a shard
computes from the normalized stream, without knowing the other shards (algorithm 2):

    z = W_k x,  m = max z,  s = sum exp(z - m),  c = z[label] or 0,  U = exp(z - m) W_k,  Q = W_k[label] or 0

Two neighboring parts merge to one: ``m = max(m_a, m_b)``, ``s = s_a exp(m_a - m) + s_b exp(m_b - m)``, ``U`` as ``s``,
``c`` and ``Q`` by addition. Of all shards together

    loss = log s + m - c,   gradient of x = (U / s - Q) w,   gradient of W_k = (exp(z - log s - m) - one-hot)^T (w x)

with ``w`` the weight of the token's loss. With a soft cap ``z`` is the capped logit; U, Q and the gradient of W_k have
its derivative as a further factor. The merges follow one binary tree over the shards, which depends on their
number alone: the sums have the same bits wherever the shards are.

Shapes in names: B samples, T tokens, N = B*T, D model width, V rows of a shard, P tokens of a chunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ...parallel.context_parallel import ContextRegion
from ...parallel.random_stream import item_dropout
from ...parallel.tensor_parallel import TensorRegion
from ..attention.documents import positions_in_documents
from ..attention.positions import add_positions
from ..layers.softcap import soft_cap_, soft_cap_slope
from .cross_entropy import CHUNK_TOKENS
from .embedding import Embedding, PackedEmbedding
from .embedding_grad import PendingRows, most_pending
from .head import Head

SHARD = "vocabulary"
# The value that the embedding reads: rows of the word table, ``[B, T, D]``, that the shards have looked up.
WORDS = "words"
WORD_ROWS = "embedding.word.weight"
_NAME = re.compile(rf"{SHARD}\.(\d+)(\.|$)")


def shard_index(name: str) -> int | None:
    """The index of the shard that an item, or an item's tensor, is or belongs to, by its name; None: not a shard."""
    found = _NAME.match(name)
    return None if found is None else int(found[1])


@dataclass(frozen=True, kw_only=True)
class VocabularyPart:
    """What one or more neighboring shards contribute to loss and gradient of each token.

    Attributes:
        stats_N3: float32 ``[N, 3]``: largest logit m, sum of the exponentials s, logit of the label c (0 elsewhere).
        weighted_ND: float32 ``[N, D]``: sum of the rows, weighted by the exponentials (U).
        label_ND: row of the label (Q), ``[N, D]`` in the compute dtype; 0 where another shard has it.
    """

    stats_N3: torch.Tensor
    weighted_ND: torch.Tensor
    label_ND: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> VocabularyPart:
        """Buffers for a part.

        Args:
            tokens: tokens of a microbatch.
            width: model width D.
            dtype: compute dtype.
            device: where they are allocated.
        """
        return cls(
            stats_N3=torch.empty(tokens, 3, device=device),
            weighted_ND=torch.empty(tokens, width, device=device),
            label_ND=torch.empty(tokens, width, dtype=dtype, device=device),
        )

    @classmethod
    def nothing(cls, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> VocabularyPart:
        """The part of no row: merged with another, it changes nothing.

        Args:
            tokens: tokens of a microbatch.
            width: model width D.
            dtype: compute dtype.
            device: where it is allocated.
        """
        part = cls.empty(tokens, width, dtype, device)
        for tensor in part.tensors:
            tensor.zero_()
        # Not minus infinity: the difference of two such maxima is not a number. Not a copy from the host, which waits.
        part.stats_N3[:, 0].fill_(torch.finfo(torch.float32).min)
        return part

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors, in the order in which they are sent."""
        return self.stats_N3, self.weighted_ND, self.label_ND

    def merged(self, other: VocabularyPart) -> VocabularyPart:
        """This part and the one of the next shards as one."""
        m_a, s_a, c_a = self.stats_N3.unbind(1)
        m_b, s_b, c_b = other.stats_N3.unbind(1)
        m = torch.maximum(m_a, m_b)
        scale_a, scale_b = (m_a - m).exp(), (m_b - m).exp()
        # Not addcmul: a fused product rounds once, and must round alike for every shape.
        return VocabularyPart(
            stats_N3=torch.stack((m, s_a * scale_a + s_b * scale_b, c_a + c_b), dim=1),
            weighted_ND=self.weighted_ND * scale_a[:, None] + other.weighted_ND * scale_b[:, None],
            # One of the two is zero, so that the sum is exact.
            label_ND=self.label_ND + other.label_ND,
        )

    def on_all_ranks(self, region: TensorRegion) -> VocabularyPart:
        """This rank's part, with maximum, sum and label's logit those of the parts of all tensor-parallel ranks.

        Args:
            region: the ranks, each with the part of its slices.
        """
        stats_RN3 = region.start_gather(self.stats_N3).wait()
        m_RN, s_RN, c_RN = stats_RN3.unbind(-1)
        m_N = m_RN.amax(0)
        s_N = (s_RN * (m_RN - m_N).exp()).sum(0)
        scale_N = (self.stats_N3[:, 0] - m_N).exp()
        return VocabularyPart(
            stats_N3=torch.stack((m_N, s_N, c_RN.sum(0)), dim=1),
            weighted_ND=self.weighted_ND * scale_N[:, None],
            label_ND=self.label_ND,
        )

    def log_sum(self) -> torch.Tensor:
        """The logarithm of the sum of all exponentials, float32 ``[N]``, of a part of all shards."""
        return self.stats_N3[:, 0] + self.stats_N3[:, 1].log()

    def losses(self, weights_N: torch.Tensor, predictions: int = 1) -> list[torch.Tensor]:
        """The weighted loss of each prediction, float32 scalars, of a part of all shards.

        Args:
            weights_N: float32 weight of each token's loss, ``[N]``.
            predictions: number of predictions, each of the same number of neighboring tokens.
        """
        losses_N = (self.log_sum() - self.stats_N3[:, 2]) * weights_N
        return [each.sum() for each in losses_N.chunk(predictions)]

    def input_gradient(self, weights_N: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss by the output layer's input, float32 ``[N, D]``, of a part of all shards.

        Args:
            weights_N: float32 weight of each token's loss, ``[N]``.
        """
        mean_ND = self.weighted_ND / self.stats_N3[:, 1:2]
        return (mean_ND - self.label_ND.float()) * weights_N[:, None]


def subtrees(begin: int, end: int, count: int) -> list[tuple[int, int]]:
    """The largest ranges of the tree over ``count`` shards that cover the shards ``begin`` to ``end``, in order.

    A node ``[a, b)`` of the tree has the children ``[a, m)`` and ``[m, b)`` with ``m = (a + b) // 2``.
    Example: of 8 shards, ``[2, 8)`` is covered by ``[2, 4)`` and ``[4, 8)``.
    """
    found: list[tuple[int, int]] = []

    def visit(a: int, b: int) -> None:
        if b <= begin or end <= a:
            return
        if begin <= a and b <= end:
            found.append((a, b))
            return
        middle = (a + b) // 2
        visit(a, middle)
        visit(middle, b)

    visit(0, count)
    return found


def merge_tree(begin: int, end: int, parts: Mapping[tuple[int, int], VocabularyPart]) -> VocabularyPart:
    """Merge the node ``[begin, end)`` of the tree from those of its nodes that are known.

    Args:
        begin: first shard of the node.
        end: last shard of the node, exclusive.
        parts: nodes of the tree that together cover it.
    """
    known = parts.get((begin, end))
    if known is not None:
        return known
    middle = (begin + end) // 2
    return merge_tree(begin, middle, parts).merged(merge_tree(middle, end, parts))


class _ShardedOutput(torch.autograd.Function):
    """A shard's part of the loss; its backward takes what all shards together have found, and gives the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_VD: torch.Tensor,
        x_ND: torch.Tensor,
        labels_N: torch.Tensor,
        chunk_tokens: int,
        cap: float | None,
    ) -> tuple[torch.Tensor, ...]:
        rows, width = weight_VD.shape
        part = VocabularyPart.empty(len(x_ND), width, x_ND.dtype, x_ND.device)
        # Kept for the weight's gradient, as in the paper; a second product of all logits would take its place.
        powers_NV = x_ND.new_empty(len(x_ND), rows)
        elsewhere_N = (labels_N < 0) | (labels_N >= rows)
        local_N = labels_N.masked_fill(elsewhere_N, 0)
        for begin in range(0, len(x_ND), chunk_tokens):
            chunk = slice(begin, begin + chunk_tokens)
            logits_PV = soft_cap_(torch.mm(x_ND[chunk], weight_VD.t()).float(), cap)
            top_P1 = logits_PV.amax(-1, keepdim=True)
            chosen_P1 = logits_PV.gather(1, local_N[chunk, None])
            logits_PV.sub_(top_P1).exp_()
            part.stats_N3[chunk] = torch.cat((top_P1, logits_PV.sum(-1, keepdim=True), chosen_P1), dim=1)
            powers_NV[chunk] = logits_PV
            if cap is not None:
                logits_PV.mul_(soft_cap_slope(logits_PV, top_P1, cap))
            part.weighted_ND[chunk] = torch.mm(logits_PV.to(x_ND.dtype), weight_VD)
        part.stats_N3[:, 2].masked_fill_(elsewhere_N, 0.0)
        torch.index_select(weight_VD, 0, local_N, out=part.label_ND)
        if cap is not None:
            part.label_ND.mul_(_label_slope(part.stats_N3, cap)[:, None])
        part.label_ND.masked_fill_(elsewhere_N[:, None], 0.0)
        ctx.save_for_backward(powers_NV, x_ND, local_N, elsewhere_N, part.stats_N3.clone())
        ctx.chunk_tokens, ctx.dtype, ctx.rows, ctx.cap = chunk_tokens, weight_VD.dtype, rows, cap
        # What takes part in the backward: see ``backward``.
        handle_N = torch.zeros(len(x_ND), device=x_ND.device)
        ctx.mark_non_differentiable(*part.tensors)
        ctx.set_materialize_grads(False)
        return handle_N, handle_N.clone(), *part.tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Not gradients: the log-sum of all shards, and the token's weight. They are known after the forward only.
        log_sums_N, weights_N = grads[:2]
        powers_NV, x_ND, local_N, elsewhere_N, stats_N3 = ctx.saved_tensors
        cap, top_N = ctx.cap, stats_N3[:, 0]
        scale_N = (top_N - log_sums_N).exp() * weights_N
        label_N = torch.where(elsewhere_N, 0.0, -weights_N)
        if cap is not None:
            label_N = label_N * _label_slope(stats_N3, cap)
        weight_VD = torch.zeros(ctx.rows, x_ND.shape[1], dtype=torch.float32, device=x_ND.device)
        for begin in range(0, len(x_ND), ctx.chunk_tokens):
            chunk = slice(begin, begin + ctx.chunk_tokens)
            logits_PV = powers_NV[chunk].float() * scale_N[chunk, None]
            if cap is not None:
                logits_PV.mul_(soft_cap_slope(powers_NV[chunk].float(), top_N[chunk, None], cap))
            logits_PV.scatter_add_(1, local_N[chunk, None], label_N[chunk, None])
            low_PV = logits_PV.to(x_ND.dtype)
            if x_ND.dtype == torch.float32:
                weight_VD.addmm_(low_PV.t(), x_ND[chunk])
            else:
                weight_VD += low_PV.t() @ x_ND[chunk]
        return weight_VD.to(ctx.dtype), None, None, None, None


def _label_slope(stats_N3: torch.Tensor, cap: float) -> torch.Tensor:
    """The derivative of each label's capped logit, float32 ``[N]``; 1 where another shard has the label."""
    return 1.0 - (stats_N3[:, 2] / cap).square()


def shard_activation_bytes(rows: int, width: int, tokens: int, itemsize: int) -> int:
    """Bytes that a shard keeps of a microbatch until its weight's gradient: exponentials, and its part.

    Args:
        rows: rows of the shard.
        width: model width D.
        tokens: tokens of the microbatch.
        itemsize: bytes of an element in the compute dtype.
    """
    return tokens * ((rows + width) * itemsize + (width + 3) * 4)


class TableRows(nn.Module):
    """Rows of the word table or of the output layer.

    Args:
        weight_VD: the rows, ``[V, D]``.
    """

    def __init__(self, weight_VD: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD)


class WordRows(nn.Module):
    """Names rows of the word table as the embedding does.

    Args:
        weight_VD: the rows, ``[V, D]``.
    """

    def __init__(self, weight_VD: torch.Tensor) -> None:
        super().__init__()
        self.word = TableRows(weight_VD)


class VocabularyShard(nn.Module):
    """One shard of word table and output layer; with tensor parallelism this rank's slice of it.

    Args:
        first: token id of the first row.
        words_VD: rows of the word table, ``[V, D]``.
        output_VD: rows of the output layer, ``[V, D]``; None where they are those of the word table.
        vocabulary: number of true token ids; None where no row is padding.
        softcap: soft cap of the logits; None means none.
    """

    def __init__(
        self,
        first: int,
        words_VD: torch.Tensor,
        output_VD: torch.Tensor | None = None,
        vocabulary: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.softcap = softcap
        self.first, self.embedding = first, WordRows(words_VD)
        self.vocabulary = first + len(words_VD) if vocabulary is None else vocabulary
        self.head = None if output_VD is None else TableRows(output_VD)
        self.pending: PendingRows | None = None

    @property
    def words(self) -> torch.Tensor:
        """Rows of the word table, ``[V, D]``."""
        return self.embedding.word.weight

    @property
    def output(self) -> torch.Tensor:
        """Rows of the output layer without padding, ``[V, D]``."""
        rows = self.words if self.head is None else self.head.weight
        real = min(max(self.vocabulary - self.first, 0), len(rows))
        return rows if real == len(rows) else rows[:real]

    def cut(self, rank: int, size: int) -> None:
        """Number the rows of a slice, before they are cut.

        Args:
            rank: this rank among those that share the shard.
            size: number of these ranks.
        """
        self.first += rank * (len(self.words) // size)

    def collect_gradients(self) -> None:
        """Collect the gradients of embeddings by token."""
        self.pending = PendingRows(self.words, most_pending(len(self.words)), apart=self.head is None)

    def forward(
        self, x_ND: torch.Tensor, labels_N: torch.Tensor
    ) -> tuple[VocabularyPart, Callable[[torch.Tensor, torch.Tensor], None]]:
        """Compute the shard's part, and what computes the gradient of its rows afterwards.

        Args:
            x_ND: normalized stream, ``[N, D]``, without gradient.
            labels_N: int64 token ids, ``[N]``.

        Returns:
            The part, and a function of the tokens' log-sums over all shards and of the weights of their losses,
            float32 ``[N]`` each, that adds to the gradient of the rows.
        """
        output_VD = self.output
        if not len(output_VD):
            # Padding alone: nothing to add, and no gradient.
            return VocabularyPart.nothing(len(x_ND), x_ND.shape[1], x_ND.dtype, x_ND.device), lambda *_: None
        if not output_VD.requires_grad:
            with torch.no_grad():
                return self._part(output_VD, x_ND, labels_N)[1], lambda *_: None
        handles, part = self._part(output_VD, x_ND, labels_N)

        def add_gradient(log_sums_N: torch.Tensor, weights_N: torch.Tensor) -> None:
            torch.autograd.backward(handles, (log_sums_N, weights_N))

        return part, add_gradient

    def _part(
        self, output_VD: torch.Tensor, x_ND: torch.Tensor, labels_N: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], VocabularyPart]:
        """The shard's part, and the two values through which its backward begins."""
        chunk_tokens = CHUNK_TOKENS.get(x_ND.device.type, CHUNK_TOKENS["cpu"])
        first, second, *tensors = _ShardedOutput.apply(  # type: ignore[no-untyped-call]
            output_VD, x_ND, labels_N - self.first, chunk_tokens, self.softcap
        )
        stats_N3, weighted_ND, label_ND = tensors
        return (first, second), VocabularyPart(stats_N3=stats_N3, weighted_ND=weighted_ND, label_ND=label_ND)


class SummedEmbedding(nn.Module):
    """The embedding without its word table: adds positions to the rows that the shards have looked up.

    Args:
        embedding: the whole embedding, whose position table it takes.

    Raises:
        TypeError: the embedding has token types.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        if embedding.tokentype is not None:
            raise TypeError("an embedding with token types has no form without its word table")
        self.position, self.dropout, self.scale = embedding.position, embedding.dropout, embedding.scale
        self.resets_positions = isinstance(embedding, PackedEmbedding)
        self.context: ContextRegion | None = None  # set by ``join_context``
        self.region: TensorRegion | None = None  # set by ``cut_item``

    def rows(self, words_BTD: torch.Tensor) -> torch.Tensor:
        """The word embeddings alone, with their scale, ``[B, T, D]``, from the rows of this rank ``words_BTD``."""
        if self.region is not None:
            words_BTD = self.region.leave(words_BTD)
        if self.scale != 1.0:
            words_BTD = words_BTD * torch.full((), self.scale, dtype=words_BTD.dtype, device=words_BTD.device)
        return words_BTD

    def forward(
        self, words_BTD: torch.Tensor, ids_BT: torch.Tensor, starts_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add positions, with dropout.

        Args:
            words_BTD: rows of the word table, ``[B, T, D]``; with tensor parallelism zeros for those of other ranks.
            ids_BT: int64 token ids, ``[B, T]``.
            starts_BT: int64 ``[B, T]``, where the document of each token begins, if positions begin again there.

        Returns:
            ``[B, T, D]``.
        """
        words_BTD = self.rows(words_BTD)
        past = 0 if starts_BT is None or not self.resets_positions else positions_in_documents(starts_BT, self.context)
        x_BTD = add_positions(words_BTD, ids_BT, self.position, past, self.context)
        return item_dropout(x_BTD, self.dropout, self.training)


class FinalNorm(nn.Module):
    """The head without its projection: normalization of the stream.

    Args:
        head: the whole head, whose normalization it takes.
    """

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.norm, self.scale = head.norm, head.scale

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The input of the output layer, ``[B, T, D]``, from the residual stream ``x_BTD`` ``[B, T, D]``."""
        x_BTD = self.norm(x_BTD)
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale


class InjectLoss(torch.autograd.Function):
    """A loss whose value and gradient are known: ties them to the stream that they were computed from."""

    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, loss: torch.Tensor, gradient_BTD: torch.Tensor) -> torch.Tensor:
        """``loss``, a scalar, whose gradient by ``x_BTD`` ``[B, T, D]`` is ``gradient_BTD``."""
        ctx.save_for_backward(gradient_BTD)
        ctx.dtype = x_BTD.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Scale the gradient by that of the loss."""
        [gradient_BTD] = ctx.saved_tensors
        return (gradient_BTD * grads[0]).to(ctx.dtype), None, None


def ranks_of_shards(count: int, ranks: Sequence[int]) -> list[int]:
    """The pipeline rank of each shard: neighboring shards in blocks, as even as possible.

    Example: 6 shards on ranks 0 to 3 are on 0, 0, 1, 2, 2, 3.

    Args:
        count: number of shards.
        ranks: pipeline ranks, in order.
    """
    return [ranks[index * len(ranks) // count] for index in range(count)]
