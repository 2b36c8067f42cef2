"""Builds the manifest of a checkpoint from what each rank reports. Values in, value out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._common.document import envelope
from ..._common.errors import UsageError
from .document import FORMAT, VERSION


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """What the manifest says about the run; each field is the manifest's field of the same name.

    ``source`` is None where the manifest has none; ``extra`` are free fields, whose names start with ``x_``.
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
    """The index of a shard that holds a whole tensor of ``shape``."""
    return [[0, size] for size in shape]


def tensor_entries(reports: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The ``tensors`` of a manifest from the ranks' reports.

    Args:
        reports: one sequence a rank; each element has ``name``, ``dtype`` (``F32``, ...), ``shape`` (of the whole
            tensor), ``role``, ``file``, ``key``, ``index`` (the part that this shard holds) and ``crc32``. A replica is
            reported by one rank only.

    Raises:
        UsageError: two reports of one part, or parts of one tensor that do not fit together.
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
            raise UsageError(f"{report['name']}: the part {index} is reported twice; a replica is written once")
        shard = {"file": report["file"], "key": report["key"], "index": index, "crc32": report["crc32"]}
        entry["shards"].append(shard)
    for name, entry in entries.items():
        entry["split_dim"] = _split_dim(name, entry)
        entry["shards"].sort(key=lambda shard: shard["index"])
    return dict(sorted(entries.items(), key=lambda item: _natural(item[0])))


def _split_dim(name: str, entry: Mapping[str, Any]) -> int | None:
    whole = whole_index(entry["shape"])
    cut = {dim for s in entry["shards"] for dim, span in enumerate(s["index"]) if span != whole[dim]}
    if len(cut) > 1:
        raise UsageError(f"{name}: its shards are cut along the dimensions {sorted(cut)}; one at most is allowed")
    return cut.pop() if cut else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``layers.10`` behind ``layers.9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def build_manifest(
    facts: RunMetadata,
    reports: Iterable[Sequence[Mapping[str, Any]]],
    *,
    written_by: str,
    expected: Collection[str] = (),
) -> dict[str, Any]:
    """The manifest of a checkpoint, without ``files`` and the seal, which :func:`writer.commit` adds.

    Args:
        facts: what it says about the run.
        reports: what each rank wrote, see :func:`tensor_entries`.
        written_by: program and version, such as ``dynmo-train 0.1.0``.
        expected: names that must be there; one that no rank reports, and that is not tied, is an error.

    Raises:
        UsageError: reports that repeat or miss a tensor or do not fit together.
    """
    tensors = tensor_entries(reports)
    missing = sorted(set(expected) - set(tensors) - set(facts.ties))
    if missing:
        raise UsageError(f"no rank has written {len(missing)} tensors of the model: {', '.join(missing[:5])}")
    return {
        **envelope(FORMAT, VERSION, written_by),
        "manifest_crc32": "0" * 8,
        "run_id": facts.run_id,
        "step": facts.step,
        "consumed_train_samples": facts.consumed_train_samples,
        "model": dict(facts.model),
        "topology": dict(facts.topology),
        "dynamic": dict(facts.dynamic),
        "tensors": tensors,
        "ties": dict(facts.ties),
        "optimizer": None if facts.optimizer is None else dict(facts.optimizer),
        "data": None if facts.data is None else dict(facts.data),
        "rng": dict(facts.rng),
        **({} if facts.source is None else {"source": dict(facts.source)}),
        **facts.extra,
    }
