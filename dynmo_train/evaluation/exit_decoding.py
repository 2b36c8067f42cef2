"""Greedy decoding with early exits and exact keys and values: deferred layers, and self-speculation.

The blocks are cut into segments, one after each exit. A token that exits after a segment leaves its state in the queue
of the next one. The next token that does not exit there takes all waiting states along, in one pass: every key and
value is that of the full model. EE-LLM (Chen et al. 2024, arXiv:2312.04916) recomputes such tokens as further rows of a
later forward pass; the stored states spare the lower blocks. No state is copied upwards.

    segment 0   t0 t1 t2 t3 t4      each token by itself; exits: t1 t2 t3
    segment 1   t0 [   queue  ]t4   t1 t2 t3 t4 in one pass, because t4 does not exit

Self-speculation (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710): tokens are drafted by the first exit, and the
other segments verify all drafts in one pass. The first draft that the full model does not predict is replaced by its
prediction, so that the output is that of the full model.

Shapes in names: T new tokens, D model width, V vocabulary; one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from ..models.attention.key_values import KVCache
from ..models.attention.self_attention import SelfAttention
from ..models.kv_cache import rotaries_of, rotation_of
from ..models.layer_list import ItemSpec, ModelFamily, output_of
from ..models.techniques.early_exit import ActiveTokens, Exit, response_of
from ..models.vocabulary.embedding import Embedding
from ..models.vocabulary.head import Head


@dataclass(frozen=True, kw_only=True)
class ExitThreshold:
    """The threshold of a decoded token.

    Attributes:
        value: minimum confidence of an exit, 0 to 1; at 1 no token exits.
        decay: None keeps the value. Otherwise token t of at most N new ones has the threshold
            ``0.9 value + 0.1 exp(-decay t / N)``, clipped to [0, 1], since errors of early tokens reach all later ones
            (Schuster et al. 2022, arXiv:2207.07061, equation of the decaying threshold): at 0.5 and decay 4 it falls
            from 0.55 to 0.45. The code of the paper (in t5x, decay 4) multiplies the second
            term by the value too: there it falls from 0.5 to 0.45.
    """

    value: float
    decay: float | None = None

    def at(self, token: int, num_tokens: int) -> float:
        """Threshold of the new token number ``token``, from 0, of at most ``num_tokens``; 1 where ``value`` is 1."""
        if self.decay is None or self.value >= 1.0:
            return self.value
        return min(max(0.9 * self.value + 0.1 * math.exp(-self.decay * token / num_tokens), 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class DecodedTokens:
    """The continuation of one sequence.

    Attributes:
        ids: the new tokens.
        exits: for each new token the number of the exit that predicted it, from 0; the number of exits where the last
            layer did.
        drafted: number of drafted tokens; 0 without self-speculation.
        accepted: number of those that the full model predicts, too.
    """

    ids: tuple[int, ...]
    exits: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


Ends = Callable[[Sequence[int]], bool]
"""Whether a continuation ends after these new tokens."""


def never(_new: Sequence[int]) -> bool:
    """A continuation that only its number of new tokens ends."""
    return False


class Decode(Protocol):
    """A function that continues one sequence greedily."""

    def __call__(
        self, prompt: Sequence[int], new_tokens: int, threshold: ExitThreshold, *, ends: Ends = never
    ) -> DecodedTokens:
        """Continue a sequence.

        Args:
            prompt: token ids.
            new_tokens: maximum number of new tokens.
            threshold: of the exits.
            ends: whether the sequence ends after these new tokens.
        """
        ...


def exits_of(modules: Mapping[str, nn.Module]) -> list[Exit]:
    """The exits of a model, in list order."""
    return [exit_ for module in modules.values() if isinstance(exit_ := module._modules.get("exit"), Exit)]


def set_threshold(modules: Mapping[str, nn.Module], threshold: float) -> None:
    """Set the threshold of all exits.

    Args:
        modules: item name -> module, of all items.
        threshold: minimum confidence of an exit, 0 to 1; at 1 no token exits.
    """
    for exit_ in exits_of(modules):
        exit_.settings = replace(exit_.settings, threshold=threshold)


class SegmentDecoder:
    """Decodes one sequence greedily, segment by segment.

    Args:
        family: a causal model whose blocks are attentions and MLPs.
        modules: item name -> module in evaluation mode, of all items.
        max_tokens: maximum number of tokens of the sequence.
    """

    def __init__(self, family: ModelFamily, modules: Mapping[str, nn.Module], max_tokens: int) -> None:
        self.modules, self.max_tokens = modules, max_tokens
        first, *blocks, last = family.items
        embedding, head = modules[first.name], modules[last.name]
        if not isinstance(embedding, Embedding) or not isinstance(head, Head):
            raise TypeError(f"{first.name} and {last.name} must be an embedding and an output layer")
        self._embedding, self._head = embedding, head
        self._segments: list[list[ItemSpec]] = [[]]
        for item in blocks:
            self._segments[-1].append(item)
            if isinstance(modules[item.name]._modules.get("exit"), Exit):
                self._segments.append([])
        self._exits = exits_of(modules)
        self._rotaries = rotaries_of(modules.values())
        self._start()

    def _start(self) -> None:
        """Forget the sequence."""
        self._caches = {item.name: KVCache(self.max_tokens) for segment in self._segments for item in segment}
        self._done = [0] * len(self._segments)
        self._queues: list[list[torch.Tensor]] = [[] for _ in self._segments]
        self._read = 0

    def _append(self, ids: Sequence[int]) -> None:
        """Put the embeddings of new tokens into the queue of the first segment."""
        ids_1T = torch.tensor([ids], device=self._embedding.word.weight.device)
        self._queues[0].append(self._embedding.embed(ids_1T, past=self._read))
        self._read += len(ids)

    def _run(self, segment: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a segment on all states in its queue, and put the results into the next queue.

        Returns:
            The stream before and after the last item, ``[1, T, D]``.
        """
        x_1TD = torch.cat(self._queues[segment], dim=1)
        self._queues[segment].clear()
        past, new, device = self._done[segment], x_1TD.shape[1], x_1TD.device
        mask = None
        if past and new > 1:
            mask = torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)
        rotations = {key: each.cos_sin(past, new, device, x_1TD.dtype) for key, each in self._rotaries.items()}
        before_1TD = x_1TD
        for item in self._segments[segment]:
            module, before_1TD = self.modules[item.name], x_1TD
            if isinstance(module, SelfAttention):
                x_1TD = module.extend_into(x_1TD, self._caches[item.name], mask, rotation_of(module, rotations))
            else:
                x_1TD = output_of((module.plain if isinstance(module, ActiveTokens) else module)(x_1TD))
        self._done[segment] += new
        if segment + 1 < len(self._segments):
            self._queues[segment + 1].append(x_1TD)
        return before_1TD, x_1TD

    def _at_exit(self, segment: int, before_1TD: torch.Tensor, x_1TD: torch.Tensor) -> torch.Tensor | None:
        """Logits of the last token ``[V]`` where it exits after a segment; None where it does not."""
        exit_, before_11D, x_11D = self._exits[segment], before_1TD[:, -1:], x_1TD[:, -1:]
        if exit_.settings.threshold >= 1.0:
            return None
        if exit_.settings.measure == "softmax":
            # The same logits decide and predict.
            logits_1V = self._head.logits(x_11D)[0].float()
            return logits_1V[0] if bool(exit_.exits(response_of(logits_1V.clone()))) else None
        leaves = bool(exit_.exits(exit_.confidence(before_11D, x_11D)))
        return self._head.logits(x_11D)[0, 0].float() if leaves else None

    def _truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens, which no queue contains."""
        for queue in self._queues:
            queue.clear()
        for number, segment in enumerate(self._segments):
            self._done[number] = min(self._done[number], tokens)
            for item in segment:
                self._caches[item.name].truncate(tokens)
        self._read = tokens

    def _predict(self) -> tuple[torch.Tensor, int]:
        """Logits of the last token ``[V]``, and the exit that it took."""
        for segment in range(len(self._segments)):
            before_1TD, x_1TD = self._run(segment)
            if segment < len(self._exits):
                logits_V = self._at_exit(segment, before_1TD, x_1TD)
                if logits_V is not None:
                    return logits_V, segment
        return self._head.logits(x_1TD[:, -1:])[0, 0].float(), len(self._exits)

    @torch.inference_mode()
    def decode(
        self, prompt: Sequence[int], new_tokens: int, threshold: ExitThreshold, *, ends: Ends = never
    ) -> DecodedTokens:
        """Continue a sequence; a token is predicted at its first confident exit.

        Args:
            prompt: token ids.
            new_tokens: maximum number of new tokens.
            threshold: of the exits.
            ends: whether the sequence ends after these new tokens.
        """
        self._start()
        ids: list[int] = []
        exits: list[int] = []
        read: Sequence[int] = prompt
        for token in range(new_tokens):
            set_threshold(self.modules, threshold.at(token, new_tokens))
            self._append(read)
            logits_V, exit_number = self._predict()
            ids.append(int(logits_V.argmax()))
            exits.append(exit_number)
            if ends(ids):
                break
            read = ids[-1:]
        return DecodedTokens(ids=tuple(ids), exits=tuple(exits))

    @torch.inference_mode()
    def speculate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        threshold: ExitThreshold,
        max_drafts: int,
        *,
        ends: Ends = never,
    ) -> DecodedTokens:
        """Continue a sequence as the full model does: drafts of the first exit, verified by the other segments.

        Args:
            prompt: token ids.
            new_tokens: maximum number of new tokens.
            threshold: drafting ends at a token whose confidence at the first exit is lower.
            max_drafts: maximum number of drafts before they are verified.
            ends: whether the sequence ends after these new tokens.
        """
        self._start()
        ids: list[int] = []
        exits: list[int] = []
        drafted = accepted = 0
        read: Sequence[int] = prompt
        while len(ids) < new_tokens:
            before = self._read + len(read)
            drafts: list[int] = []
            while True:
                set_threshold(self.modules, threshold.at(min(len(ids) + len(drafts), new_tokens), new_tokens))
                self._append(read)
                states = self._run(0)
                # The full model predicts one token more than it verifies.
                room = min(max_drafts, new_tokens - len(ids) - 1) - len(drafts)
                logits_V = self._at_exit(0, *states) if room > 0 else None
                if logits_V is None:
                    break
                drafts.append(int(logits_V.argmax()))
                read = drafts[-1:]
            for segment in range(1, len(self._segments)):
                _, x_1TD = self._run(segment)
            predicted = self._head.logits(x_1TD[:, -len(drafts) - 1 :])[0].float().argmax(-1).tolist()
            right = next((n for n, draft in enumerate(drafts) if draft != predicted[n]), len(drafts))
            ids += [*drafts[:right], predicted[right]]
            exits += [0] * right + [len(self._exits)]
            drafted, accepted = drafted + len(drafts), accepted + right
            # Several tokens are new; the first that ends the sequence is its last one.
            last = next((n for n in range(len(ids) - right, len(ids) + 1) if ends(ids[:n])), None)
            if last is not None:
                ids, exits = ids[:last], exits[:last]
                break
            self._truncate(before + right)
            read = ids[-1:]
        return DecodedTokens(ids=tuple(ids), exits=tuple(exits), drafted=drafted, accepted=accepted)
