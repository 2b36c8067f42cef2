"""Opens torch's distributed checkpoints as checkpoints of ours: whose names they are decides how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .core_names import legacy_names
from .dcp import DistributedCheckpoint, open_dcp, plain_names
from .errors import UsageError
from .faults import UnsupportedError
from .hf_models import ARCHITECTURES
from .huggingface import read_config
from .imported import checked_model, from_legacy, from_map
from .io.pickles import Inert, Name
from .legacy import KINDS, LAYER_NAME, LegacyCheckpoint, LegacyOptions, RankFacts, assemble, assemble_state
from .native import NativeCheckpoint
from .views import Tensor

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
        raise UnsupportedError(f"{found.directory}: optimizer state is known under Megatron-core's names only")
    config = _config(found.directory, options)
    name = "llama2c" if kind == "titan" else _map_of(config, found.directory)
    model = checked_model(config, found.directory / "config.json", make_vocab_size_divisible_by)
    if kind == "titan" and (model["family"] != "llama" or model.get("num_experts")):
        raise UnsupportedError(f"{found.directory}: has a Llama's names, and the configuration is of another model")
    return from_map(found.directory, model, name, tensors, options.drop, run_id=path.resolve().name)


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
        raise UnsupportedError(f"{directory}: model_type {config.get('model_type')!r} is not known")
    return known.map


def _core(found: DistributedCheckpoint, tensors: Mapping[str, Tensor], options: LegacyOptions) -> LegacyCheckpoint:
    """Megatron-core's, whose tensors are whole: one stage on one tensor rank."""
    args = found.common.get("args")
    said = args.attributes if isinstance(args, Inert) and args.type == Name("argparse", "Namespace") else {}
    if said.get("position_embedding_type") == "rope":
        said = {**said, "use_rotary_position_embeddings": said.get("use_rotary_position_embeddings", True)}
    number = found.common.get("iteration", 0)
    facts = RankFacts(path=found.directory, args=said, version=3.0, step=number if isinstance(number, int) else 0)
    if not options.with_optimizer:
        return assemble(facts, *_stage(tensors), options)
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
    """Updates done, which Megatron-core keeps beside the moments."""
    held: Any = found.common.get("optimizer")
    inner = held.get("optimizer", held) if isinstance(held, dict) else {}
    state = inner.get("state", {}) if isinstance(inner, dict) else {}
    numbers = {state.get("common_step")} if isinstance(state, dict) else set()
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    numbers |= {group.get("step") for group in groups if isinstance(group, dict)}
    steps = {int(number) for number in numbers if isinstance(number, int | float)}
    return steps or {found.common["iteration"]} if isinstance(found.common.get("iteration"), int) else steps
