"""The README's picture: drawn from the committed numbers, small, and without text outside of it."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ET

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.complete

ASSETS = ROOT / "bin" / "assets"
SPEC = importlib.util.spec_from_file_location("readme_picture", ROOT / "bin" / "readme_picture.py")
picture = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(picture)


@pytest.fixture(scope="module")
def numbers():
    return json.loads((ASSETS / "picture.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("theme", picture.THEMES)
def test_picture_is_drawn_from_the_committed_numbers(numbers, theme):
    drawn = (ASSETS / f"balance-{theme}.svg").read_text(encoding="utf-8")
    assert drawn == picture.svg(numbers, picture.THEMES[theme]), "run: python bin/readme_picture.py --redraw bin/assets"
    assert len(drawn) < 200_000


@pytest.mark.parametrize("theme", picture.THEMES)
def test_picture_shapes_and_text_lie_within_it(theme):
    root = ET.parse(ASSETS / f"balance-{theme}.svg").getroot()
    _, _, width, height = map(float, root.get("viewBox").split())
    texts = [element for element in root.iter() if element.tag.endswith("text")]
    assert len(texts) > 20
    for element in texts:
        x, size = float(element.get("x")), float(element.get("font-size"))
        extent = 0.55 * size * len(element.text)  # wider than the letters of any system font on average
        begin = {"start": x, "middle": x - extent / 2, "end": x - extent}[element.get("text-anchor")]
        assert begin >= 0, element.text
        assert begin + extent <= width, element.text
        assert size <= float(element.get("y")) <= height, element.text


def test_picture_boundary_follows_the_moves(numbers):
    changes = [b - a for a, b in zip(numbers["boundary"], numbers["boundary"][1:], strict=False) if b != a]
    assert sum(abs(change) for change in changes) == sum(count for _, count, _ in numbers["moved"])
    assert numbers["moved"]


def test_picture_ratio_is_that_of_the_median_steps(numbers):
    last_move = max(step for step, *_ in numbers["moved"])
    rows = {
        name: sorted(ms for step, ms in times if step > last_move + 3) for name, times in numbers["step_ms"].items()
    }
    middle = {name: (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2 for name, times in rows.items()}
    ratio = middle["static"] / middle["balanced"]
    assert picture.final_ratio(numbers) == pytest.approx(ratio)
    assert re.search(rf"<title>[^<]*{ratio:.2f} times as fast", (ASSETS / "balance-light.svg").read_text())


def test_numbers_of_a_run_are_read_from_its_files(tmp_path):
    for name in ("static", "balanced"):
        (tmp_path / name / "plans").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text(
            '{"step": 2, "step_ns": 2500000}\n{"step": 2, "validation_loss": 1}\n'
        )
    header = {"record": "header", "model": {"family": "gpt", "num_layers": 1, "hidden_size": 8}}
    header["items"] = [{"name": name} for name in ("embedding", "layers.0.attention", "layers.0.mlp", "head")]
    step = {"record": "step", "step": 2, "plan_id": 0, "forward_ns": [1e6] * 4, "backward_ns": [2e6] * 4}
    (tmp_path / "balanced" / "profile.jsonl").write_text("\n".join(map(json.dumps, [header, step])))
    plan = {
        "plan_id": 0,
        "stages": [{"items": ["embedding", "layers.0.attention"]}, {"items": ["layers.0.mlp", "head"]}],
    }
    (tmp_path / "balanced" / "plans" / "plan-000000.json").write_text(json.dumps(plan))
    event = {"kind": "frozen", "step": 1, "frozen_items": ["embedding"]}
    (tmp_path / "balanced" / "events.jsonl").write_text(json.dumps(event) + "\n")
    found = picture.numbers_of(tmp_path / "static", tmp_path / "balanced")
    assert found["costs_ms"] == [[3.0] * 4]
    assert found["boundary"] == [2]
    assert found["frozen"] == [[1, 1]]
    assert found["step_ms"] == {"static": [[2, 2.5]], "balanced": [[2, 2.5]]}
