"""Folders that tests read: the project, the contract fixtures, the real data next to the project; their archives."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACTS = ROOT / "tests" / "contracts" / "fixtures"
# Tests that need it skip with a reason where it is absent.
SHARED_DATA = Path(os.environ.get("DYNMO_SHARED_DATA", ROOT / ".." / "shared" / "data"))


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive of the project; Python before 3.11.4 has no filters."""
    archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
