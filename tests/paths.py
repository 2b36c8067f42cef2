"""Folders that tests read: the project, the contract fixtures, the real data next to the project."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACTS = ROOT / "tests" / "contracts" / "fixtures"
# Tests that need it skip with a reason where it is absent.
SHARED_DATA = Path(os.environ.get("DYNMO_SHARED_DATA", ROOT / ".." / "shared" / "data"))
