"""Quantized and sparse weights of Hugging Face directories: the layouts that are read, and their tensors.

========  =======================================  ==============================================================
method    tensors of a module                      value
========  =======================================  ==============================================================
fp8       weight, weight_scale_inv                 float8 code times the scale of its block (or the only scale)
mxfp4     NAME_blocks, NAME_scales                 float4 code times 2^(scale - 127), of 32 values along the input
gptq      qweight, qzeros, scales, g_idx           (code - zero point) * scale of the input's group
awq       qweight, qzeros, scales                  as GPTQ, with 4 bits packed along the output in another order
compr.    shape, compressed, bitmask, row_offsets  pruned weights of compressed-tensors (:mod:`.bitmask`)
compr.    weight, weight_packed, weight_scale      float8 or integer times a scale (:mod:`.compressed`)
========  =======================================  ==============================================================

The weights become tensors under their plain names that are computed while they are read (:mod:`.dequantize`), in the
type of the model's configuration. Every other method, and every other layout of these methods, is refused by name: its
numbers would be read wrongly without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .._common.document import short_repr
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
from ..io.safetensors import QUANTIZED_BYTES
from ..tensors.computed import computed_tensor
from ..tensors.views import Tensor
from .bitmask import GROUP, BitmaskRows
from .compressed import QUANTIZED_FORMATS, as_bytes, check_compressed, compressed_weights, parts_of, stored_shapes
from .dequantize import AwqRows, BlockScaledRows, GptqRows, MicroscaledRows
from .files import is_conv1d

KEY = "quantization_config"
SPARSE = "compressed-tensors"
METHODS = ("fp8", "mxfp4", "gptq", "awq", SPARSE)
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
FLOATS = ("F32", "F16", "BF16")
SPARSE_FORMATS = ("sparse-24-bitmask", "sparse-bitmask", "dense")
_SPARSITY_KEYS = (
    *("format", "targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass"),
)
GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
# Keys that do not change the numbers in the files: how they were found, and which kernel computes with them.
_PROVENANCE = (
    *(
        "quant_method",
        "modules_to_not_convert",
        "dequantize",
        "meta",
        "quantizer",
        "dataset",
        "tokenizer",
        "batch_size",
    ),
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "desc_act", "sym", "model_seqlen"),
    *("model_name_or_path", "model_file_base_name", "use_cuda_fp16", "block_name_to_quantize", "use_exllama"),
    *("module_name_preceding_first_block", "pad_token_id", "max_input_length", "exllama_config", "backend"),
    *("cache_block_outputs", "modules_in_block_to_quantize", "mse", "lm_head", "act_group_aware", "disable_exllama"),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "offload_to_disk", "scale_fmt", "group_size", "bits"),
)
# Keys that change the layout, with the values that are read; the first is that of a missing key.
_LAYOUT: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "activation_scheme": ("dynamic", "static"),
        "weight_block_size": (),
    },
    "mxfp4": {},
    "gptq": {
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "format": ("gptq", "gptq_v2", None),
        "pack_dtype": ("int32", None),
        "is_marlin_format": (False,),
        "dynamic": (),
    },
    "awq": {"version": ("gemm", "GEMM", None), "zero_point": (True,)},
    SPARSE: {
        "format": ("dense", None, *QUANTIZED_FORMATS),
        **dict.fromkeys(("version", "sparsity_config", "ignore", "config_groups", "quantization_status"), ()),
        **dict.fromkeys(("global_compression_ratio", "kv_cache_scheme", "transform_config"), ()),
    },
}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the weights of a directory are quantized.

    Attributes:
        method: one of ``METHODS``.
        config: the ``quantization_config``.
        dtype: the type of the dequantized weights, as in safetensors; None: that of the scales.
        transposed: whether the plain weights of blocks are ``[in, out]``, as in GPT-2.
    """

    method: str
    config: Mapping[str, Any]
    dtype: str | None
    transposed: bool


def quantization_of(config: Mapping[str, Any], ignored: Sequence[str] = ()) -> Quantization | None:
    """How the weights of a model are quantized; None where they are not.

    Args:
        config: the contents of ``config.json``.
        ignored: shell patterns of keys that are not checked; those of the quantization as ``quantization_config.KEY``.

    Raises:
        CorruptError: the keys are invalid.
        UnsupportedError: a method or a layout that is not read, or an unknown key.
    """
    found = config.get(KEY)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise CorruptError(f"config.json: {KEY} must be an object, found {short_repr(found)}")
    method = found.get("quant_method")
    if method not in METHODS:
        raise UnsupportedError(
            f"config.json: {KEY}.quant_method {short_repr(method)}: must be one of {', '.join(METHODS)}; dequantize "
            "the weights with the program that wrote them"
        )
    layout = _LAYOUT[method]
    for key, values in layout.items():
        if values and found.get(key, values[0]) not in values:
            raise UnsupportedError(
                f"config.json: {KEY}.{key} {short_repr(found[key])}: the layout of {method} is read with "
                f"{' or '.join(str(value) for value in values if value is not None)} only"
            )
    unknown = [
        key
        for key in found
        if key not in {*_PROVENANCE, *layout} and not any(fnmatchcase(f"{KEY}.{key}", each) for each in ignored)
    ]
    if unknown:
        raise UnsupportedError(
            f"config.json: {KEY}: no rule for {short_names(unknown)}; an unknown key may change the layout; "
            f"--ignore-config {KEY}.KEY ignores it"
        )
    _check_numbers(method, found)
    if method == SPARSE:
        _check_sparsity(found, ignored)
    dtype = TYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    return Quantization(method=method, config=found, dtype=dtype, transposed=config.get("model_type") == "gpt2")


def _check_numbers(method: str, config: Mapping[str, Any]) -> None:
    if method in ("gptq", "awq"):
        bits, group = config.get("bits"), config.get("group_size", 128)
        allowed = GPTQ_BITS if method == "gptq" else (AWQ_BITS,)
        if bits not in allowed or isinstance(bits, bool):
            raise UnsupportedError(
                f"config.json: {KEY}.bits {short_repr(bits)}: {method} is read with {', '.join(map(str, allowed))} bits"
            )
        if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
            raise CorruptError(f"config.json: {KEY}.group_size {short_repr(group)}: must be a positive integer or -1")
    kinds = {config[key] for key in ("checkpoint_format", "format") if config.get(key) is not None}
    if len(kinds) > 1:
        raise CorruptError(f"config.json: {KEY}.format and checkpoint_format are the same setting; they must be equal")
    # A rule that begins with -: leaves modules in their plain type; others change bits or groups of single modules.
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not str(rule).startswith("-:") for rule in dynamic):
        raise UnsupportedError(f"config.json: {KEY}.dynamic: bits or groups of single modules are not read")
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise CorruptError(f"config.json: {KEY}.weight_block_size {short_repr(block)}: must be two positive integers")


def _check_sparsity(config: Mapping[str, Any], ignored: Sequence[str]) -> None:
    sparsity = config.get("sparsity_config")
    if config.get("config_groups"):
        check_compressed(config, KEY)
        return
    if sparsity is None or config.get("format") in QUANTIZED_FORMATS:
        raise UnsupportedError(
            f"config.json: {KEY}: {SPARSE} without config_groups needs the sparsity_config of sparse weights"
        )
    if not isinstance(sparsity, dict):
        raise CorruptError(f"config.json: {KEY}.sparsity_config must be an object, found {short_repr(sparsity)}")
    if sparsity.get("format") not in SPARSE_FORMATS:
        raise UnsupportedError(
            f"config.json: {KEY}.sparsity_config.format {short_repr(sparsity.get('format'))}: must be one of "
            f"{', '.join(SPARSE_FORMATS)}"
        )
    unknown = [
        key
        for key in sparsity
        if key not in _SPARSITY_KEYS and not any(fnmatchcase(f"{KEY}.sparsity_config.{key}", each) for each in ignored)
    ]
    if unknown:
        raise UnsupportedError(
            f"config.json: {KEY}.sparsity_config: no rule for {short_names(unknown)}; "
            f"--ignore-config {KEY}.sparsity_config.KEY ignores it"
        )


def dequantized_tensors(
    tensors: Mapping[str, Tensor], quantization: Quantization | None
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a directory with plain weights in place of quantized ones, and remarks for the user.

    Args:
        tensors: by name, as they are stored; float8 has the type that the file records.
        quantization: how they are quantized; None: they are not.

    Raises:
        CorruptError: a part of a weight is missing, or shapes and types contradict each other.
        UnsupportedError: a float8 tensor without a scale, or another layout.
    """
    found = dict(tensors)
    if quantization is None:
        return found, []
    build = {"fp8": _fp8, "mxfp4": _mxfp4, "gptq": _gptq, "awq": _awq, SPARSE: _sparse}[quantization.method]
    is_compressed = quantization.method == SPARSE and bool(quantization.config.get("config_groups"))
    built, used = (
        compressed_weights(found, quantization.config, quantization.dtype)
        if is_compressed
        else build(found, quantization)
    )
    clashes = sorted((set(found) - used) & set(built))
    if clashes:
        raise CorruptError(f"{short_names(clashes)}: stored both plain and quantized")
    rest = {name: tensor for name, tensor in found.items() if name not in used}
    unscaled = sorted(name for name, tensor in rest.items() if tensor.dtype in QUANTIZED_BYTES)
    if unscaled:
        raise UnsupportedError(
            f"{len(unscaled)} tensors have the type {rest[unscaled[0]].dtype} and no scale: {short_names(unscaled)}"
        )
    remark = f"{len(built)} quantized weights ({quantization.method}) are dequantized while they are read"
    if is_compressed:
        remark += "; what quantizes activations is left out"
    elif quantization.method == SPARSE:
        layout = quantization.config["sparsity_config"]["format"]
        remark = f"{len(built)} sparse weights ({layout}) are decompressed while they are read"
    return {**rest, **built}, [remark]


Built = tuple[dict[str, Tensor], set[str]]


def _fp8(tensors: Mapping[str, Tensor], how: Quantization) -> Built:
    built, used = {}, set()
    block = how.config.get("weight_block_size")
    for scale_name in [name for name in tensors if name.endswith("_scale_inv")]:
        name = scale_name.removesuffix("_scale_inv")
        weight, scale = parts_of(tensors, name, (name, scale_name))
        rows, columns = _matrix(name, weight, ("F8_E4M3",))
        expected: tuple[int, ...] = ()
        if block is not None:
            expected = (-(-rows // block[0]), -(-columns // block[1]))
        has_one = not expected and scale.shape in ((), (1,), (1, 1))
        if scale.dtype not in (*FLOATS, "F8_E8M0", "U8") or not (has_one or scale.shape == expected):
            raise CorruptError(
                f"{short_name(scale_name)}: {scale.dtype} {list(scale.shape)} does not fit a weight "
                f"{list(weight.shape)} in blocks of {'its size' if block is None else block}"
            )
        # A scale of one element counts as one block that covers the matrix.
        sizes = (rows, columns) if block is None else (block[0], block[1])
        flat = as_bytes(scale).with_unit_dims((1, 1)) if has_one else as_bytes(scale)
        codes = as_bytes(weight)
        compute = BlockScaledRows(weight=codes, scale=flat, block=sizes, dtype=how.dtype or "BF16")
        built[name] = computed_tensor(name, compute.dtype, weight.shape, (codes, flat), compute)
        used |= {name, scale_name}
        # The scale of activations, which the computation with plain weights has no use for.
        used |= {each for each in (f"{name.removesuffix('.weight')}.activation_scale",) if each in tensors}
    return built, used


def _mxfp4(tensors: Mapping[str, Tensor], how: Quantization) -> Built:
    built, used = {}, set()
    for blocks_name in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks_name.removesuffix("_blocks")
        blocks, scales = parts_of(tensors, name, (blocks_name, f"{name}_scales"))
        shape = blocks.shape
        if len(shape) != 4 or shape[3] != 16 or scales.shape != shape[:3] or {blocks.dtype, scales.dtype} != {"U8"}:
            raise CorruptError(
                f"{short_name(blocks_name)}: {blocks.dtype} {list(shape)} and scales {scales.dtype} "
                f"{list(scales.shape)}: must be U8 [experts, rows, groups, 16] and U8 [experts, rows, groups]"
            )
        compute = MicroscaledRows(blocks=blocks, scales=scales, dtype=how.dtype or "BF16")
        stored = (*shape[:2], shape[2] * 32)
        # [experts, out, in] in the file; the plain weight of GPT-OSS is [experts, in, out].
        plain = computed_tensor(name, compute.dtype, stored, (blocks, scales), compute)
        built[name] = plain.permute((0, 2, 1))
        used |= {blocks_name, f"{name}_scales"}
    return built, used


def _gptq(tensors: Mapping[str, Tensor], how: Quantization) -> Built:
    built, used = {}, set()
    bits, group = how.config["bits"], how.config.get("group_size", 128)
    version = how.config.get("checkpoint_format") or how.config.get("format") or "gptq"
    for qweight_name in [name for name in tensors if name.endswith(".qweight")]:
        module = qweight_name.removesuffix(".qweight")
        names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
        qweight, qzeros, scales = parts_of(tensors, module, names)
        words, columns = _matrix(qweight_name, qweight, ("I32",))
        rows, left_bits = divmod(words * 32, bits)
        size = rows if group == -1 else group
        groups = -(-rows // size)
        index = tensors.get(f"{module}.g_idx")
        shapes = (qzeros.dtype, qzeros.shape, scales.dtype in FLOATS, scales.shape)
        indexed = index is None or (index.dtype, index.shape) == ("I32", (rows,))
        expected = ("I32", (groups, columns * bits // 32), True, (groups, columns))
        if left_bits or columns * bits % 32 or shapes != expected or not indexed:
            raise CorruptError(f"{short_name(module)}: shapes of a weight with {bits} bits contradict each other")
        compute = GptqRows(
            name=module,
            qweight=qweight,
            qzeros=qzeros,
            scales=scales,
            index=index,
            bits=bits,
            group_size=size,
            # The first format stores zero points less 1.
            zero_offset=1 if version == "gptq" else 0,
            dtype=how.dtype or scales.dtype,
        )
        inputs = (qweight, qzeros, scales, *(() if index is None else (index,)))
        plain = computed_tensor(f"{module}.weight", compute.dtype, (columns, rows), inputs, compute)
        built[f"{module}.weight"] = plain.permute((1, 0)) if how.transposed and is_conv1d(module) else plain
        used |= {*names, *(() if index is None else (f"{module}.g_idx",))}
    return built, used


def _awq(tensors: Mapping[str, Tensor], how: Quantization) -> Built:
    built, used = {}, set()
    group = how.config.get("group_size", 128)
    for qweight_name in [name for name in tensors if name.endswith(".qweight")]:
        module = qweight_name.removesuffix(".qweight")
        names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
        qweight, qzeros, scales = parts_of(tensors, module, names)
        rows, words = _matrix(qweight_name, qweight, ("I32",))
        size = rows if group == -1 else group
        groups = -(-rows // size)
        shapes = (qzeros.dtype, qzeros.shape, scales.dtype in FLOATS, scales.shape)
        if shapes != ("I32", (groups, words), True, (groups, words * 8)):
            raise CorruptError(
                f"{short_name(module)}: shapes contradict each other, or the layout is not that of AWQ's gemm"
            )
        compute = AwqRows(
            qweight=qweight, qzeros=qzeros, scales=scales, group_size=size, dtype=how.dtype or scales.dtype
        )
        plain = computed_tensor(
            f"{module}.weight", compute.dtype, (words * 8, rows), (qweight, qzeros, scales), compute
        )
        built[f"{module}.weight"] = plain.permute((1, 0)) if how.transposed and is_conv1d(module) else plain
        used |= set(names)
    return built, used


def _sparse(tensors: Mapping[str, Tensor], how: Quantization) -> Built:
    built: dict[str, Tensor] = {}
    used: set[str] = set()
    layout = how.config["sparsity_config"]["format"]
    parts = ("shape", "compressed", "bitmask", *(("row_offsets",) if layout == "sparse-bitmask" else ()))
    if layout == "dense":
        return built, used
    modules = {name.rpartition(".")[0]: None for name in tensors if name.endswith(tuple(f".{part}" for part in parts))}
    found = {module: parts_of(tensors, module, [f"{module}.{part}" for part in parts]) for module in modules}
    shapes = stored_shapes({module: tensors[0] for module, tensors in found.items()})
    for module, (_, compressed, bitmask, *offsets) in found.items():
        rows, columns = shapes[module]
        if compressed.dtype not in FLOATS:
            raise UnsupportedError(
                f"{short_name(module)}.compressed: has the type {compressed.dtype}; sparse weights are read with "
                f"{', '.join(FLOATS)}"
            )
        is_fitting = min(rows, columns) > 0 and (bitmask.dtype, bitmask.shape) == ("U8", (rows, -(-columns // 8)))
        if offsets:
            is_fitting &= len(compressed.shape) == 1 and (offsets[0].dtype, offsets[0].shape) == ("I64", (rows,))
        else:
            is_fitting &= columns % GROUP == 0 and compressed.shape == (rows, columns // 2)
        if not is_fitting:
            raise CorruptError(
                f"{short_name(module)}: the parts of a sparse weight {[rows, columns]} contradict each other: "
                f"compressed {list(compressed.shape)}, bitmask {bitmask.dtype} {list(bitmask.shape)}"
            )
        compute = BitmaskRows(
            name=module,
            compressed=compressed,
            bitmask=bitmask,
            offsets=offsets[0] if offsets else None,
            columns=columns,
        )
        inputs = (compressed, bitmask, *offsets)
        name = f"{module}.weight"
        built[name] = computed_tensor(name, compressed.dtype, (rows, columns), inputs, compute)
        used |= {f"{module}.{part}" for part in parts}
    return built, used


def _matrix(name: str, tensor: Tensor, dtypes: Sequence[str]) -> tuple[int, int]:
    if len(tensor.shape) != 2 or tensor.dtype not in dtypes:
        raise CorruptError(
            f"{short_name(name)}: is {tensor.dtype} {list(tensor.shape)}; a quantized weight must be a matrix of the "
            f"type {' or '.join(dtypes)}"
        )
    return tensor.shape[0], tensor.shape[1]
