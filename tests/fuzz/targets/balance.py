"""Parsers of ``dynmo_balance``."""

# Seeds are lines as other programs write them.
# ruff: noqa: E501
from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target, bytes_target, file_target, fixtures, text_target
from tests.fuzz.targets.common import click_command, command_target, document_targets
from tests.paths import CONTRACTS, ROOT

P = "dynmo_balance"
PLANS = fixtures(CONTRACTS, "plan/valid/*.json")
PROFILES = fixtures(CONTRACTS, "profile/valid/*.jsonl")
PROFILE = CONTRACTS / "profile" / "valid" / "steps.jsonl"
CONFIGS = [
    {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000, "n_positions": 64},
    {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "hidden_act": "silu",
    },
    {
        "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "vocab_size": 1000, "num_key_value_heads": 2, "intermediate_size": 128, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "sliding_window": None,
    },
    {
        "model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000,
        "intermediate_size": 128, "max_position_embeddings": 64, "type_vocab_size": 2,
    },
    {
        "model_type": "t5", "num_layers": 2, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 1000,
        "relative_attention_num_buckets": 32,
    },
    {
        "format": "dynmo.run",
        "config": {
            "model": {"family": "gpt", "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
            "data": {"vocab_size": 1000, "make_vocab_size_divisible_by": 128},
        },
    },
]  # fmt: skip


@cache
def _run_inputs() -> tuple[bytes, Any, Any]:
    """Line, header and modelled costs of a profile."""
    from dynmo_balance.costs.analytic import costs_of_header
    from dynmo_balance.costs.devices import load_device
    from dynmo_balance.formats.profile import read_profile

    header = read_profile(PROFILE)[0].header
    costs = costs_of_header(header, load_device("h100"), "float32", "none", fused_attention=False)
    return PROFILE.read_bytes().split(b"\n")[0], header, costs


def _import(kind: str) -> Any:
    return lambda read, path: read(kind, path, *_run_inputs())


def _trace(_folder: Path) -> list[bytes]:
    _, header, _ = _run_inputs()
    events = [
        {"ph": "X", "name": f"{item.name}.{kind}", "ts": 10.0 * at, "dur": 5.5, "tid": 1}
        for at, item in enumerate(header.items)
        for kind in ("forward", "backward")
    ]
    modules: list[dict[str, Any]] = [{"ph": "X", "name": "nn.Module: GPT_0", "ts": 0, "dur": 100, "tid": 1, "pid": 1}]
    for layer in range(4):
        at = 10 + 20 * layer
        modules.append({"ph": "X", "name": f"nn.Module: Block_{layer}", "ts": at, "dur": 18, "tid": 1, "pid": 1})
        call = {"Sequence number": layer, "External id": layer}
        modules.append({"ph": "X", "name": "aten::mm", "ts": at + 1, "dur": 9, "tid": 1, "pid": 1, "args": call})
        name = "autograd::engine::evaluate_function: MmBackward0"
        modules.append({"ph": "X", "name": name, "ts": 200 - at, "dur": 9, "tid": 2, "pid": 1, "args": call})
    kernels = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 12, "dur": 1, "tid": 1, "args": {"correlation": 42}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 15, "dur": 4, "tid": 7, "args": {"correlation": 42}},
    ]  # fmt: skip
    documents: list[Any] = [
        events,
        {"traceEvents": events},
        {"traceEvents": modules},
        {"traceEvents": modules + kernels},
    ]
    return [json.dumps(document).encode() for document in documents]


MEGATRON_LOG = """ iteration        1/      10 | elapsed time per iteration (ms): 123.4 |
    forward-compute ......: (10.11, 20.22)
    backward-compute .....: (30.33, 40.44)
 iteration        2/      10 | elapsed time per iteration (ms): 125.0 |
    forward-compute:
     rank  0: 10.50
     rank  1: 11.00
    backward-compute:
     rank  0: 20.50
     rank  1: 21.00
"""
DEEPSPEED_LOG = """[2024-01-01 00:00:00] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd_microstep: 10.50 | bwd_microstep: 20.50 | x
[2024-01-01 00:00:00] [INFO] [logging.py:96:log_dist] [Rank 1] time (ms) | fwd_microstep: 10.50 | bwd_microstep: 20.50 | x
"""


def _follow(read: Any, path: Path) -> None:
    follower = read(path)
    follower.poll()
    follower.poll()


def _parse_lines(read: Any, path: Path) -> None:
    from dynmo_balance._common.document import complete_lines

    parser = read()
    for line in complete_lines(path.read_bytes()):
        parser.parse(line)


EXPERT_PLAN = {
    "format": "dynmo.expert_plan", "version": 1, "written_by": "test", "created_utc": "2026-01-01T00:00:00Z",
    "run_id": "r", "read_to_step": 3, "num_ranks": 2, "slots_per_rank": 2, "num_nodes": 1, "num_groups": 1,
    "shares": "free",
    "layers": [
        {
            "item": "layers.0.mlp", "tokens": [6, 2, 4],
            "ranks": [
                [{"expert": 0, "tokens": 5}, {"expert": 1, "tokens": 2}],
                [{"expert": 0, "tokens": 1}, {"expert": 2, "tokens": 4}],
            ],
            "max_tokens_before": 8, "max_tokens": 7, "lower_bound_tokens": 6, "optimal": False,
            "moves": [{"expert": 0, "from_rank": 0, "to_rank": 1, "bytes": 100}],
        }
    ],
    "migration": {"bytes": 100, "max_rank_bytes": 100, "pause_ns": None}, "reason": "one expert moves",
}  # fmt: skip


def _expert_profiles(_folder: Path) -> list[bytes]:
    """A profile with tokens per expert."""
    header, *steps = (json.loads(line) for line in PROFILE.read_bytes().splitlines())
    tokens = {item["name"]: [3, 1, 0, 2] for item in header["items"] if item["name"].endswith("mlp")}
    tokens = tokens or {header["items"][1]["name"]: [3, 1, 0, 2]}
    lines = [step | {"x_counts": {"expert_tokens": tokens}} if step["record"] == "step" else step for step in steps]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in (header, *lines))]


def _vary(parse: Any, text: str) -> None:
    from dynmo_balance.analysis.sweep_axes import Axis

    parse(text, {"microbatches": Axis(integers=True), "x-y": Axis(), "names": Axis(choices=("a", "b"))})


def _loads(read: Any, path: Path) -> None:
    from dynmo_balance.formats.profile import read_profile

    read(read_profile(path), str(path))


def _run_folder(data: bytes, folder: Path, name: str) -> Path:
    run = folder / "run"
    if not run.exists():
        (run / "plans").mkdir(parents=True)
        shutil.copy(PROFILE, run / "profile.jsonl")
        shutil.copy(CONTRACTS / "plan" / "valid" / "initial.json", run / "plans" / "plan-000000.json")
        for line in ("metrics.jsonl", "events.jsonl"):
            (run / line).write_text(RUN_LINES[line], encoding="utf-8")
    (run / name).write_bytes(data)
    return run


RUN_LINES = {
    "metrics.jsonl": '{"step": 1, "loss": 5.5, "lr": 0.001, "grad_norm": 1.5, "step_s": 0.5, "tokens_per_s": 100.0}\n'
    '{"step": 2, "loss": 5.4, "lr": 0.001, "grad_norm": 1.4, "step_s": 0.5, "valid_loss": 5.6, "loss_spike": true}\n',
    "events.jsonl": '{"kind": "plan_applied", "time_utc": "2026-01-01T00:00:00Z", "step": 2, "plan_id": 1, "bytes": 100,'
    ' "pause_ns": 1000, "layers_moved": 1}\n'
    '{"kind": "checkpoint", "time_utc": "2026-01-01T00:00:00Z", "step": 2}\n'
    '{"kind": "incident", "time_utc": "2026-01-01T00:00:01Z", "step": 2, "cause": "x", "restart": 1}\n',
}


def _history(name: str) -> Target:
    def run(data: bytes, folder: Path) -> None:
        from dynmo_balance.inputs.run_history import read_history

        read_history(_run_folder(data, folder, name))

    def seeds(folder: Path) -> list[bytes]:
        if name in RUN_LINES:
            return [RUN_LINES[name].encode()]
        return (PLANS if name.endswith(".json") else PROFILES)(folder)

    label = name.rpartition("/")[2].partition(".")[0]
    return Target(
        name=f"balance.inputs.run_history.read_history-{label}",
        run=run,
        seeds=seeds,
        readers=(f"{P}.inputs.run_history:read_history", f"{P}.inputs.run_history:read_plans"),
    )


OPTIONS = {
    "partition": "profile.jsonl --balancer exact --format json --window 20",
    "simulate": "profile.jsonl --plan plan.json --schedule 1f1b --format json",
    "what-if": "profile.jsonl --vary workers=2:8:2 --vary microbatches=4,8",
    "watch": "run --window 10",
    "verify": "plan.json --profile profile.jsonl --memory 80GiB",
}

TARGETS = [
    *document_targets(P),
    file_target(f"{P}.formats.plan:read_plan", PLANS, file="plan.json"),
    file_target(f"{P}.formats.profile:read_profile", PROFILES, file="profile.jsonl"),
    file_target(f"{P}.formats.profile:LineParser", PROFILES, file="profile.jsonl", call=_parse_lines),
    file_target(f"{P}.online.profile_follower:ProfileFollower", PROFILES, file="profile.jsonl", call=_follow),
    file_target(
        f"{P}.formats.expert_plan:read_expert_plan",
        lambda _folder: [json.dumps(EXPERT_PLAN).encode()],
        file="experts.json",
    ),
    file_target(
        f"{P}.formats.operator_costs:read_operator_costs",
        fixtures(ROOT, "dynmo_balance/recipes/costs/*.json", "tests/contracts/fixtures/operator_costs/valid/*.json"),
        file="costs.json",
    ),
    file_target(f"{P}.costs.expert_loads:expert_loads", _expert_profiles, file="profile.jsonl", call=_loads),
    file_target(f"{P}.inputs.profile_source:load", PROFILES, file="profile.jsonl"),
    file_target(
        f"{P}.inputs.model_config:load_spec",
        lambda _folder: [json.dumps(config).encode() for config in CONFIGS],
        file="config.json",
    ),
    file_target(
        f"{P}.recipes.recipe:load_recipe",
        fixtures(ROOT, "dynmo_balance/recipes/*.toml"),
        file="recipe.toml",
        call=lambda read, path: read(str(path)),
    ),
    file_target(
        f"{P}.costs.devices:load_device",
        lambda _folder: [
            b'name = "x"\nkind = "cuda"\nmemory_bytes = 80000000000\nmemory_bandwidth_bytes_per_s = 3e12\nnode_size = 8\n'
            b"flops_per_s = { bfloat16 = 9e14, float32 = 6e13 }\nlink_bandwidth_bytes_per_s = 400000000000\n"
            b"link_latency_ns = 5000\nmax_efficiency = 0.5\noperation_ns = 5000\n"
        ],
        file="device.toml",
        call=lambda read, path: read(str(path)),
    ),
    file_target(
        f"{P}.inputs.import_profile:import_lines",
        _trace,
        file="trace.json",
        label="trace",
        call=_import("chrome-trace"),
    ),
    file_target(
        f"{P}.inputs.import_profile:import_lines",
        lambda _folder: [MEGATRON_LOG.encode()],
        file="log",
        label="megatron",
        call=_import("megatron-log"),
    ),
    file_target(
        f"{P}.inputs.import_profile:import_lines",
        lambda _folder: [DEEPSPEED_LOG.encode()],
        file="log",
        label="deepspeed",
        call=_import("deepspeed-log"),
    ),
    *(_history(name) for name in ("profile.jsonl", "metrics.jsonl", "events.jsonl", "plans/plan-000001.json")),
    text_target(f"{P}.inputs.problem_from_options:parse_bytes", ["80GiB", "1.5 GB", "1024", "16MiB"]),
    text_target(
        f"{P}.analysis.sweep_axes:parse_axis",
        ["2:8:2", "1,2,4", "0.1:0.9:0.1", "5"],
        call=lambda parse, text: parse(text, False),
    ),
    text_target(f"{P}.analysis.sweep_axes:parse_vary", ["microbatches=4,8", "x-y=2:8:2", "names=a,b"], call=_vary),
    bytes_target(
        f"{P}.formats.profile:parse_profile",
        PROFILES,
        call=lambda parse, data: parse(data.splitlines(keepends=True), "profile"),
    ),
    *(command_target(P, click_command(f"{P}.cli", "app", name), name, [line]) for name, line in OPTIONS.items()),
]
