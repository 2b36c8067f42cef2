"""The contents of sidecars of new datasets: inputs, tokenizer and settings of all steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.document import envelope
from .._common.errors import UsageError
from ..config.options import files_of, jsonable
from ..formats.dataset import FORMAT, VERSION, Piece, digest_file, digest_settings, sidecar_path
from ..formats.indexed import bin_path
from ..formats.workfiles import MANIFEST, SUMMARY, TASK
from ..runner.registry import default_work
from ..runner.task_manifest import Job, load_manifest

# Bounds the walk: work folders of files that were moved may refer to one another in a circle.
MAX_EARLIER_STEPS = 64


def new_sidecar(
    *,
    tokenizer: Mapping[str, Any] | None,
    eod_id: int | None,
    inputs: Sequence[Mapping[str, Any]],
    steps: list[dict[str, Any]],
    bin_pieces: Sequence[Piece],
    idx: Piece,
) -> dict[str, Any]:
    """The document of a sidecar, dated now; ``formats/dataset.md`` describes the fields.

    Args:
        tokenizer: type, vocabulary size and digest, and files; None if the tokenizer is unknown.
        eod_id: id at the end of each document; None if documents are not terminated, or it is unknown.
        inputs: path and pieces (bytes, SHA-256) of each input, in order.
        steps: names and settings of all steps that made the dataset, in order.
        bin_pieces: bytes and SHA-256 of consecutive parts of ``.bin``.
        idx: bytes and SHA-256 of ``.idx``.
    """
    return {
        **envelope(FORMAT, VERSION, f"dynmo-prep {__version__}"),
        "tokenizer": tokenizer,
        "eod_id": eod_id,
        "inputs": list(inputs),
        "recipe": {"sha256": digest_settings(steps), "steps": steps},
        "bin": {"pieces": [piece for piece in bin_pieces if piece["bytes"]]},
        "idx": idx,
    }


def steps_of(job: Job) -> list[dict[str, Any]]:
    """The steps that made a job's output: those of its only input, as far as known, and its own."""
    settings = jsonable(job.settings, data_only=True)
    for field in dataclasses.fields(job.settings):
        if field.metadata["file"]:
            settings.pop(field.name, None)  # the path of a file does not affect the data; its contents have a digest
    own = {"step": job.step, "settings": {**settings, "repair_utf8": job.limits.repair_utf8}}
    return [*(_steps_before(job.inputs[0]) if len(job.inputs) == 1 else []), own]


def _steps_before(path: Path) -> list[dict[str, Any]]:
    """The steps of runs whose work folders are next to their outputs, from ``path`` backwards."""
    steps: list[dict[str, Any]] = []
    for _ in range(MAX_EARLIER_STEPS):
        work = default_work(path)
        try:
            summary = SUMMARY.read(work / "summary.json")
            marker = TASK.read(work / "done" / "join-00000.json")
            stored = MANIFEST.read(work / "manifest.json")
            manifest = load_manifest(work)
            if marker["outputs"].get(str(path)) != path.stat().st_size:
                break  # the file was replaced later
        # The origin is a note: a removed or foreign work folder must not stop a new dataset.
        except (OSError, KeyError, TypeError, AttributeError, UsageError):
            break
        steps.insert(0, {"step": str(summary["step"]), "settings": dict(stored["settings"])})
        if len(manifest.sources) != 1:
            break
        path = manifest.sources[0].path
    return steps


def tokenizer_files(settings: Any) -> list[dict[str, Any]]:
    """Name, bytes and SHA-256 of each file of the settings."""
    return [{"name": path.name, **digest_file(path)} for path in files_of(settings)]


def common_tokenizer(
    prefixes: Sequence[Path], sidecars: Sequence[Mapping[str, Any] | None]
) -> tuple[dict[str, Any] | None, int | None]:
    """The common tokenizer and end-of-document id of merged datasets; None if unknown or different.

    Raises:
        UsageError: two of them have different vocabularies.
    """
    known = [
        (prefix, sidecar)
        for prefix, sidecar in zip(prefixes, sidecars, strict=True)
        if sidecar is not None and sidecar["tokenizer"] is not None
    ]
    for prefix, sidecar in known[1:]:
        first, mine = known[0][1]["tokenizer"], sidecar["tokenizer"]
        if mine["vocab_sha256"] != first["vocab_sha256"]:
            raise UsageError(
                f"{prefix} has the vocabulary of {describe_tokenizer(mine)}, {known[0][0]} that of "
                f"{describe_tokenizer(first)}; both must have the same: binarize them with one tokenizer"
            )
    # One dataset without a sidecar may have any tokenizer, so nothing is stated about the result.
    if len(known) < len(prefixes):
        return None, None
    ends = {sidecar["eod_id"] for _, sidecar in known}
    return dict(known[0][1]["tokenizer"]), ends.pop() if len(ends) == 1 else None


def describe_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    """A tokenizer in a message: type, files, size and the first digits of its vocabulary digest."""
    files = ", ".join(file["name"] for file in tokenizer["files"]) or "no file"
    return (
        f"a {tokenizer['type']} ({files}; {tokenizer['vocab_size']:,} ids; vocabulary {tokenizer['vocab_sha256'][:8]})"
    )


def pieces_of(prefix: Path, sidecar: Mapping[str, Any] | None) -> list[Piece]:
    """The pieces of ``PREFIX.bin``: those of its sidecar, else one that is computed now.

    Raises:
        UsageError: the sidecar belongs to another file.
    """
    if sidecar is not None:
        stated, size = sum(piece["bytes"] for piece in sidecar["bin"]["pieces"]), bin_path(prefix).stat().st_size
        if stated != size:
            raise UsageError(
                f"{sidecar_path(prefix)}: describes a .bin of {stated} bytes, but {bin_path(prefix)} has {size}; "
                "remove the sidecar if it is outdated"
            )
        return list(sidecar["bin"]["pieces"])
    return [piece for piece in [digest_file(bin_path(prefix))] if piece["bytes"]]


def earlier_steps(sidecar: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The steps that made a dataset, from its sidecar."""
    return [] if sidecar is None else list(sidecar["recipe"]["steps"])
