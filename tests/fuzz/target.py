"""A fuzz target: one parser of the project, called with a file, a folder or a text of the given bytes.

A target is a function of bytes. It returns, or raises an error that the parser documents: by default an error of the
parser's package (``DynmoError``), but never ``WriterError``, which reports a fault of the project. Anything else is a
defect. Targets import the parser when they are called, so that a process loads only what its targets need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

MAX_SEED_BYTES = 20_000
Run = Callable[[bytes, Path], object]
Seeds = Callable[[Path], Iterable[bytes]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A parser and valid inputs of it.

    Attributes:
        name: of the target, for ``--target``.
        run: calls the parser with bytes; the folder, in memory, is its own, and is empty before the first call.
        seeds: valid inputs; the folder is for the project's writers.
        readers: the parsers that it calls, as ``module:function``; the first one's package names the errors.
        errors: other documented errors, such as ``ValueError`` of functions whose callers report it.
    """

    name: str
    run: Run
    seeds: Seeds
    readers: tuple[str, ...]
    errors: tuple[type[Exception], ...] = ()

    @property
    def package(self) -> str:
        """The package of the parser."""
        return self.readers[0].partition(".")[0]

    def is_documented(self, error: BaseException) -> bool:
        """Whether an error is one that the parser documents."""
        root = import_module(f"{self.package}._common.errors").DynmoError
        internal = import_module(f"{self.package}._common.document").WriterError
        return isinstance(error, (root, *self.errors)) and not isinstance(error, internal)

    def execute(self, data: bytes, folder: Path) -> None:
        """Call the parser; documented errors are swallowed."""
        try:
            self.run(data, folder)
        except Exception as error:
            if not self.is_documented(error):
                raise


def function(reader: str) -> Callable[..., Any]:
    """The function of ``module:function``."""
    module, _, name = reader.partition(":")
    return getattr(import_module(module), name)


def exhaust(value: Any) -> None:
    """Read all of a generator: parsers of large files yield their records."""
    if hasattr(value, "__next__"):
        for _ in value:
            pass


def file_target(
    reader: str,
    seeds: Seeds,
    *,
    file: str,
    label: str = "",
    call: Callable[[Callable[..., Any], Path], object] | None = None,
    errors: tuple[type[Exception], ...] = (),
    more_readers: tuple[str, ...] = (),
) -> Target:
    """A target that writes the bytes to a file and calls a reader with its path.

    Args:
        reader: as ``module:function``.
        seeds: valid contents.
        file: name of the file.
        label: distinguishes targets of one reader.
        call: calls the reader with the path; default: the path is its only argument.
        errors: documented errors besides those of the package.
        more_readers: other parsers that the call reaches.
    """

    def run(data: bytes, folder: Path) -> None:
        path = folder / file
        path.write_bytes(data)
        read = function(reader)
        exhaust(read(path) if call is None else call(read, path))

    name = _name(reader, label)
    return Target(name=name, run=run, seeds=seeds, readers=(reader, *more_readers), errors=errors)


def text_target(
    reader: str,
    seeds: Iterable[str | bytes] | Seeds,
    *,
    label: str = "",
    call: Callable[[Callable[..., Any], str], object] | None = None,
    errors: tuple[type[Exception], ...] = (),
    more_readers: tuple[str, ...] = (),
) -> Target:
    """A target that calls a parser with a text, such as the value of a flag; arguments as of ``file_target``."""

    def run(data: bytes, folder: Path) -> None:
        text = data.decode("utf-8", "surrogateescape")
        parse = function(reader)
        exhaust(parse(text) if call is None else call(parse, text))

    name = _name(reader, label)
    return Target(name=name, run=run, seeds=_seeds(seeds), readers=(reader, *more_readers), errors=errors)


def bytes_target(
    reader: str,
    seeds: Iterable[str | bytes] | Seeds,
    *,
    label: str = "",
    call: Callable[[Callable[..., Any], bytes], object] | None = None,
    errors: tuple[type[Exception], ...] = (),
    more_readers: tuple[str, ...] = (),
) -> Target:
    """A target that calls a parser with the bytes; arguments as of ``file_target``."""

    def run(data: bytes, folder: Path) -> None:
        parse = function(reader)
        exhaust(parse(data) if call is None else call(parse, data))

    name = _name(reader, label)
    return Target(name=name, run=run, seeds=_seeds(seeds), readers=(reader, *more_readers), errors=errors)


def _name(reader: str, label: str) -> str:
    """``train.formats.plan.read_plan`` for ``dynmo_train.formats.plan:read_plan``."""
    name = reader.removeprefix("dynmo_").replace(":", ".")
    return f"{name}-{label}" if label else name


def _seeds(seeds: Iterable[str | bytes] | Seeds) -> Seeds:
    if callable(seeds):
        return seeds
    values = [seed.encode() if isinstance(seed, str) else seed for seed in seeds]
    return lambda _folder: values


def fixtures(folder: Path, *patterns: str) -> Seeds:
    """The contents of small files, in the order of their names."""

    def read(_folder: Path) -> list[bytes]:
        paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
        return [path.read_bytes() for path in paths if path.stat().st_size < MAX_SEED_BYTES]

    return read


@dataclass
class Collected:
    """Targets by name."""

    targets: dict[str, Target] = field(default_factory=dict)

    def add(self, *targets: Target) -> None:
        """Register targets; a name is given once."""
        for target in targets:
            if target.name in self.targets:
                raise ValueError(f"two targets are named {target.name}")
            self.targets[target.name] = target


@contextlib.contextmanager
def quiet() -> Any:
    """Discard what a parser prints: warnings about unusual, but valid input."""
    with (
        open("/dev/null", "w", encoding="utf-8") as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        yield
