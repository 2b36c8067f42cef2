#!/usr/bin/env python3
"""Make the files that several packages have in common, so that no package imports another one.

    bin/shared/**       ──> PACKAGE/**                         copies
    NAME.schema.json    ──> PACKAGE/formats/NAME_fields.py     checks of the structure, from the owner's JSON Schema
    PACKAGE/cli/*.py    ──> PACKAGE/cli/OPTIONS.md             the options of every command, by concern
    config/compat/flags.py ──> dynmo_train/cli/FLAGS.md        flags of other projects, by what they are here

Rules across fields (a reference, an order, a sum) stay in the hand-written readers, ``PACKAGE/formats/NAME.py``.

    bin/generate.py            # writes what is out of date, and prints its path
    bin/generate.py --check    # writes nothing; exit code 1 where a file is out of date
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ALL = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt")
REPORTS = ("dynmo_train", "dynmo_balance")
PAGES = (*REPORTS, "dynmo_ckpt")
SHARED: Mapping[str, Sequence[str]] = {
    "_common/__init__.py": ALL,
    "_common/chat_template.py": ("dynmo_tools", "dynmo_train"),
    "_common/checks.py": ALL,
    "_common/completion.py": ALL,
    "_common/console.py": ALL,
    "_common/document.py": ALL,
    "_common/errors.py": ALL,
    "_common/help.py": ALL,
    "_common/option_groups.py": ("dynmo_train", "dynmo_balance", "dynmo_ckpt"),
    "_common/log_parts.py": ("dynmo_train", "dynmo_balance"),
    "_common/panel.py": ALL,
    "_common/portable.py": ("dynmo_tools", "dynmo_train", "dynmo_ckpt"),
    "_common/crc32.py": ("dynmo_train", "dynmo_ckpt"),
    "_common/protobuf.py": ("dynmo_tools", "dynmo_train", "dynmo_ckpt"),
    "_common/streams.py": ALL,
    "_common/special_tokens.py": ("dynmo_tools", "dynmo_train", "dynmo_ckpt"),
    "_common/sentencepiece_json.py": ("dynmo_tools", "dynmo_train"),
    "_common/vocabulary_order.py": ("dynmo_train", "dynmo_balance"),
    "_common/report/__init__.py": PAGES,
    "_common/report/charts.py": REPORTS,
    "_common/report/facts.py": REPORTS,
    "_common/report/page.py": PAGES,
    "_common/report/run_data.py": REPORTS,
    "_common/report/series.py": REPORTS,
    "_common/report/units.py": PAGES,
    "_common/report/assets/report.css": PAGES,
    "_common/report/assets/report.js": PAGES,
    "_common/report/assets/uplot.js": PAGES,
    "formats/profile_lines.py": ("dynmo_balance", "dynmo_train"),
}
PROGRAMS = {
    "dynmo-prep": "dynmo_tools",
    "dynmo-train": "dynmo_train",
    "dynmo-plan": "dynmo_balance",
    "dynmo-ckpt": "dynmo_ckpt",
}
COMMENTS = {".py": "# {}\n", ".js": "/* {} */\n", ".css": "/* {} */\n"}
ENVELOPE = ("format", "version", "written_by", "created_utc")
LINE = 120


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format: the schema that its owner keeps, and the packages that read or write it."""

    schema: str
    module: str
    readers: Sequence[str]


FORMATS = (
    Format(
        schema="dynmo_balance/formats/plan.schema.json",
        module="formats/plan_fields.py",
        readers=("dynmo_balance", "dynmo_train"),
    ),
    Format(
        schema="dynmo_balance/formats/expert_plan.schema.json",
        module="formats/expert_plan_fields.py",
        readers=("dynmo_balance", "dynmo_train"),
    ),
    Format(
        schema="dynmo_train/formats/profile.schema.json",
        module="formats/profile_fields.py",
        readers=("dynmo_balance", "dynmo_train"),
    ),
    Format(
        schema="dynmo_train/formats/operator_costs.schema.json",
        module="formats/operator_costs_fields.py",
        readers=("dynmo_balance",),
    ),
    Format(schema="dynmo_train/formats/run.schema.json", module="formats/run_fields.py", readers=("dynmo_train",)),
    Format(
        schema="dynmo_train/formats/step_digests.schema.json",
        module="formats/step_digests_fields.py",
        readers=("dynmo_train",),
    ),
    Format(
        schema="dynmo_ckpt/formats/checkpoint.schema.json",
        module="formats/checkpoint_fields.py",
        readers=("dynmo_ckpt", "dynmo_train"),
    ),
    Format(
        schema="dynmo_tools/formats/dataset.schema.json",
        module="formats/dataset_fields.py",
        readers=("dynmo_tools", "dynmo_train"),
    ),
)


class Translation:
    """Python source of the checks that one JSON Schema describes.

    Each entry of ``$defs`` is a name: an ``enum`` becomes the tuple ``NAME``, an object the check ``NAME``; anything
    else is written where it is used. The document itself is ``DOCUMENT``, unless the schema is of lines by ``record``.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self.definitions: Mapping[str, Any] = schema.get("$defs", {})
        self.used: set[str] = set()

    def source(self) -> str:
        """All constants, in an order in which each is defined before it is used."""
        lines = []
        for name in self._ordered():
            definition = self.definitions[name]
            if "enum" in definition:
                lines.append(f"{name.upper()} = {tuple(definition['enum'])!r}")
            else:
                lines.append(f"{name.upper()} = {self._check(definition)}")
        if "properties" in self.schema and "allOf" not in self.schema:
            lines.append(f"DOCUMENT = {self._check(self.schema)}")
        return "\n".join(lines) + "\n"

    def imports(self) -> list[str]:
        """The names of ``checks`` that the source uses, once :meth:`source` has run."""
        return sorted(self.used, key=lambda name: (not name.isupper(), name))

    def _is_named(self, name: str) -> bool:
        definition = self.definitions[name]
        return "enum" in definition or "properties" in definition

    def _ordered(self) -> list[str]:
        order: list[str] = []

        def visit(name: str) -> None:
            for other in _references(self.definitions[name]):
                visit(other)
            if self._is_named(name) and name not in order:
                order.append(name)

        for name in self.definitions:
            visit(name)
        return order

    def _call(self, name: str, *arguments: str) -> str:
        self.used.add(name)
        return f"{name}({', '.join(arguments)})"

    def _check(self, rule: Any) -> str:
        """The expression of one check."""
        if rule is True:
            return self._call("anything")
        if "$ref" in rule:
            name = rule["$ref"].removeprefix("#/$defs/")
            if name == "samples":
                return self._call("samples")
            if not self._is_named(name):
                return self._check(self.definitions[name])
            return self._call("string", f"*{name.upper()}") if "enum" in self.definitions[name] else name.upper()
        if "enum" in rule:
            return self._call("string", *map(repr, rule["enum"]))
        if "const" in rule:
            return self._call("string", repr(rule["const"]))
        if "anyOf" in rule:
            null, other = sorted(rule["anyOf"], key=lambda each: each.get("type") != "null")
            if null != {"type": "null"} or len(rule["anyOf"]) != 2:
                raise ValueError(f"anyOf is for null and one other: {rule}")
            return self._call("nullable", self._check(other))
        if isinstance(rule["type"], list) and len(rule["type"]) == 2:
            kinds = [kind for kind in rule["type"] if kind != "null"]
            return self._call("nullable", self._check({**rule, "type": kinds[0]}))
        return self._of_type(rule)

    def _of_type(self, rule: Mapping[str, Any]) -> str:
        match rule["type"]:
            case "integer":
                return self._call("integer", *_bounds(rule, default=0))
            case "number":
                above = [f"above={rule['exclusiveMinimum']}"] if "exclusiveMinimum" in rule else []
                return self._call("number", *_bounds(rule, default=None), *above)
            case "boolean":
                return self._call("boolean")
            case "string" if "pattern" in rule:
                digits = rule["pattern"].removeprefix("^[0-9a-f]{").removesuffix("}$")
                return self._call("hexadecimal", str(int(digits)))
            case "string":
                return self._call("string")
            case "array":
                bounds = [str(rule[key]) for key in ("minItems", "maxItems") if key in rule]
                return self._call("array", self._check(rule["items"]), *bounds)
            case "object":
                return self._object(rule)
            case ["null", "boolean", "number", "string"]:
                return self._call("scalar")
        raise ValueError(f"no check for {rule}")

    def _object(self, rule: Mapping[str, Any]) -> str:
        if "properties" not in rule:
            return self._call("mapping", self._check(rule.get("additionalProperties", True)))
        fields = dict(rule["properties"])
        entries = []
        if set(ENVELOPE) <= set(fields):
            self.used.add("ENVELOPE")
            entries.append("**ENVELOPE")
            fields = {name: value for name, value in fields.items() if name not in ENVELOPE}
        required = rule.get("required", [])
        entries += [f"{name!r}: {self._check(fields[name])}" for name in required if name in fields]
        optional = [f"{name!r}: {self._check(value)}" for name, value in fields.items() if name not in required]
        patterns = rule.get("patternProperties", {})
        prefixes = {pattern.removeprefix("^"): value for pattern, value in patterns.items() if pattern != "^x_"}
        # Of all other fields.
        prefixes |= {"": rule["additionalProperties"]} if rule.get("additionalProperties") else {}
        further = [f"{{{', '.join(optional)}}}"] if optional or prefixes else []
        further += [f"{{{', '.join(f'{p!r}: {self._check(v)}' for p, v in prefixes.items())}}}"] if prefixes else []
        return self._call("obj", f"{{{', '.join(entries)}}}", *further)


def _references(rule: Any) -> Iterator[str]:
    if isinstance(rule, dict):
        for key, value in rule.items():
            if key == "$ref":
                yield value.removeprefix("#/$defs/")
            else:
                yield from _references(value)
    elif isinstance(rule, list):
        for value in rule:
            yield from _references(value)


def _bounds(rule: Mapping[str, Any], *, default: float | None) -> list[str]:
    least, most = rule.get("minimum", default), rule.get("maximum")
    if most is not None:
        return [_number(least), _number(most)]
    return [] if least == default else [_number(least)]


def _number(value: float | None) -> str:
    return f"{value:_}" if isinstance(value, int) and value >= 10_000 else repr(value)


def fields_module(each: Format) -> str:
    """The generated module of one format."""
    schema = json.loads((ROOT / each.schema).read_text(encoding="utf-8"))
    translation = Translation(schema)
    body = translation.source()
    imports = f"from .._common.checks import {', '.join(translation.imports())}\n"
    head = (
        f"# Generated by bin/generate.py from {each.schema}: do not edit.\n"
        f'"""{schema["title"]}: the structure."""\n\nfrom __future__ import annotations\n\n{imports}\n'
    )
    return formatted(head + body)


def formatted(source: str) -> str:
    """The source as the project's formatter writes it."""
    command = [sys.executable, "-m", "ruff", "format", "--line-length", str(LINE), "--stdin-filename", "x.py", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def option_page(program: str, package: str) -> str:
    """The page of all options of a program.

    Commands of other installed packages are left out.
    """
    cli = importlib.import_module(f"{package}.cli")
    pages = importlib.import_module(f"{package}._common.help")
    root = importlib.import_module("typer.main").get_command(cli.app)
    found: dict[str, list[str]] = {}
    for words, command, context in _commands(root, (program,), None):
        arguments, options = pages.option_help(command, context)
        options = [row for row in options if row.panel != pages.HELP]
        text = "\n".join([*_arguments(arguments), *_option_table(pages.sections(options, command.panel_order))])
        found.setdefault(text, []).append(" ".join(words))
    lines = [
        f"# Options of `{program}`",
        "",
        "<!-- Generated by bin/generate.py from the declarations of the options: do not edit. -->",
        "",
        "By command and concern, required options first. `--help` shows the common ones, `--help-all` all of them.",
    ]
    for text, names in found.items():
        lines += ["", f"## `{'`, `'.join([names[0], *(name.split()[-1] for name in names[1:])])}`", "", text]
    return "\n".join(lines) + "\n"


def _commands(command: Any, words: tuple[str, ...], parent: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The root and each command that is not hidden, with its words and a context in which its help is made."""
    context = command.context_class(command, info_name=words[-1], parent=parent)
    if parent is None or not hasattr(command, "commands"):
        yield words, command, context
    if not hasattr(command, "commands"):
        return
    # Not ``list_commands``, which adds the model families of installed packages.
    names = [name for name in command.list_commands(context) if name in command.commands]
    for name in names:
        inner = command.commands[name]
        if not inner.hidden and name not in _installed_steps():
            yield from _commands(inner, (*words, name), context)


def _installed_steps() -> set[str]:
    """Filters of installed packages, which are commands of ``dynmo-prep``."""
    steps = importlib.import_module("dynmo_tools.runner.registry").steps()
    return {step.name for step in steps.values() if step.package}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _arguments(rows: Sequence[Any]) -> list[str]:
    if not rows:
        return []
    lines = ["| argument | meaning |", "|---|---|"]
    return [*lines, *(f"| `{row.names}` | {_cell(f'{row.text} {row.notes()}'.strip())} |" for row in rows), ""]


def _option_table(sections: Mapping[str, Sequence[Any]]) -> list[str]:
    """One table; a section begins with a row that has its title only."""
    has_tables = any(row.table for rows in sections.values() for row in rows)
    columns = ["option", "value", "default", *(["table"] if has_tables else []), "meaning"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for title, rows in sections.items():
        if len(sections) > 1:
            lines.append(f"| **{title}** |{' |' * (len(columns) - 1)}")
        for row in rows:
            value = ", ".join(filter(None, (row.value.replace("|", ", "), row.bounds)))
            default = "required" if row.required and not row.default else row.default
            default = f"required, {default}" if row.required and row.default else default
            meaning = f"{row.text} [env: {row.envvar}]" if row.envvar else row.text
            table = [f"`[{row.table}]`" if row.table else ""] if has_tables else []
            flags = ", ".join(f"`{flag}`" for flag in row.flags)
            lines.append(f"| {' | '.join([flags, *map(_cell, (value, default)), *table, _cell(meaning)])} |")
    return lines if len(lines) > 2 else ["No options of its own."]


# What every event has.
EVENT_FIELDS = ("time_utc", "step", "kind", "message")


def field_page(schema: Mapping[str, Any]) -> str:
    """The page of all fields of the lines that a run appends."""
    lines = [
        "# Fields of `metrics.jsonl` and `events.jsonl`",
        "",
        "<!-- Generated by bin/generate.py from run_lines.schema.json: do not edit. -->",
        "",
        "One JSON object per line, appended by rank 0 ([run.md](run.md) has the rules of both files). A number that is",
        "not finite is null. Techniques of other packages write events and metrics under their own names.",
    ]
    for name, records in schema["$defs"].items():
        lines += ["", f"## `{name}`"]
        for record in records["anyOf"]:
            is_event = "kind" in record["properties"]
            title = f"`{record['title']}`" if is_event else record["title"].capitalize()
            lines += ["", f"### {title}", "", record["description"]]
            own = {
                name: rule for name, rule in record["properties"].items() if not is_event or name not in EVENT_FIELDS
            }
            if own:
                lines += ["", "| field | type | unit | meaning |", "|---|---|---|---|"]
            for field, rule in own.items():
                kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
                when = f"; {rule['x-when']}" if "x-when" in rule else ""
                cells = [f"`{field}`", " or ".join(kinds), rule.get("x-unit", ""), _cell(rule["description"] + when)]
                lines.append(f"| {' | '.join(cells)} |")
            for rule in (record.get("additionalProperties"), *record.get("patternProperties", {}).values()):
                if rule:
                    lines += ["", f"{rule['description']}."]
        if name == "events.jsonl":
            at = lines.index(f"## `{name}`") + 1
            lines[at:at] = ["", *_event_fields(records["anyOf"][0]["properties"])]
    return "\n".join(lines) + "\n"


def _event_fields(properties: Mapping[str, Any]) -> list[str]:
    """What every event has."""
    rows = [f"`{field}`: {properties[field]['description']}" for field in EVENT_FIELDS]
    return ["Every event has:", "", *(f"- {_cell(row)}." for row in rows)]


def outputs() -> Iterator[tuple[Path, str]]:
    """Each generated file and its text."""
    for name, packages in SHARED.items():
        text = (ROOT / "bin" / "shared" / name).read_text(encoding="utf-8")
        for package in packages:
            note = f"Generated by bin/generate.py from bin/shared/{name}: do not edit."
            yield ROOT / package / name, COMMENTS[Path(name).suffix].format(note) + text
    for each in FORMATS:
        text = fields_module(each)
        for package in each.readers:
            yield ROOT / package / each.module, text
    formats = ROOT / "dynmo_train" / "formats"
    schema = json.loads((formats / "run_lines.schema.json").read_text(encoding="utf-8"))
    yield formats / "fields.md", field_page(schema)
    # Last: the pages are made by the packages' own code, which the files above are a part of.
    sys.path.insert(0, str(ROOT))
    for program, package in PROGRAMS.items():
        yield ROOT / package / "cli" / "OPTIONS.md", option_page(program, package)
    root = importlib.import_module("typer.main").get_command(importlib.import_module("dynmo_train.cli").app)
    table = importlib.import_module("dynmo_train.cli.explain_flags.flag_table")
    yield ROOT / "dynmo_train" / "cli" / "FLAGS.md", "\n".join(table.markdown(root)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    parser = argparse.ArgumentParser(description="Make the files that several packages have in common.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file is out of date")
    check = parser.parse_args(arguments).check
    outdated = 0
    for path, text in outputs():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        outdated += 1
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")  # noqa: T201 - a script
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and outdated > 0)


if __name__ == "__main__":
    sys.exit(main())
