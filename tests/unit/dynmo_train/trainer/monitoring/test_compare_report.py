"""Two runs on one page: equal colors, both names, and sentences for what is missing."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from dynmo_train.cli import app
from dynmo_train.trainer.monitoring.compare_report import compare_page, read_run_data
from dynmo_train.trainer.monitoring.compare_runs import compare_runs
from tests.browser import browser
from tests.pages import data_of, well_formed
from tests.paths import CONTRACTS


def make_run(folder, *, moved):
    (folder / "plans").mkdir(parents=True)
    lines = (CONTRACTS / "profile/valid/events.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    shutil.copy(CONTRACTS / "plan/valid/initial.json", folder / "plans/plan-000000.json")
    if moved:
        shutil.copy(CONTRACTS / "plan/valid/move.json", folder / "plans/plan-000001.json")
    else:
        records = [record for record in records if not record["record"].startswith("plan_")]
        for record in records:
            if record["record"] == "step":
                record["plan_id"] = 0
    (folder / "profile.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    steps = [record["step"] for record in records if record["record"] == "step"]
    metrics = [
        {"step": step, "lm_loss": 9 - step / 10, "grad_norm": 1.0, "step_ns": 40_000_000 - 10**7 * moved, "tokens": 64}
        for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder


@pytest.fixture
def runs(tmp_path):
    return make_run(tmp_path / "static", moved=False), make_run(tmp_path / "balanced", moved=True)


def page_of(runs):
    return compare_page(*runs, compare_runs(*runs)).html()


def test_page_shows_both_runs_in_equal_colors(runs):
    page = page_of(runs)
    assert well_formed(page)
    data = data_of(page)
    assert data["layers-first"]["top"] == data["layers-second"]["top"]
    assert [len(data[name]["partitions"]) for name in ("layers-first", "layers-second")] == [1, 2]
    assert [series["name"] for series in data["loss"]["series"]] == ["static: training loss", "balanced: training loss"]
    labels = [mark[2] for mark in data["step-time"]["marks"]]
    assert labels == ["frozen", "balanced: plan 1: 1 layer", "pruned"]  # what happened in both runs has one mark
    assert "equal" in page


def test_runs_of_the_same_name_have_different_labels(tmp_path):
    runs = make_run(tmp_path / "a/run", moved=False), make_run(tmp_path / "b/run", moved=True)
    names = [series["name"] for series in data_of(page_of(runs))["step-time"]["series"]]
    assert names == ["first", "second"]


def test_missing_profile_and_invalid_lines_are_named(runs):
    (runs[0] / "profile.jsonl").unlink()
    lines = (runs[1] / "profile.jsonl").read_text().splitlines()
    short = json.loads(lines[1])
    short["busy_ns"] = short["busy_ns"][:1]
    lines[1:2] = [json.dumps(short), "{", '{"record": "step"}']
    (runs[1] / "profile.jsonl").write_text("\n".join(lines) + "\n")
    assert len(read_run_data(runs[1]).profiled_ns) == 8
    page = page_of(runs)
    assert well_formed(page)
    assert "of static are missing" in page
    assert "balanced: 3 lines of its profile break a rule" in page


def test_compare_html_writes_the_page_and_keeps_the_table(runs, tmp_path):
    output = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "--html", str(output)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "losses bit-identical" in done.output
    assert output.read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.mark.complete
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [800, 1600])
def test_page_in_a_browser_has_no_clipped_text(window, runs, tmp_path, width, dark):
    (tmp_path / "both.html").write_text(page_of(runs))
    window.open(tmp_path / "both.html", width=width, dark=dark)
    assert window.errors == []
    assert len(window.requests) == 1
    assert window.problems() == []


@pytest.mark.complete
def test_page_of_unusual_runs_has_no_clipped_text(window, runs, tmp_path):
    first, second = (run.rename(run.with_name(f"<i>{at}" + "x" * 190)) for at, run in enumerate(runs))
    lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"lm_loss": None, "grad_norm": None} for line in lines]  # not finite
    (first / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step"')
    (second / "profile.jsonl").unlink()
    page = page_of((first, second))
    assert well_formed(page)
    assert "first at step 1" in page
    (tmp_path / "both.html").write_text(page)
    for width in (800, 1600):
        window.open(tmp_path / "both.html", width=width)
        assert window.errors == []
        assert window.problems() == []


@pytest.mark.complete
def test_hover_shows_the_values_of_both_runs(window, runs, tmp_path):
    (tmp_path / "both.html").write_text(page_of(runs))
    window.open(tmp_path / "both.html")
    x, y = window.center("#step-time .u-over")
    window.mouse("mouseMoved", x, y)
    window.frame()
    lines = window.evaluate("document.querySelector('#tip').innerText").split("\n")
    assert lines[1:3] == ["static\t40.0 ms", "balanced\t30.0 ms"]
    window.drag("#loss .u-over", 0.2, 0.6)
    views = window.evaluate("['loss', 'step-time', 'layers-second'].map((name) => dynmoCharts[name].view.join())")
    assert len(set(views)) == 1
    assert views[0] != window.evaluate("dynmoCharts.loss.range.join()")
