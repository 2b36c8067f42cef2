"""Continues text prompts with the model of a checkpoint, in any parallel layout.

prompts --tokenizer--> requests --shard over replicas--> TokenGenerator --gather--> tokens --decode--> completions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..config.sections.evaluation import InferenceConfig
from ..data.tokenizer import Tokenizer
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World, all_gather_objects
from ..parallel.seeding import stable_seed
from .chat_prompts import ChatPrompts, Conversation, end_ids_of
from .exit_generation import ExitDecoding, ExitGenerator
from .forward_engine import load_forward_engine
from .model_checkpoint import model_tokenizer, open_causal_model
from .sampling import Sampling
from .token_generator import (
    ExitCounts,
    GeneratedTokens,
    GenerationRequest,
    StopCondition,
    TokenGenerator,
    decode_continuation,
)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A continued prompt.

    ``finish_reason`` is ``end`` (end token), ``stop`` (text of ``--stop``), ``length``, ``positions`` (the
    model's positions are used up) or ``error`` (the prompt cannot be continued; ``error`` has the reason). ``exits``
    are there where early exits were requested.
    """

    prompt: str
    completion: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    error: str | None = None
    exits: ExitCounts | None = None

    def to_document(self) -> dict[str, Any]:
        """The object that ``--format json`` prints; ``error`` and shares of exits only where there are any."""
        own = {key: value for key, value in asdict(replace(self, exits=None)).items() if value is not None}
        return own if self.exits is None else {**own, **self.exits.document()}

    def sample(self) -> dict[str, Any]:
        """The object of ``--genfile``, in Megatron's format; ``error`` only where there is one."""
        return {
            "prompt": self.prompt,
            "text": self.prompt + self.completion,
            "length": self.prompt_tokens + self.completion_tokens,
            "finished": self.finish_reason in ("end", "stop"),
            **({} if self.error is None else {"error": self.error}),
        }


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How to continue prompts.

    Attributes:
        max_new_tokens: limit of the tokens added to a prompt.
        sampling: how tokens are drawn.
        seed: seed of the draws.
        out_seq_length: limit of the tokens of prompt and continuation together, None for unlimited.
        stops: texts that end a continuation, anywhere in its decoded text, and special tokens that end it.
        num_samples: continuations per prompt.
        batch_size: sequences per batch.
        recompute: read the whole sequence for every token instead of caching keys and values.
        exits: how tokens exit, greedily and one sequence at a time; None: as the model was trained, in batches.
    """

    max_new_tokens: int
    sampling: Sampling
    seed: int
    out_seq_length: int | None = None
    stops: tuple[str, ...] = ()
    num_samples: int = 1
    batch_size: int = 8
    recompute: bool = False
    exits: ExitDecoding | None = None


class TextGenerator:
    """A loaded model that continues text prompts; all ranks construct it and call ``generate`` alike.

    Args:
        inference: the model and the ranks that run it.
        settings: how to continue prompts.
        world: the process groups.
        model_flags: the model's shape as the command line states it.
        write: receives the text of continuations as it is generated; see ``TextStream``.
        open_chat: returns the chat template from the directory of the checkpoint; None: prompts are texts.

    Raises:
        UsageError: the sampling values, the checkpoint or the tokenizer cannot be used.
    """

    def __init__(
        self,
        inference: InferenceConfig,
        settings: GenerationSettings,
        world: World,
        model_flags: Mapping[str, Any],
        write: Callable[[str], None] | None = None,
        open_chat: Callable[[Path], ChatPrompts] | None = None,
    ) -> None:
        run_on_all_ranks(world, settings.sampling.check)
        source = open_causal_model(inference, world, model_flags)
        self.world, self.settings = world, settings
        self.positions = int(source.model["max_position_embeddings"])
        self.chat = None if open_chat is None else run_on_all_ranks(world, lambda: open_chat(source.directory))
        chat = None if self.chat is None else self.chat.tokenizer
        self.tokenizer: Tokenizer = run_on_all_ranks(world, lambda: model_tokenizer(source, inference, chat))
        ends = () if self.chat is None else self.chat.ends
        special = self.tokenizer.special_ids((*settings.stops, *ends))
        stop_condition = StopCondition(
            eod=self.tokenizer.eod,
            stops=tuple(stop for stop in settings.stops if stop not in special),
            decode=self.tokenizer.decode,
            end_ids=frozenset(special.values()) | end_ids_of(source.checkpoint.manifest.get("source")),
        )
        self.stream = None if write is None else TextStream(stop_condition, write)
        self._generator: TokenGenerator | ExitGenerator
        if settings.exits is not None:
            self._generator = ExitGenerator(source, inference, settings.exits, world, stop_condition)
            return
        self._generator = TokenGenerator(
            load_forward_engine(source, inference, world, tokens=1),
            max_tokens=self.positions,
            sampling=settings.sampling,
            stop_condition=stop_condition,
            recompute=settings.recompute,
            on_token=None if self.stream is None else self.stream.add,
        )

    def texts(self, conversations: Sequence[Conversation]) -> list[str]:
        """The prompts of conversations.

        Raises:
            UsageError: the chat template refuses a conversation.
        """
        if self.chat is None:
            raise UsageError("conversations need a chat template; give --chat")
        chat = self.chat
        return run_on_all_ranks(self.world, lambda: [chat.text(each) for each in conversations])

    def generate(self, prompts: Sequence[str], first: int = 0) -> list[Completion]:
        """Continue each prompt ``num_samples`` times.

        Sample ``n`` of a prompt does not depend on the number of samples. A prompt that cannot be continued gives a
        completion with the error; the others are continued.

        Args:
            prompts: the texts.
            first: index of the first one among the prompts of the command, which the draws depend on.

        Raises:
            UsageError: no prompt can be continued.
        """
        samples = self.settings.num_samples
        prepared = run_on_all_ranks(self.world, lambda: self._prepare(prompts, first))
        requests = [each for each in prepared if isinstance(each, GenerationRequest)]
        generated = iter(self._generate_on_replicas(requests))
        return [
            build_completion(
                prompts[number // samples], each, next(generated), self.tokenizer.decode, self.settings, self.positions
            )
            if isinstance(each, GenerationRequest)
            else each
            for number, each in enumerate(prepared)
        ]

    def _generate_on_replicas(self, requests: Sequence[GenerationRequest]) -> list[GeneratedTokens]:
        """Shard the requests over the replicas, and gather their results on all ranks, in order."""
        if isinstance(self._generator, ExitGenerator):
            return self._generator.generate(requests)
        replica, replicas = self.world.data_rank, self.world.dims.data
        local = self._generator.generate(requests[replica::replicas], self.settings.batch_size)
        gathered = all_gather_objects(self.world, [[list(each.ids), each.finish_reason] for each in local])
        results: dict[int, GeneratedTokens] = {}
        for index in range(replicas):
            # All pipeline and tensor ranks of a replica have the same tokens; one of them is read.
            rank = self.world.dims.rank_of(pipeline=0, data=index, tensor=0)
            for number, (ids, reason) in zip(range(index, len(requests), replicas), gathered[rank], strict=True):
                results[number] = GeneratedTokens(ids=tuple(ids), finish_reason=reason)
        return [results[number] for number in range(len(requests))]

    def _prepare(self, prompts: Sequence[str], first: int) -> list[GenerationRequest | Completion]:
        """The requests of each prompt, or its completions with the reason why it cannot be continued."""
        prepared: list[GenerationRequest | Completion] = []
        errors: list[UsageError] = []
        for number, prompt in enumerate(prompts, first):
            try:
                prepared += [self._request(number, prompt, n) for n in range(self.settings.num_samples)]
            except UsageError as error:
                errors.append(error)
                failed = Completion(
                    prompt=prompt,
                    completion="",
                    prompt_tokens=len(self._encode(prompt)),
                    completion_tokens=0,
                    finish_reason="error",
                    error=str(error),
                )
                prepared += [failed] * self.settings.num_samples
        if errors and len(errors) == len(prompts):
            raise errors[0]
        return prepared

    def _encode(self, prompt: str) -> list[int]:
        # A chat template writes the beginning-of-sequence token itself.
        return self.tokenizer.encode_prompt(prompt) if self.chat is None else self.tokenizer.encode(prompt)

    def _request(self, number: int, prompt: str, sample: int) -> GenerationRequest:
        """The request of one continuation; an empty prompt becomes the prefix or the end-of-document token.

        Raises:
            UsageError: the prompt exceeds the model's positions, or ``--out-seq-length``.
        """
        ids = self._encode(prompt)
        if not ids:
            if self.tokenizer.eod is None:
                raise UsageError("an empty prompt needs a tokenizer with an end-of-document token; give --prompt TEXT")
            ids = [self.tokenizer.eod]
        limit = self.settings.out_seq_length
        if len(ids) > self.positions:
            raise UsageError(
                f"the prompt {prompt[:40]!r}... has {len(ids)} tokens; the model has {self.positions} positions:"
                " shorten the prompt"
            )
        if limit is not None and len(ids) >= limit:
            raise UsageError(
                f"the prompt {prompt[:40]!r}... has {len(ids)} tokens; must be below --out-seq-length {limit}"
            )
        # The last position still predicts one token.
        max_new_tokens = min(self.settings.max_new_tokens, self.positions + 1 - len(ids))
        if limit is not None:
            max_new_tokens = min(max_new_tokens, limit - len(ids))
        # By prompt and sample: a draw depends neither on the batch nor on the replica that continues the prompt.
        seed = stable_seed(self.settings.seed, number, sample)
        return GenerationRequest(ids=tuple(ids), max_new_tokens=max_new_tokens, seed=seed)


class TextStream:
    """Writes the text of one continuation after another while its tokens are generated.

    What may still change is held back: characters of incomplete UTF-8, and an end that may become a stop text.

    Args:
        stop_condition: the stop texts, and how tokens are decoded.
        write: receives pieces of text.
    """

    def __init__(self, stop_condition: StopCondition, write: Callable[[str], None]) -> None:
        self._stops, self._decode = stop_condition.stops, stop_condition.decode
        self._write, self._written = write, ""

    def add(self, request: GenerationRequest, new: Sequence[int]) -> None:
        """Write the part of the text of ``request`` and its tokens ``new`` that is certain."""
        if self._decode is None:
            return
        text = decode_continuation(self._decode, request.ids, new)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        text = text[: min(found)] if found else text[: len(text) - self._open_end(text)]
        self._continue(text)

    def finish(self, completion: str) -> None:
        """Write the rest of a completion, and begin with the next one."""
        self._continue(completion)
        self._written = ""

    def _continue(self, text: str) -> None:
        # A decoder may change earlier characters, such as spaces: they are written already.
        if text.startswith(self._written) and len(text) > len(self._written):
            self._write(text[len(self._written) :])
            self._written = text

    def _open_end(self, text: str) -> int:
        """Characters at the end of ``text`` that the next tokens may complete or turn into a stop text."""
        incomplete = len(text) - len(text.rstrip("\ufffd"))
        begun = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(incomplete, max(begun, default=0))


def build_completion(
    prompt: str,
    request: GenerationRequest,
    generated: GeneratedTokens,
    decode: Callable[[Sequence[int]], str],
    settings: GenerationSettings,
    positions: int,
) -> Completion:
    """Decode the new tokens of a prompt, and remove the stop text.

    Args:
        prompt: the text.
        request: its token ids.
        generated: the new token ids.
        decode: token ids to text.
        settings: stop text, and limit of new tokens.
        positions: positions of the model.
    """
    ids, reason = generated.ids, generated.finish_reason
    text = decode_continuation(decode, request.ids, ids)
    if reason == "stop":
        text = text[: min(at for stop in settings.stops if (at := text.find(stop)) >= 0)]
        # The stop text may begin within a token; count the tokens that the text still needs.
        while len(ids) and decode_continuation(decode, request.ids, ids[:-1]).startswith(text):
            ids = ids[:-1]
    if reason == "length" and len(request.ids) + len(generated.ids) > positions:
        reason = "positions" if len(generated.ids) < settings.max_new_tokens else "length"
    return Completion(
        prompt=prompt,
        completion=text,
        prompt_tokens=len(request.ids),
        completion_tokens=len(ids),
        finish_reason=reason,
        exits=generated.exits,
    )
