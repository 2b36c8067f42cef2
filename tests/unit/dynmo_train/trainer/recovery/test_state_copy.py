"""Copies of a rank's state: their bytes, which of them are complete together, and where they are sent."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.optim.item_state import ItemState
from dynmo_train.trainer.recovery.peer_copies import CopySlots, peer_targets
from dynmo_train.trainer.recovery.state_copy import (
    StateCopy,
    item_state,
    newest_complete,
    plan_layout,
    read_copy,
    write_copy,
)
from tests.tables import table


def states():
    return {
        "a": ItemState(
            tensors={
                "a.weight": torch.randn(3, 5),
                "a.weight.mask": torch.tensor([True, False, True]),
                "a.weight.exp_avg": torch.randn(3, 5, dtype=torch.bfloat16),
                "a.count": torch.tensor(7, dtype=torch.int64),
                "a.empty": torch.empty(0, 4),
            },
            steps={"a.weight": 12},
        ),
        "b": ItemState(tensors={"b.weight": torch.randn(7).t()}, steps={}),
        "c": ItemState(tensors={}, steps={}),
    }


def test_copy_survives_its_bytes():
    written = states()
    layout = plan_layout(written, (2, 40), {"manifest": {"step": 40}})
    block = torch.empty(layout.num_bytes, dtype=torch.uint8)
    write_copy(block, layout, written)
    copy = read_copy(block.clone())
    assert copy.tag == (2, 40)
    assert copy.header["progress"] == {"manifest": {"step": 40}}
    assert list(copy.header["items"]) == ["a", "b", "c"]
    for item, state in written.items():
        found = item_state(copy.entry(item), copy.item_bytes(item).clone())
        assert found.steps == state.steps
        assert list(found.tensors) == list(state.tensors)
        for name, tensor in state.tensors.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert torch.equal(found.tensors[name], tensor)


def test_newest_tag_with_every_item_is_chosen():
    old, new = (0, 10), (0, 20)
    inventories = [[(old, ["a"]), (new, ["a"]), (old, ["c"])], [(old, ["b"]), (new, ["b"])]]
    assert newest_complete(inventories, ["a", "b", "c"]) == (old, {"a": (0,), "b": (1,), "c": (0,)})
    inventories[1].append((new, ["c"]))
    assert newest_complete(inventories, ["a", "b", "c"]) == (new, {"a": (0,), "b": (1,), "c": (1,)})


def test_later_generation_precedes_a_later_step():
    inventories = [[((0, 30), ["a"]), ((1, 20), ["a"])]]
    assert newest_complete(inventories, ["a"]) == ((1, 20), {"a": (0,)})


def test_missing_item_leaves_no_tag():
    assert newest_complete([[((0, 10), ["a"])], [((0, 20), ["b"])], []], ["a", "b"]) is None


@table(
    ("nodes", "stages", "targets"),
    [
        ("aa", [0, 1], [1, 0]),
        ("aaa", [0, 1, 2], [1, 2, 0]),
        ("aabb", [0, 1, 2, 3], [2, 3, 0, 1]),
        ("abab", [0, 1, 2, 3], [1, 2, 3, 0]),
        ("aab", [0, 1, 2], [2, 2, 0]),
        ("abb", [0, 1, 2], [1, 0, 0]),
        # Replicas have the same state: on another node, on one node, and all on the node that may be lost.
        ("abab", [0, 0, 1, 1], [None] * 4),
        ("aaaa", [0, 0, 1, 1], [None] * 4),
        ("aabb", [0, 0, 1, 1], [2, None, 0, None]),
    ],
)
def test_copies_are_sent_to_another_node_unless_a_replica_is_there(nodes, stages, targets):
    assert peer_targets(nodes, stages) == targets


@pytest.mark.parametrize("nodes", ["aab", "aaabb", "aabbccdd", "abcabc", "aaaaab"])
def test_loss_of_any_node_leaves_a_copy_of_each_rank(nodes):
    targets = peer_targets(nodes, range(len(nodes)))
    assert all(nodes[rank] != nodes[target] for rank, target in enumerate(targets))
    assert max(map(targets.count, targets)) <= -(-max(map(nodes.count, nodes)) // min(map(nodes.count, nodes)))


def copy_of(step):
    return StateCopy(header={"tag": [0, step], "items": {}, "progress": {}}, payload=torch.empty(0, dtype=torch.uint8))


def test_copy_in_progress_keeps_the_last_one_and_is_itself_not_complete():
    slots = CopySlots()
    for step in (10, 20):
        slot, _ = slots.begin((0, step - 10), 64)
        slots.complete(slot, copy_of(step))
    _, block = slots.begin((0, 20), 128)
    assert block.numel() == 128
    assert [copy.tag for copy in slots.copies] == [(0, 20)]


def test_blocks_are_reused():
    slots = CopySlots()
    first, second = slots.begin(None, 100)[1].data_ptr(), slots.begin(None, 60)[1].data_ptr()
    assert first == second
