"""Quantized weights of compressed-tensors: float8, float4, integers of 8 bits, and packed integers of 4 or 8 bits.

====================  ====================================  =======================================================
format                tensors of a module                   value
====================  ====================================  =======================================================
float-quantized       weight (float8), weight_scale         code times the scale of its tensor, row, group or block
int-quantized         weight (8 bits), weight_scale         the same of integers; naive-quantized: either of them
pack-quantized        weight_packed, weight_scale,          integer of 4 or 8 bits times the scale of its group
                      weight_shape
nvfp4-pack-quantized  weight_packed, weight_scale (float8)  float4 times the scale of 16 inputs, divided by the
                      weight_global_scale                   global one
mxfp4-pack-quantized  weight_packed, weight_scale           float4 times 2^(scale - 127) of 32 inputs
====================  ====================================  =======================================================

Integers may have zero points (``weight_zero_point``, packed as the weights are), and groups of inputs in another order
(``weight_g_idx``).

Scales of activations and of the cache are left out: the weights become plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._common.document import short_repr
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
from ..io.reading import open_sources
from ..io.safetensors import QUANTIZED_BYTES
from ..tensors.computed import arrays_of, bits_of, computed_tensor
from ..tensors.views import Tensor, View
from .dequantize import BlockScaledRows, Float4Rows, PackedRows

FLOAT4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
QUANTIZED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", *FLOAT4_FORMATS)
SCALE = ".weight_scale"
PACKED = (".weight_packed", SCALE, ".weight_shape")
PACKED_BITS = (4, 8)
FLOATS = ("F32", "F16", "BF16")
ZERO, INDEX, DIVISOR = ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"
# Of activations and of the cache; zero points of symmetric weights are 0.
LEFT_OUT = (
    *(".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point", ZERO, INDEX, DIVISOR),
    *(".k_scale", ".v_scale", ".q_scale", ".input_global_scale"),
)


def _weights(config: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    """What the groups of modules state about weights."""
    groups = config["config_groups"]
    for group in groups.values() if isinstance(groups, dict) else (None,):
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CorruptError(f"config.json: {where}.config_groups must have objects with weights")
        yield weights


def check_compressed(config: Mapping[str, Any], where: str) -> None:
    """Check the configuration of quantized weights.

    Args:
        config: the ``quantization_config``.
        where: its key, for messages.

    Raises:
        CorruptError: invalid groups.
        UnsupportedError: a layout that is not read.
    """
    if config.get("format") not in QUANTIZED_FORMATS:
        raise UnsupportedError(
            f"config.json: {where}.format {short_repr(config.get('format'))}: quantized weights are read as "
            f"{', '.join(QUANTIZED_FORMATS)}; dequantize them with the program that wrote them"
        )
    sparsity = config.get("sparsity_config")
    layout = sparsity.get("format", "dense") if isinstance(sparsity, dict) else "dense"
    unread = {"sparsity_config": layout != "dense" and layout, "transform_config": config.get("transform_config")}
    for key in (key for key, value in unread.items() if value):
        raise UnsupportedError(
            f"config.json: {where}.{key} {short_repr(unread[key])}: is not read with quantized weights"
        )
    for weights in _weights(config, where):
        if not weights.get("symmetric", True) and weights.get("type", "int") != "int":
            raise UnsupportedError(
                f"config.json: {where}: floating-point weights with zero points are not read; dequantize them with the "
                "program that wrote them"
            )


def compressed_weights(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: str | None
) -> tuple[dict[str, Tensor], set[str]]:
    """The plain weights by name, and the names of the tensors that they replace.

    Args:
        tensors: by name, as they are stored.
        config: the ``quantization_config``.
        dtype: the type of the plain weights, as in safetensors; None: that of the scales.

    Raises:
        CorruptError: a part is missing, or shapes contradict each other.
        UnsupportedError: another layout.
    """
    built: dict[str, Tensor] = {}
    modules = [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]
    used = {name for name in tensors if name.endswith(LEFT_OUT)}
    packed = [module for module in modules if f"{module}{PACKED[2]}" in tensors]
    kinds = [bool(weights.get("symmetric", True)) for weights in _weights(config, "quantization_config")]
    shapes = stored_shapes({module: parts_of(tensors, module, [f"{module}{PACKED[2]}"])[0] for module in packed})
    blocks = [weights.get("block_structure") for weights in _weights(config, "quantization_config")]
    block = next((each for each in blocks if each), None)
    for module in modules:
        zero = None if all(kinds) else tensors.get(f"{module}{ZERO}")
        if zero is None and not any(kinds):
            raise CorruptError(f"{short_name(module)}: lacks {ZERO[1:]}; symmetric is false")
        if module in shapes:
            names = [f"{module}{part}" for part in PACKED]
            words, scale, _ = parts_of(tensors, module, names)
            plain = _packed(module, words, scale, shapes[module], dtype, zero, tensors.get(f"{module}{INDEX}"))
        elif f"{module}{PACKED[0]}" in tensors:
            names = [f"{module}{part}" for part in PACKED[:2]]
            words, scale = parts_of(tensors, module, names)
            plain = _float4(module, words, scale, tensors.get(f"{module}{DIVISOR}"), dtype)
        else:
            names = [f"{module}.weight", f"{module}{SCALE}"]
            weight, scale = parts_of(tensors, module, names)
            plain = _scaled(module, weight, scale, block, dtype, zero)
        built[f"{module}.weight"] = plain
        used |= set(names)
    return built, used


def _float4(module: str, words: Tensor, scale: Tensor, divisor: Tensor | None, dtype: str | None) -> Tensor:
    """Float4 with a scale for each group of a row: float8 with a divisor (NVFP4), or an exponent (MXFP4)."""
    rows, half = words.shape if len(words.shape) == 2 else (0, 0)
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    kind = ("U8", "F8_E8M0") if divisor is None else ("F8_E4M3",)
    fits = words.dtype == "U8" and scale.dtype in kind and scale.shape == (rows, groups) and groups > 0
    if not fits or (2 * half) % groups or (divisor is not None and (divisor.dtype, divisor.shape) != ("F32", (1,))):
        raise CorruptError(
            f"{short_name(module)}: packed {words.dtype} {list(words.shape)} and scales {scale.dtype} "
            f"{list(scale.shape)}{'' if divisor is None else ' with a global one'} do not fit a float4 weight"
        )
    scales = as_bytes(scale)
    compute = Float4Rows(packed=words, scale=scales, divisor=divisor, dtype=dtype or "BF16")
    inputs = (words, scales, *(() if divisor is None else (divisor,)))
    return computed_tensor(f"{module}.weight", compute.dtype, (rows, 2 * half), inputs, compute)


def _scaled(module: str, weight: Tensor, scale: Tensor, block: Any, dtype: str | None, zero: Tensor | None) -> Tensor:
    """Codes of 8 bits with a scale for the tensor, each row, each group of a row, or each block."""
    if len(weight.shape) != 2 or weight.dtype not in ("F8_E4M3", "I8") or scale.dtype not in FLOATS:
        raise UnsupportedError(
            f"{short_name(module)}: a weight {weight.dtype} {list(weight.shape)} with scales {scale.dtype} is not read"
        )
    rows, columns = weight.shape
    sizes = _block_of(scale.shape, rows, columns, block)
    if sizes is None:
        raise CorruptError(f"{short_name(module)}: scales {list(scale.shape)} do not fit a weight {[rows, columns]}")
    is_integer = weight.dtype == "I8"
    if zero is not None and (not is_integer or zero.dtype != "I8" or zero.shape != scale.shape):
        raise CorruptError(
            f"{short_name(module)}: zero points {zero.dtype} {list(zero.shape)} do not fit scales {list(scale.shape)}"
        )
    codes, flat = as_bytes(weight), _as_matrix(scale)
    zeros = None if zero is None else as_bytes(_as_matrix(zero))
    compute = BlockScaledRows(
        weight=codes, scale=flat, block=sizes, dtype=dtype or scale.dtype, is_integer=is_integer, zero=zeros
    )
    inputs = (codes, flat, *(() if zeros is None else (zeros,)))
    return computed_tensor(f"{module}.weight", compute.dtype, weight.shape, inputs, compute)


def _as_matrix(scale: Tensor) -> Tensor:
    return scale if len(scale.shape) == 2 else scale.with_unit_dims((scale.shape or (1,)) + (1,))


def _block_of(shape: Sequence[int], rows: int, columns: int, block: Any) -> tuple[int, int] | None:
    """The rows and columns that have one scale; None where the shape does not fit."""
    if tuple(shape) in ((), (1,), (1, 1)):
        return rows, columns
    if tuple(shape) in ((rows,), (rows, 1)):
        return 1, columns
    if len(shape) == 2 and shape[0] == rows and shape[1] and columns % shape[1] == 0:
        return 1, columns // shape[1]
    is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if is_block and tuple(shape) == (-(-rows // block[0]), -(-columns // block[1])):
        return block[0], block[1]
    return None


def _packed(
    module: str,
    words: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    dtype: str | None,
    zero: Tensor | None,
    index: Tensor | None,
) -> Tensor:
    """Packed integers with a scale for each group of a row, and zero points that are packed, too."""
    rows, columns = shape
    width = words.shape[1] if len(words.shape) == 2 else 0
    bits = next((bits for bits in PACKED_BITS if width == -(-columns * bits // 32)), None)
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if (
        words.dtype != "I32"
        or bits is None
        or words.shape[0] != rows
        or scale.dtype not in FLOATS
        or scale.shape != (rows, groups)
        or not groups
        or columns % groups
    ):
        raise CorruptError(
            f"{short_name(module)}: packed {words.dtype} {list(words.shape)} and scales {list(scale.shape)} do not fit "
            f"a weight {[rows, columns]} of 4 or 8 bits"
        )
    needed = {"zero points": (zero, (-(-rows * bits // 32), groups)), "g_idx": (index, (columns,))}
    for what, (part, size) in needed.items():
        if part is not None and (part.dtype, part.shape) != ("I32", size):
            raise CorruptError(
                f"{short_name(module)}: {what} {part.dtype} {list(part.shape)}: must be I32 {list(size)}"
            )
    compute = PackedRows(
        packed=words, scale=scale, bits=bits, columns=columns, dtype=dtype or scale.dtype, zero=zero, index=index
    )
    inputs = (words, scale, *(part for part in (zero, index) if part is not None))
    return computed_tensor(f"{module}.weight", compute.dtype, shape, inputs, compute)


def stored_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """The numbers of rows and columns that files store as tensors ``[2]`` or ``[2, 1]``.

    Raises:
        CorruptError: a tensor is not two integers.
    """
    for module, tensor in tensors.items():
        if tensor.dtype != "I64" or tensor.shape not in ((2,), (2, 1)):
            raise CorruptError(
                f"{short_name(module)}.shape: is {tensor.dtype} {list(tensor.shape)}; must be two integers of I64"
            )
    shapes = {}
    with open_sources([array for tensor in tensors.values() for array in arrays_of(tensor)]) as files:
        for module, tensor in tensors.items():
            rows, columns = bits_of(files, tensor).reshape(-1).astype("int64").tolist()
            shapes[module] = (rows, columns)
    return shapes


def parts_of(tensors: Mapping[str, Tensor], what: str, names: Sequence[str]) -> list[Tensor]:
    """The tensors of a module, of any shape.

    Args:
        tensors: by name.
        what: the module, for messages.
        names: of its tensors.

    Raises:
        CorruptError: one is missing.
    """
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CorruptError(f"{short_name(what)}: lacks {short_names(missing)}")
    return [tensors[name] for name in names]


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor of eight bits as one of bytes, which the copy knows, with its shape; others are unchanged."""
    if tensor.dtype not in QUANTIZED_BYTES:
        return tensor
    pieces = tuple(replace(p, view=_view_of_bytes(p.view)) for p in tensor.pieces)
    return replace(tensor, dtype="U8", pieces=pieces)


def _view_of_bytes(view: View) -> View:
    return replace(view, array=replace(view.array, dtype="U8"))
