"""dynmo-prep refuses options out of range and unsupported formats before any work."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from pathlib import Path

import langdetect
import pytest
import typer
from typer.models import OptionInfo

from dynmo_tools import cli
from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.options import from_mapping, hints
from dynmo_tools.config.settings import RunSettings
from dynmo_tools.filters.clean import LANGUAGES
from dynmo_tools.io.codecs import FOREIGN_ENDINGS, FOREIGN_OUTPUT_ENDINGS
from dynmo_tools.runner.registry import steps
from tests.tables import table


def numbers():
    """(command, flag, least value, largest value) of every option that is a number."""
    for command in cli.app.registered_commands:
        function = command.cls.function
        resolved = typing.get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            hint = resolved.get(name, parameter.annotation)
            members = [*typing.get_args(hint), *(k for inner in typing.get_args(hint) for k in typing.get_args(inner))]
            info = next((one for one in typing.get_args(hint) if isinstance(one, OptionInfo)), None)
            if info is not None and {int, float}.intersection(one for one in members if isinstance(one, type)):
                flag = next(iter(info.param_decls or ()), f"--{name.replace('_', '-')}")
                yield command.name, flag, info.min, info.max


NUMBERS = sorted(numbers())
COMMAND = typer.main.get_command(cli.app)


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder, which must fail without files; returns stderr."""

    def run(*arguments):
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["dynmo-prep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        err = capsys.readouterr().err
        assert (stop.value.code, os.listdir(folder)) == (2, []), err
        return " ".join(err.replace("│", " ").split())

    return run


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "one", "url": "u"}\n')
    return path


def test_numbers_of_every_command_are_bounded():
    assert len(NUMBERS) > 60
    assert [entry for entry in NUMBERS if entry[2] is None] == []


@table("name", sorted({name for name, *_ in NUMBERS}))
def test_numbers_out_of_range_are_refused_before_work(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for _, flag, least, most in (entry for entry in NUMBERS if entry[0] == name):
        for bad in (least - 1, "nan", "inf", 1 << 63 if most is None else most + 1):
            with pytest.raises(SystemExit) as stop:
                COMMAND([name, "in.jsonl", flag, str(bad)], prog_name="dynmo-prep")
            err = capsys.readouterr().err
            assert (stop.value.code, flag in err, "Traceback" in err) == (2, True, False), err
    assert os.listdir(tmp_path) == []


@table("kind", [*dict.fromkeys(step.settings for step in steps().values()), RunSettings], ids=lambda k: k.__name__)
def test_recipe_with_numbers_out_of_range_is_refused(kind):
    required = {"id-prefix": "a", "tasks": ["remove_512"], "groups": "g"}
    known = {field.name.replace("_", "-") for field in dataclasses.fields(kind)}
    values = {key: value for key, value in required.items() if key in known}
    for field in dataclasses.fields(kind):
        if hints(kind)[field.name] not in (int, float, int | None):
            continue
        key = field.name.replace("_", "-")
        for bad in (field.metadata["minimum"] - 1, float("nan"), float("inf"), 1 << 63, 10**400):
            with pytest.raises(UsageError, match=key):
                from_mapping(kind, {**values, key: bad}, "recipe: step x")


def test_numbers_out_of_range_are_reported_together():
    with pytest.raises(UsageError) as refusal:
        from_mapping(steps()["dedup"].settings, {"threshold": 90, "seed": -1}, "r: step dedup")
    assert str(refusal.value) == (
        "r: step dedup.threshold 90.0: must be at most 1; r: step dedup.seed -1: must be at least 0"
    )


@pytest.mark.parametrize(
    ("command", "flags", "rule"),
    [
        ("clean", ("--language", "xx"), "zh-cn"),
        ("clean", ("--language", "EN"), "zh-cn"),
        ("extract-wiki", ("--namespaces", "Talk"), "number"),
        ("dedup", ("--num-seeds", 100, "--num-bands", 7), "divide"),
        ("dedup", ("--heuristic-iter", 0), "compares no documents"),
        ("decontaminate", ("--min-ngram-size", 14), "at most --max-ngram-size 13"),
        ("fetch-urls", ("--user-agent", "a\nb"), "printable"),
        ("fetch-urls", ("--allow-host", "10.0.0.0/99"), "host name"),
    ],
)
def test_invalid_value_is_refused_with_its_rule(refused, corpus, command, flags, rule):
    assert rule in refused(command, corpus, "-o", "out.jsonl", *flags)


def test_languages_match_langdetect():
    folder = Path(langdetect.__file__).parent / "profiles"
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".py") == list(LANGUAGES)


def test_too_many_tasks_are_refused_before_work(refused, corpus):
    os.truncate(corpus, 1 << 40)  # a sparse file
    assert "1,048,576 tasks" in refused("merge", corpus, "-o", "out.jsonl", "--task-bytes", 1)


NAMES = [
    *(f"out{ending}" for ending in sorted(FOREIGN_OUTPUT_ENDINGS)),
    "out.PARQUET", "out.GZ", "out.jsonl.Zst", "out.parquet.gz", "out.tar.gz", "out.LZ4",
]  # fmt: skip


@table("name", NAMES)
def test_output_with_an_unsupported_extension_is_refused(refused, corpus, name):
    err = refused("merge", corpus, "-o", name)
    assert name in err
    assert "cannot be written" in err or "rename" in err


@table(
    "arguments",
    [
        ("sample-corpus", "-o", "x.lz4"),
        ("group-duplicates", "{in}", "-o", "x.parquet"),
        ("blacklist-urls", "{in}", "-o", "kept.txt", "--save-dropped", "x.lz4"),
        ("blacklist-urls", "{in}", "-o", "x.lz4"),
        ("fetch-urls", "{in}", "-o", "x.parquet"),
        ("clean", "{in}", "-o", "x.jsonl", "--save-dropped", "x.parquet"),
        ("find-duplicates", "{in}", "-o", "x.arrow"),
        ("train-tokenizer", "{in}", "-o", "x.zip"),
        ("decontaminate", "{in}", "-o", "x.jsonl", "--task", "lambada={in}", "--save-dictionary", "x.lz4"),
    ],
    ids=lambda value: "-".join(value[::2]).replace("{in}", ""),
)
def test_every_command_refuses_unsupported_output_extensions(refused, corpus, arguments):
    assert "cannot be written" in refused(*(word.replace("{in}", str(corpus)) for word in arguments))


@table("ending", [*sorted(FOREIGN_ENDINGS), ".GZ", ".Parquet", ".tar.gz"])
def test_input_with_an_unsupported_extension_is_refused(refused, corpus, ending):
    source = corpus.with_name(f"data{ending}")
    source.write_bytes(corpus.read_bytes())
    err = refused("merge", source, "-o", "out.jsonl")
    assert "cannot be read" in err or "rename" in err
