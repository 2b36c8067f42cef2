"""The optimizer's shards of DeepSpeed's ZeRO (``[bf16_]zero_pp_rank_D_mp_rank_M_optim_states.pt``) as whole tensors.

ZeRO 1 and 2: each group's weights lie one behind the other in a flat buffer, of which each replica has a part; newer
files tell where (``param_slice_mappings``). ZeRO 3: each replica has an equal part of every weight, padded, the parts
one behind the other over all its groups. Names and shapes are in the model's file (``param_shapes``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import short_repr
from ..errors import CorruptError, UnsupportedError
from ..tensors.views import Tensor, concatenate
from ..torch_save.pickles import Inert, TensorRef
from ..torch_save.reader import TorchFile, open_torch

SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
KINDS = ("master", "exp_avg", "exp_avg_sq")
# DeepSpeed pickles the stage as a member of its ZeroStageEnum: by value, or by name under Python 3.11.0 to 3.11.3.
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
Shapes = Sequence[Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class ZeroState:
    """The state of one model-parallel rank: tensors by kind and by the module's name, and updates done."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    steps: int


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One replica's file: flat buffers by kind, offsets of names in each (if recorded), ZeRO stage, updates."""

    file: TorchFile
    flats: Mapping[str, Sequence[Tensor]]
    slices: Sequence[Mapping[str, tuple[int, int]]]
    stage: int
    steps: int


def shard_files(directory: Path) -> dict[int, dict[int, Path]]:
    """The shards by model-parallel rank and replica."""
    found: dict[int, dict[int, Path]] = {}
    for child in directory.iterdir():
        match = SHARD.fullmatch(child.name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1])] = child
    return found


def read_zero(directory: Path, shards: Mapping[int, Path], model: TorchFile) -> ZeroState:
    """Put the state of one model-parallel rank together; no tensor's bytes are read.

    Args:
        directory: for messages.
        shards: its files by replica.
        model: the model's file, which has the shapes.

    Raises:
        CorruptError: shards are missing, or do not fit the shapes.
        UnsupportedError: state that is not Adam's.
    """
    if sorted(shards) != list(range(len(shards))):
        raise CorruptError(f"{directory}: has the optimizer's shards of the replicas {sorted(shards)}, not 0 and on")
    shapes = _shapes(model)
    parts = [_read_shard(shards[replica], model) for replica in sorted(shards)]
    first = parts[0]
    recorded = _replicas(first.file)
    if recorded is not None and recorded != len(parts):
        raise CorruptError(f"{directory}: has {len(parts)} of the optimizer's {recorded} shards")
    if any((p.stage, p.steps) != (first.stage, first.steps) for p in parts):
        raise CorruptError(f"{directory}: its optimizer's shards are of several stages of ZeRO or several steps")
    together = _third_stage if first.stage == 3 else _by_slices if first.slices else _one_behind_the_other
    tensors = {kind: together(directory, [part.flats[kind] for part in parts], shapes, parts) for kind in KINDS}
    return ZeroState(tensors=tensors, steps=first.steps)


def _shapes(model: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    held = model.tree.get("param_shapes") if isinstance(model.tree, dict) else None
    groups = [held] if isinstance(held, dict) else held
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise UnsupportedError(
            f"{model.path}: does not tell the weights' shapes (param_shapes), as DeepSpeed before 0.5"
        )
    for group in groups:
        for name, shape in group.items():
            if not isinstance(name, str) or not isinstance(shape, tuple) or not all(isinstance(n, int) for n in shape):
                raise CorruptError(f"{model.path}: param_shapes: {short_repr(name)} has the shape {short_repr(shape)}")
    return [dict(group) for group in groups]


def held_state(file: TorchFile) -> dict[str, Any]:
    """The contents of a shard; raises ``CorruptError`` where they are not the state of an optimizer."""
    held = file.tree.get("optimizer_state_dict") if isinstance(file.tree, dict) else None
    if not isinstance(held, dict):
        raise CorruptError(f"{file.path}: holds no optimizer_state_dict")
    return held


def _replicas(file: TorchFile) -> int | None:
    count = held_state(file).get("partition_count")
    count = max(count, default=None) if isinstance(count, list) else count
    return count if isinstance(count, int) else None


def _read_shard(path: Path, model: TorchFile) -> _Shard:
    file = open_torch(path)
    held = held_state(file)
    stage = _stage(held)
    refs = held.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(refs, list) or stage not in (1, 2, 3):
        raise UnsupportedError(f"{path}: holds no flat groups of float32 weights (ZeRO {short_repr(stage)})")
    base = held.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    found = _entries(path, base, len(refs))
    groups = base.get("param_groups", []) if isinstance(base, dict) else []
    flats = {"master": [_flat(file, ref, "weights") for ref in refs]}
    for kind in KINDS[1:]:
        flats[kind] = _without_padding(
            path, kind, [_flat(file, entry.get(kind), kind) for entry in found], flats["master"], held
        )
    slices = [_slices(path, group) for group in held.get("param_slice_mappings") or []]
    elastic = {"step": held.get("base_optimizer_state_step")}
    return _Shard(
        file=file, flats=flats, slices=slices, stage=stage, steps=_steps(file, [*found, *groups, elastic], model)
    )


def _stage(held: Mapping[str, Any]) -> Any:
    """The stage of ZeRO; BF16_Optimizer, which is of stage 1, does not store it."""
    value = held.get("zero_stage", 1)
    if isinstance(value, Inert) and len(value.arguments) == 1:
        value = value.arguments[0]
    return STAGES.get(value, value) if isinstance(value, str) else value


def _entries(path: Path, base: Any, count: int) -> list[Mapping[str, Any]]:
    """Adam's state of each flat group; a list in elastic checkpoints."""
    entries = base.get("state") if isinstance(base, dict) else base
    numbered = dict(enumerate(entries)) if isinstance(entries, list) else entries
    found = [numbered.get(number) if isinstance(numbered, dict) else None for number in range(count)]
    known: list[Mapping[str, Any]] = [entry for entry in found if isinstance(entry, dict)]
    if len(known) != count:
        raise UnsupportedError(f"{path}: its optimizer state is not Adam's for each group")
    return known


def _without_padding(
    path: Path, kind: str, moments: Sequence[Tensor], masters: Sequence[Tensor], held: Mapping[str, Any]
) -> list[Tensor]:
    """Moments as long as the masters: DeepSpeed cuts the padding at the end of a group off the masters alone."""
    recorded = held.get("group_paddings")
    paddings = recorded if isinstance(recorded, list) and len(recorded) == len(masters) else [0] * len(masters)
    result = []
    for moment, master, padding in zip(moments, masters, paddings, strict=True):
        length = master.shape[0]
        if moment.shape[0] not in (length, length + (padding if isinstance(padding, int) else 0)):
            raise CorruptError(f"{path}: {kind} and the weights are not of one length")
        result.append(moment.narrow(0, 0, length))
    return result


def _flat(file: TorchFile, ref: Any, what: str) -> Tensor:
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1:
        raise CorruptError(f"{file.path}: {what}: no flat buffer")
    tensor = file.tensor(ref, what)
    if tensor.dtype != "F32":
        raise UnsupportedError(f"{file.path}: {what}: in {tensor.dtype}, float32 is expected")
    return tensor


def _steps(file: TorchFile, entries: Sequence[Any], model: TorchFile) -> int:
    recorded = [file.number(entry.get("step")) for entry in entries if isinstance(entry, dict)]
    numbers = {int(number) for number in recorded if number is not None}
    if len(numbers) > 1:
        raise CorruptError(
            f"{file.path}: its optimizer says {short_repr(sorted(numbers))} updates, one number is expected"
        )
    if numbers:
        return numbers.pop()
    done, skipped = (model.tree.get(name, 0) for name in ("global_steps", "skipped_steps"))
    return done - skipped if isinstance(done, int) and isinstance(skipped, int) else 0


def _slices(path: Path, group: Any) -> dict[str, tuple[int, int]]:
    """Where each weight's part begins in the replica's buffer, and how long it is."""
    found = {}
    for name, place in (group if isinstance(group, dict) else {}).items():
        held = place.attributes if isinstance(place, Inert) else {}
        begin, count = held.get("start"), held.get("numel")
        if not isinstance(begin, int) or not isinstance(count, int) or begin < 0 or count < 0:
            raise CorruptError(
                f"{path}: param_slice_mappings: {name}: lies at {short_repr(begin)}, {short_repr(count)} elements long"
            )
        found[str(name)] = (begin, count)
    return found


def _cut(directory: Path, flat: Tensor, begin: int, count: int, what: str) -> Tensor:
    if begin + count > flat.shape[0]:
        raise CorruptError(f"{directory}: {what}: reaches element {begin + count} of a buffer of {flat.shape[0]}")
    return flat.narrow(0, begin, begin + count)


def _one_behind_the_other(
    directory: Path, flats: Sequence[Sequence[Tensor]], shapes: Shapes, shards: Sequence[_Shard]
) -> dict[str, Tensor]:
    """ZeRO 1 and 2: of each group, the replicas' parts make the buffer; what is left at its end is padding."""
    if len(flats[0]) != len(shapes) or any(len(each) != len(shapes) for each in flats):
        raise CorruptError(f"{directory}: {len(flats[0])} flat groups for {len(shapes)} groups of weights")
    found = {}
    for g, group in enumerate(shapes):
        flat, at = concatenate([each[g] for each in flats], 0), 0
        for name, shape in group.items():
            count = math.prod(shape)
            found[name] = _cut(directory, flat, at, count, name).unflatten(0, shape)
            at += count
        step = 2 * len(shards)
        if -(-at // step) != -(-flat.shape[0] // step):
            raise CorruptError(f"{directory}: group {g}: {at} elements of weights in a buffer of {flat.shape[0]}")
    return found


def _by_slices(
    directory: Path, flats: Sequence[Sequence[Tensor]], shapes: Shapes, shards: Sequence[_Shard]
) -> dict[str, Tensor]:
    """ZeRO 1 and 2, where every replica tells which parts of which weights it has."""
    found = {}
    for g, group in enumerate(shapes):
        for name, shape in group.items():
            parts = []
            for shard, each in zip(shards, flats, strict=True):
                if g < len(shard.slices) and name in shard.slices[g]:
                    begin, count = shard.slices[g][name]
                    parts.append(_cut(directory, each[g], begin, count, name))
            if sum(part.shape[0] for part in parts) != math.prod(shape):
                raise CorruptError(f"{directory}: {name}: the shards do not hold all of {list(shape)}")
            found[name] = concatenate(parts, 0).unflatten(0, shape)
    return found


def _third_stage(
    directory: Path, flats: Sequence[Sequence[Tensor]], shapes: Shapes, shards: Sequence[_Shard]
) -> dict[str, Tensor]:
    """ZeRO 3: every replica's groups one behind the other hold its part of each weight."""
    buffers = [concatenate(list(each), 0) for each in flats]
    found, at = {}, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        count = math.prod(shape)
        share = -(-count // len(shards))
        parts = [_cut(directory, flat, at, share, name) for flat in buffers]
        found[name] = concatenate(parts, 0).narrow(0, 0, count).unflatten(0, shape)
        at += share
    if any(flat.shape[0] != at for flat in buffers):
        raise CorruptError(f"{directory}: {at} elements of weights for each shard, it holds {buffers[0].shape[0]}")
    return found
