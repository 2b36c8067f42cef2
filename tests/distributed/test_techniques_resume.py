"""Each technique that changes the model, from the command line: stop, resume elsewhere, verify."""

from __future__ import annotations

import pytest

from dynmo_balance.cli import main as plan_main
from dynmo_ckpt.cli import main as ckpt_main
from tests.distributed.whole_runs import OPTIONS, arguments, figures, lines, run_command, tensors, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SHORT = {"train_iters": "12", "eval_interval": "12"}
TECHNIQUES = {
    "depths": {"mod_capacity": "0.5"},
    "exits": {"early_exit_layers": "0,2", "early_exit_threshold": "0.003"},
    "structured pruning": {"pruning_mode": "structured", "final_sparsity": "0.5", "sparse_table": "table.json"},
    "2:4, saturation and expert choice": {
        **{"pruning_mode": "2:4", "final_sparsity": "0.5", "num_experts": "4", "moe_routing": "expert-choice"},
        **{"early_exit_layers": "1", "early_exit_measure": "saturation", "early_exit_threshold": "0.98"},
    },
    "blocks and balanced experts": {
        **{"pruning_mode": "block", "num_experts": "4", "moe_routing": "balanced", "moe_router_topk": "1"},
    },
    "experts and a cached front": {"num_experts": "4", "freeze_cache_activations": "8"},
    "biases of experts": {
        **{"num_experts": "4", "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": "0.01"},
        **{"moe_router_load_balancing_type": "global_aux_loss seq_aux_loss", "moe_aux_loss_coeff": "0.01 0.001"},
    },
    "adaptive freezing": {
        "freeze_interval": "1",
        "freeze_window": "2",
        "freeze_tolerance": "0.9",
        "freeze_patience": "1",
    },
    "adaptive freezing with biases of experts": {
        **{"freeze_interval": "1", "freeze_window": "2", "freeze_tolerance": "0.9", "freeze_patience": "2"},
        **{"num_experts": "4", "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": "0.1"},
    },
    "sparse": {"sparse_attention_buckets": "4", "sparse_attention_block": "8"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("techniques")
    return write_data(folder / "data")


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_resume_on_other_workers_has_the_same_bits(data, tmp_path, technique, monkeypatch, capsys):
    options = SHORT | TECHNIQUES[technique]
    if technique.startswith("adaptive freezing"):
        monkeypatch.delitem(OPTIONS, "freeze-schedule")
    if "sparse_table" in options:
        options["sparse_table"] = str(tmp_path / "table.json")
        (tmp_path / "table.json").write_text('{"thresholds": {"csr": 0.8, "csr 128x32": 0.4}}')
    flags = {
        "sparse": ("--sparse-attention",),
        "biases of experts": ("--moe-router-enable-expert-bias",),
        "adaptive freezing": ("--freeze-adaptive",),
        "adaptive freezing with biases of experts": ("--freeze-adaptive", "--moe-router-enable-expert-bias"),
        "experts and a cached front": ("--untie-embeddings-and-output-weights",),
    }
    extra = flags.get(technique, ())
    train(data, tmp_path / "whole", 1, *extra, **options)
    train(data, tmp_path / "part", 2, *extra, **options, exit_interval="5")
    options.pop("sparse_table", None)  # the checkpoint has it
    train(data, tmp_path / "part", 1, *extra, **options, load=str(tmp_path / "part"))
    if "biases" in technique and "adaptive" in technique:
        assert any(name.endswith(".expert_bias.reference") for name in tensors(tmp_path / "part", 5))
    assert figures(tmp_path / "part") == figures(tmp_path / "whole")
    assert tensors(tmp_path / "part", 12) == tensors(tmp_path / "whole", 12)
    step = tmp_path / "part" / "checkpoints" / "step-00000012"
    monkeypatch.setattr("sys.argv", ["dynmo-ckpt", "verify", str(step), "--level", "full"])
    with pytest.raises(SystemExit) as stop:
        ckpt_main()
    assert stop.value.code == 0, capsys.readouterr()


@pytest.mark.parametrize("text", ["", "[]", '{"thresholds": {}}', '{"thresholds": {"csr": "x"}}'])
def test_invalid_sparse_table_is_an_error(data, tmp_path, text):
    (tmp_path / "table.json").write_text(text)
    line = arguments(data, tmp_path / "run", sparse_table=str(tmp_path / "table.json"))
    [(code, talk)] = run_workers(run_command, 1, line, joins=False)
    assert code == 2
    assert "--sparse-table" in talk
    assert "Traceback" not in talk


def test_checkpoint_of_another_technique_is_an_error(data, tmp_path):
    train(data, tmp_path / "run", 1, **SHORT, mod_capacity="0.5", exit_interval="2")
    line = arguments(data, tmp_path / "other", **SHORT, mod_capacity="0.25", load=str(tmp_path / "run"))
    [(code, talk)] = run_workers(run_command, 1, line, joins=False)
    assert code == 2
    assert "x_dynamic" in talk


def test_profile_has_the_tokens_of_each_expert(data, tmp_path, monkeypatch, capsys):
    options = SHORT | {"num_experts": "4", "moe_router_topk": "1", "exit_interval": "4"}
    train(data, tmp_path / "run", 1, "--moe-router-pre-softmax", **options)
    steps = [line for line in lines(tmp_path / "run" / "profile.jsonl") if line["record"] == "step"]
    tokens = steps[-1]["x_counts"]["expert_tokens"]
    assert set(tokens) == {f"layers.{n}.mlp" for n in range(4)}
    assert all(sum(counts) == 64 for counts in tokens.values()), "2 samples of 32 tokens, one expert each"
    monkeypatch.setattr(
        "sys.argv", ["dynmo-plan", "report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]
    )
    with pytest.raises(SystemExit) as stop:
        plan_main()
    assert stop.value.code == 0, capsys.readouterr()
