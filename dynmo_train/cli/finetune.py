"""``dynmo-train finetune``: fine-tune a BERT on MNLI or RACE."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from .._common.console import print_message
from .._common.document import DocumentError
from .._common.errors import EXIT_USAGE, UsageError
from .._common.help import CommandLine
from ..config import DefaultContext, read_config_file, resolve_checked
from ..config.command import MegatronCommand, with_specs
from ..config.fields import specs_of, values_of
from ..config.panels import TASK_PANELS
from ..config.resolve import built_in_specs
from ..config.rules.task_effect import task_warnings
from ..config.sections.evaluation import FinetuneConfig
from .common import ConfigFile, ignore_signals_until_training, is_rank0, need_torch, world_size

finetune = CommandLine(help="Fine-tune a BERT on a task.")
_EXCLUDED = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "train_iters", "train_samples")
_SPECS = (
    *specs_of(FinetuneConfig),
    *(spec for spec in built_in_specs().values() if spec.name not in (*_EXCLUDED, "recipe")),
)
# Defaults of options that pretraining requires.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_DEFAULTS = {
    **dict.fromkeys(_SIZES, "as in --pretrained-checkpoint"),
    **{"lr": "5e-05", "micro_batch_size": "8", "log_interval": "10"},
}


class FinetuneCommand(MegatronCommand):
    """A command that also accepts the flags of Megatron's scripts; its name is the task."""

    panel_order = TASK_PANELS

    def family(self) -> str:
        """The family of every fine-tuned model."""
        return "bert"


def _finetune(task: str, config_file: Path | None, flags: dict[str, Any]) -> None:
    """Resolve and check the configuration, then train."""
    need_torch()
    values = _read_file(config_file) if config_file is not None else {}
    flags = {**values, **{name: value for name, value in flags.items() if value is not None}}
    from ..data.tokenizer import read_vocab_size
    from ..evaluation.classification import split_paths
    from ..evaluation.finetune import count_samples, run_finetune

    own = {spec.name for spec in specs_of(FinetuneConfig)}
    given = {name: value for name, value in flags.items() if name not in own}
    try:
        options = _checked_values(flags)
        for line in task_warnings(options) if is_rank0() else ():
            print_message(f"warning: {line}")
        samples = count_samples(task, options)
        epochs = options.epochs if options.epochs is not None else 3
        shape = _pretrained_shape(options, given)
        data = split_paths("--train-data", options.train_data) if options.train_data is not None else ["none"]
        command = {"family": "bert", "data_path": shlex.quote(data[0]), "eval_iters": 0}
        steps = _steps(samples * epochs, {**shape, **{k: v for k, v in given.items() if v is not None}})
        if samples and epochs and not steps:
            raise UsageError(f"--train-data: {samples} samples x {epochs} epochs must be at least one batch")
        file = {"lr": 5e-5, "micro_batch_size": 8, "log_interval": 10, **shape}
        context = DefaultContext(world_size=world_size(), tokenizer_vocab_size=read_vocab_size)
        command |= {"train_iters": max(1, steps)}
        config = resolve_checked(flags=given, file=file, command=command, context=context)
        check_supported(config)
    except DocumentError:
        # All processes have the same command line: rank 0 reports.
        if not is_rank0():
            raise typer.Exit(EXIT_USAGE) from None
        raise
    if not steps:
        options = FinetuneConfig(**{**vars(options), "train_data": None})
    raise typer.Exit(run_finetune(task, config, options))


def _checked_values(flags: dict[str, Any]) -> FinetuneConfig:
    """The fine-tuning options, after a check of the types and bounds of all given options.

    The number of steps is computed from training options before they are resolved.

    Raises:
        DocumentError: missing fine-tuning options, and invalid values of any option; reports all of them.
    """
    own = {spec.name for spec in specs_of(FinetuneConfig)}
    given = [(spec, flags[spec.name]) for spec in _SPECS if spec.name not in own and flags.get(spec.name) is not None]
    problems = [problem for spec, value in given if (problem := spec.convert(value)[1]) is not None]
    try:
        values = values_of(FinetuneConfig, flags)
    except DocumentError as error:
        problems = [*error.problems, *problems]
    if problems:
        raise DocumentError("the configuration", problems)
    return values


def _read_file(path: Path) -> dict[str, Any]:
    """Read a ``--config`` file: fine-tuning options as flat keys, training options as in ``pretrain``.

    Raises:
        UsageError: unknown keys, or options that fine-tuning sets itself.
    """
    own = [spec.name for spec in specs_of(FinetuneConfig)]
    found = read_config_file(path, own)
    wrong = [name for name in _EXCLUDED if name in found]
    if wrong:
        raise UsageError(
            f"--config {path}: {', '.join(wrong)}: not supported by finetune; use train_data, valid_data and epochs"
        )
    return found


def check_supported(config: Any) -> None:
    """Check that fine-tuning supports the training options.

    Raises:
        UsageError: one of them has no meaning for a head on a trained model.
    """
    wrong = {
        "--balance": config.balance.balance != "off",
        "--rampup-batch-size": config.training.rampup_batch_size is not None,
        "--step-batch-size-schedule": config.training.step_batch_size_schedule is not None,
        "--curriculum-shortest": config.training.curriculum_shortest is not None,
        "--zero-stage": config.parallel.zero_stage == 3,
        # The sizes are always those of --pretrained-checkpoint.
        "--use-checkpoint-args": config.run.use_checkpoint_args,
    }
    for flag in (flag for flag, on in wrong.items() if on):
        raise UsageError(f"{flag}: not supported by finetune; remove it")


def _pretrained_shape(options: FinetuneConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Model options from the manifest of ``--pretrained-checkpoint``; empty without one."""
    from ..formats.checkpoint import CheckpointError, find_checkpoint, open_checkpoint
    from ..trainer.checkpoint.load_checkpoint import convert_to_native, default_cache, foreign_kind
    from ..trainer.checkpoint.model_options import model_options

    if options.pretrained_checkpoint is None:
        return {}
    path = Path(options.pretrained_checkpoint)
    if foreign_kind(path):
        path = convert_to_native(path, Path(given["cache_dir"]) if given.get("cache_dir") else default_cache())
    try:
        found = open_checkpoint(find_checkpoint(path, weights_only=True))
    except CheckpointError as error:
        raise UsageError(f"--pretrained-checkpoint: {error}") from error
    model = found.manifest["model"]
    if model["family"] != "bert":
        raise UsageError(f"--pretrained-checkpoint {path}: must have family bert, is {model['family']}")
    return {**model_options(model), "seq_length": model["max_position_embeddings"]}


def _steps(samples: int, values: dict[str, Any]) -> int:
    """The number of whole batches in ``samples`` samples."""
    micro = int(values.get("micro_batch_size", 8))
    model = int(values.get("tensor_model_parallel_size") or 1) * int(
        values.get("pipeline_model_parallel_size") or max(1, world_size())
    )
    replicas = max(1, world_size() // model)
    batch = values.get("global_batch_size") or micro * replicas * int(values.get("gradient_accumulation_steps") or 1)
    return samples // int(batch)


@finetune.callback()
def fine_tuning(context: typer.Context) -> None:
    """Fine-tune a BERT on a task."""
    context.with_resource(ignore_signals_until_training())


@finetune.command("mnli", cls=FinetuneCommand)
@with_specs(_SPECS, defaults=_DEFAULTS)
def finetune_mnli(config: ConfigFile = None, **flags: Any) -> None:
    """Fine-tune on sentence pairs: entailment, contradiction or neutral; evaluates after each epoch."""
    _finetune("mnli", config, flags)


@finetune.command("race", cls=FinetuneCommand)
@with_specs(_SPECS, defaults=_DEFAULTS)
def finetune_race(config: ConfigFile = None, **flags: Any) -> None:
    """Fine-tune on questions with four choices about a passage; evaluates after each epoch."""
    _finetune("race", config, flags)
