"""Static splits: Megatron's even split of the layers, and DeepSpeed's even split of all units."""

from __future__ import annotations

from ..formats.profile import Item
from .problem import PartitionProblem


def layer_starts(items: tuple[Item, ...]) -> list[int]:
    """The positions of the first item of every layer that is neither embedding nor head."""
    return [
        index
        for index, item in enumerate(items)
        if item.kind not in ("embedding", "head") and (index == 0 or item.layer != items[index - 1].layer)
    ]


def boundaries(problem: PartitionProblem) -> tuple[int, ...]:
    """Megatron's split: the layers evenly, the embedding on the first stage, the head on the last.

    Of ``L`` layers on ``P`` stages, stage ``p`` gets layers ``floor(p L / P)`` to ``floor((p + 1) L / P)``, so the
    later stages get one more where ``P`` does not divide ``L``. Constraints are ignored.
    """
    items, stages = problem.chain.items, problem.num_stages
    # A profile of items that are all embedding or head has no layers; its items are split instead.
    starts = layer_starts(items) or list(range(len(items)))
    inner = []
    for stage in range(1, stages):
        first = stage * len(starts) // stages
        inner.append(starts[first] if first > 0 else 0)
    return (0, *inner, len(items))


def split_units_evenly(problem: PartitionProblem) -> tuple[int, ...]:
    """DeepSpeed's static split: all units evenly, embedding and head included; the first stages get one more."""
    cuts = problem.chain.cuts
    each, more = divmod(len(cuts) - 1, problem.num_stages)
    return tuple(cuts[stage * each + min(stage, more)] for stage in range(problem.num_stages + 1))
