"""Muon: the momentum of each matrix of a layer, orthogonalized; AdamW for everything else.

As in torch and Megatron, embeddings, the output layer and vectors are updated by AdamW. One step of a matrix::

    gradient -> momentum (local, float32) -> bfloat16 -> ZeRO: gather the rows -> tensor parallelism: gather the slices
      -> split query, key, value -> Newton-Schulz, an item's matrices of a shape at once -> the local part -> weights

A matrix is orthogonalized whole on every rank that has a part of it, so that the result does not depend on ZeRO, and
with ``--muon-tp-mode duplicated`` not on the tensor-parallel size either.

Which matrices share a batch must not depend on the partition, since kernels are selected by the size of the batch (by
cuBLAS, and by oneDNN for some shapes): a batch has the matrices of one item, which are together on any partition.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn

from ...config.sections.optimizer import MuonCoefficientType, MuonScaleMode, MuonTpMode, OptimizerConfig
from ...models.sharding import cut_tensor
from ..item_sharding import ItemSharding
from .adamw import MOMENTS, AdamWSettings, TorchAdamW
from .newton_schulz import iteration_coefficients, orthogonalize
from .protocol import Optimizer, OptimizerContext, StateShapes, Update
from .sgd import MOMENTUM
from .torch_groups import divide_or_skip

# Tables of embeddings, relative positions, and the output layer.
_TABLES = re.compile(r"(^|\.)embedding\.|\.relative\.weight$|(^|\.)head\.weight$")
_QKV = re.compile(r"\.attention\.qkv\.weight$")
_ITEM = re.compile(r"^(?:[^.]+\.)?layers\.\d+\.[^.]+|^mtp\.\d+|^[^.]+")
# Elements of a batch of matrices; its copies in bfloat16 take about 8 bytes each.
BATCH_ELEMENTS = 1 << 24


def is_muon_matrix(name: str, num_dims: int) -> bool:
    """Whether Muon updates a parameter.

    Args:
        name: Global name.
        num_dims: Number of dimensions, an integer from 0.
    """
    return num_dims == 2 and _TABLES.search(name) is None


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """Muon for matrices of layers, AdamW for the rest (Jordan et al. 2024; Liu et al., arXiv 2502.16982).

    Attributes:
        momentum: Decay rate of the momentum buffer, a running mean of the gradients.
        nesterov: Update with the momentum of the next step.
        num_ns_steps: Newton-Schulz iterations.
        coefficient_type: Coefficients of the iterations.
        scale_mode: Scale of the update of an ``[R, C]`` matrix: ``spectral`` sqrt(max(R, C)), ``shape_scaling``
            sqrt(max(1, R / C)), ``unit_rms_norm`` sqrt(R / C).
        extra_scale_factor: Factor of every update.
        split_qkv: Orthogonalize the query, key and value rows of a fused matrix separately.
        tp_mode: ``blockwise`` orthogonalizes the slice of each tensor-parallel rank, ``duplicated`` the whole matrix.
        weight_decay: Constant decoupled weight decay, where no schedule sets it per step.
        adamw: Settings for the other parameters.
    """

    STORED_TYPE: ClassVar[str] = "muon"
    # Orthogonalization mixes all entries of a matrix.
    MOVES_PRUNED: ClassVar[bool] = True
    momentum: float
    nesterov: bool
    num_ns_steps: int
    coefficient_type: MuonCoefficientType
    scale_mode: MuonScaleMode
    extra_scale_factor: float
    split_qkv: bool
    tp_mode: MuonTpMode
    weight_decay: float
    adamw: AdamWSettings

    @classmethod
    def from_config(cls, config: OptimizerConfig) -> Self:
        """See ``OptimizerSettings``."""
        return cls(
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            num_ns_steps=config.muon_num_ns_steps,
            coefficient_type=config.muon_coefficient_type,
            scale_mode=config.muon_scale_mode,
            extra_scale_factor=config.muon_extra_scale_factor,
            split_qkv=config.muon_split_qkv,
            tp_mode=config.muon_tp_mode,
            weight_decay=config.weight_decay,
            adamw=AdamWSettings.from_config(config),
        )

    def state_shapes(self, name: str, shape: tuple[int, ...]) -> StateShapes:
        """Return the momentum buffer of a matrix ``name`` of a layer, else AdamW's moments, in its ``shape``."""
        if is_muon_matrix(name, len(shape)):
            return {MOMENTUM: tuple(shape)}
        return dict.fromkeys(MOMENTS, tuple(shape))

    def state_dtype(self, key: str) -> torch.dtype:
        """Return float32 for every ``key``."""
        return torch.float32

    def describe(self, context: OptimizerContext) -> str:
        """See ``OptimizerSettings``; ``context`` has no effect."""
        return "Muon and torch AdamW"

    def make(self, context: OptimizerContext) -> Optimizer:
        """Create it; ``context`` has the sharding of the matrices."""
        return Muon(self, context.sharding)

    def scale(self, num_rows: int, num_columns: int) -> float:
        """Return the scale of the update of a matrix.

        Args:
            num_rows: Outputs of the layer, in elements.
            num_columns: Inputs of the layer, in elements.

        Example: 256 x 64: ``spectral`` 16, ``shape_scaling`` and ``unit_rms_norm`` 2.
        """
        ratio = num_rows / num_columns
        squares = {"spectral": max(num_rows, num_columns), "shape_scaling": max(1, ratio), "unit_rms_norm": ratio}
        return math.sqrt(squares[self.scale_mode]) * self.extra_scale_factor


@dataclass(kw_only=True)
class _Matrix:
    """A matrix that Muon updates: its name, rows before ZeRO, momentum buffer and number of updates."""

    name: str
    parameter: nn.Parameter
    num_rows: int
    buffer: torch.Tensor | None = None
    steps: int = 0


class Muon:
    """Muon on the matrices of the local layers, torch's AdamW on the rest; see ``Optimizer``.

    Args:
        settings: Hyperparameters.
        sharding: The part of each matrix that this process has; None: every matrix is whole.
    """

    def __init__(self, settings: MuonSettings, sharding: ItemSharding | None = None) -> None:
        self._settings, self._sharding = settings, sharding
        self._others = TorchAdamW(settings.adamw)
        self._matrices: dict[nn.Parameter, _Matrix] = {}
        self._coefficients = iteration_coefficients(settings.coefficient_type, settings.num_ns_steps)
        self._qkv_rows = _qkv_rows(sharding) if settings.split_qkv and sharding is not None else None

    def add(self, parameters: Mapping[str, nn.Parameter], num_rows: Mapping[str, int] | None = None) -> None:
        """Update ``parameters``, too; ``num_rows`` are those of whole matrices; see ``Optimizer``."""
        others = {}
        for name, parameter in parameters.items():
            if is_muon_matrix(name, parameter.dim()):
                rows = parameter.shape[0] if num_rows is None else num_rows[name]
                self._matrices[parameter] = _Matrix(name=name, parameter=parameter, num_rows=rows)
            else:
                others[name] = parameter
        self._others.add(others)

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """See ``Optimizer``."""
        self._others.remove([each for each in parameters if self._matrices.pop(each, None) is None])

    @property
    def skips_on_device(self) -> bool:
        """See ``Optimizer``; a momentum that is not finite must not be written, so a step waits for ``skip``."""
        return False

    def step(self, update: Update) -> None:
        """See ``Optimizer``."""
        gradients = [parameter.grad for parameter in self._matrices if parameter.grad is not None]
        if divide_or_skip(gradients, update):
            with torch.no_grad():
                for batch in self._batches():
                    self._update(batch, update.lr, update.weight_decay)
        for parameter in self._matrices:
            parameter.grad = None
        self._others.step(update)

    def _batches(self) -> Iterator[list[_Matrix]]:
        """Yield the matrices with a gradient in batches of one shape, in an order that all replicas share."""
        groups: dict[tuple[object, ...], list[_Matrix]] = {}
        for matrix in self._matrices.values():
            if matrix.parameter.grad is not None:
                item = _ITEM.match(matrix.name)
                # Not the local rows: with ZeRO the last replica may have fewer, but must join the same collectives.
                shape = matrix.num_rows, matrix.parameter.shape[1]
                key = (item and item[0], *shape, self._split_dim(matrix), self._is_split(matrix))
                groups.setdefault(key, []).append(matrix)
        for group in groups.values():
            size = max(1, BATCH_ELEMENTS // max(1, group[0].num_rows * group[0].parameter.shape[1]))
            for begin in range(0, len(group), size):
                yield group[begin : begin + size]

    def _is_split(self, matrix: _Matrix) -> bool:
        return self._qkv_rows is not None and _QKV.search(matrix.name) is not None

    def _update(self, batch: Sequence[_Matrix], lr: float, weight_decay: float) -> None:
        settings = self._settings
        parameters: list[torch.Tensor] = [matrix.parameter for matrix in batch]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for matrix in batch:
            matrix.steps += 1
            if matrix.buffer is None:
                matrix.buffer = torch.zeros_like(matrix.parameter)
        buffers = [matrix.buffer for matrix in batch if matrix.buffer is not None]
        torch._foreach_lerp_(buffers, gradients, 1 - settings.momentum)
        if settings.nesterov:
            momenta = [each.bfloat16() for each in torch._foreach_lerp(gradients, buffers, settings.momentum)]
        else:
            momenta = [each.bfloat16() for each in buffers]
        whole = [self._gather(matrix, each) for matrix, each in zip(batch, momenta, strict=True)]
        if self._is_split(batch[0]):
            updates, alpha = self._orthogonalize_split(whole), -lr
        else:
            updates = list(orthogonalize(whole, self._coefficients))
            alpha = -lr * settings.scale(*whole[0].shape)
        local = [self._local_part(matrix, each) for matrix, each in zip(batch, updates, strict=True)]
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        for parameter, update in zip(parameters, local, strict=True):
            parameter.add_(update, alpha=alpha)

    def _orthogonalize_split(self, whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return scaled float32 updates ``[rows, C]``; query, key and value rows are orthogonalized separately."""
        rows = self._qkv_rows or ()
        num_columns = whole[0].shape[1]
        # Rows are grouped by key-value head: ``[groups, sum(rows), C]``.
        grouped = [each.view(-1, sum(rows), num_columns).split(rows, dim=1) for each in whole]
        parts = []
        for index, group_rows in enumerate(rows):
            matrices = [each[index].reshape(-1, num_columns) for each in grouped]
            scale = self._settings.scale(*matrices[0].shape)
            part = orthogonalize(matrices, self._coefficients).float() * scale
            parts.append(part.view(len(whole), -1, group_rows, num_columns))
        return list(torch.cat(parts, dim=2).flatten(1, 2))

    def _split_dim(self, matrix: _Matrix) -> int | None:
        if self._sharding is None or self._settings.tp_mode == "blockwise":
            return None
        return self._sharding.split_dim(matrix.name)

    def _gather(self, matrix: _Matrix, local: torch.Tensor) -> torch.Tensor:
        """Return the matrix of which this process has the part ``local``; a collective where others have the rest."""
        if self._sharding is None:
            return local
        whole = self._sharding.gather_rows(matrix.name, local, matrix.num_rows)
        dim, region = self._split_dim(matrix), self._sharding.region
        return whole if dim is None or region is None else region.gather_slices(whole, dim)

    def _local_part(self, matrix: _Matrix, update: torch.Tensor) -> torch.Tensor:
        if self._sharding is None:
            return update
        part = cut_tensor(update, self._split_dim(matrix), self._sharding.region)
        return self._sharding.local_rows(matrix.name, part)

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        matrix = self._matrices.get(parameter)
        if matrix is None:
            return self._others.moments(parameter)
        return {} if matrix.buffer is None else {MOMENTUM: matrix.buffer}

    def steps(self, parameter: nn.Parameter) -> int:
        """See ``Optimizer``."""
        matrix = self._matrices.get(parameter)
        return self._others.steps(parameter) if matrix is None else matrix.steps

    def load_state(self, parameter: nn.Parameter, steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue ``parameter`` after ``steps`` updates; ``moments`` have its shape."""
        matrix = self._matrices.get(parameter)
        if matrix is None:
            self._others.load_state(parameter, steps, moments)
        else:
            matrix.buffer, matrix.steps = moments[MOMENTUM], steps

    def drop_state(self, parameter: nn.Parameter) -> None:
        """See ``Optimizer``."""
        matrix = self._matrices.get(parameter)
        if matrix is None:
            self._others.drop_state(parameter)
        else:
            matrix.buffer, matrix.steps = None, 0


def _qkv_rows(sharding: ItemSharding) -> tuple[int, int, int] | None:
    """Rows of the queries, key and value of one key-value head; None for a family that does not state its heads."""
    manifest = sharding.family.manifest()
    heads, hidden = manifest.get("num_attention_heads"), manifest.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    groups, width = manifest.get("num_key_value_heads", heads), manifest.get("head_dim", hidden // heads)
    if not isinstance(groups, int) or not isinstance(width, int):
        return None
    return heads // groups * width, width, width
