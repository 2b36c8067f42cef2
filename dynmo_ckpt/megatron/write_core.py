"""Plans a distributed checkpoint as Megatron-core writes it (``torch_dist``), without torch. Pure.

``__0_0.distcp`` has the tensors, each as ``torch.save`` writes it, ``.metadata`` their places, and ``common.pt``
everything else. Layers are stacked along a first dimension, one chunk each. Optimizer state has the form that
Megatron-core calls ``fully_reshardable``: float32 weights and moments under the names of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .._common.document import encode_json
from ..io.errors import UnsupportedError
from ..maps.name_map import MappedTensor, layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import OutputTensor, Writable
from ..torch_save.pickles import GlobalName
from ..torch_save.writer import (
    ConcatenatedTorchFiles,
    ConstantStorages,
    NewCall,
    NewDict,
    NewObject,
    NewTensor,
    TorchSaveFile,
    dump_pickle,
)
from .core_names import core_name
from .model_sizes import legacy_args, megatron_rows
from .training_progress import adam_group, grad_scaler, megatron_args, progress_of
from .write import check_supported
from .write_optimizer import MOMENTS, mapped_moments

DATA_FILE = "__0_0.distcp"
PACKAGE = "torch.distributed.checkpoint.metadata"
FULLY = "fully_reshardable"
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def plan_core(
    checkpoint: NativeCheckpoint, *, dtype: str | None = None, with_optimizer: bool = False
) -> tuple[list[Writable], dict[str, bytes]]:
    """Plan the files of one iteration, and the small files next to them.

    Args:
        checkpoint: the input; pruned weights become zeros.
        dtype: type of the weights, as in safetensors; None keeps the type of the input.
        with_optimizer: include the optimizer state.

    Raises:
        UnsupportedError: a family other than GPT and Llama, or a tensor without a map.
    """
    model, ties = checkpoint.manifest["model"], checkpoint.manifest["ties"]
    if model["family"] not in ("gpt", "llama"):
        raise UnsupportedError(
            f"Megatron-core: the family {model['family']} is not supported, only gpt and llama; use --to native"
        )
    check_supported(model, 3.0)
    layout = layout_of(load_map(f"legacy_{model['family']}", "2"), model, foreign_vocab_size=megatron_rows(model, 1))
    stored = checkpoint.weights()
    masks = checkpoint.masks()
    weights = to_foreign(layout, stored, ties, masks)
    entries = _entries("", weights, dtype)
    if with_optimizer:
        # The masters are float32, whatever the type of the weights.
        entries |= _entries("optimizer.state.fp32_param.", weights, "F32")
        moments = mapped_moments(checkpoint, layout, rank=0, ranks=1)
        for kind in MOMENTS:
            entries |= _entries(f"optimizer.state.{kind}.", moments[kind].values(), "F32")
    folder = f"iter_{checkpoint.manifest['step']:07d}"
    data, metadata = distributed_files(f"{folder}/", entries)
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    small = {
        "latest_checkpointed_iteration.txt": str(checkpoint.manifest["step"]).encode(),
        f"{folder}/.metadata": metadata,
        f"{folder}/metadata.json": encode_json({**about, "common_backend_version": 1}),
    }
    return [data, _common(f"{folder}/common.pt", checkpoint, with_optimizer=with_optimizer)], small


Entries = dict[str, list[tuple[tuple[int, ...], OutputTensor]]]


def distributed_files(prefix: str, entries: Entries) -> tuple[ConcatenatedTorchFiles, bytes]:
    """The data file of a distributed checkpoint, and the contents of its ``.metadata``.

    Args:
        prefix: of the path of the data file, empty or ending with a slash.
        entries: for each name its chunks: begin in the whole tensor, and the tensor to write.
    """
    parts = [_part(tensor) for chunks in entries.values() for _, tensor in chunks]
    data = ConcatenatedTorchFiles(name=f"{prefix}{DATA_FILE}", parts=tuple(parts))
    return data, dump_pickle(_metadata(entries, data))


def _entries(prefix: str, tensors: Iterable[MappedTensor], dtype: str | None) -> Entries:
    """For each Megatron-core name its chunks: begin in the stacked tensor, and the tensor to write."""
    found: Entries = {}
    for each in tensors:
        name = core_name(each.name)
        match = LAYER.match(name)
        stacked = LAYER.sub("decoder.layers.", name)
        # Megatron-core stacks a weight of all layers in one tensor. Each layer is written as a chunk of it.
        begin = (int(match[1]), *(0 for _ in each.shape)) if match else tuple(0 for _ in each.shape)
        shape = (1, *each.shape) if match else each.shape
        cast = None if dtype == each.content.dtype else dtype
        output = OutputTensor(key=f"{prefix}{name}", shape=shape, content=each.content, mask=each.mask, cast=cast)
        found.setdefault(prefix + stacked, []).append((begin, output))
    return {name: sorted(chunks, key=lambda chunk: chunk[0]) for name, chunks in found.items()}


def _part(tensor: OutputTensor) -> TorchSaveFile:
    """A chunk as ``torch.save`` writes it."""
    return TorchSaveFile(name="", tensors=(tensor,), tree=NewTensor(0, tensor.dtype, tensor.shape))


def _metadata(entries: Entries, data: ConcatenatedTorchFiles) -> NewObject:
    """The object that torch pickles as ``.metadata``."""
    tensors: dict[str, NewObject] = {}
    places: list[tuple[NewObject, NewObject]] = []
    # plan_core concatenates the chunks in the order of the entries, so both are walked in step.
    at = iter(zip(data.begins, data.parts, strict=True))
    for name, chunks in entries.items():
        described = []
        for begin, tensor in chunks:
            offset, part = next(at)
            described.append(_metadata_object("ChunkStorageMetadata", offsets=_size(begin), sizes=_size(tensor.shape)))
            index = _metadata_object("MetadataIndex", fqn=name, offset=_size(begin), index=None)
            place = {"relative_path": DATA_FILE, "offset": offset, "length": part.num_bytes}
            places.append(
                (index, NewObject(GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo"), place))
            )
        ends = [tuple(b + n for b, n in zip(begin, tensor.shape, strict=True)) for begin, tensor in chunks]
        size = tuple(max(along) for along in zip(*ends, strict=True))
        properties = _properties(chunks[0][1].dtype)
        tensors[name] = _metadata_object(
            "TensorStorageMetadata", properties=properties, size=_size(size), chunks=described
        )
    return _metadata_object(
        "Metadata",
        state_dict_metadata=tensors,
        planner_data=None,
        storage_data=NewDict(tuple(places)),
        storage_meta=None,
        version="1.0.0",
    )


def _metadata_object(kind: str, **fields: Any) -> NewObject:
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


def _common(name: str, checkpoint: NativeCheckpoint, *, with_optimizer: bool) -> TorchSaveFile:
    """``common.pt``: arguments, progress, and the parameter groups without tensors."""
    model, optimizer = checkpoint.manifest["model"], checkpoint.manifest["optimizer"]
    progress, constants = progress_of(checkpoint.manifest), ConstantStorages()
    args = legacy_args(model, 1, 1, 3.0, None) | megatron_args(progress)
    args |= {"use_dist_ckpt": True, "dist_ckpt_format": "torch_dist", "ckpt_format": "torch_dist"}
    tree: dict[str, Any] = {
        "args": NewObject(GlobalName("argparse", "Namespace"), args),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.manifest["step"],
    }
    if progress.scheduler is not None:
        tree["opt_param_scheduler"] = dict(progress.scheduler)
    if with_optimizer:
        steps = set(optimizer["steps"].values())
        if len(steps) > 1:
            raise UnsupportedError(
                f"{checkpoint.directory}: its parameters did {sorted(steps)} optimizer steps; Megatron-core stores one "
                "number; use --no-optimizer or --to native"
            )
        decay = max((group["weight_decay"] for group in optimizer["groups"]), default=0.0)
        # A group lists no parameters: in this form Megatron-core finds the state of a parameter by its name.
        groups = [{**adam_group(progress, each), "step": max(steps, default=0), "params": []} for each in (decay, 0.0)]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": FULLY}
        scaler = grad_scaler(progress, constants)
        tree["optimizer"] = state if scaler is None else {**state, "grad_scaler": scaler}
    return TorchSaveFile(name=name, tensors=(), tree=tree, constants=constants.payloads)
