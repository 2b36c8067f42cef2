"""Autoregressive generation for many sequences, in batches that are interleaved over the pipeline stages.

Each replica continues its own requests. A pipeline of P stages has P batches in flight: while one is in the last
stage, the next one is in the stage before it.

    batch 0:  stage 0 -> stage 1 -> ... -> last stage: sample -+
    batch 1:             stage 0 -> ...                        |
                 ^                                             |
                 +------------ tokens of batch 0 --------------+   (to all stages)

The last stage samples the tokens and sends them to all other stages, so that every rank knows when a sequence ends.
Shapes in names: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..models.families.multi_token import PREDICTION
from ..models.kv_cache import Decoder, DecodingCache, is_ragged_safe, rotation_switch, store_by_columns
from ..models.packed_linear import can_pack, pack_weights
from ..models.techniques.early_exit import EXITED
from .forward_engine import ForwardEngine
from .sampling import Sampling, next_tokens

# Tokens before the new ones that are decoded with them: they decide on spaces and on the bytes of a character.
_CONTEXT_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A sequence to continue: its token ids, the limit of new tokens, and the seed of its draws."""

    ids: tuple[int, ...]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ExitCounts:
    """The early exits of a continuation.

    Attributes:
        tokens: number of new tokens.
        exited: those that an exit predicted; with self-speculation, accepted drafts.
        layers: blocks up to the predictions, over all tokens.
        num_layers: blocks of the model.
        drafted, accepted: drafts, and those that the full model predicts too; 0 without self-speculation.
    """

    tokens: int
    exited: int
    layers: int
    num_layers: int
    drafted: int = 0
    accepted: int = 0

    @property
    def exited_share(self) -> float:
        """Share of the tokens that an exit predicted."""
        return self.exited / max(1, self.tokens)

    @property
    def layers_per_token(self) -> float:
        """Mean number of blocks up to a prediction."""
        return self.layers / max(1, self.tokens)

    def document(self) -> dict[str, float]:
        """Shares, for ``--format json``."""
        shares = {"exited_share": self.exited_share, "layers_per_token": self.layers_per_token}
        return {**shares, "accepted_share": self.accepted / self.drafted} if self.drafted else shares


@dataclass(frozen=True, kw_only=True)
class GeneratedTokens:
    """New token ids without the end token; ``finish_reason`` is ``end``, ``stop`` or ``length``."""

    ids: tuple[int, ...]
    finish_reason: str
    exits: ExitCounts | None = None


@dataclass(frozen=True, kw_only=True)
class StopCondition:
    """Ends a sequence at an end token, or at one of several texts in the decoded new tokens.

    A text cannot be compared as token ids: its tokenization depends on what precedes it, and it may begin and end
    within tokens.

    Attributes:
        eod: id of the end-of-document token, or None.
        stops: the texts, none of them empty.
        decode: token ids to text; required with ``stops``.
        end_ids: ids of further end tokens, such as that of the end of a turn.
    """

    eod: int | None
    stops: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    end_ids: frozenset[int] = frozenset()

    def finish_reason(self, prompt: Sequence[int], new: Sequence[int], max_new_tokens: int) -> str | None:
        """Why a sequence ends after these new tokens; None where it continues.

        Args:
            prompt: token ids of the prompt.
            new: token ids generated so far.
            max_new_tokens: limit of new tokens.
        """
        if new and (new[-1] == self.eod or new[-1] in self.end_ids):
            return "end"
        if self.stops and self.decode is not None and new:
            # Checked after each token, so a match ends in the last token. The window covers the text even where every
            # token is one byte of a character of four bytes.
            window = _CONTEXT_TOKENS + 4 * max(map(len, self.stops))
            tail = new[-window:]
            before = new[: len(new) - len(tail)][-_CONTEXT_TOKENS:] or prompt[-_CONTEXT_TOKENS:]
            text = decode_continuation(self.decode, before, tail)
            if any(stop in text for stop in self.stops):
                return "stop"
        return "length" if len(new) >= max_new_tokens else None


def decode_continuation(decode: Callable[[Sequence[int]], str], before: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens, decoded after those before: a space or a character may span the border."""
    text, start = decode([*before, *new]), decode(before)
    return text[len(start) :] if text.startswith(start) else decode(new)


@dataclass
class _Batch:
    """Sequences that are decoded together, padded on the left to one length.

    Attributes:
        requests: the requests, B.
        cache: keys and values of the tokens read so far.
        ids_BT: token ids to read next, int64 on CPU: the prompts, then one token per sequence.
        whole_BT: all token ids so far, int64 on CPU.
        generators: one CPU generator per sequence.
        new: tokens generated so far, per sequence.
        reasons: why each sequence ended; None while it continues.
    """

    requests: Sequence[GenerationRequest]
    cache: DecodingCache
    ids_BT: torch.Tensor
    whole_BT: torch.Tensor
    generators: list[torch.Generator]
    new: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(reason is not None for reason in self.reasons)


class TokenGenerator:
    """Continues token sequences with the model of a forward engine; all ranks call the same methods.

    Args:
        engine: the stage of this rank.
        max_tokens: positions of the model.
        sampling: how tokens are drawn.
        stop_condition: what ends a sequence.
        recompute: read the whole sequence for every token instead of caching keys and values.
        on_token: called after each new token of a sequence, with its request and all its new tokens.
    """

    def __init__(
        self,
        engine: ForwardEngine,
        *,
        max_tokens: int,
        sampling: Sampling,
        stop_condition: StopCondition,
        recompute: bool = False,
        on_token: Callable[[GenerationRequest, Sequence[int]], None] | None = None,
    ) -> None:
        self.engine, self.sampling, self.stop_condition, self.recompute = engine, sampling, stop_condition, recompute
        self._on_token = on_token
        self.decoder = Decoder(engine.family, engine.modules, max_tokens, engine.items)
        self._width = int(str(engine.family.manifest()["hidden_size"]))
        self._is_ragged_safe = is_ragged_safe(engine.family)
        self._switch = rotation_switch(engine.family)

    @property
    def _stages(self) -> int:
        return self.engine.world.dims.pipeline

    def generate(self, requests: Sequence[GenerationRequest], batch_size: int) -> list[GeneratedTokens]:
        """Continue this replica's requests, in batches of at most ``batch_size`` sequences; results in input order."""
        results: dict[int, GeneratedTokens] = {}
        groups = list(self._groups(requests, batch_size))
        self._lay_out_weights(max(map(len, groups), default=1))
        for begin in range(0, len(groups), self._stages):
            in_flight = groups[begin : begin + self._stages]
            batches = self._decode_interleaved([[requests[number] for number in group] for group in in_flight])
            for group, batch in zip(in_flight, batches, strict=True):
                for number, new, reason in zip(group, batch.new, batch.reasons, strict=True):
                    ids = new[: len(new) - (reason == "end")]
                    results[number] = GeneratedTokens(ids=tuple(ids), finish_reason=reason or "length")
        return [results[number] for number in range(len(requests))]

    def _lay_out_weights(self, sequences: int) -> None:
        """Store weights for products with one new token of each of ``sequences`` sequences."""
        if self.engine.world.device.type != "cpu":
            return
        # Where items select tokens, sequences are decoded one at a time.
        is_batch = sequences > 1 and self._is_ragged_safe and can_pack()
        for module in self.decoder.modules.values():
            if is_batch:
                pack_weights(module, sequences)
            else:
                store_by_columns(module)

    def _groups(self, requests: Sequence[GenerationRequest], size: int) -> Iterator[list[int]]:
        """Indices of the requests of each batch, sorted by length so that little is padded."""
        order = sorted(range(len(requests)), key=lambda number: len(requests[number].ids))
        group: list[int] = []
        for number in order:
            differs = bool(group) and len(requests[group[0]].ids) != len(requests[number].ids)
            # With a switch, the longest sequence of a batch decides on the rotation of all.
            if len(group) == size or (differs and not (self._is_ragged_safe and self._switch is None)):
                yield group
                group = []
            group.append(number)
        if group:
            yield group

    def _decode_interleaved(self, groups: Sequence[Sequence[GenerationRequest]]) -> list[_Batch]:
        """Decode several batches to their ends, one token of each batch per round."""
        batches = [_new_batch(group) for group in groups]
        while not all(batch.is_finished for batch in batches):
            # All batches first enter the pipeline; only then does a stage wait for tokens. So the stages work at once.
            drawn = {number: self._step(batch) for number, batch in enumerate(batches) if not batch.is_finished}
            # The earlier stages block here until the last one has sampled.
            for number, tokens_B in drawn.items():
                if tokens_B is None:
                    tokens_B = torch.empty(len(batches[number].requests), dtype=torch.int64)
                    self.engine.receive(tokens_B, self._stages - 1)
                self._append(batches[number], tokens_B)
        self.engine.wait_for_sends()
        return batches

    def _step(self, batch: _Batch) -> torch.Tensor | None:
        """Run this stage on the batch's next tokens; the sampled tokens, int64 ``[B]``, on the last stage."""
        engine = self.engine
        past = batch.cache.tokens
        switches = self._switch is not None and 0 < past <= self._switch < past + batch.ids_BT.shape[1]
        if switches:
            batch.ids_BT = batch.whole_BT
        # The whole sequence is in ``ids_BT`` then, so the cache must be empty.
        if self.recompute or switches:
            batch.cache.tokens = 0
            batch.cache.by_item.clear()
        x = batch.ids_BT.to(engine.world.device)
        exited_BT = torch.zeros(x.shape, device=x.device, dtype=engine.dtype)
        hidden_BTD = torch.empty(*x.shape, self._width, device=x.device, dtype=engine.dtype) if engine.entering else x
        for name in (each for each in engine.entering if each != PREDICTION):
            engine.receive(exited_BT if name == EXITED else hidden_BTD, engine.world.pipeline_rank - 1)
        x, exited_BT = self.decoder.run(hidden_BTD, exited_BT, batch.cache)
        for name in (each for each in engine.leaving if each != PREDICTION):
            engine.send(exited_BT if name == EXITED else x, engine.world.pipeline_rank + 1)
        if engine.leaving:
            return None
        drawn_B = next_tokens(x, self.sampling, batch.generators)
        # To all stages: each of them must know when a sequence ends, and the first one reads the tokens next.
        for pipeline_rank in range(self._stages - 1):
            engine.send(drawn_B, pipeline_rank)
        return drawn_B

    def _append(self, batch: _Batch, drawn_B: torch.Tensor) -> None:
        """Append the sampled tokens to their sequences; they are read next."""
        for row, token in enumerate(drawn_B.tolist()):
            # A finished sequence stays in its batch, so that all stages keep the same shapes; its tokens are discarded.
            if batch.reasons[row] is None:
                request = batch.requests[row]
                batch.new[row].append(token)
                batch.reasons[row] = self.stop_condition.finish_reason(
                    request.ids, batch.new[row], request.max_new_tokens
                )
                if self._on_token is not None:
                    ends = batch.reasons[row] == "end"
                    self._on_token(request, batch.new[row][: len(batch.new[row]) - ends])
        batch.whole_BT = torch.cat([batch.whole_BT, drawn_B[:, None]], dim=1)
        batch.ids_BT = batch.whole_BT if self.recompute else drawn_B[:, None]


def _new_batch(requests: Sequence[GenerationRequest]) -> _Batch:
    longest = max(len(request.ids) for request in requests)
    padding_B = torch.tensor([longest - len(request.ids) for request in requests])
    ids_BT = torch.zeros(len(requests), longest, dtype=torch.int64)
    for row, request in enumerate(requests):
        ids_BT[row, int(padding_B[row]) :] = torch.tensor(request.ids)
    # The memory of keys and values is allocated once, for the longest sequence of the batch.
    capacity = longest + max(request.max_new_tokens for request in requests)
    return _Batch(
        requests=requests,
        cache=DecodingCache(capacity=capacity, padding=padding_B if bool(padding_B.any()) else None),
        ids_BT=ids_BT,
        whole_BT=ids_BT,
        generators=[torch.Generator().manual_seed(request.seed) for request in requests],
        new=[[] for _ in requests],
        reasons=[None if request.max_new_tokens else "length" for request in requests],
    )
