from __future__ import annotations

import numpy as np
import pytest

from dynmo_tools.formats import int_columns
from dynmo_tools.formats.int_columns import (
    add_scalar,
    arange,
    bounds,
    concatenate,
    drop_first,
    exclusive_cumsum,
    in_file,
    in_memory,
)

VALUES = list(range(3, 20))


@pytest.fixture(autouse=True, params=[1, 4, 17, 64])
def block(request, monkeypatch):
    """Every size of a block gives the same numbers."""
    monkeypatch.setattr(int_columns, "BLOCK", request.param)


@pytest.fixture(params=["memory", "file", "concatenated"])
def column(request, tmp_path):
    if request.param == "memory":
        return in_memory(VALUES)
    np.asarray([9, *VALUES], dtype="<i4").tofile(tmp_path / "numbers")
    whole = in_file(tmp_path / "numbers", "<i4", len(VALUES), offset=4)
    if request.param == "file":
        return whole
    return concatenate([in_file(tmp_path / "numbers", "<i4", 5, offset=4), in_memory([]), in_memory(VALUES[5:])])


def test_column_operations_match_numpy(column):
    array = np.asarray(VALUES)
    sums = np.cumsum(array)
    assert column.tolist() == column.tolist() == VALUES
    assert (len(column), column.total(), column.extremes()) == (17, sums[-1], (3, 19))
    assert add_scalar(column, 5).tolist() == (array + 5).tolist()
    assert drop_first(column).tolist() == VALUES[1:]
    assert len(drop_first(column)) == 16
    assert exclusive_cumsum(column, 2).tolist() == (2 * (sums - array)).tolist()
    assert bounds(column).tolist() == [0, *sums.tolist()]
    assert len(bounds(column)) == 18
    assert all(len(part) <= int_columns.BLOCK for part in column.blocks())


def test_column_without_elements_is_empty():
    empty = in_memory([])
    assert (empty.tolist(), empty.total(), empty.extremes()) == ([], 0, None)
    assert (bounds(empty).tolist(), exclusive_cumsum(empty).tolist(), drop_first(empty).tolist()) == ([0], [], [])
    assert arange(3).tolist() == [0, 1, 2]
