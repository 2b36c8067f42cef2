"""The analytic cost model against published figures and hand-computed numbers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dynmo_balance.analytic import costs_of_header
from dynmo_balance.build import BuildOptions, build_costs, build_header, header_of
from dynmo_balance.devices import PRESETS, load_device
from dynmo_balance.errors import UsageError
from dynmo_balance.formats.profile import read_profile
from dynmo_balance.modelspec import from_config
from dynmo_balance.trajectories import TECHNIQUES, Script, moments

GPT = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 100}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
OPTIONS = BuildOptions(workers=2, microbatches=4, micro_batch_size=2)


def built(config, options=OPTIONS, device="h100"):
    spec = from_config(config, "config.json")
    document = build_header(spec, PRESETS[device], options, "test")
    header = header_of(document)
    return spec, header, build_costs(spec, header, PRESETS[device], options)


def test_layers_and_sizes_of_gpt():
    _, header, costs = built(GPT)
    assert [item.name for item in header.items][:4] == [
        "embedding",
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
    ]
    assert header.items[1].param_count == 4 * 64 * 64 + 2 * 64
    assert header.items[2].param_count == 8 * 64 * 64 + 2 * 64
    assert (header.items[-1].tied_to, header.items[-1].optimizer_bytes) == ("embedding", 0)
    assert all(time > 0 for time in costs.forward_ns)


def test_grouped_queries_and_gates_of_llama():
    _, header, _ = built(LLAMA)
    assert header.items[1].param_count == 64 * 8 * (2 * 8 + 2 * 2) + 128
    assert header.items[2].param_count == 3 * 64 * 160 + 128
    assert header.items[-1].tied_to is None


def test_experts_weigh_all_and_cost_two():
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    _, header, costs = built({**mixtral, "hidden_size": 1024, "intermediate_size": 4096})
    _, dense, dense_costs = built({**LLAMA, "hidden_size": 1024, "intermediate_size": 4096})
    assert header.items[2].param_count > 7.9 * dense.items[2].param_count
    assert 1 < costs.forward_ns[2] / dense_costs.forward_ns[2] < 2.1


def test_encoder_and_decoder_of_t5():
    config = {
        "model_type": "t5",
        "num_layers": 2,
        "num_decoder_layers": 3,
        "d_model": 64,
        "num_heads": 4,
        "d_kv": 16,
        "d_ff": 128,
        "vocab_size": 100,
    }
    _, header, _ = built(config)
    names = [item.name for item in header.items]
    assert names.count("decoder.embedding") == 1
    assert "decoder.layers.2.cross_attention" in names
    assert "encoder.layers.1.mlp" in names


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "pipeline", "interleave", "batch", "gib"),
    [
        (6144, 64, 48, 1, 1, 4, 59.3),
        (12288, 96, 96, 8, 3, 1, 66.8),
        (20480, 128, 105, 35, 3, 1, 114.0),
        (25600, 160, 128, 64, 1, 1, 131.3),
    ],
)
def test_activations_of_published_models(hidden, heads, layers, pipeline, interleave, batch, gib):
    # Korthikanti et al. 2022 (arXiv 2205.05198), table 3 and figure 1: activations of the first worker of 1F1B without
    # recomputation or sequence parallelism, 8 tensor-parallel ranks, sequence 2048. It holds as many microbatches as
    # there are stages, so all layers' worth of them, and 1 + (p - 1) / (p m) of that when interleaved.
    config = {**GPT, "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048, "vocab_size": 51200}
    _, header, costs = built(config, BuildOptions(micro_batch_size=batch, tensor_parallel=8))
    sizes = zip(costs.activation_bytes, header.items, strict=True)
    blocks = sum(size for size, item in sizes if item.kind in ("attention", "mlp"))
    factor = 1 + (pipeline - 1) / (pipeline * interleave) if interleave > 1 else 1
    assert blocks * factor / 2**30 == pytest.approx(gib, rel=0.02)


def test_recomputation_trades_memory_for_time():
    none, selective, full = (
        built(GPT, BuildOptions(micro_batch_size=2, recompute=kind))[2] for kind in ("none", "selective", "full")
    )
    assert full.activation_bytes[1] < selective.activation_bytes[1] < none.activation_bytes[1]
    assert full.backward_input_ns[1] > selective.backward_input_ns[1] > none.backward_input_ns[1]


def test_a_dry_run_header_costs_as_the_built_profile():
    _, header, costs = built({**GPT, "n_embd": 1024, "n_head": 16, "n_positions": 512})
    computed = costs_of_header(header, PRESETS["h100"], "bfloat16")
    assert sum(computed.total_ns) == pytest.approx(sum(costs.total_ns), rel=0.2)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_trajectories_are_repeatable_and_change_what_they_say(technique):
    _, header, dense = built(GPT)
    script = Script(steps=40, strength=0.8, noise=0.01, seed=3)
    one, two = list(moments(technique, header, dense, script)), list(moments(technique, header, dense, script))
    assert [m.costs for m in one] == [m.costs for m in two]
    quiet = [m.costs.total_ns for m in moments(technique, header, dense, Script(steps=40, strength=0.8))]
    assert (len(set(quiet)) == 1) == (technique == "static")
    kinds = {m.event["kind"] for m in one if m.event}
    assert kinds == {"pruning": {"pruned"}, "freezing": {"frozen"}}.get(technique, set())


def test_bad_shapes_are_refused():
    with pytest.raises(UsageError, match=r"missing hidden .*heads"):
        from_config({"n_layer": 2, "vocab_size": 3}, "config.json")
    with pytest.raises(UsageError, match="4 heads cannot be shared by 3"):
        built(GPT, BuildOptions(tensor_parallel=3))
    with pytest.raises(UsageError, match="unknown device"):
        load_device("abacus")


def test_a_device_from_a_file(tmp_path):
    file = tmp_path / "box.toml"
    file.write_text(
        'kind = "cpu"\nmemory_bandwidth_bytes_per_s = 1e9\nmemory_bytes = 1000\nlink_bandwidth_bytes_per_s = 5\n'
        "link_latency_ns = 1\n[flops_per_s]\nfloat32 = 1e9\n"
    )
    assert load_device(str(file)).name == "box"
    file.write_text('colour = "red"\n')
    with pytest.raises(UsageError, match="unknown fields colour"):
        load_device(str(file))


def test_profile_commands(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GPT))
    output = tmp_path / "run.jsonl"

    def plan(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "dynmo_balance", *map(str, arguments)], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    build = ("profile", "build", config, "-o", output, "--technique", "pruning", "--steps", 20, "--workers", 2)
    assert plan(*build)[0] == 0
    assert len(read_profile(output)[0].steps) == 20
    assert plan(*build)[0] == 2  # never overwritten
    code, out, _ = plan("profile", "check", output)
    assert (code, out) == (0, f"{output}: 1 segments, 20 steps, 0 warnings\n")
    code, out, _ = plan("profile", "show", output, "--width", 20)
    assert [line.split()[0] for line in out.splitlines()] == [
        item.name for item in read_profile(output)[0].header.items
    ]
    code, out, _ = plan("profile", "diff", output, output, "--format", "json")
    assert all(row["before_ns"] == row["after_ns"] for row in json.loads(out))


def test_another_unit_is_noticed(tmp_path, capfd):
    from dynmo_balance.inspect import warnings_of

    config = tmp_path / "run.jsonl"
    _, header, _ = built(GPT)
    document = build_header(from_config(GPT, "c"), PRESETS["h100"], OPTIONS, "test")
    n = len(header.items)
    step = {"record": "step", "step": 1, "plan_id": 0, "step_ns": 10, "forward_ns": [7] * n, "backward_ns": [0] * n}
    step |= {"activation_bytes": [0] * n, "busy_ns": [50, 50], "peak_memory_bytes": [0, 0]}
    config.write_text(json.dumps(document) + "\n" + json.dumps(step) + "\n")
    found = warnings_of(read_profile(config))
    assert {warning.kind for warning in found} == {"unit", "value"}
    assert len(found) == n + 1
