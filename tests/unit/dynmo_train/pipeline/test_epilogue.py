"""Which microbatches are compressed: the epilogue of each schedule, as torch runs it."""

from __future__ import annotations

from dynmo_train.pipeline.epilogue import compressed_microbatches, epilogue_backwards, one_f_one_b_epilogue
from dynmo_train.pipeline.partition import Partition


def order_1f1b(stages, microbatches):
    """What torch's 1F1B does, stage by stage."""
    order = []
    for stage in range(stages):
        ahead = min(microbatches, stages - stage)
        operations = [(stage, "F", at) for at in range(ahead)]
        for at in range(microbatches):
            operations.append((stage, "B", at))
            if at + ahead < microbatches:
                operations.append((stage, "F", at + ahead))
        order.append(operations)
    return order


def test_one_f_one_b_epilogue_matches_the_schedule():
    for stages in (1, 2, 3, 4):
        for microbatches in (stages, stages + 1, 8):
            found = epilogue_backwards(order_1f1b(stages, microbatches))
            assert found == one_f_one_b_epilogue(stages, microbatches)


def test_epilogue_backwards_count_input_gradients():
    order = [[(0, "F", 0), (0, "I", 0), (0, "F", 1), (0, "W", 0), (0, "I", 1), (0, "W", 1)]]
    assert epilogue_backwards(order) == {0: frozenset({1})}


def test_compressed_microbatches_follow_the_receiver():
    stages = Partition.looped((("a",), ("b",), ("c",), ("d",)), 4)
    assert compressed_microbatches(stages, 3, None) == {stage: frozenset({0, 1, 2}) for stage in (1, 2, 3)}
    packed = compressed_microbatches(stages, 8, one_f_one_b_epilogue(4, 8))
    assert packed == {1: frozenset({4, 5, 6, 7}), 2: frozenset({5, 6, 7}), 3: frozenset({6, 7})}


def test_compressed_microbatches_of_local_and_empty_stages():
    turn = Partition.v_shaped((("a",), ("b",), ("c",), ("d",)), 2)
    assert {stage for stage, each in compressed_microbatches(turn, 2, None).items() if each} == {1, 3}
    empty = Partition.looped((("a",), (), ("c",)), 3)
    assert compressed_microbatches(empty, 8, one_f_one_b_epilogue(3, 8)) == {1: frozenset({6, 7}), 2: frozenset({6, 7})}
