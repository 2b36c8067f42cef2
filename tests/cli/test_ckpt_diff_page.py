"""dynmo-ckpt diff --html: statistics by tensor, equal to those of numpy, in a page without network."""

import json
import re

import numpy as np
import pytest

from tests.pages import well_formed
from tests.unit.dynmo_ckpt import native_checkpoints


@pytest.fixture
def pair(tmp_path):
    """Two checkpoints on different topologies that differ in two tensors; and both sets of parameters."""
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    q = {name: value.copy() for name, value in p.items()}
    q["layers.1.mlp.fc1.weight"] *= np.float32(1.5)
    q["layers.2.attention.qkv.bias"][3] = np.nan
    native_checkpoints.save(tmp_path / "a", p, m, tp=2)
    native_checkpoints.save(tmp_path / "b", q, m)
    return p, q


def test_statistics_equal_those_of_numpy(tmp_path, ckpt, pair):
    p, q = pair
    arguments = ("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "page.html", "--format", "json")
    found = {each["name"]: each for each in json.loads(ckpt(*arguments, code=1).stdout)["tensors"]}
    assert found.keys() == p.keys()
    name = "layers.1.mlp.fc1.weight"
    a, b = p[name].astype(np.float64), q[name].astype(np.float64)
    assert found[name]["elements_differing"] == a.size
    assert found[name]["max_abs"] == pytest.approx(np.abs(a - b).max())
    assert found[name]["rms"] == pytest.approx(np.sqrt(np.mean((a - b) ** 2)))
    assert found[name]["relative"] == pytest.approx(0.5, rel=1e-6)
    assert found[name]["cosine"] == pytest.approx(1.0)
    broken = found["layers.2.attention.qkv.bias"]
    assert (broken["elements_differing"], broken["max_abs"], broken["relative"]) == (1, None, 0.0)
    for other in p.keys() - {name, "layers.2.attention.qkv.bias"}:
        assert (found[other]["elements_differing"], found[other]["max_abs"], found[other]["rms"]) == (0, 0.0, 0.0)


def test_page_is_one_file_without_network(tmp_path, ckpt, pair):
    ckpt("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "page.html", code=1)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert well_formed(page)
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="https?:', page)
    for text in ("layers.1.mlp.fc1.weight", "By layer", "By kind of tensor", "Largest difference", "40 x 16"):
        assert text in page


def test_page_of_equal_checkpoints_has_no_differences(tmp_path, ckpt, pair):
    ckpt("diff", tmp_path / "a", tmp_path / "a", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<span class="value">0</span>' in page


def test_page_lists_tensors_of_one_side_and_escapes_names(tmp_path, ckpt):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    folder = tmp_path / "<b>"
    native_checkpoints.save(folder, p, m)
    native_checkpoints.save(
        tmp_path / "b",
        native_checkpoints.parameters(native_checkpoints.model(num_layers=2)),
        native_checkpoints.model(num_layers=2),
    )
    ckpt("diff", folder, tmp_path / "b", "--html", tmp_path / "page.html", code=1)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "is on the left only" in page
    assert "<b>" not in page.replace("<b>&", "")
    assert well_formed(page)


def test_page_in_a_missing_folder_is_an_error(tmp_path, ckpt, pair):
    result = ckpt("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "none" / "page.html", code=6)
    assert "--html" in result.stderr


def test_settings_that_differ_are_on_the_page(tmp_path, ckpt):
    """Equal tensors with another epsilon: exit code 1, so the page has the reason."""
    p = native_checkpoints.parameters(native_checkpoints.model())
    for name, epsilon in (("a", 1e-5), ("b", 1e-3)):
        native_checkpoints.save(tmp_path / name, p, native_checkpoints.model(layernorm_epsilon=epsilon))
    text = ckpt("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "page.html", code=1).stdout
    assert text.endswith("no tensor differs\n1 setting of the model differs\n")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for shown in ("Settings of the model that differ", "model.layernorm_epsilon", "0.001 on the right"):
        assert shown in page
    assert well_formed(page)
