"""What every package has: the generated copies of the document rules, and the commands' options."""

from __future__ import annotations

import io
import re
import shlex
import zipfile
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target, fixtures, function, text_target
from tests.paths import CONTRACTS, ROOT

TOMLS = fixtures(ROOT, "dynmo_*/**/*.toml")
JSONS = fixtures(CONTRACTS, "*/valid/*.json", "plan/valid/*.json")
SEAL = re.compile(rb'("manifest_crc32"\s*:\s*")([^"]{8})(")')


def document_targets(package: str) -> list[Target]:
    """The parsers of ``_common/document.py``, which raise ``ValueError``: their callers know the file's name."""
    module = f"{package}._common.document"
    return [
        text_target(f"{module}:parse_json", JSONS, errors=(ValueError,)),
        text_target(f"{module}:parse_any_json", JSONS, errors=(ValueError,)),
        text_target(f"{module}:parse_toml", TOMLS, errors=(ValueError,)),
    ]


def reseal(data: bytes) -> bytes:
    """A manifest with a correct checksum, so that mutations reach the rules behind it."""
    found = SEAL.search(data)
    if found is None:
        return data
    at = found.start(2)
    blank = data[:at] + b"0" * 8 + data[at + 8 :]
    return blank[:at] + f"{zlib.crc32(blank):08x}".encode() + blank[at + 8 :]


def resealed(target: Target) -> Target:
    """The same target with a correct checksum in the manifest."""

    def run(data: bytes, folder: Path) -> None:
        target.run(reseal(data), folder)

    return Target(
        name=f"{target.name}-sealed", run=run, seeds=target.seeds, readers=target.readers, errors=target.errors
    )


def folder_target(
    reader: str,
    build: Callable[[Path], object],
    *,
    file: str,
    label: str,
    call: Callable[[Callable[..., Any], Path], object] | None = None,
    more_readers: tuple[str, ...] = (),
) -> Target:
    """A target that replaces one file of a folder, and calls a reader with the folder.

    Args:
        reader: as ``module:function``.
        build: writes the folder, which does not exist.
        file: path of the file in the folder.
        label: distinguishes targets of one reader.
        call: calls the reader with the folder; default: it is the only argument.
        more_readers: other parsers that the call reaches.
    """

    def run(data: bytes, folder: Path) -> None:
        place = folder / "input"
        if not place.exists():
            build(place)
        (place / file).write_bytes(data)
        read = function(reader)
        if call is None:
            read(place)
        else:
            call(read, place)

    def seeds(folder: Path) -> list[bytes]:
        build(folder / "input")
        return [(folder / "input" / file).read_bytes()]

    name = f"{reader.removeprefix('dynmo_').replace(':', '.')}-{label}"
    return Target(name=name, run=run, seeds=seeds, readers=(reader, *more_readers))


def command_target(package: str, app: Callable[[], Any], name: str, lines: Sequence[str]) -> Target:
    """The options of a command, parsed by its own parser; the command does not run.

    Args:
        package: of the command.
        app: returns the click command.
        name: of the command line, such as ``pretrain-gpt``.
        lines: valid options.
    """

    def run(data: bytes, folder: Path) -> None:
        with app().make_context(name, split_words(data)):
            pass

    return Target(
        name=f"{package.removeprefix('dynmo_')}.flags-{name}",
        run=run,
        seeds=lambda _folder: [line.encode() for line in lines],
        readers=(f"{package}.cli:flags",),
        errors=click_errors(),
    )


def split_words(data: bytes) -> list[str]:
    """A command line as a shell splits it; where its quotes are not closed, at white space."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def click_errors() -> tuple[type[Exception], ...]:
    """What the parser of options raises: typer has click within it, or imports it."""
    import typer

    return (next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"), typer.Exit)


def click_command(module: str, attribute: str, *names: str) -> Callable[[], Any]:
    """A function that returns the click command of a typer application, or one of its subcommands; made once."""
    made: dict[str, Any] = {}

    def get() -> Any:
        if "command" not in made:
            import typer

            command: Any = typer.main.get_command(getattr(import_module(module), attribute))
            for name in names:
                command = command.get_command(command.context_class(command), name)
            made["command"] = command
        return made["command"]

    return get


def constant(*values: bytes) -> Callable[[Path], list[bytes]]:
    """Seeds that need no folder."""
    return lambda _folder: list(values)


def repacked(target: Target, pack: Callable[[bytes, bytes], bytes], unpack: Callable[[bytes], bytes]) -> Target:
    """A target whose input is a part of its file, which is packed again with correct lengths and checksums.

    Args:
        target: the target; it reads whole files.
        pack: returns a file with another part, from the file and the part.
        unpack: returns the part of a file.
    """
    files: list[tuple[bytes, int]] = []

    def seeds(folder: Path) -> list[bytes]:
        found = [seed for seed in target.seeds(folder) if seed[:4] == b"PK\3\4" or pack is pack_header]
        parts = [unpack(file) for file in found]
        files[:] = [(file, len(part)) for file, part in zip(found, parts, strict=True)]
        return parts

    def run(data: bytes, folder: Path) -> None:
        file, _ = min(files, key=lambda each: abs(each[1] - len(data)))
        target.run(pack(file, data), folder)

    return Target(name=f"{target.name}-repacked", run=run, seeds=seeds, readers=target.readers, errors=target.errors)


def unpack_pickle(file: bytes) -> bytes:
    """The pickle of a file of ``torch.save``."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def pack_pickle(file: bytes, data: bytes) -> bytes:
    """A file of ``torch.save`` with another pickle."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as archive, zipfile.ZipFile(target, "w") as packed:
        for name in archive.namelist():
            packed.writestr(zipfile.ZipInfo(name), data if name.endswith("/data.pkl") else archive.read(name))
    return target.getvalue()


def unpack_header(file: bytes) -> bytes:
    """The JSON header of a safetensors file."""
    return file[8 : 8 + int.from_bytes(file[:8], "little")].rstrip()


def pack_header(file: bytes, data: bytes) -> bytes:
    """A safetensors file with another header and its correct length."""
    return len(data).to_bytes(8, "little") + data + file[8 + int.from_bytes(file[:8], "little") :]
