"""Public functions document their arguments: shapes of arrays, the meaning of numbers, the errors that they raise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.paths import ROOT
from tests.tables import table

PACKAGES = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt", "bin/shared")
ARRAY = re.compile(r"\b(Tensor|ndarray|NDArray|ArrayLike)\b")
SHAPE = re.compile(r"\[[^\]]*\]|\bshapes?\b|\bscalar\b|\belements?\b|\bany dimension")

NUMBERS = {"int", "float", "int | None", "float | None"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
parsed = cache(ast.parse)  # each rule reads every module


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Functions of a module and methods of its classes whose names do not begin with an underscore."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield None, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for each in node.body:
                if isinstance(each, Function) and (each.name == "__call__" or not each.name.startswith("_")):
                    yield node, each


def is_command(function: Function) -> bool:
    """Whether typer calls the function: its docstring is the help, and each option has a help of its own."""
    decorators = map(ast.unparse, function.decorator_list)
    typed = (ast.unparse(each.annotation) for each in arguments(function) if each.annotation)
    return any(re.search(r"\.(command|callback)\(", text) for text in decorators) or any("typer." in t for t in typed)


def documentation(owner: ast.ClassDef | None, function: Function) -> str:
    """The docstrings of a function and of its class."""
    return "\n".join(ast.get_docstring(node) or "" for node in (function, owner) if node is not None)


def arguments(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def undocumented_arrays(source: str) -> list[str]:
    """Functions with an array argument whose docstring lacks the argument's name or any shape."""
    found = []
    for owner, function in public_functions(parsed(source)):
        annotated = [each for each in arguments(function) if each.annotation]
        arrays = [each.arg for each in annotated if ARRAY.search(ast.unparse(each.annotation))]
        text = documentation(owner, function)
        missing = [name for name in arrays if not re.search(rf"\b{name}\b", text)]
        if arrays and (missing or not SHAPE.search(text)):
            found.append(f"{function.name}: {', '.join(missing) or 'no shape'}")
    return found


def undocumented_numbers(source: str) -> list[str]:
    """Functions with a numeric argument whose docstring does not name it, with its unit and what 0 or None means."""
    found = []
    for owner, function in public_functions(parsed(source)):
        annotated = [each for each in arguments(function) if each.annotation]
        numbers = [each.arg for each in annotated if ast.unparse(each.annotation) in NUMBERS]
        missing = [name for name in numbers if not re.search(rf"\b{name}\b", documentation(owner, function))]
        if missing and not is_command(function):
            found.append(f"{function.name}: {', '.join(missing)}")
    return found


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of a function's body, without those of functions within it."""
    left = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda):
            left += ast.iter_child_nodes(node)


def is_error(node: ast.Raise) -> bool:
    return node.exc is not None and not ast.unparse(node.exc).startswith("typer.Exit")


def undocumented_errors(source: str) -> list[str]:
    """Functions that raise an error and have no ``Raises`` in their docstring; ``typer.Exit`` is a command's end."""
    return [
        function.name
        for owner, function in public_functions(parsed(source))
        if any(isinstance(node, ast.Raise) and is_error(node) for node in own_nodes(function))
        and not is_command(function)
        and "Raises" not in documentation(owner, function)
    ]


RULES = {"arrays": undocumented_arrays, "numbers": undocumented_numbers, "errors": undocumented_errors}


@table("rule", RULES)
@table("package", PACKAGES)
def test_public_functions_document_their_interface(package, rule):
    # Copies of shared modules are checked where they come from.
    folder = ROOT / package
    files = [path for path in folder.rglob("*.py") if package == "bin/shared" or "_common" not in path.parts]
    found = {
        str(path.relative_to(ROOT)): missing
        for path in files
        if (missing := RULES[rule](path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Scale ``x_BT``, ``[B, T]``.", []),
        ("Scale the input, ``[B, T]``.", ["scale: x_BT"]),
        ("Scale x_BT.", ["scale: no shape"]),
    ],
)
def test_undocumented_arrays_are_found(docstring, expected):
    assert undocumented_arrays(f'def scale(x_BT: torch.Tensor) -> None:\n    """{docstring}"""') == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ('def wait(timeout_s: float) -> None:\n    """Wait up to ``timeout_s`` seconds."""', []),
        ('def wait(timeout_s: float) -> None:\n    """Wait."""', ["wait: timeout_s"]),
        ('def wait(*, count: int | None = None) -> None:\n    """Wait."""', ["wait: count"]),
        ('@app.command("wait")\ndef wait(timeout_s: float = 1) -> None:\n    """Wait."""', []),
        (
            'class Door:\n    """``width``: mm."""\n    def open(self, width: int) -> None:\n        """Open."""',
            [],
        ),
    ],
)
def test_undocumented_numbers_are_found(function, expected):
    assert undocumented_numbers(function) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('"""Read."""\n    raise ValueError', ["read"]),
        ('"""Read.\n\n    Raises:\n        ValueError: always.\n    """\n    raise ValueError', []),
        ('"""Read."""\n    try:\n        pass\n    except OSError:\n        raise', []),
        ('"""Read."""\n    def fail():\n        raise ValueError', []),
    ],
)
def test_undocumented_errors_are_found(body, expected):
    assert undocumented_errors(f"def read() -> None:\n    {body}\n") == expected
