"""The report: whole, self-contained, and drawn by a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from dynmo_balance.formats.profile import read_profile
from dynmo_balance.inputs.problem_from_options import ProblemOptions, make_problem
from dynmo_balance.inputs.profile_source import load
from dynmo_balance.inputs.run_history import read_history
from dynmo_balance.output.html_report import html
from dynmo_balance.output.svg import line_chart
from tests.paths import CONTRACTS

VOID = {"meta", "rect", "line"}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "plans").mkdir()
    shutil.copy(CONTRACTS / "profile/valid/events.jsonl", tmp_path / "profile.jsonl")
    for number, name in ((0, "initial"), (1, "move")):
        shutil.copy(CONTRACTS / f"plan/valid/{name}.json", tmp_path / f"plans/plan-{number:06d}.json")
    return tmp_path


@pytest.fixture
def page(run):
    return html(read_history(run), make_problem(load(run), ProblemOptions()))


class Balance(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.count = [], {}

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_self_contained(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.count["svg"] == 4  # steps, loads, two timelines
    assert not re.search(r'(src|href)="', page)
    assert "breaks even after 5 steps" in page
    assert "+20.0%" in page  # predicted


def test_html_shows_measured_and_predicted_gain(run):
    lines = (run / "profile.jsonl").read_text().splitlines()
    newest = json.loads(lines[-1])
    newest["step_ns"] = 30_000_000
    (run / "profile.jsonl").write_text("\n".join([*lines[:-1], json.dumps(newest)]) + "\n")
    plan_history = read_history(run).moves[0]
    assert (plan_history.before_ns, plan_history.after_ns) == (40_000_000, 30_000_000)
    assert plan_history.realized == pytest.approx(0.25)


def test_read_history_loads_follow_the_active_plan(run):
    history = read_history(run)
    assert len(history.loads) == len(read_profile(run / "profile.jsonl")[0].steps)
    assert history.loads[-1][0] == history.loads[-2][0] + 1_500_000  # layer 2 moved to stage 0


def test_html_escapes_text_of_documents(run):
    plan = json.loads((run / "plans/plan-000001.json").read_text())
    plan["reason"] = "<script>alert(1)</script>"
    (run / "plans/plan-000001.json").write_text(json.dumps(plan))
    assert "<script>" not in html(read_history(run), None)


def test_line_chart_long_run_is_downsampled():
    chart = line_chart("t", list(range(5000)), [("a", [1.0] * 5000)], "ms")
    assert len(re.search(r'points="([^"]*)"', chart)[1].split()) == 600


def test_html_renders_in_a_browser(page, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    file = tmp_path / "report.html"
    script = "document.title=[...document.querySelectorAll('svg')].map(s=>Math.round(s.getBoundingClientRect().width))"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}/user"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=600, check=True)
    widths = [int(width) for width in re.search(r"<title>([\d,]+)</title>", done.stdout)[1].split(",")]
    assert len(widths) == 4
    assert min(widths) > 500
