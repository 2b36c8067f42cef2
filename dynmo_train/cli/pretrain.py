"""``dynmo-train pretrain``: train a model of one of the families."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .._common.console import Format, command_list
from .._common.errors import EXIT_USAGE, UsageError
from ..config import Facts, dry_run_processes, dry_run_values, read_config_file, resolve_checked, with_deepspeed
from ..config.command import MegatronCommand, with_options
from .common import ConfigFile, ignore_signals_until_training, is_rank0, need_torch, world_size

pretrain = typer.Typer(
    cls=command_list(), no_args_is_help=True, help="Train a model from its first step, or resume a run."
)

RecipeName = Annotated[
    str | None,
    typer.Option("--recipe", metavar="NAME", help="Named sizes, such as gpt-345m or llama-2-7b; --config goes before."),
]


def _pretrain(family: str, config: Path | None, recipe: str | None, flags: dict[str, Any]) -> None:
    """Resolve and check the configuration, and train."""
    need_torch()
    from ..config.presets import read_recipe
    from ..data.tokenizer import read_vocab_size
    from ..parallel.consensus import is_reporting_rank

    try:
        values = read_recipe(recipe, family) if recipe else {}
        values |= read_config_file(config) if config else {}
        dry = bool(flags.get("dry_run") or values.get("dry_run"))
        processes = dry_run_processes(flags, values) if dry else world_size()
        defaults = dry_run_values(family, flags, values) if dry else {}
        flags, values = with_deepspeed(flags, values)
        resolved = resolve_checked(
            flags=flags,
            file={**defaults, **values},
            command={"family": family},
            facts=Facts(world_size=processes, tokenizer_vocab_size=read_vocab_size),
        )
    except UsageError:
        # Every process of a run has the same command line.
        if not is_reporting_rank(first=is_rank0()):
            raise typer.Exit(EXIT_USAGE) from None
        raise
    if dry:
        from ..trainer.dryrun.report import print_dry_run

        print_dry_run(resolved, resolved.run.dry_run_device, Format(resolved.run.dry_run_format))
        return
    from ..trainer.loop import run_pretrain

    raise typer.Exit(run_pretrain(resolved))


@pretrain.callback()
def training(context: typer.Context) -> None:
    """Train a model from the start, or resume from a checkpoint."""
    context.with_resource(ignore_signals_until_training())


@pretrain.command("gpt", cls=MegatronCommand)
@with_options
def pretrain_gpt(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a GPT on an indexed data set, in this process or, under `dynmo-train launch`, in several."""
    _pretrain("gpt", config, recipe, flags)


@pretrain.command("llama", cls=MegatronCommand)
@with_options
def pretrain_llama(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a Llama, or with --num-experts a Mixtral, on an indexed data set, in one process or several."""
    _pretrain("llama", config, recipe, flags)


@pretrain.command("bert", cls=MegatronCommand)
@with_options
def pretrain_bert(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a BERT on an indexed data set of sentences (dynmo-prep binarize --split-sentences)."""
    _pretrain("bert", config, recipe, flags)


@pretrain.command("ict", cls=MegatronCommand)
@with_options
def pretrain_ict(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train two towers of BERT's blocks to find the text that a sentence is from, on a data set of sentences."""
    _pretrain("ict", config, recipe, flags)


@pretrain.command("t5", cls=MegatronCommand)
@with_options
def pretrain_t5(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a T5 on an indexed data set of sentences (dynmo-prep binarize --split-sentences)."""
    _pretrain("t5", config, recipe, flags)
