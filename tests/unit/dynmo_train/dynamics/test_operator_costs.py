"""Costs of operators: what each case computes, what is timed, and the command's table."""

from __future__ import annotations

import dataclasses
import json

import jsonschema
import pytest
import torch
from typer.testing import CliRunner

from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app, measure
from dynmo_train.dynamics import operator_costs
from dynmo_train.dynamics.operator_costs import CASES, OperatorCosts, OperatorShape
from dynmo_train.models.layer_list import masks_of
from dynmo_train.models.techniques.early_exit import Exit
from tests.paths import ROOT

SHAPE = OperatorShape(
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    vocab_size=50,
    num_experts=4,
    micro_batch_size=2,
    sequence_lengths=(64,),
)
COSTS = OperatorCosts(SHAPE, 64, torch.device("cpu"))
SCHEMA = json.loads((ROOT / "dynmo_train" / "formats" / "operator_costs.schema.json").read_text())
COMMAND = ["measure-costs", "--hidden-size", "32", "--num-attention-heads", "4", "--vocab-size", "50", "--repeats", "1"]


@pytest.fixture
def clock(monkeypatch):
    """Each timed call takes one millisecond."""
    monkeypatch.setattr(operator_costs, "timed", lambda _device, run: (0.001, run()))


@pytest.mark.parametrize("name", CASES)
def test_case_computes_the_stream_with_gradients(name):
    for case in COSTS.cases((name,)):
        x = torch.randn(2, 64, 32, requires_grad=True)
        outputs = case.operator.call(x)
        if case.operator.name != "head":
            assert outputs[0].shape == x.shape
        sum(each.sum() for each in outputs).backward()
        assert case.operator.name == "embedding" or x.grad.isfinite().all()
        assert any(p.grad is not None for p in case.operator.module.parameters()), case


def test_pruned_cases_have_the_stated_sparsity():
    for case in COSTS.cases(("pruned",)):
        layers = masks_of("", case.operator.module).values()
        assert layers
        for layer in layers:
            # Whole blocks of 32 x 32 weights are pruned.
            unit = 32 * 32 / layer.weight.numel() if case.setting["form"] == "block" else 0.0
            assert layer.sparsity == pytest.approx(case.setting["sparsity"], abs=max(0.16, 0.51 * unit)), case.setting
            assert layer.form == case.setting["form"] or not layer.is_dense
    assert {case.setting["form"] for case in COSTS.cases(("pruned",))} == {"csr", "block", "structured"}


def test_pruned_cases_skip_formats_that_no_weight_fits():
    costs = OperatorCosts(dataclasses.replace(SHAPE, hidden_size=36), 64, torch.device("cpu"))
    assert {case.setting["form"] for case in costs.cases(("pruned",))} == {"csr", "structured"}


def test_exited_case_computes_the_active_tokens_only():
    for case in COSTS.cases(("exited",)):
        rows = []
        for layer in masks_of("", case.operator.module).values():
            layer.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(given[0].shape[1]))
        case.operator.call(torch.randn(2, 64, 32))
        assert set(rows) == {round(case.setting["active_share"] * 64)}


def test_exit_case_adds_the_loss_of_the_exit():
    for case in COSTS.cases(("exit",)):
        assert len(case.operator.call(torch.randn(2, 64, 32))) == 2
        assert len(case.dense.call(torch.randn(2, 64, 32))) == 1


def test_exit_cases_compute_the_stated_part_of_the_logits():
    settings = {}
    for case in COSTS.cases(("exit",)):
        [an_exit] = [module for module in case.operator.module.modules() if isinstance(module, Exit)]
        stated = an_exit.settings
        assert (stated.measure, stated.token_share) == (case.setting["measure"], case.setting["loss_token_share"])
        assert stated.vocabulary_samples in (0, case.setting["loss_vocabulary"])
        settings[tuple(case.setting.values())] = stated
    assert list(settings) == [
        (measure, *loss) for measure in ("softmax", "saturation", "classifier") for loss in ((1.0, 50), (0.125, 25))
    ]


def test_measured_parts_are_forward_and_both_backwards(clock):
    [attention, *_] = COSTS.cases(("dense",))
    cost = COSTS.measure(attention, 2)
    assert (cost.times.forward_ns, cost.times.backward_input_ns, cost.times.backward_weight_ns) == (1_000_000,) * 2 + (
        0,
    )
    assert cost.spread == 0.0
    [frozen, _] = COSTS.cases(("frozen",))
    cost = COSTS.measure(frozen, 1)
    assert (cost.times.total_ns, cost.dense.total_ns) == (1_000_000, 2_000_000)


def test_command_writes_a_row_for_each_case(tmp_path):
    path = tmp_path / "costs.json"
    done = CliRunner().invoke(
        app, [*COMMAND, "--seq-lengths", "32,64", "--cases", "dense,experts", "--output", str(path)]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["device"]["name"]
    rows = [(row["case"], row["operator"], row["sequence_length"]) for row in document["rows"]]
    layers = [("dense", name) for name in ("attention", "mlp", "layer", "head", "embedding")] + [("experts", "mlp")] * 2
    assert rows == [(*each, tokens) for tokens in (32, 64) for each in layers]
    assert all(row["forward_ns"] > 0 and row["dense"]["forward_ns"] > 0 for row in document["rows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "dense,magic"], "'magic' is not a case"),
        (["--seq-lengths", "64,x"], "must be positive numbers"),
        (["--num-attention-heads", "5"], "must be a multiple"),
    ],
)
def test_command_bad_options_are_refused(options, message):
    done = CliRunner().invoke(app, [*COMMAND, *options])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_command_knows_the_cases_without_torch():
    assert measure.CASES == CASES
