"""Writers check their own documents before the first byte; a line of a ``.jsonl`` document is whole or absent."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from dynmo_balance._common.document import WriterError as BalanceWriterError
from dynmo_balance.formats import plan as balance_plan
from dynmo_balance.formats import profile as balance_profile
from dynmo_ckpt._common.document import WriterError as CkptWriterError
from dynmo_ckpt.formats import checkpoint as ckpt_checkpoint
from dynmo_train._common import document
from dynmo_train._common.document import WriterError, append_line
from dynmo_train.formats import plan as train_plan
from dynmo_train.formats import run as train_run
from dynmo_train.formats.profile import (
    ItemInfo,
    Layout,
    ModelInfo,
    WorkerInfo,
    append_record,
    event_record,
    header_record,
    plan_result_record,
    step_record,
)

NAMES = ["embedding", *(f"layers.{n}.{part}" for n in range(48) for part in ("attention", "mlp")), "head"]


def header():
    sizes = dict.fromkeys(("param_count", "param_bytes", "gradient_bytes", "optimizer_bytes", "boundary_bytes"), 8)
    items = [ItemInfo(name=name, layer=name, kind="layer", cut_before=True, **sizes) for name in NAMES]
    return header_record(
        run_id="run",
        segment=0,
        model=ModelInfo(family="gpt", num_layers=48, hidden_size=8, sequence_length=8),
        layout=Layout(
            schedule="1f1b", virtual_stages_per_worker=1, granularity="sublayer", microbatches=4, micro_batch_size=1
        ),
        link=None,
        workers=[WorkerInfo(worker=0, ranks=[0], hosts=["host"], device="cpu", memory_bytes=1)],
        items=items,
    )


def step(number):
    times = [1000] * len(NAMES)
    return step_record(
        step=number,
        plan_id=0,
        step_ns=10,
        forward_ns=times,
        backward_ns=times,
        activation_bytes=times,
        busy_ns=[10],
        peak_memory_bytes=[None],
    )


@pytest.mark.parametrize(
    ("record", "path"),
    [
        (event_record(step=1, kind="", detail={}, next_expected_step=None), "kind"),
        (step(1) | {"forward_ns": [-1] * len(NAMES)}, "forward_ns"),
        ({"record": "invented"}, "record"),
        (
            plan_result_record(plan_id=1, step=1, result="lost", pause_ns=0, num_bytes=0, reason="x"),
            "result",
        ),
        (header() | {"schedule": "invented"}, "schedule"),
    ],
    ids=["event", "step", "record", "plan_result", "header"],
)
def test_append_record_invalid_line_is_refused(tmp_path, record, path):
    profile = tmp_path / "profile.jsonl"
    append_record(profile, header())
    before = profile.read_bytes()
    with pytest.raises(WriterError, match=rf"internal error: .*nothing was written\n  {path}"):
        append_record(profile, record)
    assert profile.read_bytes() == before
    append_record(profile, step(1))
    (segment,) = balance_profile.read_profile(profile)
    assert len(segment.steps) == 1


def plan_document():
    return train_plan.initial_plan(
        run_id="run",
        stages=[["embedding"], ["head"]],
        stage_workers=[0, 1],
        schedule="1f1b",
        virtual_stages_per_worker=1,
    )


def test_write_plan_invalid_plan_writes_nothing(tmp_path):
    with pytest.raises(WriterError, match="schedule"):
        train_plan.write_plan(tmp_path, plan_document() | {"schedule": "invented"})
    assert list(tmp_path.iterdir()) == []
    train_plan.write_plan(tmp_path, plan_document())


def test_publish_plan_with_unknown_schedule_writes_nothing(tmp_path):
    plan = balance_plan.parse_plan(json.loads(json.dumps(plan_document())), "plan")
    with pytest.raises(BalanceWriterError, match="schedule"):
        balance_plan.publish(tmp_path, replace(plan, schedule="invented"))
    assert list(tmp_path.iterdir()) == []


def test_write_run_invalid_document_writes_nothing(tmp_path):
    with pytest.raises(WriterError, match="world_size"):
        train_run.write_run(tmp_path / "run.json", {**document.envelope("dynmo.run", 1, "test")})
    assert list(tmp_path.iterdir()) == []


def test_seal_invalid_manifest_is_refused():
    with pytest.raises(CkptWriterError, match="topology"):
        ckpt_checkpoint.seal({**document.envelope("dynmo.checkpoint", 1, "test"), "manifest_crc32": "0" * 8})


def test_write_profile_invalid_line_writes_nothing(tmp_path):
    with pytest.raises(BalanceWriterError, match="forward_ns"):
        balance_profile.write_profile(
            tmp_path / "p.jsonl", [json.dumps(header()).encode(), json.dumps(step(1) | {"forward_ns": 1}).encode()]
        )
    assert list(tmp_path.iterdir()) == []


def test_append_line_short_write_is_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(document.os, "write", lambda descriptor, payload: write(descriptor, payload[:7]))
    append_line(tmp_path / "a.jsonl", {"text": "x" * 100})
    append_line(tmp_path / "a.jsonl", {"text": "y"})
    assert [json.loads(line) for line in document.read_lines(tmp_path / "a.jsonl")] == [
        {"text": "x" * 100},
        {"text": "y"},
    ]


def test_append_line_failed_write_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    append_line(path, {"step": 1})
    write, calls = os.write, []

    def full(descriptor, payload):
        calls.append(payload)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(descriptor, payload[:3])

    monkeypatch.setattr(document.os, "write", full)
    with pytest.raises(OSError, match="no space"):
        append_line(path, {"step": 2})
    monkeypatch.undo()
    assert path.read_bytes() == b'{"step": 1}\n'
    append_line(path, {"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


@pytest.mark.parametrize("tail", [b'{"st', b"x" * 10_000])
@pytest.mark.parametrize("begin", [b"", b'{"step": 1}\n'])
def test_append_line_incomplete_last_line_is_removed(tmp_path, begin, tail):
    path = tmp_path / "a.jsonl"
    path.write_bytes(begin + tail)
    assert b"".join(document.read_lines(path)) == begin
    append_line(path, {"step": 2})
    assert path.read_bytes() == begin + b'{"step": 2}\n'
