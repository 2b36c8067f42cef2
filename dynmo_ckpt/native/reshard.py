"""Plans a native checkpoint on another topology: merge, split and reshard are the same function. Pure.

Tensors keep their global names; a topology only decides in which file a tensor lies and along which dimension it is
split over tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .. import __version__
from .._common.document import (
    envelope,
    is_count,
)
from .._common.errors import UsageError
from ..formats.checkpoint import BLANK_SEAL, FORMAT, VERSION
from ..formats.checkpoint_rules import block_items, finest_items, model_blocks, model_items
from ..io.errors import UnsupportedError
from ..tensors.copy_plan import OutputTensor, SafetensorsFile, WrittenFile, safetensors_file
from ..tensors.views import Tensor

# The dimension of a parameter that tensor parallelism splits, by the end of its name. As in Megatron, column-parallel
# layers split their rows (0) and row-parallel layers their columns (1). Other parameters are on every rank.
SPLIT_DIMS = {
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.query.weight": 0,
    "attention.query.bias": 0,
    "attention.key_value.weight": 0,
    "attention.key_value.bias": 0,
    "attention.dense.weight": 1,
    "attention.relative.weight": 1,
    "attention.sinks": 0,
    ".fc1.weight": 0,
    ".fc1.bias": 0,
    ".gate.weight": 0,
    ".gate.bias": 0,
    ".up.weight": 0,
    ".up.bias": 0,
    ".fc2.weight": 1,
    "embedding.word.weight": 0,
    "head.weight": 0,
    "head.bias": 0,
}


@dataclass(frozen=True, kw_only=True)
class NativePlan:
    """Files to write, and their manifest, in which checksums and ``files`` are filled in after writing."""

    files: tuple[SafetensorsFile, ...]
    manifest: Mapping[str, Any]


def single_stage_partition(manifest: Mapping[str, Any]) -> list[list[str]]:
    """The items of all stages on a single stage."""
    return [[item for stage in manifest["topology"]["partition"] for item in stage]]


def partition_from_counts(layers_per_stage: Sequence[int], model: Mapping[str, Any]) -> list[list[str]]:
    """A partition with these numbers of blocks on each stage.

    The first items go to the first stage, the head to the last one, a T5's encoder norm to the stage of the last
    encoder block, and any other item to the stage of the block after it.
    """
    blocks = list(model_blocks(dict(model)))
    stages: list[list[str]] = [[] for _ in layers_per_stage]
    stage_of_block = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    done = 0
    for item in block_items(dict(model)):
        if item in blocks:
            stages[stage_of_block[done]].append(item)
            done += 1
        elif done == 0:
            stages[0].append(item)
        elif item == "head":
            stages[-1].append(item)
        elif item == "encoder.norm":
            stages[stage_of_block[done - 1]].append(item)
        else:
            stages[stage_of_block[done] if done < len(blocks) else -1].append(item)
    return stages


def num_blocks(model: Mapping[str, Any]) -> int:
    """Number of blocks that a partition counts; those of a T5's encoder come before those of its decoder."""
    return int(model["num_layers"] + model.get("num_decoder_layers", 0))


def layer_counts(num_layers: int, num_stages: int, text: str | None) -> list[int]:
    """Number of layers of each stage.

    Args:
        num_layers: of the model.
        num_stages: of the topology.
        text: the value of ``--partition``, such as ``7,5,8,4``; None splits evenly, the first stages being larger.

    Raises:
        UsageError: ``text`` is not one number for each stage, or the numbers do not add up to ``num_layers``.
    """
    if text is None:
        return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]
    numbers = [number.strip() for number in text.split(",")]
    if not all(is_count(number) for number in numbers) or len(numbers) != num_stages:
        raise UsageError(f"--partition {text!r}: must be {num_stages} numbers of layers, separated by commas")
    if sum(map(int, numbers)) != num_layers:
        raise UsageError(f"--partition {text!r}: must add up to the model's {num_layers} layers")
    return [int(number) for number in numbers]


def plan_native(
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    partition: Sequence[Sequence[str]],
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    virtual_stages_per_worker: int = 1,
    with_optimizer: bool = True,
    dtype: str | None = None,
) -> NativePlan:
    """Plan the files of ``tensors`` on a partition and tensor-parallel size.

    Args:
        manifest: of the input.
        tensors: the stored tensors by global name, each with its whole shape as in the manifest.
        partition: the items of each stage, in layer order.
        tensor_parallel_size: number of tensor-parallel ranks.
        data_parallel_size: number of replicas; it is recorded only, each tensor is stored once.
        virtual_stages_per_worker: number of stages of each pipeline rank; stage ``i`` goes to rank ``i % workers``.
        with_optimizer: include the optimizer state.
        dtype: type of the parameters, as in safetensors; None keeps the type of the input.

    Raises:
        UnsupportedError: the heads or the FFN size cannot be split over the tensor-parallel ranks.
    """
    check_divisible(manifest["model"], tensor_parallel_size)
    model = manifest["model"]
    workers = len(partition) // virtual_stages_per_worker
    stage_of = {p: s for s, items in enumerate(partition) for p in finest_items(items, model)}
    # As in Megatron, consecutive stages are on consecutive pipeline ranks; with virtual stages this repeats.
    owner = {item: stage_of[item] % workers for item in model_items(model)}
    entries_to_write = {n: e for n, e in manifest["tensors"].items() if with_optimizer or e["role"] != "optimizer"}
    contents: dict[str, list[OutputTensor]] = {}
    entries: dict[str, Any] = {}
    for name, entry in entries_to_write.items():
        worker = owner[next(item for item in owner if name.startswith(f"{item}."))]
        kind = "optimizer" if entry["role"] == "optimizer" else "model"
        # One rank has the complete tensor: no dimension is recorded as split.
        dim = _split_dim(name, entry["role"]) if tensor_parallel_size > 1 else None
        # A factor of a second moment has one element in the dimension that it is a mean over.
        if dim is not None and entry["shape"][dim] == 1:
            dim = None
        # Only parameters: masks and optimizer state keep their types.
        cast = dtype if entry["role"] == "parameter" and dtype != entry["dtype"] else None
        shards = []
        for rank, (span, part) in enumerate(_cut(tensors[name], entry["shape"], dim, tensor_parallel_size)):
            file = f"{kind}-p{worker:03d}-t{rank:02d}.safetensors"
            index = [[0, size] for size in entry["shape"]]
            if dim is not None:
                index[dim] = span
                # The last ranks may have no rows of an uneven vocabulary; empty shards are not written.
                if span[0] == span[1]:
                    continue
            shape = tuple(end - begin for begin, end in index)
            contents.setdefault(file, []).append(OutputTensor(key=name, shape=shape, content=part, cast=cast))
            shards.append({"file": file, "key": name, "index": index})
        entries[name] = {
            **entry,
            "dtype": cast or entry["dtype"],
            "split_dim": dim if len(shards) > 1 else None,
            "shards": shards,
        }
    topology = {
        # Each expert is stored whole, so a plan has no expert parallelism.
        **{key: value for key, value in manifest["topology"].items() if key != "expert_parallel_size"},
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": workers,
        "data_parallel_size": data_parallel_size,
        "virtual_stages_per_worker": virtual_stages_per_worker,
        "world_size": workers * tensor_parallel_size * data_parallel_size,
        "partition": [list(stage) for stage in partition],
    }
    document = {
        **manifest,
        **envelope(FORMAT, VERSION, f"dynmo-ckpt {__version__}"),
        "topology": topology,
        "tensors": entries,
        "optimizer": manifest["optimizer"] if with_optimizer else None,
    }
    return NativePlan(files=tuple(safetensors_file(f, contents[f]) for f in sorted(contents)), manifest=document)


def check_divisible(model: Mapping[str, Any], ranks: int) -> None:
    """Check that the sizes of a model can be split over tensor-parallel ranks.

    Args:
        model: the ``model`` of a manifest.
        ranks: number of tensor-parallel ranks.

    Raises:
        UnsupportedError: ``ranks`` does not divide the heads, the key-value heads or the FFN size.
    """
    for field in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        if model.get(field, 0) % ranks:
            raise UnsupportedError(
                f"{field} {model[field]} cannot be split over {ranks} tensor-parallel ranks; choose a divisor"
            )


def _split_dim(name: str, role: str) -> int | None:
    base = name.rpartition(".")[0] if role in ("mask", "optimizer") else name
    return next((dim for suffix, dim in SPLIT_DIMS.items() if base.endswith(suffix)), None)


def _cut(tensor: Tensor, shape: Sequence[int], dim: int | None, ranks: int) -> list[tuple[list[int], Tensor]]:
    """Split a tensor of the stored ``shape`` along ``dim``; for each rank its span along ``dim``, and its part.

    ``tensor`` may have more dimensions than ``shape``, one for each axis of a map. The rows of a vocabulary may be
    uneven: the last ranks may have fewer rows, or none.
    """
    if dim is None:
        return [([0, 0], tensor)]
    at, outer = 0, math.prod(shape[:dim])
    # Find the axis with which dimension `dim` of the stored shape begins.
    while math.prod(tensor.shape[:at]) < outer or tensor.shape[at] == 1:
        at += 1
    size, each = tensor.shape[at], shape[dim] // tensor.shape[at]
    # An entry of this axis is ``each`` rows of the stored tensor, such as those of a head. They stay together.
    if size % ranks and each > 1:
        raise UnsupportedError(
            f"{size} groups of rows cannot be split over {ranks} tensor-parallel ranks; choose a divisor"
        )
    step = -(-size // ranks)
    ends = [min(size, rank * step) for rank in range(ranks + 1)]
    return [([begin * each, end * each], tensor.narrow(at, begin, end)) for begin, end in pairwise(ends)]


def complete_manifest(
    plan: NativePlan, written: Mapping[str, WrittenFile], extra: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """The manifest of a plan with the checksums of the written files; ``extra``: size in bytes and CRC-32 of others."""
    tensors = {
        name: {
            **entry,
            "shards": [
                {**shard, "crc32": f"{written[shard['file']].tensors[shard['key']]:08x}"} for shard in entry["shards"]
            ],
        }
        for name, entry in plan.manifest["tensors"].items()
    }
    sizes = {name: (file.num_bytes, file.crc32) for name, file in written.items()} | dict(extra)
    files = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in sorted(sizes.items())}
    return {**plan.manifest, "manifest_crc32": BLANK_SEAL, "tensors": tensors, "files": files}
