"""Progress of runs, read from their manifests and markers without changing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..formats.workfiles import MANIFEST, TASK
from .registry import find_step
from .task import marker_path
from .task_manifest import load_manifest


def status_of(folder: Path) -> list[dict[str, Any]]:
    """The state of a run, or of all runs in a folder in the order of their start.

    Raises:
        UsageError: the folder has no runs.
    """
    if (folder / "manifest.json").exists():
        return [_one(folder)]
    works = [path.parent for path in folder.glob("*.work/manifest.json")]
    if not works:
        raise UsageError(
            f"{folder}: no run of dynmo-prep found; name a work folder (OUTPUT.work), or a folder with work folders"
        )
    return [_one(work) for work in sorted(works, key=lambda work: (work / "manifest.json").stat().st_mtime_ns)]


def _one(work: Path) -> dict[str, Any]:
    manifest, document = load_manifest(work), MANIFEST.read(work / "manifest.json")
    phases = find_step(document["step"]).phases_of()(manifest)
    documents = rejected = 0
    states = []
    for phase in phases:
        # Existence is enough here. Only a run that resumes compares digests and sizes of outputs.
        markers = [path for index in range(phase.tasks) if (path := marker_path(work, phase.name, index)).exists()]
        states.append({"name": phase.name, "tasks": phase.tasks, "done": len(markers)})
        for path in markers:
            counts = TASK.read(path)["tally"]
            documents += counts["documents_in"]
            rejected += sum(counts["rejected"].values())
    return {
        "step": document["step"],
        "output": document["output"],
        "work": str(work),
        "complete": (work / "summary.json").exists(),
        "phases": states,
        "documents_in": documents,
        "rejected": rejected,
        "input_bytes": manifest.input_bytes,
    }
