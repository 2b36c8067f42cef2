"""Which cases of a test run in the claims; the complete level (``--all``) has the others, too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

# A module of the complete level.
IS_COMPLETE = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.complete\b", re.MULTILINE)


def complete_but(values: Iterable[Any], *claims: Any) -> list[Any]:
    """Parameters of a test, tuples for several: those of ``claims``, and the others in the complete level only."""
    rows = [(value, value if isinstance(value, tuple) and value else (value,)) for value in values]
    return [pytest.param(*row, marks=() if value in claims else pytest.mark.complete) for value, row in rows]


def of_level(config: pytest.Config, table: Mapping[str, Any], *claims: str) -> Mapping[str, Any]:
    """What a fixture that runs a whole table runs: all of it in the complete level, else the rows of ``claims``."""
    return table if config.getoption("all") else {name: table[name] for name in claims}
