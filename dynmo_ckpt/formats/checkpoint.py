"""The manifest of a checkpoint (``manifest.json``, format ``dynmo.checkpoint``): its fields, seal and parser.

Specification: ``checkpoint.md``; machine-readable form: ``checkpoint.schema.json``; rules across fields:
``checkpoint_rules.py``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from .._common.document import (
    ENVELOPE,
    MAX_ALL_EXPERTS,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SIZE,
    MAX_TABLE_BYTES,
    Check,
    DocumentError,
    Problem,
    WriterError,
    anything,
    array,
    boolean,
    encode_json,
    envelope_problems,
    integer,
    mapping,
    nullable,
    number,
    obj,
    parse_json,
    short_repr,
    string,
)
from .checkpoint_rules import across_problems

FORMAT = "dynmo.checkpoint"
VERSION = 1
BLANK_SEAL = "0" * 8
DTYPES = ("F32", "BF16", "F16", "F64", "I64", "I32", "BOOL", "U8")
ROLES = ("parameter", "buffer", "mask", "optimizer")
_SEAL_FIELD = re.compile(rb'"manifest_crc32"\s*:\s*"([0-9a-f]{8})"')


def _is_crc32(value: Any, path: str, problems: list[Problem]) -> None:
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{8}", value) is None:
        problems.append(Problem(path, "crc32", f"must be 8 lower-case hexadecimal digits, is {short_repr(value)}"))


def _is_span(value: Any, path: str, problems: list[Problem]) -> None:
    if not isinstance(value, list) or len(value) != 2:
        problems.append(Problem(path, "length", f"must be [begin, end], is {short_repr(value)}"))
    else:
        array(integer())(value, path, problems)


def _is_scalar(value: Any, path: str, problems: list[Problem]) -> None:
    if isinstance(value, dict | list):
        problems.append(Problem(path, "type", f"must be a single value, is {short_repr(value)}"))


FAMILIES = ("gpt", "bert", "ict", "t5", "llama")
ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "swiglu", "geglu")
_MODEL = {
    "family": string(*FAMILIES),
    "num_layers": integer(0, MAX_LAYERS),
    "hidden_size": integer(1, MAX_SIZE),
    "ffn_hidden_size": integer(1, MAX_SIZE),
    "num_attention_heads": integer(1, MAX_SIZE),
    "max_position_embeddings": integer(1, MAX_SIZE),
    "vocab_size": integer(1, MAX_SIZE),
    "padded_vocab_size": integer(1, MAX_SIZE),
    "layernorm_epsilon": number(0),
    "activation": string(*ACTIVATIONS),
    "tied_embeddings": boolean(),
}
_MODEL_OPTIONAL = {
    "projection_size": integer(0, MAX_SIZE),
    "shared_towers": boolean(),
    "num_key_value_heads": integer(1, MAX_SIZE),
    "head_dim": integer(1, MAX_SIZE),
    "normalization": string("layernorm", "rmsnorm"),
    "position_embedding": string("learned", "rotary", "relative"),
    "rotary_base": number(1),
    "rotary_scaling": nullable(mapping(_is_scalar)),
    "relative_buckets": integer(1, MAX_SIZE),
    "relative_max_distance": integer(1, MAX_SIZE),
    "num_tokentypes": integer(0, MAX_SIZE),
    "binary_head": boolean(),
    "task_head": string("classification", "multichoice"),
    "num_classes": integer(1, MAX_SIZE),
    "num_encoder_layers": integer(0, MAX_LAYERS),
    "num_decoder_layers": integer(0, MAX_LAYERS),
    "num_experts": integer(1, MAX_EXPERTS),
    "moe_top_k": integer(1, MAX_EXPERTS),
}


def model_check(value: Any, path: str, problems: list[Problem]) -> None:
    """Check the ``model`` of a manifest; further fields ``moe_*`` are the run's own, each a single value."""
    names = value if isinstance(value, dict) else ()
    own = {name: _is_scalar for name in names if name.startswith("moe_") and name not in _MODEL_OPTIONAL}
    before = len(problems)
    obj(_MODEL, {**_MODEL_OPTIONAL, **own})(value, path, problems)
    if len(problems) == before and value["num_layers"] * value.get("num_experts", 0) > MAX_ALL_EXPERTS:
        where = f"{path}.num_experts" if path else "num_experts"
        problems.append(Problem(where, "range", f"times num_layers must be at most {MAX_ALL_EXPERTS:,}"))


_TOPOLOGY = {
    "tensor_parallel_size": integer(1, MAX_RANKS),
    "pipeline_parallel_size": integer(1, MAX_RANKS),
    "data_parallel_size": integer(1, MAX_RANKS),
    "virtual_stages_per_worker": integer(1, MAX_RANKS),
    "schedule": string(),
    "world_size": integer(1, MAX_RANKS),
    "partition": array(array(string()), 1),
}
_TOPOLOGY_OPTIONAL = {"expert_parallel_size": integer(1, MAX_RANKS)}
_PRUNING = {"sparsity": number(0, 1), "sparsity_by_item": mapping(number(0, 1))}
_SHARD = {"file": string(), "key": string(), "index": array(_is_span), "crc32": _is_crc32}
_TENSOR = {
    "dtype": string(*DTYPES),
    "shape": array(integer()),
    "role": string(*ROLES),
    "split_dim": nullable(integer()),
    "shards": array(obj(_SHARD), 1),
}
_GROUP = {"name": string(), "weight_decay": number(0), "parameters": array(string())}
FIELDS: Mapping[str, Check] = {
    **ENVELOPE,
    "manifest_crc32": _is_crc32,
    "run_id": string(),
    "step": integer(),
    "consumed_train_samples": integer(),
    "model": model_check,
    "topology": obj(_TOPOLOGY, _TOPOLOGY_OPTIONAL),
    "dynamic": obj(
        {
            "frozen_items": array(string()),
            "pruning": nullable(obj(_PRUNING)),
            "sparse_thresholds": mapping(number()),
        }
    ),
    "tensors": mapping(obj(_TENSOR)),
    "ties": mapping(string()),
    "optimizer": nullable(
        obj({"type": string("adamw", "none"), "steps": mapping(integer()), "groups": array(obj(_GROUP))})
    ),
    "data": nullable(obj({"seed": integer(), "split": string(), "sequence_length": integer(1), "prefix": string()})),
    "rng": obj({"scheme": string(), "seed": integer()}),
    "files": mapping(obj({"bytes": integer(), "crc32": _is_crc32})),
}
_DOCUMENT = mapping(anything())
OPTIONAL: Mapping[str, Check] = {
    "source": obj({"format": string("huggingface"), "config": _DOCUMENT, "generation_config": nullable(_DOCUMENT)})
}


def manifest_problems(value: Any) -> list[Problem]:
    """Every fault of a manifest, the seal apart; rules across fields are looked at once the fields are right."""
    problems = envelope_problems(value, FORMAT, VERSION)
    if not problems:
        obj(FIELDS, OPTIONAL)(value, "", problems)
    return problems or across_problems(value)


def seal(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of ``manifest.json``; ``manifest_crc32`` is filled in.

    Raises:
        WriterError: the manifest breaks the format that readers check.
    """
    if problems := manifest_problems(json.loads(encode_json({**manifest, "manifest_crc32": BLANK_SEAL}))):
        raise WriterError("manifest.json", problems)
    blank = encode_json({**manifest, "manifest_crc32": BLANK_SEAL})
    at = _seal_offset(blank, "manifest")
    return blank[:at] + f"{zlib.crc32(blank):08x}".encode() + blank[at + 8 :]


def parse_manifest(payload: bytes, source: str) -> dict[str, Any]:
    """The manifest in ``payload``; raises ``DocumentError`` with every problem, that of the seal among them."""
    at = _seal_offset(payload, source)
    said = payload[at : at + 8].decode()
    found = f"{zlib.crc32(payload[:at] + BLANK_SEAL.encode() + payload[at + 8 :]):08x}"
    if said != found:
        message = f"is {said}, the bytes give {found}: the file was altered"
        raise DocumentError(source, [Problem("manifest_crc32", "crc32", message)])
    try:
        value = parse_json(payload, MAX_TABLE_BYTES)
    except ValueError as error:
        raise DocumentError(source, [Problem("", "json", str(error))]) from error
    problems = manifest_problems(value)
    if problems:
        raise DocumentError(source, problems)
    manifest: dict[str, Any] = value
    return manifest


def _seal_offset(payload: bytes, source: str) -> int:
    """Where the eight digits begin; they must stand there exactly once."""
    found = [match.start(1) for match in _SEAL_FIELD.finditer(payload)]
    if len(found) != 1:
        message = f"must stand there once, as 8 lower-case hexadecimal digits; found {len(found)} times"
        raise DocumentError(source, [Problem("manifest_crc32", "crc32", message)])
    return found[0]
