"""A simulated step drawn as text: one line a worker, one character a slice of time."""

from __future__ import annotations

from .schedules import Kind
from .simulate import Timeline

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "b", Kind.BACKWARD_WEIGHT: "w"}


def as_text(timeline: Timeline, width: int = 100) -> list[str]:
    """One string a worker; F forward, B backward, b and w its halves, a dot is idle.

    A character stands for what takes most of its slice.
    """
    whole = max(1, timeline.step_ns)
    lines = []
    for row in timeline.spans:
        shares: list[dict[str, int]] = [{} for _ in range(width)]
        for span in row:
            first = span.start_ns * width // whole
            last = min(width - 1, max(first, -(-span.end_ns * width // whole) - 1))
            for slot in range(first, last + 1):
                begin, end = slot * whole // width, (slot + 1) * whole // width
                inside = min(end, span.end_ns) - max(begin, span.start_ns)
                letter = LETTERS[span.kind]
                shares[slot][letter] = shares[slot].get(letter, 0) + max(0, inside)
        lines.append("".join(_letter(share, whole // width) for share in shares))
    return lines


def _letter(share: dict[str, int], slice_ns: int) -> str:
    busy = sum(share.values())
    if not share or 2 * busy < slice_ns:
        return "."
    return max(share, key=lambda letter: share[letter])
