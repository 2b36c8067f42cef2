"""The README of the package agrees with the declared options and commands."""

from __future__ import annotations

import tomllib

import typer

from dynmo_train.cli import app
from dynmo_train.config import check, resolve
from dynmo_train.config.options import DefaultContext
from dynmo_train.config.resolve import parse_config_file
from tests.paths import ROOT

README = (ROOT / "dynmo_train" / "README.md").read_text(encoding="utf-8")


def test_readme_example_config_is_complete():
    text = README.split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(text)
    config = resolve(
        flags={}, file=parse_config_file(text, "README"), context=DefaultContext(tokenizer_vocab_size=lambda _: 500)
    )
    check(config, 1)


def test_readme_table_has_every_command():
    root = typer.main.get_command(app)
    names = [
        f"{name} {inner}" if inner else name
        for name, command in root.commands.items()
        for inner in getattr(command, "commands", {"": None})
    ]
    single = ["launch local", "launch node", "launch slurm", "launch kubernetes", "launch hostfile", "launch lsf"]
    single += [
        "generate",
        "export-adapter",
        "compare",
        "monitor",
        "measure-costs",
        "tune-sparse",
        "explain-flags",
        "run",
        "cache list",
        "cache clear",
        "doctor",
        "replay-step",
        "compare-digests",
    ]
    single += [f"evaluate {name}" for name in ("wikitext", "lambada", "mnli", "race", "lm-eval", "exits")]
    single += ["finetune mnli", "finetune race", "tasks"]
    assert sorted(names) == sorted([*(f"pretrain {name}" for name in ("gpt", "llama", "bert", "ict", "t5")), *single])
    assert [name for name in names if f"\n| `{name}` |" not in README] == []


def options_of(command, name="dynmo-train"):
    """(name of the command, option or argument) of all commands."""
    for option in getattr(command, "params", ()):
        yield name, option
    for child, inner in getattr(command, "commands", {}).items():
        yield from options_of(inner, f"{name} {child}")


def test_help_of_every_option_has_at_most_12_words():
    texts = {
        (name, option.name): (getattr(option, "help", None) or "").partition(" [")[0]
        for name, option in options_of(typer.main.get_command(app))
        if option.name != "show_completion"  # of typer
    }
    assert len(texts) > 1000
    assert {key: text for key, text in texts.items() if len(text.split()) > 12} == {}
