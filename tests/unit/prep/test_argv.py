from __future__ import annotations

import pytest

from dynmo_tools.argv import spread_lists


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (["--json-keys", "a", "b", "--x", "1", "2"], ["--json-keys", "a", "--json-keys", "b", "--x", "1", "2"]),
        (["--input", "a", "-o", "b", "c"], ["--input", "a", "-o", "b", "c"]),
        (
            ["--json-keys", "a", "--", "b", "--json-keys", "c", "d"],
            ["--json-keys", "a", "--", "b", "--json-keys", "c", "d"],
        ),
        ([], []),
    ],
)
def test_lists_behind_one_flag_are_spread(given, spread):
    assert spread_lists(given) == spread
