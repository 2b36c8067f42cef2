"""What documents claim can be looked up: tests that they name exist, and results cite commits by hash."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tables import table

ROOT = Path(__file__).parents[2]
# A path below tests, perhaps with the name of a test; dots at the end belong to the sentence.
TEST_PATH = re.compile(r"(?<![\w/.-])tests/[\w./*-]*\w(?:::\w+)?")
TEST_MODULE = re.compile(r"(?<![\w/.-])test_\w+\.py\b")
HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b|\b\d{7}\b")
RESULTS = [path for path in sorted((ROOT / "tests" / "benchmarks").glob("*.md")) if path.name != "README.md"]
# A commit is its hash, not a word about it.
WORDS = re.compile(r"""commits? ["']|this commit|commit that adds|session|\| the next \|""", re.IGNORECASE)


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        pytest.skip(f"needs a Git clone: {done.stderr.strip()}")
    return done.stdout.splitlines()


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every Markdown file, and of the docstrings of every Python file that names a test."""
    for name in git("ls-files", "*.md", "*.py"):
        path = ROOT / name
        if name == "CHANGELOG.md" or not path.exists():  # the changelog is about older versions
            continue
        text = path.read_text(encoding="utf-8")
        if name.endswith(".md"):
            yield name, text
            continue
        if not (TEST_PATH.search(text) or TEST_MODULE.search(text)):  # parsing all modules takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (found := ast.get_docstring(node)):
                yield name, found


def defines(path: Path, test: str) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == test for node in nodes)


def missing_tests(text: str, modules: set[str]) -> list[str]:
    """Tests that a text names and that do not exist."""
    missing = []
    for named in TEST_PATH.findall(text):
        path, _, test = named.partition("::")
        found = sorted(ROOT.glob(path))
        if not found or (test and not any(defines(each, test) for each in found)):
            missing.append(named)
    return missing + [name for name in TEST_MODULE.findall(text) if name not in modules]


def test_tests_that_documents_name_exist():
    modules = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [(name, each) for name, text in texts() for each in missing_tests(text, modules)]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see `tests/arch/test_documents.py::test_tests_that_documents_name_exist`.", []),
        ("see tests/arch, `tests/unit/dynmo_train*` and test_documents.py", []),
        ("see `tests/dist`.", ["tests/dist"]),
        ("see tests/arch/test_documents.py::test_none", ["tests/arch/test_documents.py::test_none"]),
        ("see test_missing.py", ["test_missing.py"]),
    ],
)
def test_missing_tests_are_found(text, expected):
    assert missing_tests(text, {"test_documents.py"}) == expected


def uncited_sections(text: str, commits: set[str]) -> list[str]:
    """Headings of the sections with a date or a table that cite no commit of the repository."""
    sections = re.split(r"(?m)^(?=#)", text)
    return [
        section.partition("\n")[0]
        for section in sections
        if ("\n|" in section or re.search(r"\b20\d\d-\d\d-\d\d\b", section))
        and not any(found[:7] in commits for found in HASH.findall(section))
    ]


@table("path", RESULTS, ids=lambda path: path.name)
def test_results_cite_commits_by_hash(path):
    if git("rev-parse", "--is-shallow-repository") == ["true"]:
        pytest.skip("needs the history: this is a shallow clone")
    text = path.read_text(encoding="utf-8")
    assert uncited_sections(text, {line[:7] for line in git("rev-list", "HEAD")}) == []
    assert WORDS.findall(text) == []


def test_a_section_without_a_commit_is_found():
    text = (
        "# Title\n\n## One\n\n2026-11-21, commit abcdef1\n\n## Two\n\n| a |\n|---|\n| 1 |\n\n## Three\n\nNo figures.\n"
    )
    assert uncited_sections(text, {"abcdef1"}) == ["## Two"]
    assert uncited_sections(text, {"1234567"}) == ["## One", "## Two"]


# Folders of people and of temporary files; a Dockerfile has its own root.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:home|root|Users|tmp|work)/\w[\w.-]*/")


def machine_paths(text: str) -> list[str]:
    return MACHINE_PATH.findall(text)


@table("name", git("ls-files", "*.md", "*.json", "*.toml", "*.svg"))
def test_documents_and_results_have_no_path_of_one_machine(name):
    assert machine_paths((ROOT / name).read_text(encoding="utf-8")) == []


def test_path_of_one_machine_is_found():
    # Assembled, because this file is tracked, too.
    for folder in ("home", "root", "Users", "tmp"):
        for before in ("in ", '"command": "', "file://"):
            assert len(machine_paths(f"{before}/{folder}/x-1/bin/dynmo-plan")) == 1
    assert machine_paths("https://host/home/page/, requests/resize.json, DIR/tmp/x/") == []
