"""Every command line in every document: commands, options and choices exist; blocks that are not run have a reason."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.documents.command_lines import all_flags, problems
from tests.documents.markdown import PROGRAMS, REASONS, RUN_BY, Block, blocks, documents, inline_code, program_of
from tests.paths import ROOT
from tests.tables import table

# Programs whose lines make a block one of commands.
STARTS = (*PROGRAMS, "bin/", "pip ", "python ", "torchrun ", "sbatch ", "docker ", "kubectl ", "srun ", "bsub ", "git ")
# Options of the scripts of Megatron's tools/openwebtext, of pytest, of the scripts of tests, and of the example of a
# technique.
OTHERS = (
    "--all",
    "--step",
    "--area",
    "--accepted",
    "--inputs",
    "--dedup-dataset",
    "--lambada-path",
    "--dist",
    "--drop-step",
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def faults(text: str) -> list[str]:
    """What is wrong with the command lines of a document."""
    found = []
    for block in blocks(text):
        # Another test runs the others, next to a package that adds commands and options.
        if block.language == "bash" and not RUN_BY.fullmatch(block.reason or ""):
            for line in block.commands:
                words = program_of(line)
                found += [f"line {block.line}: {each}" for each in (problems(words) if words else [])]
        if block.reason is not None and not is_reason(block.reason):
            found.append(f"line {block.line}: reason {block.reason!r} is none of {', '.join(REASONS)}")
    for code in inline_code(text):
        words = program_of(code)
        found += [f"`{code}`: {each}" for each in (problems(words) if words else [])]
        if words is None and (flag := re.match(r"(--[a-zA-Z][\w-]*)", code)) and not known(flag[1]):
            found.append(f"`{code}`: no program has this option")
    return found


def is_reason(reason: str) -> bool:
    other = RUN_BY.fullmatch(reason)
    return reason in REASONS or (other is not None and (ROOT / other[1]).exists())


def known(flag: str) -> bool:
    """Whether a program, a tool, or a script that a table names has a flag; DeepSpeed mixes ``-`` and ``_``."""
    flags = {each.replace("-", "_") for each in (*all_flags(), *OTHERS)}
    return flag.replace("-", "_") in flags or (flag.endswith("-") and any(map(flag_begins(flag), all_flags())))


def flag_begins(beginning: str) -> Callable[[str], bool]:
    """A test of flags for ``--check-*``."""
    return lambda flag: flag.startswith(beginning)


@table("name", documents())
def test_command_lines_of_documents_are_accepted(name):
    assert faults(text_of(name)) == []


@table("name", documents())
def test_blocks_with_commands_are_fenced_as_bash(name):
    wrong = [
        f"line {block.line}"
        for block in blocks(text_of(name))
        if block.language in ("", "sh", "shell", "console") and block.text.lstrip("$ ").startswith(STARTS)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "```bash\ndynmo-plan partition RUN --no-such-option 3\n```\n",
        "```bash\ndynmo-plan no-such-command RUN\n```\n",
        "<!-- not run: because -->\n```bash\nls\n```\n",
        "| row | `dynmo-prep clean IN -o OUT --langage en` |\n",
        "A sentence with `--no-such-option`.\n",
        "`dynmo-train pretrain gpt --schedule zero-bubbles`\n",
        "`dynmo-train launch local --nproc 2 -- pretrain gpt --no-such-option`\n",
        "`dynmo-train launch local --nprocs 2 -- pretrain gpt`\n",
    ],
)
def test_wrong_command_lines_are_found(text):
    assert faults(text) != []


def test_right_command_lines_are_accepted():
    text = (
        "`dynmo-train launch local --nproc 2 -- pretrain gpt --schedule zb-v`, `--zero-stage 2`, `dynmo-plan --help`\n"
    )
    assert faults(text) == []


def test_block_commands_are_joined_and_without_here_documents():
    block = Block(1, "bash", "a \\\n  b  # note\ncat > x <<'END'\ndynmo-plan x\nEND\n# only a comment\nc\n", None)
    assert [" ".join(line.split()) for line in block.commands] == ["a b", "cat > x <<'END'", "c"]
