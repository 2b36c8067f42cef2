"""The files of a Hugging Face directory: configuration, weights with their index, generation settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, encode_json, parse_any_json
from ..io.errors import CorruptError, UnsupportedError, errors_of, short_names
from ..io.files import read_file
from ..io.safetensors import read_index
from ..maps.name_map import MappedTensor
from ..tensors.copy_plan import OutputTensor, SafetensorsFile, safetensors_file, shard_by_size
from ..tensors.views import Tensor, as_tensor
from ..torch_save.pickles import TensorRef
from ..torch_save.reader import open_torch
from .config_keys import with_known_type
from .text_part import text_config

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# Only for the message about a directory with weights of another kind.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
# What torch.compile, activation checkpointing and FSDP insert into the names of parameters, and DDP before them.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
DATA_PARALLEL = "module."
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of ``config.json``, of a model of images those of its text; remote code is ignored.

    Raises:
        CorruptError: the file is missing, or not a JSON object.
    """
    config = json_object(directory / "config.json")
    with errors_of(directory / "config.json"):
        return with_known_type(text_config(config))


def raw_type(directory: Path) -> Any:
    """The ``model_type`` that ``config.json`` states, which may be another name of a known one.

    Raises:
        CorruptError: as of ``read_config``.
    """
    return json_object(directory / "config.json").get("model_type")


def without_wrappers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the plain module, without those of torch.compile, FSDP, DDP and checkpointing.

    Args:
        tensors: by name, of any shape.

    Raises:
        CorruptError: two tensors have the same name then.
    """
    plain = dict(tensors)
    for wrapper in WRAPPERS:
        plain = {name.replace(wrapper, ""): tensor for name, tensor in plain.items()}
    if plain and all(name.startswith(DATA_PARALLEL) for name in plain):
        plain = {name.removeprefix(DATA_PARALLEL): tensor for name, tensor in plain.items()}
    if len(plain) < len(tensors):
        raise CorruptError("tensors have the same names without those of wrappers, such as _orig_mod")
    return plain


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """The contents of ``generation_config.json``; None where the file is missing.

    Raises:
        CorruptError: the file is not a JSON object.
    """
    path = directory / "generation_config.json"
    return json_object(path) if path.exists() else None


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CorruptError: the file is missing or too large, or has no object.
    """
    try:
        config = parse_any_json(read_file(path))
    except ValueError as error:
        raise CorruptError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptError(f"{path}: must be a JSON object")
    return config


def read_tensors(directory: Path, *, quantized: bool = False) -> dict[str, Tensor]:
    """The tensors of the weight files of a directory, lazily.

    As in transformers, ``model.safetensors`` has precedence over ``pytorch_model.bin``, and a single file over an
    index, which may be of an earlier export. No pickle is executed.

    Args:
        directory: a Hugging Face directory.
        quantized: also index float8, whose numbers need scales.

    Raises:
        CorruptError: a file is missing or broken, or does not fit the index.
        UnsafePickleError: ``pytorch_model.bin`` refers to more than plain data.
        UnsupportedError: a type that DynMo does not read.
    """
    safetensors = _quantized_safetensors if quantized else safetensors_tensors
    for name, read in zip(WEIGHT_FILES, (safetensors, torch_tensors), strict=True):
        if (directory / name).exists():
            return read(directory / name)
        if (directory / f"{name}.index.json").exists():
            return _indexed(directory / f"{name}.index.json", read)
    if absent := [path.name for path in directory.glob("*") if path.is_symlink() and not path.exists()]:
        raise CorruptError(
            f"{directory}: {short_names(sorted(absent))}: links to missing files; download the model again, as with "
            "`hf download`"
        )
    others = sorted(path.name for path in directory.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    raise CorruptError(
        f"{directory}: must have model.safetensors or pytorch_model.bin, or an index of such files"
        + (f"; it has {short_names(others)}" if others else "")
    )


def safetensors_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, with the errors of ``read_index``."""
    return {key: as_tensor(array) for key, array in read_index(path).arrays.items()}


def _quantized_safetensors(path: Path) -> dict[str, Tensor]:
    return {key: as_tensor(array) for key, array in read_index(path, quantized=True).arrays.items()}


def torch_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict that ``torch.save`` wrote.

    Raises:
        CorruptError: the file is missing or broken, or has no state dict.
        UnsafePickleError: it refers to more than plain data.
        UnsupportedError: the state dict is nested.
    """
    file = open_torch(path)
    if not isinstance(file.tree, dict):
        raise CorruptError(f"{path}: has a {type(file.tree).__name__} in place of a state dict")
    others = [str(key) for key, value in file.tree.items() if not isinstance(value, TensorRef)]
    if others:
        raise UnsupportedError(f"{path}: not a flat state dict: {short_names(others)} are not tensors")
    return {str(key): file.tensor(ref, str(key)) for key, ref in file.tree.items()}


def is_conv1d(name: str) -> bool:
    """Whether a matrix of a GPT-2 is ``[in, out]``: those of its blocks are, its head is not.

    Args:
        name: of a tensor or module, with or without the name of the inner model.
    """
    return ".h." in f".{name}"


def _indexed(index_path: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of the files that an index names."""
    try:
        weight_map = parse_any_json(read_file(index_path, MAX_TABLE_BYTES), MAX_TABLE_BYTES)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{index_path}: has no valid weight_map: {error}") from error
    # The index is an untrusted file and must not lead out of the directory.
    if any(not isinstance(name, str) or "/" in name or name.startswith(".") for name in names):
        raise CorruptError(f"{index_path}: names files outside its directory")
    tensors: dict[str, Tensor] = {}
    for name in names:
        found = read(index_path.parent / name)
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise CorruptError(f"{index_path}: several files have {short_names(twice)}; which one is meant is unknown")
        tensors |= found
    if set(tensors) != set(weight_map):
        unlike = short_names(sorted(set(tensors) ^ set(weight_map)))
        raise CorruptError(f"{index_path}: the index and the files have different tensor names: {unlike}")
    return tensors


def output_tensors(
    mapped: Sequence[MappedTensor], dtype: str | None, buffers: Collection[str] = ()
) -> list[OutputTensor]:
    """The tensors of a directory in the order of ``mapped``.

    Args:
        mapped: the tensors under the names of transformers; pruned elements become zero.
        dtype: the type to write, as in safetensors; None keeps that of each tensor.
        buffers: native names of tensors that keep their type: the biases of experts are float32 in every model.
    """
    return [
        OutputTensor(
            key=m.name,
            shape=m.shape,
            content=m.content,
            mask=m.mask,
            cast=None if dtype in (None, m.content.dtype) or m.source_name in buffers else dtype,
        )
        for m in mapped
    ]


def plan_files(tensors: Sequence[OutputTensor], shard_bytes: int) -> list[SafetensorsFile]:
    """The weight files: one ``model.safetensors``, or numbered files of at most ``shard_bytes`` each.

    Args:
        tensors: in the order in which they fill the files.
        shard_bytes: size of the largest file, in bytes.
    """
    groups = shard_by_size(tensors, shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    # transformers looks for this name first, and needs no index then.
    if len(groups) == 1:
        names = ["model.safetensors"]
    # Older releases of transformers refuse a file without this entry.
    return [safetensors_file(name, group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


def weight_index(files: Sequence[SafetensorsFile]) -> bytes | None:
    """The contents of ``model.safetensors.index.json``; None for a single file."""
    if len(files) == 1:
        return None
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    weight_map = {tensor.key: file.name for file in files for tensor in file.tensors}
    return encode_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
