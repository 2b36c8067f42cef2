"""The layout of the packages: few entries at the top, imports one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt")
# Every Python package has these; _common holds generated copies.
PACKAGE_FILES = {"__init__.py", "__main__.py", "__pycache__", "_common", "README.md", "py.typed"}


def module_files(root: Path, package: str) -> dict[str, Path]:
    """Files of a package by the dotted names of their modules."""
    files = sorted((root / package).rglob("*.py"))
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def executed_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``: names of annotations are not dependencies."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from executed_nodes(node)


def imports_of(name: str, files: dict[str, Path]) -> set[str]:
    """Modules of ``files`` that one of them imports, at its top or inside functions."""
    found = set()
    for node in executed_nodes(ast.parse(files[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") + ["__init__"] * (files[name].name == "__init__.py")
                base = ".".join([*parts[: -node.level], *filter(None, [node.module])])
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in node.names)
    return (found & set(files)) - {name}


def import_graph(root: Path, package: str) -> dict[str, set[str]]:
    files = module_files(root, package)
    return {name: imports_of(name, files) for name in files}


def folders_of(graph: dict[str, set[str]]) -> set[str]:
    """Dotted names of the package and of all folders in it."""
    return {name.rsplit(".", depth)[0] for name in graph for depth in range(1, name.count(".") + 1)}


def folder_graph(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The same graph between the entries of a folder: its modules and folders."""

    def entry(name: str) -> str:
        return ".".join(name.split(".")[: folder.count(".") + 2])

    entries: dict[str, set[str]] = {}
    for name, imported in graph.items():
        if name.startswith(f"{folder}."):
            inside = {entry(each) for each in imported if each.startswith(f"{folder}.")}
            entries.setdefault(entry(name), set()).update(inside - {entry(name)})
    return entries


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_at_most_twelve_entries_at_the_top(package):
    entries = {path.name for path in (ROOT / package).iterdir()} - PACKAGE_FILES
    assert len(entries) <= 12, sorted(entries)


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_one_way(package):
    graph = import_graph(ROOT, package)
    assert sum(map(len, graph.values())) > 50
    assert circle(graph) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_one_way(package):
    graph = import_graph(ROOT, package)
    assert sum(map(len, folder_graph(graph, package).values())) > 10
    circles = {folder: circle(folder_graph(graph, folder)) for folder in folders_of(graph)}
    assert {folder: found for folder, found in circles.items() if found} == {}


@pytest.mark.parametrize(
    ("lower", "files_circle", "folders_circle"),
    [
        ("x = 1", False, False),
        ("from ..upper import high", True, True),
        ("def f():\n    from p.upper import high", True, True),
        ("from ..upper.other import y", False, True),
        ("from p.upper.other import y", False, True),
        ("if TYPE_CHECKING:\n    from p.upper.other import y", False, False),
    ],
)
def test_circles_are_found(tmp_path, lower, files_circle, folders_circle):
    for name, text in {
        "p/__init__.py": "",
        "p/upper/__init__.py": "",
        "p/upper/high.py": "from ..lower import low",
        "p/upper/other.py": "y = 1",
        "p/lower/__init__.py": "",
        "p/lower/low.py": lower,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = import_graph(tmp_path, "p")
    assert bool(circle(graph)) is files_circle
    assert bool(circle(folder_graph(graph, "p"))) is folders_circle


def test_circles_are_found_below_the_top(tmp_path):
    for name, text in {
        "p/__init__.py": "",
        "p/a/__init__.py": "",
        "p/a/upper/__init__.py": "",
        "p/a/upper/high.py": "from ..lower import low",
        "p/a/upper/other.py": "y = 1",
        "p/a/lower/__init__.py": "",
        "p/a/lower/low.py": "from ..upper.other import y",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = import_graph(tmp_path, "p")
    assert folders_of(graph) == {"p", "p.a", "p.a.upper", "p.a.lower"}
    assert circle(folder_graph(graph, "p")) == []
    assert circle(folder_graph(graph, "p.a")) != []
