"""Numbers in the units that people use."""

from __future__ import annotations

import pytest

from dynmo_balance._common.report.units import count_text, plural, share_text, size_text, time_text
from tests.tables import table


@table(
    ("ns", "expected"),
    [
        (0, "0 ns"),
        (7, "7 ns"),
        (12_300, "12.3 µs"),
        (340e6, "340 ms"),
        (999.6e6, "1.00 s"),
        (1_420e6, "1.42 s"),
        (125e9, "2 min 5 s"),
        (12_000e9, "3 h 20 min"),
        (None, "-"),
    ],
)
def test_time_text_has_the_unit_of_its_size(ns, expected):
    assert time_text(ns) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, "0 B"), (1023, "1,023 B"), (13_207_024_435, "12.3 GiB"), (2**40, "1.00 TiB")]
)
def test_size_text_has_binary_units(num_bytes, expected):
    assert size_text(num_bytes) == expected


def test_numbers_have_separators_and_units():
    assert [count_text(n) for n in (999, 9_999, 6_881_536, 175e9)] == ["999", "9,999", "6.88 M", "175 B"]
    assert [share_text(0.2859), share_text(-0.05, signed=True)] == ["28.6 %", "-5.0 %"]
    assert [plural(1, "layer"), plural(2000, "layer")] == ["1 layer", "2,000 layers"]
