"""Plans a native checkpoint on other workers: merge, split and reshard are one function. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .. import __version__
from .._common.document import envelope
from ..errors import UnsupportedError
from ..formats.checkpoint import BLANK_SEAL, FORMAT, VERSION
from ..formats.checkpoint_rules import block_items, finest_items, model_blocks, model_items
from ..tensors.copy_plan import OutputFile, OutputTensor, output_file
from ..tensors.execute import Written
from ..tensors.views import Tensor

SPLIT_DIMS = {
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.query.weight": 0,
    "attention.query.bias": 0,
    "attention.key_value.weight": 0,
    "attention.key_value.bias": 0,
    "attention.dense.weight": 1,
    "attention.relative.weight": 1,
    ".fc1.weight": 0,
    ".fc1.bias": 0,
    ".gate.weight": 0,
    ".up.weight": 0,
    ".fc2.weight": 1,
    "embedding.word.weight": 0,
    "head.weight": 0,
    "head.bias": 0,
}


@dataclass(frozen=True, kw_only=True)
class NativePlan:
    """Files to write, and the manifest that describes them, its checksums and ``files`` still to come."""

    files: tuple[OutputFile, ...]
    manifest: Mapping[str, Any]


def whole_partition(manifest: Mapping[str, Any]) -> list[list[str]]:
    """The items of all stages on one stage."""
    return [[item for stage in manifest["topology"]["partition"] for item in stage]]


def counted_partition(layers_per_stage: Sequence[int], model: Mapping[str, Any]) -> list[list[str]]:
    """A partition with these numbers of whole blocks a stage; what is no block stands with the block after it.

    What comes first is in the first stage and the head in the last.
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
        manifest: what describes ``tensors``; the run's facts are taken over from it.
        tensors: the stored tensors by global name.
        partition: the items of each stage, in layer order.
        tensor_parallel_size: tensor ranks; weights are cut along the dimension that tensor parallelism cuts.
        data_parallel_size: replicas; a record only, each tensor is stored once.
        virtual_stages_per_worker: stages that each worker holds; stage ``i`` goes to worker ``i % workers``.
        with_optimizer: take the optimizer's state along.
        dtype: the type of parameters, as in safetensors; None: as they are.

    Raises:
        UnsupportedError: the heads or the inner size cannot be cut into that many ranks.
    """
    check_divisible(manifest["model"], tensor_parallel_size)
    model = manifest["model"]
    workers = len(partition) // virtual_stages_per_worker
    stage_of = {p: s for s, items in enumerate(partition) for p in finest_items(items, model)}
    owner = {item: stage_of[item] % workers for item in model_items(model)}
    kept = {n: e for n, e in manifest["tensors"].items() if with_optimizer or e["role"] != "optimizer"}
    contents: dict[str, list[OutputTensor]] = {}
    entries: dict[str, Any] = {}
    for name, entry in kept.items():
        worker = owner[next(item for item in owner if name.startswith(f"{item}."))]
        kind = "optimizer" if entry["role"] == "optimizer" else "model"
        dim = _split_dim(name, entry["role"]) if tensor_parallel_size > 1 else None
        cast = dtype if entry["role"] == "parameter" and dtype != entry["dtype"] else None
        shards = []
        for rank, (span, part) in enumerate(_cut(tensors[name], entry["shape"], dim, tensor_parallel_size)):
            file = f"{kind}-p{worker:03d}-t{rank:02d}.safetensors"
            index = [[0, size] for size in entry["shape"]]
            if dim is not None:
                index[dim] = span
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
    return NativePlan(files=tuple(output_file(f, contents[f]) for f in sorted(contents)), manifest=document)


def check_divisible(model: Mapping[str, Any], ranks: int) -> None:
    """Raise ``UnsupportedError`` where a size cannot be cut into ``ranks`` tensor ranks."""
    for field in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        if model.get(field, 0) % ranks:
            raise UnsupportedError(
                f"{field} {model[field]} cannot be cut into {ranks} tensor ranks; choose a divisor of it"
            )


def _split_dim(name: str, role: str) -> int | None:
    base = name.rpartition(".")[0] if role in ("mask", "optimizer") else name
    return next((dim for suffix, dim in SPLIT_DIMS.items() if base.endswith(suffix)), None)


def _cut(tensor: Tensor, shape: Sequence[int], dim: int | None, ranks: int) -> list[tuple[list[int], Tensor]]:
    """Cut a tensor, stored under ``shape``, along ``dim``: for each rank the span of ``shape``, and the part.

    Its content may have one dimension an axis. Rows of a vocabulary need not be shared evenly: the last ranks may have
    fewer, or none.
    """
    if dim is None:
        return [([0, 0], tensor)]
    at, outer = 0, math.prod(shape[:dim])
    while math.prod(tensor.shape[:at]) < outer or tensor.shape[at] == 1:
        at += 1
    size, each = tensor.shape[at], shape[dim] // tensor.shape[at]
    if size % ranks and each > 1:
        raise UnsupportedError(f"groups of {size} rows cannot be cut into {ranks} tensor ranks")
    step = -(-size // ranks)
    ends = [min(size, rank * step) for rank in range(ranks + 1)]
    return [([begin * each, end * each], tensor.narrow(at, begin, end)) for begin, end in pairwise(ends)]


def finished_manifest(
    plan: NativePlan, written: Mapping[str, Written], extra: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """The plan's manifest with the checksums of what was written; ``extra`` is size and CRC-32 of other files."""
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
