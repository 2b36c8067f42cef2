"""Early exits of a trained model at several thresholds: quality, exit shares, layers per token and decoding speed.

Two measurements per threshold, next to the full model (threshold 1, where no token exits)::

    text ─▶ windows ─▶ every token is read from the text:    loss, perplexity, agreement, share of each exit, layers
         └▶ prompts ─▶ greedy continuation, one sequence:    tokens equal to the full model's, layers, tokens per second

``--exit-key-values`` selects what later tokens read of a token that has exited:

* ``stored``: as the model was trained, ``propagate`` or ``skip``;
* ``propagate``: keys and values of the state in which it exited (Schuster et al. 2022, arXiv:2207.07061);
* ``skip``: nothing;
* ``exact``: keys and values of the full model, computed later (EE-LLM);
* ``speculative``: as ``exact``, and the full model verifies what the first exit drafts (LayerSkip), so that the output
  is that of the full model. The text is then scored by the full model.

Shapes in names: B samples, T tokens, N = B*T, P tokens of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .._common.console import progress
from .._common.errors import UsageError
from ..config.sections.evaluation import ExitsConfig, InferenceConfig
from ..models.kv_cache import Decoder, DecodingCache, store_by_columns
from ..models.layer_list import ItemOutput, ModelFamily, output_of
from ..models.techniques.early_exit import Exit
from ..models.techniques.technique_blocks import DynamicFamily
from ..models.vocabulary.head import Head
from ..parallel.process_groups import World
from .exit_decoding import Decode, DecodedTokens, Ends, ExitThreshold, SegmentDecoder, exits_of, never, set_threshold
from .forward_engine import load_forward_engine
from .model_checkpoint import ModelCheckpoint, model_tokenizer, open_causal_model
from .wikitext import MAX_LOSS, detokenize, read_text

# Tokens whose logits are in memory at a time.
CHUNK_TOKENS = 128
EXACT = ("exact", "speculative")


@dataclass(frozen=True, kw_only=True)
class ThresholdResult:
    """The measurements at one threshold.

    Attributes:
        threshold: minimum confidence of an exit; at 1 no token exits.
        loss: mean over the tokens of the text, in nats.
        perplexity: its exponential.
        agreement: share of these tokens whose most likely next token is that of the full model.
        exit_shares: share of these tokens that each exit predicts, in list order.
        mean_layers: mean number of blocks up to the prediction.
        decoded_match: share of the decoded tokens that are those of the full model at the same position; None where no
            token was decoded.
        decoded_layers: mean number of blocks up to their predictions; with self-speculation of the draft, where it was
            accepted.
        tokens_per_s: decoded tokens per second, without reading the prompt's tokens but the last.
        accepted_share: share of the drafts that the full model predicts, too; None without drafts.
    """

    threshold: float
    loss: float
    perplexity: float
    agreement: float
    exit_shares: tuple[float, ...]
    mean_layers: float
    decoded_match: float | None = None
    decoded_layers: float | None = None
    tokens_per_s: float | None = None
    accepted_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """The measurements of a model.

    Attributes:
        measure: confidence measure of the exits.
        key_values: what later tokens read of exited ones.
        exit_layers: blocks (from 0) after which tokens exit.
        num_layers: number of blocks.
        tokens: scored tokens of the text.
        decoded_tokens: decoded tokens per threshold.
        thresholds: results, ascending; the last one is of threshold 1.
    """

    measure: str
    key_values: str
    exit_layers: tuple[int, ...]
    num_layers: int
    tokens: int
    decoded_tokens: int
    thresholds: tuple[ThresholdResult, ...]

    def document(self) -> dict[str, Any]:
        """The object that ``--format json`` prints."""
        return asdict(self)

    def columns(self) -> tuple[str, ...]:
        """Headings of the table."""
        shares = (f"exit {layer}" for layer in self.exit_layers)
        decoded = ("match", "decoded layers", "tokens/s", "accepted") if self.decoded_tokens else ()
        return ("threshold", "loss", "perplexity", "agreement", *shares, "mean layers", *decoded)

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table."""
        return [self._row(each) for each in self.thresholds]

    def _row(self, result: ThresholdResult) -> tuple[str, ...]:
        shares = (f"{share:.3f}" for share in result.exit_shares)
        scored = (f"{result.threshold:g}", f"{result.loss:.4f}", f"{result.perplexity:.2f}", f"{result.agreement:.3f}")
        row = (*scored, *shares, f"{result.mean_layers:.2f}")
        if result.decoded_match is None:
            return row
        accepted = "-" if result.accepted_share is None else f"{result.accepted_share:.3f}"
        return (
            *row,
            f"{result.decoded_match:.3f}",
            f"{result.decoded_layers:.2f}",
            f"{result.tokens_per_s:.1f}",
            accepted,
        )


@dataclass(frozen=True, kw_only=True)
class TextScores:
    """Per scored token: its loss, the most likely next token, and the exit that predicted it.

    Attributes:
        losses_N: float64 ``[N]``, nats.
        best_N: int64 ``[N]``.
        exits_N: int64 ``[N]``, from 0; the number of exits where the last layer did.
    """

    losses_N: torch.Tensor
    best_N: torch.Tensor
    exits_N: torch.Tensor


class ExitModel:
    """A model with exits on one process.

    Args:
        family: a causal model with exits.
        modules: item name -> module in evaluation mode, of all items.
        key_values: what later tokens read of exited ones, not ``stored``.
        max_tokens: positions of the model.
    """

    def __init__(
        self, family: DynamicFamily, modules: Mapping[str, nn.Module], key_values: str, max_tokens: int
    ) -> None:
        self.family, self.modules, self.key_values, self.max_tokens = family, modules, key_values, max_tokens
        self.exits = exits_of(modules)
        self._by_item = [name for name, module in modules.items() if isinstance(module._modules.get("exit"), Exit)]
        self._head = cast("Head", modules[family.items[-1].name])

    def score(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor, thresholds: Sequence[float]) -> list[TextScores]:
        """Score tokens of a text at each threshold.

        Args:
            ids_BT: int64 token ids, ``[B, T]``.
            labels_BT: int64 ids of the next tokens, ``[B, T]``.
            thresholds: minimum confidences.
        """
        if self.key_values in EXACT:
            return self._score_exact(ids_BT, labels_BT, thresholds)
        scores = []
        for threshold in thresholds:
            set_threshold(self.modules, threshold)
            x_BTD, exited = self._forward(ids_BT, labels_BT)
            # A token that has exited once stays so: the first exit is the number of exits that it passed.
            exits_N = sum((each == 0).long() for each in exited).reshape(-1)  # type: ignore[union-attr]
            scores.append(self._predictions(x_BTD, labels_BT, exits_N))
        return scores

    def _score_exact(
        self, ids_BT: torch.Tensor, labels_BT: torch.Tensor, thresholds: Sequence[float]
    ) -> list[TextScores]:
        """All keys and values are those of the full model: one pass without exits decides for every threshold."""
        states: list[torch.Tensor] = []
        confidences: list[torch.Tensor] = []

        def record(exit_: nn.Module, arguments: tuple[Any, ...]) -> None:
            before_BTD, after_BTD = arguments[:2]
            states.append(after_BTD)
            confidences.append(cast("Exit", exit_).confidence(before_BTD, after_BTD))

        hooks = [exit_.register_forward_pre_hook(record) for exit_ in self.exits]
        set_threshold(self.modules, 1.0)
        try:
            x_BTD, _ = self._forward(ids_BT, labels_BT)
        finally:
            for hook in hooks:
                hook.remove()
        scores = []
        # Of several confident exits the first one counts. Self-speculation has the output of the last layer.
        numbers = [] if self.key_values == "speculative" else list(reversed(range(len(self.exits))))
        for threshold in thresholds:
            chosen_BTD = x_BTD
            exits_BT = torch.full_like(labels_BT, len(self.exits))
            for number in numbers:
                set_threshold(self.modules, threshold)
                leaves_BT = self.exits[number].exits(confidences[number])
                chosen_BTD = torch.where(leaves_BT[..., None], states[number], chosen_BTD)
                exits_BT = exits_BT.masked_fill(leaves_BT, number)
            scores.append(self._predictions(chosen_BTD, labels_BT, exits_BT.reshape(-1)))
        return scores

    def _forward(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The stream before the output layer ``[B, T, D]``, and which tokens have exited after each exit ``[B, T]``."""
        inputs = {"ids": ids_BT, "labels": labels_BT}
        values: dict[str, torch.Tensor] = {}
        exited: list[torch.Tensor] = []
        for item in self.family.items[:-1]:
            arguments = [values[name] for name in item.reads] + [inputs[name] for name in item.inputs]
            result = self.modules[item.name](*arguments)
            values[item.writes] = output_of(result)
            if isinstance(result, ItemOutput):
                values.update(result.side)
            if item.name in self._by_item:
                exited.append(next(iter(result.side.values())))
        return values[self.family.items[-2].writes], exited

    def _predictions(self, x_BTD: torch.Tensor, labels_BT: torch.Tensor, exits_N: torch.Tensor) -> TextScores:
        losses, best = [], []
        rows = x_BTD.reshape(1, -1, x_BTD.shape[-1]).split(CHUNK_TOKENS, dim=1)
        for x_1PD, labels_P in zip(rows, labels_BT.reshape(-1).split(CHUNK_TOKENS), strict=True):
            logits_PV = self._head.logits(x_1PD)[0].float()
            losses.append(F.cross_entropy(logits_PV, labels_P, reduction="none").double())
            best.append(logits_PV.argmax(-1))
        return TextScores(losses_N=torch.cat(losses).cpu(), best_N=torch.cat(best).cpu(), exits_N=exits_N.cpu())

    def decoder(self, max_drafts: int) -> Decode:
        """A function of prompt, number of new tokens and threshold that decodes greedily.

        Args:
            max_drafts: maximum number of drafts before they are verified, for self-speculation.
        """
        if self.key_values not in EXACT:
            decoder = Decoder(self.family, self.modules, self.max_tokens)
            return partial(decode_with_exits, decoder, self.exits)
        segments = SegmentDecoder(self.family, self.modules, self.max_tokens)
        if self.key_values == "exact":
            return segments.decode
        # At threshold 1 it drafts nothing: the full model, a token at a time.
        return partial(segments.speculate, max_drafts=max_drafts)


@torch.inference_mode()
def decode_with_exits(
    decoder: Decoder,
    exits: Sequence[Exit],
    prompt: Sequence[int],
    new_tokens: int,
    threshold: ExitThreshold,
    *,
    ends: Ends = never,
) -> DecodedTokens:
    """Continue one sequence greedily with the keys and values that the model was built for.

    Args:
        decoder: of the whole model.
        exits: its exits, in list order.
        prompt: token ids.
        new_tokens: maximum number of new tokens.
        threshold: of the exits.
        ends: whether the sequence ends after these new tokens.
    """
    passed: list[bool] = []

    def record(_exit: nn.Module, _arguments: tuple[Any, ...], result: tuple[torch.Tensor, torch.Tensor]) -> None:
        # The last of the active tokens is the last token, where it has not exited before.
        passed.append(not bool(result[0][0, -1]))

    hooks = [exit_.register_forward_hook(record) for exit_ in exits]
    cache = DecodingCache(capacity=len(prompt) + new_tokens)
    device = next(exits[0].parameters()).device
    ids: list[int] = []
    numbers: list[int] = []
    # One by one from the last token of the prompt on: an exit that is not run has been preceded by another.
    read = torch.tensor([prompt], device=device)
    try:
        if len(prompt) > 1:
            set_threshold(decoder.modules, threshold.at(0, new_tokens))
            decoder.read(read[:, :-1], cache)
            read = read[:, -1:]
        for token in range(new_tokens):
            passed.clear()
            set_threshold(decoder.modules, threshold.at(token, new_tokens))
            logits_1V = decoder.read(read, cache)
            ids.append(int(logits_1V.argmax()))
            numbers.append(sum(passed))
            if ends(ids):
                break
            read = torch.tensor([ids[-1:]], device=device)
    finally:
        for hook in hooks:
            hook.remove()
    return DecodedTokens(ids=tuple(ids), exits=tuple(numbers))


def decoded_results(
    decode: Decode,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    thresholds: Sequence[ExitThreshold],
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[list[DecodedTokens], float]]:
    """For each threshold the continuations of all prompts, and the seconds that they took.

    Thresholds take turns at each prompt, so that other programs slow all of them down alike. The time of a continuation
    of one token is that of reading the prompt, and does not count.

    Args:
        decode: continues a prompt.
        prompts: token ids of each prompt.
        new_tokens: number of new tokens of each.
        thresholds: of the exits.
        clock: seconds.
    """
    found: list[list[DecodedTokens]] = [[] for _ in thresholds]
    seconds = [0.0] * len(thresholds)
    with progress("decoding", len(prompts) * len(thresholds), "sequences") as tick:
        for prompt in prompts:
            for number, threshold in enumerate(thresholds):
                begin = clock()
                decode(prompt, 1, threshold)
                between = clock()
                found[number].append(decode(prompt, new_tokens, threshold))
                seconds[number] += (clock() - between) - (between - begin)
                tick(1)
    return list(zip(found, seconds, strict=True))


def evaluate_exits(
    inference: InferenceConfig, task: ExitsConfig, world: World, model_flags: Mapping[str, Any]
) -> ExitReport:
    """Quality, exit shares and speed at each threshold.

    Args:
        inference: the model.
        task: text, thresholds and decoding.
        world: one process.
        model_flags: the model's shape as the command line states it.

    Raises:
        UsageError: there are several processes, the model has no exits, or the text is too short.
    """
    if world.size > 1:
        raise UsageError(f"evaluate exits: must run in one process, not in {world.size}; start it without the launcher")
    source = open_causal_model(inference, world, model_flags)
    family = check_exits(source, task.exit_key_values)
    length = source.window_length(task.seq_length)
    tokens = model_tokenizer(source, inference).encode(detokenize(read_text(Path(task.valid_data)), "none"))
    windows = np.array(windows_of(tokens, length, task), np.int64)
    model = load_exit_model(source, inference, task.exit_key_values, family, length, world)
    thresholds = sorted({*task.thresholds, 1.0})
    scores = score_windows(model, windows, thresholds, inference.micro_batch_size, world.device)
    timed: list[tuple[list[DecodedTokens], float]] = []
    if task.decoded_prompts:
        if world.device.type == "cpu":
            for module in model.modules.values():
                store_by_columns(module)
        prompts = [tuple(each) for each in windows[: task.decoded_prompts, : length - task.new_tokens].tolist()]
        steps = [ExitThreshold(value=each, decay=task.exit_decay) for each in thresholds]
        timed = decoded_results(model.decoder(task.draft_tokens), prompts, task.new_tokens, steps)
    return report(model, thresholds, scores, timed)


def check_exits(source: ModelCheckpoint, mode: str) -> DynamicFamily:
    """The family of a checkpoint, whose exits have the keys and values that are requested.

    Args:
        source: the checkpoint.
        mode: ``--exit-key-values``.

    Raises:
        UsageError: it has no exits, or routed blocks and exact keys and values.
    """
    family: ModelFamily = source.family
    exits = family.settings.exits if isinstance(family, DynamicFamily) else None
    if not isinstance(family, DynamicFamily) or exits is None:
        raise UsageError(f"{source.directory}: the model has no early exits; train it with --early-exit-layers")
    settings = family.settings
    if mode in EXACT and (settings.depths is not None or settings.sparse_attention is not None):
        raise UsageError(
            f"--exit-key-values {mode}: must be propagate, skip or stored with mixture of depths or sparse attention"
        )
    propagate = exits.propagate if mode in ("stored", *EXACT) else mode == "propagate"
    changed = replace(settings, exits=replace(exits, propagate=propagate))
    return DynamicFamily(family.base, changed, seed=family.seed, width=family.width, std=family.std)


def windows_of(tokens: Sequence[int], length: int, task: ExitsConfig) -> list[Sequence[int]]:
    """Rows of ``length + 1`` tokens, the last of which is only a label; at most ``--max-windows``.

    Raises:
        UsageError: there are too few tokens, or a window has no room for a prompt.
    """
    if len(tokens) <= length:
        raise UsageError(
            f"--valid-data {task.valid_data}: has {len(tokens):,} tokens, fewer than one window of {length + 1:,};"
            " give a longer text, or a smaller --seq-length"
        )
    if task.decoded_prompts and task.new_tokens >= length:
        raise UsageError(
            f"--new-tokens {task.new_tokens}: must be below {length}, the tokens of a window, whose begin is the prompt"
        )
    rows = [tokens[begin : begin + length + 1] for begin in range(0, len(tokens) - length, length)]
    return rows[: task.max_windows]


def load_exit_model(
    source: ModelCheckpoint,
    inference: InferenceConfig,
    mode: str,
    family: DynamicFamily,
    length: int,
    world: World,
) -> ExitModel:
    """Load the weights of a checkpoint into ``family``.

    Args:
        source: the checkpoint.
        inference: dtype, and windows at a time.
        mode: ``--exit-key-values``.
        family: of :func:`check_exits`.
        length: tokens of a window.
        world: one process.
    """
    engine = load_forward_engine(source, inference, world, tokens=length, wrap=lambda _: family)
    settings = family.settings.exits
    if mode == "stored":
        mode = "propagate" if settings is not None and settings.propagate else "skip"
    return ExitModel(family, engine.modules, mode, int(source.model["max_position_embeddings"]))


def score_windows(
    model: ExitModel,
    windows: np.ndarray[Any, np.dtype[np.int64]],
    thresholds: Sequence[float],
    rows: int,
    device: torch.device,
) -> list[TextScores]:
    """Score windows ``[number, T + 1]`` at each threshold, ``rows`` windows at a time."""
    parts: list[list[TextScores]] = []
    with progress("scoring", len(windows), "windows") as tick, torch.no_grad():
        for batch in _batches(windows, rows):
            ids = torch.from_numpy(batch).to(device)
            parts.append(model.score(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), thresholds))
            tick(len(batch))
    return [
        TextScores(
            **{name: torch.cat([getattr(part, name) for part in each]) for name in ("losses_N", "best_N", "exits_N")}
        )
        for each in zip(*parts, strict=True)
    ]


def _batches(windows: np.ndarray[Any, np.dtype[np.int64]], rows: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    for begin in range(0, len(windows), rows):
        yield windows[begin : begin + rows]


def exit_depths(family: DynamicFamily) -> tuple[int, ...]:
    """The number of blocks up to each exit, in list order, and of all."""
    exits = family.settings.exits
    layers = exits.layers if exits is not None else ()
    return (*(layer + 1 for layer in layers), int(str(family.manifest()["num_layers"])))


def report(
    model: ExitModel,
    thresholds: Sequence[float],
    scores: Sequence[TextScores],
    timed: Sequence[tuple[Sequence[DecodedTokens], float]],
) -> ExitReport:
    """Summarize the measurements; the last threshold is 1, the full model.

    Args:
        model: what was measured.
        thresholds: ascending.
        scores: of the text, for each threshold.
        timed: continuations and seconds, for each threshold; empty without decoding.
    """
    exits = model.family.settings.exits
    depths = torch.tensor(exit_depths(model.family), dtype=torch.float64)
    full = scores[-1]
    results = []
    for number, (threshold, each) in enumerate(zip(thresholds, scores, strict=True)):
        shares = torch.bincount(each.exits_N, minlength=len(depths)).double() / len(each.exits_N)
        loss = float(each.losses_N.mean())
        result = ThresholdResult(
            threshold=threshold,
            loss=loss,
            perplexity=math.exp(min(MAX_LOSS, loss)),
            agreement=float((each.best_N == full.best_N).double().mean()),
            exit_shares=tuple(shares[:-1].tolist()),
            mean_layers=float(shares @ depths),
        )
        results.append(_with_decoded(result, timed, number, depths) if timed else result)
    return ExitReport(
        measure="" if exits is None else exits.measure,
        key_values=model.key_values,
        exit_layers=() if exits is None else exits.layers,
        num_layers=exit_depths(model.family)[-1],
        tokens=len(full.losses_N),
        decoded_tokens=sum(len(each.ids) for each in timed[0][0]) if timed else 0,
        thresholds=tuple(results),
    )


def _with_decoded(
    result: ThresholdResult,
    timed: Sequence[tuple[Sequence[DecodedTokens], float]],
    number: int,
    depths: torch.Tensor,
) -> ThresholdResult:
    """``result`` with what was decoded at threshold ``number``; ``depths`` ``[exits + 1]`` are numbers of blocks."""
    (found, seconds), (expected, _) = timed[number], timed[-1]
    pairs = [pair for one, full in zip(found, expected, strict=True) for pair in zip(one.ids, full.ids, strict=True)]
    drafted = sum(one.drafted for one in found)
    return replace(
        result,
        decoded_match=sum(own == full for own, full in pairs) / len(pairs),
        decoded_layers=float(depths[[each for one in found for each in one.exits]].mean()),
        # The first token of each sequence comes with the prompt.
        tokens_per_s=(len(pairs) - len(found)) / seconds if seconds > 0 else None,
        accepted_share=sum(one.accepted for one in found) / drafted if drafted else None,
    )
