"""The watchdog: heartbeats in shared memory, deadlines, and which rank hangs, as pure functions."""

from __future__ import annotations

import mmap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo_train.launch.watch.heartbeat import (
    HEARTBEAT_VARIABLE,
    Heartbeat,
    HeartbeatWriter,
    Phase,
    open_heartbeat,
    page_path,
    parse_page,
    read_heartbeat,
)
from dynmo_train.launch.watch.node_watch import decode_states, encode_states
from dynmo_train.launch.watch.watchdog import (
    SLOW_PHASES,
    WAITING_PHASES,
    Hang,
    HangSettings,
    RankState,
    collective_in,
    deadline_s,
    find_hang,
    refine,
)

SETTINGS = HangSettings(factor=3.0, min_s=10.0)
LIMIT_S = 600.0


def state(rank, phase=Phase.FORWARD, age_s=0.0, *, process="S", median_s=1.0, cold=False, step=7):
    beat = Heartbeat(
        pid=100 + rank,
        step=step,
        phase=phase,
        microbatch=2,
        since_ns=0,
        is_cold=cold,
        limit_s=LIMIT_S,
        median_step_s=median_s,
    )
    return RankState(rank=rank, host=f"host{rank}", beat=beat, age_s=age_s, process=process)


def found(*states, **options):
    hang = find_hang(states, SETTINGS, **options)
    return None if hang is None else hang.state.rank


def test_heartbeat_is_read_as_it_was_written(tmp_path):
    environment = {HEARTBEAT_VARIABLE: str(tmp_path), "TORCHELASTIC_RUN_ID": "round-0", "RANK": "3"}
    assert read_heartbeat(tmp_path, "round-0", 3) is None
    writer = open_heartbeat(environment, 600.0)
    beat = read_heartbeat(tmp_path, "round-0", 3)
    assert (beat.phase, beat.limit_s, beat.median_step_s) == (Phase.START, 600.0, 0.0)
    for step, cold in ((1, True), (2, False), (3, False)):
        writer.begin_step(step, is_cold=cold)
        writer.end_step()
    before = time.monotonic_ns()
    writer.enter(Phase.BACKWARD, 5)
    beat = read_heartbeat(tmp_path, "round-0", 3)
    assert (beat.step, beat.phase, beat.microbatch, beat.is_cold) == (3, Phase.BACKWARD, 5, False)
    assert beat.since_ns >= before
    assert 0 < beat.median_step_s < 1
    assert beat.text == "backward of microbatch 5"
    # A process that is stopped within a beat must not block its launcher.
    content = bytearray(page_path(tmp_path, "round-0", 3).read_bytes())
    content[0] += 1
    page_path(tmp_path, "round-0", 3).write_bytes(content)
    assert read_heartbeat(tmp_path, "round-0", 3).step == 3


def test_times_of_cold_steps_do_not_count():
    page = mmap.mmap(-1, 4096)
    writer = HeartbeatWriter(page, 1.0)
    writer.begin_step(1, is_cold=True)
    assert parse_page(page[:]).is_cold
    writer.end_step()
    assert (parse_page(page[:]).median_step_s, parse_page(page[:]).is_cold) == (0.0, False)
    assert parse_page(bytes(4096)) is None
    assert parse_page(b"") is None


def test_beats_without_a_launcher_are_not_written(tmp_path):
    open_heartbeat({"RANK": "0"}, 600.0).enter(Phase.SAVE)
    open_heartbeat({HEARTBEAT_VARIABLE: str(tmp_path / "gone"), "TORCHELASTIC_RUN_ID": "r"}, 600.0).enter(Phase.SAVE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (state(0), 10.0),
        (state(0, median_s=100.0), 300.0),
        (state(0, median_s=1000.0), LIMIT_S),
        (state(0, Phase.SAVE), LIMIT_S),
        (state(0, Phase.SAVE, process="T"), 10.0),
        (state(0, cold=True), LIMIT_S),
        (state(0, median_s=0.0), LIMIT_S),
        (state(0, Phase.START), float("inf")),
    ],
)
def test_deadline_depends_on_phase_and_median_step(one, expected):
    assert deadline_s(one, one.beat.median_step_s, SETTINGS) == expected


def test_late_rank_is_found_behind_those_that_wait_for_it():
    waiting = [state(rank, Phase.PIPELINE, 12.0) for rank in (0, 2)]
    assert found(*waiting, state(1, Phase.FORWARD, 11.0)) == 1
    assert found(*waiting, state(1, Phase.FORWARD, 9.0)) is None


def test_slow_save_of_one_rank_is_not_a_hang():
    others = [state(rank, Phase.PLAN_WAIT, 700.0) for rank in (1, 2)]
    assert found(state(0, Phase.SAVE, 590.0), *others) is None
    assert found(state(0, Phase.SAVE, 601.0), *others) == 0


def test_stopped_rank_is_found_in_any_phase():
    for phase in set(Phase) - {Phase.END}:
        assert found(state(0, Phase.FORWARD, 11.0), state(1, phase, 10.5, process="T")) == 1


def test_ranks_that_all_wait_hang_unless_one_has_not_started():
    states = [state(rank, Phase.REDUCTION, 20.0 - rank) for rank in range(3)]
    assert found(*states) == 0
    assert found(*states, num_unknown=1) is None


def test_factor_zero_disables_the_watchdog():
    assert find_hang([state(0, age_s=1e9)], HangSettings(factor=0.0, min_s=1.0)) is None


STATES = st.lists(
    st.builds(
        state,
        st.just(0),
        st.sampled_from(Phase),
        st.floats(0, 1e5),
        process=st.sampled_from("RSDT"),
        median_s=st.floats(0, 1e3),
        cold=st.booleans(),
    ),
    min_size=1,
    max_size=6,
).map(lambda states: [RankState(**{**vars(one), "rank": rank}) for rank, one in enumerate(states)])


@settings(deadline=None, derandomize=True, database=None)
@given(STATES, st.floats(0.1, 10), st.floats(0.1, 100))
def test_found_rank_is_late_and_no_rank_is_late_without_a_reason(states, factor, min_s):
    chosen = HangSettings(factor=factor, min_s=min_s)
    hang = find_hang(states, chosen)
    median = max(one.beat.median_step_s for one in states)
    late = {one.rank for one in states if one.age_s > deadline_s(one, median, chosen)}
    if hang is None:
        # Nobody is late, or those that are wait for a rank that still has time.
        assert all(one.beat.phase in WAITING_PHASES and not one.is_stopped for one in states if one.rank in late)
        assert len(late) < len(states)
    else:
        assert {hang.state.rank, *(one.rank for one in hang.suspects)} == late
        assert hang.state.age_s > hang.deadline_s >= min(chosen.min_s, LIMIT_S)
        if hang.state.beat.phase in SLOW_PHASES and not hang.state.is_stopped:
            assert hang.deadline_s == LIMIT_S


STACK = """Thread 0x00007f3c (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f3d (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 3001 in all_reduce
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/dynmo_train/trainer/step_sums.py", line 50 in add
"""


def test_collective_is_that_of_the_main_thread():
    assert collective_in(STACK) == "all_reduce in add"
    assert collective_in(STACK.replace("/venv/torch/distributed/distributed_c10d.py", "/x/model.py")) == ""
    assert collective_in("") == ""
    receive = STACK.replace("distributed_c10d.py", "pipelining/schedules.py").replace("all_reduce", "_wait_batch_p2p")
    assert collective_in(receive) == "_wait_batch_p2p in add"


def test_stacks_decide_between_late_ranks():
    inside, outside = state(0, Phase.FORWARD, 20.0), state(1, Phase.FORWARD, 19.0)
    hang = Hang(state=inside, deadline_s=10.0, suspects=(outside,))
    better, collective = refine(hang, {0: "all_reduce in add", 1: ""})
    assert (better.state.rank, [one.rank for one in better.suspects], collective) == (1, [0], "all_reduce in add")
    assert refine(hang, {0: "", 1: "all_reduce in add"})[0].state.rank == 0
    assert refine(hang, {})[0].state.rank == 0
    stopped = Hang(state=state(0, age_s=20.0, process="T"), deadline_s=10.0, suspects=(outside,))
    assert refine(stopped, {0: "all_reduce", 1: ""})[0].state.rank == 0


def test_states_of_another_node_are_read_as_they_were_sent():
    states = [state(0), state(1, Phase.SAVE, 3.5, process="D")]
    assert decode_states(encode_states(states, 2)) == (states, 2)


def test_cause_names_state_and_phase():
    hang = Hang(state=state(1, age_s=12.34, process="T"), deadline_s=10.0)
    assert hang.cause == "stopped (state T), during forward of microbatch 2 for 12.3 s (deadline 10.0 s)"
    assert "no progress during save of a checkpoint" in Hang(state=state(1, Phase.SAVE), deadline_s=1.0).cause
