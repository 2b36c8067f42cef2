"""Which microbatches' gradients cross a stage boundary compressed. Pure functions of the schedule and the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .partition import Partition

Order = Sequence[Sequence[tuple[int, str, int]]]
FORWARD, BACKWARDS = "F", ("B", "I")


def epilogue_backwards(order: Order) -> dict[int, frozenset[int]]:
    """Return stage -> microbatches whose backward its rank starts after its last forward of the step: the epilogue.

    Args:
        order: Operations of each rank as (stage, kind, microbatch); kinds are torch's ``F``, ``B``, ``I``, ``W``.
    """
    found: dict[int, set[int]] = {}
    for operations in order:
        last = max((at for at, (_, kind, _) in enumerate(operations) if kind == FORWARD), default=-1)
        for at, (stage, kind, microbatch) in enumerate(operations):
            if kind in BACKWARDS:
                found.setdefault(stage, set()).update((microbatch,) if at > last else ())
    return {stage: frozenset(microbatches) for stage, microbatches in found.items()}


def one_f_one_b_epilogue(stages: int, microbatches: int) -> dict[int, frozenset[int]]:
    """Return the epilogue of 1F1B with one stage per rank: stage ``s`` of ``S`` runs ``S - s`` forwards ahead.

    Example: of 4 stages and 8 microbatches, stage 0 has 4, 5, 6 and 7 in its epilogue, stage 2 has 6 and 7.
    """
    return {stage: frozenset(range(max(0, microbatches - (stages - stage)), microbatches)) for stage in range(stages)}


def compressed_microbatches(
    partition: Partition, microbatches: int, epilogue: Mapping[int, frozenset[int]] | None
) -> dict[int, frozenset[int]]:
    """Return stage -> microbatches whose gradient it sends compressed, for every stage but the first.

    Nothing is compressed between stages of one rank. A stage without items forwards what it receives, compressed or
    not.

    Args:
        partition: Stages and their placement.
        microbatches: Microbatches of a step.
        epilogue: Epilogue of each stage as a receiver; None compresses every microbatch.
    """
    every = frozenset(range(microbatches))
    compressed: dict[int, frozenset[int]] = {}
    # From last to first: a stage without items needs the choice of the stage behind it.
    for stage in range(len(partition.stages) - 1, 0, -1):
        crosses_ranks = partition.stage_ranks[stage] != partition.stage_ranks[stage - 1]
        chosen = (every if epilogue is None else epilogue.get(stage - 1, every)) if crosses_ranks else frozenset()
        if not partition.stages[stage]:
            chosen &= compressed.get(stage + 1, frozenset())
        compressed[stage] = chosen
    return compressed
