"""What the writer of the profile makes is what the format's schema allows."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from dynmo_train._common.log_parts import Rotation, part_paths
from dynmo_train.formats import profile

SCHEMA = json.loads((Path(profile.__file__).parent / "profile.schema.json").read_text())
STEP = {
    "step": 3,
    "plan_id": 0,
    "step_ns": 100,
    "forward_ns": (5, None),
    "activation_bytes": [8, 0],
    "busy_ns": [9],
    "peak_memory_bytes": [None],
}


def header(segment=0):
    names = {"embedding": "embedding", "layers.0.mlp": "layers.0"}
    return profile.header_record(
        run_id="r1",
        segment=segment,
        model=profile.ModelInfo(family="gpt", num_layers=1, hidden_size=8, sequence_length=4),
        layout=profile.Layout(
            schedule="1f1b", virtual_stages_per_worker=1, granularity="layer", microbatches=2, micro_batch_size=1
        ),
        link=profile.LinkInfo(bandwidth_bytes_per_s=10**9, latency_ns=1000),
        workers=[profile.WorkerInfo(worker=0, ranks=(0,), hosts=("a",), device="cpu", memory_bytes=None)],
        items=[
            profile.ItemInfo(
                name=name,
                layer=layer,
                kind="mlp" if "mlp" in name else "embedding",
                param_count=1,
                param_bytes=4,
                gradient_bytes=4,
                optimizer_bytes=8,
                boundary_bytes=16,
                cut_before=True,
            )
            for name, layer in names.items()
        ],
    )


RECORDS = {
    "header": header(),
    "step": profile.step_record(**STEP, backward_ns=[7, 0]),
    "split step": profile.step_record(**STEP, backward_input_ns=[7, 0], backward_weight_ns=[1, None]),
    "event": profile.event_record(step=4, kind="pruned", detail={"sparsity": 0.5}, next_expected_step=8),
    "last event": profile.event_record(step=4, kind="frozen", detail={}, next_expected_step=None),
    "plan_request": profile.plan_request_record(10),
    "plan_result": profile.plan_result_record(
        plan_id=1, step=10, result="applied", pause_ns=5, num_bytes=6, reason="the bottleneck is faster"
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_profile_records_of_every_kind_are_valid(name):
    jsonschema.validate(json.loads(json.dumps(RECORDS[name])), SCHEMA)


@pytest.mark.parametrize(
    "backward",
    [{}, {"backward_input_ns": [1]}, {"backward_weight_ns": [1]}, {"backward_ns": [1], "backward_input_ns": [1]}],
)
def test_step_record_backward_is_full_or_split(backward):
    with pytest.raises(ValueError, match="backward_ns"):
        profile.step_record(**STEP, **backward)


def test_next_segment_counts_complete_headers(tmp_path):
    path = tmp_path / "profile.jsonl"
    assert profile.next_segment(path) == 0
    profile.append_record(path, header(0))
    profile.append_record(path, profile.event_record(step=1, kind="pruned", detail={"header": 1}, next_expected_step=2))
    assert profile.next_segment(path) == 1
    profile.append_record(path, header(1))
    path.write_bytes(path.read_bytes() + b'{"record": "header", "segment": 7')
    assert profile.next_segment(path) == 2


def test_append_metrics_appends_lines(tmp_path):
    path = tmp_path / "profile.jsonl"
    for record in RECORDS.values():
        profile.append_record(path, record)
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(RECORDS.values())


def appender(path, **rotation):
    written = profile.ProfileAppender(path, Rotation(**rotation))
    written.append(header())
    return written


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(number):
    return profile.step_record(**STEP | {"step": number}, backward_ns=[7, 0])


def test_rotated_profile_repeats_the_header_with_the_last_speeds(tmp_path):
    path = tmp_path / "profile.jsonl"
    written = appender(path, max_bytes=1, keep=2)
    size = 4 * len(json.dumps(header() | {"x_continues": True}))
    detail = {"workers": [0], "relative_speed": [0.5]}
    written.append(profile.event_record(step=1, kind="worker_speed", detail=detail, next_expected_step=None))
    for number in range(1, 100):
        written.append(step(number))
    parts = part_paths(path)
    assert len(parts) == 3
    for part in parts:
        first, *rest = lines(part)
        assert (first["record"], first["x_continues"], first["segment"]) == ("header", True, 0)
        assert first["workers"][0]["relative_speed"] == 0.5
        assert {line["record"] for line in rest} == {"step"}
        assert part.stat().st_size < 2 * size
    jsonschema.validate(lines(path)[0], SCHEMA)
    assert profile.next_segment(path) == 1


def test_rotated_profile_new_segment_begins_a_part_without_a_copy(tmp_path):
    path = tmp_path / "profile.jsonl"
    written = appender(path)
    written.append(step(1))
    path.rename(f"{path}.1")  # as a crash after the first step of a rotation leaves it
    assert profile.next_segment(path) == 1
    written.append(header(1))
    assert [line["segment"] for line in lines(path)] == [1]
    path.rename(f"{path}.2")
    written.append(step(1))
    assert [(line["record"], line.get("x_continues")) for line in lines(path)] == [("header", True), ("step", None)]
    assert lines(path)[0]["segment"] == 1
