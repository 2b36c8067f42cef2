"""Text from a checkpoint: prompts to tokens, tokens to text, on any layout of the processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..config.evaluation import InferenceConfig
from ..config.task_command import check_model_flags
from ..data.tokenizer import Tokenizer
from ..models.registry import CAUSAL
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World, all_gather_objects
from ..parallel.seeding import stable_seed
from .forward_engine import forward_engine, open_source, tokenizer_of
from .generation import Answered, Asked, Ending, Generation, continuation
from .sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A continued prompt.

    ``finish_reason`` is ``end`` (the model ended the document), ``stop`` (``--stop-token``), ``length``,
    ``positions`` (the model has no more) or ``error`` (the prompt cannot be continued, for the reason in ``error``).
    """

    prompt: str
    completion: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    error: str | None = None

    def to_document(self) -> dict[str, Any]:
        """For ``--format json``; ``error`` only where there is one."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def sample(self) -> dict[str, Any]:
        """As Megatron writes a sample, with the prompt; ``error`` only where there is one."""
        return {
            "prompt": self.prompt,
            "text": self.prompt + self.completion,
            "length": self.prompt_tokens + self.completion_tokens,
            "finished": self.finish_reason in ("end", "stop"),
            **({} if self.error is None else {"error": self.error}),
        }


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How to continue prompts.

    Attributes:
        max_new_tokens: added to a prompt at most.
        out_seq_length: tokens of a prompt and what is added, at most; None: no such limit.
        stop: text that ends a sequence, wherever it is in the decoded continuation.
        num_samples: continuations of each prompt.
        batch_size: sequences that are read together.
        recompute: keep no keys and values.
    """

    max_new_tokens: int
    sampling: Sampling
    seed: int
    out_seq_length: int | None = None
    stop: str | None = None
    num_samples: int = 1
    batch_size: int = 8
    recompute: bool = False


class Writer:
    """A model that continues texts; made once, asked as often as one likes. Every process makes and asks it."""

    def __init__(self, place: InferenceConfig, wanted: Wanted, world: World, told: Mapping[str, Any]) -> None:
        run_on_all_ranks(world, wanted.sampling.check)
        source = open_source(Path(place.load), place, world)
        self.world, self.wanted = world, wanted
        family = source.model["family"]

        def prepare() -> tuple[Tokenizer, Ending]:
            if family not in CAUSAL:
                raise UsageError(
                    f"{source.checkpoint.directory} holds a {family} model, which does not continue text; models of"
                    f" the families {', '.join(CAUSAL)} do"
                )
            check_model_flags(told, source.model, source.checkpoint.directory)
            tokenizer = tokenizer_of(source, place)
            return tokenizer, Ending(eod=tokenizer.eod, stop=wanted.stop or "", decode=tokenizer.decode)

        self.tokenizer, ending = run_on_all_ranks(world, prepare)
        self.positions = int(source.model["max_position_embeddings"])
        engine = forward_engine(source, place, world, tokens=1, wrap=lambda base: base)
        for module in engine.item_store.modules.values():
            module.to(engine.settings.precision.compute)
        self._generation = Generation(
            engine,
            max_tokens=self.positions,
            sampling=wanted.sampling,
            ending=ending,
            recompute=wanted.recompute,
        )

    def _asked(self, number: int, prompt: str, sample: int) -> Asked:
        """One continuation of a prompt; an empty one begins a document, after the token that ends the one before.

        Raises:
            UsageError: the prompt is longer than the model's positions, or than ``--out-seq-length``.
        """
        ids = self.tokenizer.encode(prompt)
        if not ids:
            if self.tokenizer.eod is None:
                raise UsageError("an empty prompt needs a tokenizer with an end-of-document token; give --prompt TEXT")
            ids = [self.tokenizer.eod]
        limit = self.wanted.out_seq_length
        if len(ids) > self.positions:
            raise UsageError(
                f"the prompt {prompt[:40]!r}... has {len(ids)} tokens; the model has {self.positions} positions"
            )
        if limit is not None and len(ids) >= limit:
            raise UsageError(f"the prompt {prompt[:40]!r}... has {len(ids)} tokens; --out-seq-length is {limit}")
        # The last token that fits is drawn from the last position.
        most = min(self.wanted.max_new_tokens, self.positions + 1 - len(ids))
        if limit is not None:
            most = min(most, limit - len(ids))
        return Asked(ids=tuple(ids), most=most, seed=stable_seed(self.wanted.seed, number, sample))

    def write(self, prompts: Sequence[str]) -> list[Completion]:
        """Continue each prompt ``num_samples`` times; sample ``n`` of a prompt is the same however many are drawn.

        A prompt that cannot be continued gives a completion with the reason, and the others are continued.

        Raises:
            UsageError: no prompt can be continued.
        """
        samples = self.wanted.num_samples
        prepared = run_on_all_ranks(self.world, lambda: self._prepared(prompts))
        asked = [one for one in prepared if isinstance(one, Asked)]
        replica, replicas = self.world.data_rank, self.world.dims.data
        own = self._generation.run(asked[replica::replicas], self.wanted.batch_size)
        told = all_gather_objects(self.world, [[list(each.ids), each.reason] for each in own])
        answers: list[Answered | None] = [None] * len(asked)
        for each in range(replicas):
            rank = self.world.dims.rank_of(pipeline=0, data=each, tensor=0)
            answers[each::replicas] = [Answered(ids=tuple(ids), reason=reason) for ids, reason in told[rank]]
        left = iter(answers)
        completions = []
        for number, one in enumerate(prepared):
            prompt = prompts[number // samples]
            if isinstance(one, Asked):
                answer = next(left)
                completions += [self._completion(prompt, one, answer)] if answer is not None else []
            else:
                completions.append(one)
        return completions

    def _prepared(self, prompts: Sequence[str]) -> list[Asked | Completion]:
        """Each continuation that is asked for, or its completion with the reason why it cannot be."""
        prepared: list[Asked | Completion] = []
        errors: list[UsageError] = []
        for number, prompt in enumerate(prompts):
            try:
                prepared += [self._asked(number, prompt, n) for n in range(self.wanted.num_samples)]
            except UsageError as error:
                errors.append(error)
                failed = Completion(
                    prompt=prompt,
                    completion="",
                    prompt_tokens=len(self.tokenizer.encode(prompt)),
                    completion_tokens=0,
                    finish_reason="error",
                    error=str(error),
                )
                prepared += [failed] * self.wanted.num_samples
        if errors and len(errors) == len(prompts):
            raise errors[0]
        return prepared

    def _completion(self, prompt: str, asked: Asked, answer: Answered) -> Completion:
        text, ids, reason = continuation(self.tokenizer.decode, asked.ids, answer.ids), answer.ids, answer.reason
        if reason == "stop":
            text = text[: text.find(self.wanted.stop or "")]
            # The stop text may begin within a token, of which a part is kept.
            while len(ids) and continuation(self.tokenizer.decode, asked.ids, ids[:-1]).startswith(text):
                ids = ids[:-1]
        if reason == "length" and len(asked.ids) + len(answer.ids) > self.positions:
            reason = "positions" if len(answer.ids) < self.wanted.max_new_tokens else "length"
        return Completion(
            prompt=prompt,
            completion=text,
            prompt_tokens=len(asked.ids),
            completion_tokens=len(ids),
            finish_reason=reason,
        )
