"""Reads Adam's state from torchtitan's checkpoints, where it is by name of the parameter.

::

    optimizer.state.NAME.{step, exp_avg, exp_avg_sq}       tensors      --separate_moments, maps/titan*.json-->  moments
    optimizer.param_groups.NAME.{lr, betas, eps, ...}      objects      --_settings-->  groups, x_adam, x_torchtitan
    train_state.{step, ntokens_seen}, lr_scheduler.last_epoch           --_progress-->  step, x_torchtitan

The float32 masters are the weights themselves. ``NAME`` is the name of a parameter, not of an entry of the state dict:
torchtitan's fused modules split their weights in the state dict (``wq``, ``wk``, ``wv``), and their moments stay whole
(``wqkv``). So fused moments are split first, and then pass through the table of the weights.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .._common.document import finite_number, short_repr
from ..formats.checkpoint_rules import HALF_MOMENTS
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
from ..io.files import open_file
from ..maps.axes import axis_sizes
from ..maps.name_map import layout_of, load_map, to_native
from ..megatron.write_optimizer import without_buffers
from ..native.checkpoint import NativeCheckpoint
from ..tensors.views import Tensor
from .assemble import add_optimizer_state
from .titan_models import TitanModel, current_names

if TYPE_CHECKING:
    from .torch_dcp import DistributedCheckpoint

REMEDY = "convert the weights alone with --no-optimizer"
STATE_NAME = re.compile(r"optimizer\.state\.(.+)\.([^.]+)")
GROUP_NAME = re.compile(r"optimizer\.param_groups\.(.+)\.([^.]+)")
# Parameters of torchtitan's fused modules: attention, and the MLP and the experts of its override `fused_swiglu`.
FUSED_QKV = re.compile(r"(layers\.\d{1,9}\.attention\.qkv_linear)\.wqkv\.(weight|bias)")
FUSED_MLP = re.compile(r"(layers\.\d{1,9}\.(?:feed_forward|moe\.shared_experts))\.w13")
FUSED_EXPERTS = re.compile(r"(layers\.\d{1,9}\.moe\.routed_experts\.inner_experts)\.w13")
# Values of a parameter group that DynMo's AdamW has once for all parameters.
COMMON_SETTINGS = ("lr", "initial_lr", "betas", "eps", "fused", "foreach")
REQUIRED_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_SCALARS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i"}


@dataclass(frozen=True, kw_only=True)
class AdamState:
    """The optimizer state of a checkpoint, by name of torchtitan's parameter; a name of a fused parameter is split.

    Attributes:
        moments: for ``exp_avg`` and ``exp_avg_sq`` the tensors, each with the shape of its parameter.
        steps: number of updates.
        settings: values of the parameter group.
    """

    moments: Mapping[str, Mapping[str, Tensor]]
    steps: Mapping[str, int]
    settings: Mapping[str, Mapping[str, Any]]


def with_optimizer_state(
    found: DistributedCheckpoint,
    checkpoint: NativeCheckpoint,
    titan: TitanModel,
    drop: Sequence[str],
    wrappers: Sequence[str],
) -> NativeCheckpoint:
    """A checkpoint with the optimizer state and the progress of the run that torchtitan saved with its weights.

    Args:
        found: the input.
        checkpoint: its weights.
        titan: the model of torchtitan.
        drop: shell patterns of names that the user leaves out.
        wrappers: parts of names that PyTorch's wrappers insert.

    Raises:
        CorruptError: moments of fused or tied parameters differ, or parts of one tensor have different steps.
        UnsupportedError: the state of another optimizer, a parameter without state, moments with another shape, or
            settings that DynMo's AdamW has once for all parameters and that differ here.
    """
    model, ties = checkpoint.manifest["model"], checkpoint.manifest["ties"]
    layout = without_buffers(layout_of(load_map(titan.map, titan.variant), model))
    state = _adam_state(found, titan, model, drop, wrappers)
    parts: dict[str, list[str]] = {}
    for link in layout.links:
        if link.native not in ties:
            parts.setdefault(link.native, []).append(link.foreign)
    moments: dict[str, Tensor] = {}
    expected = dict.fromkeys(foreign for each in parts.values() for foreign in each)
    for kind in HALF_MOMENTS:
        tensors = state.moments[kind]
        missing = [name for name in expected if name not in tensors]
        if missing:
            raise UnsupportedError(
                f"{found.directory}: {len(missing)} parameters have no {kind}: {short_names(missing)}; {REMEDY}"
            )
        mapped, pairs = to_native(layout, {name: [tensor] for name, tensor in tensors.items()}, ties)
        for pair in pairs:
            _check_equal(f"{found.directory}: {kind} of {pair.what}", pair.one, pair.other)
        moments |= {f"{item.name}.{kind}": item.content for item in mapped}
    settings = _common_settings(found, {name: state.settings.get(name, {}) for name in expected})
    steps = {native: _of_parts(found, state.steps, names, "step") for native, names in parts.items()}
    decays = {name: each.get("weight_decay") for name, each in state.settings.items()}
    decay = {native: _of_parts(found, decays, names, "weight_decay") for native, names in parts.items()}
    rates = sorted(set(decay.values()), reverse=True)
    named = ["no_decay" if not rate else "decay" if not i else f"decay_{i + 1}" for i, rate in enumerate(rates)]
    groups = [
        {"name": name, "weight_decay": rate, "parameters": [each for each in parts if decay[each] == rate]}
        for name, rate in zip(named, rates, strict=True)
    ]
    progress = _progress(found)
    manifest = {**checkpoint.manifest, "tensors": dict(checkpoint.manifest["tensors"])}
    manifest["step"] = progress.pop("step", max(steps.values()))
    (beta1, beta2), eps = settings["betas"], settings["eps"]
    manifest["x_adam"] = {"beta1": beta1, "beta2": beta2, "eps": eps}
    kinds = [kind for kind in ("fused", "foreach") if settings.get(kind)]
    recorded = {name: settings[name] for name in ("lr", "initial_lr") if name in settings}
    manifest["x_torchtitan"] = {"implementation": kinds[0] if kinds else "for-loop", **recorded, **progress}
    tensors = dict(checkpoint.tensors)
    add_optimizer_state(manifest, tensors, moments, steps, groups)
    return replace(checkpoint, manifest=manifest, tensors=tensors)


def _adam_state(
    found: DistributedCheckpoint,
    titan: TitanModel,
    model: Mapping[str, Any],
    drop: Sequence[str],
    wrappers: Sequence[str],
) -> AdamState:
    """The state by current name of each parameter, fused parameters split."""
    state: dict[str, dict[str, str]] = {"step": {}, **{kind: {} for kind in HALF_MOMENTS}}
    groups: dict[str, dict[str, str]] = {}
    unknown: dict[str, None] = {}
    for name in (*found.tensors, *found.other):
        plain = name
        for wrapper in wrappers:
            plain = plain.replace(wrapper, "")
        if match := STATE_NAME.fullmatch(plain):
            if match[2] not in state:
                unknown[match[2]] = None
            else:
                state[match[2]][match[1]] = name
        elif match := GROUP_NAME.fullmatch(plain):
            groups.setdefault(match[1], {})[match[2]] = name
    if unknown:
        raise UnsupportedError(
            f"{found.directory}: the optimizer state has {short_names(unknown)}, which AdamW has not; {REMEDY}"
        )
    moments = {}
    for kind in HALF_MOMENTS:
        objects = [name for name in state[kind].values() if name not in found.tensors]
        if objects:
            raise CorruptError(f"{found.directory}: {short_names(objects)}: must be tensors")
        tensors = {parameter: found.tensors[name] for parameter, name in state[kind].items()}
        unlike = [name for name, tensor in tensors.items() if tensor.dtype not in ("F32", "BF16")]
        if unlike:
            raise UnsupportedError(
                f"{found.directory}: {kind} of {short_name(unlike[0])}: {tensors[unlike[0]].dtype}; F32 and BF16 "
                f"are supported; {REMEDY}"
            )
        separate = separate_moments(str(found.directory), tensors, model)
        moments[kind] = _selected(current_names(separate, titan), drop)

    def by_part(values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of parameters by current name, those of a fused one for each part."""
        split = {part: value for name, value in values.items() for part in _parts_of(name) or (name,)}
        return _selected(current_names(split, titan), drop)

    steps = by_part({name: _count(found, entry) for name, entry in state["step"].items()})
    settings = by_part({name: _settings(found, entries) for name, entries in groups.items()})
    return AdamState(moments=moments, steps=steps, settings=settings)


def _selected(values: Mapping[str, Any], drop: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not any(fnmatchcase(name, each) for each in drop)}


def _parts_of(name: str) -> tuple[str, ...]:
    """The names in the state dict of the parts of a fused parameter; empty for any other parameter."""
    if match := FUSED_QKV.fullmatch(name):
        return tuple(f"{match[1]}.{part}.{match[2]}" for part in ("wq", "wk", "wv"))
    if match := FUSED_MLP.fullmatch(name):
        return (f"{match[1]}.w1.weight", f"{match[1]}.w3.weight")
    if match := FUSED_EXPERTS.fullmatch(name):
        return (f"{match[1]}.w1_EFD", f"{match[1]}.w3_EFD")
    return ()


def separate_moments(source: str, tensors: Mapping[str, Tensor], model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Moments by the names of the state dict: those of fused parameters are split as torchtitan splits the weights.

    A fused matrix of queries, keys and values is ``(g t d) h``: the heads of a group, then its key and its value. Gate
    and up are the entries of the last dimension but one.

    Args:
        source: the input, for messages.
        tensors: moments by name of the parameter, each of its shape.
        model: the ``model`` of a manifest.

    Raises:
        CorruptError: the moments of a parameter are stored fused and separate, and differ.
        UnsupportedError: a fused moment with another shape.
    """
    sizes = axis_sizes(model, model["vocab_size"])
    result = {name: tensor for name, tensor in tensors.items() if not _parts_of(name)}
    for name, tensor in tensors.items():
        names = _parts_of(name)
        if not names:
            continue
        if len(names) == 3:
            rows = sizes["g"] * sizes["t"] * sizes["d"]
            is_shaped = tensor.shape in ((rows, sizes["h"]), (rows,))
        else:
            is_shaped = len(tensor.shape) >= 3 and tensor.shape[-2] == 2
        if not is_shaped:
            raise UnsupportedError(f"{source}: a moment of {short_name(name)} has the shape {list(tensor.shape)}")
        parts = _qkv_parts(tensor, sizes) if len(names) == 3 else _gate_and_up(tensor)
        for part, content in zip(names, parts, strict=True):
            if part in result:
                _check_equal(f"{source}: the moments of {short_name(part)}, separate and fused,", result[part], content)
            result[part] = content
    return result


def _qkv_parts(tensor: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
    heads = tensor.unflatten(0, [sizes["g"], sizes["t"], sizes["d"]])
    ends = (0, sizes["q"], sizes["q"] + 1, sizes["q"] + 2)
    # The inner dimensions first: a part of a group is then one run of rows.
    return [heads.narrow(1, ends[i], ends[i + 1]).flatten(1).flatten(0) for i in range(3)]


def _gate_and_up(tensor: Tensor) -> list[Tensor]:
    dim = len(tensor.shape) - 2
    shape = (*tensor.shape[:dim], tensor.shape[-1])
    return [tensor.narrow(dim, i, i + 1).with_unit_dims(shape) for i in range(2)]


def _check_equal(what: str, one: Tensor, other: Tensor) -> None:
    from ..tensors.equality import equal_bytes  # imports numpy, which listing tensor names does not need

    if not equal_bytes(one, other):
        raise CorruptError(f"{what} differ, where they must be equal")


def _of_parts(found: DistributedCheckpoint, values: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    """The value that all parts of a tensor have."""
    missing = [name for name in names if values.get(name) is None]
    if missing:
        raise UnsupportedError(f"{found.directory}: records no {what} of {short_names(missing)}; {REMEDY}")
    if len({values[name] for name in names}) > 1:
        listed = ", ".join(f"{short_name(name)} {short_repr(values[name])}" for name in names)
        raise CorruptError(f"{found.directory}: parts of one tensor differ in {what}: {listed}; {REMEDY}")
    return values[names[0]]


def _value(found: DistributedCheckpoint, name: str) -> Any:
    """An entry that is a number, a flag or a tuple; a tensor of one element counts as its element."""
    if name in found.tensors:
        return _element(found.tensors[name])
    file = found.object(name)
    number = file.number(file.tree)
    return file.tree if number is None else number


def _element(tensor: Tensor) -> int | float | None:
    """The element of a tensor of any shape with one element; None for another tensor or type."""
    kind = _SCALARS.get(tensor.dtype)
    if kind is None or math.prod(tensor.shape) != 1:
        return None
    view, width = tensor.pieces[0].view, struct.calcsize(kind)
    with open_file(view.array.path) as handle:
        handle.seek(view.array.offset + view.start * width)
        element: int | float = struct.unpack(kind, handle.read(width))[0]
    return element


def _count(found: DistributedCheckpoint, name: str) -> int:
    number = finite_number(_value(found, name))
    if number is None or number < 0 or number != int(number):
        raise CorruptError(f"{found.directory}: {short_name(name)}: must be a number of steps")
    return int(number)


def _settings(found: DistributedCheckpoint, entries: Mapping[str, str]) -> dict[str, Any]:
    """The values of the parameter group of one parameter, checked against what DynMo's AdamW computes."""
    values: dict[str, Any] = {}
    for key in (*COMMON_SETTINGS, "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"):
        if key not in entries:
            continue
        value = _value(found, entries[key])
        numbers = value if key == "betas" and isinstance(value, tuple | list) and len(value) == 2 else (value,)
        # torch has None for `fused` and `foreach` where the user has not chosen.
        is_flag = isinstance(value, bool) or (value is None and key in ("fused", "foreach"))
        is_number = not is_flag and all(finite_number(number) is not None for number in numbers)
        if not (is_number if key in ("lr", "initial_lr", "betas", "eps", "weight_decay") else is_flag):
            raise UnsupportedError(f"{found.directory}: {short_name(entries[key])} is {short_repr(value)}; {REMEDY}")
        values[key] = tuple(numbers) if key == "betas" else value
        if key in ("amsgrad", "maximize") and value:
            raise UnsupportedError(f"{found.directory}: {short_name(entries[key])} is true in the input; {REMEDY}")
    # Adam's decay is a part of the gradient, AdamW's is not. Without decay both are the same.
    if values.get("decoupled_weight_decay") is False and values.get("weight_decay"):
        name = short_name(entries["decoupled_weight_decay"])
        raise UnsupportedError(f"{found.directory}: {name} is false: Adam, where AdamW is supported; {REMEDY}")
    return values


def _common_settings(found: DistributedCheckpoint, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values that all parameters have."""
    for key in REQUIRED_SETTINGS:
        missing = [name for name, values in settings.items() if key not in values]
        if missing:
            raise UnsupportedError(f"{found.directory}: records no {key} of {short_names(missing)}; {REMEDY}")
    common: dict[str, Any] = {}
    for key in COMMON_SETTINGS:
        recorded = {values.get(key): name for name, values in settings.items()}
        if len(recorded) > 1:
            listed = ", ".join(f"{short_repr(value)} ({short_name(name)})" for value, name in recorded.items())
            raise UnsupportedError(
                f"{found.directory}: parameters differ in {key}, which DynMo has once: {listed}; {REMEDY}"
            )
        value = next(iter(recorded), None)
        if value is not None:
            common[key] = value
    return common


def _progress(found: DistributedCheckpoint) -> dict[str, int]:
    """Step, tokens and position of the schedule, where they are recorded."""
    named = {"step": "train_state.step", "ntokens_seen": "train_state.ntokens_seen"}
    named["last_epoch"] = "lr_scheduler.last_epoch"
    return {key: _count(found, n) for key, n in named.items() if n in found.tensors or n in found.places}
