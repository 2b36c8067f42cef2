"""What the ends of several processes mean."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dynmo_train.launch import launcher
from dynmo_train.launch.exit_status import (
    Failure,
    causes,
    end_text,
    failure_message,
    last_lines,
    shell_code,
    usage_words,
)
from dynmo_train.launch.node_agent import interface_towards, worker_environment
from dynmo_train.launch.restart import packing_flags, pipeline_size, place_flags, processes_of


def failures(*codes):
    """Failures of ranks 0, 1, ...; a code of 0 is none."""
    return [Failure(rank=rank, code=code, log=f"log-{rank}") for rank, code in enumerate(codes) if code]


@pytest.mark.parametrize(
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
def test_the_cause_goes_before_what_followed_from_it(codes, ranks):
    assert [failure.rank for failure in causes(failures(*codes))] == ranks


def test_signals_are_told_as_a_shell_does():
    assert [shell_code(code) for code in (0, 2, 75, -9, -15)] == [0, 2, 75, 137, 143]
    assert end_text(-9) == "was killed by SIGKILL"
    assert end_text(-signal.SIGRTMIN - 1).startswith("was killed by signal")
    assert end_text(3) == "ended with exit code 3"


def test_the_last_lines_are_those_that_hold_something():
    assert last_lines("a\n\nb  \n\n", 2) == ["a", "b"]
    assert last_lines("\n".join(map(str, range(50))), 3) == ["47", "48", "49"]
    assert last_lines("") == []


def test_one_message_tells_all():
    text = failure_message(failures(143, 3, 3, 0, 1), {1: ["one"], 2: ["one"], 4: ["four"]})
    assert text.splitlines() == [
        "rank 1 ended with exit code 3; its log is log-1",
        "  | one",
        "rank 2 ended with exit code 3; its log is log-2",
        "rank 4 ended with exit code 1; its log is log-4",
        "  | four",
        "with it ended rank 0",
    ]


def test_workers_get_one_thread_and_what_a_person_set_stays():
    told = {"launcher": 7, "launch_file": Path("f"), "grace_s": 2.0, "save_s": 90.0, "told_file": Path("t")}
    fresh = worker_environment({}, **told, interface="lo")
    assert fresh["OMP_NUM_THREADS"] == "1"
    assert int(fresh["MALLOC_TRIM_THRESHOLD_"]) > 1 << 30
    assert fresh["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert (fresh["DYNMO_LAUNCHER_PID"], fresh["DYNMO_GRACE_S"], fresh["DYNMO_LAUNCH_FILE"]) == ("7", "2.0", "f")
    assert (fresh["DYNMO_SAVE_S"], fresh["DYNMO_TOLD_FILE"]) == ("90.0", "t")
    set_by_hand = {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    kept = worker_environment(set_by_hand, **told, interface="lo")
    assert not kept.keys() & set_by_hand.keys()


def parallel(tensor, pipeline):
    return {"parallel": {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}}


def test_the_interface_towards_this_machine_is_loopback():
    assert interface_towards("127.0.0.1").startswith("lo")
    assert interface_towards("no.such.host.invalid") is None


def test_starting_again_goes_on_with_the_run():
    assert place_flags("/r", None) == ("--run-dir", "/r", "--save", "/r", "--load", "/r")
    assert place_flags("/r", 3)[-2:] == ("--pipeline-model-parallel-size", "3")
    assert packing_flags({"balance": {"pack_to": 2}}, 4) == ("--pack-to", "4")
    assert packing_flags({"balance": {"pack_to": 2}}, None) == packing_flags({"balance": {"pack_to": None}}, 4) == ()


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
        (4, 2, 8, 6, None),  # no size fits: the run says so itself
    ],
)
def test_lost_processes_shorten_the_pipeline_or_cost_replicas(tensor, pipeline, before, now, size):
    assert pipeline_size(parallel(tensor, pipeline), before, now) == size


def test_growth_counts_in_workers_of_several_processes():
    assert processes_of(parallel(2, 2), 8, 3) == 12
    assert processes_of(parallel(1, 2), 2, 4) == 4


def test_the_words_of_a_usage_error_are_the_end_of_a_log():
    assert usage_words(["apex: no", "dynmo-train: error: a", "  b"]) == "dynmo-train: error: a\n  b"
    assert usage_words(["apex: no"]) == ""


@pytest.mark.parametrize(
    ("logs", "codes", "told"),
    [
        # rank 0 has said it, and was shown
        (["E: x", "E: x"], {0: 2, 1: 2}, ""),
        (["E: x", "E: x"], {1: 2}, ""),
        # rank 0 was ended before it could speak: what the others say is told once, as they say it
        (["", "apex: no\nE: x\n  y", "E: x\n  y"], {0: 143, 1: 2, 2: 2}, "E: x\n  y\n"),
        # no message of a usage error
        (["", "Killed"], {1: 2}, "E: rank 1 ended with exit code 2; its log is LOG\n  | Killed\n"),
        (["", "E: x"], {1: 1}, "E: rank 1 ended with exit code 1; its log is LOG\n  | E: x\n"),
    ],
)
def test_a_launcher_says_once_what_rank_0_could_not(tmp_path, capsys, logs, codes, told):
    paths = []
    for rank, text in enumerate(logs):
        paths.append(tmp_path / str(rank) / "stderr.log")
        paths[-1].parent.mkdir()
        paths[-1].write_text(text.replace("E:", "dynmo-train: error:"))
    ended = [Failure(rank=rank, code=code, log=str(paths[rank])) for rank, code in codes.items()]
    launcher._tell(ended, shown_first=True)
    expected = told.replace("E:", "dynmo-train: error:")
    assert capsys.readouterr().err == expected.replace("LOG", str(paths[1]))
