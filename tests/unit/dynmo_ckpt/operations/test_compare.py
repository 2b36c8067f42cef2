import numpy as np
import pytest

from dynmo_ckpt._common.console import progress
from dynmo_ckpt.native.checkpoint import open_native
from dynmo_ckpt.operations.compare import differences
from dynmo_ckpt.tensors.equality import as_numbers
from tests.unit.dynmo_ckpt import native_checkpoints

ROLES = ("parameter", "mask")


def found(tmp_path, left, right, atol=0.0, m_right=None, tp=2):
    m = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "l", left, m)
    native_checkpoints.save(tmp_path / "r", right, m_right or m, tp=tp)
    with progress("test", 0, "MB") as tick:
        sides = open_native(tmp_path / "l"), open_native(tmp_path / "r")
        return {d.name: d for d in differences(*sides, ROLES, atol, tick)}


def test_differences_of_another_topology_are_none(tmp_path):
    p = native_checkpoints.parameters(native_checkpoints.model())
    assert found(tmp_path, p, p) == {}


def test_differences_of_values_have_count_and_largest_gap(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_ckpt.tensors.tiled_copy.PANEL_BYTES", 100)
    p = native_checkpoints.parameters(native_checkpoints.model())
    q = {name: value.copy() for name, value in p.items()}
    q["layers.2.mlp.fc2.weight"][3, 5] += 0.5
    q["layers.2.mlp.fc2.weight"][7, 0] -= 0.25
    q["head.norm.bias"][0] = np.nan
    result = found(tmp_path, p, q)
    assert set(result) == {"layers.2.mlp.fc2.weight", "head.norm.bias"}
    assert result["layers.2.mlp.fc2.weight"].elements == 2
    assert result["layers.2.mlp.fc2.weight"].max_abs == pytest.approx(0.5)
    assert result["head.norm.bias"].max_abs == np.inf


def test_settings_by_which_equal_tensors_compute_something_else_differ(tmp_path):
    p = native_checkpoints.parameters(native_checkpoints.model())
    m_right = native_checkpoints.model(layernorm_epsilon=0.1)
    result = found(tmp_path, p, p, m_right=m_right)
    assert {name: each.kind for name, each in result.items()} == {"model.layernorm_epsilon": "setting"}
    assert result["model.layernorm_epsilon"].message == "1e-05 on the left, 0.1 on the right"


def test_differences_within_atol_are_none(tmp_path):
    p = native_checkpoints.parameters(native_checkpoints.model())
    q = {name: value + np.float32(1e-3) for name, value in p.items()}
    assert found(tmp_path, p, q, atol=2e-3) == {}


def test_differences_ignores_padding_rows(tmp_path):
    p = native_checkpoints.parameters(native_checkpoints.model())
    q = dict(p)
    q["embedding.word.weight"] = np.vstack([p["embedding.word.weight"][:29], np.ones((11, 16), np.float32)])
    m_right = native_checkpoints.model(padded_vocab_size=40)
    assert found(tmp_path, p, q, m_right=m_right) == {}


@pytest.mark.parametrize("row", [0, 28])
def test_differences_changed_first_or_last_vocabulary_row_is_found(tmp_path, row):
    p = native_checkpoints.parameters(native_checkpoints.model())
    q = dict(p)
    q["embedding.word.weight"] = p["embedding.word.weight"].copy()
    q["embedding.word.weight"][row, 3] += 1.0
    assert found(tmp_path, p, q)["embedding.word.weight"].elements == 1


def test_differences_of_names_shapes_and_types_have_their_kind(tmp_path):
    p = native_checkpoints.parameters(native_checkpoints.model())
    q = dict(p)
    q["head.extra"] = q.pop("head.norm.bias")
    q["head.norm.weight"] = p["head.norm.weight"][:8]
    q["layers.0.mlp.norm.bias"] = p["layers.0.mlp.norm.bias"].astype(np.float16)
    result = found(tmp_path, p, q, tp=1, atol=1e-2)
    kinds = {name: difference.kind for name, difference in result.items()}
    assert kinds == {
        "head.norm.bias": "only-left",
        "head.extra": "only-right",
        "head.norm.weight": "shape",
        "layers.0.mlp.norm.bias": "dtype",
    }


def test_differences_applies_masks_of_one_side(tmp_path):
    p = native_checkpoints.parameters(native_checkpoints.model())
    masks = native_checkpoints.masks(p)
    dense = {n: np.where(masks[f"{n}.mask"], v, 0) if f"{n}.mask" in masks else v for n, v in p.items()}
    assert found(tmp_path, p | masks, dense) == {}


def test_as_numbers_bf16_becomes_float32():
    words = (np.array([1.5, -2.0, np.inf], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert as_numbers(words, "BF16").tolist() == [1.5, -2.0, np.inf]
