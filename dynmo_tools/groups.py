"""Groups of duplicates from pairs of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .compression import open_read, wrap_write
from .errors import UsageError
from .formats._document import write_whole
from .unionfind import UnionFind
from .wholefile import sweep_temporaries


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines that this program wrote.

    Raises:
        UsageError: with the line that is none.
    """
    try:
        with open_read(path) as handle:
            for number, line in enumerate(handle, 1):
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise UsageError(f"{path}: line {number} is no JSON object")
                yield value
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: is no file of JSON lines: {error}") from error


def group(pairs: Iterable[dict[str, Any]], threshold: float) -> list[list[str]]:
    """Documents that pairs at ``threshold`` and above connect, in the order in which the pairs name them.

    Args:
        pairs: ``{main: [{other: J}, ...]}``, earlier documents first.
        threshold: of the Jaccard index.

    Raises:
        UsageError: a pair that does not look like one.
    """
    numbers: dict[str, int] = {}
    joined: list[tuple[int, int]] = []
    for entry in pairs:
        for main, others in entry.items():
            first = numbers.setdefault(main, len(numbers))
            try:
                close = [(other, float(index)) for each in others for other, index in each.items()]
            except (AttributeError, TypeError, ValueError) as error:
                raise UsageError(f"{main!r}: must be followed by a list of {{other: Jaccard index}}") from error
            joined += [(first, numbers.setdefault(o, len(numbers))) for o, index in close if index >= threshold]
    sets = UnionFind(len(numbers))
    for a, b in joined:
        sets.join(a, b)
    names = list(numbers)
    return [[names[member] for member in members] for members in sets.groups()]


def write_groups(pairs: Path, output: Path, threshold: float) -> list[list[str]]:
    """Group a file of pairs into a file of ``{"0": [names]}``, one group a line, its survivor first."""
    import io

    groups = group(read_objects(pairs), threshold)
    payload = io.BytesIO()
    writer = wrap_write(payload, output.suffix)
    for number, members in enumerate(groups):
        writer.write(json.dumps({str(number): members}, ensure_ascii=False).encode() + b"\n")
    if writer is not payload:
        writer.close()
    sweep_temporaries(output)
    write_whole(output, payload.getvalue())
    return groups


@functools.lru_cache(maxsize=1)
def read_removals(path: Path) -> frozenset[str]:
    """The names behind the first one of each group."""
    found: list[str] = []
    for entry in read_objects(path):
        for members in entry.values():
            if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
                raise UsageError(f"{path}: each group must be a list of names")
            found += members[1:]
    return frozenset(found)
