"""What the writer of the profile makes is what the format's schema allows."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

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


def test_profile_schema_refuses_a_wrong_value():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(RECORDS["step"] | {"forward_ns": [1.5]}, SCHEMA)


def test_profile_records_have_their_values():
    record = RECORDS["plan_result"]
    assert (record["plan_id"], record["bytes"], record["pause_ns"]) == (1, 6, 5)
    assert RECORDS["header"]["items"][1]["layer"] == "layers.0"
    assert RECORDS["header"]["workers"][0]["ranks"] == [0]
    assert RECORDS["step"]["forward_ns"] == [5, None]
    assert "backward_ns" not in RECORDS["split step"]


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
