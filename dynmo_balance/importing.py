"""``profile import``: measured times of other programs put onto the items of a profile's header.

* ``chrome-trace``: complete events (``ph`` X) whose name is an item's name followed by ``.forward``, ``.backward``,
  ``.backward_input`` or ``.backward_weight``; of each item and kind the mean duration counts.
* ``deepspeed-log``: lines such as ``[Rank 0] time (ms) | fwd_microstep: 12.3 | bwd_microstep: 20.1 | ...``.
* ``megatron-log``: lines such as ``forward-compute ...: (11.9, 12.3)`` and ``backward-compute ...: (20.0, 20.4)``.

The logs hold only the time of a whole stage, so it is shared among the items in proportion to the analytic model;
Megatron's times are of all microbatches of a step, DeepSpeed's of one. The logged stage stands for all stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .costs import ItemCosts
from .errors import UsageError
from .formats._document import parse_json
from .formats.profile import Header

KINDS = ("forward", "backward", "backward_input", "backward_weight")
_DEEPSPEED = {
    "forward_ns": re.compile(r"\bfwd_microstep: ([\d.]+)"),
    "backward_ns": re.compile(r"\bbwd_microstep: ([\d.]+)"),
}
_MEGATRON = {
    "forward_ns": re.compile(r"\bforward-compute\s*\.*:\s*\(([\d.]+), ([\d.]+)\)"),
    "backward_ns": re.compile(r"\bbackward-compute\s*\.*:\s*\(([\d.]+), ([\d.]+)\)"),
}


def _step(header: Header, step: int, forward: Sequence[int], **backward: Sequence[int]) -> dict[str, Any]:
    workers = len(header.workers)
    return {
        "record": "step",
        "step": step,
        "plan_id": 0,
        "step_ns": 0,
        "forward_ns": list(forward),
        **{name: list(values) for name, values in backward.items()},
        "activation_bytes": [None] * len(header.items),
        "busy_ns": [None] * workers,
        "peak_memory_bytes": [None] * workers,
    }


def _events(text: str, source: str) -> list[Mapping[str, Any]]:
    try:
        document = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise UsageError(f"{source}: holds no list of trace events")
    return [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]


def from_trace(text: str, source: str, header: Header, model: ItemCosts) -> list[dict[str, Any]]:
    """One step record of the mean durations; every item must have a forward."""
    spent: dict[tuple[str, str], list[float]] = {}
    for event in _events(text, source):
        item, _, kind = str(event.get("name", "")).rpartition(".")
        if kind in KINDS and isinstance(event.get("dur"), int | float):
            spent.setdefault((item, kind), []).append(float(event["dur"]))
    missing = [item.name for item in header.items if (item.name, "forward") not in spent]
    if missing:
        raise UsageError(f"{source}: no events named {missing[0]}.forward (missing for {len(missing)} items)")

    def column(kind: str) -> list[int]:
        means = [spent.get((item.name, kind), [0.0]) for item in header.items]
        return [round(1000 * sum(values) / len(values)) for values in means]

    if any(kind in ("backward_input", "backward_weight") for _, kind in spent):
        split = {f"{kind}_ns": column(kind) for kind in ("backward_input", "backward_weight")}
        return [_step(header, 1, column("forward"), **split)]
    return [_step(header, 1, column("forward"), backward_ns=column("backward"))]


def _shared(total_ns: float, weights: Sequence[int]) -> list[int]:
    whole = sum(weights) or 1
    return [round(total_ns * weight / whole) for weight in weights]


def _from_log(
    text: str, source: str, header: Header, model: ItemCosts, patterns: Mapping[str, re.Pattern[str]], per: int
) -> list[dict[str, Any]]:
    found = {
        name: [match[match.lastindex or 1] for match in pattern.finditer(text)] for name, pattern in patterns.items()
    }
    if not found["forward_ns"] or not found["backward_ns"]:
        raise UsageError(f"{source}: no forward and backward times found; is it another kind of log?")
    backward = [b + w for b, w in zip(model.backward_input_ns, model.backward_weight_ns, strict=True)]
    stages = len(header.workers)
    pairs = zip(found["forward_ns"], found["backward_ns"], strict=False)
    return [
        _step(
            header,
            number,
            _shared(float(forward) * 1e6 / per * stages, model.forward_ns),
            backward_ns=_shared(float(back) * 1e6 / per * stages, backward),
        )
        for number, (forward, back) in enumerate(pairs, start=1)
    ]


def from_deepspeed(text: str, source: str, header: Header, model: ItemCosts) -> list[dict[str, Any]]:
    """A step record for each logged step; the rank's stage stands for all stages."""
    return _from_log(text, source, header, model, _DEEPSPEED, 1)


def from_megatron(text: str, source: str, header: Header, model: ItemCosts) -> list[dict[str, Any]]:
    """A step record for each logged step; the slowest rank's stage stands for all stages."""
    return _from_log(text, source, header, model, _MEGATRON, header.microbatches)


SOURCES: Mapping[str, Callable[[str, str, Header, ItemCosts], list[dict[str, Any]]]] = {
    "chrome-trace": from_trace,
    "deepspeed-log": from_deepspeed,
    "megatron-log": from_megatron,
}


def import_lines(kind: str, path: Path, header_line: bytes, header: Header, model: ItemCosts) -> bytes:
    """The lines of the new profile: the header as it was, and a step record for each measured step."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    records = SOURCES[kind](text, str(path), header, model)
    return b"\n".join([header_line, *(json.dumps(record).encode() for record in records), b""])
