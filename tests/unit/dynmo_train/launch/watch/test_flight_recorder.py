"""Torch's flight recorder: its environment, the analysis of traces, and a trace that torch made on CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dynmo_train.launch.watch.flight_recorder import (
    SIZE_VARIABLES,
    LastCollective,
    absent_ranks,
    enable_recorder,
    is_recording,
    parse_trace,
    request_trace,
    trace_path,
)
from dynmo_train.launch.watch.node_watch import decode_traces, encode_traces
from tests.distributed.ports import free_port
from tests.waiting import wait_for

WORKER = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from dynmo_train.launch.watch.flight_recorder import serve_traces
rank = int(os.environ["RANK"])
serve_traces(Path(sys.argv[1]), "round", rank)
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(torch.zeros(2))
dist.all_reduce(torch.zeros(5), group=pair)
Path(sys.argv[1], f"ready-{rank}").touch()
if rank == 0:
    dist.all_reduce(torch.zeros(7), group=pair)
time.sleep(600)
"""


def last(number: int, members: tuple[int, ...] = ()) -> LastCollective:
    return LastCollective(number=number, name="nccl:all_reduce", sizes="[[4]]", members=members)


@pytest.mark.parametrize(
    ("present", "device", "is_on"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "cuda", False),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}, "cpu", True),
    ],
)
def test_enable_recorder_is_on_for_nccl_and_keeps_what_is_given(present, device, is_on):
    environment = dict(present)
    enable_recorder(environment, device)
    assert is_recording(environment) is is_on
    if present or device == "cpu":
        assert environment == present
    else:
        assert environment == dict.fromkeys(SIZE_VARIABLES, "2000")


def test_absent_ranks_names_the_ranks_with_fewer_collectives():
    traces = {0: {"0": last(9), "1": last(4)}, 1: {"0": last(9), "1": last(4)}, 2: {"0": last(8)}}
    [found] = absent_ranks(traces)
    assert (found.group, found.ranks, found.waiting) == ("0", (2,), (0, 1))
    assert found.text == (
        "rank 2 did not enter nccl:all_reduce number 9 of group 0 (sizes [[4]]), which ranks 0, 1 entered"
    )


def test_absent_ranks_names_members_without_a_trace():
    [found] = absent_ranks({0: {"0": last(9, (0, 1, 2))}, 1: {"0": last(9, (0, 1, 2))}})
    assert found.ranks == (2,)


def test_absent_ranks_equal_numbers_have_none():
    assert absent_ranks({0: {"0": last(9)}, 1: {"0": last(9)}}) == []
    assert absent_ranks({}) == []


def test_parse_trace_ignores_messages_and_reads_members():
    entry = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "input_sizes": [[4]]}
    document = {
        "entries": [
            {**entry, "collective_seq_id": 3, "is_p2p": False},
            {**entry, "collective_seq_id": 2, "is_p2p": False},
            {**entry, "collective_seq_id": 8, "is_p2p": True},
        ],
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    }
    assert parse_trace(json.dumps(document)) == {"0": last(3, (0, 1))}


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"entries": [{}]}', b'{"entries": 3}', b'{"pg_config": {"0": {"ranks": "["}}}']
)
def test_parse_trace_of_another_form_is_empty(text):
    assert parse_trace(text) == {}


def test_encoded_traces_are_decoded():
    traces = {3: {"0": last(9, (2, 3))}, 4: {}}
    assert decode_traces(encode_traces(traces)) == traces


def test_request_trace_without_a_thread_is_refused(tmp_path):
    assert not request_trace(tmp_path, "round", 0)


@pytest.mark.timeout(300)
def test_traces_of_torch_name_the_rank_outside_of_the_collective(tmp_path):
    port = str(free_port())
    workers = []
    for rank in range(2):
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | given | {"TORCH_FR_BUFFER_SIZE": "2000", "GLOO_SOCKET_IFNAME": "lo"}
        workers.append(subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], env=environment))
    try:
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "ready")

        def traces() -> dict[int, dict[str, LastCollective]]:
            for rank in range(2):
                trace_path(tmp_path, "round", rank).unlink(missing_ok=True)
                wait_for(lambda rank=rank: request_trace(tmp_path, "round", rank), "request")
            paths = [trace_path(tmp_path, "round", rank) for rank in range(2)]
            wait_for(lambda: all(path.exists() for path in paths), "traces")
            return {rank: parse_trace(path.read_bytes()) for rank, path in enumerate(paths)}

        # Rank 0 is blocked in its collective while it answers; it may not have entered it yet.
        wait_for(lambda: absent_ranks(traces()), "the collective")
        [found] = absent_ranks(traces())
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert (found.ranks, found.waiting) == ((1,), (0,))
    assert (found.collective.name, found.collective.number) == ("gloo:all_reduce", 2)
    assert found.collective.sizes == "[[7]]"
