"""Each technique that changes the model, from the command line: stop, resume elsewhere, verify."""

from __future__ import annotations

import pytest

from dynmo_balance.cli import main as plan_main
from tests.distributed.whole_runs import arguments, lines, run_command, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

SHORT = {"train_iters": "12", "eval_interval": "12"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("techniques")
    return write_data(folder / "data")


@pytest.mark.parametrize("text", ["", "[]", '{"thresholds": {}}', '{"thresholds": {"csr": "x"}}'])
def test_invalid_sparse_table_is_an_error(data, tmp_path, text):
    (tmp_path / "table.json").write_text(text)
    line = arguments(data, tmp_path / "run", sparse_table=str(tmp_path / "table.json"))
    [(code, talk)] = run_workers(run_command, 1, line, joins=False)
    assert code == 2
    assert "--sparse-table" in talk
    assert "Traceback" not in talk


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
