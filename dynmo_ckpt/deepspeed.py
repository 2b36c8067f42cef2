"""Reads Megatron-DeepSpeed checkpoints: pipeline layer files, or one module's states for each tensor rank.

The layer files ``layer_LL-model_TT-model_states.pt`` hold one layer each: the embedding first, then the blocks, then
the final norm and the head. With ZeRO 1 and 2 the 16-bit weights are whole in the model's files, and the shards
``zero_pp_rank_*`` hold optimizer state alone, which is left out. With ZeRO 3 the weights are in the shards: refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import UsageError
from .faults import CorruptError, UnsupportedError
from .io.pickles import Inert, Name
from .io.torchfile import TorchFile, open_torch
from .legacy import HEAD_COPY, LAYER_NAME, LegacyCheckpoint, LegacyOptions, RankFacts, assemble, flatten
from .names import load_map
from .views import Tensor

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
LM = "language_model."


def is_deepspeed(path: Path) -> bool:
    """Whether ``path`` is a directory of DeepSpeed, or one step of it."""
    return path.is_dir() and ((path / "latest").is_file() or any(path.glob("mp_rank_*_model_states.pt")))


def open_deepspeed(path: Path, step: int | None, options: LegacyOptions) -> LegacyCheckpoint:
    """Index a Megatron-DeepSpeed checkpoint; of the bytes, only replicas' are read.

    Raises:
        UnsafePickleError: a file asks for more than plain data.
        CorruptError: missing files, or files that contradict each other.
        UnsupportedError: ZeRO 3, experts, or a layer that is not known.
    """
    directory = _step_directory(path, step)
    ranks = _numbered(directory, RANK_FILE)
    if not ranks:
        raise CorruptError(f"{directory}: has no mp_rank_*_model_states.pt")
    first = open_torch(ranks[min(ranks)])
    tree = first.tree if isinstance(first.tree, dict) else {}
    args = tree.get("args")
    said = args.attributes if isinstance(args, Inert) and args.type == Name("argparse", "Namespace") else {}
    if any(directory.glob("layer_*_expert_*")) or any(directory.glob("expert_*")):
        raise UnsupportedError(f"{directory}: experts of DeepSpeed are not mapped")
    number = tree.get("iteration", tree.get("global_steps", 0))
    version = tree.get("checkpoint_version", 3.0)
    if not isinstance(number, int) or not isinstance(version, int | float):
        raise CorruptError(f"{first.path}: iteration {number!r}, checkpoint_version {version!r}")
    facts = RankFacts(path=first.path, args=said, version=float(version), step=number)
    layers = _layer_files(directory)
    stages = _from_layers(directory, layers) if layers else _from_modules(directory, ranks)
    counts = {"encoder": 0, "decoder": 0}
    for name in {name for stage in stages for name in stage}:
        match = LAYER_NAME.match(name)
        if match:
            counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
    return assemble(facts, stages, counts, options)


def _step_directory(path: Path, step: int | None) -> Path:
    if step is None and not (path / "latest").is_file():
        return path
    name = f"global_step{step}" if step is not None else (path / "latest").read_text(encoding="utf-8").strip()
    if "/" in name or not (path / name).is_dir():
        raise UsageError(
            f"{path / name}: is not there; the steps are {sorted(p.name for p in path.glob('global_step*'))}"
        )
    return path / name


def _numbered(directory: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    return {int(m[1]): child for child in directory.iterdir() if (m := pattern.fullmatch(child.name))}


def _layer_files(directory: Path) -> dict[int, dict[int, Path]]:
    """Files by layer and tensor rank; raises ``CorruptError`` where one is missing."""
    found: dict[int, dict[int, Path]] = {}
    for child in directory.iterdir():
        match = LAYER_FILE.fullmatch(child.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = child
    ranks = {rank for files in found.values() for rank in files}
    for layer, files in found.items():
        missing = sorted(set(range(max(ranks) + 1)) - set(files))
        if missing:
            raise CorruptError(f"{directory}: layer {layer} lacks the tensor ranks {missing}")
    return dict(sorted(found.items()))


def _from_layers(directory: Path, layers: Mapping[int, Mapping[int, Path]]) -> list[dict[str, list[Tensor]]]:
    """One stage for each layer's files, under the names of a whole model."""
    stages, blocks, has_words = [], 0, False
    for number, files in layers.items():
        parts = [_tensors(open_torch(files[rank]), None) for rank in sorted(files)]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise CorruptError(f"{directory}: the tensor ranks of layer {number} do not hold the same tensors")
        names = set(parts[0])
        if "word_embeddings.weight" in names:
            table = HEAD_COPY if has_words else f"{LM}embedding.word_embeddings.weight"
            renamed = {name: f"{LM}embedding.{name}" for name in names if not has_words}
            renamed |= {"word_embeddings.weight": table}
            has_words = True
        elif any(".query_key_value." in name for name in names):
            renamed = {name: f"{LM}encoder.layers.{blocks}.{name}" for name in names}
            blocks += 1
        elif names in ({"weight", "bias"}, {"weight"}) and len(parts[0]["weight"].shape) == 1:
            renamed = {name: f"{LM}encoder.final_layernorm.{name}" for name in names}
        elif len(names) == 1 and len(next(iter(parts[0].values())).shape) == 2:
            renamed = dict.fromkeys(names, f"{LM}output_layer.weight")
        else:
            raise UnsupportedError(f"{directory}: layer {number} is no layer of a GPT: {', '.join(sorted(names)[:5])}")
        stages.append({_canonical(renamed[name]): [part[name] for part in parts] for name in renamed})
    return stages


def _from_modules(directory: Path, ranks: Mapping[int, Path]) -> list[dict[str, list[Tensor]]]:
    if set(ranks) != set(range(len(ranks))):
        raise CorruptError(f"{directory}: has the tensor ranks {sorted(ranks)}, not 0 and on")
    parts = [_tensors(open_torch(ranks[rank]), "module") for rank in sorted(ranks)]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise CorruptError(f"{directory}: its tensor ranks do not hold the same tensors")
    if not parts[0] or any(0 in tensor.shape for tensor in parts[0].values()):
        raise UnsupportedError(f"{directory}: its weights are in ZeRO 3's shards; gather them (zero_to_fp32.py) first")
    return [{_canonical(name): [part[name] for part in parts] for name in parts[0]}]


def _tensors(file: TorchFile, key: str | None) -> dict[str, Tensor]:
    tree: Any = file.tree
    if key is not None:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(tree, dict):
        raise CorruptError(f"{file.path}: holds no {key or 'dictionary'}")
    return {name: file.tensor(ref, name) for name, ref in flatten(tree, "")}


def _canonical(name: str) -> str:
    return load_map("legacy_gpt", "2").canonical(name)
