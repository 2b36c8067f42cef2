"""Costs of dynamic techniques from stated formulas, for profiles without measured operators.

Each formula is one factor for forward and both backward passes; what a technique adds (routers, exits, sorting) costs
nothing. ``measured_costs`` has the same methods with measured operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ..formats.profile import Header
from .cost_window import ItemCosts, scaled
from .sparsity import PRUNED_KINDS, SparsityModel

MLP_KINDS = ("mlp", "layer")


class TechniqueCosts(Protocol):
    """Costs of each technique; each list has one value per item of the header, and other kinds of items ignore it."""

    def pruned(self, header: Header, dense: ItemCosts, sparsity: Sequence[float]) -> ItemCosts:
        """The costs with each item at its sparsity, in [0, 1]."""

    def frozen(self, header: Header, dense: ItemCosts, front: int, cache_hits: float) -> ItemCosts:
        """The costs with a frozen front.

        Args:
            header: of the profile.
            dense: without freezing.
            front: number of frozen items.
            cache_hits: share of the samples whose outputs of the front are read instead of computed.
        """

    def routed(self, header: Header, dense: ItemCosts, capacity: Sequence[float]) -> ItemCosts:
        """The costs of blocks that process a share of the tokens."""

    def exited(
        self, header: Header, dense: ItemCosts, active: Sequence[float], exits: Mapping[int, float]
    ) -> ItemCosts:
        """The costs with a share of active tokens, and exits after some items, with the share that reaches each."""

    def sparse(self, header: Header, dense: ItemCosts, density: Sequence[float]) -> ItemCosts:
        """The costs with attention that keeps a share of its scores."""

    def experts(self, header: Header, dense: ItemCosts, excess: Sequence[float]) -> ItemCosts:
        """The costs where the busiest expert takes longer than the mean by its ``excess``."""


class StatedCosts:
    """The formulas.

    Args:
        sparsity: cost model of pruned items.
    """

    def __init__(self, sparsity: SparsityModel | None = None) -> None:
        self._sparsity = sparsity or SparsityModel()

    def pruned(self, header: Header, dense: ItemCosts, sparsity: Sequence[float]) -> ItemCosts:
        """The costs with each item at its sparsity, in [0, 1]."""
        pairs = zip(header.items, sparsity, strict=True)
        return scaled(dense, [self._sparsity.factor(s) if item.kind in PRUNED_KINDS else 1.0 for item, s in pairs])

    def frozen(self, header: Header, dense: ItemCosts, front: int, cache_hits: float) -> ItemCosts:
        """The costs with a frozen front, which has no backward pass and stores no activations.

        Args:
            header: of the profile.
            dense: without freezing.
            front: number of frozen items.
            cache_hits: share of the samples whose outputs of the front are read instead of computed.
        """
        rows = [1.0 - cache_hits if index < front else 1.0 for index in range(len(header.items))]
        gradients = [0.0 if index < front else 1.0 for index in range(len(header.items))]
        costs = scaled(scaled(dense, rows, ("forward",)), gradients, ("backward",))
        return replace(costs, activation_bytes=(0,) * front + dense.activation_bytes[front:])

    def routed(self, header: Header, dense: ItemCosts, capacity: Sequence[float]) -> ItemCosts:
        """The costs of blocks that process a share of the tokens."""
        pairs = zip(header.items, capacity, strict=True)
        return scaled(dense, [share if item.kind in PRUNED_KINDS else 1.0 for item, share in pairs])

    def exited(
        self, header: Header, dense: ItemCosts, active: Sequence[float], exits: Mapping[int, float]
    ) -> ItemCosts:
        """The costs with a share of active tokens. Exits cost nothing."""
        return self.routed(header, dense, active)

    def sparse(self, header: Header, dense: ItemCosts, density: Sequence[float]) -> ItemCosts:
        """The costs with attention that keeps a share of its scores; projections stay dense."""
        tokens, hidden = header.model.sequence_length, header.model.hidden_size
        # Scores 4 s^2 h, projections 8 s h^2; a whole layer has 16 s h^2 more in its MLP
        shares = {"attention": tokens / (tokens + 2 * hidden), "layer": tokens / (tokens + 6 * hidden)}
        pairs = zip(header.items, density, strict=True)
        return scaled(dense, [1.0 - shares.get(item.kind, 0.0) * (1.0 - d) for item, d in pairs])

    def experts(self, header: Header, dense: ItemCosts, excess: Sequence[float]) -> ItemCosts:
        """The costs where the busiest expert takes longer than the mean by its ``excess``."""
        pairs = zip(header.items, excess, strict=True)
        return scaled(dense, [1.0 + value if item.kind in MLP_KINDS else 1.0 for item, value in pairs])
