"""Continues prompts with early exits: greedily, one sequence at a time, in one process.

The same decoders as ``evaluate exits`` (``exits.py``), with the stop conditions of ``generate``::

    requests ─▶ ExitModel.decoder(key and values) ─▶ tokens, the exit of each ─▶ GeneratedTokens, ExitCounts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._common.errors import UsageError
from ..config.sections.evaluation import InferenceConfig
from ..models.kv_cache import store_by_columns
from ..parallel.process_groups import World
from .exit_decoding import DecodedTokens, ExitThreshold
from .exits import check_exits, exit_depths, load_exit_model
from .model_checkpoint import ModelCheckpoint
from .token_generator import ExitCounts, GeneratedTokens, GenerationRequest, StopCondition


@dataclass(frozen=True, kw_only=True)
class ExitDecoding:
    """How tokens exit.

    Attributes:
        threshold: minimum confidence of an exit; None: as the model was trained.
        decay: of the threshold over the new tokens; see ``ExitThreshold``.
        key_values: ``--exit-key-values``.
        max_drafts: maximum number of drafts before they are verified.
    """

    threshold: float | None
    decay: float | None
    key_values: str
    max_drafts: int


class ExitGenerator:
    """Continues token sequences with early exits.

    Args:
        source: the checkpoint.
        inference: dtype and device.
        decoding: how tokens exit.
        world: one process.
        stop_condition: what ends a sequence.

    Raises:
        UsageError: there are several processes, or the model has no such exits.
    """

    def __init__(
        self,
        source: ModelCheckpoint,
        inference: InferenceConfig,
        decoding: ExitDecoding,
        world: World,
        stop_condition: StopCondition,
    ) -> None:
        if world.size > 1:
            raise UsageError(
                f"--exit-threshold, --exit-key-values: must run in one process, not in {world.size}; start it without"
                " the launcher"
            )
        family = check_exits(source, decoding.key_values)
        model = load_exit_model(source, inference, decoding.key_values, family, 1, world)
        if world.device.type == "cpu":
            for module in model.modules.values():
                store_by_columns(module)
        trained = 1.0 if family.settings.exits is None else family.settings.exits.threshold
        value = trained if decoding.threshold is None else decoding.threshold
        self._threshold = ExitThreshold(value=value, decay=decoding.decay)
        self._decode, self._depths = model.decoder(decoding.max_drafts), exit_depths(family)
        self._stop_condition = stop_condition

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GeneratedTokens]:
        """Continue each request; results in input order."""
        return [self._continue(request) for request in requests]

    def _continue(self, request: GenerationRequest) -> GeneratedTokens:
        def reason_of(new: Sequence[int]) -> str | None:
            return self._stop_condition.finish_reason(request.ids, new, request.max_new_tokens)

        if not request.max_new_tokens:
            return GeneratedTokens(ids=(), finish_reason="length", exits=self._counts(DecodedTokens(ids=(), exits=())))
        found = self._decode(
            request.ids, request.max_new_tokens, self._threshold, ends=lambda new: reason_of(new) is not None
        )
        reason = reason_of(found.ids) or "length"
        ids = found.ids[: len(found.ids) - (reason == "end")]
        return GeneratedTokens(ids=ids, finish_reason=reason, exits=self._counts(found))

    def _counts(self, found: DecodedTokens) -> ExitCounts:
        last = len(self._depths) - 1
        return ExitCounts(
            tokens=len(found.exits),
            exited=sum(number < last for number in found.exits),
            layers=sum(self._depths[number] for number in found.exits),
            num_layers=self._depths[-1],
            drafted=found.drafted,
            accepted=found.accepted,
        )


def describe_exits(counts: Iterable[ExitCounts]) -> str:
    """One line on the exits of all continuations."""
    found = list(counts)
    tokens = sum(each.tokens for each in found)
    total = ExitCounts(
        tokens=tokens,
        exited=sum(each.exited for each in found),
        layers=sum(each.layers for each in found),
        num_layers=max((each.num_layers for each in found), default=0),
        drafted=sum(each.drafted for each in found),
        accepted=sum(each.accepted for each in found),
    )
    drafts = f" | accepted drafts: {total.accepted:,} of {total.drafted:,}" if total.drafted else ""
    return (
        f"exited tokens: {total.exited_share:.3f} of {tokens:,} | layers per token: {total.layers_per_token:.2f} of"
        f" {total.num_layers}{drafts}"
    )
