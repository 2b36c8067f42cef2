"""Plans the files of ``torch.distributed.checkpoint``, without torch: one data file, and ``.metadata``. Pure.

``__0_0.distcp`` has tensors and objects, each as ``torch.save`` writes it; ``.metadata`` has their shapes and places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..tensors.copy_plan import OutputTensor
from .pickles import GlobalName
from .writer import ConcatenatedTorchFiles, NewCall, NewDict, NewObject, NewTensor, TorchSaveFile, dump_pickle

DATA_FILE = "__0_0.distcp"
PACKAGE = "torch.distributed.checkpoint.metadata"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_CHUNK_BYTES = 2**31
"""Larger tensors are written in parts along their first dimension: a storage of the zip format has at most 4 GiB."""
Chunks = list[tuple[tuple[int, ...], OutputTensor]]
Entries = dict[str, Chunks]


def chunks_of(tensor: OutputTensor) -> Chunks:
    """The chunks of a tensor in a distributed checkpoint, each with its begin; one, where the tensor is small enough.

    Args:
        tensor: of any shape; the first dimension of its content is that of its shape, or a part of it.
    """
    begin = tuple(0 for _ in tensor.shape)
    if tensor.num_bytes <= MAX_CHUNK_BYTES or not tensor.shape or len(tensor.content.shape) < len(tensor.shape):
        return [(begin, tensor)]
    size = tensor.content.shape[0]
    rows = tensor.shape[0] // size
    step = max(1, size * MAX_CHUNK_BYTES // tensor.num_bytes)
    chunks = []
    for at in range(0, size, step):
        end = min(size, at + step)
        part = replace(
            tensor,
            # Checksums are by key.
            key=f"{tensor.key}[{at * rows}]",
            shape=((end - at) * rows, *tensor.shape[1:]),
            content=tensor.content.narrow(0, at, end),
            mask=None if tensor.mask is None else tensor.mask.narrow(0, at, end),
        )
        chunks.append(((at * rows, *begin[1:]), part))
    return chunks


def distributed_files(
    prefix: str,
    entries: Entries,
    objects: Mapping[str, Any] | None = None,
    second: Mapping[str, str] | None = None,
) -> tuple[ConcatenatedTorchFiles, bytes]:
    """The data file of a distributed checkpoint, and the contents of its ``.metadata``.

    Args:
        prefix: of the path of the data file, empty or ending with a slash.
        entries: for each name its chunks: begin in the whole tensor, and the tensor to write, of any shape.
        objects: plain data by name; equal ones share a part of the file.
        second: for the name of a tensor another one of the same bytes.
    """
    parts = [_part(tensor) for chunks in entries.values() for _, tensor in chunks]
    # By its text, because True equals 1, and a list has no hash.
    names: dict[str, list[str]] = {}
    for name, value in (objects or {}).items():
        names.setdefault(repr(value), []).append(name)
    parts += [TorchSaveFile(name="", tensors=(), tree=(objects or {})[group[0]]) for group in names.values()]
    data = ConcatenatedTorchFiles(name=f"{prefix}{DATA_FILE}", parts=tuple(parts))
    return data, dump_pickle(_metadata(entries, data, list(names.values()), second or {}))


def _part(tensor: OutputTensor) -> TorchSaveFile:
    """A chunk as ``torch.save`` writes it."""
    return TorchSaveFile(name="", tensors=(tensor,), tree=NewTensor(0, tensor.dtype, tensor.shape))


def _metadata(
    entries: Entries, data: ConcatenatedTorchFiles, objects: Sequence[Sequence[str]], second: Mapping[str, str]
) -> NewObject:
    """The object that torch pickles as ``.metadata``; ``objects`` are the names of each part after the tensors."""
    described: dict[str, NewObject] = {name: _object("BytesStorageMetadata") for group in objects for name in group}
    places: list[tuple[NewObject, NewObject]] = []
    # The chunks are concatenated in the order of the entries, so both are walked in step.
    at = iter(zip(data.begins, data.parts, strict=True))
    for name, chunks in entries.items():
        names = [name, *([second[name]] if name in second else [])]
        stored = []
        for begin, tensor in chunks:
            place = _place(*next(at))
            stored.append(_object("ChunkStorageMetadata", offsets=_size(begin), sizes=_size(tensor.shape)))
            places += [(_object("MetadataIndex", fqn=each, offset=_size(begin), index=None), place) for each in names]
        ends = [tuple(b + n for b, n in zip(begin, tensor.shape, strict=True)) for begin, tensor in chunks]
        size = tuple(max(along) for along in zip(*ends, strict=True))
        properties = _properties(chunks[0][1].dtype)
        described |= {
            each: _object("TensorStorageMetadata", properties=properties, size=_size(size), chunks=stored)
            for each in names
        }
    for group, (offset, part) in zip(objects, at, strict=True):
        place = _place(offset, part)
        places += [(_object("MetadataIndex", fqn=name, offset=None, index=None), place) for name in group]
    return _object(
        "Metadata",
        state_dict_metadata=described,
        planner_data=None,
        storage_data=NewDict(tuple(places)),
        storage_meta=None,
        version="1.0.0",
    )


def _place(offset: int, part: TorchSaveFile) -> NewObject:
    fields = {"relative_path": DATA_FILE, "offset": offset, "length": part.num_bytes}
    return NewObject(GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo"), fields)


def _object(kind: str, **fields: Any) -> NewObject:
    return NewObject(GlobalName(PACKAGE, kind), fields)


def _size(shape: tuple[int, ...]) -> NewCall:
    return NewCall(GlobalName("torch", "Size"), (shape,))


def _properties(dtype: str) -> NewObject:
    """``TensorProperties`` of a dense contiguous tensor without gradient."""
    layout = NewCall(GlobalName("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = NewCall(GlobalName(PACKAGE, "_MEM_FORMAT_ENCODING"), (0,))
    return NewObject(
        GlobalName(PACKAGE, "TensorProperties"), (GlobalName("torch", DTYPES[dtype]), layout, False, contiguous, False)
    )
