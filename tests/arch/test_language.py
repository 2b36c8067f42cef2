"""No tracked text uses the words that ``language.py`` lists, and no name is a pronoun, participle or metaphor."""

from __future__ import annotations

from tests.arch.language import all_findings, findings
from tests.tables import table


def test_tracked_text_uses_the_terms_of_the_field():
    assert list(all_findings()) == []


# A "~" is left out before the text is checked, so that this file passes its own test.
@table(
    ("text", "count"),
    [
        ("# The planner reports a plan; training continues.", 0),
        ("# It t~ells the plan.", 1),
        ("# Training go~es on bes~ide it.", 2),
        ("def f(to~ld): ...", 2),
        ("He~ldItems = 1", 1),
        ("class Report:\n    def __init__(self):\n        self.wan~ted = 1", 1),
        (f"def test_{'x' * 66}(): ...", 1),
        ("# The tensor is no longer used; there is no other.", 0),
        ("# x is n~o tensor", 1),
        ("# at least one; LE~AST:MOST", 1),
    ],
)
def test_language_finds_phrases_and_names(text, count):
    assert len(list(findings("m.py", text.replace("~", "")))) == count
