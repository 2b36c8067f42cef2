"""Averages checkpoints of one model: plain, weighted, or as an exponential moving average (EMA).

Each weight is summed in float64 while it is read, a chunk of rows at a time, and rounded once to its type; memory does
not grow with the model or with the number of checkpoints. All inputs must be checkpoints of the same model: the same
sizes and settings, names, shapes and types, ties and masks. Sources: weight averaging (Izmailov et al. 2018,
arXiv:1803.05407), EMA (Polyak and Juditsky 1992).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .._common.errors import UsageError
from ..converters import NOT_WRITTEN
from ..converters.registry import get_format, open_and_report
from ..formats.choices import AUTO, ReadOptions, WriteOptions
from ..io.errors import UnsupportedError, short_names
from ..io.reading import SourceFiles, Words
from ..io.uploads import check_output
from ..maps.decoder_fields import DECODERS, decoder_fields
from ..native.checkpoint import NativeCheckpoint
from ..tensors.computed import bits_of, computed_tensor, floats_of
from ..tensors.equality import equal_bytes
from ..tensors.tiled_copy import cast
from ..tensors.views import Tensor
from .convert import check_options
from .overwrite import replaced_check
from .write import WriteSettings, write_export

FLOATS = ("F64", "F32", "F16", "BF16")
# Computed by the conversion, or of no meaning for the model.
NOT_COMPARED = ("padded_vocab_size",)


@dataclass(frozen=True, kw_only=True)
class AveragedRows:
    """The sum of ``tensors``, each ``[R, C]`` of one type, times ``shares``; in float64, rounded to that type."""

    tensors: tuple[Tensor, ...]
    shares: tuple[float, ...]

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        dtype = self.tensors[0].dtype
        total = np.zeros((end - begin, self.tensors[0].shape[1]))
        with np.errstate(all="ignore"):  # infinities and NaN are averaged to what IEEE 754 gives
            for tensor, share in zip(self.tensors, self.shares, strict=True):
                part = tensor.narrow(0, begin, end)
                numbers = bits_of(files, part).view(np.float64) if dtype == "F64" else floats_of(files, part)
                # Converted first: a product of a Python number and float32 is rounded to float32.
                total += share * numbers.astype(np.float64)
            return total.view(np.uint64) if dtype == "F64" else cast(total.view(np.uint64), "F64", dtype)


def average(
    sources: Sequence[Path],
    target: Path,
    *,
    target_format: str,
    weights: Sequence[float] | None,
    decay: float | None,
    read: ReadOptions,
    write: WriteOptions,
    settings: WriteSettings,
) -> None:
    """Write the average of checkpoints of one model; optimizer states are left out.

    Args:
        sources: at least two checkpoints of any formats, the oldest first.
        target: the new directory.
        target_format: the format of the output.
        weights: a weight for each source, divided by their sum; None: equal ones. Excludes ``decay``.
        decay: of the EMA, in (0, 1): each checkpoint counts 1 - decay, all before it decay; None: no EMA.
        read: how to open the inputs.
        write: topology and weight type of the output.
        settings: how to write.

    Raises:
        UsageError: fewer than two sources, invalid weights, or options that the format does not have.
        UnsupportedError: the sources are not checkpoints of one model.
        DynmoError: the errors of reading, planning and writing, by exit code.
    """
    shares = shares_of(len(sources), weights, decay)
    output = get_format(target_format, NOT_WRITTEN)
    check_options(output, write, with_optimizer=False)
    checkpoints = [open_and_report(source, AUTO, read) for source in sources]
    inputs = tuple(checkpoint.directory for checkpoint in checkpoints)
    further = (path for path in (read.config, write.tokenizer) if path is not None)
    settings = replace(settings, inputs=(*inputs, *read.adapters, *further))
    # Before the weights are compared: a wrong output costs no time.
    check_output(target, inputs, check=replaced_check(settings.inputs) if settings.overwrite else None)
    averaged = average_of(checkpoints, shares)
    if output.write is None:  # refused by check_options; narrows the type
        raise UsageError(f"--to {output.name}: can only be read")
    plan = output.write(averaged, replace(write, with_optimizer=False))
    listed = [
        {"source": str(checkpoint.directory), "weight": share}
        for checkpoint, share in zip(checkpoints, shares, strict=True)
    ]
    plan = replace(plan, decisions={**plan.decisions, "averaged": listed})
    write_export(averaged.directory, target, plan, settings)


def shares_of(count: int, weights: Sequence[float] | None, decay: float | None) -> tuple[float, ...]:
    """The share of each checkpoint in the average; their sum is 1.

    Args:
        count: number of checkpoints.
        weights: a weight for each, or None.
        decay: of an EMA over the checkpoints in their order, or None.

    Raises:
        UsageError: fewer than two checkpoints, or invalid or contradicting weights.
    """
    if count < 2:
        raise UsageError("average: needs at least two checkpoints")
    if weights is not None and decay is not None:
        raise UsageError("--weights and --ema: give one of them")
    if decay is not None:
        if not 0 < decay < 1:
            raise UsageError(f"--ema {decay}: must be in (0, 1)")
        # The first checkpoint is the begin of the average, so it has the rest of the sum.
        return (decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - at) for at in range(1, count)))
    listed = [1.0] * count if weights is None else list(weights)
    if len(listed) != count:
        raise UsageError(f"--weights: must have one number for each of {count} checkpoints; has {len(listed)}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in listed) or not 0 < sum(listed) < math.inf:
        raise UsageError("--weights: must be finite numbers, at least 0, with a sum above 0")
    return tuple(weight / sum(listed) for weight in listed)


def average_of(checkpoints: Sequence[NativeCheckpoint], shares: Sequence[float]) -> NativeCheckpoint:
    """The average as a checkpoint whose weights are computed while they are read.

    Args:
        checkpoints: of one model; step and progress are those of the last one.
        shares: the share of each.

    Raises:
        UnsupportedError: they are not checkpoints of one model.
    """
    first, last = checkpoints[0], checkpoints[-1]
    for other in checkpoints[1:]:
        _check_same(first, other)
    entries = {
        name: entry
        for name, entry in last.manifest["tensors"].items()
        if entry["role"] in ("parameter", "buffer", "mask") and ".memory." not in name
    }
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if entry["role"] == "mask" or entry["dtype"] not in FLOATS:
            tensors[name] = first.tensors[name]
            continue
        shape = tuple(entry["shape"])
        columns = shape[-1] if shape else 1
        parts = tuple(
            each.tensors[name].merge_dims((math.prod(shape) // max(1, columns), columns)) for each in checkpoints
        )
        compute = AveragedRows(tensors=parts, shares=tuple(shares))
        tensors[name] = computed_tensor(name, entry["dtype"], shape or (1,), parts, compute)
        if not shape:
            tensors[name] = tensors[name].with_unit_dims(())
    manifest = {**last.manifest, "tensors": entries, "optimizer": None}
    return NativeCheckpoint(directory=last.directory, manifest=manifest, tensors=tensors)


def _check_same(one: NativeCheckpoint, other: NativeCheckpoint) -> None:
    """Refuse a checkpoint of another model."""
    place = f"{one.directory} and {other.directory}"
    models = [_compared(each.manifest["model"]) for each in (one, other)]
    unlike = sorted(key for key in models[0] | models[1] if models[0].get(key) != models[1].get(key))
    if unlike:
        raise UnsupportedError(f"{place}: are different models: {short_names(unlike)} differ")
    if one.manifest["ties"] != other.manifest["ties"]:
        raise UnsupportedError(f"{place}: have different tied weights")
    listed = [
        {
            name: (entry["dtype"], tuple(entry["shape"]), entry["role"])
            for name, entry in each.manifest["tensors"].items()
            if entry["role"] in ("parameter", "buffer", "mask") and ".memory." not in name
        }
        for each in (one, other)
    ]
    differing = sorted(name for name in listed[0] | listed[1] if listed[0].get(name) != listed[1].get(name))
    if differing:
        raise UnsupportedError(f"{place}: have different tensors, shapes or types: {short_names(differing)}")
    # An average of different masks would have more weights than each, and that of whole numbers is none.
    exact = [name for name, (dtype, _, role) in listed[0].items() if role == "mask" or dtype not in FLOATS]
    for name in exact:
        shape = listed[0][name][1]
        if not equal_bytes(one.tensors[name].merge_dims(shape), other.tensors[name].merge_dims(shape)):
            raise UnsupportedError(f"{place}: {short_names([name])} must be equal")


def _compared(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is, whatever its manifest leaves to the defaults of its family: a GPT may be a Llama by fields."""
    fields = {key: value for key, value in model.items() if key not in NOT_COMPARED}
    if model["family"] not in DECODERS:
        return fields
    heads = model["num_attention_heads"]
    sizes = {"num_key_value_heads": heads, "head_dim": model["hidden_size"] // heads}
    return {**sizes, **decoder_fields(model), **fields, "family": "decoder"}
