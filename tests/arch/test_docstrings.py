"""Public functions document their tensor and array arguments: the name and the shape of each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.paths import ROOT

PACKAGES = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt")
ARRAY = re.compile(r"\b(Tensor|ndarray|NDArray|ArrayLike)\b")
SHAPE = re.compile(r"\[[^\]]*\]|\bshapes?\b|\bscalar\b|\belements?\b|\bany dimension")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Functions of a module and methods of its classes whose names do not begin with an underscore."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield None, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for each in node.body:
                if isinstance(each, Function) and (each.name == "__call__" or not each.name.startswith("_")):
                    yield node, each


def undocumented(source: str) -> list[str]:
    """Functions with an array argument whose docstring lacks the argument's name or any shape."""
    found = []
    for owner, function in public_functions(ast.parse(source)):
        every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        arrays = [each.arg for each in every if each.annotation and ARRAY.search(ast.unparse(each.annotation))]
        documents = [ast.get_docstring(node) or "" for node in (function, owner) if node is not None]
        text = "\n".join(documents)
        missing = [name for name in arrays if not re.search(rf"\b{name}\b", text)]
        if arrays and (missing or not SHAPE.search(text)):
            found.append(f"{function.name}: {', '.join(missing) or 'no shape'}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_document_their_array_arguments(package):
    files = [path for path in (ROOT / package).rglob("*.py") if path.parent.name != "_common"]
    found = {
        str(path.relative_to(ROOT)): missing
        for path in files
        if (missing := undocumented(path.read_text(encoding="utf-8")))
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
    assert undocumented(f'def scale(x_BT: torch.Tensor) -> None:\n    """{docstring}"""') == expected
