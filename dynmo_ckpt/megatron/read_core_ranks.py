"""Reads a decoder of Megatron-core from a file of each rank (``--ckpt-format torch``), beyond legacy Megatron's models.

::

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt  --_Grid-->  tensors by stage, expert and tensor rank
        --_stage-->  whole tensors, layers and experts numbered globally  --assemble_decoder-->  DynMo's

The names are those of modules. Which dimension tensor parallelism splits depends on the module alone, and is in
``_SPLITS``; what is on several ranks must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..formats.choices import ReadOptions
from ..io.errors import CorruptError, NoOptimizerStateError, UnsupportedError, short_name, short_names
from ..tensors.views import Tensor, concatenate
from ..torch_save.reader import open_torch
from .arguments import count_of, read_args
from .check_places import check_iteration, check_ranks, check_stages
from .core_decoder import OUTPUT, WORD, is_decoder
from .core_names import is_core
from .read import (
    MODEL_FILES,
    Copy,
    MegatronCheckpoint,
    RankMetadata,
    chunks_of_file,
    compare_copies,
    find_iteration,
    step_of,
)
from .read_core_buckets import size_of
from .read_core_decoder import assemble_decoder
from .read_distributed_optimizer import is_distributed
from .training_progress import read_progress

RANK = re.compile(r"mp_rank_(\d{1,5})(?:_(\d{1,5}))?(?:_(\d{1,5}))?")
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")
# Experts of a rank as modules, as projections of Transformer Engine, and as two matrices of all of them.
SEQUENTIAL = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d{1,5})\.(linear_fc[12]\.(?:weight|bias))")
GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d{1,5})")
TOGETHER = re.compile(r"(.+\.mlp\.experts)\.weight([12])")
# The dimension that tensor-parallel ranks split, by the end of a name; other tensors are whole on each of them.
_SPLITS = {
    **dict.fromkeys((".word_embeddings.weight", "output_layer.weight", ".softmax_offset"), 0),
    **dict.fromkeys((".linear_qkv.weight", ".linear_qkv.bias", ".linear_q_proj.weight"), 0),
    **dict.fromkeys((".linear_q_up_proj.weight", ".linear_kv_up_proj.weight"), 0),
    **dict.fromkeys((".linear_proj.weight", ".linear_fc2.weight"), 1),
}
# Gate and up projection of a rank are concatenated in one tensor.
_HALVES = (".linear_fc1.weight", ".linear_fc1.bias")
_DOWN = {
    ".linear_q_down_proj.weight": ("q_lora_rank",),
    ".linear_kv_down_proj.weight": ("kv_lora_rank", "qk_pos_emb_head_dim"),
}
Args = Mapping[str, Any]
Chunk = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """The chunks of each rank by ``(tensor, pipeline, expert)``, and what the files have next to tensors."""

    directory: Path
    args: Args
    sizes: tuple[int, int, int]
    ranks: Mapping[tuple[int, int, int], Sequence[Chunk]]

    def stages(self) -> Iterator[tuple[int, int]]:
        """The number of the chunk and the pipeline rank of each stage, in layer order."""
        return product(range(len(self.ranks[0, 0, 0])), range(self.sizes[1]))


def open_core_ranks(path: Path, options: ReadOptions) -> MegatronCheckpoint | None:
    """Index a decoder in files of each rank; None for a model that legacy Megatron has too.

    Args:
        path: a run directory, or one iteration.
        options: how to read.

    Raises:
        UnsafePickleError: a file refers to more than plain data.
        CorruptError: missing ranks, ranks that contradict each other, broken files.
        UnsupportedError: optimizer state, or a model that DynMo does not compute.
        UsageError: the iteration is missing, or the model needs an option.
    """
    directory = find_iteration(path, options.step)
    places = {
        match: child / name
        for child in sorted(directory.iterdir())
        for name in MODEL_FILES
        if (match := RANK.fullmatch(child.name)) and (child / name).is_file()
    }
    if not places:
        return None
    first = open_torch(next(iter(places.values())))
    if not any(map(is_core, chunks_of_file(first))):
        return None
    args = read_args(first.tree, str(first.path))
    # Each file once: those of the first tensor rank show the model.
    files = {match: open_torch(place) for match, place in places.items() if int(match[1]) == int(next(iter(places))[1])}
    chunks = {match: chunks_of_file(file) for match, file in files.items()}
    if not is_decoder([name for each in chunks.values() for chunk in each for name in chunk], args):
        return None
    tensor, stages, experts = (
        size_of(first.path, args, f"{each}_model_parallel_size") for each in ("tensor", "pipeline", "expert")
    )
    if options.with_optimizer:
        if "optimizer" not in first.tree and not is_distributed(first.path.parent):
            raise NoOptimizerStateError(f"{first.path}: has no optimizer state")
        raise UnsupportedError(
            f"{directory}: optimizer state of this model is read from torch_dist only; save it with --ckpt-format "
            "torch_dist, or convert the weights alone with --no-optimizer"
        )
    if args.get("expert_tensor_parallel_size") not in (None, tensor):
        raise UnsupportedError(
            f"{directory}: experts on other tensor-parallel ranks than the rest of the model "
            f"(expert_tensor_parallel_size = {args['expert_tensor_parallel_size']}) are not supported; save it with "
            "--ckpt-format torch_dist"
        )
    by_rank = {_key(match, stages, experts): match for match in places}
    expected = set(product(range(tensor), range(stages), range(experts)))
    if by_rank.keys() != expected:
        missing = [str(key) for key in sorted(expected - by_rank.keys())]
        raise CorruptError(
            f"{directory}: has files of {len(places)} ranks, expected {tensor} x {stages} x {experts} (tensor, "
            f"pipeline, expert){f'; {short_names(missing)} missing' if missing else ''}"
        )
    step = step_of(first)
    check_iteration(directory, step)
    opened = {key: files.get(match) or open_torch(places[match]) for key, match in by_rank.items()}
    check_ranks(opened)
    ranks = {}
    for key, match in by_rank.items():
        file = opened[key]
        ranks[key] = chunks.get(match) or chunks_of_file(file)
        # Megatron saves without an atomic rename. So a job that was killed leaves ranks of different iterations.
        if (step_of(file), len(ranks[key])) != (step, len(next(iter(chunks.values())))):
            raise CorruptError(f"{file.path}: number of chunks and iteration must be those of {first.path}")
    grid = _Grid(directory=directory, args=args, sizes=(tensor, stages, experts), ranks=ranks)
    copies: list[Copy] = []
    whole = _merged(grid, options, copies)
    progress = read_progress(first.tree, args, step, first.number)
    facts = RankMetadata(path=directory, args=args, version=3.0, step=step, progress=progress)
    found = assemble_decoder(facts, whole, options)
    remarks = [] if options.headers_only else list(compare_copies(copies, options))
    return replace(found, remarks=[*found.remarks, *remarks])


def _key(match: re.Match[str], stages: int, experts: int) -> tuple[int, int, int]:
    """Tensor, pipeline and expert rank; of two numbers the second one is a stage, except of one stage with experts."""
    second, third = int(match[2] or 0), int(match[3] or 0)
    return (int(match[1]), 0, second) if match[3] is None and stages == 1 < experts else (int(match[1]), second, third)


def _merged(grid: _Grid, options: ReadOptions, copies: list[Copy]) -> dict[str, Tensor]:
    """The whole tensors of all stages; what is stored several times is appended to ``copies``."""
    result: dict[str, Tensor] = {}
    begin, stages = 0, []
    is_tied = not grid.args.get("untie_embeddings_and_output_weights") and not options.untie
    for chunk, stage in grid.stages():
        named = _stage(grid, chunk, stage, copies)
        stages.append(named)
        numbers = {int(match[1]) for name in named if (match := LAYER.match(name))}
        if numbers != set(range(len(numbers))):
            raise CorruptError(f"{grid.directory}: the layers of stage {stage} must be numbered from 0")
        for name, tensor in named.items():
            match = LAYER.match(name)
            known = name if match is None else f"decoder.layers.{int(match[1]) + begin}.{name[match.end() :]}"
            if known == OUTPUT and is_tied and WORD in result:
                copies.append(("word table and its copy on the last stage", result[WORD], tensor))
            elif known in result:
                copies.append((f"{short_name(known)} of two stages", result[known], tensor))
            else:
                result[known] = tensor
        begin += len(numbers)
    check_stages(grid.directory, stages, WORD, LAYER, "final_layernorm.")
    return result


def _stage(grid: _Grid, chunk: int, stage: int, copies: list[Copy]) -> dict[str, Tensor]:
    """The whole tensors of a stage, its layers numbered from 0 and its experts globally."""
    tensor, _, experts = grid.sizes
    result: dict[str, Tensor] = {}
    for expert in range(experts):
        parts = [_single(grid, grid.ranks[rank, stage, expert][chunk], expert) for rank in range(tensor)]
        if any(part.keys() != parts[0].keys() for part in parts):
            differing = sorted({name for part in parts for name in part.keys() ^ parts[0].keys()})
            raise CorruptError(
                f"{grid.directory}: the tensor-parallel ranks of stage {stage} differ in {short_names(differing)}"
            )
        for name in parts[0]:
            whole = _whole(grid, name, [part[name] for part in parts], copies)
            if name in result:
                copies.append((f"{short_name(name)} of expert-parallel ranks 0 and {expert}", result[name], whole))
            else:
                result[name] = whole
    return result


def _single(grid: _Grid, chunk: Chunk, rank: int) -> dict[str, Tensor]:
    """The tensors of a rank with one for each expert, numbered globally."""
    experts = count_of(str(grid.directory), grid.args, "num_experts") or 0
    share = experts // grid.sizes[2]
    result = {}
    for name, tensor in chunk.items():
        if match := SEQUENTIAL.fullmatch(name):
            result[_expert(match[1], rank * share + int(match[2]), match[3])] = tensor
        elif match := GROUPED.fullmatch(name):
            result[_expert(match[1], rank * share + int(match[3]), match[2])] = tensor
        elif match := TOGETHER.fullmatch(name):
            for number, each in enumerate(_separated(grid, name, tensor, share, is_first=match[2] == "1")):
                result[_expert(match[1], rank * share + number, f"linear_fc{match[2]}.weight")] = each
        else:
            result[name] = tensor
    return result


def _expert(module: str, number: int, part: str) -> str:
    return f"{module}.experts.{number}.{part}"


def _separated(grid: _Grid, name: str, tensor: Tensor, experts: int, *, is_first: bool) -> list[Tensor]:
    """The weights of each expert, of the shape ``[rows, columns]``, in a matrix that has all of them transposed.

    The first one has the shape ``[hidden, experts * inner]`` and the bytes of ``[experts, hidden, inner]``; the second
    one is ``[experts * inner, hidden]``.
    """
    if len(tensor.shape) != 2 or not experts or tensor.shape[int(is_first)] % experts:
        raise CorruptError(f"{grid.directory}: {short_name(name)}: {list(tensor.shape)} does not fit {experts} experts")
    rows, columns = tensor.shape
    shape = (experts, rows, columns // experts) if is_first else (experts, rows // experts, columns)
    parts = tensor.flatten(0).unflatten(0, shape)
    return [parts.narrow(0, at, at + 1).squeeze_first().permute((1, 0)) for at in range(experts)]


def _whole(grid: _Grid, name: str, ranks: list[Tensor], copies: list[Copy]) -> Tensor:
    """A tensor of all tensor-parallel ranks."""
    if len(ranks) == 1:
        return ranks[0]
    if any(map(name.endswith, _HALVES)):
        if any(not each.shape or each.shape[0] % 2 for each in ranks):
            raise CorruptError(f"{grid.directory}: {short_name(name)}: must have a gate and an up projection")
        inner = [each.shape[0] // 2 for each in ranks]
        halves = [[each.narrow(0, n * at, n * (at + 1)) for each, n in zip(ranks, inner, strict=True)] for at in (0, 1)]
        return concatenate([part for half in halves for part in half], 0)
    dim = next((dim for end, dim in _SPLITS.items() if name.endswith(end)), None)
    for end, sizes in _DOWN.items():
        # These are whole on each rank, or column-parallel, by release and implementation.
        if name.endswith(end):
            rows = sum(count_of(str(grid.directory), grid.args, size) or 0 for size in sizes)
            dim = None if ranks[0].shape[:1] == (rows,) else 0
    if dim is None:
        copies += [
            (f"{short_name(name)} of tensor-parallel ranks 0 and {rank}", ranks[0], each)
            for rank, each in enumerate(ranks[1:], 1)
        ]
        return ranks[0]
    if any(len(each.shape) <= dim for each in ranks):
        raise CorruptError(f"{grid.directory}: {short_name(name)}: has the shape {list(ranks[0].shape)}")
    return concatenate(ranks, dim)
