"""The model of a checkpoint as a model of lm-evaluation-harness: any decoder, without an export.

    loglikelihood, loglikelihood_rolling   windows --scoring.score--> sums of losses, greedy hits
    generate_until                         prompts --TokenGenerator--> text up to a stop text

``lm_eval.py`` starts this module as ``python -m dynmo_train.evaluation.harness_model``: it registers the model as
``dynmo``, and then runs the command line of the harness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .._common.errors import UsageError
from ..config.fields import values_of
from ..config.sections.evaluation import InferenceConfig
from ..data.tokenizer import Tokenizer
from ..models.vocabulary.token_scores import ScoringFamily
from ..parallel.process_groups import World
from .chat_prompts import end_ids_of
from .forward_engine import ForwardEngine, load_forward_engine
from .model_checkpoint import ModelCheckpoint, model_tokenizer, open_causal_model
from .sampling import Sampling
from .scoring import ScoredSequence, score
from .token_generator import GenerationRequest, StopCondition, TokenGenerator, decode_continuation

MAX_GENERATED = 256
"""The harness's default number of new tokens."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
SAMPLED = ("temperature", "top_k", "top_p")
LogLikelihood = tuple[float, bool]


class Request(Protocol):
    """A request of the harness."""

    args: tuple[Any, ...]


class HarnessModel:
    """What the harness asks of a model, on token ids; ``register`` adds the harness's own class.

    Args:
        source: the checkpoint.
        inference: dtype, device, and samples per batch.
        world: the process groups.
    """

    def __init__(self, source: ModelCheckpoint, inference: InferenceConfig, world: World) -> None:
        self._source, self._inference, self._world = source, inference, world
        self.tokens: Tokenizer = model_tokenizer(source, inference)
        self.max_length = int(source.model["max_position_embeddings"])
        self._scorer: ForwardEngine | None = None
        self._engine: ForwardEngine | None = None

    @property
    def prefix_token(self) -> int:
        """The token that precedes a text without context: beginning of sequence, else end of document.

        Raises:
            UsageError: the tokenizer has none.
        """
        if self.tokens.prefix:
            return self.tokens.prefix[0]
        if self.tokens.eod is None:
            raise UsageError(
                f"the tokenizer of {self._source.directory} has no end-of-document token, which the harness puts before"
                " a text without context; give --tokenizer-model of one that has"
            )
        return self.tokens.eod

    def log_likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[LogLikelihood]:
        """Log-likelihood of each continuation, and whether it is the greedy one.

        The beginning of what exceeds the model's positions is left out, as in the harness.

        Args:
            pairs: token ids of context and continuation; a context is not empty.
        """
        sequences, numbers = [], []
        for number, (context, continuation) in enumerate(pairs):
            ids = np.asarray([*context, *continuation], dtype=np.int64)[-(self.max_length + 1) :]
            if len(continuation) and len(ids) > 1:
                first = max(1, len(ids) - len(continuation))
                sequences.append(ScoredSequence(tokens=ids, first_scored=first))
                numbers.append(number)
        if self._scorer is None:
            self._scorer = self._load(ScoringFamily, self.max_length)
        micro_batch = self._inference.micro_batch_size
        scores = score(self._scorer, sequences, longest=self.max_length, micro_batch=micro_batch)
        found: list[LogLikelihood] = [(0.0, True)] * len(pairs)
        for number, sequence, loss, hits in zip(numbers, sequences, scores.losses, scores.hits, strict=True):
            found[number] = -loss, hits == len(sequence.tokens) - sequence.first_scored
        return found

    def generate(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        """Continue texts.

        Args:
            contexts: the texts.
            options: ``until``, a maximum of new tokens, and values of sampling; as in the harness, greedy without them.

        Raises:
            UsageError: an option is unknown, or there is no position left for a prompt.
        """
        stops, length, sampling = generation_options(options)
        room = self.max_length - length
        if room < 1:
            raise UsageError(
                f"the task generates {length:,} tokens, and the model of {self._source.directory} has"
                f" {self.max_length:,} positions: no token of a prompt fits; lower max_gen_toks of the task"
            )
        if self._engine is None:
            self._engine = self._load(None, 1)
        special = self.tokens.special_ids(stops)
        texts = tuple(stop for stop in stops if stop not in special)
        ends = frozenset(special.values()) | end_ids_of(self._source.checkpoint.manifest.get("source"))
        condition = StopCondition(eod=self.tokens.eod, stops=texts, decode=self.tokens.decode, end_ids=ends)
        generator = TokenGenerator(
            self._engine, max_tokens=self.max_length, sampling=sampling, stop_condition=condition
        )
        prompts = [self.tokens.encode_prompt(text)[-room:] or [self.prefix_token] for text in contexts]
        requests = [
            GenerationRequest(ids=tuple(ids), max_new_tokens=length, seed=number) for number, ids in enumerate(prompts)
        ]
        done = generator.generate(requests, self._inference.micro_batch_size)
        return [
            before_first(decode_continuation(self.tokens.decode, request.ids, each.ids), texts)
            for request, each in zip(requests, done, strict=True)
        ]

    def _load(self, wrap: Callable[..., Any] | None, tokens: int) -> ForwardEngine:
        return load_forward_engine(self._source, self._inference, self._world, tokens=tokens, wrap=wrap)


def generation_options(options: Mapping[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
    """Stop texts, maximum of new tokens and sampling of a task's ``generation_kwargs``.

    Raises:
        UsageError: an option is unknown, or has no valid value.
    """
    unknown = set(options) - {"until", "do_sample", *LENGTHS, *SAMPLED}
    if unknown:
        raise UsageError(f"the task has generation options that are not supported: {', '.join(sorted(unknown))}")
    until = options.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    length = next((options[name] for name in LENGTHS if options.get(name) is not None), MAX_GENERATED)
    if type(length) is not int or length < 1 or not all(isinstance(stop, str) for stop in stops):
        raise UsageError(f"the generation options of the task are not valid: {dict(options)!r}")
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
    sampling = Sampling(
        temperature=temperature, top_k=int(options.get("top_k") or 0), top_p=float(options.get("top_p") or 1.0)
    )
    sampling.check()
    return tuple(stop for stop in stops if stop), length, sampling


def before_first(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop texts that it has."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def open_harness_model(load: str, batch_size: int = 8, dtype: str = "float32", device: str = "cpu") -> HarnessModel:
    """The model of a checkpoint, in this process.

    Args:
        load: run, checkpoint, or what else ``--load`` takes.
        batch_size: sequences per batch.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu`` or ``cuda``.

    Raises:
        UsageError: the checkpoint cannot be used.
    """
    from ..parallel.process_groups import init_world

    flags = {"load": load, "device": device, "micro_batch_size": batch_size}
    flags |= {name: dtype == value for name, value in (("bf16", "bfloat16"), ("fp16", "float16"))}
    inference = values_of(InferenceConfig, flags)
    world = init_world(device)
    return HarnessModel(open_causal_model(inference, world, {}), inference, world)


@functools.cache
def register() -> type[Any]:
    """Define the harness's model ``dynmo``, once; needs the harness."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    @register_model("dynmo")
    class DynmoModel(TemplateLM):  # type: ignore[misc] # the types of the harness are not read
        """``--model dynmo --model_args load=RUN,dtype=float32``."""

        def __init__(
            self, load: str, batch_size: Any = 8, dtype: str = "float32", device: str = "cpu", **_: Any
        ) -> None:
            super().__init__()
            self.model = open_harness_model(load, int(batch_size), dtype, device)

        @property
        def eot_token_id(self) -> int:
            return self.model.prefix_token

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            tokens = self.model.tokens
            return tokens.encode(string) if add_special_tokens is False else tokens.encode_prompt(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[LogLikelihood]:
            return self.model.log_likelihoods(
                [(context or [self.prefix_token_id], rest) for _key, context, rest in requests]
            )

        def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for number, request in enumerate(requests):
                rolling = get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.model.max_length,
                    context_len=1,
                )
                parts = [make_disjoint_window(window) for window in rolling]
                windows += parts
                owners += [number] * len(parts)
            totals = [0.0] * len(requests)
            for owner, (total, _is_greedy) in zip(owners, self.model.log_likelihoods(windows), strict=True):
                totals[owner] += total
            return totals

        def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
            groups: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(number)
            texts = [""] * len(requests)
            for numbers in groups.values():
                contexts = [requests[number].args[0] for number in numbers]
                done = self.model.generate(contexts, requests[numbers[0]].args[1])
                for number, text in zip(numbers, done, strict=True):
                    texts[number] = text
            return texts

    return DynmoModel


def main() -> None:
    """Register the model, and run the command line of the harness."""
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
