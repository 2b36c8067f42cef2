"""What a run says before its first step, in Megatron's words: pure lines from the configuration and a few facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import Config, config_document
from .data.batches import held_out_targets

_DOTS = 48
# What Megatron calls them; it trains a Llama as a GPT.
MODEL_NAMES = {
    "gpt": "GPT model",
    "llama": "GPT model",
    "bert": "BERT model",
    "t5": "T5 model",
    "ict": "BiEncoderModel",
}


def argument_lines(config: Config) -> list[str]:
    """Every option with its value, in alphabetical order."""
    values: dict[str, Any] = {}
    for concern in config_document(config)["config"].values():
        values.update(concern)
    lines = [f"  {name} {'.' * (_DOTS - len(name))} {value}" for name, value in values.items()]
    return [
        "------------------------ arguments ------------------------",
        *sorted(lines, key=str.lower),
        "-------------------- end of arguments ---------------------",
    ]


def batch_line(config: Config) -> str:
    """How many microbatches a step has, or how its batch grows."""
    sizes = config.batch_sizes
    if not sizes.increment:
        return f"setting number of micro-batches to constant {config.microbatches}"
    return (
        f"will use batch size rampup starting from global batch size {sizes.start} to global batch size {sizes.final}"
        f" with batch size increments {sizes.increment} over {sizes.ramp_samples} samples."
    )


def vocabulary_line(config: Config) -> str:
    """The size of the vocabulary, and of what it is padded to."""
    size, padded = config.model.vocab_size, config.padded_vocab_size
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def parameter_lines(counts: Mapping[tuple[int, int], int]) -> list[str]:
    """Parameters by (tensor, pipeline) rank."""
    return [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tensor}, {pipeline}): {count}"
        for (tensor, pipeline), count in sorted(counts.items(), key=lambda entry: entry[0][::-1])
    ]


def target_lines(train: int, valid: int, test: int) -> list[str]:
    """How many samples of each part a run asks for."""
    return [
        " > datasets target sizes (minimum size):",
        f"    train:      {train}",
        f"    validation: {valid}",
        f"    test:       {test}",
    ]


def complete_line(run: Path, step: int, rule: str) -> str:
    """A run that is loaded with all its steps done; ``rule`` says what sets their number and how to have more."""
    return f"the run in {run} is complete: {step:,} steps are done, {rule} to continue it"


def stop_line(run: Path, step: int, load: str | None, last_saved: str | None) -> str:
    """What a run that was ended before its last step has saved, and how to resume it.

    Args:
        run: run directory.
        step: last step.
        load: ``--load`` of this start.
        last_saved: name of the run's last checkpoint. One of an earlier step: that of ``step`` was refused, as the
            model is not finite.
    """
    is_saved = last_saved == f"step-{step:08d}"
    again = "run the same command again"
    if load != str(run):
        again = f"run the same command with --load {run if is_saved else run / 'checkpoints' / (last_saved or '')}"
    if is_saved:
        return f"stopped after iteration {step:,}, saved; to resume, {again}"
    stopped = f"stopped after iteration {step:,}, not saved (not finite)"
    if last_saved is None:
        return f"{stopped}; no checkpoint was saved"
    return f"{stopped}; the last checkpoint is {last_saved}; to resume from it, {again}"


def startup_lines(config: Config, counts: Mapping[tuple[int, int], int]) -> Sequence[str]:
    """All of them, in order."""
    precision = "bfloat16" if config.precision.bf16 else "float16" if config.precision.fp16 else "float32"
    parallel, training = config.parallel, config.training
    return [
        f"using torch.{precision} for parameters ...",
        *argument_lines(config),
        batch_line(config),
        f"> building {config.data.tokenizer_type} tokenizer ...",
        vocabulary_line(config),
        "> initializing torch distributed ...",
        f"> initialized tensor model parallel with size {parallel.tensor_model_parallel_size}",
        f"> initialized pipeline model parallel with size {parallel.pipeline_model_parallel_size}",
        f"> setting random seeds to {training.seed} ...",
        f"building {MODEL_NAMES[config.model.family]} ...",
        *parameter_lines(counts),
        "> building train, validation, and test datasets ...",
        *target_lines(config.batch_sizes.consumed_after(training.train_iters), *held_out_targets(config)),
    ]
