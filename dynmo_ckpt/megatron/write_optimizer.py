"""The optimizer's state of a legacy Megatron rank, as Megatron writes it: by position, in two groups. Pure.

Beside 16-bit weights stand float32 masters, as its optimizer of 16-bit weights keeps them; float32 weights need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import UnsupportedError
from ..maps.name_map import Layout, Mapped, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import OutputTensor
from ..torch_save.writer import NewTensor
from .read_optimizer import module_order

MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = Mapping[str, Mapping[str, Mapped]]


def mapped_moments(checkpoint: NativeCheckpoint, layout: Layout, *, rank: int, ranks: int) -> Moments:
    """Adam's moments of one tensor rank under legacy names, by kind.

    Raises:
        UnsupportedError: a checkpoint without them, or with moments of some weights only.
    """
    if checkpoint.manifest["optimizer"] is None:
        raise UnsupportedError(f"{checkpoint.directory}: has no optimizer state that could be written")
    result = {}
    for kind in MOMENTS:
        stored = {name: checkpoint.tensors.get(f"{name}.{kind}") for name in checkpoint.names("parameter")}
        missing = [name for name, tensor in stored.items() if tensor is None]
        if missing:
            raise UnsupportedError(f"{checkpoint.directory}: {len(missing)} weights have no {kind}: {missing[:5]}")
        found = {name: tensor for name, tensor in stored.items() if tensor is not None}
        mapped = to_foreign(layout, found, checkpoint.manifest["ties"], rank=rank, ranks=ranks)
        result[kind] = {each.name: each for each in mapped}
    return result


def optimizer_tree(
    chunks: Sequence[Mapping[str, Mapped]],
    moments: Moments,
    originals: Mapping[str, str],
    optimizer: Mapping[str, Any],
    tensors: list[OutputTensor],
    *,
    dtype: str | None,
    group: Callable[[float], dict[str, Any]],
    halves: bool,
) -> dict[str, Any]:
    """What stands under ``optimizer`` in a rank's file; its tensors are appended to ``tensors``.

    Args:
        chunks: the weights of each chunk by legacy name.
        moments: as :func:`mapped_moments`.
        originals: for a copy of a weight the name of the weight whose moments it has.
        optimizer: the manifest's.
        tensors: the tensors of the file so far.
        dtype: the type that weights are written in; None: as they are.
        group: the fields of a parameter group except its members, given its weight decay.
        halves: whether the run computes in 16 bits, so that masters are expected whatever the weights' type.
    """
    weights = [(name, chunk[name]) for chunk in chunks for name in module_order(chunk)]
    groups = [[pair for pair in weights if (len(pair[1].shape) > 1) is decays] for decays in (True, False)]
    decay = max((group["weight_decay"] for group in optimizer["groups"]), default=0.0)
    state: dict[int, Any] = {}
    described, masters = [], []
    for members, weight_decay in zip(groups, (decay, 0.0), strict=True):
        numbers = list(range(len(state), len(state) + len(members)))
        described.append({"params": numbers, **group(weight_decay)})
        for number, (name, weight) in zip(numbers, members, strict=True):
            steps = optimizer["steps"].get(weight.source_name, 0)
            held = {kind: moments[kind][originals.get(name, name)] for kind in MOMENTS}
            state[number] = {"step": steps} | {kind: _stored(held[kind], tensors) for kind in MOMENTS}
        masters.append(members)
    inner = {"state": state, "param_groups": described}
    written = {dtype or weight.content.dtype for _, weight in weights}
    if written <= {"F32"} and not halves:
        return inner
    copies = [[_stored(weight, tensors, "F32") for _, weight in members] for members in masters]
    return {"optimizer": inner, "fp32_from_fp16_params": copies}


def _stored(mapped: Mapped, tensors: list[OutputTensor], dtype: str | None = None) -> NewTensor:
    cast = None if dtype in (None, mapped.content.dtype) else dtype
    key = f"model_optim_rng/data/{len(tensors)}"
    output = OutputTensor(key=key, shape=mapped.shape, content=mapped.content, mask=mapped.mask, cast=cast)
    tensors.append(output)
    return NewTensor(len(tensors) - 1, output.dtype, mapped.shape)
