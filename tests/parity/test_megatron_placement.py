"""The recorded placements of pipeline stages are those of the installed Megatron-core."""

from __future__ import annotations

import json

import pytest

from tests.parity.megatron_placement import CASES, placement
from tests.paths import ROOT

pytestmark = pytest.mark.complete

RECORD = ROOT / "tests" / "unit" / "dynmo_train" / "config" / "megatron" / "placement.json"


@pytest.mark.filterwarnings("ignore")
def test_recorded_placements_are_those_of_megatron_core():
    pytest.importorskip("megatron.core.transformer", reason="megatron-core is not installed (an optional peer)")
    recorded = json.loads(RECORD.read_text())["cases"]
    assert recorded == [{**case, "stages": placement(**case)} for case in CASES]
