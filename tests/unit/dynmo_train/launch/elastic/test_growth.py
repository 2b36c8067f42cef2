"""Growth in place: node 0's decision as a model, and whole attempts over a store without processes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from dynmo_train._common.document import DocumentError
from dynmo_train.launch.elastic import node_continuation
from dynmo_train.launch.elastic.continuation import PREFIX, Continuation, Notice
from dynmo_train.launch.elastic.coordinator import Round
from dynmo_train.launch.elastic.growth import (
    JOINING_VARIABLE,
    PREPARE_S,
    PRESENT_S,
    Action,
    GrowthState,
    Joining,
    Outcome,
    Proposal,
    decode_outcome,
    decode_properties,
    decode_proposal,
    encode_outcome,
    encode_proposal,
    next_action,
)
from dynmo_train.launch.elastic.joining_node import JoiningNode
from dynmo_train.launch.elastic.membership import (
    Limits,
    Membership,
    Record,
    RecordKind,
    apply_record,
    end_reason,
    open_round,
    with_members,
    without_members,
)
from dynmo_train.launch.elastic.node_agent import PeerFailureError
from dynmo_train.launch.elastic.node_continuation import LeadingNode
from dynmo_train.launch.elastic.node_growth import MAX_ATTEMPTS, LeadingGrowth
from dynmo_train.launch.elastic.restart import Layout, growth_workers
from dynmo_train.launch.elastic.run_layout import RunLayout
from tests.tables import table

KILLED = -9
NOTICE = Notice(
    generation=1, ranks=(0, 1), lost=(), sizes=(1, 1), cause="node 1 joined", since=2.5, joined=(1,), workers=2
)


def subsets(ranks):
    return st.sets(st.sampled_from(ranks)) if ranks else st.just(set())


@st.composite
def states(draw):
    ranks = tuple(range(3, 3 + draw(st.integers(1, 3))))
    any_ranks = subsets([0, 1, *ranks])
    return GrowthState(
        ranks=ranks,
        is_training=draw(st.booleans()),
        has_finished=draw(st.booleans()),
        left=draw(st.sampled_from([(), ("node 1",)])),
        ended=draw(any_ranks),
        prepared=draw(any_ranks),
        refusal=draw(st.sampled_from([None, "too few layers"])),
        is_proposed=draw(st.booleans()),
        is_at_boundary=draw(st.booleans()),
        present=draw(any_ranks),
        waited_s=draw(st.floats(0, 2 * PREPARE_S)),
        waited_at_boundary_s=draw(st.floats(0, 2 * PRESENT_S)),
    )


@settings(max_examples=2000, deadline=None)
@given(states())
def test_decision_never_takes_in_what_is_not_there(state):
    action, reason = next_action(state)
    is_sound = (
        state.is_training and not state.has_finished and not state.left and not set(state.ended) & set(state.ranks)
    )
    assert (action is Action.CANCEL) == bool(reason)
    if action is not Action.CANCEL:
        assert is_sound
        assert state.refusal is None
    if action is Action.GROW:
        assert state.is_proposed
        assert state.is_at_boundary
        assert set(state.ranks) <= set(state.present)
    if action is Action.PROPOSE:
        assert not state.is_proposed
        assert set(state.ranks) <= set(state.prepared)
    # The others wait at the boundary: never longer than this.
    if state.is_proposed and state.is_at_boundary and state.waited_at_boundary_s > PRESENT_S:
        assert action is not Action.WAIT
    if not state.is_proposed and state.waited_s > PREPARE_S:
        assert action is not Action.WAIT


def test_attempt_passes_through_its_actions_in_order():
    state = {"ranks": (3, 4)}
    assert next_action(GrowthState(**state))[0] is Action.WAIT
    assert next_action(GrowthState(**state, prepared={3}))[0] is Action.WAIT
    state |= {"prepared": {3, 4}}
    assert next_action(GrowthState(**state))[0] is Action.PROPOSE
    state |= {"is_proposed": True, "waited_s": 2 * PREPARE_S}
    assert next_action(GrowthState(**state))[0] is Action.WAIT  # for the next copy, however long that takes
    state |= {"is_at_boundary": True}
    assert next_action(GrowthState(**state, present={4}))[0] is Action.WAIT
    assert next_action(GrowthState(**state, present={3, 4}))[0] is Action.GROW


def test_documents_survive_the_store():
    proposal = Proposal(attempt=2, ranks=(3, 4), processes=5, workers=5)
    assert decode_proposal(encode_proposal(proposal).encode()) == proposal
    for outcome in (Outcome(notice=NOTICE), Outcome(notice=None, reason="node 1 left before it joined")):
        assert decode_outcome(encode_outcome(outcome).encode()) == outcome
    assert decode_properties(b'{"--lr": "0.1", "--x": ""}') == {"--lr": "0.1", "--x": ""}
    joining = Joining(attempt=1, run_dir="/runs/a")
    assert Joining.of({JOINING_VARIABLE: joining.encode()}) == joining
    assert Joining.of({}) is None


@table("decode", [decode_proposal, decode_outcome, decode_properties])
@table("value", [b"", b"[]", b"{", b'{"attempt": 0}', b'{"notice": 1, "reason": null}', b"\xff"])
def test_documents_of_another_version_are_refused(decode, value):
    with pytest.raises(DocumentError, match="another version"):
        decode(value)


class Coordination:
    """The membership of node 0, which is a member, and of nodes that wait, with the rounds that were published."""

    def __init__(self, *nodes):
        self.membership = Membership.start(Limits(min_nodes=1, max_nodes=4, node_timeout_s=10))
        self.may_continue, self.published = False, []
        self.add("a", 0)
        self.membership = open_round(self.membership, ("a",))
        for rank, name in enumerate(nodes, start=1):
            self.add(name, rank)

    def add(self, name, rank, *, reports=True):
        joined = Record(kind=RecordKind.JOINED, name=name, rank=rank, processes=1)
        self.membership = apply_record(self.membership, joined, 0.0)
        if reports:  # that it was too late for the round
            self.record(Record(kind=RecordKind.ENDED, name=name, round=self.membership.round))

    def record(self, record):
        self.membership = apply_record(self.membership, record, 0.0)

    def departed(self):
        return []

    def gone(self, names):
        found = [self.membership.incarnations[name] for name in names]
        return [node for node in found if not node.is_alive or node.is_draining]

    def grow(self, names):
        membership = with_members(self.membership, names)
        self.membership = membership or self.membership
        return membership is not None

    def continue_without(self, names):
        membership = without_members(self.membership, names)
        self.membership = membership or self.membership
        return membership is not None

    def publish_growth(self, current):
        self.published.append(current)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Node 0 of a round of one rank, the membership with nodes that wait, and the keys of the store."""
    monkeypatch.setattr(node_continuation, "SAME_LOSS_S", 0.0)

    def make(*waiting):
        store, nodes = HashStore(), Coordination(*waiting)
        keys = PrefixStore(PREFIX, store)
        first = Round(number=1, members=(0,), names=("a",), processes=(1,), port=0, extra_flags=(), world_size=1)
        generations, layout = Continuation(store, first.processes), RunLayout(tmp_path / "run_dir", tmp_path / "join")
        layout.launch_file.write_text(str(tmp_path))
        layout.layout = Layout(
            config={"parallel": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}},
            processes=1,
            is_derived=True,
        )
        leader = LeadingNode(generations, nodes, LeadingGrowth(generations, nodes, first, layout))
        keys.set("ready/0", "1")
        return leader, nodes, keys

    return make


def offer(leader, nodes):
    """Let node 0 begin an attempt with the nodes that wait."""
    assert leader.growth.takes(nodes.membership.waiting())
    assert leader.poll({}) is True
    return nodes.published[-1]


def answer(keys, kind, attempt, *ranks):
    for rank in ranks:
        keys.set(f"{kind}/{attempt}/{rank}", "{}")


def joining_of(keys, attempt):
    return JoiningNode(lambda: keys, attempt)


def test_two_waiting_nodes_join_together(cluster):
    leader, nodes, keys = cluster("b", "c")
    current = offer(leader, nodes)
    assert (current.members, current.processes, current.world_size) == ((0, 1, 2), (1, 1, 1), 1)
    second, third = joining_of(keys, 1), joining_of(keys, 1)
    answer(keys, "prepared", 1, 1)
    assert leader.poll({}) is True
    assert not keys.check(["proposal/1"])
    answer(keys, "prepared", 1, 2)
    assert leader.poll({}) is True
    assert decode_proposal(keys.get("proposal/1")) == Proposal(attempt=1, ranks=(1, 2), processes=3, workers=3)
    keys.set("boundary/1", "reached")
    answer(keys, "present", 1, 1)
    assert (leader.poll({}), second.poll({})) == (True, True)
    answer(keys, "present", 1, 2)
    notice = leader.poll({})
    assert (notice.ranks, notice.joined, notice.sizes, notice.workers) == ((0, 1, 2), (1, 2), (1, 1, 1), 3)
    assert decode_outcome(keys.get("outcome/1")).notice == notice
    assert nodes.membership.members == ("a", "b", "c")
    assert end_reason(nodes.membership) is None
    assert (second.poll({}), third.poll({})) == (True, True)
    assert leader.is_pending
    keys.set("ready/1", "1")
    assert not leader.is_pending
    assert leader.nodes(1) == (0, 1, 2)
    # From now on a member like any other: its loss is outlived.
    third.poll({2: KILLED})
    assert leader.poll({}).lost == (2,)
    assert second.poll({}) is True
    # What the coordinator found before is not tried again.
    assert leader.poll({}) is True
    assert len(nodes.published) == 1


def test_loss_during_an_attempt_cancels_it(cluster):
    leader, nodes, keys = cluster("b")
    offer(leader, nodes)
    answer(keys, "prepared", 1, 1)
    leader.poll({})
    assert leader.poll({0: KILLED}) is False
    assert decode_outcome(keys.get("outcome/1")).notice is None
    with pytest.raises(PeerFailureError, match="lost at the same time"):
        joining_of(keys, 1).poll({})


def test_losses_of_others_do_not_count_against_a_joining_node(cluster):
    leader, nodes, keys = cluster("b")
    for attempt in range(1, 2 + MAX_ATTEMPTS):
        assert offer(leader, nodes).attempt == attempt
        leader.growth.cancel("other ranks were lost at the same time")
        assert decode_outcome(keys.get(f"outcome/{attempt}")).notice is None


def test_death_before_joining_cancels_and_numbers_are_not_used_again(cluster):
    leader, nodes, keys = cluster("b")
    for attempt in range(1, 1 + MAX_ATTEMPTS):
        assert offer(leader, nodes).attempt == attempt
        assert joining_of(keys, attempt).poll({attempt: KILLED}) is False
        assert leader.poll({}) is True
        assert "ended before it joined" in decode_outcome(keys.get(f"outcome/{attempt}")).reason
        assert keys.check([f"proposal/{attempt}", f"boundary/{attempt}"])  # which ranks may be waiting for
    assert leader.growth.takes(nodes.membership.waiting())
    assert leader.poll({}) is True
    assert len(nodes.published) == MAX_ATTEMPTS
    assert nodes.published[-1].processes == (1,) * (1 + MAX_ATTEMPTS)
    assert leader.ranks == (0,)


def test_death_that_is_reported_late_is_one_after_the_growth(cluster):
    leader, nodes, keys = cluster("b")
    offer(leader, nodes)
    answer(keys, "prepared", 1, 1)
    leader.poll({})
    keys.set("boundary/1", "reached")
    answer(keys, "present", 1, 1)
    # The process died after its answer, and its node reports that in the moment of the decision.
    node = joining_of(keys, 1)
    assert isinstance(leader.poll({}), Notice)
    node.poll({1: KILLED})
    assert leader.poll({}) is False  # nobody trains yet: all restart
    assert node.poll({}) is False


def test_node_that_drains_while_it_prepares_is_not_taken_in(cluster):
    leader, nodes, keys = cluster("b")
    offer(leader, nodes)
    answer(keys, "prepared", 1, 1)
    leader.poll({})
    nodes.record(Record(kind=RecordKind.DRAINING, name="b"))
    keys.set("boundary/1", "reached")
    answer(keys, "present", 1, 1)
    assert leader.poll({}) is True
    assert decode_outcome(keys.get("outcome/1")).reason == "node 1 left before it joined"
    assert nodes.membership.members == ("a",)


def refuse(leader, keys, attempt, key, reason, *ranks):
    answer(keys, "prepared", attempt, *ranks)
    leader.poll({})
    keys.set(f"{key}/{attempt}", reason)
    assert leader.poll({}) is True
    assert decode_outcome(keys.get(f"outcome/{attempt}")).reason == reason


def test_refused_sizes_are_not_tried_again_but_smaller_ones(cluster):
    leader, nodes, keys = cluster("b", "c")
    offer(leader, nodes)
    refuse(leader, keys, 1, "refused", "more pipeline ranks than layers", 1, 2)
    current = offer(leader, nodes)
    assert (current.names, current.num_joining) == (("a", "b", "c", "b"), 1)
    assert current.ranks_of("b") == {1, 3}
    refuse(leader, keys, 2, "refused", "no such sizes", 3)
    assert leader.growth.takes(nodes.membership.waiting())
    assert leader.poll({}) is True
    assert len(nodes.published) == 2


def test_node_with_other_options_is_not_tried_again_but_its_successor(cluster):
    leader, nodes, keys = cluster("b")
    offer(leader, nodes)
    refuse(leader, keys, 1, "different", "--lr: 1, 2", 1)
    assert leader.growth.takes(nodes.membership.waiting())
    assert leader.poll({}) is True
    assert len(nodes.published) == 1
    nodes.add("b2", 1)  # the launcher of that node, started again
    assert offer(leader, nodes).names == ("a", "b", "b2")


def test_node_that_has_not_read_the_round_yet_is_not_tried(cluster):
    leader, nodes, _ = cluster()
    nodes.add("b", 1, reports=False)
    assert leader.growth.takes(nodes.membership.waiting())
    assert leader.poll({}) is True
    assert nodes.published == []
    nodes.record(Record(kind=RecordKind.ENDED, name="b", round=1))
    assert offer(leader, nodes).names == ("a", "b")


def test_run_that_makes_no_copies_restarts_with_waiting_nodes(cluster, tmp_path):
    leader, nodes, keys = cluster("b")
    keys.delete_key("ready/0")
    leader.growth._layout.layout = None
    (tmp_path / "run.json").write_text(json.dumps({"no": "run"}))
    assert not leader.growth.takes(nodes.membership.waiting())


def test_end_of_the_run_cancels_an_attempt(cluster):
    leader, nodes, keys = cluster("b")
    offer(leader, nodes)
    assert leader.poll({0: 0}) is True
    assert decode_outcome(keys.get("outcome/1")).reason == "the run is at its end"
    leader.close()


@pytest.mark.parametrize(
    ("pipeline", "before", "is_derived", "processes", "expected"),
    [
        (2, 2, True, 4, 4),  # as the command without a size
        (2, 2, False, 4, 2),  # two replicas
        (2, 4, False, 4, 2),
        (2, 4, True, 6, 2),  # --zero-stage and the like imply replicas
        (2, 2, False, 3, 3),
        (1, 1, True, 3, 3),
        (1, 1, False, 3, 1),
    ],
)
def test_grown_pipeline_is_that_of_a_restart(pipeline, before, is_derived, processes, expected):
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": pipeline}
    layout = Layout(config={"parallel": sizes}, processes=before, is_derived=is_derived)
    assert growth_workers(layout, processes) == expected
