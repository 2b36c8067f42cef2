"""Measures the sparsity above which a sparse product is faster than the dense one; reads and writes the table.

``dynmo-train tune-sparse`` measures the forward and both gradients of each weight shape of a model, in each sparse
format that the device has: CSR and blocks on CPUs, these and 2:4 on GPUs. ``--sparse-table`` reads the result
(``models/layers/sparse_formats.py`` applies it).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .._common.document import DocumentError, read_any_json
from .._common.errors import UsageError
from ..formats.os_errors import reason
from ..models.layers.linear import PrunableLinear
from ..models.layers.sparse_formats import (
    BLOCK_SIZE,
    BLOCK_SIZES,
    CSR,
    NEVER,
    SEMI_STRUCTURED,
    TRANSPOSABLE,
    SparseTable,
    block_rule,
    prefix_of,
)
from .pruning_units import transposable_masks

SPARSITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
BLOCK_RULES = {block_rule(size): size for size in BLOCK_SIZES}


@dataclass(frozen=True, kw_only=True)
class MeasuredProduct:
    """Times of one product relative to the dense one, measured in turns.

    Attributes:
        rule: of the table, without the device: ``csr``, ``block``, ``2:4``, ...
        shape: outputs x inputs, such as ``1024x256``.
        sparsity: fraction of zeros.
        forward: ratio to the dense forward.
        backward_input: ratio to the dense gradient of the input.
        backward_weight: ratio to the dense gradient of the weight.
        total: ratio of the sum.
    """

    rule: str
    shape: str
    sparsity: float
    forward: float
    backward_input: float
    backward_weight: float
    total: float


def mask_with(sparsity: float, outputs: int, inputs: int, form: str) -> torch.Tensor:
    """A random mask, bool ``[outputs, inputs]``, of about this sparsity that ``form`` accepts; deterministic.

    Args:
        sparsity: fraction of zeros, 0 to 1; the 2:4 formats always have half.
        outputs: rows of the weight; a multiple of the block size, and of 4 with ``2:4-transposable``.
        inputs: columns of the weight; a multiple of the block size, and of 4 with the 2:4 formats.
        form: rule of the format: ``csr``, ``block``, ``block64``, ``2:4``, ``2:4-transposable``, ...
    """
    generator = torch.Generator().manual_seed(1)
    if form in BLOCK_RULES:
        size = BLOCK_RULES[form]
        count = (outputs // size) * (inputs // size)
        order = torch.randperm(count, generator=generator).view(outputs // size, inputs // size)
        blocks = order >= round(sparsity * count)
        return blocks.repeat_interleave(size, 0).repeat_interleave(size, 1)
    if form == TRANSPOSABLE:
        masks = transposable_masks().bool()
        tiles = masks[torch.randint(len(masks), (outputs // 4, inputs // 4), generator=generator)]
        return tiles.view(outputs // 4, inputs // 4, 4, 4).transpose(1, 2).reshape(outputs, inputs)
    if form == SEMI_STRUCTURED:
        # The two of four that drew the highest numbers.
        order = torch.rand(outputs, inputs // 4, 4, generator=generator).argsort(-1)
        return (order < 2).view(outputs, inputs)
    return torch.rand(outputs, inputs, generator=generator) >= sparsity


def forms_of(outputs: int, inputs: int, device_type: str) -> list[str]:
    """The rules of the sparse formats that a weight ``[outputs, inputs]`` can have on a device."""
    fits = [rule for rule, size in BLOCK_RULES.items() if not outputs % size and not inputs % size]
    forms = [CSR, *sorted(fits, key=lambda rule: (BLOCK_RULES[rule] != BLOCK_SIZE, BLOCK_RULES[rule]))]
    if device_type != "cpu" and not outputs % 32 and not inputs % 64:
        forms.append(SEMI_STRUCTURED)
    if device_type != "cpu" and not outputs % 64 and not inputs % 64:
        forms.append(TRANSPOSABLE)
    return forms


def threshold_of(times: Sequence[tuple[float, float]], dense_s: float) -> float:
    """The lowest sparsity from which every measurement beats the dense product; 2 where the highest does not.

    Args:
        times: (sparsity, seconds) in ascending order of sparsity.
        dense_s: seconds of the dense product.
    """
    threshold = NEVER
    for sparsity, seconds in reversed(times):
        if seconds >= dense_s:
            break
        threshold = sparsity
    return threshold


def measure_product(
    rule: str, sparsity: float, outputs: int, inputs: int, rows: int, device: torch.device, repeats: int
) -> MeasuredProduct:
    """Times of one sparse product, in turns with the dense one; of each the fastest counts.

    Args:
        rule: of the format.
        sparsity: fraction of zeros.
        outputs: rows of the weight.
        inputs: columns of the weight.
        rows: rows of the input, i.e. tokens of a microbatch.
        device: where to measure; float32 on CPU, bfloat16 on CUDA.
        repeats: timed runs per product.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(rows, width, generator=generator).to(device, dtype) for width in (inputs, outputs))
    layers = []
    for is_sparse in (True, False):
        layer = PrunableLinear(inputs, outputs, device, bias=False).to(dtype)
        torch.nn.init.normal_(layer.weight)
        if is_sparse:
            mask = mask_with(sparsity, outputs, inputs, rule).to(device)
            with torch.no_grad():
                layer.weight.mul_(mask)
            layer.set_mask(mask, SparseTable(thresholds={f"{prefix_of(device.type)}{rule}": 0.0}))
        layers.append(layer)
    # Other load on the machine only adds to a time. The first round allocates memory, selects kernels, and builds what
    # training builds once a step and not once a microbatch.
    samples = [[_parts(layer, x, grad) for layer in layers] for _ in range(repeats + 1)][1:]
    sparse, dense = ([min(each[which][part] for each in samples) for part in range(4)] for which in range(len(layers)))
    forward, by_input, by_weight, _ = (own / other for own, other in zip(sparse, dense, strict=True))
    return MeasuredProduct(
        rule=rule,
        shape=f"{outputs}x{inputs}",
        sparsity=sparsity,
        forward=forward,
        backward_input=by_input,
        backward_weight=by_weight,
        total=(sparse[0] + sparse[3]) / (dense[0] + dense[3]),
    )


def _parts(layer: PrunableLinear, x_NI: torch.Tensor, grad_NO: torch.Tensor) -> tuple[float, float, float, float]:
    """Seconds of the forward, of the backward by input, of that by weight, and of both together."""
    forward_s: list[float] = []
    backward_s: list[float] = []
    # Each by itself: a difference of two times has the noise of both, and may be 0.
    for by_input, by_weight in ((True, False), (False, True), (True, True)):
        layer.weight.requires_grad_(by_weight).grad = None
        x = x_NI.detach().requires_grad_(by_input)
        seconds, y = timed(x.device, partial(layer, x))
        forward_s.append(seconds)
        backward_s.append(timed(x.device, partial(y.backward, grad_NO))[0])
    by_input_s, by_weight_s, whole_s = backward_s
    return min(forward_s), by_input_s, by_weight_s, whole_s


def timed(device: torch.device, run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, waited for, and its result.

    On CPU with one thread these are seconds of processor time: other programs on the machine add to the wall time.
    """
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_one_thread else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = clock()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin, result


def break_even(measure: Callable[[float], MeasuredProduct]) -> tuple[float, list[MeasuredProduct]]:
    """The lowest of ``SPARSITIES`` from which a product beats the dense one, by bisection, and what was measured.

    Args:
        measure: measures the product at a sparsity.
    """
    measured: dict[float, MeasuredProduct] = {}
    low, high = 0, len(SPARSITIES)
    while low < high:
        middle = (low + high) // 2
        measured[SPARSITIES[middle]] = measure(SPARSITIES[middle])
        if measured[SPARSITIES[middle]].total < 1.0:
            high = middle
        else:
            low = middle + 1
    ordered = [measured[sparsity] for sparsity in sorted(measured)]
    return threshold_of([(each.sparsity, each.total) for each in ordered], 1.0), ordered


def tune(
    shapes: Sequence[tuple[int, int]], rows: int, device: torch.device, *, repeats: int = 5
) -> tuple[dict[str, float], list[MeasuredProduct]]:
    """The table of a model, and the products that were measured for it.

    It has a rule for each weight shape; other shapes use the rule's highest threshold.

    Args:
        shapes: (outputs, inputs) of each weight.
        rows: rows of the input, i.e. tokens of a microbatch.
        device: where to measure.
        repeats: timed runs per product.
    """
    table: dict[str, float] = {}
    products: list[MeasuredProduct] = []
    for outputs, inputs in shapes:
        for rule in forms_of(outputs, inputs, device.type):

            def measure(sparsity: float, rule: str = rule, outputs: int = outputs, inputs: int = inputs) -> Any:
                return measure_product(rule, sparsity, outputs, inputs, rows, device, repeats)

            if rule in (SEMI_STRUCTURED, TRANSPOSABLE):
                measured = [measure(0.5)]
                threshold = threshold_of([(0.5, measured[0].total)], 1.0)
            else:
                threshold, measured = break_even(measure)
            table[f"{prefix_of(device.type)}{rule} {outputs}x{inputs}"] = threshold
            products += measured
    rules = dict.fromkeys(rule.partition(" ")[0] for rule in table)
    general = {rule: max(value for name, value in table.items() if name.partition(" ")[0] == rule) for rule in rules}
    return {**general, **table}, products


def model_shapes(width: int, inner: int) -> list[tuple[int, int]]:
    """Weight shapes of a block as (outputs, inputs): query-key-value, attention output, MLP in and out.

    Args:
        width: model width D.
        inner: width F inside the MLP.
    """
    return list(dict.fromkeys([(3 * width, width), (width, width), (inner, width), (width, inner)]))


def table_document(table: dict[str, float], products: Sequence[MeasuredProduct]) -> dict[str, Any]:
    """The file of ``dynmo-train tune-sparse``.

    Args:
        table: rule -> sparsity above which its sparse product is used, 0 to 1; 2 for never.
        products: what was measured.
    """
    rows = [{name: v if isinstance(v, str) else round(v, 4) for name, v in asdict(each).items()} for each in products]
    return {"thresholds": table, "measured": rows}


def write_sparse_table(path: Path, document: dict[str, Any]) -> None:
    """Write a table for ``--sparse-table``.

    Args:
        path: file to write; replaced if it exists.
        document: of :func:`table_document`.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the table to {path}: {reason(error)}; give another --output") from error


def read_sparse_table(path: Path) -> dict[str, float]:
    """A table that ``dynmo-train tune-sparse`` wrote.

    Raises:
        UsageError: the file cannot be read, or is not an object of rules and numbers.
    """
    try:
        document = read_any_json(path)
    except DocumentError as error:
        raise UsageError(f"--sparse-table {path} cannot be read: {reason(error)}") from error
    thresholds = document.get("thresholds") if isinstance(document, dict) else None
    if (
        not isinstance(thresholds, dict)
        or not thresholds
        or not all(
            isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= NEVER for n in thresholds.values()
        )
    ):
        raise UsageError(
            f"--sparse-table {path} must hold an object 'thresholds' of rules and numbers from 0 to {NEVER:g}, as"
            " dynmo-train tune-sparse writes it"
        )
    return {str(rule): float(value) for rule, value in thresholds.items()}
