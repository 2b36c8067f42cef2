"""The analytic cost model: the time and memory of each item from its shape and a device.

Operations of a microbatch of ``b`` samples of ``s`` tokens, hidden size ``h``, ``a`` heads (Narayanan et al. 2021,
arXiv 2104.04473, appendix; Korthikanti et al. 2022, arXiv 2205.05198, equations 1 to 4):

* a matrix of ``n`` weights costs ``2 b s n`` forward, as much for the input gradient, as much for the weight gradient;
* the scores and the weighted sum of attention cost ``4 b s^2 (a d)`` forward and twice that for the input gradient;
* activations of a block are ``s b h (10 + 24 / t) + 5 a b s^2 / t`` bytes at two bytes a number; selective
  recomputation drops the last term, full recomputation keeps ``2 s b h``.

Worked number: h = 1024, 4 h^2 + 8 h^2 weights a block, b s = 4096: 24 * 4096 * 1024^2 = 103 GFLOP forward.

Norms, activations and softmax are bound by memory: their bytes are counted over the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import ItemCosts
from .devices import BYTES_PER_NUMBER, Device
from .errors import UsageError
from .formats.profile import Header, Item

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an item computes in a microbatch, for each tensor-parallel rank.

    Attributes:
        weights: the sizes of its matrices that a token meets (of an expert model, of the experts that it meets).
        score_flops: forward operations of attention beyond its matrices.
        stream_bytes: what it reads and writes beside its matrices, forward.
        reduce_bytes: what tensor parallelism reduces, forward.
        activation_bytes: kept from forward to backward.
    """

    weights: tuple[int, ...]
    score_flops: float = 0.0
    stream_bytes: float = 0.0
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
    recompute: str = "none"


def _reduce_ns(size_bytes: float, ranks: int, device: Device) -> float:
    """A ring all-reduce: ``2 (t - 1) / t`` of the bytes over the link, and its latency."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * 1e9 * size_bytes / device.link_bandwidth_bytes_per_s + 2 * device.link_latency_ns


def item_times(work: Work, shape: Shape, device: Device) -> tuple[int, int, int]:
    """Forward, input-gradient and weight-gradient time of one item in ns."""
    products = sum(device.product_ns(2 * shape.tokens * n, shape.dtype) for n in work.weights)
    scores = device.product_ns(work.score_flops, shape.dtype)
    stream = device.touch_ns(work.stream_bytes)
    reduce = _reduce_ns(work.reduce_bytes, shape.tensor_parallel, device)
    launch = device.operation_ns * (len(work.weights) + 1)
    forward = products + scores + stream + reduce + launch
    backward_input = products + 2 * scores + 2 * stream + reduce + launch
    if shape.recompute == "full":
        backward_input += forward
    elif shape.recompute == "selective":
        backward_input += scores
    return round(forward), round(backward_input), round(products)


def work_of_item(item: Item, shape: Shape, heads: int, weights: Sequence[int] | None = None) -> Work:
    """The work of one item, from its kind and its number of parameters.

    Args:
        item: the item; its ``param_count`` is of one tensor-parallel rank.
        shape: the microbatch.
        heads: attention heads; the score terms need them.
        weights: its matrices where they are known better than as one (the experts that a token meets, say).
    """
    number = BYTES_PER_NUMBER[shape.dtype]
    t, s = shape.tensor_parallel, shape.sequence
    stream = shape.tokens * shape.hidden * number
    if item.kind == "embedding":
        return Work(weights=(), stream_bytes=3 * stream, activation_bytes=2 * shape.tokens)
    score = shape.tokens * s * heads / t
    if item.kind == "head":
        vocabulary = item.param_count // max(1, shape.hidden)
        return Work(
            weights=tuple(weights or (item.param_count,)),
            stream_bytes=2 * stream + 3 * shape.tokens * vocabulary * 4,
            activation_bytes=shape.tokens * (2 * shape.hidden + 4 * vocabulary),
        )
    attends = item.kind in ("attention", "cross_attention", "layer")
    kept = {"attention": (5, 6), "cross_attention": (5, 6), "mlp": (5, 18), "layer": (10, 24)}[item.kind]
    activation = shape.tokens * shape.hidden * (kept[0] + kept[1] / t) * number / 2
    if attends and shape.recompute == "none":
        activation += 5 * score * number / 2
    if shape.recompute == "full":
        activation = shape.tokens * shape.hidden * number if item.kind != "layer" else 2 * stream
    return Work(
        weights=tuple(weights or (item.param_count,)),
        score_flops=4 * shape.tokens * s * shape.hidden / t if attends else 0.0,
        stream_bytes=(8 if item.kind != "layer" else 16) * stream + (3 * score * number if attends else 0),
        reduce_bytes=stream,
        activation_bytes=round(activation),
    )


def costs_of(works: Sequence[Work], shape: Shape, device: Device) -> ItemCosts:
    """The costs of all items."""
    if shape.dtype not in BYTES_PER_NUMBER or shape.dtype not in device.flops_per_s:
        raise UsageError(f"dtype {shape.dtype!r} is not one of {', '.join(device.flops_per_s)} on {device.name}")
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


def costs_of_header(header: Header, device: Device, dtype: str, recompute: str = "none") -> ItemCosts:
    """The costs of a profile's items before anything was measured, for a dry run.

    A tied head has the weights of the item that it is tied to. The number of heads is taken as hidden size over 64.
    """
    shape = Shape(
        tokens=header.micro_batch_size * header.model.sequence_length,
        sequence=header.model.sequence_length,
        hidden=header.model.hidden_size,
        dtype=dtype,
        tensor_parallel=header.tensor_parallel_size,
        recompute=recompute,
    )
    heads = max(1, header.model.hidden_size // 64)
    params = {item.name: item.param_count for item in header.items}
    works = []
    for item in header.items:
        own = max(item.param_count, params.get(item.tied_to or "", 0)) if item.kind == "head" else item.param_count
        works.append(work_of_item(item, shape, heads, (own,)))
    return costs_of(works, shape, device)
