"""The sharded word table of a pipeline: passes E and G of the local shards, and the messages between ranks.

One microbatch, with the operations of ``_common/vocabulary_order.py``::

    every rank                                            first stage's rank
    E: look_up         -- rows of its tokens -->          F: words, all rows in the order of the tokens
    G: add_gradients   <-- gradient of those tokens --    B (W where the backward is split)

Each token is a row of one shard. So a message has the rows of one rank's tokens, not of all tokens with zeros between
them, and the first stage copies them to their places: the embedding has the bits of a whole table. Which tokens are
whose follows from the token ids, which every rank has on the host.

The depths of multi-token prediction read rows, too, each on the rank of its stage. Their backward is earlier than that
of the first stage; their gradients wait for G, so that all ranks send and receive those of all depths in one order.

Shapes in names: M microbatches, B samples, T tokens, N = B*T, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .._common.vocabulary_order import LEAD
from ..models.vocabulary.vocabulary_shards import WORD_ROWS, VocabularyShard, shard_index
from ..optim.precision import ComputeCopies
from ..parallel.process_groups import World
from .profiler import LayerProfiler


class TokenOwners:
    """The tokens of a step, sorted by the shard that has their row.

    Args:
        ids_MN: int64 token ids of each microbatch, ``[M, N]``, on the host.
        spans: first and last row, exclusive, of each shard, in order; with tensor parallelism of this rank's slices,
            between which are the rows of others.

    Attributes:
        order_MN: int64 ``[M, N]``: places of the tokens in their microbatch, by shard and then by place; tokens whose
            rows are not here are last.
        ids_MN: their token ids.
        num_shards: number of shards.
    """

    def __init__(self, ids_MN: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        firsts, ends = (torch.tensor(each, dtype=ids_MN.dtype) for each in zip(*spans, strict=True))
        self.num_shards = len(spans)
        shards_MN = torch.bucketize(ids_MN, firsts[1:], right=True)
        shards_MN[(ids_MN < firsts[shards_MN]) | (ids_MN >= ends[shards_MN])] = len(spans)
        # Stable: the tokens of a row stay in their order, in which a whole table adds their gradients.
        self.order_MN = shards_MN.argsort(dim=1, stable=True)
        self.ids_MN = ids_MN.gather(1, self.order_MN)
        counts = torch.stack([(shards_MN == shard).sum(1) for shard in range(len(spans))], dim=1)
        self._ends = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).tolist()

    def place(self, microbatch: int, begin: int, end: int) -> slice:
        """The places in ``order_MN`` of the tokens of the shards from ``begin`` to ``end``, exclusive."""
        return slice(self._ends[microbatch][begin], self._ends[microbatch][end])


class _TakeWords(torch.autograd.Function):
    """Rows that were looked up elsewhere; their gradient goes to ``lookups``."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, x_BTD: torch.Tensor, lookups: WordLookups, microbatch: int
    ) -> torch.Tensor:
        ctx.lookups, ctx.microbatch = lookups, microbatch
        return x_BTD.view_as(x_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.lookups.send_gradients(ctx.microbatch, grads[0])
        return None, None, None, None


class WordLookups:
    """Runs E and G of the local shards, and puts the rows together on the rank of the first stage.

    Args:
        stream: shape of the embedding of a microbatch, ``(B, T, D)``.
        dtype: dtype of the arithmetic.
        microbatches: microbatches of a step on this replica.
        spans: first and last row, exclusive, of this process's slice of each shard, in order.
        shards: name -> local shard.
        copies: name -> copies of its parameters in ``dtype``; empty in float32.
        placed: pipeline rank of each shard, in order.
        first: pipeline rank of the first stage, or of another one that reads the rows.
        world: processes of the run.
        groups: process groups of the rows, and of their gradients.
        profiler: measures the shards.
        trains: whether the word table trains; False where the embedding is frozen.
        defers: whether the gradients of that stage are sent at G, and not in its backward.
    """

    def __init__(
        self,
        *,
        stream: tuple[int, ...],
        dtype: torch.dtype,
        microbatches: int,
        spans: Sequence[tuple[int, int]],
        shards: Mapping[str, VocabularyShard],
        copies: Mapping[str, ComputeCopies],
        placed: list[int],
        first: int,
        world: World,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        profiler: LayerProfiler,
        trains: bool,
        defers: bool = False,
    ) -> None:
        self._stream, self._dtype, self._microbatches, self._spans = stream, dtype, microbatches, spans
        self._shards, self._copies, self._world, self._profiler = shards, copies, world, profiler
        self._rows_group, self._gradients_group = groups
        self._trains, self._defers = trains, defers
        self.is_first = world.pipeline_rank == first
        self._source = world.global_rank(world.peer(first))
        ranks = {rank: (placed.index(rank), placed.index(rank) + placed.count(rank)) for rank in sorted(set(placed))}
        self._own = ranks.pop(world.pipeline_rank, (0, 0))
        # Of the other ranks the first stage's rank alone receives.
        self._others = {world.global_rank(world.peer(rank)): span for rank, span in ranks.items()}
        # An input that requires a gradient, so that autograd runs the backward.
        self._anchor = torch.zeros((), device=world.device, requires_grad=True)
        self._reset()

    def _reset(self) -> None:
        self._training = False
        self._owners: TokenOwners | None = None
        self._order_MN = self._ids_MN = torch.empty(0, dtype=torch.int64)
        self._rows: dict[int, tuple[torch.Tensor, list[dist.Work | None]]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, dist.Work | None]] = {}
        self._computed: dict[int, torch.Tensor] = {}
        self._sent: dict[tuple[str, int], list[tuple[dist.Work | None, torch.Tensor]]] = {}

    def begin_step(self, ids: torch.Tensor, *, training: bool) -> None:
        """Prepare for the first microbatch of a step.

        Args:
            ids: int64 token ids of the step, ``[samples, T]``, on the host.
            training: False evaluates.
        """
        self._reset()
        self._training = training and self._trains
        owners = self._owners = TokenOwners(ids.reshape(self._microbatches, -1), self._spans)
        device = self._world.device
        places = [owners.order_MN, owners.ids_MN]
        if device.type == "cuda":
            places = [each.pin_memory() for each in places]
        self._order_MN, self._ids_MN = (each.to(device, non_blocking=True) for each in places)

    def _place(self, microbatch: int, span: tuple[int, int]) -> slice:
        if self._owners is None:
            raise RuntimeError("a lookup outside of a step")
        return self._owners.place(microbatch, *span)

    def _buffer(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self._stream[-1], dtype=self._dtype, device=self._world.device)

    def _expect_rows(self, microbatch: int) -> None:
        """Post the receives of a microbatch's rows on the rank of the first stage."""
        if not self.is_first:
            return
        buffer_ND = self._buffer(self._stream[0] * self._stream[1])
        works = []
        for source, span in self._others.items():
            place = self._place(microbatch, span)
            if place.start < place.stop:
                works.append(dist.irecv(buffer_ND[place], source, group=self._rows_group))
        self._rows[microbatch] = buffer_ND, works

    def _send(self, kind: str, microbatch: int, tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
        self._sent.setdefault((kind, microbatch), []).append((dist.isend(tensor, target, group=group), tensor))

    def _wait_for_sends(self, kind: str, microbatch: int) -> None:
        for work, _ in self._sent.pop((kind, microbatch), ()):
            if work is not None:
                work.wait()

    @torch.no_grad()
    def look_up(self, microbatch: int) -> None:
        """E: look up the rows of the local shards, and send them to the rank of the first stage.

        Args:
            microbatch: microbatch of the step, from 0.
        """
        # The first stage has received these rows: its forward of that microbatch came before.
        self._wait_for_sends("rows", microbatch - LEAD)
        self._expect_rows(microbatch)
        place = self._place(microbatch, self._own)
        buffer_ND = self._rows[microbatch][0][place] if self.is_first else self._buffer(place.stop - place.start)
        with self._profiler.busy():
            for name, shard, tokens in self._tokens(microbatch):
                copies = self._copies.get(name)
                words_VD = shard.words if copies is None else copies.parameters()[WORD_ROWS]
                ids_N = self._ids_MN[microbatch, tokens] - shard.first
                out_ND = buffer_ND[tokens.start - place.start : tokens.stop - place.start]
                with self._profiler.forward(name):
                    torch.index_select(words_VD, 0, ids_N, out=out_ND)
        if not self.is_first and len(buffer_ND):
            self._send("rows", microbatch, buffer_ND, self._source, self._rows_group)

    def _tokens(self, microbatch: int) -> list[tuple[str, VocabularyShard, slice]]:
        """The local shards with the places of their tokens; without those that have no token."""
        found = []
        for name, shard in self._shards.items():
            index = shard_index(name) or 0
            place = self._place(microbatch, (index, index + 1))
            if place.start < place.stop:
                found.append((name, shard, place))
        return found

    def words(self, microbatch: int) -> torch.Tensor:
        """At F of the first stage: the word embeddings of a microbatch, ``[B, T, D]``.

        Args:
            microbatch: microbatch of the step, from 0.
        """
        buffer_ND, works = self._rows.pop(microbatch)
        for work in works:
            if work is not None:
                work.wait()
        # Rows of other tensor-parallel ranks: the sum over the ranks is the embedding.
        buffer_ND[self._place(microbatch, (0, len(self._spans))).stop :] = 0
        x_ND = torch.empty_like(buffer_ND).index_copy_(0, self._order_MN[microbatch], buffer_ND)
        x_BTD = x_ND.view(self._stream)
        if not self._training:
            return x_BTD
        taken: torch.Tensor = _TakeWords.apply(self._anchor, x_BTD, self, microbatch)  # type: ignore[no-untyped-call]
        return taken

    def send_gradients(self, microbatch: int, gradient_BTD: torch.Tensor) -> None:
        """In the backward of the first stage: send each rank the gradient of its tokens.

        Args:
            microbatch: microbatch of the step, from 0.
            gradient_BTD: gradient of :meth:`words`, ``[B, T, D]``.
        """
        sorted_ND = gradient_BTD.flatten(0, 1).index_select(0, self._order_MN[microbatch])
        if self._defers:
            self._computed[microbatch] = sorted_ND
        else:
            self._send_sorted(microbatch, sorted_ND)

    def _send_sorted(self, microbatch: int, sorted_ND: torch.Tensor) -> None:
        # G of that microbatch came before on all ranks.
        self._wait_for_sends("gradients", microbatch - LEAD)
        for target, span in self._others.items():
            place = self._place(microbatch, span)
            if place.start < place.stop:
                self._send("gradients", microbatch, sorted_ND[place], target, self._gradients_group)
        self._gradients[microbatch] = sorted_ND[self._place(microbatch, self._own)], None

    def add_gradients(self, microbatch: int) -> None:
        """G: add the gradient of the microbatch before, and receive that of this one.

        Args:
            microbatch: microbatch of the step, from 0.
        """
        if not self._training:
            return
        place = self._place(microbatch, self._own)
        if self.is_first and self._defers:
            self._send_sorted(microbatch, self._computed.pop(microbatch))
        if not self.is_first:
            buffer_ND = self._buffer(place.stop - place.start)
            work = dist.irecv(buffer_ND, self._source, group=self._gradients_group) if len(buffer_ND) else None
            self._gradients[microbatch] = buffer_ND, work
        if microbatch:
            self._add(microbatch - 1)

    def _add(self, microbatch: int) -> None:
        """Add a gradient that may still be on its way."""
        gradient_ND, work = self._gradients.pop(microbatch)
        if work is not None:
            work.wait()
        begin = self._place(microbatch, self._own).start
        with self._profiler.busy():
            for name, shard, tokens in self._tokens(microbatch):
                ids_N = self._ids_MN[microbatch, tokens] - shard.first
                with self._profiler.backward((name,)):
                    self._pending(shard).add(ids_N, gradient_ND[tokens.start - begin : tokens.stop - begin])

    @staticmethod
    def _pending(shard: VocabularyShard) -> Any:
        if shard.pending is None:
            raise RuntimeError("a shard without a place for the gradients of its rows")
        return shard.pending

    def end_step(self) -> None:
        """Add the last gradient, and wait until all messages have been sent."""
        if self._training:
            for microbatch in sorted(self._gradients):
                self._add(microbatch)
            for shard in self._shards.values():
                # Rows without a token in this step have a gradient, too: zero, as in a whole table.
                self._pending(shard).add(self._ids_MN.new_empty(0), self._buffer(0))
        for kind, microbatch in list(self._sent):
            self._wait_for_sends(kind, microbatch)
