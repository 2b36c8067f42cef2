"""Continuing many prompts at once: batches that take turns in the pipeline, token after token.

Each replica continues its own share of the requests. In a pipeline as many batches are under way as there are stages:
while one is in the last stage, the next one is in the stage before. The last stage draws the tokens and tells them to
the others, so that every process knows when a sequence ends. Shapes in names: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..models.early_exit import LEFT
from ..models.kv_cache import Cache, Decoder, is_ragged_safe, store_by_columns
from ..models.layer_list import live_before
from ..trainer.engine import Engine
from .sampling import Sampling, next_tokens

# Tokens before the new ones that are decoded with them.
_CONTEXT = 8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One sequence to go on with: its tokens, how many more at most, and the seed of its draws."""

    ids: tuple[int, ...]
    most: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The new tokens, without the end of the document, and why they end: ``end`` (of it), ``stop``, ``length``."""

    ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What ends a sequence: the end of a document, or a text in what the new tokens are decoded to.

    Token ids do not do for the text: how a text is cut into tokens depends on what stands before it, and it may begin
    and end within tokens.

    Attributes:
        eod: the token that ends a document.
        stop: the text; empty stops nothing.
        decode: ids to text; needed with ``stop``.
    """

    eod: int | None
    stop: str = ""
    decode: Callable[[Sequence[int]], str] | None = None

    def of(self, prompt: Sequence[int], new: Sequence[int], most: int) -> str | None:
        """Why a sequence with these new tokens after its prompt ends; None where it continues."""
        if new and new[-1] == self.eod:
            return "end"
        if self.stop and self.decode is not None and new:
            # The text is looked for at each token, so a match ends in the last one: it lies in the last tokens, of
            # which one may be a single byte of a character.
            window = _CONTEXT + 4 * len(self.stop)
            tail = new[-window:]
            before = new[: len(new) - len(tail)][-_CONTEXT:] or prompt[-_CONTEXT:]
            if self.stop in continuation(self.decode, before, tail):
                return "stop"
        return "length" if len(new) >= most else None

    def without(self, new: Sequence[int], reason: str) -> tuple[int, ...]:
        """The new tokens without the end of the document."""
        return tuple(new[: len(new) - (reason == "end")])


def continuation(decode: Callable[[Sequence[int]], str], before: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens, decoded with those before: a character's bytes and a space may lie at the border."""
    text, start = decode([*before, *new]), decode(before)
    return text[len(start) :] if text.startswith(start) else decode(new)


@dataclass
class _Batch:
    """Sequences that are read together, filled up at their begin to one length."""

    asked: Sequence[Asked]
    cache: Cache
    ids_BT: torch.Tensor
    generators: list[torch.Generator]
    new: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(reason is not None for reason in self.reasons)


class Generation:
    """Continues sequences with the model of a forward engine; every process calls the same methods.

    Args:
        engine: holds the model's items under its partition.
        max_tokens: positions of the model.
        recompute: read each sequence anew for every token, and keep nothing.
    """

    def __init__(
        self, engine: Engine, *, max_tokens: int, sampling: Sampling, ending: Ending, recompute: bool = False
    ) -> None:
        self.world, self.sampling, self.ending, self.recompute = engine.world, sampling, ending, recompute
        items = engine.family.items
        names = set(engine.local_names)
        held = [item for item in items if item.name in names]
        self.decoder = Decoder(engine.family, engine.item_store.modules, max_tokens, held)
        if self.world.device.type == "cpu":
            for module in self.decoder.modules.values():
                store_by_columns(module)
        begin = items.index(held[0])
        self._enters = live_before(items, begin) if begin else ()
        self._leaves = live_before(items, begin + len(held)) if begin + len(held) < len(items) else ()
        self._width = int(str(engine.family.manifest()["hidden_size"]))
        self._dtype = engine.settings.precision.compute
        self._ragged = is_ragged_safe(engine.family)
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    @property
    def _stages(self) -> int:
        return self.world.dims.pipeline

    def run(self, asked: Sequence[Asked], batch_size: int) -> list[Answered]:
        """The answers of this replica to ``asked``, in their order."""
        answers: list[Answered | None] = [None] * len(asked)
        groups = list(self._groups(asked, batch_size))
        for begin in range(0, len(groups), self._stages):
            numbered = groups[begin : begin + self._stages]
            for numbers, batch in zip(numbered, self._together([[asked[n] for n in g] for g in numbered]), strict=True):
                for number, new, reason in zip(numbers, batch.new, batch.reasons, strict=True):
                    why = reason or "length"
                    answers[number] = Answered(ids=self.ending.without(new, why), reason=why)
        return [answer for answer in answers if answer is not None]

    def _groups(self, asked: Sequence[Asked], size: int) -> Iterator[list[int]]:
        """Numbers of the sequences that share a batch: near ones in length, so that little is filled up."""
        order = sorted(range(len(asked)), key=lambda number: len(asked[number].ids))
        group: list[int] = []
        for number in order:
            other = bool(group) and len(asked[group[0]].ids) != len(asked[number].ids)
            if len(group) == size or (other and not self._ragged):
                yield group
                group = []
            group.append(number)
        if group:
            yield group

    def _together(self, groups: Sequence[Sequence[Asked]]) -> list[_Batch]:
        """Several batches to their ends, taking turns."""
        batches = [self._begin(group) for group in groups]
        told: dict[int, torch.Tensor] = {}
        while not all(batch.is_over for batch in batches):
            for number, batch in enumerate(batches):
                if batch.is_over:
                    continue
                drawn = self._step(batch)
                if drawn is not None:
                    told[number] = drawn
            # The stages before the last one wait here for what it has drawn.
            for number, batch in enumerate(batches):
                if not batch.is_over:
                    self._take(batch, told.pop(number) if number in told else self._receive_tokens(batch))
        self._forget_sent()
        return batches

    def _begin(self, asked: Sequence[Asked]) -> _Batch:
        longest = max(len(each.ids) for each in asked)
        most = max(each.most for each in asked)
        ids_BT = torch.zeros(len(asked), longest, dtype=torch.int64)
        padding = torch.tensor([longest - len(each.ids) for each in asked])
        for row, each in enumerate(asked):
            ids_BT[row, int(padding[row]) :] = torch.tensor(each.ids)
        ragged = bool(padding.any())
        return _Batch(
            asked=asked,
            cache=Cache(capacity=longest + most, padding=padding if ragged else None),
            ids_BT=ids_BT,
            generators=[torch.Generator().manual_seed(each.seed) for each in asked],
            new=[[] for _ in asked],
            reasons=[None if each.most else "length" for each in asked],
        )

    def _step(self, batch: _Batch) -> torch.Tensor | None:
        """This stage's part of one token; the tokens drawn, ``[B]``, at the last stage."""
        if self.recompute:
            batch.cache.tokens = 0
            batch.cache.kept.clear()
        device = self.world.device
        shape = batch.ids_BT.shape
        x = batch.ids_BT.to(device)
        left_BT = torch.zeros(shape, device=device, dtype=self._dtype)
        for name in self._enters:
            if name == LEFT:
                self._receive(left_BT)
            else:
                x = self._receive(torch.empty(*shape, self._width, device=device, dtype=self._dtype))
        x, left_BT = self.decoder.run(x, left_BT, batch.cache)
        for name in self._leaves:
            self._send((left_BT if name == LEFT else x).contiguous(), self.world.pipeline_rank + 1)
        if self._leaves:
            return None
        drawn = next_tokens(x, self.sampling, batch.generators)
        for worker in range(self._stages - 1):
            self._send(drawn, worker)
        return drawn

    def _take(self, batch: _Batch, drawn: torch.Tensor) -> None:
        """Every process: the drawn tokens become those to read next, and may end their sequences."""
        for row, token in enumerate(drawn.tolist()):
            if batch.reasons[row] is None:
                batch.new[row].append(token)
                asked = batch.asked[row]
                batch.reasons[row] = self.ending.of(asked.ids, batch.new[row], asked.most)
        batch.ids_BT = torch.cat([batch.ids_BT, drawn[:, None]], dim=1) if self.recompute else drawn[:, None]

    def _receive_tokens(self, batch: _Batch) -> torch.Tensor:
        drawn = torch.empty(len(batch.asked), dtype=torch.int64)
        dist.recv(drawn, src=self._rank(self._stages - 1))
        return drawn

    def _receive(self, into: torch.Tensor) -> torch.Tensor:
        dist.recv(into, src=self._rank(self.world.pipeline_rank - 1))
        return into

    def _send(self, tensor: torch.Tensor, worker: int) -> None:
        """Send without waiting; what is sent stays until it has arrived."""
        self._sent = [(work, kept) for work, kept in self._sent if work is not None and not work.is_completed()]
        self._sent.append((dist.isend(tensor, dst=self._rank(worker)), tensor))

    def _rank(self, worker: int) -> int:
        """The process at a pipeline position, as torch knows it."""
        return self.world.global_rank(self.world.peer(worker))

    def _forget_sent(self) -> None:
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()
