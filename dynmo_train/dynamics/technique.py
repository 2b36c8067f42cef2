"""What every dynamic technique is to the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that changed what layers cost, for the profile.

    Attributes:
        kind: ``pruned`` or ``frozen``.
        step: the optimizer step after which it happened.
        message: a sentence for people.
        detail: free, for people and programs.
        next_expected_step: when the next event of this kind is due; None when there will be none.
        rebuild: whether the pipeline's stages have to be built anew (the gradients that cross boundaries changed).
    """

    kind: str
    step: int
    message: str
    detail: dict[str, Any] = field(default_factory=dict)
    next_expected_step: int | None = None
    rebuild: bool = False


class Technique(Protocol):
    """A dynamic technique, called at the boundary after each optimizer step; its state is a function of the step."""

    def after_step(self, step: int) -> Event | None:
        """Act where the schedule says so; every process calls this at the same steps."""

    def resume(self, step: int) -> None:
        """Take the state that the technique has after ``step``, before the first step of a resumed run."""
