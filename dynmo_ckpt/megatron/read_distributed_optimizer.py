"""The state of Megatron's distributed optimizer: from flat buffers to tensors of each parameter.

The parameters of a chunk are in a buffer in reverse order, and each data-parallel rank has an equal part of it::

    parameters of the chunk     a      b      c
    buffer                    [ c c c | b b | a a a a | padding ]
    data-parallel ranks         rank 0     |   rank 1

There are three forms of files:

* 2022: a file ``mp_rank_..._DDD/optim.pt`` of each rank, with its parts of the parameters.
* since May 2023: one ``distrib_optim.pt`` next to the model with the complete buffer, later split into buckets.
* since 2024: concatenated buckets without padding; parameters may begin at multiples of 64 elements.

No file records where a parameter begins. The layout is computed as each release of Megatron does, and the result is
verified: the lengths of the buckets must fit, and each master must round to its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..io.errors import CorruptError, UnsupportedError
from ..tensors.views import Tensor, concatenate
from ..torch_save.pickles import TensorRef
from ..torch_save.reader import TorchFile, open_torch
from .read_optimizer import Key, OptimizerState, module_order

WORLD_FILE, REPLICA_FILE = "distrib_optim.pt", "optim.pt"
SHARED = (
    *("language_model.embedding.word_embeddings.weight", "word_embeddings_for_head.weight"),
    *("embedding.word_embeddings.weight", "output_layer.weight"),
)
KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# In elements, of at least 16 bits: parameters begin at multiples of 128 bytes, and buckets of 256 bytes.
PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
Chunk = Mapping[str, Tensor]
Args = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The begin of each parameter in a bucket, and the length of the bucket without padding, in elements."""

    begins: Mapping[str, int]
    num_elements: int


def is_distributed(directory: Path) -> bool:
    """Whether the state of a rank was written by the distributed optimizer."""
    return (directory / WORLD_FILE).is_file() or bool(_replicas(directory))


def _replicas(directory: Path) -> list[Path]:
    """The files of the data-parallel ranks, in order."""
    return sorted(directory.parent.glob(f"{directory.name}_[0-9][0-9][0-9]/{REPLICA_FILE}"))


def read_distributed(file: TorchFile, chunks: Sequence[Chunk], args: Args, step: int) -> OptimizerState:
    """The optimizer state of one model-parallel rank.

    Args:
        file: the model file.
        chunks: its weights, for each virtual chunk.
        args: Megatron's arguments; may be empty.
        step: the iteration, which is the number of optimizer steps where none is recorded.

    Raises:
        UnsupportedError: buffers with an unknown layout, or of several optimizers.
        CorruptError: files that do not fit the weights.
    """
    directory = file.path.parent
    if (directory / WORLD_FILE).is_file():
        world = open_torch(directory / WORLD_FILE)
        return OptimizerState(tensors=read_world(world, chunks, args), steps=_steps(file, file.tree, step))
    return _from_replicas([open_torch(path) for path in _replicas(directory)], chunks, step)


def _steps(file: TorchFile, tree: Any, step: int) -> int:
    optimizer = tree.get("optimizer") if isinstance(tree, dict) else None
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    recorded = [file.number(g.get("step")) for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []
    numbers = {int(number) for number in recorded if number is not None}
    return numbers.pop() if len(numbers) == 1 else step


def place_buffer(
    flats: Mapping[str, Sequence[Tensor]], chunk: Chunk, args: Args, known: list[int] | int | None
) -> dict[str, dict[str, Tensor]] | None:
    """The tensors of each parameter in a buffer, by kind and name; None where no known layout fits.

    Args:
        flats: the buckets of the buffer by kind (``master`` and the moments), each of the shape ``[elements]``.
        chunk: the weights, in the order of the module where ``module_order`` keeps it.
        args: Megatron's arguments; may be empty.
        known: recorded lengths without padding, as of ``_recorded_lengths``.
    """
    from ..tensors.equality import rounds_to

    lengths = [flat.shape[0] for flat in flats["master"]]
    for placed in _candidates(chunk, args, lengths, known):
        masters = _cut(flats["master"], placed, chunk)
        # Several layouts may fit the lengths. Only the right one has masters that round to the weights.
        if all(rounds_to(masters[name], weight) for name, weight in chunk.items()):
            return {kind: _cut(each, placed, chunk) for kind, each in flats.items()}
    return None


def read_world(world: TorchFile, chunks: Sequence[Chunk], args: Args) -> dict[str, dict[Key, Tensor]]:
    """The state in a file with the complete buffers of one model-parallel rank, by kind, then by chunk and name.

    Args:
        world: the file.
        chunks: the weights of each virtual chunk.
        args: Megatron's arguments; may be empty.

    Raises:
        UnsupportedError: buffers with an unknown layout, or of several optimizers.
        CorruptError: buffers of different lengths.
    """
    tree = world.tree
    # ChainedOptimizer of Megatron-core writes a list, with an entry for each of its optimizers.
    if isinstance(tree, list) and len(tree) == 1:
        tree = tree[0]
    buffers = {key: value for key, value in tree.items() if isinstance(key, int)} if isinstance(tree, dict) else {}
    if sorted(buffers) != list(range(len(chunks))):
        raise UnsupportedError(
            f"{world.path}: has {len(buffers)} buffers for {len(chunks)} chunks; experts (MoE) are not supported"
        )
    found: dict[str, dict[Key, Tensor]] = {kind: {} for kind in KINDS.values()}
    for number, chunk in enumerate(chunks):
        by_type = buffers[number]
        if not isinstance(by_type, dict) or len(by_type) != 1:
            raise UnsupportedError(f"{world.path}: buffer {number}: must have one type of weights")
        dtype, buffer = next(iter(by_type.items()))
        flats = {kind: _flats(world, buffer, key) for key, kind in KINDS.items()}
        lengths = {tuple(flat.shape[0] for flat in each) for each in flats.values()}
        if len(lengths) != 1:
            raise CorruptError(f"{world.path}: buffer {number}: weights and moments have different lengths")
        known = _recorded_lengths(tree, number, dtype, buffer)
        placed = place_buffer(flats, chunk, args, known)
        if placed is None:
            raise UnsupportedError(
                f"{world.path}: buffer {number}: unknown layout, or not the state of these weights: no known order of "
                f"{len(chunk)} weights in {sum(next(iter(lengths)))} elements rounds to them"
            )
        for kind, each in placed.items():
            found[kind] |= {(number, name): tensor for name, tensor in each.items()}
    return found


def _flats(world: TorchFile, buffer: Any, key: str) -> list[Tensor]:
    value = buffer.get(key) if isinstance(buffer, dict) else None
    refs = value if isinstance(value, list) else [value]
    tensors = [world.tensor(ref, key) for ref in refs if isinstance(ref, TensorRef) and len(ref.shape) == 1]
    if len(tensors) != len(refs):
        raise CorruptError(f"{world.path}: has no flat buffer {key}")
    if any(tensor.dtype != "F32" for tensor in tensors):
        raise UnsupportedError(f"{world.path}: {key} must be float32")
    return tensors


def _recorded_lengths(tree: Mapping[Any, Any], number: int, dtype: Any, buffer: Any) -> list[int] | int | None:
    """The recorded lengths without padding, in elements: of each bucket, of all together, or None."""
    lengths_of = tree.get("per_bucket_numel_unpadded")
    if isinstance(lengths_of, list) and number < len(lengths_of) and isinstance(lengths_of[number], dict):
        lengths = lengths_of[number].get(dtype)
        return lengths if isinstance(lengths, list) else None
    total = buffer.get("numel_unpadded") if isinstance(buffer, dict) else None
    return total if isinstance(total, int) else None


def _candidates(
    chunk: Chunk, args: Args, lengths: Sequence[int], known: list[int] | int | None
) -> Iterator[list[Bucket]]:
    """Yield the layouts of Megatron's releases that fit the lengths of the buffers."""
    replicas = _count(args, "data_parallel_size") * _count(args, "context_parallel_size")
    recorded = args.get("ddp_bucket_size")
    sizes = [
        None,
        # Megatron's default bucket size in elements.
        max(40_000_000, 1_000_000 * replicas),
        *([recorded] if isinstance(recorded, int) and recorded > 0 else []),
    ]
    for alignment, size, separate, paired in product((PARAM_ALIGNMENT, 1), sizes, (True, False), (False, True)):
        buckets = layout(
            chunk, alignment=alignment, size=size, replicas=replicas, separate_shared=separate, min_two_params=paired
        )
        needed = [bucket.num_elements for bucket in buckets]
        if isinstance(known, list):
            fits = needed == known
        elif len(lengths) == 1 and len(needed) > 1:
            fits = sum(needed) == lengths[0]
        else:
            fits = len(needed) == len(lengths) and all(n <= length for n, length in zip(needed, lengths, strict=True))
        if fits:
            yield buckets


def _count(args: Args, name: str) -> int:
    value = args.get(name)
    return value if isinstance(value, int) and value > 0 else 1


def layout(
    chunk: Chunk, *, alignment: int, size: int | None, replicas: int, separate_shared: bool, min_two_params: bool
) -> list[Bucket]:
    """The buckets in which Megatron stores the parameters of a chunk, the last parameter first.

    Args:
        chunk: parameters by name.
        alignment: parameters begin at multiples of this number of elements.
        size: a bucket is closed when it has this number of elements; None: one bucket.
        replicas: number of data-parallel ranks that share the buffer.
        separate_shared: the embedding that the first and the last stage share has a separate bucket.
        min_two_params: a bucket has two parameters or more.
    """
    buckets: list[Bucket] = []
    begins: dict[str, int] = {}
    end = 0

    def close(num_elements: int) -> None:
        """Close the current bucket at a length of ``num_elements``."""
        nonlocal begins, end
        buckets.append(Bucket(begins=begins, num_elements=num_elements))
        begins, end = {}, 0

    # Backward computes gradients from the last parameter to the first: in this order the buckets become complete, and
    # each is reduced while backward continues.
    for name in reversed(module_order(chunk)):
        count = math.prod(chunk[name].shape)
        # The copies of the embedding on the first and the last stage must be sharded alike, for their gradients are
        # summed shard by shard. In a bucket of its own, the sharding does not depend on the stage.
        alone = separate_shared and name in SHARED
        begin = -(-end // alignment) * alignment
        if alone and begins:
            multiple = math.lcm(replicas, BUCKET_ALIGNMENT) if begin % replicas else 1
            close(-(-begin // multiple) * multiple)
            begin = 0
        begins[name], end = begin, begin + count
        if alone or (size is not None and end >= size and (len(begins) > 1 or not min_two_params)):
            close(end)
    if begins:
        close(end)
    return buckets


def _cut(flats: Sequence[Tensor], buckets: Sequence[Bucket], chunk: Chunk) -> dict[str, Tensor]:
    """The parameters of the buffers in their shapes; one buffer may have several buckets."""
    found = {}
    at = 0
    for number, bucket in enumerate(buckets):
        flat, base = (flats[number], 0) if len(flats) > 1 else (flats[0], at)
        for name, begin in bucket.begins.items():
            shape = chunk[name].shape
            part = flat.narrow(0, base + begin, base + begin + math.prod(shape))
            found[name] = part.unflatten(0, shape)
        at += bucket.num_elements
    return {name: found[name] for name in chunk}


def _from_replicas(files: Sequence[TorchFile], chunks: Sequence[Chunk], step: int) -> OptimizerState:
    """Merge the parts of the parameters that each data-parallel rank has."""
    parts: dict[str, dict[Key, list[tuple[int, Tensor]]]] = {kind: {} for kind in KINDS.values()}
    for replica, file in enumerate(files):
        tree = file.tree.get("optimizer") if isinstance(file.tree, dict) else None
        masters = tree.get("shard_fp32_from_float16_groups") if isinstance(tree, dict) else None
        inner = tree.get("optimizer") if isinstance(tree, dict) else None
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        if not isinstance(masters, list) or not isinstance(groups, list) or not isinstance(inner, dict):
            raise UnsupportedError(f"{file.path}: has no state of the distributed optimizer")
        expected = _owned(chunks, replica, len(files))
        numbers = [group["params"] for group in groups if isinstance(group, dict) and group.get("params")]
        shards = [group for group in masters if group]
        if [len(group) for group in shards] != [len(group) for group in expected] or len(numbers) != len(expected):
            raise CorruptError(f"{file.path}: its parts are not those of the data-parallel rank {replica}")
        state = inner.get("state")
        state = state if isinstance(state, dict) else {}
        for g, group in enumerate(expected):
            for i, (key, begin, count) in enumerate(group):
                entry = state.get(numbers[g][i], {})
                refs = {"master": shards[g][i], "exp_avg": entry.get("exp_avg"), "exp_avg_sq": entry.get("exp_avg_sq")}
                for kind, ref in refs.items():
                    parts[kind].setdefault(key, []).append((begin, _part(file, ref, count, f"{kind} of {key[1]}")))
    tensors = {}
    for kind, by_key in parts.items():
        tensors[kind] = {
            key: concatenate([part for _, part in sorted(found, key=lambda pair: pair[0])], 0).unflatten(
                0, chunks[key[0]][key[1]].shape
            )
            for key, found in by_key.items()
        }
    optimizer = files[0].tree["optimizer"]
    return OptimizerState(tensors=tensors, steps=_steps(files[0], {"optimizer": optimizer}, step))


def _part(file: TorchFile, ref: Any, count: int, what: str) -> Tensor:
    if not isinstance(ref, TensorRef) or ref.shape != (count,) or ref.storage.dtype != "F32":
        raise CorruptError(f"{file.path}: {what}: must have {count} elements in float32")
    return file.tensor(ref, what)


def _owned(chunks: Sequence[Chunk], replica: int, replicas: int) -> list[list[tuple[Key, int, int]]]:
    """The parts of a data-parallel rank by parameter group: parameter, begin in it and length, in elements."""
    groups: list[list[tuple[Key, int, int]]] = [[], []]
    for number, chunk in enumerate(chunks):
        total = sum(math.prod(weight.shape) for weight in chunk.values())
        # Megatron pads the buffer of 2022 to a multiple of the replicas.
        share = -(-total // replicas)
        # The buffer has the last parameter first, so the parameters are counted from its end.
        low, high = replica * share, (replica + 1) * share
        end = total
        for name in module_order(chunk):
            count = math.prod(chunk[name].shape)
            begin, end = end - count, end - count
            first, last = max(low, begin), min(high, begin + count)
            if first < last:
                decays = len(chunk[name].shape) > 1
                groups[0 if decays else 1].append(((number, name), first - begin, last - first))
    return [group for group in groups if group]
