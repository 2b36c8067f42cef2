"""What the processes of a run must have in common: options, data, package and torch versions.

Each process computes its facts before any work. Their digests are gathered, and, where these differ, the facts. The
start then ends on every process with a table of the differences. Without this check two hosts with another ``--lr``
each train to wrong weights: every collective succeeds.

What a path option names may lie elsewhere on each host, so its contents are compared and not its spelling
(``Reference`` in ``config/options.py``). Folders that a run writes to, and caches, are not compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .._common.console import say
from .._common.document import DocumentError
from .._common.errors import EXIT_USAGE, UsageError
from ..config import Config
from ..config.options import OptionSpec, concern_specs
from ..config.parse import parse_blend
from ..config.resolve import concern_types
from ..formats.checkpoint import Checkpoint
from ..formats.dataset import read_sidecar
from ..formats.indexed import prefix_of
from ..parallel.consensus import is_reporting_rank
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import World, all_gather_objects, destroy_world, init_world, set_parallel_dims
from .run_directory import versions

Facts = Mapping[str, str]

# A digest of this many bytes takes a tenth of a second.
_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_BLOCKS = 256
_SAMPLED = f"digest of {_BLOCKS} places"
_MOST_COLUMNS = 4
_MISSING = "missing"


def require_same(world: World, facts: Facts) -> None:
    """End the start where the facts of two processes differ. Every process calls this.

    Args:
        world: all processes.
        facts: of this process: name to value, both for a person.

    Raises:
        UsageError: at the processes that report, with a table of the differences.
        SystemExit: with the same exit code, at the others.
    """
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    summaries = all_gather_objects(world, [world.host, digest])
    if len({found for _, found in summaries}) == 1:
        if world.is_rank0 and len({host for host, _ in summaries}) > 1 and (warning := sampled_warning(facts)):
            say(f"warning: {warning}")
        return
    gathered = all_gather_objects(world, [world.host, dict(facts)])
    if is_reporting_rank(first=world.is_rank0):
        raise UsageError(differences([(str(host), found) for host, found in gathered]))
    raise SystemExit(EXIT_USAGE)


def join_same(device: str, dims: ParallelDims, facts: Callable[[], Facts]) -> World:
    """Join the processes, check that they were started alike, and lay them out.

    The check comes before the layout: processes with other parallel sizes would make other groups, and hang.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
        dims: the layout.
        facts: what the processes must have in common.

    Raises:
        UsageError: the processes differ, or ``dims`` are not those of that number of processes.
    """
    world = init_world(device)
    try:
        require_same(world, {**facts(), "device": world.device.type, **installed()})
        return set_parallel_dims(world, dims)
    except BaseException:
        destroy_world()
        raise


def sampled_warning(facts: Facts) -> str | None:
    """A sentence about files that are compared in part; None without any."""
    names = [name for name, value in facts.items() if _SAMPLED in value]
    if not names:
        return None
    return (
        f"{', '.join(names)}: of a file above {_WHOLE_BYTES >> 20} MiB without a sidecar the hosts compare {_BLOCKS} "
        "places; a difference elsewhere passes. dynmo-prep merge-indexed writes a copy of a data set with a sidecar"
    )


def checkpoint_facts(checkpoint: Checkpoint | None, flag: str = "--load") -> Facts:
    """The identity of an opened checkpoint: hosts without a shared file system may have other files at its path."""
    if checkpoint is None:
        return {flag: "no checkpoint"}
    manifest = checkpoint.manifest
    return {flag: f"step {manifest['step']}, manifest {manifest['manifest_crc32']}"}


def differences(gathered: Sequence[tuple[str, Facts]]) -> str:
    """The table of what differs, for (host, facts) by rank: a row for each fact, a column for each kind of process."""
    columns: list[tuple[Facts, list[int]]] = []
    for rank, (_, facts) in enumerate(gathered):
        for met, ranks in columns:
            if met == facts:
                ranks.append(rank)
                break
        else:
            columns.append((facts, [rank]))
    names = list(dict.fromkeys(name for facts, _ in columns for name in facts))
    rows = [["", *(_title(ranks, gathered) for _, ranks in columns[:_MOST_COLUMNS])]]
    for name in names:
        values = [facts.get(name, "-") for facts, _ in columns]
        if len(set(values)) > 1:
            rows.append([name, *values[:_MOST_COLUMNS]])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = len(columns) - _MOST_COLUMNS
    if more > 0:
        lines.append(f"and {more} more different starts")
    rule = "the processes were started differently; give all of them the same options, data and installation:"
    return "\n  ".join([rule, *lines])


def _title(ranks: Sequence[int], gathered: Sequence[tuple[str, Facts]]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:3])
    hosts = list(dict.fromkeys(gathered[rank][0] for rank in ranks))
    more = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{', ...' if len(spans) > 3 else ''} ({hosts[0]}{more})"


def installed() -> Facts:
    """Versions that results depend on, and a digest of this package's own source.

    Of Python the minor version counts: ``sum`` adds floats in another way from 3.12 on.
    """
    found = {f"{name} version": version for name, version in versions().items()}
    return {
        **found,
        "python version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch version": str(torch.__version__),
        "dynmo_train source": source_digest(),
    }


@cache
def source_digest() -> str:
    """A digest of the package's modules, which distinguishes two commits of one version."""
    folder = Path(__file__).parents[1]  # the package
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def config_facts(config: Config) -> Facts:
    """The options of a training run: values, and the identity of what paths name."""
    return option_facts(*(config.concern(concern) for concern in concern_types()))


def option_facts(*given: object) -> Facts:
    """The same of dataclasses of options."""
    facts: dict[str, str] = {}
    for values in given:
        facts.update(_facts_of(concern_specs("", type(values)), values))
    return facts


def _facts_of(specs: Iterable[OptionSpec], values: object) -> Iterable[tuple[str, str]]:
    for spec in specs:
        value, kind = getattr(values, spec.name), spec.declaration.refers_to
        if kind == "place":
            continue
        name = spec.flag if spec.is_flag else spec.name
        if kind == "value" or value is None:
            yield name, "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        elif kind == "data":
            yield name, _data_identity(name, value)
        else:
            yield name, ", ".join(identity_of(Path(part)) for part in _paths(kind, value))


def _paths(kind: str, value: str) -> list[str]:
    try:
        return shlex.split(value) if kind == "files" else [value]
    except ValueError:
        return [value]


def _data_identity(flag: str, text: str) -> str:
    """Weights and data sets of a blend; what cannot be read is compared as it is spelled, and refused later."""
    try:
        blend = parse_blend(flag, text)
    except UsageError:
        return text
    several = len(blend) > 1
    return ", ".join((f"{weight:g} x " if several else "") + dataset_identity(prefix) for weight, prefix in blend)


def dataset_identity(prefix: str) -> str:
    """Sizes and digests of ``PREFIX.bin`` and ``PREFIX.idx``, and what the data set's sidecar states of them.

    Large files are only sampled. A sidecar has digests of every byte, taken when the data set was written.
    """
    stem = prefix_of(prefix)
    found = ", ".join(f".{name} {identity_of(Path(f'{stem}.{name}'))}" for name in ("bin", "idx"))
    try:
        sidecar = read_sidecar(stem)
    except DocumentError:
        return f"{found}, invalid sidecar"  # refused where the data set is opened
    if sidecar is None:
        return found
    stated = [sidecar["bin"]["pieces"], sidecar["idx"], sidecar["recipe"]["sha256"]]
    found = found.replace(_SAMPLED, "digest")  # the sidecar's are of every byte
    return f"{found}, sidecar {hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:12]}"


def identity_of(path: Path) -> str:
    """Size and digest of a file, or of a folder's file names and sizes; ``missing`` where nothing is there.

    A file of more than 64 MiB is read at 256 places spread evenly over it: at a start each process reads the same
    little of a data set, whatever its size. The text states that.
    """
    try:
        if path.is_dir():
            files = sorted((str(each.relative_to(path)), each.stat().st_size) for each in path.rglob("*.*"))
            return f"{len(files):,} files, digest {hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]}"
        size = path.stat().st_size
        if not path.is_file():
            return "not a file"  # a pipe can be read only once
        with path.open("rb") as handle:
            if size <= _WHOLE_BYTES:
                return f"{size:,} bytes, digest {hashlib.file_digest(handle, 'sha256').hexdigest()[:12]}"
            return f"{size:,} bytes, {_SAMPLED} {_sampled_digest(handle, size)}"
    except OSError:
        return _MISSING


def _sampled_digest(handle: Any, size: int) -> str:
    digest = hashlib.sha256()
    last = size - _BLOCK_BYTES
    for block in range(_BLOCKS):
        handle.seek(math.floor(block * last / (_BLOCKS - 1)))
        digest.update(handle.read(_BLOCK_BYTES))
    return digest.hexdigest()[:12]
