"""Which microbatches' gradients cross a stage boundary as factors. Pure functions of the schedule and the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .partition import Partition

Order = Sequence[Sequence[tuple[int, str, int]]]
FORWARD, BACKWARDS = "F", ("B", "I")


def epilogue_backwards(order: Order) -> dict[int, frozenset[int]]:
    """Stage -> microbatches whose backward its worker begins behind its last forward of the step: the epilogue.

    Args:
        order: the operations of each worker as (stage, kind, microbatch); kinds are torch's ``F``, ``B``, ``I``, ``W``.
    """
    found: dict[int, set[int]] = {}
    for operations in order:
        last = max((at for at, (_, kind, _) in enumerate(operations) if kind == FORWARD), default=-1)
        for at, (stage, kind, microbatch) in enumerate(operations):
            if kind in BACKWARDS:
                found.setdefault(stage, set()).update((microbatch,) if at > last else ())
    return {stage: frozenset(microbatches) for stage, microbatches in found.items()}


def one_f_one_b_epilogue(stages: int, microbatches: int) -> dict[int, frozenset[int]]:
    """The same of 1F1B with one stage a worker: stage ``s`` runs ``S - s`` forwards ahead, and backwards behind.

    Worked: of 4 stages and 8 microbatches, stage 0 gets 4, 5, 6 and 7 in the epilogue, stage 2 gets 6 and 7.
    """
    return {stage: frozenset(range(max(0, microbatches - (stages - stage)), microbatches)) for stage in range(stages)}


def compressed_microbatches(
    partition: Partition, microbatches: int, epilogue: Mapping[int, frozenset[int]] | None
) -> dict[int, frozenset[int]]:
    """Stage -> microbatches whose gradient it sends back as factors; for every stage but the first.

    Nothing is sent between stages of one worker. A stage without items passes on the factors that it got, and sends
    whole what it got whole.

    Args:
        epilogue: of each stage as receiver; None packs every microbatch.
    """
    every = frozenset(range(microbatches))
    packed: dict[int, frozenset[int]] = {}
    for stage in range(len(partition.stages) - 1, 0, -1):
        apart = partition.worker_of_stage(stage) != partition.worker_of_stage(stage - 1)
        chosen = (every if epilogue is None else epilogue.get(stage - 1, every)) if apart else frozenset()
        if not partition.stages[stage]:
            chosen &= packed.get(stage + 1, frozenset())
        packed[stage] = chosen
    return packed
