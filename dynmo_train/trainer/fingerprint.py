"""Checks that all processes of a run were started alike: options, data, package and torch versions.

Each process computes the properties of its run before any work. Digests of them are gathered and, where these differ,
the properties. The start then ends on every rank with a table of the differences. Without this check two hosts with
different ``--lr`` would train to wrong weights, since every collective succeeds.

The file of a path option may have another path on each host, so that its contents are compared instead
(``Reference`` in ``config/options.py``). Output folders and caches are not compared.
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

from .._common.console import print_message
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

# What must be equal on all processes: name (an option, a version, a file) -> readable value.
RunProperties = Mapping[str, str]

# Largest file that is read completely: a digest takes 0.1 s.
_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_BLOCKS = 256
_SAMPLED = f"digest of {_BLOCKS} blocks"
_MAX_COLUMNS = 4
_MISSING = "missing"


def require_same(world: World, properties: RunProperties) -> None:
    """End the start if two processes have different properties. Every rank calls this.

    Args:
        world: all processes.
        properties: those of this process: name -> value, both readable.

    Raises:
        UsageError: on reporting ranks, with a table of the differences.
        SystemExit: on the other ranks, with the same exit code.
    """
    # Digests first: the properties of all ranks are long, and rarely differ.
    digest = hashlib.sha256(json.dumps(dict(properties), sort_keys=True).encode()).hexdigest()
    summaries = all_gather_objects(world, [world.host, digest])
    if len({found for _, found in summaries}) == 1:
        if world.is_rank0 and len({host for host, _ in summaries}) > 1 and (warning := sampled_warning(properties)):
            print_message(f"warning: {warning}")
        return
    gathered = all_gather_objects(world, [world.host, dict(properties)])
    if is_reporting_rank(first=world.is_rank0):
        raise UsageError(differences([(str(host), found) for host, found in gathered]))
    raise SystemExit(EXIT_USAGE)


def join_same(
    device: str, dims: ParallelDims, properties: Callable[[], RunProperties], *, timeout_s: float = 600.0
) -> World:
    """Join the processes, check that they were started alike, and create the process groups.

    The check precedes the groups: processes with other parallel sizes would create other groups, and hang.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
        dims: parallel sizes.
        properties: returns the properties that must be equal.
        timeout_s: timeout of collectives, in seconds.

    Raises:
        UsageError: the processes differ, or ``dims`` do not match their number.
    """
    world = init_world(device, timeout_s)
    try:
        require_same(world, {**properties(), "device": world.device.type, **installed()})
        return set_parallel_dims(world, dims, timeout_s)
    # Also a KeyboardInterrupt or SystemExit: the caller has no world yet, and could not destroy it.
    except BaseException:
        destroy_world()
        raise


def sampled_warning(properties: RunProperties) -> str | None:
    """A warning about files of which only a sample is compared; None without any."""
    names = [name for name, value in properties.items() if _SAMPLED in value]
    if not names:
        return None
    return (
        f"{', '.join(names)}: hosts compare only {_BLOCKS} blocks of a file above {_WHOLE_BYTES >> 20} MiB without a "
        "sidecar and miss differences elsewhere; dynmo-prep merge-indexed writes a copy of a data set with a sidecar"
    )


def checkpoint_properties(checkpoint: Checkpoint | None, flag: str = "--load") -> RunProperties:
    """The identity of an opened checkpoint: without a shared file system, hosts may have different ones."""
    if checkpoint is None:
        return {flag: "no checkpoint"}
    manifest = checkpoint.manifest
    return {flag: f"step {manifest['step']}, manifest {manifest['manifest_crc32']}"}


def differences(gathered: Sequence[tuple[str, RunProperties]]) -> str:
    """A table of the differences: rows are properties, columns are groups of equal ranks.

    Args:
        gathered: (host, properties) of each rank, in order.
    """
    # Ranks with equal properties share a column: a table of 1,000 ranks is as wide as its few kinds of ranks.
    columns: list[tuple[RunProperties, list[int]]] = []
    for rank, (_, properties) in enumerate(gathered):
        for column, ranks in columns:
            if column == properties:
                ranks.append(rank)
                break
        else:
            columns.append((properties, [rank]))
    names = list(dict.fromkeys(name for properties, _ in columns for name in properties))
    rows = [["", *(_title(ranks, gathered) for _, ranks in columns[:_MAX_COLUMNS])]]
    for name in names:
        values = [properties.get(name, "-") for properties, _ in columns]
        if len(set(values)) > 1:
            rows.append([name, *values[:_MAX_COLUMNS]])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = len(columns) - _MAX_COLUMNS
    if more > 0:
        lines.append(f"and {more} more groups of ranks")
    rule = "the processes were started differently; give all of them the same options, data and installation:"
    return "\n  ".join([rule, *lines])


def _title(ranks: Sequence[int], gathered: Sequence[tuple[str, RunProperties]]) -> str:
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


def installed() -> RunProperties:
    """Versions that affect results, and a digest of the source of this package.

    Of Python the minor version matters: from 3.12, ``sum`` adds floats with compensation.
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
    """A digest of the modules of the package, which distinguishes commits of the same version."""
    folder = Path(__file__).parents[1]  # the package
    digest = hashlib.sha256()
    # Name and size before the bytes, so that bytes cannot move from one file to the next unnoticed.
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def config_properties(config: Config) -> RunProperties:
    """The options of a training run: values, and the identities of files."""
    return option_properties(*(config.concern(concern) for concern in concern_types()))


def option_properties(*concerns: object) -> RunProperties:
    """Name -> value of each option in some dataclasses of options."""
    properties: dict[str, str] = {}
    for values in concerns:
        properties.update(_properties_of(concern_specs("", type(values)), values))
    return properties


def _properties_of(specs: Iterable[OptionSpec], values: object) -> Iterable[tuple[str, str]]:
    for spec in specs:
        value, kind = getattr(values, spec.name), spec.declaration.refers_to
        # Output folders and caches: they do not affect results, and each host may have its own.
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
    """Weights and data sets of a blend; invalid text is compared verbatim and reported later by its parser."""
    try:
        blend = parse_blend(flag, text)
    except UsageError:
        return text
    has_weights = len(blend) > 1
    return ", ".join((f"{weight:g} x " if has_weights else "") + dataset_identity(prefix) for weight, prefix in blend)


def dataset_identity(prefix: str) -> str:
    """Sizes and digests of ``PREFIX.bin`` and ``PREFIX.idx``, and a digest of the sidecar.

    Large files are only sampled. The sidecar has digests of every byte, computed when the data set was written.
    """
    stem = prefix_of(prefix)
    text = ", ".join(f".{name} {identity_of(Path(f'{stem}.{name}'))}" for name in ("bin", "idx"))
    try:
        sidecar = read_sidecar(stem)
    except DocumentError:
        return f"{text}, invalid sidecar"  # reported when the data set is opened
    if sidecar is None:
        return text
    digests = [sidecar["bin"]["pieces"], sidecar["idx"], sidecar["recipe"]["sha256"]]
    text = text.replace(_SAMPLED, "digest")  # those of the sidecar cover every byte
    return f"{text}, sidecar {hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12]}"


def identity_of(path: Path) -> str:
    """Size and digest of a file, or of the file names and sizes of a folder; ``missing`` if the path does not exist.

    Of a file above 64 MiB, 256 evenly spaced blocks are read, so that the start does not depend on the size of the
    data. The text mentions it.
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
