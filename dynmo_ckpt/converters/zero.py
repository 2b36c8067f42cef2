"""Merges the optimizer shards of DeepSpeed's ZeRO (``[bf16_]zero_pp_rank_D_mp_rank_M_optim_states.pt``).

ZeRO 1 and 2: the parameters of a group are concatenated into a flat buffer, and each data-parallel rank has an equal
part of the buffer. Newer files record the slices (``param_slice_mappings``)::

    group buffer   [ a a a a | b b b c | c c c c | c c pad ]     rank 0 | rank 1 | rank 2 | rank 3

ZeRO 3: each rank has an equal, padded part of every parameter, and concatenates these parts over all groups::

    rank 0  [ a a | b | c c c ]      rank 1  [ a a | b | c c pad ]

Names and shapes are in the model file (``param_shapes``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import short_repr
from ..io.errors import CorruptError, UnsupportedError, short_name
from ..tensors.views import Tensor, concatenate
from ..torch_save.pickles import OpaquePickle, TensorRef
from ..torch_save.reader import TorchFile, open_torch

SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
KINDS = ("master", "exp_avg", "exp_avg_sq")
# DeepSpeed pickles a member of its ZeroStageEnum: by value, or by name under Python 3.11.0 to 3.11.3.
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
Shapes = Sequence[Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class ZeroState:
    """The state of one model-parallel rank: tensors by kind and parameter name, and the number of optimizer steps."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    steps: int


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """The file of one data-parallel rank.

    Attributes:
        file: the file.
        flats: flat buffers by kind, one for each group.
        slices: for each group the begin and length of each parameter, in elements, where they are recorded.
        stage: the ZeRO stage.
        steps: number of optimizer steps.
    """

    file: TorchFile
    flats: Mapping[str, Sequence[Tensor]]
    slices: Sequence[Mapping[str, tuple[int, int]]]
    stage: int
    steps: int


def shard_files(directory: Path) -> dict[int, dict[int, Path]]:
    """The shards by model-parallel rank and data-parallel rank."""
    found: dict[int, dict[int, Path]] = {}
    for child in directory.iterdir():
        match = SHARD.fullmatch(child.name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1])] = child
    return found


def read_zero(directory: Path, shards: Mapping[int, Path], model: TorchFile) -> ZeroState:
    """Merge the state of one model-parallel rank; no tensor's bytes are read.

    Args:
        directory: the checkpoint, for messages.
        shards: the files by data-parallel rank.
        model: the model file, which has the shapes.

    Raises:
        CorruptError: shards are missing, or do not fit the shapes.
        UnsupportedError: the state of an optimizer other than Adam.
    """
    if sorted(shards) != list(range(len(shards))):
        raise CorruptError(
            f"{directory}: has optimizer shards of the replicas {sorted(shards)}; they must be 0 to {len(shards) - 1}"
        )
    shapes = _shapes(model)
    parts = [_read_shard(shards[replica], model) for replica in sorted(shards)]
    first = parts[0]
    recorded = _replicas(first.file)
    if recorded is not None and recorded != len(parts):
        raise CorruptError(f"{directory}: has {len(parts)} of {recorded} optimizer shards")
    if any((p.stage, p.steps) != (first.stage, first.steps) for p in parts):
        raise CorruptError(f"{directory}: its optimizer shards have different ZeRO stages or numbers of steps")
    merge = _merge_stage_3 if first.stage == 3 else _merge_mapped_slices if first.slices else _merge_flat_groups
    tensors = {kind: merge(directory, [part.flats[kind] for part in parts], shapes, parts) for kind in KINDS}
    return ZeroState(tensors=tensors, steps=first.steps)


def _shapes(model: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    recorded = model.tree.get("param_shapes") if isinstance(model.tree, dict) else None
    groups = [recorded] if isinstance(recorded, dict) else recorded
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise UnsupportedError(
            f"{model.path}: has no param_shapes, the shapes of the weights; DeepSpeed records them since 0.5"
        )
    for group in groups:
        for name, shape in group.items():
            if not isinstance(name, str) or not isinstance(shape, tuple) or not all(isinstance(n, int) for n in shape):
                raise CorruptError(f"{model.path}: param_shapes: {short_repr(name)} has the shape {short_repr(shape)}")
    return [dict(group) for group in groups]


def shard_state(file: TorchFile) -> dict[str, Any]:
    """The optimizer state of a shard.

    Raises:
        CorruptError: the shard has none.
    """
    state = file.tree.get("optimizer_state_dict") if isinstance(file.tree, dict) else None
    if not isinstance(state, dict):
        raise CorruptError(f"{file.path}: has no optimizer_state_dict")
    return state


def _replicas(file: TorchFile) -> int | None:
    count = shard_state(file).get("partition_count")
    # ZeRO 1 and 2 record one count for each group, since each may have its own process group (experts).
    counts = [each for each in (count if isinstance(count, list) else [count]) if isinstance(each, int)]
    return max(counts, default=None)


def _read_shard(path: Path, model: TorchFile) -> _Shard:
    file = open_torch(path)
    state = shard_state(file)
    stage = _stage(state)
    refs = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(refs, list) or stage not in (1, 2, 3):
        raise UnsupportedError(f"{path}: has no flat groups of float32 weights; its ZeRO stage is {short_repr(stage)}")
    # ZeRO 3 stores Adam's state under the same key as the state around it.
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    found = _entries(path, base, len(refs))
    groups = base.get("param_groups", []) if isinstance(base, dict) else []
    flats = {"master": [_flat(file, ref, "weights") for ref in refs]}
    for kind in KINDS[1:]:
        flats[kind] = _without_padding(
            path, kind, [_flat(file, entry.get(kind), kind) for entry in found], flats["master"], state
        )
    slices = [_slices(path, group) for group in state.get("param_slice_mappings") or []]
    elastic = {"step": state.get("base_optimizer_state_step")}
    return _Shard(
        file=file, flats=flats, slices=slices, stage=stage, steps=_steps(file, [*found, *groups, elastic], model)
    )


def _stage(state: Mapping[str, Any]) -> Any:
    """The ZeRO stage; BF16_Optimizer, which has stage 1, does not store it."""
    value = state.get("zero_stage", 1)
    if isinstance(value, OpaquePickle) and len(value.arguments) == 1:
        value = value.arguments[0]
    return STAGES.get(value, value) if isinstance(value, str) else value


def _entries(path: Path, base: Any, count: int) -> list[Mapping[str, Any]]:
    """Adam's state of each flat group; elastic checkpoints store a list."""
    entries = base.get("state") if isinstance(base, dict) else base
    numbered = dict(enumerate(entries)) if isinstance(entries, list) else entries
    found = [numbered.get(number) if isinstance(numbered, dict) else None for number in range(count)]
    known: list[Mapping[str, Any]] = [entry for entry in found if isinstance(entry, dict)]
    if len(known) != count:
        raise UnsupportedError(f"{path}: has no Adam state for each group; other optimizers are not supported")
    return known


def _without_padding(
    path: Path, kind: str, moments: Sequence[Tensor], masters: Sequence[Tensor], state: Mapping[str, Any]
) -> list[Tensor]:
    """Moments of the length of the masters: DeepSpeed removes the padding of a group from the masters alone."""
    recorded = state.get("group_paddings")
    paddings = recorded if isinstance(recorded, list) and len(recorded) == len(masters) else [0] * len(masters)
    result = []
    for moment, master, padding in zip(moments, masters, paddings, strict=True):
        length = master.shape[0]
        if moment.shape[0] not in (length, length + (padding if isinstance(padding, int) else 0)):
            raise CorruptError(f"{path}: {kind} and the float32 weights have different lengths")
        result.append(moment.narrow(0, 0, length))
    return result


def _flat(file: TorchFile, ref: Any, what: str) -> Tensor:
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1:
        raise CorruptError(f"{file.path}: {what}: not a flat buffer")
    tensor = file.tensor(ref, what)
    if tensor.dtype != "F32":
        raise UnsupportedError(f"{file.path}: {what}: has the type {tensor.dtype}, expected F32")
    return tensor


def _steps(file: TorchFile, entries: Sequence[Any], model: TorchFile) -> int:
    recorded = [file.number(entry.get("step")) for entry in entries if isinstance(entry, dict)]
    numbers = {int(number) for number in recorded if number is not None}
    if len(numbers) > 1:
        raise CorruptError(
            f"{file.path}: its parameter groups did {short_repr(sorted(numbers))} steps; all must have the same number"
        )
    if numbers:
        return numbers.pop()
    # DeepSpeed also counts the steps that an overflow of the loss scale skipped; Adam did not make them.
    done, skipped = (model.tree.get(name, 0) for name in ("global_steps", "skipped_steps"))
    return done - skipped if isinstance(done, int) and isinstance(skipped, int) else 0


def _slices(path: Path, group: Any) -> dict[str, tuple[int, int]]:
    """Begin and length of the part of each parameter in the buffer of this rank, in elements."""
    found = {}
    for name, place in (group if isinstance(group, dict) else {}).items():
        fields = place.attributes if isinstance(place, OpaquePickle) else {}
        begin, count = fields.get("start"), fields.get("numel")
        if not isinstance(begin, int) or not isinstance(count, int) or begin < 0 or count < 0:
            raise CorruptError(
                f"{path}: param_slice_mappings: {short_name(name)}: start {short_repr(begin)} and numel "
                f"{short_repr(count)} must be non-negative integers"
            )
        found[str(name)] = (begin, count)
    return found


def _cut(directory: Path, flat: Tensor, begin: int, count: int, what: str) -> Tensor:
    if begin + count > flat.shape[0]:
        raise CorruptError(
            f"{directory}: {short_name(what)}: ends at element {begin + count} of a buffer of {flat.shape[0]}"
        )
    return flat.narrow(0, begin, begin + count)


def _merge_flat_groups(
    directory: Path, flats: Sequence[Sequence[Tensor]], shapes: Shapes, shards: Sequence[_Shard]
) -> dict[str, Tensor]:
    """ZeRO 1 and 2: the parts of all ranks make the buffer of a group; the rest at its end is padding."""
    if len(flats[0]) != len(shapes) or any(len(each) != len(shapes) for each in flats):
        raise CorruptError(f"{directory}: has {len(flats[0])} flat groups for {len(shapes)} parameter groups")
    found = {}
    for g, group in enumerate(shapes):
        flat, at = concatenate([each[g] for each in flats], 0), 0
        for name, shape in group.items():
            count = math.prod(shape)
            found[name] = _cut(directory, flat, at, count, name).unflatten(0, shape)
            at += count
        step = 2 * len(shards)  # DeepSpeed aligns the buffer to two elements for each rank (NCCL's start alignment)
        if -(-at // step) != -(-flat.shape[0] // step):
            raise CorruptError(
                f"{directory}: group {g}: has {at} elements of parameters in a buffer of {flat.shape[0]}"
            )
    return found


def _merge_mapped_slices(
    directory: Path, flats: Sequence[Sequence[Tensor]], shapes: Shapes, shards: Sequence[_Shard]
) -> dict[str, Tensor]:
    """ZeRO 1 and 2 with recorded slices."""
    if any(len(shard.slices) > len(each) for shard, each in zip(shards, flats, strict=True)):
        raise CorruptError(f"{directory}: a shard records slices of more groups than it has")
    found = {}
    for g, group in enumerate(shapes):
        for name, shape in group.items():
            # A rank without elements of this parameter has no entry for it. The order of ranks is that of the elements.
            parts = []
            for shard, each in zip(shards, flats, strict=True):
                if g < len(shard.slices) and name in shard.slices[g]:
                    begin, count = shard.slices[g][name]
                    parts.append(_cut(directory, each[g], begin, count, name))
            if sum(part.shape[0] for part in parts) != math.prod(shape):
                raise CorruptError(
                    f"{directory}: {short_name(name)}: the shards do not have all elements of {list(shape)}"
                )
            found[name] = concatenate(parts, 0).unflatten(0, shape)
    return found


def _merge_stage_3(
    directory: Path, flats: Sequence[Sequence[Tensor]], shapes: Shapes, shards: Sequence[_Shard]
) -> dict[str, Tensor]:
    """ZeRO 3: the concatenated groups of a rank have its part of each parameter."""
    buffers = [concatenate(list(each), 0) for each in flats]
    found, at = {}, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        count = math.prod(shape)
        share = -(-count // len(shards))
        # Every rank has a share of equal length, so the last ones end with padding, which narrow removes.
        parts = [_cut(directory, flat, at, share, name) for flat in buffers]
        found[name] = concatenate(parts, 0).narrow(0, 0, count).unflatten(0, shape)
        at += share
    if any(flat.shape[0] != at for flat in buffers):
        raise CorruptError(
            f"{directory}: each shard must have {at} elements of parameters; it has {buffers[0].shape[0]}"
        )
    return found
