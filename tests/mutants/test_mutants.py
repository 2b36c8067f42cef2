"""The table of mutants applies to this tree, and the ordinary run sees five quick ones caught.

``mutate.py`` in this folder runs all of them.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.mutate import problems_of, read_table, run_mutant
from tests.tables import table

CLAIMS = {
    *("placement", "migration", "planner off the critical path", "exact plans", "formats", "Megatron's bytes"),
    *("Hugging Face round trips", "nothing executed", "nothing lost", "release and join", "quickstart"),
}
MUTANTS = read_table()
QUICK = [mutant for mutant in MUTANTS if mutant.quick]


def test_table_has_forty_mutants_over_all_packages():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    packages = {"dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt"}
    assert {mutant.package for mutant in MUTANTS} >= packages
    assert len(QUICK) == 5


def test_each_claim_of_the_readme_has_three_mutants():
    counts = Counter(mutant.claim for mutant in MUTANTS if mutant.claim)
    assert set(counts) == CLAIMS
    assert min(counts.values()) >= 3


@table("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies_to_this_tree(mutant):
    assert problems_of(mutant) == []


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_quick_mutant_is_caught(mutant):
    outcome = run_mutant(mutant)
    assert outcome.is_caught, outcome.caught_by
