"""The page itself: escaping, tables, the library that it embeds, and its size for the longest runs."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import pairwise

import pytest

from dynmo_balance._common.report import charts, facts
from dynmo_balance._common.report.page import Note, Page, Section, Table, embedded_json, encoded, shortened
from dynmo_balance._common.report.run_data import Partition, RunData
from tests.pages import well_formed
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


def test_page_of_100_000_steps_and_128_layers_is_below_2_mb():
    run = long_run(steps=100_000, layers=128, workers=64, every=50)
    marks = charts.marks_of([run], [""])
    blocks = [
        charts.loss_and_step_time(run, marks),
        charts.layer_costs(run, [run], marks, name="layers", title="Cost", top=None),
        charts.stage_loads(run, [run], marks, name="loads", title="Load"),
        charts.peak_memory(run, [run], marks, name="memory", title="Memory"),
        charts.bubble([run], [""], marks, name="bubble"),
        charts.workers_in_use([run], [""], marks, name="workers"),
    ]
    page = page_with(Section(title="x", blocks=blocks), facts=facts.facts(run), tiles=facts.tiles(run)).html()
    assert well_formed(page)
    specs = {block.name: block.spec for block in blocks[:5]}
    assert specs["layers"]["columns"] <= 300
    assert len(specs["layers"]["rows"]) == 128
    assert len(specs["loss"]["x"]) <= 600
    assert 500_000 < len(page.encode()) < 2_000_000
