"""Costs of dynamic techniques from measured operators: forward, backward by input, backward by weight apart.

A table of ``dynmo-train measure-costs`` has each technique at some settings, next to the dense operator that was
measured in turns with it. The ratios of the two carry over to any number of layers of the measured shape. Between the
measured settings they are interpolated linearly::

    pruning             attention, MLP      by sparsity, in the fastest format that was measured; dense where that is
                                            faster, and below the smallest measured sparsity
    freezing            attention, MLP      forward alone, without gradient
    mixture of depths   attention and MLP   by capacity, with router, selection, gather and scatter
    early exit          attention and MLP   by the share of active tokens; an exit adds what it costs after an MLP,
                                            for its share of active tokens
    sparse attention    attention           by the share of the scores, 1 / buckets, with hashing and sorting
    experts             MLP                 with router and dispatch, in the model without skew, too; the busiest
                                            expert's excess on top

Beyond the measured settings the nearest one counts, except that attention with more than the largest measured share of
its scores follows the line through the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._common.errors import UsageError
from ..formats.operator_costs import OperatorRow, OperatorTable, PassTimes
from ..formats.profile import Header
from .cost_window import ItemCosts
from .vocabulary import ShardTimes

BLOCK_KINDS = ("attention", "mlp")


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Multiples of the dense times of an item."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def times(self, factor: float) -> Factors:
        """All of them multiplied by ``factor``."""
        return Factors(
            forward=self.forward * factor,
            backward_input=self.backward_input * factor,
            backward_weight=self.backward_weight * factor,
        )


DENSE = Factors()


def with_factors(
    costs: ItemCosts, factors: Sequence[Factors], extra: Mapping[int, PassTimes] | None = None
) -> ItemCosts:
    """The costs with each time multiplied by its factor, rounded to whole ns.

    Args:
        costs: of all items.
        factors: one per item.
        extra: times in ns to add, by index of the item.
    """

    def times(values: tuple[int, ...], part: str) -> tuple[int, ...]:
        found = [round(value * getattr(factor, part)) for value, factor in zip(values, factors, strict=True)]
        for index, added in (extra or {}).items():
            found[index] += getattr(added, f"{part}_ns")
        return tuple(found)

    return replace(
        costs,
        forward_ns=times(costs.forward_ns, "forward"),
        backward_input_ns=times(costs.backward_input_ns, "backward_input"),
        backward_weight_ns=times(costs.backward_weight_ns, "backward_weight"),
    )


def _ratio(times: PassTimes, dense: PassTimes) -> Factors:
    def part(name: str) -> float:
        # A pass that the dense operator does not have costs nothing in either.
        below = getattr(dense, name)
        return float(getattr(times, name)) / below if below else 0.0

    return Factors(
        forward=part("forward_ns"),
        backward_input=part("backward_input_ns"),
        backward_weight=part("backward_weight_ns"),
    )


def _between(points: Sequence[tuple[float, Factors]], at: float, *, extends: bool = False) -> Factors:
    """The factors at a setting, from those at ascending settings.

    Args:
        points: setting and factors, at least one.
        at: the setting.
        extends: whether settings above the last point follow the line through the last two.
    """
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    if at >= points[-1][0] and not extends:
        return points[-1][1]
    upper = next((index for index, (setting, _) in enumerate(points) if at <= setting), len(points) - 1)
    (low, below), (high, above) = points[upper - 1], points[upper]
    share = (at - low) / (high - low)

    def part(name: str) -> float:
        first, second = getattr(below, name), getattr(above, name)
        return max(0.0, float(first + share * (second - first)))

    return Factors(
        forward=part("forward"), backward_input=part("backward_input"), backward_weight=part("backward_weight")
    )


class MeasuredCosts:
    """Costs of techniques at one sequence length of a table.

    Args:
        table: of ``dynmo-train measure-costs``.
        tokens: tokens of a sample.
        form: format of the products of pruned layers; None is the fastest that was measured at each sparsity.
        exit_setting: what selects the row of exits, by ``measure``, ``loss_token_share`` and ``loss_vocabulary``.
        experts_per_token: experts of a token where MLPs have experts; None is a dense MLP.

    Raises:
        UsageError: the table has no rows of this sequence length.
    """

    def __init__(
        self,
        table: OperatorTable,
        tokens: int,
        *,
        form: str | None = None,
        exit_setting: Mapping[str, Any] | None = None,
        experts_per_token: int | None = None,
    ) -> None:
        self.table, self.tokens, self._form, self._exit_setting = table, tokens, form, dict(exit_setting or {})
        self._experts_per_token = experts_per_token
        self._rows = [row for row in table.rows if row.sequence_length == tokens]
        if not self._rows:
            lengths = ", ".join(map(str, table.sequence_lengths))
            raise UsageError(
                f"the table has sequence lengths {lengths}, not {tokens}; run dynmo-train measure-costs --seq-lengths"
                f" {tokens}"
            )

    def _select(self, case: str, operator: str, **setting: Any) -> list[OperatorRow]:
        """The rows of a case, at least one.

        Raises:
            UsageError: the table has none.
        """
        found = [
            row
            for row in self._rows
            if (row.case, row.operator) == (case, operator)
            and all(row.setting.get(name) == value for name, value in setting.items())
        ]
        if not found:
            stated = "".join(f", {name} {value}" for name, value in setting.items())
            raise UsageError(
                f"the table has no row of {case} {operator} with {self.tokens} tokens{stated}; run dynmo-train"
                f" measure-costs --cases dense,{case} --seq-lengths {self.tokens}"
            )
        return found

    def _points(self, case: str, operator: str, name: str, **setting: Any) -> list[tuple[float, Factors]]:
        """Settings and factors, ascending; of the setting ``name``."""
        rows = self._select(case, operator, **setting)
        return sorted(
            ((float(row.setting[name]), _ratio(row.times, row.dense)) for row in rows), key=lambda point: point[0]
        )

    @staticmethod
    def _total(factors: Factors, dense: PassTimes) -> float:
        return (
            factors.forward * dense.forward_ns
            + factors.backward_input * dense.backward_input_ns
            + factors.backward_weight * dense.backward_weight_ns
        )

    def dense_times(self, kind: str) -> PassTimes:
        """The times of a dense item of a ``kind``.

        Raises:
            UsageError: the table has none.
        """
        return self._select("dense", kind)[0].times

    def dense(self, header: Header, analytic: ItemCosts) -> ItemCosts:
        """The dense costs of all items.

        Args:
            header: of the profile.
            analytic: computed costs, whose activations in bytes stay.

        Raises:
            UsageError: the table lacks an item's kind.
        """
        times = [self._item_times(item.kind) for item in header.items]
        vocabulary = analytic.vocabulary
        if vocabulary is not None:
            # Of the three products of the head two are in the pass S and one is in T.
            head = self.dense_times("head").total_ns
            vocabulary = ShardTimes(forward_ns=head * 2 // 3, weight_ns=head - head * 2 // 3)
            # What stays in the last stage is a normalization, which is not measured.
            [at] = [index for index, item in enumerate(header.items) if item.kind == "head"]
            names = ("forward_ns", "backward_input_ns", "backward_weight_ns")
            times[at] = PassTimes(**{name: getattr(analytic, name)[at] for name in names})
        return replace(
            analytic,
            forward_ns=tuple(each.forward_ns for each in times),
            backward_input_ns=tuple(each.backward_input_ns for each in times),
            backward_weight_ns=tuple(each.backward_weight_ns for each in times),
            vocabulary=vocabulary,
        )

    def _item_times(self, kind: str) -> PassTimes:
        if kind == "mlp" and self._experts_per_token is not None:
            return self._select("experts", kind, experts_per_token=self._experts_per_token)[0].times
        return self.dense_times(kind)

    def _by_item(
        self, header: Header, values: Sequence[float], kinds: Sequence[str], of: Callable[[str, float], Factors]
    ) -> list[Factors]:
        known: dict[tuple[str, float], Factors] = {}
        found = []
        for item, value in zip(header.items, values, strict=True):
            if item.kind not in kinds:
                found.append(DENSE)
                continue
            key = (item.kind, value)
            if key not in known:
                known[key] = of(*key)
            found.append(known[key])
        return found

    def pruned(self, header: Header, dense: ItemCosts, sparsity: Sequence[float]) -> ItemCosts:
        """The costs with each item at its sparsity, in [0, 1]."""
        return with_factors(dense, self._by_item(header, sparsity, BLOCK_KINDS, self._pruned))

    def _pruned(self, kind: str, sparsity: float) -> Factors:
        dense = self.dense_times(kind)
        best = DENSE
        forms = {str(row.setting["form"]) for row in self._select("pruned", kind)}
        for form in sorted(forms if self._form is None else {self._form}):
            points = self._points("pruned", kind, "sparsity", form=form)
            if sparsity < points[0][0]:
                continue
            factors = _between(points, sparsity)
            if self._total(factors, dense) < self._total(best, dense):
                best = factors
        return best

    def frozen(self, header: Header, dense: ItemCosts, front: int, cache_hits: float) -> ItemCosts:
        """The costs with a frozen front.

        Args:
            header: of the profile.
            dense: without freezing.
            front: number of frozen items.
            cache_hits: share of the samples whose outputs of the front are read instead of computed.
        """

        def of(index: int, kind: str) -> Factors:
            if index >= front:
                return DENSE
            forward = 1.0
            if kind in BLOCK_KINDS:
                row = self._select("frozen", kind)[0]
                forward = _ratio(row.times, row.dense).forward
            return Factors(forward=forward * (1.0 - cache_hits), backward_input=0.0, backward_weight=0.0)

        costs = with_factors(dense, [of(index, item.kind) for index, item in enumerate(header.items)])
        return replace(costs, activation_bytes=(0,) * front + dense.activation_bytes[front:])

    def routed(self, header: Header, dense: ItemCosts, capacity: Sequence[float]) -> ItemCosts:
        """The costs of blocks that process a share of the tokens; 1 is a block without a router."""
        return with_factors(dense, self._by_item(header, capacity, BLOCK_KINDS, self._routed))

    def _routed(self, _kind: str, capacity: float) -> Factors:
        return DENSE if capacity >= 1.0 else _between(self._points("depths", "layer", "capacity"), capacity)

    def exited(
        self, header: Header, dense: ItemCosts, active: Sequence[float], exits: Mapping[int, float]
    ) -> ItemCosts:
        """The costs with early exits.

        Args:
            header: of the profile.
            dense: without exits.
            active: of each item, the share of the tokens that have not exited.
            exits: of each item that has an exit after it, by index, the share of the tokens that reach it.
        """
        factors = self._by_item(header, active, BLOCK_KINDS, self._active)
        extra = {index: self._exit_times(share) for index, share in exits.items()}
        return with_factors(dense, factors, extra)

    def _active(self, _kind: str, share: float) -> Factors:
        points = self._points("exited", "layer", "active_share")
        # Before the first exit no token is selected, which is the dense layer.
        return _between([*points, (1.0, DENSE)], share)

    def _exit_times(self, share: float) -> PassTimes:
        row = self._select("exit", "mlp", **self._exit_setting)[0]

        def part(name: str) -> int:
            added = int(getattr(row.times, name)) - int(getattr(row.dense, name))
            return max(0, round(share * added))

        return PassTimes(
            forward_ns=part("forward_ns"),
            backward_input_ns=part("backward_input_ns"),
            backward_weight_ns=part("backward_weight_ns"),
        )

    def sparse(self, header: Header, dense: ItemCosts, density: Sequence[float]) -> ItemCosts:
        """The costs with attention that keeps a share of its scores, within [0, 1]."""
        return with_factors(dense, self._by_item(header, density, ("attention",), self._sparse))

    def _sparse(self, _kind: str, density: float) -> Factors:
        rows = self._select("sparse", "attention")
        points = sorted(
            ((1.0 / float(row.setting["buckets"]), _ratio(row.times, row.dense)) for row in rows), key=lambda p: p[0]
        )
        return _between(points, density, extends=True)

    def experts(self, header: Header, dense: ItemCosts, excess: Sequence[float]) -> ItemCosts:
        """The costs where the busiest expert takes longer than the mean by its ``excess``."""
        factors = self._by_item(header, excess, ("mlp",), lambda _kind, value: DENSE.times(1.0 + value))
        return with_factors(dense, factors)
