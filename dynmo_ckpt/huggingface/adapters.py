"""LoRA and DoRA adapters of peft: which tensors of a model they change, and to what.

====================================  ==================================================================
tensor of an adapter, after a module  effect on the module
====================================  ==================================================================
lora_A, lora_B                        W + s B A; GPT-2's matrices are transposed; of all experts: expert_adapters.py
lora_embedding_A, lora_embedding_B    W + s (B A)^T
lora_magnitude_vector                 DoRA: the sum is scaled to these norms (of a row; of an embedding's column)
lora_B.bias                           bias + s bias_B
base_layer.weight, base_layer.bias    replaces the tensor of the base
trainable_tokens_delta                replaces rows
a tensor's own name                   replaces it (modules_to_save, bias)
====================================  ==================================================================

s is alpha / r, or alpha / sqrt(r) with ``use_rslora``. The result is computed while it is read (:mod:`.merge_rows`).
Each key of ``adapter_config.json`` is applied, changes no merged weight, or is refused, as those of ``config.json``
are. Sources: LoRA (Hu et al. 2021, arXiv:2106.09685), DoRA (Liu et al. 2024, arXiv:2402.09353), rsLoRA (Kalajdzievski
2023, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .._common.document import finite_number, short_repr
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
from ..tensors.computed import computed_tensor
from ..tensors.views import Tensor
from .expert_adapters import expert_rank, is_expert_module, merged_experts
from .files import is_conv1d, json_object, safetensors_tensors, torch_tensors
from .merge_rows import AddedBias, MergedColumns, MergedRows, ReplacedRows

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
FLOATS = ("F64", "F32", "F16", "BF16")
# These change what an adapter computes, in ways that are not merged here.
REFUSED = (
    *("use_qalora", "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config", "use_bdlora"),
    *("monteclora_config", "velora_config", "megatron_config"),
)
IGNORED = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying", "fan_in_fan_out", "modules_to_save", "bias"),
)
APPLIED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias"),
    *("trainable_token_indices", "init_lora_weights", "target_parameters"),
)
# These begin with a product of 0 on the unchanged base. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take their first product
# out of the base, and peft does so again when it loads the adapter: the adapter fits that changed base alone.
INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Names of a module's tensors: (name after the module, suffix of the tensor that it changes).
_PART = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?|base_layer\.weight|base_layer\.bias"
    r"|(?:token_adapter\.)?trainable_tokens_delta)"
)
# A pattern of the configuration is from an untrusted file: nested repetitions can take exponential time to match.
_MAX_PATTERN = 200
# Far above any that is trained; the product with float32 numbers must not overflow by the scale alone.
_LARGEST_SCALE = 1e6
_NESTED = re.compile(r"\)[*+{]")
_HEADS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|lm_head)\.(weight|bias)$")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter: its directory, the contents of ``adapter_config.json``, and its tensors without the prefix."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_adapter(directory: Path, ignored: Sequence[str] = ()) -> Adapter:
    """Open the directory of an adapter; no tensor's bytes are read.

    Args:
        directory: has ``adapter_config.json``, and ``adapter_model.safetensors`` or ``adapter_model.bin``.
        ignored: shell patterns of keys that are not checked, as ``adapter_config.KEY``.

    Raises:
        CorruptError: a file is missing or broken.
        UnsupportedError: another kind of adapter, or a setting that is not merged.
        UnsafePickleError: ``adapter_model.bin`` refers to more than plain data.
    """
    path = directory / CONFIG
    config = json_object(path)
    _check_config(path, config, ignored)
    for name, read in (("adapter_model.safetensors", safetensors_tensors), ("adapter_model.bin", torch_tensors)):
        if (directory / name).exists():
            found = read(directory / name)
            break
    else:
        raise CorruptError(f"{directory}: must have adapter_model.safetensors or adapter_model.bin")
    others = [name for name in found if not name.startswith(PREFIX)]
    if others:
        raise UnsupportedError(f"{directory}: names must begin with {PREFIX}: {short_names(others)}")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
    return Adapter(directory=directory, config=config, tensors=tensors)


def _check_config(path: Path, config: Mapping[str, Any], ignored: Sequence[str]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(f"{path}: peft_type {short_repr(config.get('peft_type'))}: must be LORA")
    for key in REFUSED:
        if config.get(key):
            raise UnsupportedError(f"{path}: {key} = {short_repr(config[key])}: is not merged; merge it with peft")
    start = config.get("init_lora_weights")
    if start not in INITIALIZATIONS:
        raise UnsupportedError(
            f"{path}: init_lora_weights = {short_repr(start)}: such an adapter belongs to a base that was changed when "
            "the training began; save it with peft's path_initial_model_for_weight_conversion, or merge it with peft"
        )
    known = {*REFUSED, *IGNORED, *APPLIED}
    unknown = [
        key for key in config if key not in known and not any(fnmatchcase(f"adapter_config.{key}", p) for p in ignored)
    ]
    if unknown:
        raise UnsupportedError(
            f"{path}: no rule for {short_names(unknown)}; an unknown key may change the weights; --ignore-config "
            "adapter_config.KEY ignores it"
        )
    for key in ("r", "lora_alpha"):
        value = config.get(key, 8)
        if not (finite_number(value) or 0) > 0:
            raise CorruptError(f"{path}: {key} must be a positive number, found {short_repr(value)}")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise CorruptError(f"{path}: {key} must be an object, found {short_repr(patterns)}")
        for pattern, value in patterns.items():
            _check_pattern(path, key, pattern)
            if not (finite_number(value) or 0) > 0:
                raise CorruptError(f"{path}: {key} must have positive numbers, found {short_repr(value)}")


def _check_pattern(path: Path, key: str, pattern: str) -> None:
    repetitions = sum(pattern.count(mark) for mark in "*+{")
    if len(pattern) > _MAX_PATTERN or repetitions > 3 or _NESTED.search(pattern):
        raise UnsupportedError(f"{path}: {key}: {short_repr(pattern)} is too complex a pattern; name modules instead")
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise CorruptError(f"{path}: {key}: {short_repr(pattern)} is not a regular expression: {error}") from error


def merge_adapters(
    tensors: Mapping[str, Tensor], adapters: Sequence[Adapter], *, transposed: bool, tied: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a model with adapters merged one after the other, and remarks for the user.

    Args:
        tensors: of the base, by name.
        adapters: in the order in which they are merged.
        transposed: whether the matrices of blocks are ``[in, out]``, as in GPT-2.
        tied: whether the head of the model is its embedding.

    Raises:
        CorruptError: tensors of an adapter are missing, or do not fit the base.
        UnsupportedError: a tensor that belongs to no module of the base, or an adapter that a merge would change.
    """
    merged, remarks = dict(tensors), []
    changed: dict[str, str] = {}
    for adapter in adapters:
        merge = _Merge(adapter=adapter, base=merged, transposed=transposed, tied=tied)
        updates = merge.updates()
        for name, kind in merge.kinds.items():
            # Of two additions the order does not matter. A scaling or a replacement was trained on the base alone.
            if name in changed and {kind, changed[name]} != {"added"}:
                raise UnsupportedError(
                    f"{adapter.directory}: {short_name(name)} is changed by two adapters, one of which is not a plain "
                    "LoRA; merge one of them first"
                )
            changed[name] = kind
        merged |= updates
        remarks.append(f"{adapter.directory}: {len(updates)} tensors are merged while they are read")
    return merged, remarks


class _Merge:
    """One adapter on the tensors ``base``; ``kinds`` records how each tensor changes: added, scaled or replaced."""

    def __init__(self, *, adapter: Adapter, base: Mapping[str, Tensor], transposed: bool, tied: bool) -> None:
        self.adapter, self.base, self.transposed, self.tied = adapter, base, transposed, tied
        self.kinds: dict[str, str] = {}
        self.parts: dict[str, dict[str, Tensor]] = {}
        self.updates_: dict[str, Tensor] = {}

    def updates(self) -> dict[str, Tensor]:
        """The changed tensors by name."""
        for name, tensor in self.adapter.tensors.items():
            if tensor.dtype not in FLOATS:
                raise CorruptError(f"{self.adapter.directory}: {short_name(name)} has the type {tensor.dtype}")
            match = _PART.fullmatch(name)
            if match is None:
                self._replace(name, tensor)
                continue
            part = match["part"].removesuffix(".weight") if "magnitude" in name else match["part"]
            self.parts.setdefault(match["module"], {})[part] = tensor
        for module, parts in self.parts.items():
            self._module(module, parts)
        return self.updates_

    def _module(self, module: str, parts: dict[str, Tensor]) -> None:
        for part in ("weight", "bias"):
            if f"base_layer.{part}" in parts:
                self._replace(f"{module}.{part}", parts.pop(f"base_layer.{part}"))
        rows = next((parts.pop(name) for name in list(parts) if name.endswith("trainable_tokens_delta")), None)
        if rows is not None:
            self._rows(module, rows)
        bias = parts.pop("lora_B.bias", None)
        magnitude = parts.pop("lora_magnitude_vector", None)
        has_pair = any(part.startswith(("lora_A", "lora_embedding_A")) for part in parts)
        if has_pair and (magnitude is not None) != bool(self.adapter.config.get("use_dora")):
            raise CorruptError(
                f"{self.adapter.directory}: {short_name(module)}: "
                + ("has" if magnitude is not None else "lacks")
                + f" lora_magnitude_vector; {CONFIG} has use_dora = {self.adapter.config.get('use_dora', False)}"
            )
        if magnitude is not None and bias is not None:
            raise UnsupportedError(f"{self.adapter.directory}: {short_name(module)}: lora_bias with DoRA is not merged")
        if parts.keys() == {"lora_A.weight", "lora_B.weight"} and is_expert_module(module):
            self._experts(module, parts["lora_A.weight"], parts["lora_B.weight"])
        elif parts.keys() == {"lora_A.weight", "lora_B.weight"}:
            self._matrix(module, parts["lora_A.weight"], parts["lora_B.weight"], magnitude)
        elif parts.keys() == {"lora_embedding_A", "lora_embedding_B"}:
            self._embedding(module, parts["lora_embedding_A"], parts["lora_embedding_B"], magnitude)
        elif parts or magnitude is not None or bias is not None:
            raise CorruptError(f"{self.adapter.directory}: {short_name(module)}: A and B must come in pairs")
        if bias is not None:
            name, base = self._find(f"{module}.bias")
            self._check_shapes(name, base.shape, bias.shape, base.shape)
            compute = AddedBias(base=base, added=bias, scale=self._scale(module))
            self._put(name, computed_tensor(name, base.dtype, base.shape, (base, bias), compute), "added")

    def _experts(self, module: str, down: Tensor, up: Tensor) -> None:
        base = {**self.base, **self.updates_}
        expected = _setting(self.adapter.config, "r", module)
        if expert_rank(base, module, down) != expected:
            raise CorruptError(
                f"{self.adapter.directory}: {short_name(module)}: A has {down.shape[0]} rows; must have the rank "
                f"{expected:g} for each expert"
            )
        for name, tensor in merged_experts(base, module, down, up, self._scale(module)):
            self._put(name, tensor, "added")

    def _matrix(self, module: str, down: Tensor, up: Tensor, magnitude: Tensor | None) -> None:
        name, base = self._find(f"{module}.weight")
        if len(base.shape) != 2 or len(down.shape) != 2 or len(up.shape) != 2:
            raise UnsupportedError(f"{self.adapter.directory}: {short_name(module)}: only matrices are merged")
        # Rows are outputs: DoRA's norms are those of rows.
        transposed = self.transposed and is_conv1d(name)
        matrix = base.permute((1, 0)) if transposed else base
        self._check_shapes(name, (up.shape[0], down.shape[1]), matrix.shape, (up.shape[0], down.shape[1]))
        self._check_rank(module, down.shape[0], up.shape[1])
        if magnitude is not None:
            # Older releases of peft store [1, out].
            magnitude = magnitude.squeeze_first() if len(magnitude.shape) == 2 else magnitude
            self._check_shapes(name, magnitude.shape, (matrix.shape[0],), magnitude.shape)
        compute = MergedRows(base=matrix, down=down, up=up, magnitude=magnitude, scale=self._scale(module))
        inputs = (base, down, up, *(() if magnitude is None else (magnitude,)))
        merged = computed_tensor(name, base.dtype, matrix.shape, inputs, compute)
        kind = "added" if magnitude is None else "scaled"
        self._put(name, merged.permute((1, 0)) if transposed else merged, kind)

    def _embedding(self, module: str, down: Tensor, up: Tensor, magnitude: Tensor | None) -> None:
        name, base = self._find(f"{module}.weight")
        if len(base.shape) != 2 or len(down.shape) != 2 or len(up.shape) != 2:
            raise UnsupportedError(f"{self.adapter.directory}: {short_name(module)}: only matrices are merged")
        self._check_shapes(name, (down.shape[1], up.shape[0]), base.shape, (down.shape[1], up.shape[0]))
        self._check_rank(module, down.shape[0], up.shape[1])
        scale = self._scale(module)
        pair = (down.permute((1, 0)), up.permute((1, 0)))
        if magnitude is None:
            plain = MergedRows(base=base, up=pair[0], down=pair[1], magnitude=None, scale=scale)
            self._put(name, computed_tensor(name, base.dtype, base.shape, (base, down, up), plain), "added")
            return
        self._check_shapes(name, magnitude.shape, (base.shape[1],), magnitude.shape)
        compute = MergedColumns(base=base, up=pair[0], down=pair[1], magnitude=magnitude, scale=scale)
        merged = computed_tensor(name, base.dtype, base.shape, (base, down, up, magnitude), compute)
        self._put(name, merged, "scaled")

    def _rows(self, module: str, rows: Tensor) -> None:
        name, base = self._find(f"{module}.weight")
        indices = self.adapter.config.get("trainable_token_indices")
        if isinstance(indices, dict):
            indices = next((ids for key, ids in indices.items() if f".{module}".endswith(f".{key}")), None)
        valid = isinstance(indices, list) and all(type(each) is int and 0 <= each < base.shape[0] for each in indices)
        if not valid or indices is None or len(set(indices)) != len(indices):
            raise CorruptError(f"{self.adapter.directory}: trainable_token_indices: must be different rows of {name}")
        self._check_shapes(name, rows.shape, (len(indices), *base.shape[1:]), rows.shape)
        compute = ReplacedRows(base=base, rows=rows, indices=tuple(indices), dtype=base.dtype)
        # peft ties the rows of a tied head too, so the tie remains.
        self._put(name, computed_tensor(name, base.dtype, base.shape, (base, rows), compute), "replaced", ties=True)

    def _replace(self, name: str, tensor: Tensor) -> None:
        if ".lora_" in name or ".base_layer." in name or ".modules_to_save." in name:
            raise UnsupportedError(f"{self.adapter.directory}: no rule for the tensor {short_name(name)}")
        trained = self.adapter.config.get("modules_to_save")
        is_saved = isinstance(trained, list) and any(f".{each}." in f".{name}" for each in trained)
        if self.tied and _HEADS.search(name) and "lm_head" in name and not is_saved and not self._names(name):
            return  # the copy of the embedding that peft saves after its rows were added
        found, base = self._find(name)
        # A vocabulary that was extended for the training; peft saves all of its rows.
        has_rows = bool(_HEADS.search(name)) and len(tensor.shape) == len(base.shape) == 2
        is_grown = has_rows and tensor.shape[0] > base.shape[0] and tensor.shape[1] == base.shape[1]
        if not is_grown:
            self._check_shapes(found, tensor.shape, base.shape, tensor.shape)
        if tensor.dtype != base.dtype:
            compute = ReplacedRows(base=tensor, rows=None, indices=(), dtype=base.dtype)
            shape = tensor.shape
            tensor = computed_tensor(found, base.dtype, shape, (tensor,), compute)
        # peft keeps the tie of rows that it only adds; of a module that is trained on its own it does not.
        self._put(found, tensor, "replaced", ties=is_grown and not is_saved)

    def _put(self, name: str, tensor: Tensor, kind: str, *, ties: bool = False) -> None:
        if self.tied and not ties and _HEADS.search(name):
            raise UnsupportedError(
                f"{self.adapter.directory}: changes {short_name(name)} of a model whose head is its embedding; a merge "
                "would change both. Merge it with peft after untying them"
            )
        self.updates_[name] = tensor
        self.kinds[name] = kind if self.kinds.get(name, kind) == kind else "scaled"

    def _names(self, name: str) -> list[str]:
        """The tensors of the base that a name of the adapter may mean."""
        # Published files of some models, and adapters of models without a head, lack the name of the inner model.
        names = [name, f"transformer.{name}", f"model.{name}"]
        names += [name.removeprefix(prefix) for prefix in ("transformer.", "model.") if name.startswith(prefix)]
        return [each for each in dict.fromkeys(names) if each in self.base]

    def _find(self, name: str) -> tuple[str, Tensor]:
        """The tensor of the base that a name of the adapter means, with earlier changes of this adapter."""
        found = self._names(name)
        if len(found) != 1:
            raise UnsupportedError(f"{self.adapter.directory}: the model has no tensor {short_name(name)}")
        tensor = self.updates_.get(found[0], self.base[found[0]])
        if tensor.dtype not in FLOATS:
            raise CorruptError(f"{short_name(found[0])}: has the type {tensor.dtype}; a merge needs real numbers")
        return found[0], tensor

    def _check_shapes(self, name: str, found: Sequence[int], expected: Sequence[int], shown: Sequence[int]) -> None:
        if tuple(found) != tuple(expected):
            raise CorruptError(
                f"{self.adapter.directory}: {short_name(name)}: the adapter has {list(shown)}, which does not fit "
                f"{list(expected)}; it belongs to another model"
            )

    def _scale(self, module: str) -> float:
        config = self.adapter.config
        alpha, rank = (_setting(config, key, module) for key in ("lora_alpha", "r"))
        scale = float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
        if not scale < _LARGEST_SCALE:
            raise CorruptError(
                f"{self.adapter.directory}: lora_alpha / r is {scale:g}; must be below {_LARGEST_SCALE:g}"
            )
        return scale

    def _check_rank(self, module: str, *ranks: int) -> None:
        expected = _setting(self.adapter.config, "r", module)
        if any(rank != expected for rank in ranks):
            raise CorruptError(
                f"{self.adapter.directory}: {short_name(module)}: A and B have the ranks {list(ranks)}; the "
                f"configuration has {expected}"
            )


def _setting(config: Mapping[str, Any], key: str, module: str) -> float:
    """``r`` or ``lora_alpha`` of a module: that of the first pattern that matches its name, else of all."""
    patterns = config.get({"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[key]) or {}
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return float(value)
    return float(config.get(key, 8))
