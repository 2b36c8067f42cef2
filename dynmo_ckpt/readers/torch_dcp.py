"""Reads torch's distributed checkpoints (``.metadata`` and ``*.distcp``), as data: nothing of the pickle is executed.

Three kinds of names are known: Megatron-core's (with its ``common.pt``), those of transformers, and those of Meta's
Llama (torchtitan). What a state dictionary does not tell of the model, a ``config.json`` says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import read_word, short_repr
from .._common.errors import UsageError
from ..errors import CorruptError, UnsupportedError
from ..io.files import read_file
from ..io.safetensors import DTYPE_BYTES
from ..megatron.core_names import EXTRA_STATE
from ..tensors.views import Piece, Tensor
from ..torch_save.pickles import LIMIT_BYTES, Inert, Name, load_pickle
from ..torch_save.reader import TorchFile, open_torch

METADATA, COMMON = ".metadata", "common.pt"
TRACKER = "latest_checkpointed_iteration.txt"
PACKAGE = "torch.distributed.checkpoint"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "bool": "BOOL",
    "uint8": "U8",
}


@dataclass(frozen=True, kw_only=True)
class DistributedCheckpoint:
    """What a directory holds: tensors by full name, what else Megatron-core keeps beside, and what was left unread."""

    directory: Path
    tensors: Mapping[str, Tensor]
    common: Mapping[str, Any]
    other: tuple[str, ...]
    common_file: TorchFile | None = None

    def number(self, value: Any) -> int | float | None:
        """A number in ``common``, be it one or a tensor with one element; None for everything else."""
        if self.common_file is not None:
            return self.common_file.number(value)
        return value if isinstance(value, int | float) else None


def is_dcp(path: Path) -> bool:
    """Whether ``path`` is a distributed checkpoint, or a run of Megatron-core whose latest iteration is one."""
    return (path / METADATA).is_file() or any((path / name / METADATA).is_file() for name in _iterations(path))


def _iterations(path: Path) -> list[str]:
    tracker = path / TRACKER
    if not tracker.is_file():
        return []
    text = read_word(tracker)
    return ["release"] if text == "release" else [f"iter_{int(text):07d}"] if text.isdecimal() else []


def open_dcp(path: Path, step: int | None) -> DistributedCheckpoint:
    """Index a distributed checkpoint; no tensor's bytes are read.

    Raises:
        UnsafePickleError: the metadata asks for more than plain data.
        CorruptError: files are missing or contradict the metadata.
        UnsupportedError: bytes that were compressed or otherwise changed on their way, or no dense tensors.
        UsageError: the step is not there.
    """
    directory = _directory(path, step)
    source = str(directory / METADATA)
    try:
        tree = load_pickle(read_file(directory / METADATA, LIMIT_BYTES), source)
    except OSError as error:
        raise CorruptError(f"{source}: cannot be read: {error.strerror}") from error
    entries, places = _fields(tree, source)
    where = {(index.get("fqn"), _offset(index)): info for index, info in places}
    tensors, other = {}, []
    for name, entry in entries.items():
        kind = entry.type.name if isinstance(entry, Inert) else ""
        if kind != "TensorStorageMetadata":
            other.append(name)
        elif EXTRA_STATE not in name:
            tensors[name] = _tensor(directory, name, entry.attributes, where)
    file = open_torch(directory / COMMON) if (directory / COMMON).is_file() else None
    common = file.tree if file is not None and isinstance(file.tree, dict) else {}
    return DistributedCheckpoint(
        directory=directory, tensors=tensors, common=common, other=tuple(other), common_file=file
    )


def _directory(path: Path, step: int | None) -> Path:
    if (path / METADATA).is_file():
        if step is not None:
            raise UsageError(f"{path}: is one checkpoint; --step chooses among the iterations of a run")
        return path
    name = _iterations(path)[0] if step is None else f"iter_{step:07d}"
    if not (path / name / METADATA).is_file():
        raise UsageError(f"{path / name}: is not there, or has no {METADATA}")
    return path / name


def _fields(tree: Any, source: str) -> tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The entries by name, and pairs of an index and where its bytes are."""
    held = tree.attributes if isinstance(tree, Inert) else {}
    entries, places = held.get("state_dict_metadata"), held.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise CorruptError(f"{source}: is no metadata of a distributed checkpoint")
    pairs = [(k.attributes, v.attributes) for k, v in places.items() if isinstance(k, Inert) and isinstance(v, Inert)]
    if len(pairs) != len(places) or not all(isinstance(name, str) for name in entries):
        raise CorruptError(f"{source}: its table of places holds something else")
    return entries, pairs


def _offset(index: Mapping[str, Any]) -> tuple[int, ...] | None:
    offset = index.get("offset")
    return tuple(offset) if isinstance(offset, tuple | list) else None


def _tensor(
    directory: Path, name: str, entry: Mapping[str, Any], where: Mapping[tuple[Any, Any], Mapping[str, Any]]
) -> Tensor:
    """One tensor, its chunks put in place."""
    shape, chunks = _sizes(entry.get("size")), entry.get("chunks")
    dtype = _dtype(entry.get("properties"))
    if shape is None or not isinstance(chunks, list) or dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"{directory / METADATA}: {name}: no dense tensor of a known type")
    pieces: list[Piece] = []
    for chunk in chunks:
        held = chunk.attributes if isinstance(chunk, Inert) else {}
        begin, extents = _sizes(held.get("offsets")), _sizes(held.get("sizes"))
        if begin is None or extents is None or not len(begin) == len(extents) == len(shape):
            raise CorruptError(f"{directory / METADATA}: {name}: a chunk without offsets and sizes")
        if any(b + n > size for b, n, size in zip(begin, extents, shape, strict=True)):
            raise CorruptError(f"{directory / METADATA}: {name}: a chunk reaches beyond {list(shape)}")
        info = where.get((name, begin), where.get((name, None)))
        if info is None:
            raise CorruptError(f"{directory / METADATA}: {name}: no file is told for the chunk at {list(begin)}")
        part = _stored(directory, name, info)
        if part.shape != extents or part.dtype != dtype:
            raise CorruptError(
                f"{directory}: {name}: holds {part.dtype} {list(part.shape)}, the metadata says {dtype} {list(extents)}"
            )
        pieces += [Piece(begin, piece.view) for piece in part.pieces]
    tensor = Tensor(dtype, shape, tuple(pieces))
    if not tensor.is_covered or _overlap(pieces):
        raise CorruptError(f"{directory / METADATA}: {name}: its chunks do not cover it once")
    return tensor


def _overlap(pieces: list[Piece]) -> bool:
    """Whether two boxes share an element; chunks are few, so that every pair is looked at."""
    spans = [
        [(b, b + n) for b, n in zip(piece.begin, piece.view.shape, strict=True)] for piece in pieces if piece.view.shape
    ]
    ordered = sorted(spans)
    for at, one in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if other[0][0] >= one[0][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True)):
                return True
    return False


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, tuple | list) and all(isinstance(n, int) and n >= 0 for n in value):
        return tuple(value)
    return None


def _dtype(properties: Any) -> str:
    """The type, which is the first of the state of torch's TensorProperties."""
    held = properties.attributes if isinstance(properties, Inert) else {}
    state = held.get("state", (held.get("dtype"),))
    name = state[0] if isinstance(state, tuple) and state else None
    return DTYPES.get(name.name, "") if isinstance(name, Name) and name.module == "torch" else ""


def _stored(directory: Path, name: str, info: Mapping[str, Any]) -> Tensor:
    """The tensor that ``torch.save`` wrote into a part of a file."""
    path, begin, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(path, str) or "/" in path or path in ("", ".", "..") or path.startswith("."):
        raise CorruptError(
            f"{directory / METADATA}: {name}: lies in {short_repr(path)}, which is no file of the directory"
        )
    if info.get("transform_descriptors"):
        raise UnsupportedError(
            f"{directory / path}: {name}: was changed by {short_repr(info['transform_descriptors'])} on its way"
        )
    if not isinstance(begin, int) or not isinstance(length, int):
        raise CorruptError(
            f"{directory / METADATA}: {name}: lies at {short_repr(begin)}, {short_repr(length)} bytes long"
        )
    file = open_torch(directory / path, begin, length)
    return file.tensor(file.tree, name) if not isinstance(file.tree, dict) else _refuse(file.path, name)


def _refuse(path: Path, name: str) -> Tensor:
    raise CorruptError(f"{path}: {name}: a tensor was expected")


TITAN = (
    (re.compile(r"tok_embeddings\.weight"), "tok_embeddings"),
    (re.compile(r"layers\.(\d+)\.attention\.(w[qkvo])\.weight"), r"\2.\1"),
    (re.compile(r"layers\.(\d+)\.feed_forward\.(w[123])\.weight"), r"\2.\1"),
    (re.compile(r"layers\.(\d+)\.(attention_norm|ffn_norm)\.weight"), r"\2.\1"),
    (re.compile(r"norm\.weight"), "norm"),
    (re.compile(r"output\.weight"), "output"),
    (re.compile(r"freqs_cis|freq_cis|rope\.cache"), "freq_cis"),
)


ANCHORS = {
    "embedding.word_embeddings.weight": "core",
    "tok_embeddings.weight": "titan",
    "model.embed_tokens.weight": "hf",
    "embed_tokens.weight": "hf",
    "transformer.wte.weight": "hf",
    "wte.weight": "hf",
}
OPTIMIZER_NAME = re.compile(r"(.*\.)?optim(izer)?\.")
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain_names(tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Whose names a state dictionary has (``core``, ``titan``, ``hf``), and its model without the names of wrappers.

    The optimizer's tensors are left out. Meta's names become those of llama2.c, which has the same matrices.

    Raises:
        UnsupportedError: no table of words of a known name is there.
    """
    named = {name: tensor for name, tensor in tensors.items() if not OPTIMIZER_NAME.match(name)}
    for wrapper in WRAPPERS:
        named = {name.replace(wrapper, ""): tensor for name, tensor in named.items()}
    found = [(name, anchor) for anchor in ANCHORS for name in named if name == anchor or name.endswith(f".{anchor}")]
    if not found:
        known = ", ".join(ANCHORS)
        raise UnsupportedError(f"a state dictionary without any of {known}; it has {', '.join(sorted(named)[:5])}")
    table, anchor = min(found, key=lambda pair: len(pair[0]) - len(pair[1]))
    outer = table.removesuffix(anchor)
    inner = {name.removeprefix(outer): tensor for name, tensor in named.items()}
    if ANCHORS[anchor] != "titan":
        return ANCHORS[anchor], inner

    def renamed(name: str) -> str:
        return next((match.expand(new) for rule, new in TITAN if (match := rule.fullmatch(name))), name)

    return "titan", {renamed(name): tensor for name, tensor in inner.items()}
