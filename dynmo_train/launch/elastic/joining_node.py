"""The part of a joining node in growth in place: it starts its processes, waits for the outcome, and then follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .continuation import Notice
from .growth import Outcome, decode_outcome
from .node_agent import PeerFailureError
from .node_continuation import FollowingNode

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class JoiningNode(FollowingNode):
    """Waits for the outcome of an attempt (``growth.py``), and then follows node 0 as any other node does.

    Args:
        connect: connects to the store of the round.
        attempt: number of the attempt.
    """

    def __init__(self, connect: Callable[[], Store], attempt: int) -> None:
        super().__init__(connect)
        self._attempt, self._has_joined = attempt, False

    def poll(self, ended: Mapping[int, int]) -> Notice | bool:
        """What node 0 has decided after the deaths on this node; see :meth:`LeadingNode.poll`.

        Raises:
            PeerFailureError: node 0 has cancelled the attempt.
        """
        if self._has_joined:
            return super().poll(ended)
        try:
            outcome = self._outcome()
            if outcome is None:
                if ended:
                    self._report(ended)
                return not ended
        except RuntimeError:
            return False  # node 0 is lost
        if outcome.notice is None:
            raise PeerFailureError(outcome.reason)
        self._has_joined, self._generation = True, outcome.notice.generation
        return super().poll(ended)

    def _outcome(self) -> Outcome | None:
        if self._keys is None:
            self._keys = self._connect()
        key = f"outcome/{self._attempt}"
        return decode_outcome(self._keys.get(key)) if self._keys.check([key]) else None
