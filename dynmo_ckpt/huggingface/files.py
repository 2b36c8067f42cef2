"""What stands beside the weights in a Hugging Face directory: configuration, generation settings, tokenizer, index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, encode_json, parse_any_json, short_repr
from .._common.errors import UsageError
from ..errors import CorruptError, UnsupportedError
from ..io.files import read_file
from ..io.safetensors import read_index
from ..maps.name_map import Mapped
from ..tensors.copy_plan import OutputTensor, SafetensorsFile, safetensors_file, shard_by_size
from ..tensors.views import Tensor, as_tensor
from ..torch_save.pickles import TensorRef
from ..torch_save.reader import open_torch

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eod>", "<eos>")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``; remote code that it may name is not looked at."""
    return _object(directory / "config.json")


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """``generation_config.json``; None where there is none."""
    path = directory / "generation_config.json"
    return _object(path) if path.exists() else None


def _object(path: Path) -> dict[str, Any]:
    try:
        config = parse_any_json(read_file(path))
    except ValueError as error:
        raise CorruptError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptError(f"{path}: is not an object")
    return config


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of a directory's weight files, which an index names where they are several.

    ``model.safetensors`` goes before ``pytorch_model.bin``, as in transformers. No pickle is executed.

    Raises:
        CorruptError: no such file, or one that is broken or is not what the index says.
        UnsafePickleError: ``pytorch_model.bin`` asks for more than plain data.
        UnsupportedError: a type of numbers that no model here has.
    """
    for name, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _torch_tensors)):
        if (directory / f"{name}.index.json").exists():
            return _indexed(directory / f"{name}.index.json", read)
        if (directory / name).exists():
            return read(directory / name)
    others = sorted(path.name for path in directory.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    raise CorruptError(
        f"{directory}: has neither model.safetensors nor pytorch_model.bin, nor an index of them"
        + (f"; it has {', '.join(others[:5])}" if others else "")
    )


def _safetensors(path: Path) -> dict[str, Tensor]:
    return {key: as_tensor(array) for key, array in read_index(path).arrays.items()}


def _torch_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dictionary that ``torch.save`` wrote."""
    file = open_torch(path)
    if not isinstance(file.tree, dict):
        raise CorruptError(f"{path}: holds a {type(file.tree).__name__}, not a state dictionary")
    odd = [str(key) for key, value in file.tree.items() if not isinstance(value, TensorRef)]
    if odd:
        raise UnsupportedError(f"{path}: not a flat state dictionary: {', '.join(odd[:5])} hold no tensor")
    return {str(key): file.tensor(ref, str(key)) for key, ref in file.tree.items()}


def _indexed(index_path: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of the files that an index names."""
    try:
        weight_map = parse_any_json(read_file(index_path, MAX_TABLE_BYTES), MAX_TABLE_BYTES)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{index_path}: has no readable weight_map: {error}") from error
    if any(not isinstance(name, str) or "/" in name or name.startswith(".") for name in names):
        raise CorruptError(f"{index_path}: names files outside of its directory")
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read(index_path.parent / name)
    if set(tensors) != set(weight_map):
        unlike = ", ".join(sorted(set(tensors) ^ set(weight_map))[:5])
        raise CorruptError(f"{index_path}: the index and the files do not name the same tensors: {unlike}")
    return tensors


def plan_files(mapped: Sequence[Mapped], shard_bytes: int, dtype: str) -> list[SafetensorsFile]:
    """The weight files: one ``model.safetensors``, or numbered ones of at most ``shard_bytes`` each.

    Args:
        mapped: the tensors under their foreign names; what a mask prunes becomes zero.
        shard_bytes: the largest file.
        dtype: the type to write.
    """
    tensors = [
        OutputTensor(
            key=m.name, shape=m.shape, content=m.content, mask=m.mask, cast=None if m.content.dtype == dtype else dtype
        )
        for m in mapped
    ]
    groups = shard_by_size(tensors, shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        names = ["model.safetensors"]
    return [safetensors_file(name, group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


def weight_index(files: Sequence[SafetensorsFile]) -> bytes | None:
    """``model.safetensors.index.json`` of several files; None for one."""
    if len(files) == 1:
        return None
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    weight_map = {tensor.key: file.name for file in files for tensor in file.tensors}
    return encode_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def tokenizer_names(directory: Path) -> list[str]:
    """Which of a tokenizer's files lie in ``directory``."""
    return [name for name in TOKENIZER_FILES if (directory / name).is_file()]


def tokenizer_files(directory: Path, vocab_size: int, max_length: int) -> tuple[dict[str, bytes], int | None]:
    """Byte copies of a tokenizer's files, with a configuration that AutoTokenizer opens, and the end token's id.

    Args:
        directory: where the files lie; without any there is no tokenizer.
        vocab_size: the model's true vocabulary size.
        max_length: the model's number of positions.

    Raises:
        UsageError: the tokenizer has more tokens than the model's vocabulary.
    """
    files = {name: read_file(directory / name, MAX_TABLE_BYTES) for name in tokenizer_names(directory)}
    if "tokenizer.json" not in files:
        return files, _end_token_of_vocabulary(directory / "vocab.json", files.get("vocab.json"))
    ids = _token_ids(directory / "tokenizer.json", files["tokenizer.json"])
    if max(ids.values(), default=-1) >= vocab_size:
        raise UsageError(f"{directory}: has token {max(ids.values())}, the model's vocabulary ends at {vocab_size - 1}")
    end = next((token for token in END_TOKENS if token in ids), None)
    if "tokenizer_config.json" not in files:
        special = {} if end is None else {"bos_token": end, "eos_token": end, "unk_token": end}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, **special}
        files["tokenizer_config.json"] = encode_json(config)
    return files, None if end is None else ids[end]


def _token_ids(path: Path, payload: bytes) -> dict[str, int]:
    """Ids of all tokens of a ``tokenizer.json``, the added ones among them."""
    try:
        document = parse_any_json(payload, MAX_TABLE_BYTES)
        vocabulary = document["model"]["vocab"]
        named = dict(vocabulary) if isinstance(vocabulary, dict) else {row[0]: i for i, row in enumerate(vocabulary)}
        return _checked_ids(named | {token["content"]: token["id"] for token in document.get("added_tokens", [])})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CorruptError(f"{path}: not a tokenizer's file: {error}") from error


def _checked_ids(ids: dict[str, Any]) -> dict[str, int]:
    for token, number in ids.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"the id of {short_repr(token)} must be an integer of at least 0, is {short_repr(number)}")
    return ids


def _end_token_of_vocabulary(path: Path, payload: bytes | None) -> int | None:
    """The id of the end token in a ``vocab.json``; None without the file, and without such a token."""
    try:
        vocabulary = {} if payload is None else parse_any_json(payload, MAX_TABLE_BYTES)
        if not isinstance(vocabulary, dict):
            raise ValueError("must be an object of tokens and their ids")
        ids = _checked_ids({token: vocabulary[token] for token in END_TOKENS if token in vocabulary})
    except ValueError as error:
        raise CorruptError(f"{path}: not a vocabulary: {error}") from error
    return next(iter(ids.values()), None)
