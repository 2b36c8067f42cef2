"""What freezing the front of the model does to the costs: no backward, and no activations kept, in the frozen items."""

from __future__ import annotations

from dataclasses import replace

from ._common.errors import UsageError
from .costs import ItemCosts
from .formats.profile import Header
from .partition.uniform import layer_starts


def frozen_front(header: Header, share: float) -> int:
    """How many items at the front are frozen when this share of the layers is; the embedding goes with the first."""
    if not 0 <= share < 1:
        raise UsageError(f"the frozen share must be within [0, 1), is {share}")
    starts = layer_starts(header.items)
    count = round(share * len(starts))
    if count == 0:
        return 0
    return starts[count] if count < len(starts) else len(header.items)


def frozen_costs(header: Header, costs: ItemCosts, share: float, *, cached_forward: bool = False) -> ItemCosts:
    """The costs with this share of the layers frozen, from the front; a cached forward costs nothing either."""
    front = frozen_front(header, share)

    def zero(values: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) * front + values[front:]

    return replace(
        costs,
        forward_ns=zero(costs.forward_ns) if cached_forward else costs.forward_ns,
        backward_input_ns=zero(costs.backward_input_ns),
        backward_weight_ns=zero(costs.backward_weight_ns),
        activation_bytes=zero(costs.activation_bytes),
    )
