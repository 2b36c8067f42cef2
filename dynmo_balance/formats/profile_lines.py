"""The rules of one line of a profile, for its readers and its writers.

This file is byte-identical in ``dynmo_balance`` and ``dynmo_train``, which ``tests/arch`` checks. Rules across lines
are in the reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._common.document import (
    ENVELOPE,
    MAX_MICROBATCHES,
    MAX_RANKS,
    Check,
    Problem,
    anything,
    array,
    boolean,
    envelope_problems,
    integer,
    mapping,
    nullable,
    number,
    obj,
    short_repr,
    string,
)

FORMAT = "dynmo.profile"
VERSION = 1
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zb-v")
ITEM_KINDS = ("embedding", "attention", "cross_attention", "mlp", "head", "layer")
EVENT_KINDS = ("pruned", "frozen", "evaluated", "checkpoint")
RESULTS = ("taken", "kept", "refused", "superseded", "rolled_back")


def _samples() -> Check:
    slow = array(nullable(integer()))

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        # The hot path of a long profile: nothing but plain integers and null, none of them negative.
        plain = isinstance(value, list) and set(map(type, value)) <= {int, type(None)}
        if not plain or any(element is not None and element < 0 for element in value):
            slow(value, path, problems)

    return check


_WORKER = obj(
    {
        "worker": integer(),
        "ranks": array(integer(), 1),
        "hosts": array(string(), 1),
        "device": string("cpu", "cuda"),
        "memory_bytes": nullable(integer(1)),
        "relative_speed": number(1e-6),
        "releasable": boolean(),
    }
)
_ITEM = obj(
    {
        "name": string(),
        "layer": string(),
        "kind": string(*ITEM_KINDS),
        "param_count": integer(),
        "param_bytes": integer(),
        "gradient_bytes": integer(),
        "optimizer_bytes": integer(),
        "boundary_bytes": integer(),
        "cut_before": boolean(),
        "tied_to": nullable(string()),
    }
)
_STEP = {
    "record": anything(),
    "step": integer(1),
    "plan_id": integer(),
    "step_ns": integer(),
    "forward_ns": _samples(),
    "activation_bytes": _samples(),
    "busy_ns": _samples(),
    "peak_memory_bytes": _samples(),
}
_LINE: Mapping[str, Check] = {
    "header": obj(
        {
            **ENVELOPE,
            "record": anything(),
            "run_id": string(),
            "segment": integer(),
            "model": obj(
                {
                    "family": string(),
                    "num_layers": integer(),
                    "hidden_size": integer(1),
                    "sequence_length": integer(1),
                }
            ),
            "schedule": string(*SCHEDULES),
            "virtual_stages_per_worker": integer(1, MAX_RANKS),
            "granularity": string("layer", "sublayer"),
            "microbatches": integer(1, MAX_MICROBATCHES),
            "micro_batch_size": integer(1, MAX_RANKS),
            "tensor_parallel_size": integer(1, MAX_RANKS),
            "data_parallel_size": integer(1, MAX_RANKS),
            "expert_parallel_size": integer(1, MAX_RANKS),
            "link": nullable(obj({"bandwidth_bytes_per_s": integer(1), "latency_ns": integer()})),
            "workers": array(_WORKER, 1),
            "items": array(_ITEM, 1),
        }
    ),
    "step": obj({**_STEP, "backward_ns": _samples()}),
    "split step": obj({**_STEP, "backward_input_ns": _samples(), "backward_weight_ns": _samples()}),
    "event": obj(
        {
            "record": anything(),
            "step": integer(),
            "kind": string(*EVENT_KINDS),
            "detail": mapping(anything()),
            "next_expected_step": nullable(integer()),
        }
    ),
    "ask": obj({"record": anything(), "step": integer()}),
    "plan_result": obj(
        {
            "record": anything(),
            "plan_id": integer(1),
            "step": integer(),
            "result": string(*RESULTS),
            "pause_ns": integer(),
            "bytes": integer(),
            "reason": string(),
        }
    ),
}


def line_problems(value: Any) -> list[Problem]:
    """Every problem of one line by itself."""
    problems: list[Problem] = []
    if not isinstance(value, dict):
        obj({})(value, "", problems)
        return problems
    kind = value.get("record")
    if kind == "header" and (refusal := envelope_problems(value, FORMAT, VERSION)):
        return refusal
    if kind not in ("header", "step", "event", "ask", "plan_result"):
        return [Problem("record", "choice", f"must be header, step, event, ask or plan_result; is {short_repr(kind)}")]
    if kind == "step" and ("backward_input_ns" in value or "backward_weight_ns" in value):
        kind = "split step"
    _LINE[kind](value, "", problems)
    return problems
