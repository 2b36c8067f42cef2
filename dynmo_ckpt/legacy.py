"""Reads legacy Megatron GPT checkpoints (``iter_NNNNNNN/mp_rank_XX[_YYY]/model_optim_rng.pt``, versions 0 to 3.0).

What differs by version is the order of the rows of the query-key-value matrix; it and the names are data, in
``maps/megatron_gpt.json``. Layers are counted stage by stage, so that uneven stages come out right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .copyplan import OutputTensor, sources
from .errors import UsageError
from .faults import CorruptError, UnsupportedError
from .io.pickles import Inert, Name, TensorRef
from .io.reading import Reader, open_sources
from .io.torchfile import open_torch
from .names import Mapped, NameMap, Rule, axis_sizes, load_map
from .panels import panels
from .patterns import expand, rearrange
from .reshard import SPLIT_DIMS
from .views import Tensor, concatenate

RANK_NAME = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
LAYER_NAME = re.compile(r"language_model\.encoder\.layers\.(\d+)\.")
NOT_OURS = {
    "swiglu": False,
    "apply_layernorm_1p": False,
    "use_rotary_position_embeddings": False,
    "group_query_attention": False,
    "normalization": "LayerNorm",
    "num_experts": None,
}
HEAD_COPY = "word_embeddings_for_head.weight"


@dataclass(frozen=True, kw_only=True)
class LegacyOptions:
    """What a person adds where the files do not tell it."""

    vocab_size: int | None = None
    num_attention_heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class LegacyCheckpoint:
    """A legacy checkpoint under our names: the model's sizes, tensors, ties, step, and remarks for a person."""

    model: Mapping[str, Any]
    tensors: list[Mapped]
    ties: Mapping[str, str]
    step: int
    remarks: list[str]


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One rank's file: its tensors by canonical name for each virtual chunk."""

    path: Path
    chunks: Sequence[Mapping[str, Tensor]]
    args: Mapping[str, Any]
    version: float
    step: int


def is_legacy(path: Path) -> bool:
    """Whether ``path`` is a legacy Megatron directory or one iteration of it."""
    return path.is_dir() and (
        (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_*.pt"))
    )


def find_iteration(path: Path, step: int | None) -> Path:
    """The directory with the ranks' directories; raises ``CorruptError`` or ``UsageError`` where there is none."""
    if any(path.glob("mp_rank_*")):
        return path
    tracker = path / "latest_checkpointed_iteration.txt"
    if step is None:
        if not tracker.is_file():
            raise CorruptError(f"{path}: has neither mp_rank_* nor latest_checkpointed_iteration.txt")
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if text != "release" and not text.isdecimal():
            raise CorruptError(f"{tracker}: says {text!r}; a number or 'release' is expected")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        name = f"iter_{step:07d}"
    if not (path / name).is_dir():
        raise UsageError(
            f"{path / name}: is not there; the iterations are {sorted(p.name for p in path.glob('iter_*'))}"
        )
    return path / name


def open_legacy(path: Path, step: int | None, options: LegacyOptions) -> LegacyCheckpoint:
    """Index a legacy GPT checkpoint of any tensor- and pipeline-parallel size; of the bytes, only replicas' are read.

    Raises:
        UnsafePickleError: a file asks for more than plain data.
        CorruptError: missing ranks, ranks that contradict each other, broken files.
        UnsupportedError: another family, or a variant that our model does not compute.
    """
    directory = find_iteration(path, step)
    grid = _read_ranks(directory)
    first = grid[0][0]
    variant = {0.0: "0", 1.0: "1"}.get(first.version, "2")
    name_map = load_map("megatron_gpt", variant)
    _refuse_variants(first)
    stages = _numbered_stages(grid)
    layers = 1 + max(
        (int(match[1]) for stage in stages for name in stage if (match := LAYER_NAME.match(name))), default=-1
    )
    merged = {name: ranks for stage in stages for name, ranks in stage.items() if name != HEAD_COPY}
    remarks: list[str] = []
    model = _model(first, merged, layers, len(grid), options, remarks)
    ties = {} if "language_model.output_layer.weight" in merged else {"head.weight": "embedding.word.weight"}
    model["tied_embeddings"] = bool(ties)
    rules = [rule for rule in name_map.for_layers(layers) if rule.ours not in ties]
    _refuse_unmatched(rules, merged, directory)
    tensors = [_joined(rule, merged[rule.theirs], model, len(grid)) for rule in rules]
    _compare_replicas(rules, merged, stages)
    return LegacyCheckpoint(model=model, tensors=tensors, ties=ties, step=first.step, remarks=remarks)


def _read_ranks(directory: Path) -> list[list[_Rank]]:
    """All ranks' files, by tensor rank and then by stage."""
    found: dict[tuple[int, int], Path] = {}
    for child in directory.iterdir():
        match = RANK_NAME.fullmatch(child.name)
        if match:
            found[int(match[1]), int(match[2] or 0)] = child
    if not found:
        raise CorruptError(f"{directory}: has no mp_rank_* directory")
    tensor_ranks, stages = (1 + max(key[i] for key in found) for i in (0, 1))
    missing = [f"mp_rank_{t:02d}_{p:03d}" for t in range(tensor_ranks) for p in range(stages) if (t, p) not in found]
    if missing:
        raise CorruptError(f"{directory}: {len(missing)} of {tensor_ranks * stages} ranks are missing: {missing}")
    name_map = load_map("megatron_gpt", "2")
    grid = [[_read_rank(found[t, p], name_map) for p in range(stages)] for t in range(tensor_ranks)]
    for rank in (rank for row in grid for rank in row):
        if (rank.version, len(rank.chunks), rank.step) != (grid[0][0].version, len(grid[0][0].chunks), grid[0][0].step):
            raise CorruptError(f"{rank.path}: version, chunks or iteration are not those of {grid[0][0].path}")
    return grid


def _read_rank(directory: Path, name_map: NameMap) -> _Rank:
    names = [name for name in ("model_optim_rng.pt", "model_rng.pt") if (directory / name).is_file()]
    if not names:
        raise CorruptError(f"{directory}: has no model_optim_rng.pt")
    file = open_torch(directory / names[0])
    tree = file.tree
    if not isinstance(tree, dict):
        raise CorruptError(f"{file.path}: holds no dictionary")
    keys = ["model"] if "model" in tree else sorted((k for k in tree if re.fullmatch(r"model\d+", str(k))), key=_number)
    if not keys:
        raise CorruptError(f"{file.path}: holds no model; it has {sorted(map(str, tree))}")
    chunks = []
    for key in keys:
        flat = dict(_flatten(tree[key], ""))
        chunks.append({name_map.canonical(name): file.tensor(ref, name) for name, ref in flat.items()})
    args = tree.get("args")
    known = args.attributes if isinstance(args, Inert) and args.type == Name("argparse", "Namespace") else {}
    version, step = tree.get("checkpoint_version", 0), tree.get("iteration", tree.get("total_iters", 0))
    if not isinstance(version, int | float) or not isinstance(step, int):
        raise CorruptError(f"{file.path}: checkpoint_version {version!r}, iteration {step!r}")
    return _Rank(path=file.path, chunks=chunks, args=known, version=float(version), step=step)


def _number(key: str) -> int:
    return int(key.removeprefix("model"))


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, TensorRef]]:
    """Tensors of nested dictionaries by dotted name; extra states, which hold no weights, are left out."""
    if isinstance(value, TensorRef):
        yield prefix, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not str(key).endswith("_extra_state"):
                yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))


def _numbered_stages(grid: list[list[_Rank]]) -> list[dict[str, list[Tensor]]]:
    """For each chunk of each stage, in layer order: tensors of all tensor ranks by name, layers numbered globally."""
    chunks, stages = len(grid[0][0].chunks), len(grid[0])
    result = []
    offset = 0
    for chunk in range(chunks):
        for stage in range(stages):
            ranks = [row[stage].chunks[chunk] for row in grid]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise CorruptError(f"{grid[0][stage].path}: its tensor ranks do not hold the same tensors")
            numbers = {int(match[1]) for name in ranks[0] if (match := LAYER_NAME.match(name))}
            if numbers != set(range(len(numbers))):
                raise CorruptError(f"{grid[0][stage].path}: its layers are {sorted(numbers)}, not 0 and on")

            def numbered(match: re.Match[str], begin: int = offset) -> str:
                return f"language_model.encoder.layers.{int(match[1]) + begin}."

            result.append({LAYER_NAME.sub(numbered, name): [rank[name] for rank in ranks] for name in ranks[0]})
            offset += len(numbers)
    return result


def _refuse_variants(rank: _Rank) -> None:
    for field, ours in NOT_OURS.items():
        if rank.args.get(field, ours) != ours:
            raise UnsupportedError(f"{rank.path}: trained with {field} = {rank.args[field]!r}; only {ours!r} is mapped")
    csr = next((name for chunk in rank.chunks for name in chunk if name.endswith("row_offsets")), None)
    if csr is not None:
        raise UnsupportedError(f"{rank.path}: {csr}: weights stored as sparse rows are not mapped")


def _model(
    rank: _Rank,
    merged: Mapping[str, list[Tensor]],
    layers: int,
    tensor_ranks: int,
    options: LegacyOptions,
    remarks: list[str],
) -> dict[str, Any]:
    """The sizes of the model from its shapes, and what shapes cannot tell from the arguments or the person."""
    shapes = {}
    for name in ("embedding.word_embeddings", "embedding.position_embeddings", "encoder.layers.0.mlp.dense_h_to_4h"):
        ranks = merged.get(f"language_model.{name}.weight")
        if ranks is None or len(ranks[0].shape) != 2:
            raise UnsupportedError(f"{rank.path}: not a GPT: no matrix language_model.{name}.weight")
        shapes[name.rpartition(".")[2]] = ranks[0].shape
    padded, hidden = shapes["word_embeddings"][0] * tensor_ranks, shapes["word_embeddings"][1]
    heads = options.num_attention_heads or rank.args.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise UsageError(
            f"{rank.path}: the number of heads is {heads!r}; give --num-attention-heads, a divisor of {hidden}"
        )
    vocab = options.vocab_size or rank.args.get("orig_vocab_size") or rank.args.get("vocab_size")
    if not isinstance(vocab, int):
        vocab = padded
        remarks.append(
            f"the true vocabulary size is not told; {padded} rows are kept, --vocab-size cuts the padding off"
        )
    if not 1 <= vocab <= padded:
        raise UsageError(f"--vocab-size {vocab}: must be within 1 and the padded size {padded}")
    is_tanh = bool(rank.args.get("bias_gelu_fusion", True) or rank.args.get("openai_gelu", False))
    epsilon = rank.args.get("layernorm_epsilon", 1e-5)
    return {
        "family": "gpt",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": shapes["dense_h_to_4h"][0] * tensor_ranks,
        "num_attention_heads": heads,
        "max_position_embeddings": shapes["position_embeddings"][0],
        "vocab_size": vocab,
        "padded_vocab_size": padded,
        "layernorm_epsilon": float(epsilon) if isinstance(epsilon, int | float) else 1e-5,
        "activation": "gelu_tanh" if is_tanh else "gelu",
    }


def _refuse_unmatched(rules: list[Rule], merged: Mapping[str, list[Tensor]], directory: Path) -> None:
    wanted = {rule.theirs for rule in rules}
    for names, what in ((merged.keys() - wanted, "no rule of the map takes"), (wanted - merged.keys(), "missing are")):
        if names:
            raise UnsupportedError(f"{directory}: {what} {len(names)} tensors: {', '.join(sorted(names)[:5])}")


def _joined(rule: Rule, ranks: list[Tensor], model: Mapping[str, Any], tensor_ranks: int) -> Mapped:
    """The parts of all tensor ranks as one tensor in our layout, rows put in order rank by rank."""
    sizes = axis_sizes(model, model["padded_vocab_size"])
    dim = next((dim for suffix, dim in SPLIT_DIMS.items() if rule.ours.endswith(suffix)), None)
    shape = tuple(_product(sizes, group) for group in rule.our_axes)
    if dim is None or tensor_ranks == 1:
        content, _ = rearrange(ranks[0], rule.their_axes, rule.our_axes, sizes, sizes, rule.theirs)
        return Mapped(name=rule.ours, source_name=rule.theirs, content=content, shape=shape)
    axis = rule.our_axes[dim][0]
    local = {**sizes, axis: sizes[axis] // tensor_ranks}
    parts = [rearrange(part, rule.their_axes, rule.our_axes, local, local, rule.theirs)[0] for part in ranks]
    at = sum(len(group) for group in rule.our_axes[:dim])
    joined = expand(concatenate(parts, at), rule.our_axes, sizes, rule.theirs)
    return Mapped(name=rule.ours, source_name=rule.theirs, content=joined, shape=shape)


def _product(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    result = 1
    for axis in axes:
        result *= sizes[axis]
    return result


def _compare_replicas(
    rules: list[Rule], merged: Mapping[str, list[Tensor]], stages: list[dict[str, list[Tensor]]]
) -> None:
    """What several ranks hold alike must be equal: replicated tensors, and the head's copy of the embedding."""
    for rule in rules:
        if not rule.ours.endswith(tuple(SPLIT_DIMS)):
            for rank, part in enumerate(merged[rule.theirs][1:], 1):
                _refuse_unequal(merged[rule.theirs][0], part, f"{rule.theirs} of tensor ranks 0 and {rank}")
    embedding = merged["language_model.embedding.word_embeddings.weight"]
    for stage in stages:
        for rank, part in enumerate(stage.get(HEAD_COPY, [])):
            _refuse_unequal(embedding[rank], part, f"{HEAD_COPY} and the embedding of tensor rank {rank}")


def _refuse_unequal(left: Tensor, right: Tensor, what: str) -> None:
    outputs = [OutputTensor(key=what, shape=side.shape, content=side) for side in (left, right)]
    with open_sources(sources(outputs)) as files:
        pair = [panels(output, Reader(files)) for output in outputs]
        same = left.shape == right.shape and all(bytes(a) == bytes(b) for a, b in zip(*pair, strict=True))
    if not same:
        path = right.pieces[0].view.array.path
        raise CorruptError(f"{path}: {what} differ, where they must be equal; the checkpoint contradicts itself")
