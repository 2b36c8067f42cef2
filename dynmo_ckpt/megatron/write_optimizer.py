"""The optimizer state of a legacy Megatron rank, as Megatron writes it: by position, in two groups. Pure.

16-bit weights have float32 masters, as in Megatron's optimizer for 16-bit weights; float32 weights have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..formats.checkpoint_rules import EXPERT_BIASES
from ..io.errors import UnsupportedError, short_names
from ..maps.name_map import Layout, MappedTensor, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import OutputTensor
from ..torch_save.writer import NewTensor
from .read_optimizer import module_order

MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = Mapping[str, Mapping[str, MappedTensor]]


def without_buffers(layout: Layout) -> Layout:
    """The layout of a model without its buffers, which have no optimizer state."""
    return replace(layout, links=tuple(link for link in layout.links if not link.native.endswith(EXPERT_BIASES)))


def mapped_moments(checkpoint: NativeCheckpoint, layout: Layout, *, rank: int, ranks: int) -> Moments:
    """Adam's moments of one tensor-parallel rank by kind and the name of the weight.

    Args:
        checkpoint: the input.
        layout: of the model.
        rank: the tensor-parallel rank.
        ranks: the tensor-parallel size.

    Raises:
        UnsupportedError: the checkpoint has no moments, or only of some weights, or the state of another optimizer.
    """
    optimizer = checkpoint.manifest["optimizer"]
    if optimizer is None:
        raise UnsupportedError(f"{checkpoint.directory}: has no optimizer state; use --no-optimizer")
    if optimizer["type"] not in ("adamw", "none"):
        raise UnsupportedError(
            f"{checkpoint.directory}: has the optimizer state of {optimizer['type']}; this format is written with that "
            "of adamw only; use --no-optimizer or --to native"
        )
    result = {}
    layout = without_buffers(layout)
    for kind in MOMENTS:
        stored = {name: checkpoint.tensors.get(f"{name}.{kind}") for name in checkpoint.names("parameter")}
        missing = [name for name, tensor in stored.items() if tensor is None]
        if missing:
            raise UnsupportedError(
                f"{checkpoint.directory}: {len(missing)} weights have no {kind}: {short_names(missing)}; use "
                "--no-optimizer"
            )
        found = {name: tensor for name, tensor in stored.items() if tensor is not None}
        mapped = to_foreign(layout, found, checkpoint.manifest["ties"], rank=rank, ranks=ranks)
        result[kind] = {each.name: each for each in mapped}
    return result


def optimizer_tree(
    chunks: Sequence[Mapping[str, MappedTensor]],
    moments: Moments,
    originals: Mapping[str, str],
    steps: Mapping[str, int],
    tensors: list[OutputTensor],
    *,
    dtype: str | None,
    fields: Sequence[Mapping[str, Any]],
    is_half: bool,
) -> dict[str, Any]:
    """The ``optimizer`` entry of the file of a rank; its tensors are appended to ``tensors``.

    Args:
        chunks: the weights of each chunk by legacy name.
        moments: as :func:`mapped_moments`.
        originals: for a copy of a weight the name of the weight whose moments it has.
        steps: number of optimizer steps by DynMo's name of the weight.
        tensors: the tensors of the file so far.
        dtype: the written type of the weights, as in safetensors; None: the type of the input.
        fields: of both parameter groups, except their members.
        is_half: the run computes in 16 bits, so that masters are expected for weights of any type.
    """
    weights = [(name, chunk[name]) for chunk in chunks for name in module_order(chunk)]
    # As in Megatron, biases and norms, which are vectors, have no weight decay.
    groups = [[pair for pair in weights if (len(pair[1].shape) > 1) is decays] for decays in (True, False)]
    state: dict[int, Any] = {}
    described, masters = [], []
    for members, about in zip(groups, fields, strict=True):
        # Numbers continue over both groups, as in the state dict of a torch optimizer.
        numbers = list(range(len(state), len(state) + len(members)))
        described.append({"params": numbers, **about})
        for number, (name, weight) in zip(numbers, members, strict=True):
            done = steps.get(weight.source_name, 0)
            original = originals.get(name, name)
            state[number] = {"step": done} | {k: _stored(moments[k][original], tensors, "F32") for k in MOMENTS}
        masters.append(members)
    inner = {"state": state, "param_groups": described}
    written = {dtype or weight.content.dtype for _, weight in weights}
    # Megatron's optimizer for float32 weights has no masters, and stores torch's state dict without an outer
    # dictionary.
    if written <= {"F32"} and not is_half:
        return inner
    copies = [[_stored(weight, tensors, "F32") for _, weight in members] for members in masters]
    return {"optimizer": inner, "fp32_from_fp16_params": copies}


def _stored(mapped: MappedTensor, tensors: list[OutputTensor], dtype: str | None = None) -> NewTensor:
    cast = None if dtype in (None, mapped.content.dtype) else dtype
    key = f"model_optim_rng/data/{len(tensors)}"
    output = OutputTensor(key=key, shape=mapped.shape, content=mapped.content, mask=mapped.mask, cast=cast)
    tensors.append(output)
    return NewTensor(len(tensors) - 1, output.dtype, mapped.shape)
