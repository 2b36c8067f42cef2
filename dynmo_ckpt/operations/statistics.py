"""Statistics of the differences of two checkpoints, tensor by tensor, and their page (``diff --html``).

All sums are in float64, over the panels of both tensors in the same order; memory does not grow with the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import __version__
from .._common.console import Tick
from .._common.report.page import Block, Note, Page, Section, Table, Tile, shortened
from .._common.report.units import count_text, plural, share_text
from ..io.reading import Reader, open_sources
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import OutputTensor, sources
from ..tensors.equality import aligned
from .compare import SETTING, Difference, comparable, numbers_of

MAX_ROWS = 2000
"""Tensors in the list of the page: those that differ most."""
_LAYER = re.compile(r"(.*?layers)\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """The difference of one tensor of two checkpoints.

    Attributes:
        name: of the tensor.
        shape: without padding rows of the vocabulary.
        dtypes: types on the left and on the right, as in safetensors.
        differing: number of elements that are not equal.
        max_abs: largest absolute difference; infinite where one side is not a number.
        square_difference: sum of squared differences of the finite elements.
        squares: sums of squares on the left and on the right, of the same elements.
        product: sum of the products of both sides.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    differing: int
    max_abs: float
    square_difference: float
    squares: tuple[float, float]
    product: float

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rms(self) -> float:
        """Root mean square of the differences."""
        return math.sqrt(self.square_difference / max(1, self.elements))

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the left side; infinite where only the left side is zero."""
        if not self.square_difference:
            return 0.0
        return math.sqrt(self.square_difference / self.squares[0]) if self.squares[0] else math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both sides; 1 where both are zero."""
        norms = math.sqrt(self.squares[0]) * math.sqrt(self.squares[1])
        return self.product / norms if norms else float(self.squares[0] == self.squares[1])


def statistics(
    left: NativeCheckpoint, right: NativeCheckpoint, roles: Sequence[str], tick: Tick
) -> Iterator[TensorStatistics]:
    """Yield the statistics of every tensor that both checkpoints have with the same shape.

    Args:
        left: one checkpoint.
        right: the other checkpoint.
        roles: the roles of the tensors to compare, as in a manifest.
        tick: advances a progress display, in MB.
    """
    for name, pair in comparable(left, right, tuple(roles)):
        if pair[0].shape == pair[1].shape:
            yield _of_pair(name, *pair)
            tick(pair[0].content.num_bytes / 1e6, name)


def _of_pair(name: str, left: OutputTensor, right: OutputTensor) -> TensorStatistics:
    differing, largest = 0, 0.0
    sums = np.zeros(4)
    with open_sources(sources([left, right])) as files:
        for one, other in aligned(numbers_of(left, Reader(files)), numbers_of(right, Reader(files))):
            a, b = one.astype(np.float64), other.astype(np.float64)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            differing += int((~same).sum())
            with np.errstate(invalid="ignore"):
                gap = np.where(same, 0.0, np.abs(a - b))
            largest = max(largest, float(np.nan_to_num(gap, nan=math.inf).max()))
            finite = np.isfinite(a) & np.isfinite(b)
            a, b, gap = a[finite], b[finite], gap[finite]
            sums += (gap @ gap, a @ a, b @ b, a @ b)
    return TensorStatistics(
        name=name,
        shape=left.shape,
        dtypes=(left.content.dtype, right.content.dtype),
        differing=differing,
        max_abs=largest,
        square_difference=float(sums[0]),
        squares=(float(sums[1]), float(sums[2])),
        product=float(sums[3]),
    )


def diff_page(
    names: tuple[str, str], found: Sequence[TensorStatistics], differences: Sequence[Difference], atol: float
) -> Page:
    """The page of two checkpoints.

    Args:
        names: of the checkpoints.
        found: the statistics of all common tensors.
        differences: what ``diff`` reports.
        atol: largest absolute difference that ``diff`` counts as equal.
    """
    unlike = [each for each in found if each.differing]
    only = [each for each in differences if each.kind not in ("values", "dtype", SETTING)]
    settings = [[each.name, each.message] for each in differences if each.kind == SETTING]
    total = sum(each.elements for each in found)
    differing = sum(each.differing for each in found)
    largest = max(found, key=lambda each: each.max_abs, default=None)
    whole = _sum("all tensors", found)
    tiles = [
        Tile(label="Tensors that differ", value=f"{len(unlike):,}", note=f"of {len(found):,} that both have"),
        Tile(
            label="Elements that differ",
            value=share_text(differing / max(1, total)),
            note=f"{differing:,} of {total:,}",
        ),
        Tile(
            label="Largest difference",
            value=_number(largest.max_abs if largest else 0.0),
            note=shortened(largest.name, 60) if largest and largest.max_abs else "",
        ),
        Tile(label="Relative difference", value=_number(whole.relative), note=f"cosine {whole.cosine:.6f}"),
    ]
    text = (
        "Relative: the norm of the difference over the norm of the left side. RMS: the root mean square of the "
        "differences. Sums are in float64, without elements that are infinite or not numbers."
    )
    sections = [
        Section(title="By layer", blocks=[_groups(found, by_layer=True)], text=text),
        Section(title="By kind of tensor", blocks=[_groups(found, by_layer=False)]),
        Section(title="Tensors", blocks=[_list(found)]),
    ]
    if only:
        rows = [[each.name, each.kind, each.message] for each in only]
        table = Table(columns=["tensor", "what", "where"], rows=rows, text_columns=(1, 2), caption="Not compared")
        sections.insert(0, Section(title="Tensors that one side has, or with other shapes", blocks=[table]))
    if settings:
        table = Table(columns=["setting", "values"], rows=settings, text_columns=(1,), caption="Other computation")
        sections.insert(0, Section(title="Settings of the model that differ", blocks=[table]))
    return Page(
        title=f"{shortened(names[0], 60)} and {shortened(names[1], 60)}",
        subtitle="Differences of two checkpoints, tensor by tensor",
        kind="Checkpoint comparison",
        facts=[("left", names[0]), ("right", names[1]), ("tolerance", f"{atol:g}"), ("parameters", count_text(total))],
        tiles=tiles,
        sections=sections,
        footer=f"dynmo-ckpt {__version__}",
    )


_COLUMNS = ("elements", "differ", "largest", "RMS", "relative", "cosine")


def _row(each: TensorStatistics) -> list[str]:
    share = share_text(each.differing / max(1, each.elements))
    numbers = [_number(value) for value in (each.max_abs, each.rms, each.relative)]
    return [count_text(each.elements), share, *numbers, f"{each.cosine:.6f}"]


def _number(value: float) -> str:
    return "0" if not value else f"{value:.3g}"


def _sum(name: str, group: Sequence[TensorStatistics]) -> TensorStatistics:
    """The statistics of several tensors as if they were one."""
    return TensorStatistics(
        name=name,
        shape=(sum(each.elements for each in group),),
        dtypes=("", ""),
        differing=sum(each.differing for each in group),
        max_abs=max((each.max_abs for each in group), default=0.0),
        square_difference=math.fsum(each.square_difference for each in group),
        squares=(math.fsum(each.squares[0] for each in group), math.fsum(each.squares[1] for each in group)),
        product=math.fsum(each.product for each in group),
    )


def _groups(found: Sequence[TensorStatistics], *, by_layer: bool) -> Block:
    groups: dict[str, list[TensorStatistics]] = {}
    for each in found:
        match = _LAYER.fullmatch(each.name)
        layer, kind = (f"{match[1]}.{match[2]}", match[3]) if match else (each.name.partition(".")[0], each.name)
        # Experts of a layer are one kind of tensor.
        key = layer if by_layer else re.sub(r"\bexperts\.\d+\.", "experts.", kind)
        groups.setdefault(key, []).append(each)
    rows = [[name, *_row(_sum(name, group))] for name, group in groups.items()]
    if not rows:
        return Note(text="The checkpoints have no tensor in common.")
    what = "layer" if by_layer else "tensor"
    return Table(columns=[what, *_COLUMNS], rows=rows[:MAX_ROWS], caption=f"Differences by {what}")


def _list(found: Sequence[TensorStatistics]) -> Block:
    ordered: list[TensorStatistics] = sorted(found, key=lambda each: (-each.relative, -each.max_abs))
    rows = [
        [each.name, " x ".join(map(str, each.shape)) or "1", " and ".join(dict.fromkeys(each.dtypes)), *_row(each)]
        for each in ordered[:MAX_ROWS]
    ]
    if not rows:
        return Note(text="The checkpoints have no tensor in common.")
    hidden = len(ordered) - len(rows)
    more = f"; {plural(hidden, 'tensor')} with smaller differences not shown" if hidden else ""
    return Table(
        columns=["tensor", "shape", "type", *_COLUMNS],
        rows=rows,
        text_columns=(1, 2),
        caption=f"Tensors by relative difference{more}",
    )


def as_json(each: TensorStatistics) -> Mapping[str, object]:
    """The statistics of a tensor for ``--format json``; numbers that are not finite are null."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "name": each.name,
        "shape": list(each.shape),
        "dtypes": list(each.dtypes),
        "elements_differing": each.differing,
        "max_abs": finite(each.max_abs),
        "rms": finite(each.rms),
        "relative": finite(each.relative),
        "cosine": finite(each.cosine),
    }
