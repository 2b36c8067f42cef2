"""A corpus that every machine has: the documentation of the installed Python.

Documents are docstrings and long comments of the standard library, read with ``ast`` without importing modules, the
topics of ``pydoc``, and plain-text files. The same installation and arguments give the same bytes.
"""

from __future__ import annotations

import ast
import inspect
import io
import random
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._common.document import write_whole
from .._common.errors import UsageError
from ..io.atomic_write import refuse_existing, sweep_temporaries
from ..io.codecs import wrap_write
from ..io.jsonl import encode_row
from ..io.paths import check_writable

# Installed packages differ between machines, tests have few sentences.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "turtledemo"}
)
DOCUMENT_ENDINGS = (".txt", ".rst", ".md")
# Shorter texts are names and headings, shorter blocks are notes to one line of code.
MIN_CHARACTERS = 40
MIN_COMMENT_LINES = 3
MAX_SECTION_CHARACTERS = 4_000


def stdlib_folder() -> Path:
    """The folder of the installed standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _files(root: Path) -> Iterator[Path]:
    # Sorted: the file system determines the order otherwise, and documents are numbered and shuffled by it.
    for path in sorted(root.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.is_symlink():
                yield from _files(path)
        elif path.is_file():
            yield path


def docstrings(source: str) -> list[str]:
    """The docstrings of a module's source, outermost first, without indentation.

    Raises:
        SyntaxError: the source has another grammar.
    """
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        tree = ast.parse(source)
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text and text.strip():
                found.append(inspect.cleandoc(text).strip())
            # Before the siblings: the documents of a class stay together, in the order of the source.
            waiting = [child for child in node.body if isinstance(child, ast.stmt)] + waiting
    return found


def comments(source: str) -> list[str]:
    """Blocks of at least three comment lines that are sentences."""
    found: list[str] = []
    run: list[str] = []
    for line in [*source.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith("#"):
            run.append(stripped.lstrip("#").strip())
            continue
        text = "\n".join(run).strip()
        if len(run) >= MIN_COMMENT_LINES and text[:1].isupper() and ". " in text.replace("\n", " ") + " ":
            found.append(text)
        run = []
    return found


def topics(source: str) -> dict[str, str]:
    """The topics of ``pydoc_data/topics.py``, the dictionary literal that it assigns."""
    # Evaluated as a literal: no module of the library is imported, so none can run code.
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            value = ast.literal_eval(node.value)
            return {str(name): str(text).strip() for name, text in value.items()}
    return {}


def sections(parts: list[str], limit: int = MAX_SECTION_CHARACTERS) -> list[str]:
    """Join parts by blank lines into texts of at most about ``limit`` characters; a longer part stays complete."""
    joined: list[list[str]] = [[]]
    size = 0
    for part in parts:
        if joined[-1] and size + len(part) > limit:
            joined.append([])
            size = 0
        joined[-1].append(part)
        size += len(part) + 2
    return ["\n\n".join(group) for group in joined if group]


def documents_of(path: Path) -> list[str]:
    """The documents of one file; empty if it cannot be read as text or source."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    if path.suffix in DOCUMENT_ENDINGS:
        return sections([part.strip() for part in text.split("\n\n") if part.strip()])
    if path.name == "topics.py" and path.parent.name == "pydoc_data":
        return [part for topic in topics(text).values() for part in sections(topic.split("\n\n"))]
    try:
        return sections([*docstrings(text), *comments(text)])
    except (SyntaxError, ValueError, RecursionError):
        return []


def sample(root: Path, max_bytes: int, seed: int) -> Iterator[dict[str, str]]:
    """Documents in a random order, up to ``max_bytes`` of text.

    Args:
        root: folder of the standard library.
        max_bytes: maximum UTF-8 bytes of text; 0 is unlimited.
        seed: seed of the order.

    Raises:
        UsageError: the folder has no documents.
    """
    found: list[dict[str, str]] = []
    for path in _files(root):
        if path.suffix != ".py" and path.suffix not in DOCUMENT_ENDINGS:
            continue
        source = path.relative_to(root).as_posix()
        for number, text in enumerate(documents_of(path)):
            if len(text) >= MIN_CHARACTERS:
                found.append({"id": f"{source}#{number}", "source": source, "text": text})
    if not found:
        raise UsageError(f"{root}: no documentation found; install Python with the source of its standard library")
    random.Random(seed).shuffle(found)
    size = 0
    for document in found:
        size += len(document["text"].encode("utf-8", "replace"))
        if max_bytes and size > max_bytes:
            return
        yield document


def write_sample(root: Path, output: Path, *, max_bytes: int, seed: int, overwrite: bool = False) -> dict[str, Any]:
    """Write the sample as JSON lines, atomically.

    An existing output is replaced if ``overwrite`` is set or its bytes are the same.

    Args:
        root: folder of the standard library.
        output: file of the sample, compressed by its extension.
        max_bytes: maximum UTF-8 bytes of text; 0 is unlimited.
        seed: seed of the order.
        overwrite: replace an existing output.

    Returns:
        The report of the command.

    Raises:
        UsageError: the output exists, or the folder has no documents.
    """
    started = time.monotonic()
    check_writable([output])
    documents = list(sample(root, max_bytes, seed))
    payload = io.BytesIO()
    writer = wrap_write(payload, output.suffix)
    for document in documents:
        writer.write(encode_row(dict(document)) + b"\n")
    if writer is not payload:
        writer.close()
    if not overwrite and not (output.is_file() and output.read_bytes() == payload.getvalue()):
        refuse_existing([output])
    output.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(output)
    write_whole(output, payload.getvalue())
    return {
        "documents": len(documents),
        "bytes": sum(len(document["text"].encode()) for document in documents),
        "source": str(root),
        "output": str(output),
        "seconds": round(time.monotonic() - started, 3),
    }
