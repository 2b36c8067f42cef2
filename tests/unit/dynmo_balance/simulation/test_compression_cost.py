"""Compression in the simulator: closed forms of its times and bytes, the epilogue, the tail, and when it is faster."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dynmo_balance.cli import app
from dynmo_balance.costs.devices import load_device
from dynmo_balance.schedules.registry import build_order
from dynmo_balance.simulation.compression_cost import Compression, compressed_microbatches, factor_bytes
from dynmo_balance.simulation.simulator import Communication, StageCosts, run
from tests.paths import CONTRACTS

FIXTURES = CONTRACTS / "profile/valid"
GIVEN = Compression(rows=8192, columns=1920, device=load_device("cpu"), boundary_rank=12)
F, B, SEND = 7, 9, 100
EVERY = frozenset(range(8))


def stages(count, compressed, send=10, make=3, undo=2):
    plain = StageCosts(forward_ns=F, backward_input_ns=B, backward_weight_ns=0, send_ns=SEND)
    small = StageCosts(
        forward_ns=F,
        backward_input_ns=B,
        backward_weight_ns=0,
        send_ns=SEND,
        compressed=compressed,
        compressed_send_ns=send,
        compress_ns=make,
        decompress_ns=undo,
    )
    return [plain, *[small] * (count - 1)]


def test_compression_factor_bytes_and_times():
    assert factor_bytes(GIVEN) == 485_376
    # At a low rank reading the matrix takes longer than its operations, at a high one not
    touch = GIVEN.device.touch_ns(8192 * 1920 * 4)
    assert GIVEN.compress_ns(8192, 1920, 4) == round(2 * touch)
    assert GIVEN.decompress_ns(8192, 1920, 128) == round(GIVEN.device.product_ns(2 * 8192 * 1920 * 128, "float32"))
    assert GIVEN.decompress_ns(8192, 1920, 128) > touch


@pytest.mark.parametrize("communication", Communication)
def test_compressed_run_one_microbatch_three_stages(communication):
    """Three forwards and backwards, two whole transfers forth and two packed ones back, made twice, undone twice."""
    timeline = run(build_order("gpipe", 3, 1, 1), stages(3, EVERY), communication=communication)
    assert timeline.step_ns == 3 * (F + B) + 2 * SEND + 2 * (10 + 3 + 2)


def test_compressed_run_only_compressed_microbatches_are_cheaper():
    order = build_order("1f1b", 2, 1, 8)
    kinds = (frozenset(), frozenset({7}), frozenset({6, 7}), EVERY)
    whole, last, epilogue, every = (run(order, stages(2, compressed)).step_ns for compressed in kinds)
    assert every <= epilogue < last < whole


def test_compressed_run_split_backward_compresses_input_gradient():
    order = build_order("zero-bubble", 2, 1, 4)
    plain = StageCosts(forward_ns=F, backward_input_ns=B, backward_weight_ns=5, send_ns=SEND)
    assert run(order, [plain, plain]).step_ns > 0
    busy = run(order, stages(2, frozenset({0}))).busy_ns
    assert busy == (4 * (F + B) + 2, 4 * (F + B) + 3)


class _Pipeline:
    """As much of a problem as the choice of microbatches asks for."""

    def __init__(self, workers, microbatches):
        self.microbatches, self.num_stages, self._workers = microbatches, len(workers), workers

    def slot(self, stage):
        return type("Place", (), {"worker": self._workers[stage]})


def test_epilogue_starts_after_the_receivers_last_forward():
    order = build_order("1f1b", 4, 1, 8)
    found = compressed_microbatches(_Pipeline([0, 1, 2, 3], 8), order, epilogue_only=True)
    assert [sorted(one) for one in found] == [[], [4, 5, 6, 7], [5, 6, 7], [6, 7]]
    assert compressed_microbatches(_Pipeline([0, 1, 1, 0], 8), order, epilogue_only=False) == [
        set(),
        EVERY,
        set(),
        EVERY,
    ]


def profile(tmp_path, **changes):
    """Two layers 256 wide on two workers over 10 MB/s, two replicas, head tied to the embedding."""
    item = {
        "layer": "",
        "param_count": 256 * 1000,
        "param_bytes": 1_024_000,
        "gradient_bytes": 1_024_000,
        "optimizer_bytes": 2_048_000,
        "boundary_bytes": 4 * 128 * 256 * 4,
        "cut_before": True,
        "tied_to": None,
    }
    named = [("embedding", "embedding"), ("layers.0.mlp", "mlp"), ("layers.1.mlp", "mlp"), ("head", "head")]
    items = [{**item, "name": name, "layer": name, "kind": kind} for name, kind in named]
    items[-1]["tied_to"] = "embedding"
    header = json.loads((FIXTURES / "header-only.jsonl").read_text().splitlines()[0])
    worker = {**header["workers"][0], "memory_bytes": 10**9}
    header |= {
        "model": {"family": "gpt", "num_layers": 2, "hidden_size": 256, "sequence_length": 128},
        "schedule": "1f1b",
        "virtual_stages_per_worker": 1,
        "microbatches": 4,
        "micro_batch_size": 4,
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "granularity": "layer",
        "link": {"bandwidth_bytes_per_s": 10**7, "latency_ns": 0},
        "workers": [{**worker, "worker": at, "ranks": [2 * at, 2 * at + 1], "hosts": ["a", "b"]} for at in (0, 1)],
        "items": items,
        **changes,
    }
    times = [1_000_000] * 4
    step = {"record": "step", "step": 1, "plan_id": 0, "step_ns": 10**9, "forward_ns": times, "backward_ns": times}
    step |= {"activation_bytes": [0] * 4, "busy_ns": [10**7] * 2, "peak_memory_bytes": [10**8] * 2}
    path = tmp_path / "profile.jsonl"
    path.write_text(json.dumps(header) + "\n" + json.dumps(step) + "\n")
    return str(path)


def simulate(*options):
    return CliRunner().invoke(app, ["simulate", *options])


def figures(*options):
    done = simulate(*options, "--format", "json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


RATES = ("--transfers", "serial", "--data-parallel-gbps", "0.01")
FLAGS = ("--inter-grad-comp-rank", "4", "--grad-comp-rank", "4", "--emb-comm-opt")


def test_compression_is_faster_on_slow_links_only(tmp_path):
    path = profile(tmp_path)
    plain, compressed = figures(path, *RATES), figures(path, *RATES, *FLAGS)
    assert "compression" not in plain
    report = compressed["compression"]
    assert report["step_whole_ns"] == plain["step_with_tail_ns"] > compressed["step_with_tail_ns"]
    assert report["gain"] == pytest.approx(plain["step_with_tail_ns"] / compressed["step_with_tail_ns"] - 1)
    assert (report["boundary_bytes"], report["boundary_whole_bytes"]) == (
        (512 + 256) * 4 * 4,
        512 * 256 * 4,
    )
    assert report["packed_microbatches"] == [0, 4]
    assert report["replica_whole_bytes"] == [2_048_000] * 2
    # An MLP of 1000 rows: two matrices 256 wide; the tables are fused
    assert report["replica_bytes"] == [(1000 + 2 * 256) * 4 * 4] * 2
    assert "compression is faster" in simulate(path, *RATES, *FLAGS).output
    fast = simulate(path, "--link-gbps", "100", "--data-parallel-gbps", "100", *FLAGS[:4])
    assert "compression is not faster" in fast.output


def test_fused_table_takes_one_all_reduce(tmp_path):
    path = profile(tmp_path)
    apart, fused = (figures(path, *RATES, *options)["step_with_tail_ns"] for options in ((), ("--emb-comm-opt",)))
    table = 1_024_000 * 100  # ns at 10 MB/s
    # Apart: the table over two replicas, then between two workers. Fused: 2 (4 - 1) / 4 of it
    assert apart - fused == 2 * table - 3 * table // 2


def test_selective_way_auto_is_the_fastest(tmp_path):
    path = profile(tmp_path)
    report = figures(path, *RATES, *FLAGS[2:], "--selective-grad-comp-way", "auto")["compression"]
    steps = {int(way): ns for way, ns in report["ways_ns"].items()}
    assert set(steps) == {0, 1, 2}
    assert steps[report["selective_grad_comp_way"]] == min(steps.values())
    one = figures(path, *RATES, *FLAGS[2:], "--selective-grad-comp-way", "1")
    assert one["step_with_tail_ns"] == steps[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--selective-grad-comp-way", "1"), "needs --grad-comp-rank"),
        (("--grad-comp-rank", "4", "--selective-grad-comp-way", "3"), "must be auto or a number from 1 to 2"),
        (("--grad-comp-rank", "4", "--selective-grad-comp-way", "x"), "must be auto or a number from 1 to 2"),
        (("--inter-grad-comp-rank", "200"), "use a lower rank"),
        (("--inter-grad-comp-rank", "4", "--compression-device", "abacus"), "unknown device 'abacus'"),
    ],
)
def test_compression_invalid_options_are_refused(tmp_path, options, message):
    done = simulate(profile(tmp_path), *options)
    assert isinstance(done.exception, Exception)
    assert message in str(done.exception) + done.output


def what_if(path, *options):
    return CliRunner().invoke(app, ["what-if", path, *options])


def grid(path, *options):
    done = what_if(path, *options, "--format", "json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_if_reports_links_and_ranks_with_gain(tmp_path):
    path = profile(tmp_path)
    axes = ("--vary", "link-gbps=0.01,100", "--vary", "inter-grad-comp-rank=0,4", "--vary", "grad_comp_rank=0,4")
    report = grid(path, *axes)
    rows = {(row["link_gbps"], row["boundary_rank"], row["replica_rank"]): row for row in report["rows"]}
    assert len(rows) == 8
    assert {row["gain"] for (_, *ranks), row in rows.items() if ranks == [0, 0]} == {1.0}
    assert rows[0.01, 4, 4]["gain"] > max(rows[0.01, 4, 0]["gain"], rows[0.01, 0, 4]["gain"], 1)
    assert rows[100, 4, 4]["gain"] < 1
    one = figures(path, *RATES[2:], *FLAGS[:4])
    same = rows[0.01, 4, 4]
    assert same["step_ns"] == one["step_with_tail_ns"]
    assert {key: same[key] for key in one["compression"] if key != "gain"} == {
        key: value for key, value in one["compression"].items() if key != "gain"
    }
    assert "rank 4 between stages, 4 between replicas: faster in some cells, up to 0.01 GB/s" in report["answer"]


def test_what_if_compression_combines_with_other_axes(tmp_path):
    path = profile(tmp_path)
    more = ("--grad-comp-rank", "4", "--selective-grad-comp-way", "auto", "--emb-comm-opt", "--use-error-feedback")
    report = grid(path, "--vary", "microbatches=2,8", "--vary", "inter-grad-comp-rank=2:4:2", *more)
    assert [(row["microbatches"], row["boundary_rank"]) for row in report["rows"]] == [
        (2, 2),
        (2, 4),
        (8, 2),
        (8, 4),
    ]
    assert all(set(row["ways_ns"]) == {"0", "1", "2"} for row in report["rows"])
    # The link of the profile is that of the replicas as well, unless they have a rate of their own
    own = grid(path, "--grad-comp-rank", "4", "--data-parallel-gbps", "100")["rows"][0]
    assert own["gain"] < grid(path, "--grad-comp-rank", "4")["rows"][0]["gain"]
    text = what_if(path, "--vary", "inter-grad-comp-rank=4,200").output
    assert "infeasible" in text
    assert "faster everywhere" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--vary", "link-gbps=0"), "--vary link-gbps: must be above 0"),
        (("--vary", "grad-comp-rank=-1"), "ranks must not be negative"),
        (("--vary", "grad-comp-rank=1.5"), "must be integers"),
        (("--grad-comp-rank", "4", "--front"), "no grid with compression"),
        (("--vary", "rank=1"), "must be NAME=VALUES, with NAME one of"),
    ],
)
def test_what_if_compression_invalid_options_are_refused(tmp_path, options, message):
    done = what_if(profile(tmp_path), *options)
    assert message in str(done.exception) + done.output
