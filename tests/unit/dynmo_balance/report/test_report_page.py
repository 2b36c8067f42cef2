"""The page itself: escaping, tables, the library that it embeds, and its size for the longest runs."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from itertools import combinations, pairwise

import pytest

from dynmo_balance._common.report import charts, facts
from dynmo_balance._common.report.page import Chart, Note, Page, Section, Table, embedded_json, encoded, shortened
from dynmo_balance._common.report.run_data import Partition, RunData
from tests.browser import browser
from tests.pages import data_of, well_formed
from tests.paths import ROOT

ASSETS = ROOT / "bin" / "shared" / "_common" / "report" / "assets"


def page_with(*sections, **more):
    head = {"title": "t", "subtitle": "s", "kind": "k", "facts": [], "tiles": []}
    return Page(**head | more, sections=sections)


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "\u2028", "&lt;", "\udcff", "\0"])
def test_embedded_json_cannot_end_its_element(text):
    embedded = embedded_json({"a": text})
    assert not set(embedded) & set("<>&\u2028\u2029\udcff")
    assert json.loads(embedded)["a"] == text


def test_page_of_undecodable_names_is_utf_8():
    payload = encoded(page_with(Section(title="x", blocks=[Note(text="\udcff")]), title="run-\udcff"))
    assert b"run-\\udcff" in payload
    assert payload.decode()


def test_table_with_groups_and_details_is_well_formed():
    table = Table(
        columns=["plan", "gain: predicted", "gain: measured"], rows=[["1", "2", "3", "a reason"], ["4", "5", "6"]]
    ).html()
    assert well_formed(table)
    assert table.count("<th ") == 4
    assert 'colspan="2">gain</th>' in table
    assert '<td class="words more" colspan="3">a reason</td>' in table


def test_shortened_keeps_both_ends():
    assert shortened("a" * 500 + "z" * 500, 30) == "a" * 19 + "…" + "z" * 10
    assert len(shortened("x" * 1000)) == 300


def test_library_is_the_file_that_its_authors_published():
    text = (ASSETS / "uplot.js").read_text(encoding="utf-8")
    license_text, _, library = text.partition("*/\n")
    assert "MIT License" in license_text
    digest = hashlib.sha256(library.encode()).hexdigest()
    digests = {digest, hashlib.sha256(library.rstrip("\n").encode()).hexdigest()}
    readme = (ASSETS / "README.md").read_text(encoding="utf-8")
    assert any(each in readme for each in digests)
    assert len(text.encode()) < 500_000


def chart(name, *, wide):
    return Chart(name=name, title=name, text="", spec={}, table=Table(columns=["a"], rows=[]), wide=wide)


def test_chart_of_half_the_width_without_a_neighbor_is_wide():
    half = [chart(name, wide=False) for name in "abcde"]
    blocks = [half[0], half[1], half[2], Note(text="n"), half[3], chart("w", wide=True), half[4]]
    page = Section(title="x", blocks=blocks).html()
    assert re.findall(r'class="chart( wide)?" id="(\w)"', page) == [
        ("", "a"),
        ("", "b"),
        (" wide", "c"),
        (" wide", "d"),
        (" wide", "w"),
        (" wide", "e"),
    ]


def test_color_top_leaves_out_outliers():
    assert charts.color_top([]) == 0
    assert charts.color_top([3.0]) == 3
    assert charts.color_top([1.0] * 99 + [2.4]) == 2.4
    assert charts.color_top([1.0] * 99 + [50.0]) == 1.5


def colors(theme):
    """Name to red, green and blue of a theme, each 0 to 1."""
    text = (ASSETS / "report.css").read_text(encoding="utf-8")
    block = text.partition(":root {" if theme == "light" else ':root[data-theme="dark"] {')[2].partition("}")[0]
    return {
        name: [int(v[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        for name, v in re.findall(r"--([\w-]+): #(\w{6})", block)
    }


def linear(color):
    return [(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4) for v in color]


def contrast(first, second):
    """Ratio of luminances by WCAG 2.2."""
    lights = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (first, second))]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_of_both_themes_have_contrast(theme):
    found = colors(theme)
    for ink, ground in (
        ("ink", "card"),
        ("soft", "card"),
        ("soft", "page"),
        ("mark", "card"),
        ("event", "card"),
        ("accent", "card"),
    ):
        assert contrast(found[ink], found[ground]) >= 4.5, (ink, ground)
    assert contrast(found["tip"], found["tip-ink"]) >= 4.5
    for at in range(8):
        assert contrast(found[f"c{at}"], found["card"]) >= 3, at
    assert contrast(found["cut"], found["halo"]) >= 7


# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# severity 1.0, for linear red, green and blue.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def lab(color, vision):
    """CIE L*a*b* of a color as somebody sees it."""
    r, g, b = (min(1, max(0, sum(w * v for w, v in zip(row, linear(color), strict=True)))) for row in VISION[vision])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_differ_for_every_reader(theme, vision):
    found = colors(theme)
    lines = [lab(found[f"c{at}"], vision) for at in range(charts.MAX_LOSSES)]
    assert min(math.dist(a, b) for a, b in combinations(lines, 2)) > 12
    assert min(math.dist(a, b) for a, b in combinations(lines[: charts.MAX_LINES], 2)) > 15
    ramp = [lab(found[f"h{at}"], vision)[0] for at in range(6)]
    # Brightness alone orders the colors of a heat map, so that they can be printed in gray.
    steps = [b - a for a, b in pairwise(ramp)]
    assert all(step > 5 for step in steps) or all(step < -5 for step in steps)


def long_run(steps, layers, workers, every):
    """A run of 100,000 steps with 1,000 moves; the profile has every tenth step, as random as it can be."""
    rng = random.Random(0)
    items = [f"layers.{at}.{kind}" for at in range(layers) for kind in ("attention", "mlp")]
    partitions = {}
    for number in range(1001):
        cuts = [0, *sorted(rng.sample(range(1, len(items)), workers - 1)), len(items)]
        stages = tuple(tuple(items[a:b]) for a, b in pairwise(cuts))
        partitions[number] = Partition(plan_id=number, items=stages, workers=tuple(range(workers)))
    run = RunData(name="long", partitions=partitions)
    worker = {"device": "cuda", "memory_bytes": 80 << 30}
    run.add_record(
        {"record": "header", "segment": 0, "schedule": "1f1b", "microbatches": 8, "micro_batch_size": 1, "run_id": "r"}
        | {f"{name}_parallel_size": 1 for name in ("tensor", "data", "expert")}
        | {"model": {"family": "gpt", "num_layers": layers, "hidden_size": 1, "sequence_length": 1}}
        | {"items": [{"name": n, "layer": n.rpartition(".")[0], "param_count": 1, "tied_to": None} for n in items]}
        | {"workers": [{"worker": at, **worker} for at in range(workers)]}
    )
    for name in ("lm_loss", "validation_loss", "a_loss", "b_loss"):
        run.losses[name] = charts.Track()
    for step in range(1, steps + 1):
        for track in (*run.losses.values(), run.step_ns, run.tokens):
            track.add(step, rng.random() * 1e9)
        if step % (steps // 1000) == 0:
            number = step // (steps // 1000)
            run.add_record(
                {"record": "plan_result", "plan_id": number, "step": step, "result": "applied", "reason": "x" * 400}
                | {"pause_ns": 1, "bytes": 1}
            )
        if step % every == 0:
            run.add_record(
                {"record": "step", "step": step, "plan_id": step * 1000 // steps, "step_ns": 10**9}
                | {"forward_ns": [rng.randrange(10**8) for _ in items], "backward_ns": [0] * len(items)}
                | {"busy_ns": [rng.randrange(10**9) for _ in range(workers)]}
                | {"peak_memory_bytes": [rng.randrange(80 << 30) for _ in range(workers)]}
            )
    run.finish()
    return run


def page_of(run):
    marks = charts.marks_of([run], [""])
    blocks = [
        charts.loss_and_step_time(run, marks),
        charts.layer_costs(run, [run], marks, name="layers", title="Cost", top=None),
        charts.stage_loads(run, [run], marks, name="loads", title="Load"),
        charts.bubble([run], [""], marks, name="bubble"),
        charts.peak_memory(run, [run], marks, name="memory", title="Memory"),
        charts.workers_in_use([run], [""], marks, name="workers"),
    ]
    return page_with(Section(title="x", blocks=blocks), facts=facts.facts(run), tiles=facts.tiles(run)).html()


def test_page_of_100_000_steps_and_128_layers_is_below_2_mb():
    page = page_of(long_run(steps=100_000, layers=128, workers=64, every=50))
    assert well_formed(page)
    specs = data_of(page)
    assert specs["layers"]["columns"] <= 300
    assert len(specs["layers"]["rows"]) == 128
    assert len(specs["loss"]["x"]) <= 600
    assert 500_000 < len(page.encode()) < 2_000_000


def test_page_with_1_000_moves_of_16_stages_has_no_clipped_text(tmp_path):
    (tmp_path / "page.html").write_text(page_of(long_run(steps=2000, layers=48, workers=16, every=1)))
    with browser(tmp_path / "chromium") as window:
        for width, dark in ((800, False), (1600, True)):
            window.open(tmp_path / "page.html", width=width, dark=dark)
            assert window.errors == []
            assert window.problems() == []
        assert "stage 15" in window.texts()
