"""Pages by project: commands on the left have the equivalents on the right, whose flags exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from dynmo_train.cli.explain_flags.script_commands import read_script
from dynmo_train.cli.published_scripts import find
from dynmo_train.config.compat.flags import FLAGS
from dynmo_train.config.compat.translate import declared_name
from dynmo_train.config.presets import read_recipe
from dynmo_train.config.task_command import TASK_FLAGS
from tests.tables import table

ROOT = Path(__file__).parents[2]
MIGRATION = "dynmo_train/cli/MIGRATION.md"
PAGES = ("dynmo_tools/cli/MIGRATION.md", MIGRATION, "dynmo_ckpt/README.md")
PACKAGES = {"dynmo-train": "dynmo_train", "dynmo-prep": "dynmo_tools", "dynmo-ckpt": "dynmo_ckpt"}


def pairs():
    """Left and right cell of each row of a table with the header ``there | here``."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for rows in re.findall(r"\| there \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", text):
            for row in rows.splitlines():
                left, right = re.split(r"(?<!\\) \| ", row.strip("| ").strip())
                yield pytest.param(left.replace("\\|", "|"), right.replace("\\|", "|"), id=left[:60])


def codes(cell):
    return re.findall(r"`([^`]+)`", cell)


def command_of(words):
    """The subcommand, the length of its name in words, and its flags."""
    command = typer.main.get_command(importlib.import_module(f"{PACKAGES[words[0]]}.cli").app)
    at = 1
    while hasattr(command, "commands"):
        assert words[at] in command.commands, words[: at + 1]
        command, at = command.commands[words[at]], at + 1
    flags = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return command, at, flags


def check_ours(words):
    """Check that a command exists and accepts its flags."""
    while words[0].partition("=")[0].isupper():
        name = words.pop(0).partition("=")[0]
        texts = "".join(
            path.read_text() for path in (ROOT / "bin").rglob("*") if path.suffix in (".sh", ".sbatch", ".sub")
        )
        assert name in texts or name in ("NUM_LAYERS", "HIDDEN_SIZE", "NUM_ATTENTION_HEADS")
    words = [word for word in words if word not in ("sbatch", "cat", "bash", "bsub", "<")]
    if words[0].startswith("bin/"):
        assert (ROOT / words[0]).is_file(), words
        return words[0]
    if words[0] not in PACKAGES:
        return None  # a flag or a value alone
    if words[1] == "launch":
        _, _, flags = command_of(words)
        at = words.index("--")
        assert {word for word in words[:at] if word.startswith("-")} <= flags
        words = [words[0], *words[at + 1 :]]
    _, at, flags = command_of(words)
    known = {*flags, *FLAGS, *TASK_FLAGS} if words[0] == "dynmo-train" else flags
    declared = dict.fromkeys(flags, 1)
    given = [declared_name(word, declared, {}) for word in words[at:] if re.match(r"--?[a-zA-Z]", word)]
    assert set(given) <= known, set(given) - known
    assert all(FLAGS[flag].kind != "refused" for flag in given if flag in FLAGS and flag not in flags)
    return " ".join(words[:at])


@table(("left", "right"), [*pairs()])
def test_readme_page_row_agrees_with_the_table_of_scripts(left, right):
    (theirs,) = codes(left)[:1]
    ours = [named for code in codes(right) if (named := check_ours(shlex.split(code)))]
    if theirs.startswith(("(", "--")):
        return
    meant = {command.equivalent for command in read_script(theirs)}
    meant |= {row.equivalent for word in shlex.split(theirs) if (row := find(word)) and not word.endswith(".py")}
    assert meant, f"nobody knows {theirs}"
    assert set(ours) & meant, (ours, meant)


def test_readme_pages_every_project_has_rows():
    assert len(list(pairs())) > 45
    text = (ROOT / MIGRATION).read_text(encoding="utf-8")
    for name in ("DynMo", "Megatron-LM and Megatron-DeepSpeed", "Optimus-CC", "The AWS MegatronLM test case"):
        assert f"### {name}\n" in text
    assert "### The DeepSpeed guide (Chinese)\n" in text


def test_readme_aws_sizes_equal_the_recipes():
    text = (ROOT / MIGRATION).read_text(encoding="utf-8")
    rows = re.findall(r"`NUM_ATTENTION_HEADS=(\d+) HIDDEN_SIZE=(\d+) NUM_LAYERS=(\d+)` \| `--recipe ([\w.-]+)`", text)
    assert len(rows) == 8
    for heads, width, layers, recipe in rows:
        values = read_recipe(recipe, "gpt")
        found = (values["num_attention_heads"], values["hidden_size"], values["num_layers"])
        assert found == (int(heads), int(width), int(layers)), recipe


def blocks_of(text):
    """Blocks of commands and of output, without the comments of the commands."""
    found = re.findall(r"^```(bash|text)\n(.*?)^```", text, re.M | re.S)
    return [[line.partition(" #")[0].rstrip() for line in block.splitlines()] for _, block in found]


def test_readme_chinese_has_the_commands_of_the_english_one():
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert "(README.zh.md)" in english
    assert "(README.md)" in chinese
    table = re.findall(r"`(pip install [^`]*)`", english)
    assert [code for code in table if code not in chinese] == []
    assert {name for name in re.findall(r"^## .*", chinese, re.M)} > {"## 先看效果", "## 四个命令"}
    assert [part for part in blocks_of(english) if part not in blocks_of(chinese)] == []
    for link in re.findall(r"\]\(([\w./]+)\)", chinese):
        assert (ROOT / link).exists(), link
    lines = [line for block in re.findall(r"```bash\n(.*?)```", chinese, re.S) for line in block.splitlines()]
    checked = [
        check_ours(shlex.split(line)) for line in lines if re.match(r"([A-Z_]+=\S+ )*(dynmo-(prep|train)|bin/)", line)
    ]
    assert len(checked) >= 10
