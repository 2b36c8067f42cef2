"""Lines of metrics and events are checked before they are written."""

from __future__ import annotations

import json

import pytest
import torch

from dynmo_train._common.document import WriterError
from dynmo_train.formats.checkpoint.writer import read_latest
from dynmo_train.formats.run_lines import append_event, append_metrics
from tests.distributed.whole_runs import check_fields

EVENT = {"time_utc": "2026-01-31T12:00:00Z", "step": 3, "kind": "resize", "message": "Grew."}


@pytest.mark.parametrize(
    ("append", "record", "words"),
    [
        (append_metrics, {"loss": 1.0}, "step: is missing"),
        (append_metrics, {"step": 1.5}, "step: must be an integer"),
        (append_metrics, {"step": -1}, "step: must be at least 0"),
        (append_metrics, {"step": 1, "loss": torch.zeros(1)}, "not JSON serializable"),
        (append_event, EVENT | {"kind": None}, "kind: must be a string"),
        (append_event, EVENT | {"message": ""}, "message: must not be empty"),
        (append_event, {"step": 3, "kind": "x"}, "time_utc: is missing"),
    ],
)
def test_append_of_an_invalid_line_writes_nothing(tmp_path, append, record, words):
    path = tmp_path / "lines.jsonl"
    append_metrics(path, {"step": 1})
    before = path.read_bytes()
    with pytest.raises(WriterError, match=words):
        append(path, record)
    assert path.read_bytes() == before


def test_append_metrics_nonfinite_numbers_become_null(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_event(path, EVENT | {"batches": [{"loss": float("nan")}], "norm": float("inf"), "layers": (1.0, 2.0)})
    line = json.loads(path.read_text())
    assert (line["batches"], line["norm"], line["layers"]) == ([{"loss": None}], None, [1.0, 2.0])


def test_read_latest_of_an_invalid_name_is_ignored(tmp_path):
    assert read_latest(tmp_path) == ""
    (tmp_path / "LATEST").write_text("step-00000001\n")
    assert read_latest(tmp_path) == "step-00000001"
    (tmp_path / "LATEST").write_text("s" * 100_000)
    assert read_latest(tmp_path) == ""


def test_fields_of_a_record_that_the_page_does_not_list_are_found(tmp_path):
    record = {"step": 1, "lm_loss": 1.0, "grad_norm": None, "learning_rate": 0.1, "step_ns": 5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    check_fields(tmp_path)
    for wrong in ({**record, "new_field": 1}, {**record, "step": "1"}, {"step": 1, "lm_loss": 1.0}):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(wrong) + "\n")
        with pytest.raises(AssertionError, match="does not list"):
            check_fields(tmp_path)
