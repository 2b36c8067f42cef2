"""Reading the table of measured operators."""

from __future__ import annotations

import copy
import json

import pytest

from dynmo_balance._common.document import DocumentError
from dynmo_balance._common.errors import UsageError
from dynmo_balance.formats.operator_costs import PassTimes, parse_operator_costs, read_operator_costs
from dynmo_balance.recipes.recipe import COSTS
from tests.tables import table

DOCUMENT = json.loads((COSTS / "cpu-2048.json").read_text())


def test_table_has_the_rows_of_the_file():
    table = read_operator_costs(COSTS / "cpu-2048.json")
    assert (table.hidden_size, table.num_attention_heads, table.sequence_lengths) == (1024, 16, (2048,))
    assert len(table.rows) == len(DOCUMENT["rows"])
    [row] = [row for row in table.rows if row.setting == {"capacity": 0.5}]
    [written] = [row for row in DOCUMENT["rows"] if row["setting"] == {"capacity": 0.5}]
    names = ("forward_ns", "backward_input_ns", "backward_weight_ns")
    assert row.times == PassTimes(**{name: written[name] for name in names})
    assert row.dense == PassTimes(**written["dense"])
    assert DOCUMENT["device"]["name"] in table.label
    assert "1 thread," in table.label


@table(
    ("change", "message"),
    [
        (lambda d: d.update(format="dynmo.plan"), "format"),
        (lambda d: d.update(version=2), "version"),
        (lambda d: d["rows"][0].update(forward_ns=-1), "rows[0].forward_ns"),
        (lambda d: d["rows"][0].update(forward_ns=0.5), "rows[0].forward_ns"),
        (lambda d: d["rows"][0].update(case="magic"), "rows[0].case"),
        (lambda d: d["rows"][0]["setting"].update(sparsity=1.5), "rows[0].setting.sparsity"),
        (lambda d: d["rows"][0].update(sequence_length=7), "rows[0].sequence_length"),
        (lambda d: d.update(rows=[]), "rows"),
        (lambda d: d["device"].pop("name"), "device.name"),
    ],
)
def test_damaged_table_is_refused(change, message):
    document = copy.deepcopy(DOCUMENT)
    change(document)
    with pytest.raises(DocumentError) as error:
        parse_operator_costs(document, "costs.json")
    assert message in str(error.value)


def test_missing_table_is_refused(tmp_path):
    with pytest.raises(UsageError):
        read_operator_costs(tmp_path / "none.json")
