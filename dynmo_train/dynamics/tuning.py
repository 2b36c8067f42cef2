"""Measures the sparsity above which a sparse product is faster than the dense one; reads and writes the table.

``dynmo-train tune-sparse`` measures the forward and both gradients of each weight shape of a model, in each sparse
format that the device has. ``--sparse-table`` reads the result (``models/sparse_formats.py`` applies it).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from .._common.document import DocumentError, read_any_json
from .._common.errors import UsageError
from ..formats.os_errors import reason
from ..models.linear import PrunableLinear
from ..models.sparse_formats import BLOCK, BLOCK_SIZE, CSR, SEMI_STRUCTURED, SparseTable

SPARSITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
# A threshold that no sparsity reaches; infinity is not a JSON number.
NEVER = 2.0


def mask_with(sparsity: float, outputs: int, inputs: int, form: str) -> torch.Tensor:
    """A random mask, bool ``[outputs, inputs]``, of about this sparsity that ``form`` accepts; deterministic.

    Args:
        sparsity: fraction of zeros, 0 to 1; ``2:4`` always has half.
        outputs: rows of the weight; with ``block`` a multiple of 32.
        inputs: columns of the weight; with ``block`` a multiple of 32, with ``2:4`` of 4.
        form: format of the product.
    """
    generator = torch.Generator().manual_seed(1)
    if form == BLOCK:
        blocks = torch.rand(outputs // BLOCK_SIZE, inputs // BLOCK_SIZE, generator=generator) >= sparsity
        return blocks.repeat_interleave(BLOCK_SIZE, 0).repeat_interleave(BLOCK_SIZE, 1)
    mask = torch.rand(outputs, inputs, generator=generator) >= sparsity
    if form == SEMI_STRUCTURED:
        # The two of four that drew the highest numbers.
        order = torch.rand(outputs, inputs // 4, 4, generator=generator).argsort(-1)
        mask = (order < 2).view(outputs, inputs)
    return mask


def min_time_s(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """The minimum wall time of ``repeats`` runs, in seconds: other load on the machine only adds to a time."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    # Without the first run, which allocates memory, gathers the sparse values and selects kernels.
    return min(times[1:])


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


def measure(outputs: int, inputs: int, rows: int, device: torch.device, repeats: int) -> Iterator[tuple[str, float]]:
    """Rules and thresholds for one weight shape, from the times of the forward and both gradients.

    Args:
        outputs: rows of the weight.
        inputs: columns of the weight.
        rows: rows of the input, i.e. tokens of a microbatch.
        device: where to measure; float32 on CPU, bfloat16 on CUDA.
        repeats: timed runs per product, of which the fastest counts.
    """
    forms = (CSR,) if device.type == "cpu" else (CSR, BLOCK, SEMI_STRUCTURED)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(rows, inputs, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(rows, outputs, device=device, dtype=dtype)

    def timed(form: str | None, sparsity: float) -> float:
        """Seconds of a forward and backward in a format, None for dense, at ``sparsity``, the fraction of zeros."""
        layer = PrunableLinear(inputs, outputs, device, bias=False).to(dtype)
        torch.nn.init.normal_(layer.weight)
        if form is not None:
            prefix = "" if device.type == "cpu" else f"{device.type}."
            mask = mask_with(sparsity, outputs, inputs, form).to(device)
            layer.set_mask(mask, SparseTable(thresholds={f"{prefix}{form}": 0.0}))

        def run() -> None:
            x.grad = layer.weight.grad = None
            # Training gathers the values once a step, not once a microbatch, so the time excludes it.
            layer(x).backward(grad)

        return min_time_s(run, repeats, device)

    dense_s = timed(None, 0.0)
    for form in forms:
        if form == BLOCK and (outputs % BLOCK_SIZE or inputs % BLOCK_SIZE):
            continue
        if form == SEMI_STRUCTURED and (outputs % 32 or inputs % 64):
            continue
        sparsities = (0.5,) if form == SEMI_STRUCTURED else SPARSITIES
        rule = form if device.type == "cpu" else f"{device.type}.{form}"
        yield f"{rule} {outputs}x{inputs}", threshold_of([(s, timed(form, s)) for s in sparsities], dense_s)


def tune(shapes: Sequence[tuple[int, int]], rows: int, device: torch.device, *, repeats: int = 7) -> dict[str, float]:
    """The table of a model: a rule for each weight shape; other shapes use the rule's highest threshold.

    Args:
        shapes: (outputs, inputs) of each weight.
        rows: rows of the input, i.e. tokens of a microbatch.
        device: where to measure.
        repeats: timed runs per product.
    """
    table = {
        rule: value for outputs, inputs in shapes for rule, value in measure(outputs, inputs, rows, device, repeats)
    }
    rules = dict.fromkeys(rule.partition(" ")[0] for rule in table)
    general = {rule: max(value for name, value in table.items() if name.partition(" ")[0] == rule) for rule in rules}
    return {**general, **table}


def model_shapes(width: int, inner: int) -> list[tuple[int, int]]:
    """Weight shapes of a block as (outputs, inputs): query-key-value, attention output, MLP in and out.

    Args:
        width: model width D.
        inner: width F inside the MLP.
    """
    return list(dict.fromkeys([(3 * width, width), (width, width), (inner, width), (width, inner)]))


def write_sparse_table(path: Path, table: dict[str, float]) -> None:
    """Write a table for ``--sparse-table``.

    Args:
        path: file to write; replaced if it exists.
        table: rule -> sparsity above which its sparse product is used, 0 to 1; 2 for never.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps({"thresholds": table}, indent=1) + "\n", encoding="utf-8")
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
    numbers = thresholds.values() if isinstance(thresholds, dict) else ()
    if not thresholds or not all(
        isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= NEVER for n in numbers
    ):
        raise UsageError(
            f"--sparse-table {path} must hold an object 'thresholds' of rules and numbers from 0 to {NEVER:g}, as"
            " dynmo-train tune-sparse writes it"
        )
    return {str(rule): float(value) for rule, value in thresholds.items()}
