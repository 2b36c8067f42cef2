"""Views against numpy: the same operations on real arrays give the same elements."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo_ckpt._common.console import progress
from dynmo_ckpt.io.errors import UnsupportedError
from dynmo_ckpt.io.safetensors import read_index
from dynmo_ckpt.maps.axes import expand, parse_axes, stored_shape
from dynmo_ckpt.tensors.copy_plan import OutputTensor, expected_crc32, safetensors_file
from dynmo_ckpt.tensors.execute import execute
from dynmo_ckpt.tensors.tiled_copy import transposed_copy
from dynmo_ckpt.tensors.views import as_tensor, concatenate


def stored(tmp_path, array, key="x"):
    from safetensors.numpy import save_file

    path = tmp_path / f"{key}.safetensors"
    save_file({key: np.asarray(array, order="C")}, path)
    return as_tensor(read_index(path).arrays[key])


def written(tmp_path, tensor, shape=None, mask=None):
    from safetensors.numpy import load_file

    output = OutputTensor(key="y", shape=tensor.shape if shape is None else shape, content=tensor, mask=mask)
    plan = safetensors_file("out.safetensors", [output])
    with progress("test", 0, "MB") as tick:
        execute(tmp_path, [plan], jobs=1, tick=tick)
    return load_file(tmp_path / "out.safetensors")["y"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.uint8, np.bool_])
def test_tensor_methods_equal_numpy(tmp_path, dtype):
    array = np.random.default_rng(0).integers(0, 2 if dtype is np.bool_ else 200, (12, 10)).astype(dtype)
    tensor = stored(tmp_path, array)
    assert np.array_equal(written(tmp_path, tensor), array)
    assert np.array_equal(written(tmp_path, tensor.permute([1, 0])), array.T)
    assert np.array_equal(written(tmp_path, tensor.narrow(0, 3, 9).narrow(1, 2, 3)), array[3:9, 2:3])
    assert np.array_equal(
        written(tmp_path, tensor.unflatten(0, [3, 4]).permute([1, 2, 0])), array.reshape(3, 4, 10).transpose(1, 2, 0)
    )
    assert np.array_equal(written(tmp_path, tensor.zero_pad(0, 15)), np.pad(array, ((0, 3), (0, 0))))


@settings(deadline=None)
@given(data=st.data())
def test_tensor_methods_random_chains_equal_numpy(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("chain")
    shape = data.draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tensor = stored(tmp_path, array)
    for _ in range(data.draw(st.integers(0, 4))):
        step = data.draw(st.sampled_from(["permute", "narrow", "concatenate", "pad", "unflatten"]))
        dim = data.draw(st.integers(0, array.ndim - 1))
        if step == "permute":
            order = data.draw(st.permutations(range(array.ndim)))
            array, tensor = array.transpose(order), tensor.permute(order)
        elif step == "narrow":
            end = data.draw(st.integers(1, array.shape[dim]))
            begin = data.draw(st.integers(0, end - 1))
            array, tensor = array.take(range(begin, end), dim), tensor.narrow(dim, begin, end)
        elif step == "concatenate":
            array, tensor = np.concatenate([array, array], dim), concatenate([tensor, tensor], dim)
        elif step == "pad":
            widths = [(0, 2 if d == dim else 0) for d in range(array.ndim)]
            array, tensor = np.pad(array, widths), tensor.zero_pad(dim, array.shape[dim] + 2)
        elif array.ndim < 5:
            inner = 2 if array.shape[dim] % 2 == 0 else 1
            sizes = [array.shape[dim] // inner, inner]
            try:
                tensor = tensor.unflatten(dim, sizes)
            except UnsupportedError:
                continue
            array = array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
    assert tensor.shape == array.shape
    assert np.array_equal(written(tmp_path, tensor), array)


def test_panels_of_any_size_give_equal_bytes(tmp_path, monkeypatch):
    array = np.random.default_rng(0).normal(size=(40, 36)).astype(np.float32)
    mask = array > 0
    tensor, stored_mask = stored(tmp_path, array), stored(tmp_path, mask, "m")
    for limit in (4, 64, 100, 1000):
        monkeypatch.setattr("dynmo_ckpt.tensors.tiled_copy.PANEL_BYTES", limit)
        monkeypatch.setattr("dynmo_ckpt.tensors.tiled_copy.TRANSPOSE_PANEL_BYTES", limit)
        assert np.array_equal(written(tmp_path, tensor), array)
        turned, turned_mask = (
            tensor.unflatten(0, [4, 10]).permute([2, 1, 0]),
            stored_mask.unflatten(0, [4, 10]).permute([2, 1, 0]),
        )
        expected = np.where(mask, array, 0).reshape(4, 10, 36).transpose(2, 1, 0)
        assert np.array_equal(written(tmp_path, turned, mask=turned_mask), expected)


def test_panels_of_scalars_and_empty_tensors(tmp_path):
    for array in (np.array(3.0, np.float32), np.zeros((0, 4), np.float32), np.zeros((4, 0), np.float32)):
        assert np.array_equal(written(tmp_path, stored(tmp_path, array)), array)


def test_unflatten_other_sizes_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="cannot be split into 4 x 2"):
        stored(tmp_path, np.zeros((3, 2), np.float32)).unflatten(0, [4, 2])


@settings(deadline=None, max_examples=40)
@given(cuts=st.sets(st.integers(1, 59)), sizes=st.sampled_from([(60,), (10, 6), (3, 4, 5), (2, 3, 1, 10), (1, 60)]))
def test_unflatten_concatenated_flat_buffers_gives_tensor(tmp_path_factory, cuts, sizes):
    tmp_path = tmp_path_factory.mktemp("flat")
    array = np.arange(60, dtype=np.float32)
    bounds = [0, *sorted(cuts), 60]
    parts = [stored(tmp_path, array[a:b], f"{a}") for a, b in itertools.pairwise(bounds)]
    tensor = concatenate(parts, 0).unflatten(0, sizes)
    assert tensor.is_covered
    order = list(reversed(range(len(sizes))))
    assert np.array_equal(written(tmp_path, tensor), array.reshape(sizes))
    assert np.array_equal(written(tmp_path, tensor.permute(order)), array.reshape(sizes).transpose(order))


def test_concatenate_unlike_tensors_is_refused(tmp_path):
    one, other = stored(tmp_path, np.zeros((3, 2), np.float32)), stored(tmp_path, np.zeros((3, 3), np.float32), "b")
    with pytest.raises(UnsupportedError, match="cannot be concatenated"):
        concatenate([one, other], 0)


def test_expand_and_permute_in_both_directions(tmp_path):
    sizes = {"n": 3, "t": 3, "d": 2, "h": 5, "v": 7}
    array = np.random.default_rng(0).normal(size=(18, 5)).astype(np.float32)
    ours, theirs = parse_axes("(n t d) h"), parse_axes("h (t n d)")

    def moved(tensor, source, target):
        axes = [[axis for group in side for axis in group] for side in (source, target)]
        return expand(tensor, source, sizes, "x").permute([axes[0].index(axis) for axis in axes[1]])

    result = written(tmp_path, moved(stored(tmp_path, array), ours, theirs), stored_shape(theirs, sizes))
    assert np.array_equal(result, array.reshape(3, 3, 2, 5).transpose(3, 1, 0, 2).reshape(5, 18))
    back = moved(stored(tmp_path, result, "z"), theirs, ours)
    assert np.array_equal(written(tmp_path, back, stored_shape(ours, sizes)), array)


def test_expand_other_shape_is_refused(tmp_path):
    axes = parse_axes("v h")
    with pytest.raises(UnsupportedError, match=r"word: has the shape \[3, 2\]; the model requires \[3, 4\]"):
        expand(stored(tmp_path, np.zeros((3, 2), np.float32)), axes, {"v": 3, "h": 4}, "word")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_transposed_copy_equals_numpy(dtype):
    source = np.random.default_rng(0).integers(0, 255, (130, 3, 200)).astype(dtype)
    for order in ((0, 1, 2), (2, 1, 0), (2, 0, 1), (1, 2, 0)):
        target = np.zeros([source.shape[d] for d in order], dtype)
        transposed_copy(target, source.transpose(order))
        assert np.array_equal(target, source.transpose(order))


def test_expected_crc32_of_concatenated_arrays(tmp_path):
    import zlib
    from dataclasses import replace

    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    parts = []
    for key, part in zip("ab", np.split(array, 2), strict=True):
        tensor = stored(tmp_path, part, key)
        view = tensor.pieces[0].view
        summed = replace(view.array, crc32=zlib.crc32(part.tobytes()))
        parts.append(replace(tensor, pieces=(replace(tensor.pieces[0], view=replace(view, array=summed)),)))
    joined = concatenate(parts, 0)
    assert expected_crc32(OutputTensor(key="y", shape=(6, 4), content=joined)) == zlib.crc32(array.tobytes())
    side_by_side = concatenate(parts, 1)
    assert expected_crc32(OutputTensor(key="y", shape=(3, 8), content=side_by_side)) is None
    assert expected_crc32(OutputTensor(key="y", shape=(3, 4), content=joined.narrow(0, 0, 3).permute([1, 0]))) is None


def test_with_unit_dims_adds_and_removes_dimensions(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    halves = concatenate([stored(tmp_path, array[:2], "a"), stored(tmp_path, array[2:], "b")], 0)
    grown = halves.unflatten(0, [1, 6, 1])
    assert grown.shape == (1, 6, 1, 4)
    assert np.array_equal(written(tmp_path, grown, (6, 4)), array)
    assert grown.with_unit_dims((6, 1, 4)).narrow(0, 1, 4).shape == (3, 1, 4)
    assert np.array_equal(written(tmp_path, grown.with_unit_dims((6, 4)).narrow(0, 1, 4)), array[1:4])
