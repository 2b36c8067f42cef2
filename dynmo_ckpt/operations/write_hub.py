"""Writes a planned checkpoint to a repository of the Hugging Face Hub: see :mod:`dynmo_ckpt.io.hub`.

::

    open_commit       OUT has files? would it overlap IN? may the token write?    nothing is written
    scratch directory
        execute       one file: copy, checksum, read back                         tensors
        add           the client hashes and uploads it; its local copy is removed
        small files, manifest
        LogitsCheck   of IN and of the local copies, which stay for it
    send              the commit, the only step that a reader can observe
    findings          the hashes that the hub has of all files

The client reads a file twice, for its hash and its contents, and again where a request fails: so each file goes over
the disk. Its space is that of the largest file, or of all where logits are compared. Memory does not depend on sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from .._common.console import print_message, progress
from ..io.directory import write_synced
from ..io.errors import StorageError
from ..io.hub import open_commit
from ..io.remote import RemotePath
from ..io.uploads import is_marker
from ..tensors.copy_plan import ExportPlan, WrittenFile
from ..tensors.execute import execute
from .local_copy import scratch_directory
from .logits import compare_logits
from .overwrite import refuse_other_files
from .verify import MANIFEST, header_findings, refuse_findings, small_findings, written_findings

if TYPE_CHECKING:
    from .write import WriteSettings


def write_hub(
    source: Path, target: RemotePath, plan: ExportPlan, small: Mapping[str, bytes], settings: WriteSettings
) -> Mapping[str, Any] | None:
    """Write a planned checkpoint to a repository, in one commit.

    Args:
        source: the input.
        target: the folder of a repository.
        plan: what to write.
        small: files without tensors, by path; ``conversion.json`` is one of them.
        settings: how to write.

    Returns:
        The comparison of logits; None where there was none.

    Raises:
        UsageError: ``target`` has files, overlaps the input, or cannot be written.
        CorruptError: the bytes of the input do not have their recorded checksums, or it was replaced meanwhile.
        StorageError: no space on the disk, or the hub denies access, cannot be reached or has other contents.
        UnsupportedError: the logits of input and output differ.
    """
    commit = open_commit(target, (source, *settings.inputs), overwrite=settings.overwrite)
    refuse_other_files(target, commit.present)
    sizes = [file.num_bytes for file in plan.files]
    # Logits are those of the local files, for the commit must not be made before they are known.
    is_local = settings.logits is not None and not settings.logits.skip_reason()
    written: dict[str, WrittenFile] = {}
    with scratch_directory(sum(sizes) if is_local else max(sizes, default=0)) as scratch:
        with progress("send", sum(sizes) / 1e6, "MB") as tick:
            for file in plan.files:
                written |= execute(scratch, [file], jobs=settings.jobs, tick=tick, verify=settings.verify)
                if settings.verify:
                    refuse_findings(written_findings(scratch, [file], written))
                if commit.add(file.name, scratch / file.name) and not is_local:
                    (scratch / file.name).unlink()
        final = {} if plan.finish is None else plan.finish(written, small)
        for name, payload in sorted({**small, **final}.items(), key=lambda each: (is_marker(each[0]), each[0])):
            write_synced(scratch / name, payload)
            commit.add(name, payload)
        if settings.verify and is_local:
            refuse_findings(small_findings(scratch, small))
            if MANIFEST in final:
                refuse_findings(header_findings(scratch))
        logits = compare_logits(settings.logits, scratch)
        made = commit.send(f"Upload with dynmo-ckpt {__version__}")
    print_message(f"{target}: commit {made}")
    if settings.verify and (unlike := commit.findings(made)):
        raise StorageError(
            "\n  ".join([f"{target}: commit {made} has other contents than were sent; revert it", *unlike])
        )
    return logits
