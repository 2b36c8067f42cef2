"""The table of mutants applies to this tree, and the ordinary run sees five quick ones caught.

``mutate.py`` in this folder runs all of them.
"""

from __future__ import annotations

import pytest

from tests.mutants.mutate import RESULTS, problems_of, read_table, run_mutant
from tests.tables import table

MUTANTS = read_table()
QUICK = [mutant for mutant in MUTANTS if mutant.quick]


def test_table_has_forty_mutants_over_all_packages():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.package for mutant in MUTANTS} == {"dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt"}
    assert len(QUICK) == 5


def test_results_list_every_mutant_as_caught():
    text = RESULTS.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[2]) for row in rows] == [(mutant.name, mutant.fault) for mutant in MUTANTS]
    assert not [row[0] for row in rows if row[3] == "`survived`" or "did not run" in row[3]]
    assert f"{len(MUTANTS)} of {len(MUTANTS)} caught" in text


@table("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies_to_this_tree(mutant):
    assert problems_of(mutant) == []


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_quick_mutant_is_caught(mutant):
    outcome = run_mutant(mutant)
    assert outcome.is_caught, outcome.caught_by
