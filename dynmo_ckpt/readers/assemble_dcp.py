"""Opens torch's distributed checkpoints as checkpoints of ours: whose names they are decides how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.document import short_repr
from .._common.errors import UsageError
from ..errors import NoStateError, UnsupportedError
from ..huggingface.files import read_config, read_generation_config
from ..huggingface.models import ARCHITECTURES
from ..huggingface.source_config import source_of
from ..megatron.arguments import read_args
from ..megatron.core_names import legacy_names
from ..megatron.read import KINDS, LAYER_NAME, LegacyCheckpoint, LegacyOptions, RankFacts, assemble, assemble_state
from ..megatron.training_progress import read_progress
from ..native.checkpoint import NativeCheckpoint
from ..tensors.views import Tensor
from .assemble import checked_model, from_legacy, from_map
from .torch_dcp import OPTIMIZER_NAME, DistributedCheckpoint, open_dcp, plain_names

MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
MOMENTS = {kind: f"optimizer.state.{kind}." for kind in KINDS[1:]}


def open_distributed(
    path: Path, step: int | None, make_vocab_size_divisible_by: int, options: LegacyOptions
) -> tuple[NativeCheckpoint, list[str]]:
    """A distributed checkpoint as one of ours, and remarks for a person.

    Raises:
        UsageError: a state dictionary of transformers' or Meta's names without a ``config.json``.
        CorruptError, UnsupportedError, UnsafePickleError: as ``open_dcp``, and as the map of the names.
    """
    found = open_dcp(path, step)
    kind, tensors = plain_names(found.tensors)
    if kind == "core":
        return from_legacy(_core(found, tensors, options), path)
    if options.with_optimizer:
        if not any(map(OPTIMIZER_NAME.match, (*found.tensors, *found.other))):
            raise NoStateError(
                f"{found.directory}: has no optimizer state; take the weights alone, with --no-optimizer"
            )
        raise UnsupportedError(f"{found.directory}: optimizer state is known under Megatron-core's names only")
    config = _config(found.directory, options)
    name = "llama2c" if kind == "titan" else _map_of(config, found.directory)
    model = checked_model(config, found.directory / "config.json", make_vocab_size_divisible_by, options.ignore_config)
    if kind == "titan" and (model["family"] != "llama" or model.get("num_experts")):
        raise UnsupportedError(f"{found.directory}: has a Llama's names, and the configuration is of another model")
    source = source_of(config, read_generation_config(options.config or found.directory))
    return from_map(found.directory, model, name, tensors, options.drop, run_id=path.resolve().name, source=source)


def _config(directory: Path, options: LegacyOptions) -> Mapping[str, Any]:
    if options.config is not None:
        return read_config(options.config)
    if not (directory / "config.json").is_file():
        raise UsageError(
            f"{directory}: a state dictionary does not tell the model's heads and positions; give --config, "
            "a directory with transformers' config.json of the model"
        )
    return read_config(directory)


def _map_of(config: Mapping[str, Any], directory: Path) -> str:
    known = ARCHITECTURES.get(str(config.get("model_type")))
    if known is None:
        raise UnsupportedError(f"{directory}: model_type {short_repr(config.get('model_type'))} is not known")
    return known.map


def _core(found: DistributedCheckpoint, tensors: Mapping[str, Tensor], options: LegacyOptions) -> LegacyCheckpoint:
    """Megatron-core's, whose tensors are whole: one stage on one tensor rank."""
    said = read_args(found.common, str(found.directory))
    number = found.common.get("iteration", 0)
    step = number if isinstance(number, int) else 0
    progress = read_progress(found.common, said, step, found.number)
    facts = RankFacts(path=found.directory, args=said, version=3.0, step=step, progress=progress)
    if not options.with_optimizer:
        return assemble(facts, *_stage(tensors), options)
    if not any(name.startswith("optimizer.") for name in (*found.tensors, *found.other)):
        raise NoStateError(f"{found.directory}: has no optimizer state")
    state = {}
    for kind in KINDS:
        prefixes = MASTERS if kind == "master" else (MOMENTS[kind],)
        part = {n.removeprefix(p): t for p in prefixes for n, t in found.tensors.items() if n.startswith(p)}
        if kind == "master" and not part and any(name.startswith(MOMENTS["exp_avg"]) for name in found.tensors):
            part = dict(tensors)
        if not part or any(tensor.dtype != "F32" for tensor in part.values()):
            raise UnsupportedError(
                f"{found.directory}: has no {kind} of each weight in float32; known is the form that Megatron-core "
                "calls fully_reshardable, not the flat buckets of dp_reshardable"
            )
        state[kind] = _stage(part)
    return assemble_state(facts, state, _steps(found), options)


def _stage(tensors: Mapping[str, Tensor]) -> tuple[list[dict[str, list[Tensor]]], dict[str, int]]:
    named = legacy_names(tensors)
    numbers = [int(match[2]) for name in named if (match := LAYER_NAME.match(name))]
    return [{name: [tensor] for name, tensor in named.items()}], {"encoder": max(numbers, default=-1) + 1, "decoder": 0}


def _steps(found: DistributedCheckpoint) -> set[int]:
    """Updates done, which Megatron-core keeps next to the moments."""
    held: Any = found.common.get("optimizer")
    inner = held.get("optimizer", held) if isinstance(held, dict) else {}
    state = inner.get("state", {}) if isinstance(inner, dict) else {}
    recorded = [state.get("common_step")] if isinstance(state, dict) else []
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    recorded += [group.get("step") for group in groups if isinstance(group, dict)]
    steps = {int(number) for number in map(found.number, recorded) if number is not None}
    return steps or {found.common["iteration"]} if isinstance(found.common.get("iteration"), int) else steps
