"""``dynmo-train pretrain``: train a model, one subcommand per model family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .._common.console import Format, print_message
from .._common.document import DocumentError
from .._common.errors import EXIT_USAGE, UsageError
from .._common.help import CommandLine, HelpGroup
from ..config import (
    DefaultContext,
    dry_run_processes,
    dry_run_values,
    option_specs,
    read_config_file,
    resolve_checked,
    with_deepspeed,
)
from ..config.command import INSTALLED_KEY, WORDS_KEY, MegatronCommand, with_options
from ..config.compat.project_defaults import torchtitan_defaults
from ..config.extensions import base_family, installed_families
from ..config.panels import CONFIGURATION
from .common import ConfigFile, ignore_signals_until_training, is_rank0, need_torch, world_size

FAMILY_HELP = {
    "gpt": "Train a GPT on an indexed dataset.",
    "llama": "Train a Llama, or a Mixtral with --num-experts, on an indexed dataset.",
    "bert": "Train a BERT on an indexed dataset of sentences (dynmo-prep binarize --split-sentences).",
    "ict": "Train a two-tower retrieval model (inverse cloze task) on an indexed dataset of sentences.",
    "t5": "Train a T5 on an indexed dataset of sentences (dynmo-prep binarize --split-sentences).",
}


class FamilyGroup(HelpGroup):
    """The built-in families, then those of installed packages; only the selected one is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all families."""
        return [*super().list_commands(ctx), *installed_families()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command that trains a family."""
        if cmd_name in self.commands or cmd_name not in installed_families():
            return super().get_command(ctx, cmd_name)
        extension = CommandLine(no_args_is_help=False)
        package = installed_families()[cmd_name].dist
        _add_family(extension, cmd_name, f"Train a {cmd_name} (package {package.name if package else '?'}).")
        return typer.main.get_command(extension)


pretrain = CommandLine(cls=FamilyGroup, help="Train a model, or resume a run.")


def _recipes(incomplete: str) -> list[str]:
    from ..config.presets import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Recipe, such as gpt-345m or llama-2-7b; --config has precedence.",
        autocompletion=_recipes,
        rich_help_panel=CONFIGURATION,
    ),
]


def _pretrain(
    family: str, config: Path | None, recipe: str | None, flags: dict[str, Any], words: Sequence[str]
) -> None:
    """Resolve and check the configuration, then train or report the dry run.

    Args:
        family: model family.
        config: file of options.
        recipe: name of a recipe.
        flags: option name to value from the command line; None means not given.
        words: the command line.
    """
    need_torch()
    from ..config.presets import read_recipe
    from ..data.tokenizer import read_vocab_size
    from ..parallel.consensus import is_reporting_rank

    try:
        values = read_recipe(recipe, family) if recipe else {}
        values |= read_config_file(config) if config else {}
        checkpoint = _checkpoint_options(family, flags, values)
        dry = bool(flags.get("dry_run") or values.get("dry_run"))
        processes = dry_run_processes(flags, values) if dry else world_size()
        values = _with_torchtitan_defaults(words, flags, values, family, processes)
        defaults = dry_run_values(family, flags, {**checkpoint, **values}) if dry else {}
        flags, values = with_deepspeed(flags, values)
        resolved = resolve_checked(
            flags=flags,
            file={**defaults, **values},
            checkpoint=checkpoint,
            command={"family": family},
            context=DefaultContext(world_size=processes, tokenizer_vocab_size=read_vocab_size),
        )
    except UsageError:
        # All processes have the same command line: one of them reports.
        if not is_reporting_rank(first=is_rank0()):
            raise typer.Exit(EXIT_USAGE) from None
        raise
    if dry:
        from ..trainer.dryrun.report import print_dry_run

        print_dry_run(resolved, resolved.run.dry_run_device, Format(resolved.run.dry_run_format))
        return
    from ..trainer.run import run_pretrain

    raise typer.Exit(run_pretrain(resolved))


def _with_torchtitan_defaults(
    words: Sequence[str], flags: dict[str, Any], values: dict[str, Any], family: str, processes: int
) -> dict[str, Any]:
    """The options of files with the defaults of torchtitan, if the command line has its flags; rank 0 reports them."""
    given = {**values, **{name: value for name, value in flags.items() if value is not None}}
    found = torchtitan_defaults(words, given, base_family(family), processes)
    if found and is_rank0():
        specs = option_specs()
        shown = (specs[name].words_for(value) for name, value in found.items())
        print_message(f"defaults of torchtitan: {', '.join(shown)}")
    return {**found, **values}


def _checkpoint_options(family: str, flags: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """With --use-checkpoint-args, the options of the model in --load; a warning where it has no checkpoint."""
    given = {**values, **{name: value for name, value in flags.items() if value is not None}}
    if not given.get("use_checkpoint_args"):
        return {}
    from ..trainer.checkpoint.load_checkpoint import check_may_be_missing
    from ..trainer.checkpoint.model_options import checkpoint_options

    if not given.get("load"):
        raise UsageError("--use-checkpoint-args: needs --load, the checkpoint of the options")
    _, problem = option_specs()["load"].convert(given["load"])
    if problem is not None:
        raise DocumentError("the configuration", [problem])
    found = checkpoint_options(Path(given["load"]), family, given)
    if not found.values:
        own, is_required = (given.get("run_dir"), given.get("save")), given.get("exit_on_missing_checkpoint")
        check_may_be_missing(Path(given["load"]), own, is_required=is_required)
    if is_rank0():
        _report_checkpoint_options(given, found.values, found.of_training)
    return dict(found.values)


def _report_checkpoint_options(given: Mapping[str, Any], found: Mapping[str, Any], of_training: Sequence[str]) -> None:
    """Print what --use-checkpoint-args takes from the checkpoint, and what it leaves."""
    if not found:
        print_message(f"warning: --use-checkpoint-args: no checkpoint in {given['load']}; the given options are used")
        return
    specs = option_specs()
    taken = (specs[name].words_for(value) for name, value in found.items() if name not in given)
    print_message(f"--use-checkpoint-args takes from {given['load']}: {', '.join(taken) or 'nothing'}")
    if of_training:
        print_message(f"--use-checkpoint-args does not take what belongs to the training: {', '.join(of_training)}")


@pretrain.callback()
def training(context: typer.Context) -> None:
    """Train a model, or resume a run."""
    context.with_resource(ignore_signals_until_training())


def _add_family(group: typer.Typer, family: str, text: str) -> None:
    """Add the command that trains ``family``."""

    @with_options
    def train(context: typer.Context, config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
        _pretrain(family, config, recipe, flags | context.meta[INSTALLED_KEY], context.meta[WORDS_KEY])

    group.command(family, cls=MegatronCommand, help=text)(train)


for _family, _text in FAMILY_HELP.items():
    _add_family(pretrain, _family, _text)
