"""The report: whole and self-contained, with a sentence for missing data, and checked in a real browser."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from dynmo_balance.formats.profile import read_profile
from dynmo_balance.inputs.problem_from_options import ProblemOptions, make_problem
from dynmo_balance.inputs.run_history import read_history
from dynmo_balance.output.html_report import MAX_OPERATIONS, html, timeline_spec, trace
from dynmo_balance.schedules.registry import Kind
from dynmo_balance.simulation.operation_times import Span
from dynmo_balance.simulation.simulator import Timeline
from tests.browser import browser
from tests.pages import data_of, well_formed
from tests.paths import CONTRACTS


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "my-run"
    (folder / "plans").mkdir(parents=True)
    shutil.copy(CONTRACTS / "profile/valid/events.jsonl", folder / "profile.jsonl")
    for number, name in ((0, "initial"), (1, "move")):
        shutil.copy(CONTRACTS / f"plan/valid/{name}.json", folder / f"plans/plan-{number:06d}.json")
    steps = [step.step for step in read_profile(folder / "profile.jsonl")[0].steps]
    lines = [{"step": step, "lm_loss": 9 - step / 10, "step_ns": 40_000_000, "tokens": 64} for step in steps]
    lines.append({"step": steps[-1], "validation_loss": 8.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = {
        "config": {"training": {"train_iters": 1000}},
        "versions": {"dynmo": "0.1.0", "commit": "0123abc-dirty"},
    }
    (folder / "run.json").write_text(json.dumps(document))
    return folder


def page_of(run):
    history = read_history(run)
    return html(history, history.source and make_problem(history.source, ProblemOptions()))


@pytest.fixture
def page(run):
    return page_of(run)


def test_html_is_self_contained(page):
    assert well_formed(page)
    assert not re.search(r"(src|srcset|action)=|<link|@import|url\(", page.split("<script>")[0])
    assert re.findall(r'href="([^#"][^"]*)"', page) == ["https://ui.perfetto.dev"]  # followed by a click only
    assert list(data_of(page)) == ["loss", "layers", "loads", "bubble", "memory", "timeline-before", "timeline-after"]


def test_html_head_names_run_model_progress_and_commit(page):
    assert "<title>my-run · Run report</title>" in page
    assert "GPT · 4 layers" in page
    assert "of 1,000 steps; not finished when this page was written" in page
    assert "0.1.0 · 0123abc-dirty" in page


def test_html_shows_predicted_and_measured_gain(run):
    lines = (run / "profile.jsonl").read_text().splitlines()
    newest = json.loads(lines[-1])
    newest["step_ns"] = 30_000_000
    (run / "profile.jsonl").write_text("\n".join([*lines[:-1], json.dumps(newest)]) + "\n")
    plan_history = read_history(run).moves[0]
    assert (plan_history.before_ns, plan_history.after_ns) == (40_000_000, 30_000_000)
    assert plan_history.realized == pytest.approx(0.25)
    page = page_of(run)
    assert "+20.0 %" in page  # predicted
    assert "+25.0 %" in page  # measured
    assert "breaks even after 5 steps" in page


def test_read_history_loads_follow_the_active_plan(run):
    history = read_history(run)
    loads = history.data.loads.means()
    assert len(loads) == len(read_profile(run / "profile.jsonl")[0].steps)
    assert loads[-1][0] == loads[-2][0] + 1_500_000  # layer 2 moved to stage 0


def test_heat_map_has_the_boundaries_of_each_plan(page):
    spec = data_of(page)["layers"]
    before, after = spec["partitions"]
    assert before["to"] == after["from"]
    assert before["cuts"] != after["cuts"]
    assert [mark[1] for mark in spec["marks"]].count("migration") == 1


def test_html_escapes_hostile_text(run):
    hostile = "</script><script>alert(1)</script><!--&\u2028"
    plan = json.loads((run / "plans/plan-000001.json").read_text())
    plan["reason"] = hostile
    (run / "plans/plan-000001.json").write_text(json.dumps(plan))
    renamed = run.rename(run.with_name("<img onerror=x> & 'run'"))
    text = (renamed / "profile.jsonl").read_text()
    (renamed / "profile.jsonl").write_text(re.sub(r'("reason": )"[^"]*"', lambda m: m[1] + json.dumps(hostile), text))
    page = page_of(renamed)
    assert well_formed(page)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("</script>") == 3  # the data, the library, the charts
    assert [mark[3] for mark in data_of(page)["loss"]["marks"] if mark[1] == "migration"] == [hostile]  # unchanged


@pytest.mark.parametrize(
    ("break_run", "expected"),
    [
        (lambda run: shutil.rmtree(run / "plans"), "Stage boundaries are unknown"),
        (lambda run: (run / "metrics.jsonl").unlink(), "Losses are missing"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "There is no metrics.jsonl with losses"),
        (lambda run: (run / "run.json").write_text("{"), "Model, settings and versions are missing"),
        (lambda run: (run / "plans/plan-000001.json").unlink(), "The planner made no plan"),
        (lambda run: (run / "profile.jsonl").unlink(), "There is no profile.jsonl"),
        (lambda run: keep_lines(run, 1), "the profile has no step yet"),
        (lambda run: without_memory(run), "No memory is recorded"),
    ],
)
def test_html_names_what_is_missing(run, break_run, expected):
    break_run(run)
    page = page_of(run)
    assert well_formed(page)
    assert expected in page


def keep_lines(run, count):
    lines = (run / "profile.jsonl").read_text().splitlines()
    (run / "profile.jsonl").write_text("\n".join(lines[:count]) + "\n")


def without_losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"lm_loss": None} if "lm_loss" in line else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def release_a_worker(run):
    """After step 8 worker 1 is released; step 9, the first one after that, has no record."""
    plan = json.loads((CONTRACTS / "plan/valid/released.json").read_text())
    (run / "plans/plan-000001.json").write_text(json.dumps(plan | {"plan_id": 1}))
    *records, last = [json.loads(line) for line in (run / "profile.jsonl").read_text().splitlines()]
    last |= {"step": 10} | {name: last[name][:1] for name in ("busy_ns", "peak_memory_bytes")}
    header = records[0] | {"segment": 1, "workers": records[0]["workers"][:1]}
    (run / "profile.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (*records, header, last)))


def long_names(run):
    """Items, an event and the run with names of 200 characters and markup."""
    name = "<script>alert(1)</script>" + "x" * 175
    for path in (run / "profile.jsonl", *(run / "plans").iterdir()):
        text = path.read_text().replace('"frozen"', json.dumps(name))
        path.write_text(re.sub(r'"layers\.1(\.\w+)?"', lambda found: json.dumps(name + (found[1] or "")), text))
    return run.rename(run.with_name("<b>" + "r" * 197))


def broken_ends(run):
    for name in ("profile.jsonl", "metrics.jsonl"):
        (run / name).write_text((run / name).read_text() + '{"record": "step", "st')


def without_moves(run):
    (run / "plans/plan-000001.json").unlink()
    lines = [json.loads(line) for line in (run / "profile.jsonl").read_text().splitlines()]
    lines = [line | ({"plan_id": 0} if "plan_id" in line else {}) for line in lines if line["record"] != "plan_result"]
    (run / "profile.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def split_backward(run):
    shutil.copy(CONTRACTS / "profile/valid/split-backward.jsonl", run / "profile.jsonl")
    plan = json.loads((run / "plans/plan-000000.json").read_text())
    (run / "plans/plan-000000.json").write_text(json.dumps(plan | {"schedule": "zero-bubble"}))


def one_step(run):
    without_moves(run)
    keep_lines(run, 2)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[0] + "\n")


def without_memory(run):
    text = (run / "profile.jsonl").read_text()
    (run / "profile.jsonl").write_text(re.sub(r'("peak_memory_bytes": )\[[^]]*\]', r"\1[null, null]", text))


def test_html_names_a_loss_that_is_not_finite(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[2:5]:
        line["lm_loss"] = None  # as the format has it
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run)
    marks = [mark for mark in data_of(page)["loss"]["marks"] if mark[2] == "loss not finite"]
    assert [(mark[0], mark[3]) for mark in marks] == [(2.5, "in steps 3 to 5")]
    assert "not finite in 3 steps" in page


def test_html_loss_that_is_not_finite_at_the_end_is_the_tile(run):
    without_losses(run)
    page = page_of(run)
    assert '<span class="value">not finite</span>' in page
    assert [series["name"] for series in data_of(page)["loss"]["series"]] == ["validation loss", "step time"]


def test_html_of_released_workers_names_them(run):
    release_a_worker(run)
    page = page_of(run)
    data = data_of(page)
    assert [series["name"] for series in data["memory"]["series"]] == ["worker 0 (stage 0)", "worker 1 (released)"]
    marks = [mark[:3] for mark in data["loss"]["marks"]]
    assert [8.5, "event", "released 1 worker"] in marks
    assert [mark for mark in marks if mark[1] == "migration"] == [[8.5, "migration", "plan 1: 3 layers"]]
    workers = data["workers"]
    counts = dict(zip(workers["x"], workers["series"][0]["y"], strict=True))
    assert counts == dict.fromkeys(range(1, 9), 2) | {9: 1, 10: 1}  # step 9 has no record
    assert [data[name]["rows"] for name in ("timeline-before", "timeline-after")] == [
        ["worker 0", "worker 1"],
        ["worker 0"],
    ]
    assert "1 worker on cpu, 1f1b, 1 worker released" in page


def test_html_of_long_names_shortens_them(run):
    data = data_of(page_of(long_names(run)))
    labels = [mark[2] for mark in data["loss"]["marks"]] + data["layers"]["rows"]
    assert max(map(len, labels)) == 40
    assert any("…" in label for label in labels)


def test_html_of_a_profile_alone_has_no_losses(run):
    page = page_of(run / "profile.jsonl")
    assert well_formed(page)
    assert "made from a profile alone" in page


def long_step(count):
    spans = tuple(Span(0, Kind.FORWARD, at, 10 * at, 10 * at + 9) for at in range(count))
    return Timeline(step_ns=10 * count, busy_ns=(9 * count,), peak_memory_bytes=(0,), spans=(spans,))


def test_timeline_of_a_long_step_is_cut():
    spec, is_cut = timeline_spec(long_step(MAX_OPERATIONS + 5), [0], 100_000)
    assert is_cut
    assert len(spec["spans"][0]) == 5 * MAX_OPERATIONS
    assert not timeline_spec(long_step(3), [0], 100)[1]


def test_timeline_lists_only_kinds_that_are_drawn():
    spec, _ = timeline_spec(long_step(3), [4], 100)
    assert spec["kinds"] == [0]
    assert spec["rows"] == ["worker 4"]
    assert spec["spans"] == [[0, 9, 0, 0, 0, 1, 9, 0, 1, 0, 1, 9, 0, 2, 0]]


def test_trace_has_a_process_before_and_after(run):
    history = read_history(run)
    events = trace(history, make_problem(history.source, ProblemOptions()))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["With the first partition", "With plan 1"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert trace(history, None)["traceEvents"] == []


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [800, 1600])
def test_report_in_a_browser_has_no_clipped_text(window, page, tmp_path, width, dark):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html", width=width, dark=dark)
    assert window.errors == []
    assert window.requests == [(tmp_path / "report.html").as_uri()]
    assert window.problems() == []
    texts = window.texts()
    for expected in (
        "my-run",
        "migration",
        "plan 1: 1 layer",
        "stage 0",
        "worker 1",
        "forward",
        "backward",
        "0 ms",
        "10 ms",
    ):
        assert expected in texts
    assert "weight gradient" not in texts  # shown only where it is drawn


UNUSUAL = {
    "without-moves": without_moves,
    "one-step": one_step,
    "not-finite": without_losses,
    "long-names": long_names,
    "broken-ends": broken_ends,
    "released": release_a_worker,
    "split-backward": split_backward,
    "without-profile": lambda run: (run / "profile.jsonl").unlink(),
    "without-plans": lambda run: shutil.rmtree(run / "plans"),
    "profile-alone": lambda run: run / "profile.jsonl",
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_report_of_an_unusual_run_has_no_clipped_text(window, run, tmp_path, name):
    path = UNUSUAL[name](run)
    (tmp_path / "report.html").write_text(page_of(path or run))
    for width, dark in ((800, True), (1600, False)):
        window.open(tmp_path / "report.html", width=width, dark=dark)
        assert window.errors == []
        assert window.requests == [(tmp_path / "report.html").as_uri()]
        assert window.problems() == []
    assert ("weight gradient" in window.texts()) == (name == "split-backward")


def test_resized_and_dense_windows_and_open_tables_clip_no_text(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html", width=1600)
    for width, ratio in ((800, 1), (1600, 1), (1280, 2)):
        window.size(width, ratio=ratio)
        window.frame()
        assert window.problems() == []
    window.size(800)
    window.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    window.frame()
    assert "(2 layers)" in " ".join(window.texts())  # a cell of the table of stages
    assert window.problems() == []


LABELS = """
Object.values(dynmoCharts).flatMap((chart) => [...chart.marks.children].map((span) => {
  const box = span.getBoundingClientRect(), [x] = chart.spec.marks.find((mark) => mark[2] === span.textContent);
  const line = chart.plot.over.getBoundingClientRect().left + chart.plot.valToPos(x, "x");
  return Math.abs((span.classList.contains("left") ? box.right : box.left) - line);
}))
"""


@pytest.mark.parametrize("width", [800, 1600])
def test_labels_of_marks_are_at_their_lines(window, page, tmp_path, width):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html", width=width)
    distances = window.evaluate(LABELS)
    assert len(distances) >= 10
    assert max(distances) < 2
    window.drag("#loss .u-over", 0.3, 0.95)
    distances = window.evaluate(LABELS)
    assert len(distances) >= 5
    assert max(distances) < 2


def test_report_problems_are_found(window, page, tmp_path):
    """The measure itself: a label that is too long for its canvas, and two labels on each other."""
    broken = page.replace("size: (u, values) =>", "size: () => 20, unused: (u, values) =>")
    (tmp_path / "clipped.html").write_text(broken)
    window.open(tmp_path / "clipped.html")
    assert any(problem.startswith("clipped: ") for problem in window.problems())
    (tmp_path / "overlap.html").write_text(page.replace("</style>", "h3 { margin-bottom: -14px; }</style>", 1))
    window.open(tmp_path / "overlap.html")
    assert any(problem.startswith("overlap: ") for problem in window.problems())
    (tmp_path / "wide.html").write_text(page.replace("</style>", ".table td { min-width: 200px; }</style>", 1))
    window.open(tmp_path / "wide.html", width=800)
    assert any(problem.startswith("wider than its frame: ") for problem in window.problems())


def tip_of(window):
    window.frame()
    return window.evaluate(
        "(e => getComputedStyle(e).display === 'none' ? '' : e.innerText)(document.querySelector('#tip'))"
    )


@pytest.mark.parametrize(
    ("chart", "expected"),
    [("loss", "training loss"), ("layers", "stage"), ("memory", "worker 0"), ("timeline-after", "worker")],
)
def test_hover_shows_a_tooltip_and_leaving_hides_it(window, page, tmp_path, chart, expected):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html")
    x, y = window.center(f"#{chart} .u-over")
    window.mouse("mouseMoved", x + 3, y + 3)
    assert expected in tip_of(window)
    inside = "(b => b.left >= 0 && b.right <= innerWidth && b.top >= 0 && b.bottom <= innerHeight)"
    assert window.evaluate(f"{inside}(document.querySelector('#tip').getBoundingClientRect())")
    window.mouse("mouseMoved", 5, 5)
    assert tip_of(window) == ""
    assert window.errors == []


def point(window, chart, x, y, scale="y"):
    """Where a chart draws a value, in the window."""
    window.center(f"#{chart} .u-over")
    return window.evaluate(
        f"((chart) => {{ const box = chart.plot.over.getBoundingClientRect(); return [box.left"
        f" + chart.plot.valToPos({x}, 'x'), box.top + chart.plot.valToPos({y}, '{scale}')]; }})(dynmoCharts['{chart}'])"
    )


def test_hover_shows_the_values_under_the_cursor(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html")
    window.mouse("mouseMoved", *point(window, "loss", 5, 8.5, "y0"))
    assert tip_of(window).split("\n") == ["step 5", "training loss\t8.50", "step time\t40.0 ms"]
    spec = data_of(page)["layers"]
    row = spec["rows"].index("layers.2")
    value = spec["values"][row * spec["columns"] + 5] * spec["quantum"] / 1e6
    window.mouse("mouseMoved", *point(window, "layers", 6, row + 0.5))
    assert tip_of(window).split("\n") == ["step 6", f"layers.2\t{value:.2f} ms", "stage 1\tworker 1"]
    window.mouse("mouseMoved", *point(window, "layers", 9, row + 0.5))
    assert tip_of(window).split("\n")[2] == "stage 0\tworker 0"  # after the move
    first = data_of(page)["timeline-after"]["spans"][1][:5]  # of worker 1
    middle = (first[0] + first[1] / 2) * data_of(page)["timeline-after"]["quantum"]
    window.mouse("mouseMoved", *point(window, "timeline-after", middle, 1.5))
    assert tip_of(window).split("\n")[:2] == ["forward of microbatch 0", "worker 1\tstage 1"]


def test_tooltip_of_a_long_name_stays_in_the_window(window, run, tmp_path):
    (tmp_path / "report.html").write_text(page_of(long_names(run)))
    window.open(tmp_path / "report.html", width=800)
    window.mouse("mouseMoved", *point(window, "loss", 4.5, 8.5, "y0"))
    assert "alert(1)" in tip_of(window)
    box = window.evaluate(
        "(b => [b.left, b.right, b.top, b.bottom])(document.querySelector('#tip').getBoundingClientRect())"
    )
    assert box[0] >= 0
    assert box[1] <= 800


TICKS = """
canvasTexts.get(document.querySelector("#loss canvas")).map((each) => each.text).filter((text) => /^[0-9]+$/.test(text))
"""


def test_zoom_changes_the_ticks_of_the_axis(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html")
    whole = window.evaluate(TICKS)
    assert {"1", "9"} <= set(whole)
    window.drag("#loss .u-over", 0.4, 0.75)
    zoomed = window.evaluate(TICKS)
    assert {"5", "6"} <= set(zoomed) < set(whole)
    window.evaluate("document.querySelector('#loss .zoom button:last-child').click()")
    window.frame()
    assert window.evaluate(TICKS) == whole


def view(window, chart):
    return window.evaluate(f"dynmoCharts['{chart}'].view")


def test_drag_zooms_all_charts_over_steps_and_reset_restores(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html")
    whole = view(window, "loss")
    time = view(window, "timeline-after")
    window.drag("#loss .u-over", 0.3, 0.8)
    assert whole[0] < view(window, "loss")[0] < view(window, "loss")[1] < whole[1]
    for chart in ("layers", "memory"):
        assert view(window, chart) == view(window, "loss")
    scale = window.evaluate("(s => [s.min, s.max])(dynmoCharts['layers'].plot.scales.x)")
    assert scale == view(window, "loss")
    assert view(window, "timeline-after") == time
    assert window.problems() == []
    window.evaluate("document.querySelector('#loss .zoom button:last-child').click()")
    assert view(window, "layers") == whole


def test_keyboard_zooms_and_moves_the_cursor(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html")
    whole = view(window, "timeline-after")
    window.evaluate("document.querySelector('#timeline-after .plot').focus()")
    window.frame()
    for key in ("+", "ArrowRight"):
        window.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
    begin, end = view(window, "timeline-after")
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2)
    assert "worker" in tip_of(window)
    window.send("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert view(window, "timeline-before") == whole


def test_theme_button_changes_the_colors(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html")
    color = "getComputedStyle(document.body).backgroundColor"
    light = window.evaluate(color)
    for _ in range(2):
        window.evaluate("document.querySelector('.theme').click()")
    assert window.evaluate("document.querySelector('.theme').textContent") == "Theme: dark"
    assert window.evaluate(color) != light
    window.evaluate("document.querySelector('.theme').click()")
    assert window.evaluate(color) == light


def test_trace_button_saves_the_operations_of_both_timelines(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html")
    saved = window.evaluate(
        "new Promise((done) => { const make = URL.createObjectURL; URL.createObjectURL = (blob) => {"
        " blob.text().then(done); return make.call(URL, blob); }; document.querySelector('[data-trace]').click(); })"
    )
    events = json.loads(saved)["traceEvents"]
    expected = sum(len(row) // 5 for name, spec in data_of(page).items() if "timeline" in name for row in spec["spans"])
    assert sum(event["ph"] == "X" for event in events) == expected


def test_page_without_scripts_shows_the_tables(window, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    window.open(tmp_path / "report.html", scripts=False)
    window.send("Emulation.setScriptExecutionDisabled", value=False)
    visible = "[...document.querySelectorAll('figure table')].filter((table) => table.checkVisibility()).length"
    assert window.evaluate(visible) == len(data_of(page))
    assert window.evaluate("document.querySelector('noscript').innerText").startswith("The charts need JavaScript")
