"""The part of node 0 in growth in place: it chooses the nodes that join, and decides when they do.

What follows in an attempt is decided by ``growth.next_action``; the keys are described there. A node whose processes
end before it joined is tried again, ``MAX_ATTEMPTS`` times at most; then, and where the running ranks refuse it, it
waits until the next restart of the round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..._common.console import print_message
from .continuation import Continuation, Notice
from .growth import Action, GrowthState, Outcome, Proposal, encode_outcome, encode_proposal, next_action
from .membership import Incarnation, join_ranks
from .restart import growth_workers

if TYPE_CHECKING:
    from .coordinator import Coordinator, Round
    from .run_layout import RunLayout

# Attempts for one start of a node's launcher.
MAX_ATTEMPTS = 3


@dataclass(kw_only=True)
class _Attempt:
    """An attempt in progress.

    Attributes:
        number: its number.
        nodes: nodes that join.
        proposal: the generation with them.
        since_s: monotonic time at which it began.
        is_proposed: whether the running ranks know of it.
        boundary_s: monotonic time at which the running ranks reached their boundary; None before.
        ended: ranks that join whose processes have ended.
    """

    number: int
    nodes: Sequence[Incarnation]
    proposal: Proposal
    since_s: float
    is_proposed: bool = False
    boundary_s: float | None = None
    ended: frozenset[int] = frozenset()


class LeadingGrowth:
    """On node 0, takes waiting nodes into the running round.

    Args:
        continuation: the generations of the round.
        coordinator: the membership.
        current: the round.
        layout: parallel sizes of the run.

    Attributes:
        round: the round with all nodes that were to join it.
    """

    def __init__(self, continuation: Continuation, coordinator: Coordinator, current: Round, layout: RunLayout) -> None:
        self._continuation, self._coordinator, self._layout = continuation, coordinator, layout
        self.round = current
        self._waiting: Sequence[Incarnation] = ()
        self._attempt: _Attempt | None = None
        self._num_attempts = 0
        self._tries: Counter[str] = Counter()
        self._spares: set[str] = set()
        self._restarts: bool | None = None
        self._has_read_layout = False

    def takes(self, nodes: Sequence[Incarnation]) -> bool:
        """Whether this round grows in place by these nodes, instead of restarting with them; any thread calls this.

        A round that makes copies in memory does, from its first copy on; before that they wait.
        """
        if self._restarts is None and self._layout.run_dir is not None:
            has_copies = self._continuation.keys.check(["ready/0"]) or self._layout.makes_copies(self.round)
            self._restarts = not has_copies
        self._waiting = tuple(nodes)
        return not self._restarts

    def record_ended(self, codes: Mapping[int, int]) -> None:
        """Record processes of the attempt that ended.

        Args:
            codes: rank to exit code.
        """
        if self._attempt is not None:
            self._attempt.ended |= codes.keys() & set(self._attempt.proposal.ranks)

    def poll(self, *, has_finished: bool) -> Notice | None:
        """Begin an attempt, or take its next step; the notice of the generation with the nodes that joined.

        Args:
            has_finished: whether a rank of the generation has finished the run.
        """
        attempt = self._attempt
        if attempt is None:
            if not self._has_read_layout and self._continuation.is_training:
                # Of the first generation: others have the sizes that remained.
                self._has_read_layout = True
                self._layout.read(self.round.world_size)
            if self._waiting and not has_finished and self._continuation.is_training:
                self._begin()
            return None
        action, reason = next_action(self._state(attempt, has_finished=has_finished))
        if action is Action.GROW:
            return self._grow(attempt)
        if action is Action.CANCEL:
            self.cancel(reason, counts=True)
        elif action is Action.PROPOSE:
            attempt.is_proposed = True
            self._continuation.keys.set(f"proposal/{attempt.number}", encode_proposal(attempt.proposal))
        return None

    def _begin(self) -> None:
        """Choose nodes among those that wait, and let these prepare."""
        waiting, self._waiting = self._waiting, ()
        # Ranks of nodes, of which some may have lost processes.
        before, membership = len(self._continuation.ranks), self._coordinator.membership
        # They may have joined, left or been replaced meanwhile.
        names = {node.name for node in waiting} - self._spares
        nodes = [node for node in membership.waiting() if node.name in names]
        # A node reports that it is too late for the running round once it has read that: after it has joined, the
        # report would end the round. It comes soon, so that the others wait for it and all join together.
        if any(node.ended_round != membership.round for node in nodes):
            return
        while nodes and before + sum(node.processes for node in nodes) in self._layout.refused:
            nodes.pop()
        if not nodes:
            return
        ranks = self._continuation.reserve([node.processes for node in nodes])
        self._num_attempts += 1
        processes = before + len(ranks)
        layout = self._layout.layout
        workers = processes if layout is None else growth_workers(layout, processes)
        self.round = replace(
            self.round,
            members=(*self.round.members, *(node.rank for node in nodes)),
            names=(*self.round.names, *(node.name for node in nodes)),
            processes=self._continuation.processes,
            attempt=self._num_attempts,
            num_joining=len(nodes),
            run_dir=str(self._layout.run_dir),
        )
        self._attempt = _Attempt(
            number=self._num_attempts,
            nodes=nodes,
            proposal=Proposal(attempt=self._num_attempts, ranks=ranks, processes=processes, workers=workers),
            since_s=time.monotonic(),
        )
        self._continuation.keys.add("attempts", 1)
        self._coordinator.publish_growth(self.round)
        print_message(
            f"dynmo-train: node {join_ranks(node.rank for node in nodes)} prepares to join without a restart"
            f" | processes: {before} -> {processes}"
        )

    def _state(self, attempt: _Attempt, *, has_finished: bool) -> GrowthState:
        keys, number, ranks = self._continuation.keys, attempt.number, attempt.proposal.ranks
        now_s = time.monotonic()
        if attempt.boundary_s is None and keys.check([f"boundary/{number}"]):
            attempt.boundary_s = now_s
        refusals = [key for key in (f"refused/{number}", f"different/{number}") if keys.check([key])]
        departed = self._coordinator.gone([node.name for node in attempt.nodes])
        return GrowthState(
            ranks=ranks,
            is_training=self._continuation.is_training,
            has_finished=has_finished,
            left=tuple(f"node {node.rank}" for node in departed),
            ended=attempt.ended,
            prepared=()
            if attempt.is_proposed
            else [rank for rank in ranks if keys.check([f"prepared/{number}/{rank}"])],
            refusal=keys.get(refusals[0]).decode(errors="replace") if refusals else None,
            is_proposed=attempt.is_proposed,
            is_at_boundary=attempt.boundary_s is not None,
            present=[rank for rank in ranks if attempt.boundary_s and keys.check([f"present/{number}/{rank}"])],
            waited_s=now_s - attempt.since_s,
            waited_at_boundary_s=0.0 if attempt.boundary_s is None else now_s - attempt.boundary_s,
        )

    def _grow(self, attempt: _Attempt) -> Notice | None:
        if not self._coordinator.grow([node.name for node in attempt.nodes]):
            self.cancel("a node left before it joined")
            return None
        self._attempt = None
        cause = f"node {join_ranks(node.rank for node in attempt.nodes)} joined"
        notice = self._continuation.grow(attempt.proposal.ranks, attempt.proposal.workers, cause)
        self._end(attempt.proposal, Outcome(notice=notice))
        return notice

    def cancel(self, reason: str, *, counts: bool = False) -> None:
        """Cancel the attempt, if there is one; training continues, or the ranks continue without others.

        Args:
            reason: why.
            counts: whether the nodes are the cause, which are not tried without end.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        keys, number = self._continuation.keys, attempt.number
        is_refused, is_different = keys.check([f"refused/{number}"]), keys.check([f"different/{number}"])
        if is_refused:
            # Fewer of these nodes may still join.
            self._layout.refused.add(attempt.proposal.processes)
        for node in attempt.nodes:
            self._tries[node.name] += counts and not is_refused
            if is_different or self._tries[node.name] == MAX_ATTEMPTS:
                self._spares.add(node.name)
        self._end(attempt.proposal, Outcome(notice=None, reason=reason))
        ranks = join_ranks(node.rank for node in attempt.nodes)
        waits = is_refused or all(node.name in self._spares for node in attempt.nodes)
        rest = "; it waits until the next restart" if waits else ""
        print_message(f"dynmo-train: node {ranks} does not join: {reason}{rest}")

    def _end(self, proposal: Proposal, outcome: Outcome) -> None:
        keys, number = self._continuation.keys, proposal.attempt
        keys.set(f"outcome/{number}", encode_outcome(outcome))
        # Ranks that wait for these read the outcome then; rank 0 waits for the proposals one after another.
        keys.set(f"boundary/{number}", "ended")
        keys.set(f"proposal/{number}", encode_proposal(proposal))
