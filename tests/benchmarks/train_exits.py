"""Early exits of a trained model: quality, exit share, layers per token and decoding speed at each threshold.

A GPT with exits after a third and two thirds of its blocks is trained on a text (BPE vocabulary of the text itself),
all tokens through all blocks (threshold 1), with a classifier at each exit. Held-out text of the same file is then
evaluated as ``dynmo-train evaluate exits`` does: with each confidence measure, and with copied, exact and verified keys
and values. Times are processor time of one thread, in turns of the thresholds.

    python tests/benchmarks/train_exits.py [--text FILE] [--seed 0] [--steps 150] [--layers 6] [--width 128]

Prints a line of JSON per measure, way and threshold. Several seeds are several calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from plain_engine import engine_of, gpt_of

from dynmo_train.data.batch import Batch
from dynmo_train.evaluation.exit_decoding import ExitThreshold, exits_of, set_threshold
from dynmo_train.evaluation.exits import ExitModel, decoded_results, report, score_windows
from dynmo_train.models.kv_cache import store_by_columns
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings
from dynmo_train.optim.lr_schedule import LearningRate
from dynmo_train.parallel.process_groups import init_world

THRESHOLDS = {
    "softmax": (0.02, 0.05, 0.1, 0.2),
    "classifier": (0.02, 0.05, 0.1, 0.2),
    "saturation": (0.8, 0.9, 0.95, 0.98),
}
WAYS = (("softmax", "propagate"), ("softmax", "exact"), ("softmax", "speculative"), ("classifier", "propagate"))
WAYS = (*WAYS, ("saturation", "propagate"))


def token_ids(text: str, vocabulary: int) -> np.ndarray:
    """Ids of a byte-level BPE that is trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text], trainer)
    return np.array(tokenizer.encode(text).ids, np.int64)


def batches(ids: np.ndarray, options: argparse.Namespace) -> Iterator[Batch]:
    """Random windows of the training tokens."""
    generator = np.random.default_rng(options.seed)
    for step in range(1, options.steps + 1):
        begins = generator.integers(0, len(ids) - options.tokens - 1, options.batch)
        rows = torch.from_numpy(np.stack([ids[begin : begin + options.tokens + 1] for begin in begins]))
        inputs = {"ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        yield Batch(inputs=inputs, first_microbatch=step - 1, step=step, microbatches=1)


def trained(ids: np.ndarray, options: argparse.Namespace) -> tuple[DynamicFamily, dict[str, torch.nn.Module], float]:
    """The trained model, and the loss of its last step."""
    gpt = gpt_of(
        layers=options.layers,
        width=options.width,
        heads=options.width // 32,
        tokens=options.tokens,
        vocabulary=options.vocabulary,
    )
    exits = ExitSettings(
        layers=(options.layers // 3 - 1, 2 * options.layers // 3 - 1),
        loss_weight=0.6,
        threshold=1.0,
        measure="classifier",
        token_share=0.25,
        propagate=True,
    )
    family = DynamicFamily(gpt, DynamicSettings(exits=exits), seed=options.seed, width=options.width, std=0.02)
    rate = LearningRate(
        peak=options.rate,
        floor=options.rate / 10,
        style="cosine",
        warmup_steps=options.steps // 10,
        decay_steps=options.steps,
    )
    engine = engine_of(
        family,
        init_world("cpu"),
        microbatches=1,
        boundary=(options.batch, options.tokens, options.width),
        rate=rate,
    )
    loss = 0.0
    for batch in batches(ids, options):
        loss = engine.train_step(batch, sampled=False).loss
        engine.after_step(batch.step)
        if batch.step % 20 == 0:
            sys.stderr.write(f"seed {options.seed}, step {batch.step}: loss {loss:.3f}\n")
    modules = dict(engine.item_store.modules)
    for module in modules.values():
        module.eval().requires_grad_(False)
    return family, modules, loss


def equal_decisions(model: ExitModel, windows: np.ndarray, threshold: float) -> list[float]:
    """For each exit, the share of tokens on which the classifier decides as the softmax response."""
    set_threshold(model.modules, 1.0)
    pairs: list[float] = []

    def record(exit_: torch.nn.Module, arguments: tuple) -> None:
        by_measure = []
        for measure in ("softmax", "classifier"):
            exit_.settings = replace(exit_.settings, measure=measure, threshold=threshold)
            by_measure.append(exit_.exits(exit_.confidence(*arguments[:2])))
        exit_.settings = replace(exit_.settings, threshold=1.0)
        pairs.append(float((by_measure[0] == by_measure[1]).double().mean()))

    hooks = [exit_.register_forward_pre_hook(record) for exit_ in exits_of(model.modules)]
    ids = torch.from_numpy(windows)
    with torch.no_grad():
        model._forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    for hook in hooks:
        hook.remove()
    return pairs


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--windows", type=int, default=12, help="of held-out text")
    parser.add_argument("--prompts", type=int, default=2, help="whose begin is continued")
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ids = token_ids(options.text.read_text(encoding="utf-8"), options.vocabulary)
    validation = ids[-len(ids) // 10 :]
    family, modules, loss = trained(ids[: -len(ids) // 10], options)
    rows = [
        validation[at : at + options.tokens + 1] for at in range(0, len(validation) - options.tokens, options.tokens)
    ]
    windows = np.stack(rows[: options.windows])
    prompts = [tuple(row) for row in windows[: options.prompts, : options.tokens - options.new_tokens].tolist()]
    for module in modules.values():
        store_by_columns(module)
    for measure, key_values in WAYS:
        model = ExitModel(family, modules, key_values, options.tokens)
        thresholds = [*THRESHOLDS[measure], 1.0]
        equal = {each: equal_decisions(model, windows, each) for each in thresholds} if measure == "classifier" else {}
        for exit_ in model.exits:
            exit_.settings = replace(exit_.settings, measure=measure)
        scores = score_windows(model, windows, thresholds, 4, torch.device("cpu"))
        steps = [ExitThreshold(value=each) for each in thresholds]
        timed = decoded_results(model.decoder(6), prompts, options.new_tokens, steps, time.process_time)
        for each in report(model, thresholds, scores, timed).thresholds:
            line = {"seed": options.seed, "measure": measure, "key_values": key_values, **asdict(each)}
            line |= {"equal_decisions": equal[each.threshold]} if equal else {}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    sys.stderr.write(f"seed {options.seed}: loss of the last step {loss:.3f}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
