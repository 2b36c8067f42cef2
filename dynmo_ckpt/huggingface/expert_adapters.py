"""LoRA of a parameter that has the matrices of all experts (``target_parameters`` of peft), on a file's experts.

For E experts and the rank r, ``A`` ``[E r, in]`` has the rows of an expert together and ``B`` ``[out, r E]`` has its
columns alternate; expert e adds ``s B_e A_e``. Gate and up are one parameter of ``out = 2 F`` rows. Releases of peft
differ in which dimension is ``in``; it follows from the shapes, as does the parameter of a nested adapter.

Shapes: H hidden, F inner size of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..io.errors import CorruptError, UnsupportedError, short_name
from ..tensors.computed import computed_tensor
from ..tensors.views import Tensor, concatenate
from .merge_rows import MergedRows

NESTED = ".base_layer"
_MATRIX = re.compile(r"(?P<module>.+\.experts)\.(?P<number>\d+)\.(?P<kind>\w+)\.weight")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def is_expert_module(module: str) -> bool:
    """Whether a module of an adapter has the experts of a block; peft nests those of several parameters."""
    return module.replace(NESTED, "").endswith(".experts")


def expert_rank(base: Mapping[str, Tensor], module: str, down: Tensor) -> float:
    """The rank of each expert.

    Args:
        base: tensors of the model, by name.
        module: of the adapter.
        down: its ``A``, ``[E r, in]``.
    """
    return down.shape[0] / _count(base, module)


def merged_experts(
    base: Mapping[str, Tensor], module: str, down: Tensor, up: Tensor, scale: float
) -> Iterator[tuple[str, Tensor]]:
    """The changed tensors, by name.

    Args:
        base: tensors of the model by name, with earlier changes.
        module: of the adapter, nested or not.
        down: its ``A``, ``[E r, in]``.
        up: its ``B``, ``[out, r E]``.
        scale: factor on the products.

    Raises:
        CorruptError: the shapes do not fit the experts.
        UnsupportedError: the model has no such experts, or the shapes are ambiguous.
    """
    count = _count(base, module)
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or down.shape[0] % count:
        raise CorruptError(f"{short_name(module)}: A {list(down.shape)} and B {list(up.shape)}: no pair of {count}")
    rank = down.shape[0] // count
    columns = up.unflatten(1, (rank, count))
    pairs = [
        (
            down.narrow(0, expert * rank, (expert + 1) * rank),
            columns.narrow(2, expert, expert + 1).with_unit_dims((up.shape[0], rank)),
        )
        for expert in range(count)
    ]
    shape = (down.shape[1], up.shape[0])
    stacked = _stacked(base, module)
    if stacked:
        yield _merged_stack(stacked, shape, pairs, scale, module)
        return
    for matrices, (a, b) in zip(_matrices(base, module), pairs, strict=True):
        yield from _merged_matrices(matrices, shape, a, b, scale, module)


def _names(module: str) -> set[str]:
    plain = module.replace(NESTED, "")
    return {plain, f"model.{plain}", plain.removeprefix("model.")}


def _stacked(base: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    """The parameters of all experts of a block in one tensor each, as in GPT-OSS."""
    names = (f"{name}.{kind}" for name in _names(module) for kind in ("gate_up_proj", "down_proj"))
    return {name: base[name] for name in names if name in base}


def _matrices(base: Mapping[str, Tensor], module: str) -> list[dict[str, tuple[str, Tensor]]]:
    """For each expert of a block: kind of a matrix -> its name and contents."""
    found: dict[int, dict[str, tuple[str, Tensor]]] = {}
    names = _names(module)
    for name, tensor in base.items():
        match = _MATRIX.fullmatch(name) if ".experts." in name else None
        # Files of Mixtral and MiniMax-M2 have another name of the block's MLP than their classes.
        if match and match["module"].replace(".block_sparse_moe.", ".mlp.") in names:
            kind = next((kinds[0] for kinds in (GATE, UP, DOWN) if match["kind"] in kinds), match["kind"])
            found.setdefault(int(match["number"]), {})[kind] = (name, tensor)
    return [found[number] for number in sorted(found)]


def _count(base: Mapping[str, Tensor], module: str) -> int:
    stacked = _stacked(base, module)
    count = next(iter(stacked.values())).shape[0] if stacked else len(_matrices(base, module))
    if not count:
        raise UnsupportedError(f"{short_name(module)}: target_parameters: the model has no experts of this name")
    return count


def _merged_stack(
    stacked: Mapping[str, Tensor], shape: tuple[int, int], pairs: list[tuple[Tensor, Tensor]], scale: float, module: str
) -> tuple[str, Tensor]:
    """A parameter ``[E, in, out]``."""
    name = next((name for name, tensor in stacked.items() if tensor.shape[1:] == shape), None)
    if name is None:
        raise CorruptError(f"{short_name(module)}: A and B of {list(shape)} fit no parameter of the experts")
    parts = []
    for expert, (a, b) in enumerate(pairs):
        matrix = stacked[name].narrow(0, expert, expert + 1).with_unit_dims(shape)
        merged = _product(name, matrix, a.permute((1, 0)), b.permute((1, 0)), scale)
        parts.append(merged.with_unit_dims((1, *shape)))
    return name, concatenate(parts, 0)


def _merged_matrices(
    matrices: Mapping[str, tuple[str, Tensor]], shape: tuple[int, int], a: Tensor, b: Tensor, scale: float, module: str
) -> Iterator[tuple[str, Tensor]]:
    """The matrices of one expert, ``[out, in]`` each."""
    if not {GATE[0], UP[0], DOWN[0]} <= matrices.keys():
        raise UnsupportedError(f"{short_name(module)}: target_parameters: experts have gate, up and down projections")
    inner, hidden = matrices[GATE[0]][1].shape
    if shape in ((hidden, inner), (inner, hidden)):
        if hidden == inner:
            raise UnsupportedError(f"{short_name(module)}: experts as wide as the model: merge the adapter with peft")
        is_swapped = shape == (inner, hidden)
        parts = {DOWN[0]: (0, hidden)}
    elif shape in ((hidden, 2 * inner), (2 * inner, hidden)):
        is_swapped = shape == (hidden, 2 * inner)
        parts = {GATE[0]: (0, inner), UP[0]: (inner, 2 * inner)}
    else:
        raise CorruptError(f"{short_name(module)}: A and B of {list(shape)} do not fit experts {[inner, hidden]}")
    # Rows of the result: of B, or in older releases of peft the columns of A.
    rows, columns = (b, a) if is_swapped else (a.permute((1, 0)), b.permute((1, 0)))
    for kind, (begin, end) in parts.items():
        name, matrix = matrices[kind]
        yield name, _product(name, matrix, rows.narrow(0, begin, end), columns, scale)


def _product(name: str, base: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    compute = MergedRows(base=base, up=up, down=down, magnitude=None, scale=scale)
    return computed_tensor(name, base.dtype, base.shape, (base, up, down), compute)
