"""The analytic cost model: the time and memory of each item from its shape and a device.

Operations of a microbatch of ``b`` samples of ``s`` tokens, hidden size ``h``, ``a`` heads of size ``d``, ``t``
tensor-parallel ranks (Narayanan et al. 2021, arXiv 2104.04473, appendix; Korthikanti et al. 2022, arXiv 2205.05198,
equations 1 to 6):

* a matrix of ``n`` weights costs ``2 b s n`` forward, as much for the input gradient, as much for the weight gradient;
* the scores and the weighted sum of attention cost ``4 b s^2 (a d)`` forward and twice that for the input gradient;
* activations of a block are ``s b h (10 + 24 / t) + 5 a b s^2 / t`` bytes at two bytes a number; sequence parallelism
  divides the 10 by ``t`` as well; selective recomputation drops the last term, full recomputation keeps ``2 s b h``.

Worked number: h = 1024, 4 h^2 + 8 h^2 weights a block, b s = 4096: 24 * 4096 * 1024^2 = 103 GFLOP forward.

Norms, dropout, residuals, activations and softmax are bound by memory: the numbers that they read and write are
counted (the constants below) over the memory bandwidth. Tensor parallelism reduces the block's output once forward
and once backward for each of attention and MLP. Attention is unfused unless said otherwise: its scores go through
memory. Fused attention keeps and moves no scores and computes them again in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._common.document import short_repr
from .._common.errors import UsageError
from ..formats.profile import Header, Item
from .cost_window import ItemCosts
from .devices import BYTES_PER_NUMBER, Device

RECOMPUTE = ("none", "selective", "full")
STREAM = (5.5, 8.5)
"""Numbers a token and unit of width that norm, dropout and residual of an item touch, forward and backward."""
INNER = (3.0, 4.0)
"""The same of what lies between an item's matrices: transposes, or bias and activation."""
SCORES = (6.5, 9.5)
"""Times that the scores go through memory: product, scale and mask, softmax, dropout, and the weighted sum."""
LOGITS = (5.0, 3.0)
"""The same of the logits, in four bytes a number: cast, maximum, exponents, sum, and the gradient."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an item computes in a microbatch, on each tensor-parallel rank.

    Attributes:
        weights: the sizes of its matrices that a token meets (of an expert model, of the experts that it meets).
        score_flops: forward operations of attention beyond its matrices.
        score_bytes: what the scores move, forward and backward.
        stream_bytes: what it reads and writes beside its matrices and scores, forward and backward.
        reduce_bytes: what tensor parallelism reduces, forward and again backward.
        activation_bytes: kept from forward to backward.
    """

    weights: tuple[int, ...]
    score_flops: float = 0.0
    score_bytes: tuple[float, float] = (0.0, 0.0)
    stream_bytes: tuple[float, float] = (0.0, 0.0)
    reduce_bytes: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The microbatch and how it is run."""

    tokens: int
    sequence: int
    hidden: int
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    fused_attention: bool = False


def item_times(work: Work, shape: Shape, device: Device) -> tuple[int, int, int]:
    """Forward, input-gradient and weight-gradient time of one item in ns."""
    products = sum(device.product_ns(2 * shape.tokens * n, shape.dtype) for n in work.weights)
    scores = device.product_ns(work.score_flops, shape.dtype)
    moved = [device.touch_ns(size) for size in work.score_bytes]
    stream = [device.touch_ns(size) for size in work.stream_bytes]
    reduce = device.reduce_ns(work.reduce_bytes, shape.tensor_parallel) if work.reduce_bytes else 0.0
    launch = device.operation_ns * (len(work.weights) + 1)
    forward = products + scores + moved[0] + stream[0] + reduce + launch
    backward_input = products + 2 * scores + moved[1] + stream[1] + reduce + launch
    if shape.recompute == "full":
        backward_input += forward
    elif shape.recompute == "selective" or shape.fused_attention:
        backward_input += scores + moved[0]
    return round(forward), round(backward_input), round(products)


def work_of_item(
    item: Item,
    shape: Shape,
    heads: int,
    weights: Sequence[int] | None = None,
    *,
    attention: int | None = None,
    keys: int | None = None,
    width: int | None = None,
) -> Work:
    """The work of one item, from its kind and its number of parameters.

    Args:
        item: the item; its ``param_count`` is of one tensor-parallel rank.
        shape: the microbatch.
        heads: attention heads; the score terms need them.
        weights: its matrices where they are known better than as one (the experts that a token meets, say).
        attention: heads times their size; the hidden size where not given.
        keys: the most tokens that a token attends to; all of the sequence where not given.
        width: numbers a token between its matrices; three times the hidden size for attention, four for an MLP.
    """
    number = BYTES_PER_NUMBER[shape.dtype]
    t, s = shape.tensor_parallel, keys or shape.sequence
    stream = shape.tokens * shape.hidden * number
    outer = stream / t if shape.sequence_parallel else stream
    if item.kind == "embedding":
        return Work(
            weights=(), stream_bytes=(3 * outer, 3 * outer), reduce_bytes=stream, activation_bytes=2 * shape.tokens
        )
    if item.kind == "head":
        found = tuple(weights or (item.param_count,))
        logits = 4 * shape.tokens * max(1, found[-1] // max(1, shape.hidden))
        return Work(
            weights=found,
            stream_bytes=(2 * outer + LOGITS[0] * logits, 3 * outer + LOGITS[1] * logits),
            activation_bytes=round(2 * outer) + logits,
        )
    attends = item.kind in ("attention", "cross_attention", "layer")
    parts = 2 if item.kind == "layer" else 1
    score = shape.tokens * s * heads / t * number if attends else 0.0
    usual = (3 if item.kind != "mlp" else 0) + (4 if item.kind in ("mlp", "layer") else 0)
    inner = usual if width is None else width / shape.hidden
    return Work(
        weights=tuple(weights or (item.param_count,)),
        score_flops=4 * shape.tokens * s * (attention or shape.hidden) / t if attends else 0.0,
        score_bytes=(0.0, 0.0) if shape.fused_attention else (SCORES[0] * score, SCORES[1] * score),
        stream_bytes=(
            parts * STREAM[0] * outer + INNER[0] * inner / 3 * stream / t,
            parts * STREAM[1] * outer + INNER[1] * inner / 3 * stream / t,
        ),
        reduce_bytes=parts * stream,
        activation_bytes=_activation_bytes(item.kind, shape, score if attends else 0.0, inner / usual),
    )


def _activation_bytes(kind: str, shape: Shape, score_bytes: float, wider: float = 1.0) -> int:
    """What a part of a block keeps, after Korthikanti et al.; halves of it for attention and MLP.

    ``wider`` is the width between its matrices against the usual one.
    """
    number = BYTES_PER_NUMBER[shape.dtype]
    outer, inner = {"mlp": (5, 18), "layer": (10, 24)}.get(kind, (5, 6))
    t = shape.tensor_parallel
    width = shape.tokens * shape.hidden * number
    if shape.recompute == "full":
        # The input of the block is kept once; the MLP of a block in two items is recomputed from the same input.
        kept = 0.0 if kind == "mlp" else width / (t if shape.sequence_parallel else 1)
        return round(kept)
    kept = width / 2 * ((outer / t if shape.sequence_parallel else outer) + wider * inner / t)
    if shape.recompute == "none" and not shape.fused_attention:
        kept += 5 * score_bytes / 2
    return round(kept)


def costs_of(works: Sequence[Work], shape: Shape, device: Device) -> ItemCosts:
    """The costs of all items."""
    if shape.dtype not in device.flops_per_s:
        raise UsageError(f"--dtype {shape.dtype}: {device.name} has {', '.join(device.flops_per_s)}")
    if shape.recompute not in RECOMPUTE:
        raise UsageError(f"recompute must be one of {', '.join(RECOMPUTE)}, is {shape.recompute!r}")
    times = [item_times(work, shape, device) for work in works]
    forward, first, second = zip(*times, strict=True)
    return ItemCosts(
        forward_ns=forward,
        backward_input_ns=first,
        backward_weight_ns=second,
        activation_bytes=tuple(work.activation_bytes for work in works),
        split=True,
        records=0,
        from_step=0,
        to_step=0,
    )


def whole(value: object, name: str) -> int:
    """An optional key of a header, which the format does not check, as a whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(
            f"the header's x_ value of {name} must be a whole number of at least 0, is {short_repr(value)}"
        )
    return value


def header_works(header: Header, shape: Shape) -> tuple[Work, ...]:
    """The work of a profile's items before anything was measured.

    A tied head has the weights of the item that it is tied to. Where the header does not say it in its optional keys,
    the heads are taken as hidden size over 64 and a token meets all parameters of an item.
    """
    stated = header.model.x_num_attention_heads
    heads = max(1, header.model.hidden_size // 64 if stated is None else whole(stated, "model.num_attention_heads"))
    params = {item.name: item.param_count for item in header.items}
    works = []
    for item in header.items:
        stated = item.x_active_param_count
        met = item.param_count if stated is None else whole(stated, f"{item.name}.active_param_count")
        if item.kind == "head":
            met = max(met, params.get(item.tied_to or "", 0))
        works.append(work_of_item(item, shape, heads, (met,)))
    return tuple(works)


def costs_of_header(
    header: Header, device: Device, dtype: str, recompute: str = "none", *, fused_attention: bool = False
) -> ItemCosts:
    """The costs of a profile's items before anything was measured, for a dry run."""
    shape = Shape(
        tokens=header.micro_batch_size * header.model.sequence_length,
        sequence=header.model.sequence_length,
        hidden=header.model.hidden_size,
        dtype=dtype,
        tensor_parallel=header.tensor_parallel_size,
        recompute=recompute,
        fused_attention=fused_attention,
    )
    costs = costs_of(header_works(header, shape), shape, device)
    kept = zip(costs.activation_bytes, header.items, strict=True)
    return replace(
        costs,
        activation_bytes=tuple(
            size if item.x_activation_bytes is None else whole(item.x_activation_bytes, f"{item.name}.activation_bytes")
            for size, item in kept
        ),
    )


def step_flops(header: Header, works: Sequence[Work], shape: Shape) -> float:
    """Useful operations of one step on all tensor-parallel ranks of one replica: forward and twice that backward."""
    forward = sum(2 * shape.tokens * sum(work.weights) + work.score_flops for work in works)
    return 3.0 * forward * header.microbatches * header.tensor_parallel_size
