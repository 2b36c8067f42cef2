"""Blocks per stage by Megatron's options of the pipeline: a layout, uneven ends, and places of embedding and loss.

Worked, for 4 pipeline ranks:

===============================================  ==========================
``--pipeline-model-parallel-layout Et|tt|tt|tL``  1, 2, 2, 1 blocks
``--decoder-first-pipeline-num-layers 1``         1, 3, 3, 3 of 10 blocks
``--account-for-embedding-in-pipeline-split``     1, 2, 2, 2 of 7 blocks
===============================================  ==========================

Sources: megatron-core 0.16.1, ``get_num_layers_to_build`` of ``transformer/transformer_block.py`` and
``PipelineParallelLayerLayout``; a test compares with both.
"""

from __future__ import annotations

import re

from .._common.document import MAX_LAYERS, short_repr
from .._common.errors import UsageError

LAYOUT_FLAG = "--pipeline-model-parallel-layout"
FIRST_FLAG, LAST_FLAG = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING_FLAG, LOSS_FLAG = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
MAX_LAYOUT = 4 * MAX_LAYERS


def parse_layout(text: str) -> tuple[int, ...]:
    """Parse ``Ettt|(tt|)*2L`` into (3, 2, 2, 0): the number of blocks of each stage.

    ``E`` is the embedding, ``t`` a block, ``L`` the loss; ``|`` ends a stage, ``(...)*N`` and ``X*N`` repeat. Commas
    have no effect.

    Raises:
        UsageError: another character, more than one embedding or loss, or either at another place.
    """
    unrolled = text.replace(",", "")
    # In this order, and once each: so a group cannot contain a group.
    for pattern in (r"\(([^()]+)\)\*(\d{1,6})", r"([^()])\*(\d{1,6})"):
        size = sum(len(match[1]) * int(match[2]) for match in re.finditer(pattern, unrolled))
        if len(unrolled) + size > MAX_LAYOUT:
            raise UsageError(f"{LAYOUT_FLAG} {short_repr(text)}: has more than {MAX_LAYOUT:,} characters unrolled")
        unrolled = re.sub(pattern, lambda match: match[1] * int(match[2]), unrolled)
    if "m" in unrolled:
        raise UsageError(f"{LAYOUT_FLAG} {short_repr(text)}: m, multi-token prediction, is not supported; remove it")
    if other := re.search(r"[^EtL|]", unrolled):
        raise UsageError(
            f"{LAYOUT_FLAG} {short_repr(text)}: {other[0]!r} must be E, t, L, |, or a repetition such as (tt|)*2"
        )
    layers = unrolled.replace("|", "")
    if not (layers.startswith("E") and layers.endswith("L")) or layers.count("E") > 1 or layers.count("L") > 1:
        raise UsageError(
            f"{LAYOUT_FLAG} {short_repr(text)}: must begin with E, the embedding, end with L, the loss, and have each"
            " once"
        )
    return tuple(stage.count("t") for stage in unrolled.split("|"))


def stages_of_layout(layout: str | None, ranks: int) -> int:
    """Stages per pipeline rank of a layout; 1 without one, or where it does not fit, which a rule reports.

    Args:
        layout: value of ``--pipeline-model-parallel-layout``; None without one.
        ranks: pipeline-parallel size.
    """
    if layout is None:
        return 1
    try:
        stages = len(parse_layout(layout))
    except UsageError:
        return 1
    return max(1, stages // ranks)


def blocks_per_stage(
    blocks: int,
    ranks: int,
    virtual_stages: int = 1,
    *,
    layout: str | None = None,
    first: int | None = None,
    last: int | None = None,
    counts_embedding: bool = False,
    counts_loss: bool = False,
) -> tuple[int, ...]:
    """The number of blocks of each stage; stage ``s`` is on pipeline rank ``s mod ranks``.

    Args:
        blocks: transformer blocks of the model.
        ranks: pipeline-parallel size.
        virtual_stages: stages per pipeline rank.
        layout: value of ``--pipeline-model-parallel-layout``.
        first: blocks of the first rank; None: as the ranks between.
        last: blocks of the last rank; None: as the ranks between.
        counts_embedding: whether the embedding takes the place of a block in the first stage.
        counts_loss: whether the loss takes the place of a block in the last stage.

    Raises:
        UsageError: the blocks do not divide, as in Megatron; or the layout has other numbers of blocks or stages.
    """
    if layout is not None:
        return _blocks_of_layout(layout, blocks, ranks)
    if first is not None or last is not None:
        per_rank = _uneven(blocks, ranks, first, last)
    else:
        total = blocks + counts_embedding + counts_loss
        flags = " and ".join([EMBEDDING_FLAG] * counts_embedding + [LOSS_FLAG] * counts_loss)
        if total % ranks:
            raise UsageError(
                f"{flags}: --num-layers {blocks} plus {total - blocks} must be a multiple of"
                f" --pipeline-model-parallel-size {ranks}"
            )
        per_rank = [total // ranks] * ranks
    for count in per_rank:
        if count % virtual_stages:
            raise UsageError(
                f"{count} layers of a pipeline rank must be a multiple of its {virtual_stages} stages; change"
                " --num-layers or the stages per rank"
            )
    found = [count // virtual_stages for _ in range(virtual_stages) for count in per_rank]
    found[0] -= counts_embedding
    found[-1] -= counts_loss
    if min(found) < 0:
        raise UsageError(f"{EMBEDDING_FLAG} and {LOSS_FLAG}: a stage has no block to replace; use fewer stages")
    return tuple(found)


def _blocks_of_layout(layout: str, blocks: int, ranks: int) -> tuple[int, ...]:
    found = parse_layout(layout)
    if len(found) % ranks:
        raise UsageError(
            f"{LAYOUT_FLAG}: has {len(found)} stages; must be a multiple of --pipeline-model-parallel-size {ranks}"
        )
    if sum(found) != blocks:
        raise UsageError(f"{LAYOUT_FLAG}: has {sum(found)} blocks; must be --num-layers {blocks}")
    return found


def _uneven(blocks: int, ranks: int, first: int | None, last: int | None) -> list[int]:
    """Blocks of each rank with given numbers at the ends.

    Raises:
        UsageError: the other blocks do not divide over the other ranks.
    """
    flags = " and ".join(
        f"{flag} {value}" for flag, value in ((FIRST_FLAG, first), (LAST_FLAG, last)) if value is not None
    )
    if first == 0 or last == 0:
        raise UsageError(f"{flags}: must be at least 1; use {LAYOUT_FLAG} for a stage without blocks")
    between = ranks - (first is not None) - (last is not None)
    remaining = blocks - (first or 0) - (last or 0)
    if between < 0:
        raise UsageError(f"{flags}: requires --pipeline-model-parallel-size of at least 2")
    if remaining < 0 or (remaining % between if between else remaining):
        raise UsageError(
            f"{flags}: leaves {remaining} of --num-layers {blocks}; must be a multiple of the {between} other ranks"
        )
    per_rank = [remaining // between if between else 0] * between
    return [*([first] if first is not None else []), *per_rank, *([last] if last is not None else [])]
