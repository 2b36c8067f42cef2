"""Benchmarks are not run here; what they import exists."""

from __future__ import annotations

import ast
import importlib

from tests.paths import ROOT
from tests.tables import table

BENCHMARKS = sorted((ROOT / "tests" / "benchmarks").glob("*.py"))
PROJECT = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt", "tests")


@table("path", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmark_imports_names_that_exist(path):
    missing = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PROJECT:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    try:
                        importlib.import_module(f"{node.module}.{alias.name}")
                    except ModuleNotFoundError:
                        missing.append(f"{node.module}.{alias.name}")
    assert missing == []


def test_every_benchmark_is_on_the_page():
    folder = ROOT / "tests" / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in BENCHMARKS if not path.name.startswith("_")]
    tables = [path.name for path in folder.glob("*.md") if path.name != "README.md"]
    missing = [name for name in scripts if f"`{name}`" not in page] + [
        name for name in tables if f"({name})" not in page
    ]
    assert missing == []
