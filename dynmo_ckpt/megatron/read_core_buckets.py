"""The state of Megatron-core's distributed optimizer in the flat forms of a distributed checkpoint.

The weights there are whole tensors, but each model-parallel rank has flat buffers of its own parts of them::

    dp_reshardable            tensors   ...dp_group_idx_D.gbuf_idx_G.dtype_T.bucket_idx_B.{param,exp_avg,exp_avg_sq}
    fully_sharded_bucket_space          the same, its name before 0.14
    dp_zero_gather_scatter    objects   ...dp_group_idx_D.param_state, with the contents of a ``distrib_optim.pt``

``D`` is the rank in the model-parallel group: ``pipeline rank * tensor size + tensor rank``; ``G`` is the virtual
chunk. So the weights are cut into the parts of each rank, the layout of its buffers is found as for legacy files
(:mod:`.read_distributed_optimizer`), and the parts of the state are merged as the ranks of a legacy checkpoint.

Experts on several ranks have an optimizer of their own; then the names begin with ``chained_0.`` and ``chained_1.``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..io.errors import CorruptError, UnsupportedError
from ..maps.name_map import layout_of, load_map, to_foreign
from ..tensors.views import Tensor
from ..torch_save.reader import TorchFile
from .read import HEAD_COPY, LAYER_NAME, OUTPUT_LAYER, STATE_KINDS, WORD_TABLE, MegatronCheckpoint
from .read_distributed_optimizer import KINDS, place_buffer, read_world

BUCKET = re.compile(
    r"(?:chained_(\d{1,6})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,6})"
    r"\.dtype_([^/]{1,100})\.bucket_idx_(\d{1,6})\.(param|exp_avg|exp_avg_sq)"
)
GATHERED = re.compile(r"(?:chained_(\d{1,6})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\.param_state/shard_0_1")
FLAT_KINDS = "dp_reshardable, fully_sharded_bucket_space, dp_zero_gather_scatter"
# The parts of a layer in the order of the module's parameters: with norms of their own, and with Transformer Engine,
# whose norms belong to the linear layers. The attention creates its output projection first.
_OWN_NORMS = (
    *("input_layernorm.", "self_attention.dense.", "self_attention.query_key_value."),
    *("post_attention_layernorm.", "mlp.dense_h_to_4h.", "mlp.dense_4h_to_h."),
)
_FUSED_NORMS = (_OWN_NORMS[1], _OWN_NORMS[0], *_OWN_NORMS[2:])
# Arguments that give stages other layers than an even division does.
UNEVEN = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
REMEDY = (
    "save it once more with Megatron-core and --dist-ckpt-optim-fully-reshardable, or convert the weights alone with "
    "--no-optimizer"
)
Stage = dict[str, list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """The flat state of one optimizer of a checkpoint.

    Attributes:
        path: of the checkpoint, for messages.
        buckets: tensors of ``dp_reshardable`` by the match of their names.
        gathered: files of ``dp_zero_gather_scatter`` by model-parallel rank.
    """

    path: Path
    buckets: Sequence[tuple[re.Match[str], Tensor]]
    gathered: Mapping[int, TorchFile]

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoint has none of this optimizer."""
        return not self.buckets and not self.gathered


def flat_state(
    path: Path,
    tensors: Mapping[str, Tensor],
    objects: Iterable[str],
    open_object: Callable[[str], TorchFile],
    number: int,
) -> FlatState:
    """The flat state of one optimizer.

    Args:
        path: of the checkpoint.
        tensors: all tensors by name; buckets have the shape ``[elements]``.
        objects: names of all entries that are not tensors.
        open_object: opens one of them.
        number: of the optimizer; the names of a single one have no number.
    """
    own = (None, "0") if number == 0 else (str(number),)
    buckets = [(m, tensor) for name, tensor in tensors.items() if (m := BUCKET.fullmatch(name)) and m[1] in own]
    gathered = {int(m[2]): open_object(name) for name in objects if (m := GATHERED.fullmatch(name)) and m[1] in own}
    return FlatState(path=path, buckets=buckets, gathered=gathered)


def is_flat(names: Sequence[str]) -> bool:
    """Whether ``names``, of tensors and objects, include flat optimizer state."""
    return any(BUCKET.fullmatch(name) or GATHERED.fullmatch(name) for name in names)


def read_flat(
    flat: FlatState, whole: MegatronCheckpoint, tables: Mapping[str, Tensor], args: Mapping[str, Any]
) -> dict[str, list[Stage]]:
    """The optimizer state of each kind as stages of tensor-parallel ranks, for ``assemble_state``.

    Args:
        flat: the state.
        whole: the weights under DynMo's names.
        tables: the stored word table and head by canonical name, each of the shape ``[padded vocabulary, hidden]``.
        args: Megatron's arguments.

    Raises:
        UnsupportedError: experts, uneven stages, several types of weights, or an unknown layout.
        CorruptError: missing ranks, or buffers that contradict each other.
    """
    sizes = [size_of(flat.path, args, f"{each}_model_parallel_size") for each in ("tensor", "pipeline")]
    chunks = _grid(flat.path, whole, tables, args, *sizes)
    found: dict[str, list[Stage]] = {kind: [] for kind in STATE_KINDS}
    groups = buffers_of(flat, [len(chunks) // sizes[1]] * (sizes[0] * sizes[1]))
    for number, ranks in enumerate(chunks):
        virtual, stage = divmod(number, sizes[1])
        placed = [
            place_chunk(flat, groups, (stage * sizes[0] + rank, virtual), _orders(chunk), args)
            for rank, chunk in enumerate(ranks)
        ]
        for kind in STATE_KINDS:
            found[kind].append({name: [each[kind][name] for each in placed] for name in ranks[0]})
    return found


def size_of(path: Path, args: Mapping[str, Any], name: str) -> int:
    """A number of ranks in the arguments, 1 where they do not have it.

    Raises:
        CorruptError: it must be a positive integer.
    """
    value = 1 if args.get(name) is None else args[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
        raise CorruptError(f"{path}: the argument {name} must be a positive integer")
    return value


def _grid(
    path: Path,
    whole: MegatronCheckpoint,
    tables: Mapping[str, Tensor],
    args: Mapping[str, Any],
    tensor_size: int,
    pipeline_size: int,
) -> list[list[dict[str, Tensor]]]:
    """The weights ``[chunk in layer order][tensor rank]`` by canonical name, with the shapes that the ranks have."""
    model = whole.model
    count = num_chunks(path, model, args, pipeline_size)
    if model.get("num_experts"):
        raise UnsupportedError(f"{path}: flat optimizer buckets with experts are not supported; {REMEDY}")
    layout = layout_of(load_map(f"legacy_{model['family']}", "2"), model, foreign_vocab_size=model["padded_vocab_size"])
    stored = {item.name: item.content for item in whole.tensors}
    share = model["num_layers"] // count
    result: list[list[dict[str, Tensor]]] = [[] for _ in range(count)]
    for rank in range(tensor_size):
        mapped = {
            each.name: each.content.merge_dims(each.shape)
            for each in to_foreign(layout, stored, whole.ties, {}, rank=rank, ranks=tensor_size)
        }
        for name, table in tables.items():
            rows = table.shape[0] // tensor_size
            mapped[name] = table.narrow(0, rank * rows, (rank + 1) * rows)
        for number in range(count):
            result[number].append(_chunk(mapped, number, share, is_last=number == count - 1))
    return result


def num_chunks(path: Path, model: Mapping[str, Any], args: Mapping[str, Any], pipeline_size: int) -> int:
    """Number of chunks with equal numbers of layers: pipeline ranks times virtual stages.

    Args:
        path: of the checkpoint, for messages.
        model: the ``model`` of a manifest.
        args: Megatron's arguments.
        pipeline_size: number of pipeline ranks.

    Raises:
        CorruptError: an invalid number of virtual stages.
        UnsupportedError: chunks with different numbers of layers.
    """
    uneven = [name for name in UNEVEN if args.get(name)]
    num_layers = model["num_layers"]
    # A virtual size is stored where it was set; older releases store the layers of a chunk alone.
    per_chunk = args.get("num_layers_per_virtual_pipeline_stage")
    virtual = args.get("virtual_pipeline_model_parallel_size") or (
        num_layers // (pipeline_size * per_chunk) if isinstance(per_chunk, int) and per_chunk > 0 else 1
    )
    virtual = size_of(path, {"virtual_pipeline_model_parallel_size": virtual}, "virtual_pipeline_model_parallel_size")
    count = pipeline_size * virtual
    if (uneven and count > 1) or num_layers % count:
        reason = ", ".join(uneven) or f"{num_layers} layers on {count} stages"
        raise UnsupportedError(f"{path}: flat optimizer buckets with {reason} are not supported; {REMEDY}")
    return count


def _chunk(mapped: Mapping[str, Tensor], number: int, share: int, *, is_last: bool) -> dict[str, Tensor]:
    """The weights of one chunk of ``share`` layers; a last one apart from the embedding has a copy of a tied table."""
    found = {}
    for name, tensor in mapped.items():
        match = LAYER_NAME.match(name)
        is_first_only = name.startswith("language_model.embedding.")
        if match is not None:
            is_here = number * share <= int(match[2]) < (number + 1) * share
        else:
            is_here = number == 0 if is_first_only else is_last
        if is_here:
            found[name] = tensor
    if is_last and number and OUTPUT_LAYER not in mapped:
        found[HEAD_COPY] = mapped[WORD_TABLE]
    return found


Buffers = Mapping[tuple[int, int], Mapping[str, list[Tensor]]]


def buffers_of(flat: FlatState, counts: Sequence[int]) -> Buffers:
    """The buckets of each model-parallel rank and buffer by kind; empty for gathered state.

    Args:
        flat: the state; its buckets are flat.
        counts: for each rank the number of its buffers: that of its chunks with weights of this optimizer.

    Raises:
        CorruptError: ranks are missing, or a bucket is.
        UnsupportedError: weights of several types.
    """
    found: dict[tuple[int, int], dict[str, dict[int, Tensor]]] = {}
    types: dict[tuple[int, int], str] = {}
    for match, tensor in flat.buckets:
        key = int(match[2]), int(match[3])
        if types.setdefault(key, match[4]) != match[4]:
            raise UnsupportedError(f"{flat.path}: a buffer has weights of several types; {REMEDY}")
        if tensor.dtype != "F32" or len(tensor.shape) != 1:
            raise UnsupportedError(f"{flat.path}: {match[0]}: must be a flat float32 tensor; {REMEDY}")
        found.setdefault(key, {}).setdefault(KINDS[match[6]], {})[int(match[5])] = tensor
    ranks = {rank for rank, count in enumerate(counts) if count}
    listed = set(flat.gathered) if flat.gathered else {rank for rank, _ in found}
    # An optimizer without weights on a rank may have an empty file.
    if not ranks <= listed <= set(range(len(counts))):
        raise CorruptError(
            f"{flat.path}: has the optimizer state of the ranks {sorted(listed)[:9]}, expected {sorted(ranks)[:9]}"
        )
    if found and set(found) != {(rank, number) for rank, count in enumerate(counts) for number in range(count)}:
        raise UnsupportedError(f"{flat.path}: has other buffers than one for each chunk; {REMEDY}")
    result = {}
    for key, kinds in found.items():
        shapes = {tuple(sorted((n, tensor.shape) for n, tensor in kinds.get(kind, {}).items())) for kind in STATE_KINDS}
        numbers = sorted(kinds.get("master", {}))
        if len(shapes) != 1 or numbers != list(range(len(numbers))):
            raise CorruptError(
                f"{flat.path}: buffer {key[1]} of rank {key[0]}: a bucket of weights or moments is missing"
            )
        result[key] = {kind: [kinds[kind][n] for n in numbers] for kind in STATE_KINDS}
    return result


def place_chunk(
    flat: FlatState,
    buffers: Buffers,
    key: tuple[int, int],
    orders: Iterable[Mapping[str, Tensor]],
    args: Mapping[str, Any],
) -> Mapping[str, Mapping[str, Tensor]]:
    """The state of one chunk of one model-parallel rank, by kind and name.

    Args:
        flat: the state.
        buffers: as of :func:`buffers_of`; they are flat.
        key: the rank, and the number of its buffer.
        orders: the weights in the orders in which a module may have them, with their shapes.
        args: Megatron's arguments.

    Raises:
        CorruptError: a file of gathered state without this chunk.
        UnsupportedError: the state has none of the orders.
    """
    ordered: Mapping[str, Tensor] = {}
    for ordered in orders:
        if flat.gathered:
            placed = _gathered(flat.gathered[key[0]], key[1], ordered, args)
        else:
            flats = buffers[key]
            lengths = [each.shape[0] for each in flats["master"]]
            # Before 0.14, a bucket has the padding for its replicas; since then it ends with its last parameter.
            placed = place_buffer(flats, ordered, args, lengths) or place_buffer(flats, ordered, args, None)
        if placed is not None:
            return placed
    raise UnsupportedError(
        f"{flat.path}: flat optimizer state of the model-parallel rank {key[0]}: no known order of {len(ordered)} "
        f"weights rounds to them; {REMEDY}"
    )


def _orders(chunk: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for parts in (_OWN_NORMS, _FUSED_NORMS):

        def key(name: str, parts: Sequence[str] = parts) -> tuple[int, int, int, bool]:
            match = LAYER_NAME.match(name)
            if match is None:
                return (0 if name.startswith("language_model.embedding.") else 2, 0, 0, False)
            rest = name[match.end() :]
            at = next((i for i, part in enumerate(parts) if rest.startswith(part)), len(parts))
            return 1, int(match[2]), at, rest.endswith(".bias")

        yield {name: chunk[name] for name in sorted(chunk, key=key)}


def _gathered(
    file: TorchFile, number: int, chunk: Mapping[str, Tensor], args: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]] | None:
    """The state of one chunk in the contents of a ``distrib_optim.pt``; None where no layout fits."""
    tree = file.tree[0] if isinstance(file.tree, list) and len(file.tree) == 1 else file.tree
    if not isinstance(tree, dict) or number not in tree:
        raise CorruptError(f"{file.path}: has no optimizer state of the chunk {number}")
    # As the only chunk of a file: the order of the parameters may differ from chunk to chunk.
    lengths = tree.get("per_bucket_numel_unpadded")
    own = {"per_bucket_numel_unpadded": lengths[number : number + 1]} if isinstance(lengths, list) else {}
    part = TorchFile(path=file.path, tree={**own, 0: tree[number]}, storages=file.storages)
    try:
        found = read_world(part, [chunk], args)
    except UnsupportedError:
        return None
    return {kind: {name: tensor for (_, name), tensor in each.items()} for kind, each in found.items()}
