"""The part of the ranks in growth in place: those that train, and those that join (``launch/elastic/growth.py``).

A thread of rank 0 waits for a proposal of the launcher and checks it, while training continues. From then on the flags
that all ranks reduce at each boundary have it, so that all of them act at the next boundary of a copy::

    rank 0, thread      proposal --> sizes, options of the joining ranks --> refused, or pending
    every rank          copy, completed on all ranks --> boundary (rank 0) --> outcome
                          notice: leave the generation; cancelled: train on
    joining rank        prepare: modules, identities of files --> prepared --> boundary --> present --> outcome
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from ..._common.document import DocumentError
from ..._common.errors import DynmoError
from ...launch.elastic.continuation import FOREVER, LIMIT_S, Notice, SurvivorLink
from ...launch.elastic.growth import Joining, Outcome, Proposal, decode_outcome, decode_properties, decode_proposal
from ...parallel.process_groups import World, all_gather_objects, broadcast_object
from ..fingerprint import RunProperties, differences

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GenerationEndedError(DynmoError):
    """The ranks continue in another generation, together with others.

    Args:
        notice: the generation.
    """

    def __init__(self, notice: Notice) -> None:
        super().__init__(notice.cause)
        self.notice = notice


class ProposalWatch:
    """On rank 0, waits for proposals of the launcher in a thread, and checks them.

    Args:
        link: connection to the launcher.
        problem_of: returns why the run cannot have the sizes of a proposal; None where it can.
        properties: returns what must be equal on all ranks.
    """

    def __init__(
        self, link: SurvivorLink, problem_of: Callable[[Proposal], str | None], properties: Callable[[], RunProperties]
    ) -> None:
        self._link, self._problem_of, self._properties = link, problem_of, properties
        self._pending: Proposal | None = None
        self._generation: int | None = None
        self._refusals: list[str] = []

    @property
    def pending(self) -> Proposal | None:
        """The proposal on which the ranks act at their next copy."""
        return self._pending

    def take_refusals(self) -> list[str]:
        """Reasons of refusals since the last call."""
        found, self._refusals = self._refusals, []
        return found

    def start(self) -> None:
        """Wait for proposals to the current generation, before it trains; no effect where that is done already."""
        if self._generation == self._link.generation:
            return
        self._generation, self._pending = self._link.generation, None
        # None is in progress: node 0 begins one while the generation trains, which it does not yet.
        attempt = self._link.keys.add("attempts", 0) + 1
        threading.Thread(target=self._run, args=(self._link.generation, attempt), daemon=True).start()

    def _run(self, generation: int, attempt: int) -> None:
        try:
            keys = self._link.connect()
            while True:
                keys.wait([f"proposal/{attempt}"], FOREVER)
                if generation != self._link.generation:
                    return
                if not keys.check([f"outcome/{attempt}"]):
                    self._answer(keys, decode_proposal(keys.get(f"proposal/{attempt}")))
                keys.wait([f"outcome/{attempt}"], FOREVER)
                attempt += 1
                self._pending = None
        except (RuntimeError, DocumentError):
            return  # the launcher has ended, and this process will; or it is of another version

    def _answer(self, keys: Store, proposal: Proposal) -> None:
        # No node can have refused sizes; other options are those of this node.
        for key, find in (("refused", self._problem_of), ("different", partial(self._difference, keys))):
            problem = find(proposal)
            if problem is not None:
                self._refusals.append(problem)
                keys.set(f"{key}/{proposal.attempt}", problem)
                return
        self._pending = proposal

    def _difference(self, keys: Store, proposal: Proposal) -> str | None:
        """How a joining rank was started differently; None where all have the same options and data."""
        own = dict(self._properties())
        gathered = [("rank 0", own)]
        for rank in proposal.ranks:
            try:
                found = decode_properties(keys.get(f"prepared/{proposal.attempt}/{rank}"))
            except DocumentError as error:
                return str(error)
            gathered.append((f"rank {rank}", found))
        return None if all(found == own for _, found in gathered) else differences(gathered)


def synchronize_at_boundary(link: SurvivorLink, world: World, pending: Proposal | None) -> Outcome:
    """Wait together, at the boundary of a copy that all ranks have completed, until node 0 decides.

    Every rank calls this.

    Args:
        link: connection to the launcher.
        world: ranks of the generation.
        pending: on rank 0, the proposal.

    Raises:
        RuntimeError: another rank or the launcher has ended.
    """
    attempt = broadcast_object(world, None if pending is None else pending.attempt)
    # Each rank has its copy, and what others sent to it, before it answers.
    all_gather_objects(world, True)
    if world.is_rank0:
        link.keys.set(f"boundary/{attempt}", "reached")
    return _await_outcome(link.keys, attempt)


def _await_boundary(keys: Store, attempt: int) -> None:
    keys.wait([f"boundary/{attempt}"], FOREVER)


def _await_outcome(keys: Store, attempt: int) -> Outcome:
    key = f"outcome/{attempt}"
    keys.wait([key], timedelta(seconds=LIMIT_S))
    return decode_outcome(keys.get(key))


def join_generation(link: SurvivorLink, joining: Joining, properties: Mapping[str, str]) -> Outcome:
    """On a joining rank that is prepared, wait until it takes part.

    Args:
        link: connection to the launcher.
        joining: the attempt.
        properties: what must be equal on all ranks.
    """
    keys = link.connect()
    place = f"{joining.attempt}/{link.first_rank}"
    keys.set(f"prepared/{place}", json.dumps(dict(properties)))
    _await_boundary(keys, joining.attempt)
    keys.set(f"present/{place}", "1")
    return _await_outcome(keys, joining.attempt)
