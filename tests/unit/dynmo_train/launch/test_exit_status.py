"""Exit codes and logs: root causes, messages, environment and restart of workers."""

from __future__ import annotations

import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo_train.launch.elastic.node_agent import interface_towards, worker_environment
from dynmo_train.launch.elastic.restart import (
    Layout,
    fitting_nodes,
    join_layout,
    layout_flags,
    pack_to_flags,
    pipeline_size,
    process_count,
    resume_flags,
)
from dynmo_train.launch.exit_status import (
    Failure,
    describe_exit,
    error_of,
    failure_message,
    first_cause,
    last_lines,
    root_causes,
    shell_exit_code,
    usage_message,
    with_causal_codes,
)
from dynmo_train.launch.failure_record import FailureRecord
from dynmo_train.launch.failure_report import report_failures
from tests.tables import table


def failures(*codes):
    """Failures of ranks 0, 1, ...; a code of 0 is none."""
    return [Failure(rank=rank, code=code, log=f"log-{rank}") for rank, code in enumerate(codes) if code]


@table(
    ("codes", "ranks"),
    [
        ((1, 0), [0]),
        ((0, 2), [1]),
        ((143, 2), [1]),
        ((-15, 1), [1]),
        ((1, -9, 143), [1]),
        ((1, 75, 143), [1]),
        ((1, 2, 1), [1]),
        ((2, 2, 143), [0, 1]),
        ((-15, 143), [0, 1]),
    ],
)
def test_root_causes_precede_their_consequences(codes, ranks):
    assert [failure.rank for failure in root_causes(failures(*codes))] == ranks


def test_exit_codes_signals_are_reported_as_by_a_shell():
    assert [shell_exit_code(code) for code in (0, 2, 75, -9, -15)] == [0, 2, 75, 137, 143]
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-signal.SIGRTMIN - 1).startswith("was killed by signal")
    assert describe_exit(3) == "exited with code 3"


def test_last_lines_blank_lines_are_skipped():
    assert last_lines("a\n\nb  \n\n", 2) == ["a", "b"]
    assert last_lines("\n".join(map(str, range(50))), 3) == ["47", "48", "49"]
    assert last_lines("") == []


def recorded(rank, code, message, *, time_ns=1, is_consequence=False):
    record = FailureRecord(message=message, time_ns=time_ns, is_consequence=is_consequence)
    return Failure(rank=rank, code=code, log=f"log-{rank}", record=record)


def test_causal_codes_rank_that_lost_another_is_a_consequence():
    lost = [recorded(rank, 1, "lost another rank", is_consequence=True) for rank in (0, 2)]
    cause = recorded(1, 143, "RuntimeError: x")
    found = with_causal_codes([lost[0], cause, lost[1]])
    assert [failure.code for failure in found] == [143, 1, 143]
    assert root_causes(found) == [replace(cause, code=1)]
    # A killed rank has no record.
    killed = with_causal_codes([lost[0], *failures(0, -9)])
    assert [failure.rank for failure in root_causes(killed)] == [1]
    assert with_causal_codes(lost) == lost


def test_first_cause_is_the_earliest_record():
    found = [recorded(0, 1, "a", time_ns=3), recorded(1, 1, "b", time_ns=2), *failures(0, 0, 1)]
    assert first_cause(found).rank == 1
    assert first_cause(failures(1, 0, 1)).rank == 0


def test_failure_message_is_one_line_with_rank_host_error_and_log():
    assert failure_message(failures(0, 3)[0], "h", "E: x") == "rank 1 exited with code 3 on h: E: x; its log is log-1"
    assert failure_message(failures(-9)[0], "h", "") == "rank 0 was killed by SIGKILL on h; its log is log-0"


def test_error_of_a_process_is_its_record_or_the_last_line_of_its_log():
    assert error_of(recorded(0, 1, "x"), ["y"]) == "x"
    assert error_of(failures(1)[0], ["y", "dynmo-train: error: z"]) == "z"
    assert error_of(failures(-6)[0], ["what(): y", "frame #0: c10::Error"]) == "what(): y"
    assert error_of(failures(-9)[0], ["y"]) == error_of(failures(1)[0], []) == ""


def test_worker_environment_defaults_yield_to_existing_values():
    options = {"launcher": 7, "launch_file": Path("f"), "grace_s": 2.0, "save_s": 90.0, "shutdown_file": Path("t")}
    options |= {"join_file": Path("j")}
    fresh = worker_environment({}, **options, interface="lo")
    assert fresh["OMP_NUM_THREADS"] == "1"
    assert int(fresh["MALLOC_TRIM_THRESHOLD_"]) > 1 << 30
    assert fresh["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert (fresh["DYNMO_LAUNCHER_PID"], fresh["DYNMO_GRACE_S"], fresh["DYNMO_LAUNCH_FILE"]) == ("7", "2.0", "f")
    assert (fresh["DYNMO_SAVE_S"], fresh["DYNMO_SHUTDOWN_FILE"]) == ("90.0", "t")
    assert fresh["DYNMO_JOIN_FILE"] == "j"
    existing = {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    added = worker_environment(existing, **options, interface="lo")
    assert not added.keys() & existing.keys()


def parallel(tensor, pipeline):
    return {"parallel": {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}}


def test_run_that_shrank_returns_to_the_sizes_of_its_largest_round():
    layout = Layout(config=parallel(1, 3), processes=3)
    assert layout_flags("/r", layout, 1)[-2:] == ("--pipeline-model-parallel-size", "1")
    assert layout_flags("/r", layout, 2)[-2:] == ("--pipeline-model-parallel-size", "2")
    assert layout_flags("/r", layout, 3) == resume_flags("/r", None)
    assert (join_layout(layout, 2), join_layout(layout, 3)) == (2, None)


@pytest.mark.parametrize(
    ("counts", "refused", "nodes"),
    [([1, 1, 1], (), 2), ([2, 2, 2], (), 3), ([2, 2, 2], (6,), 2), ([1, 1, 2], (4,), 2), ([3], (), 1)],
)
def test_next_round_has_whole_tensor_parallel_groups_and_no_refused_size(counts, refused, nodes):
    layout = Layout(config=parallel(2, 1), processes=2)
    assert fitting_nodes(layout, counts, 1, refused) == nodes
    assert fitting_nodes(None, counts, 1, refused) == len(counts)


def test_interface_towards_this_machine_is_loopback():
    assert interface_towards("127.0.0.1").startswith("lo")
    assert interface_towards("no.such.host.invalid") is None


def test_resume_flags_name_the_run():
    assert resume_flags("/r", None) == ("--run-dir", "/r", "--save", "/r", "--load", "/r")
    assert resume_flags("/r", 3)[-2:] == ("--pipeline-model-parallel-size", "3")
    assert pack_to_flags({"balance": {"pack_to": 2}}, 4) == ("--pack-to", "4")
    assert pack_to_flags({"balance": {"pack_to": 2}}, None) == pack_to_flags({"balance": {"pack_to": None}}, 4) == ()


@pytest.mark.parametrize(
    ("tensor", "pipeline", "before", "now", "size"),
    [
        (1, 2, 2, 2, None),  # as it was
        (1, 2, 4, 2, None),  # a replica less
        (2, 2, 8, 4, None),
        (1, 4, 4, 2, 2),  # a shorter pipeline
        (1, 4, 8, 6, 3),  # of both replicas
        (2, 4, 8, 4, 2),
        (1, 2, 4, 3, 3),  # one replica of all that are left
        (4, 2, 8, 6, None),  # no size fits: the run reports it
    ],
)
def test_pipeline_size_after_a_loss_keeps_replicas_if_possible(tensor, pipeline, before, now, size):
    assert pipeline_size(parallel(tensor, pipeline), before, now) == size


def test_process_count_growth_counts_pipeline_ranks():
    assert process_count(parallel(2, 2), 8, 3) == 12
    assert process_count(parallel(1, 2), 2, 4) == 4


def test_usage_message_is_the_end_of_the_log():
    assert usage_message(["apex: no", "dynmo-train: error: a", "  b"]) == "dynmo-train: error: a\n  b"
    assert usage_message(["apex: no"]) == ""


@pytest.mark.parametrize(
    ("logs", "codes", "expected"),
    [
        # printed by rank 0
        (["E: x", "E: x"], {0: 2, 1: 2}, ""),
        (["E: x", "E: x"], {1: 2}, ""),
        # rank 0 was terminated before it could print: the message of the others is printed once
        (["", "apex: no\nE: x\n  y", "E: x\n  y"], {0: 143, 1: 2, 2: 2}, "E: x\n  y\n"),
        # not a usage error
        (["", "Killed"], {1: 2}, "E: rank 1 exited with code 2 on HOST: Killed; its log is LOG\n"),
        (["", "E: x"], {1: 1}, "E: rank 1 exited with code 1 on HOST: x; its log is LOG\n"),
    ],
)
def test_report_failures_prints_each_message_once(tmp_path, capsys, logs, codes, expected):
    paths = []
    for rank, text in enumerate(logs):
        paths.append(tmp_path / str(rank) / "stderr.log")
        paths[-1].parent.mkdir()
        paths[-1].write_text(text.replace("E:", "dynmo-train: error:"))
    failures = [Failure(rank=rank, code=code, log=str(paths[rank])) for rank, code in codes.items()]
    report_failures(failures, has_rank0=True)
    expected = expected.replace("E:", "dynmo-train: error:")
    assert capsys.readouterr().err == expected.replace("LOG", str(paths[1])).replace("HOST", socket.gethostname())
