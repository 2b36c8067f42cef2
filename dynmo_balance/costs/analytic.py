"""The analytic cost model: time and memory of each item from its shape and a device.

Notation: a microbatch of ``b`` samples with ``s`` tokens, hidden size ``h``, ``a`` heads of size ``d``, ``t``
tensor-parallel ranks (Narayanan et al. 2021, arXiv 2104.04473, appendix; Korthikanti et al. 2022, arXiv 2205.05198,
equations 1 to 6).

* A matrix of ``n`` weights takes ``2 b s n`` operations forward, and the same number for the input and for the
  weight gradient.
* The attention scores and their weighted sum take ``4 b s^2 (a d)`` operations forward, and twice that for the input
  gradient.
* A block stores ``s b h (10 + 24 / t) + 5 a b s^2 / t`` bytes of activations at two bytes per number. Sequence
  parallelism also divides the 10 by ``t``. Selective recomputation drops the last term, full recomputation stores
  ``2 s b h``.

Worked example: h = 1024 has 4 h^2 + 8 h^2 weights per block; with b s = 4096, 24 * 4096 * 1024^2 = 103 GFLOP forward.

Norms, dropout, residuals, activations and softmax are memory-bound: the numbers that they read and write (the
constants below) are divided by the memory bandwidth. Tensor parallelism reduces the output of attention and MLP once
forward and once backward. Attention is unfused by default: its scores pass through memory. Fused attention stores and
moves no scores, and recomputes them in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._common.document import short_repr
from .._common.errors import UsageError
from ..formats.profile import Header, Item
from .cost_window import ItemCosts
from .devices import BYTES_PER_NUMBER, Device
from .vocabulary import ShardTimes

MAX_MATRICES = 64
"""Maximum number of products that a header may state for an item."""
RECOMPUTE = ("none", "selective", "full")
STREAM = (5.5, 8.5)
"""Memory accesses per token and hidden unit of norm, dropout and residual, forward and backward.

With unfused kernels each elementwise operation reads its inputs and writes its output once.
"""
INNER = (3.0, 4.0)
"""The same between the matrices of an item: transposes, or bias and activation."""
SCORES = (6.5, 9.5)
"""Memory accesses per score: product, scale and mask, softmax, dropout, weighted sum."""
LOGITS = (5.0, 3.0)
"""Memory accesses per logit, at four bytes each: cast, maximum, exponents, sum, and the gradient."""


@dataclass(frozen=True, kw_only=True)
class ItemWork:
    """What an item computes in a microbatch on each tensor- and context-parallel rank.

    Attributes:
        weights: the sizes of the matrices that a token uses (for experts, of the experts that it is routed to).
        score_flops: forward operations of attention apart from its matrices.
        score_bytes: memory traffic of the scores, forward and backward.
        stream_bytes: memory traffic apart from matrices and scores, forward and backward.
        reduce_bytes: bytes that tensor parallelism reduces, forward and again backward.
        exchange_bytes: keys and values that come from other context-parallel ranks; their gradients go back.
        activation_bytes: stored from forward to backward.
    """

    weights: tuple[int, ...]
    score_flops: float = 0.0
    score_bytes: tuple[float, float] = (0.0, 0.0)
    stream_bytes: tuple[float, float] = (0.0, 0.0)
    reduce_bytes: float = 0.0
    exchange_bytes: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class MicrobatchShape:
    """The microbatch and how it is computed.

    Attributes:
        tokens: samples times sequence length of a microbatch, over the context-parallel ranks.
        sequence: sequence length.
        hidden: hidden size.
        dtype: of matrix products.
        tensor_parallel: number of ranks.
        sequence_parallel: whether norms and dropouts are sharded over the tensor-parallel ranks.
        recompute: ``none``, ``selective`` or ``full``.
        fused_attention: whether scores stay out of memory.
        context_parallel: number of ranks that share the tokens of a sample.
    """

    tokens: int
    sequence: int
    hidden: int
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    fused_attention: bool = False
    context_parallel: int = 1


def exposed_exchange_ns(work: ItemWork, shape: MicrobatchShape, device: Device, compute_ns: float) -> float:
    """The time of an exchange over context-parallel ranks that no computation hides, in ns.

    It runs in two halves, and the second one while the first half of the heads attends.

    Args:
        work: the item.
        shape: the microbatch.
        device: its link, or its network where the ranks do not fit into a node.
        compute_ns: time of the attention of all heads.
    """
    if not work.exchange_bytes:
        return 0.0
    rate, latency = device.stage_link(shape.tensor_parallel * shape.context_parallel, 1)
    half = 1e9 * work.exchange_bytes / rate / 2 + latency
    return half + max(0.0, half - compute_ns / 2)


def item_times(work: ItemWork, shape: MicrobatchShape, device: Device) -> tuple[int, int, int]:
    """Forward, input-gradient and weight-gradient time of one item, in ns."""
    # Both gradients of a matrix product take the operations of its forward pass each: ``products`` three times.
    products = sum(device.product_ns(2 * shape.tokens * n, shape.dtype) for n in work.weights)
    scores = device.product_ns(work.score_flops, shape.dtype)
    moved = [device.touch_ns(size) for size in work.score_bytes]
    stream = [device.touch_ns(size) for size in work.stream_bytes]
    reduce = device.reduce_ns(work.reduce_bytes, shape.tensor_parallel) if work.reduce_bytes else 0.0
    # One launch per matrix, and one for the elementwise operations between them, which queue up behind the products.
    launch = device.operation_ns * (len(work.weights) + 1)
    attention = scores + moved[0], 2 * scores + moved[1]
    exchange = [exposed_exchange_ns(work, shape, device, each) for each in attention]
    forward = products + scores + moved[0] + stream[0] + reduce + launch + exchange[0]
    # Scores have no weights: the gradients of both their factors are input gradients, hence twice the operations.
    backward_input = products + 2 * scores + moved[1] + stream[1] + reduce + launch + exchange[1]
    # Recomputation runs before the input gradient, which other workers wait for, so it is counted there. Fused
    # attention always recomputes its scores (FlashAttention: Dao et al. 2022, arXiv 2205.14135, section 3.1).
    if shape.recompute == "full":
        backward_input += forward
    elif shape.recompute == "selective" or shape.fused_attention:
        backward_input += scores + moved[0]
    return round(forward), round(backward_input), round(products)


def work_of_item(
    item: Item,
    shape: MicrobatchShape,
    heads: int,
    weights: Sequence[int] | None = None,
    *,
    attention: int | None = None,
    keys: int | None = None,
    width: int | None = None,
    key_values: int | None = None,
) -> ItemWork:
    """The work of one item, from its kind and its number of parameters.

    Args:
        item: its ``param_count`` is that of one tensor-parallel rank.
        shape: the microbatch.
        heads: number of attention heads; the score terms need them.
        weights: sizes of its matrices; default: one matrix of ``param_count``.
        attention: heads times head size; default: the hidden size.
        keys: maximum number of tokens that a token attends to; default: the sequence length.
        width: numbers per token between its matrices; default: three times the hidden size for attention, four for an
            MLP.
        key_values: elements of the keys and values of a token; default: twice the hidden size.
    """
    number = BYTES_PER_NUMBER[shape.dtype]
    t, s = shape.tensor_parallel, keys or shape.sequence
    stream = shape.tokens * shape.hidden * number
    outer = stream / t if shape.sequence_parallel else stream
    if item.kind == "embedding":
        # A lookup has no product, and its backward pass needs little more than the token ids.
        return ItemWork(
            weights=(), stream_bytes=(3 * outer, 3 * outer), reduce_bytes=stream, activation_bytes=2 * shape.tokens
        )
    if item.kind == "head":
        found = tuple(weights or (item.param_count,))
        # The loss stores its logits in float32, whatever the dtype (Korthikanti et al., section 4.3).
        logits = 4 * shape.tokens * max(1, found[-1] // max(1, shape.hidden))
        return ItemWork(
            weights=found,
            stream_bytes=(2 * outer + LOGITS[0] * logits, 3 * outer + LOGITS[1] * logits),
            activation_bytes=round(2 * outer) + logits,
        )
    # An item of a whole layer is the sum of its two halves: two norms, two residuals, two reductions.
    attends = item.kind in ("attention", "cross_attention", "layer")
    parts = 2 if item.kind == "layer" else 1
    score = shape.tokens * s * heads / t * number if attends else 0.0
    shared = shape.tokens * (key_values or 2 * shape.hidden) / t * number if attends else 0.0
    usual = (3 if item.kind != "mlp" else 0) + (4 if item.kind in ("mlp", "layer") else 0)
    inner = usual if width is None else width / shape.hidden
    return ItemWork(
        weights=tuple(weights or (item.param_count,)),
        score_flops=4 * shape.tokens * s * (attention or shape.hidden) / t if attends else 0.0,
        score_bytes=(0.0, 0.0) if shape.fused_attention else (SCORES[0] * score, SCORES[1] * score),
        stream_bytes=(
            parts * STREAM[0] * outer + INNER[0] * inner / 3 * stream / t,
            parts * STREAM[1] * outer + INNER[1] * inner / 3 * stream / t,
        ),
        reduce_bytes=parts * stream,
        exchange_bytes=(shape.context_parallel - 1) * shared,
        activation_bytes=_activation_bytes(item.kind, shape, score if attends else 0.0, inner / usual)
        # Attention saves the keys and values of all ranks for its backward.
        + round(0 if shape.recompute == "full" else (shape.context_parallel - 1) * shared),
    )


def norm_work(shape: MicrobatchShape) -> ItemWork:
    """The work of a head whose output layer is in shards on all workers: a normalization, without a product."""
    stream = shape.tokens * shape.hidden * BYTES_PER_NUMBER[shape.dtype]
    return ItemWork(weights=(), stream_bytes=(2 * stream, 3 * stream), activation_bytes=2 * stream)


def _activation_bytes(kind: str, shape: MicrobatchShape, score_bytes: float, wider: float = 1.0) -> int:
    """Stored activations of a part of a block, after Korthikanti et al.; half of a block for attention and MLP.

    ``wider`` is the width between its matrices relative to the default.
    """
    number = BYTES_PER_NUMBER[shape.dtype]
    outer, inner = {"mlp": (5, 18), "layer": (10, 24)}.get(kind, (5, 6))
    t = shape.tensor_parallel
    width = shape.tokens * shape.hidden * number
    if shape.recompute == "full":
        # The input of the block is stored once: the MLP is recomputed from the same input as attention.
        stored = 0.0 if kind == "mlp" else width / (t if shape.sequence_parallel else 1)
        return round(stored)
    stored = width / 2 * ((outer / t if shape.sequence_parallel else outer) + wider * inner / t)
    # Per score: two bytes after the softmax, one of the dropout mask, two after the dropout (section 4.1). These 5
    # bytes are 5 / 2 of ``score_bytes``, which has 2 per score.
    if shape.recompute == "none" and not shape.fused_attention:
        stored += 5 * score_bytes / 2
    return round(stored)


def costs_of(works: Sequence[ItemWork], shape: MicrobatchShape, device: Device) -> ItemCosts:
    """The costs of all items.

    Raises:
        UsageError: the device has no rate for the dtype, or the recomputation is unknown.
    """
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
    """A value of an optional ``x_`` key of a header, which the format does not check, as a non-negative integer.

    Raises:
        UsageError: the value is not an integer of at least 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(
            f"the header's x_ value of {name} must be a whole number of at least 0, is {short_repr(value)}"
        )
    return value


def header_works(header: Header, shape: MicrobatchShape) -> tuple[ItemWork, ...]:
    """The work of the items of a profile without measurements.

    A tied head has the weights of the item that it is tied to. Without the optional keys, the number of heads is the
    hidden size over 64, keys and values are as wide as the hidden size, a token attends to all tokens, and uses all
    parameters of an item.

    Raises:
        UsageError: an ``x_`` value is not an integer of at least 0.
    """
    stated = header.model.x_num_attention_heads
    heads = max(1, header.model.hidden_size // 64 if stated is None else whole(stated, "model.num_attention_heads"))
    window, width, scores = (
        None if stated is None else max(1, whole(stated, f"model.{name}"))
        for name, stated in (
            ("attention_window", header.model.x_attention_window),
            ("key_value_width", header.model.x_key_value_width),
            ("score_width", header.model.x_score_width),
        )
    )
    params = {item.name: item.param_count for item in header.items}
    works = []
    for item in header.items:
        stated = item.x_active_param_count
        used = item.param_count if stated is None else whole(stated, f"{item.name}.active_param_count")
        if item.kind == "head" and header.x_vocabulary is not None:
            works.append(norm_work(shape))
            continue
        # A tied head may be listed without parameters of its own, but it multiplies by the whole table.
        if item.kind == "head":
            used = max(used, params.get(item.tied_to or "", 0))
        own = window
        if item.x_attention_window is not None:
            own = max(1, whole(item.x_attention_window, f"{item.name}.attention_window"))
        keys = shape.sequence if own is None else min(own, shape.sequence)
        inner = None if item.x_inner_width is None else max(1, whole(item.x_inner_width, f"{item.name}.inner_width"))
        count = 1 if item.x_num_matrices is None else max(1, whole(item.x_num_matrices, f"{item.name}.num_matrices"))
        # The vocabulary's matrix comes last, and is whole: its size is that of the logits.
        weights = (used,) if item.kind == "head" else (used // count,) * min(count, MAX_MATRICES)
        works.append(
            work_of_item(item, shape, heads, weights, attention=scores, keys=keys, key_values=width, width=inner)
        )
    return tuple(works)


def costs_of_header(
    header: Header, device: Device, dtype: str, recompute: str | None = None, *, fused_attention: bool | None = None
) -> ItemCosts:
    """The costs of the items of a profile without measurements, for a dry run.

    Args:
        header: of the profile.
        device: rates in operations, bytes and ns.
        dtype: of matrix products.
        recompute: ``none``, ``selective`` or ``full``; None is as in the header, else ``none``.
        fused_attention: whether scores stay out of memory; None is as in the header, else that they do not.

    Raises:
        UsageError: the device has no rate for the dtype, the recomputation is unknown, or an ``x_`` value is invalid.
    """
    stated = header.x_recompute if header.x_recompute in RECOMPUTE else "none"
    shape = MicrobatchShape(
        tokens=header.micro_batch_size * header.model.sequence_length // header.context_parallel_size,
        sequence=header.model.sequence_length,
        hidden=header.model.hidden_size,
        dtype=dtype,
        tensor_parallel=header.tensor_parallel_size,
        context_parallel=header.context_parallel_size,
        sequence_parallel=header.x_sequence_parallel is True,
        recompute=recompute or stated,
        fused_attention=header.x_fused_attention is True if fused_attention is None else fused_attention,
    )
    costs = costs_of(header_works(header, shape), shape, device)
    if header.x_vocabulary is not None:
        costs = replace(costs, vocabulary=shard_times(_output_params(header.x_vocabulary), shape, device))
    pairs = zip(costs.activation_bytes, header.items, strict=True)
    return replace(
        costs,
        activation_bytes=tuple(
            size if item.x_activation_bytes is None else whole(item.x_activation_bytes, f"{item.name}.activation_bytes")
            for size, item in pairs
        ),
    )


def _output_params(vocabulary: Mapping[str, Any]) -> int:
    """The parameters of the output layer in a ``x_vocabulary``; profiles of earlier versions have no others.

    Raises:
        UsageError: the number is not an integer of at least 0.
    """
    name = "output_param_count" if "output_param_count" in vocabulary else "param_count"
    return whole(vocabulary.get(name), f"vocabulary.{name}")


def shard_times(weights: int, shape: MicrobatchShape, device: Device) -> ShardTimes:
    """The times of all shards of an output layer in one microbatch: two products in S, one in T.

    Args:
        weights: of all shards.
        shape: the microbatch.
        device: rates in operations, bytes and ns.
    """
    logits = 4 * shape.tokens * max(1, weights // max(1, shape.hidden))
    work = ItemWork(weights=(weights,), stream_bytes=(LOGITS[0] * logits, LOGITS[1] * logits))
    forward, backward_input, backward_weight = item_times(work, replace(shape, recompute="none"), device)
    # The gradient of the input follows the logits in S; that of the logits is computed in T.
    moved = round(device.touch_ns(work.stream_bytes[1]))
    return ShardTimes(forward_ns=forward + backward_input - moved, weight_ns=backward_weight + moved)


def step_flops(header: Header, works: Sequence[ItemWork], shape: MicrobatchShape) -> float:
    """Useful operations of one step on the tensor-parallel ranks of one data- or context-parallel rank.

    The backward has twice those of the forward.
    Recomputation does not count, as in the model FLOPs utilization of PaLM (arXiv 2204.02311, appendix B).
    """
    forward = sum(2 * shape.tokens * sum(work.weights) + work.score_flops for work in works)
    if header.x_vocabulary is not None:
        forward += 2 * shape.tokens * _output_params(header.x_vocabulary)
    return 3.0 * forward * header.microbatches * header.tensor_parallel_size
