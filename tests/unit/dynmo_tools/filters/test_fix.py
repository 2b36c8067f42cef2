from __future__ import annotations

import pytest

from dynmo_tools.filters.clean import language_detector
from dynmo_tools.filters.fix import FixTask, drop_reason, repaired
from tests.tables import table

ENGLISH = "This is an English sentence about nothing in particular. " * 4
GERMAN = "Das ist ein deutscher Satz über nichts Besonderes und so weiter. " * 4


@table(
    ("text", "tasks", "reason"),
    [
        ("a" * 511, [FixTask.REMOVE_512], "remove_512"),
        ("a" * 512, [FixTask.REMOVE_512], None),
        ("Please enable JavaScript", [FixTask.REMOVE_256_JAVASCRIPT], "remove_256_javascript"),
        ("JavaScript " * 30, [FixTask.REMOVE_256_JAVASCRIPT], None),
        ("Please enable it", [FixTask.REMOVE_256_JAVASCRIPT], None),
        (GERMAN, [FixTask.REMOVE_512_NON_ENGLISH], "remove_512_non_english"),
        (ENGLISH, [FixTask.REMOVE_512_NON_ENGLISH], None),
        (GERMAN * 4, [FixTask.REMOVE_512_NON_ENGLISH], None),
        ("JavaScript", [FixTask.REMOVE_256_JAVASCRIPT, FixTask.REMOVE_512], "remove_512"),
    ],
)
def test_drop_reason_of_each_filter_is_its_name(text, tasks, reason):
    assert drop_reason(text, tasks, language_detector(0)) == reason


@pytest.mark.parametrize(
    ("text", "tasks", "after"),
    [
        ("a  b\nc. \n\nD", [FixTask.GENERAL], "a b c. \n\nD"),
        ("End.\n\nNext", [FixTask.GENERAL], "End.\n\nNext"),
        ("a\n\n\n\nb\nc", [FixTask.GUTENBERG], "a\n\nb\nc"),
        ("a\nb", [FixTask.REALNEWS], "a\n\nb"),
        ("it 's so , so - so ! me @ home .", [FixTask.STORIES], "it's so, so-so! me@home."),
        ("schÃ¶n  und", [FixTask.FTFY, FixTask.GENERAL], "schön und"),
        ("schÃ¶n", [], "schÃ¶n"),
    ],
)
def test_repaired_applies_each_repair(text, tasks, after):
    assert repaired(text, tasks) == after
