"""Builds the manifest of a checkpoint from the reports of all ranks. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._common.document import (
    envelope,
    is_count,
)
from ..._common.errors import UsageError
from .document import FORMAT, VERSION


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """Metadata of the run in the manifest; each field is the manifest's field of the same name.

    ``source`` is None where the manifest has none; ``extra`` has free fields, whose names start with ``x_``.
    """

    run_id: str
    step: int
    consumed_train_samples: int
    model: Mapping[str, Any]
    topology: Mapping[str, Any]
    dynamic: Mapping[str, Any]
    ties: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    data: Mapping[str, Any] | None
    rng: Mapping[str, Any]
    source: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def whole_index(shape: Sequence[int]) -> list[list[int]]:
    """Return the index of a shard that is a complete tensor of ``shape``."""
    return [[0, size] for size in shape]


def tensor_entries(reports: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the ``tensors`` of a manifest from the ranks' reports.

    Args:
        reports: One sequence per rank; each element has ``name``, ``dtype`` (``F32``, ...), ``shape`` (of the global
            tensor), ``role``, ``file``, ``key``, ``index`` (the part in this shard) and ``crc32``. Of several replicas
            one rank reports.

    Raises:
        UsageError: Two ranks report the same part, or parts of a tensor disagree.
    """
    entries: dict[str, dict[str, Any]] = {}
    for report in (element for rank in reports for element in rank):
        shape, index = list(report["shape"]), [list(span) for span in report["index"]]
        fresh = {"dtype": report["dtype"], "shape": shape, "role": report["role"], "split_dim": None, "shards": []}
        entry = entries.setdefault(report["name"], fresh)
        for fact in ("dtype", "shape", "role"):
            if entry[fact] != fresh[fact]:
                raise UsageError(f"{report['name']}: one rank reports the {fact} {entry[fact]}, another {fresh[fact]}")
        if any(shard["index"] == index for shard in entry["shards"]):
            raise UsageError(f"{report['name']}: the part {index} is reported twice; one replica must write it")
        shard = {"file": report["file"], "key": report["key"], "index": index, "crc32": report["crc32"]}
        entry["shards"].append(shard)
    for name, entry in entries.items():
        # Sorted below, so that the reader can concatenate the shards as they are listed.
        entry["split_dim"] = _split_dim(name, entry)
        entry["shards"].sort(key=lambda shard: shard["index"])
    return dict(sorted(entries.items(), key=lambda item: _natural(item[0])))


def _split_dim(name: str, entry: Mapping[str, Any]) -> int | None:
    whole = whole_index(entry["shape"])
    cut = {dim for s in entry["shards"] for dim, span in enumerate(s["index"]) if span != whole[dim]}
    if len(cut) > 1:
        raise UsageError(f"{name}: its shards are cut along the dimensions {sorted(cut)}; at most one is allowed")
    return cut.pop() if cut else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``layers.10`` after ``layers.9``."""
    return [(int(part), "") if is_count(part) else (-1, part) for part in name.split(".")]


def build_manifest(
    metadata: RunMetadata,
    reports: Iterable[Sequence[Mapping[str, Any]]],
    *,
    written_by: str,
    expected: Collection[str] = (),
) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without ``files`` and the seal, which :func:`writer.commit` adds.

    Args:
        metadata: Metadata of the run.
        reports: Reports of the ranks, see :func:`tensor_entries`.
        written_by: Program and version, such as ``dynmo-train 0.1.0``.
        expected: Names of tensors that a rank must report, unless they are tied.

    Raises:
        UsageError: Reports repeat or lack a tensor, or disagree.
    """
    tensors = tensor_entries(reports)
    missing = sorted(set(expected) - set(tensors) - set(metadata.ties))
    if missing:
        raise UsageError(
            f"{len(missing)} tensors of the model are missing in the reports of all ranks: {', '.join(missing[:5])}"
        )
    return {
        **envelope(FORMAT, VERSION, written_by),
        "manifest_crc32": "0" * 8,
        "run_id": metadata.run_id,
        "step": metadata.step,
        "consumed_train_samples": metadata.consumed_train_samples,
        "model": dict(metadata.model),
        "topology": dict(metadata.topology),
        "dynamic": dict(metadata.dynamic),
        "tensors": tensors,
        "ties": dict(metadata.ties),
        "optimizer": None if metadata.optimizer is None else dict(metadata.optimizer),
        "data": None if metadata.data is None else dict(metadata.data),
        "rng": dict(metadata.rng),
        **({} if metadata.source is None else {"source": dict(metadata.source)}),
        **metadata.extra,
    }
