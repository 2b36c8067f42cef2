"""The part of the ranks in growth in place: rank 0 checks proposals, the configuration and incident that follow."""

from __future__ import annotations

import json

import pytest
from torch.distributed import HashStore

from dynmo_train.launch.elastic.continuation import Notice
from dynmo_train.launch.elastic.growth import (
    JOINING_VARIABLE,
    Joining,
    Outcome,
    Proposal,
    encode_outcome,
    encode_proposal,
)
from dynmo_train.trainer.recovery.growth import ProposalWatch, join_generation
from dynmo_train.trainer.recovery.memory_checkpoint import MemoryCheckpoint
from dynmo_train.trainer.recovery.survivor import Continued
from tests.waiting import wait_for

SAME = {"--lr": "0.1", "--zero-stage": "0"}


class Link:
    """The connection of a rank to its launcher."""

    first_rank = 3

    def __init__(self):
        self.keys, self.generation = HashStore(), 0

    def connect(self):
        return self.keys


def propose(link, attempt, *ranks, properties=SAME):
    for rank in ranks:
        link.keys.set(f"prepared/{attempt}/{rank}", json.dumps(properties))
    proposal = Proposal(attempt=attempt, ranks=ranks, processes=1 + len(ranks), workers=1 + len(ranks))
    link.keys.set(f"proposal/{attempt}", encode_proposal(proposal))
    return proposal


def end(link, attempt, notice=None):
    link.keys.set(f"outcome/{attempt}", encode_outcome(Outcome(notice=notice, reason="" if notice else "x")))


@pytest.fixture
def watch():
    """The watch of rank 0, its link, and the problems of numbers of processes."""
    link, problems = Link(), {}
    made = ProposalWatch(link, lambda proposal: problems.get(proposal.processes), lambda: SAME)
    made.start()
    return made, link, problems


def test_proposal_is_pending_until_its_outcome(watch):
    proposals, link, _ = watch
    found = propose(link, 1, 1, 2)
    assert wait_for(lambda: proposals.pending, "proposal", seconds=30) == found
    end(link, 1)
    wait_for(lambda: proposals.pending is None, "end")
    assert wait_for(lambda: proposals.pending, "next one", seconds=60) if propose(link, 2, 3) else False
    assert not link.keys.check(["refused/1"])


def test_proposal_that_the_options_do_not_allow_is_refused(watch):
    proposals, link, problems = watch
    problems[3] = "more pipeline ranks than layers"
    propose(link, 1, 1, 2)
    wait_for(lambda: link.keys.check(["refused/1"]), "refusal", seconds=30)
    assert link.keys.get("refused/1") == b"more pipeline ranks than layers"
    assert proposals.pending is None
    assert proposals.take_refusals() == ["more pipeline ranks than layers"]
    assert proposals.take_refusals() == []


@pytest.mark.parametrize("properties", [{**SAME, "--lr": "0.2"}, {"--lr": "0.1"}, [], {"--lr": 1}])
def test_rank_that_was_started_differently_is_refused(watch, properties):
    proposals, link, _ = watch
    propose(link, 1, 1, properties=properties)
    wait_for(lambda: link.keys.check(["different/1"]), "refusal", seconds=30)
    assert proposals.pending is None
    assert not link.keys.check(["refused/1"])  # of the sizes: another node may join
    words = link.keys.get("different/1").decode()
    is_valid = isinstance(properties, dict) and all(isinstance(value, str) for value in properties.values())
    assert ("started differently" if is_valid else "another version") in words


def test_watch_of_a_former_generation_answers_nothing(watch):
    proposals, link, _ = watch
    link.generation = 1
    link.keys.add("attempts", 1)
    propose(link, 1, 1)
    proposals.start()  # of the generation that trains now: from the second attempt on
    second = propose(link, 2, 2)
    assert wait_for(lambda: proposals.pending, "proposal", seconds=30) == second


def test_cancelled_attempt_that_was_never_proposed_is_skipped(watch):
    proposals, link, _ = watch
    end(link, 1)
    link.keys.set("proposal/1", encode_proposal(Proposal(attempt=1, ranks=(1,), processes=2, workers=2)))
    second = propose(link, 2, 2)
    assert wait_for(lambda: proposals.pending, "proposal", seconds=30) == second


def test_joining_rank_answers_before_it_takes_part():
    link = Link()
    link.keys.set("boundary/2", "reached")
    notice = Notice(generation=4, ranks=(0, 3), lost=(), sizes=(1, 1), cause="c", since=0.5, joined=(3,), workers=2)
    end(link, 2, notice)
    joining = Joining.of({JOINING_VARIABLE: Joining(attempt=2, run_dir="r").encode()})
    assert join_generation(link, joining, SAME).notice == notice
    assert json.loads(link.keys.get("prepared/2/3")) == SAME
    assert link.keys.check(["present/2/3"])


def test_incident_of_a_growth_counts_the_pause_and_no_steps():
    notice = Notice(
        generation=1, ranks=(0, 2, 3), lost=(), sizes=(1, 2, 2), cause="node 1 joined", since=9, joined=(2, 3)
    )
    memory = MemoryCheckpoint(
        tag=(0, 8), next_branch=1, manifest={"step": 8}, copied_at=10.0, holders={}, entries={}, copies=()
    )
    incident = Continued(notice=notice, memory=memory, last_step=8).incident(10.75)
    assert (incident.incident, incident.step, incident.ranks, incident.steps_lost) == ("growth", 8, (2, 3), 0)
    assert incident.seconds_lost == 0.75
    assert incident.message == "ranks 2, 3 joined after step 8 without a restart: paused for 0.8 s"
    assert incident.cause == "node 1 joined"
