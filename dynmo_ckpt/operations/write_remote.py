"""Writes a planned checkpoint to an object store: see :mod:`dynmo_ckpt.io.uploads` for the order of the steps.

::

    check_output           OUT exists? would it overlap IN?                   nothing is written
    new_remote_directory   the mark; afterwards it is removed, or the staged objects replace those of OUT
        stream             tensors, in parallel by file; each object is read back
        small files        those by which programs find a model, last
        finish             the manifest, with the checksums of what was sent
        findings           the index that a reader sees, all bytes around tensors
        compare_logits     of IN and of the objects that were sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.console import progress
from ..io.remote import HUB, WINDOW_BYTES, RemotePath
from ..io.uploads import COPIES_PER_PART, check_output, is_marker, new_remote_directory, part_bytes
from ..tensors.copy_plan import ExportPlan, Writable
from ..tensors.stream import stream
from .logits import compare_logits
from .overwrite import replaced_check
from .verify import MANIFEST, header_findings, refuse_findings, small_findings, written_findings

if TYPE_CHECKING:
    from .write import WriteSettings

# The clients of object stores, as measured with s3fs.
CLIENT_MEMORY_BYTES = 70_000_000


def stream_memory_bytes(source: Path, target: Path, files: Sequence[Writable]) -> tuple[int, int]:
    """Memory that object stores need beyond that of a local copy.

    Args:
        source: the input.
        target: the output.
        files: the files of the output.

    Returns:
        Bytes of the process, and bytes of each thread.
    """
    remote = [isinstance(path, RemotePath) for path in (source, target)]
    # A window, and its copy while it arrives; the parts of the largest file.
    reading = 2 * WINDOW_BYTES if remote[0] else 0
    # The hub takes files of the disk, which its client sends in small blocks.
    in_parts = isinstance(target, RemotePath) and target.scheme != HUB
    sending = COPIES_PER_PART * part_bytes(max((file.num_bytes for file in files), default=0)) if in_parts else 0
    return CLIENT_MEMORY_BYTES if any(remote) else 0, reading + sending


def write_remote(
    source: Path, target: RemotePath, plan: ExportPlan, small: Mapping[str, bytes], settings: WriteSettings
) -> Mapping[str, Any] | None:
    """Write a planned checkpoint under an address.

    Args:
        source: the input.
        target: the new directory.
        plan: what to write.
        small: files without tensors, by path; ``conversion.json`` is one of them.
        settings: how to write.

    Returns:
        The comparison of logits; None where there was none.

    Raises:
        UsageError: ``target`` exists or overlaps the input.
        UnsupportedError: the logits of input and output differ.
        CorruptError: the bytes of the input do not have their recorded checksums, or it was replaced meanwhile.
        StorageError: the store cannot be reached or denies access, or what was written read back differently.
    """
    inputs = (source, *settings.inputs)
    check_output(target, inputs, check=replaced_check(inputs) if settings.overwrite else None)
    with new_remote_directory(target) as directory:
        total = sum(file.num_bytes for file in plan.files)
        with progress("send", total / 1e6, "MB") as tick:
            written = stream(directory, plan.files, jobs=settings.jobs, tick=tick, verify=settings.verify)
        for name in sorted(small, key=lambda name: (is_marker(name), name)):
            directory.write(name, small[name])
        # The manifest comes last: it has the checksums of all other files.
        final = {} if plan.finish is None else plan.finish(written, small)
        for name, payload in final.items():
            directory.write(name, payload)
        directory.refresh()
        # Within the block: any error here removes what was written.
        if settings.verify:
            sent = directory.target
            refuse_findings(chain(written_findings(sent, plan.files, written), small_findings(sent, small)))
            if MANIFEST in final:
                refuse_findings(header_findings(sent))
        return compare_logits(settings.logits, directory.target)
