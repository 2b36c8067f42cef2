"""The flat state of Megatron-core's distributed optimizer, of a decoder with the names of ``core_decoder.json``.

As :mod:`.read_core_buckets`, with what legacy Megatron does not have::

    expert ranks 1      one optimizer: the experts are in the buffer of their chunk
    expert ranks N      chained_0 without the experts, chained_1 with the experts of each rank

No file records the order of the parameters in a buffer. It depends on the modules: norms of their own come before the
projections, those of Transformer Engine are in them; experts are modules, or parts of grouped projections. Each order
is tried, and the right one has masters that round to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..formats.checkpoint_rules import EXPERT_BIASES
from ..io.errors import UnsupportedError
from ..maps.name_map import Layout, layout_of, load_map, to_foreign, to_native
from ..tensors.views import Tensor
from .core_decoder import LAYER, OUTPUT, WORD
from .read import STATE_KINDS, MegatronCheckpoint
from .read_core_buckets import REMEDY, FlatState, buffers_of, num_chunks, place_chunk, size_of
from .read_core_decoder import EXPERT, MAP, joined

Chunk = dict[str, Tensor]
# The parts of a layer in the order of the module's parameters. Attention creates its output projection first; norms of
# their own precede what they normalize, except those of latents, which follow all projections.
_ATTENTION = (
    *("self_attention.core_attention.", "self_attention.linear_proj."),
    *("self_attention.linear_qkv.layer_norm_", "self_attention.linear_qkv.", "self_attention.q_layernorm."),
    *("self_attention.k_layernorm.", "self_attention.linear_q_proj.", "self_attention.linear_q_down_proj."),
)
_LATENTS = (
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
)
_LATENT_NORMS = tuple(f"{_LATENTS[at]}layer_norm_" for at in (0, 2))
_EXPERTS = (
    *("pre_mlp_layernorm.", "mlp.router.", "mlp.experts.", "mlp.shared_experts.linear_fc1."),
    *("mlp.shared_experts.linear_fc2.", "mlp.shared_experts."),
)
_MLP = ("mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2.")
_FUSED_NORMS = (
    *("input_layernorm.", *_ATTENTION, _LATENT_NORMS[0], *_LATENTS[:2], _LATENT_NORMS[1], _LATENTS[2]),
    *(*_EXPERTS, *_MLP),
)
_OWN_NORMS = (
    *("input_layernorm.", "self_attention.linear_qkv.layer_norm_", *_ATTENTION),
    *(*(f"{part}weight" for part in _LATENTS), *_LATENT_NORMS, *_EXPERTS, *_MLP),
)
# The parts of a depth of multi-token prediction; its layer is before the last one.
_PREDICTION = {"enorm.": 0, "hnorm.": 1, "eh_proj.": 2, "final_layernorm.": 4}
_IN_LAYER = 3
EXPERTS = ".mlp.experts.experts."


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """The chunks of all pipeline ranks, in layer order; chunk ``i`` is on rank ``i % num_stages``."""

    num_layers: int
    num_stages: int
    num_chunks: int

    def chunks(self, weights: Mapping[str, Tensor]) -> list[Chunk]:
        """Weights by chunk; a last one apart from the word table has a copy of a tied table."""
        found: list[Chunk] = [{} for _ in range(self.num_chunks)]
        for name, tensor in weights.items():
            match = LAYER.fullmatch(name)
            if match is not None and match[1] == "decoder":
                number = int(match[2]) * self.num_chunks // self.num_layers
            else:
                number = 0 if name == WORD else -1
            found[number][name] = tensor
        if self.num_chunks > 1 and WORD in weights and OUTPUT not in weights:
            found[-1][OUTPUT] = weights[WORD]
        return found


def read_flat_decoder(
    flats: Sequence[FlatState], whole: MegatronCheckpoint, tables: Mapping[str, Tensor], args: Mapping[str, Any]
) -> dict[str, MegatronCheckpoint]:
    """The optimizer state of each kind in place of the weights.

    Args:
        flats: the state of the optimizer, and of that of the experts where it is another one; its buckets are flat.
        whole: the weights under DynMo's names.
        tables: the stored word table and head by name, each of the shape ``[padded vocabulary, hidden]``.
        args: Megatron's arguments.

    Raises:
        UnsupportedError: experts split by tensor-parallel ranks, uneven stages, several types of weights, or an unknown
            layout.
        CorruptError: missing ranks, or buffers that contradict each other.
    """
    path, model, experts = flats[0].path, whole.model, whole.model.get("num_experts") or 0
    tensor, stages, expert = (
        size_of(path, args, f"{each}_model_parallel_size") for each in ("tensor", "pipeline", "expert")
    )
    if experts and (tensor > 1 or experts % expert):
        raise UnsupportedError(
            f"{path}: flat optimizer buckets of {experts} experts on {tensor} tensor-parallel and {expert} "
            f"expert-parallel ranks are not supported; {REMEDY}"
        )
    chunks = num_chunks(path, model, args, stages)
    grid = _Grid(num_layers=model["num_layers"], num_stages=stages, num_chunks=chunks)
    layout = layout_of(load_map(MAP), model, foreign_vocab_size=model["padded_vocab_size"])
    ranks = [_weights(layout, whole, tables, rank, tensor) for rank in range(tensor)]
    buffers = {name: weight for name, weight in ranks[0].items() if name.endswith(EXPERT_BIASES)}
    is_apart = experts > 0 and expert > 1
    trained = [
        {n: w for n, w in rank.items() if n not in buffers and not (is_apart and EXPERT.fullmatch(n))} for rank in ranks
    ]
    state = _state(flats[0], grid, trained, args)
    if is_apart:
        share = experts // expert
        own = [
            {n: w for n, w in ranks[0].items() if (m := EXPERT.fullmatch(n)) and int(m[2]) // share == rank}
            for rank in range(expert)
        ]
        for part in _state(flats[1], grid, own, args):
            for kind, tensors in part.items():
                state[0][kind] |= tensors
    result = {}
    for kind in STATE_KINDS:
        merged = [joined(each[kind]) for each in state]
        named = {name: [each[name] for each in merged] for name in merged[0] if name != OUTPUT or name in ranks[0]}
        named |= {name: [tensor] for name, tensor in buffers.items()}
        result[kind] = replace(whole, tensors=to_native(layout, named, whole.ties)[0])
    return result


def _weights(layout: Layout, whole: MegatronCheckpoint, tables: Mapping[str, Tensor], rank: int, ranks: int) -> Chunk:
    """The weights of a tensor-parallel rank with the shapes that it has, and one for each expert."""
    stored = {item.name: item.content for item in whole.tensors}
    found: Chunk = {}
    for each in to_foreign(layout, stored, whole.ties, rank=rank, ranks=ranks):
        tensor = each.content.merge_dims(each.shape)
        layer, marker, part = each.name.partition(EXPERTS)
        if marker:
            for number in range(each.shape[0]):
                found[f"{layer}{marker}{number}.{part}"] = tensor.narrow(0, number, number + 1).squeeze_first()
        else:
            found[each.name] = tensor
    # The stored tables have rows of padding, too.
    for name, table in tables.items():
        rows = table.shape[0] // ranks
        found[name] = table.narrow(0, rank * rows, (rank + 1) * rows)
    return found


def _state(
    flat: FlatState, grid: _Grid, parts: Sequence[Mapping[str, Tensor]], args: Mapping[str, Any]
) -> list[dict[str, Chunk]]:
    """The state of each rank of a stage, by kind and name; ``parts`` are the weights of these ranks in all stages."""
    chunks = [grid.chunks(part) for part in parts]
    # A chunk without weights of this optimizer, such as one without experts, has no buffer.
    owned = [
        [chunk for chunk in rank[stage :: grid.num_stages] if chunk]
        for stage in range(grid.num_stages)
        for rank in chunks
    ]
    buffers = buffers_of(flat, [len(each) for each in owned])
    found: list[dict[str, Chunk]] = [{kind: {} for kind in STATE_KINDS} for _ in parts]
    for at, each in enumerate(owned):
        for number, chunk in enumerate(each):
            for kind, tensors in place_chunk(flat, buffers, (at, number), _orders(chunk), args).items():
                found[at % len(parts)][kind] |= tensors
    return found


def _orders(chunk: Chunk) -> Iterator[Chunk]:
    has_experts = any(map(EXPERT.fullmatch, chunk))
    for parts in (_OWN_NORMS, _FUSED_NORMS):
        for is_grouped in (False, True) if has_experts else (False,):
            key = partial(_position, parts=parts, is_grouped=is_grouped)
            yield {name: chunk[name] for name in sorted(chunk, key=key)}


def _position(name: str, *, parts: Sequence[str], is_grouped: bool) -> tuple[int, ...]:
    """What sorts the names of parameters in the order of a module."""
    match = LAYER.fullmatch(name)
    if match is None:
        return (0,) if name == WORD else (2,) if name.startswith("decoder.") else (4,)
    block, rest = (1, match[3]) if match[1] == "decoder" else (3, match[3])
    before = next((at for part, at in _PREDICTION.items() if rest.startswith(part)), _IN_LAYER)
    at = next((at for at, part in enumerate(parts) if rest.startswith(part)), len(parts))
    is_bias = int(rest.endswith(".bias"))
    if expert := EXPERT.fullmatch(name):
        number, projection = int(expert[2]), int(expert[3].startswith("linear_fc2."))
        # Of grouped projections each has the weights of all experts, and then the biases.
        inner = (projection, is_bias, number) if is_grouped else (number, projection, is_bias)
        return block, int(match[2]), before, at, *inner
    return block, int(match[2]), before, at, is_bias
