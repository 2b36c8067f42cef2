"""Splits text into sentences by rules, without models or data files.

A sentence ends at ``.``, ``!`` or ``?``, with closing quotes or brackets, before white space and a likely start of a
sentence, unless the period belongs to an abbreviation, an initial or a list number. The full stops of other scripts end
a sentence without white space, too: 。！？ of Chinese and Japanese, ؟ of Arabic, । of Hindi. Thai has none.
"""  # noqa: RUF002

from __future__ import annotations

import re

from ..config.settings import SplitSentencesSettings
from ..runner.parts import MapWriter, map_phases
from ..runner.task import Phase, Task
from ..runner.task_manifest import TaskManifest
from .scripts import IDEOGRAPHS, OTHER_ENDS, SENTENCE_ENDS

CLOSING_SIGNS = "\"'\u2019\u201d)]\u00bb\u300d\u300f\uff09\u300b\u3011\u3009\u3015"
_CLOSING = re.escape(CLOSING_SIGNS)
_MARKS = SENTENCE_ENDS + OTHER_ENDS
# Possessive, and from the start of a run of marks only: a page of dots takes linear time.
END = re.compile(rf"(?<![{_MARKS}])([{_MARKS}]++)[{_CLOSING}]*+(\s*+)")
# After a closing bracket, a particle or comma continues the sentence around a quotation: 「はい。」と言った。
CONTINUATION = re.compile("[\u3041-\u3096,\uff0c\u3001\u060c;\uff1b]")
IDEOGRAPH = re.compile(f"[{IDEOGRAPHS}]")
LAST_WORD = re.compile(r"([^\s(\[\"'\u2018\u201c]+)$")
# A period after these ends a sentence only before a capital letter; after those of NEVER_LAST it never does.
# fmt: off
ABBREVIATIONS = frozenset((
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "col", "capt", "lt", "sgt", "sen", "rep", "gov", "hon", "st",
    "jr", "sr", "messrs", "vs", "etc", "al", "cf", "eg", "ie", "e.g", "i.e", "p", "pp", "vol", "no", "fig", "figs",
    "eq", "ed", "eds", "inc", "ltd", "co", "corp", "dept", "univ", "assn", "bros", "jan", "feb", "mar", "apr",
    "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "approx", "u.s", "u.k", "u.n", "d.c", "a.m", "p.m",
    "ph.d", "b.c", "a.d",
))
NEVER_LAST = frozenset((
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "col", "capt", "lt", "sgt", "sen", "rep", "gov", "hon", "st",
    "messrs", "vs", "cf", "e.g", "i.e", "eg", "ie",
))
# fmt: on


def ends_sentence(before: str, after: str) -> bool:
    """Whether end marks between ``before`` and ``after`` end a sentence.

    Args:
        before: text up to and including the marks.
        after: text after the white space.
    """
    # No abbreviation ends with "!", "?" or "...": only a lower-case letter after them continues the sentence.
    marks = before.rstrip(CLOSING_SIGNS)
    if marks[-1:] in OTHER_ENDS:
        # A sentence in brackets, within another one.
        opened = max(before.find("("), before.find("\uff08"))
        return marks == before or (CONTINUATION.match(after) is None and not (opened > 0 and before[-1] in ")\uff09"))
    if not marks.endswith(".") or marks.endswith(".."):
        return not after[:1].islower()
    word = LAST_WORD.search(marks[:-1])
    if after[:1].islower():
        return False
    if word is None:
        return True
    last = word.group(1).lower()
    if last in NEVER_LAST or (len(last) == 1 and last.isalpha() and last != "i"):
        return False
    if last in ABBREVIATIONS:
        return after[:1].isupper() and last not in {"no", "p", "pp", "fig", "vol", "jan", "feb"}
    return not (last.isdigit() and len(last) <= 2 and marks[: -len(last) - 1].rstrip(" ")[-1:] in ("", "\n"))


def _ends_without_space(text: str, match: re.Match[str]) -> bool:
    """Whether end marks without white space after them may end a sentence."""
    marks, begin, end = match[1], match.start(), match.end()
    if marks in (".", "\uff0e"):
        return marks == "\uff0e" and not text[end : end + 1].isdigit()
    if not set(OTHER_ENDS).isdisjoint(marks):
        return True
    # Chinese and Japanese text with ASCII marks; not the names of companies, such as Yahoo!.
    return marks[0] != "." and bool(begin and IDEOGRAPH.match(text, begin - 1) and IDEOGRAPH.match(text, end))


def spans(text: str) -> list[tuple[int, int, int]]:
    """The sentences of ``text`` as (begin, end, end including trailing white space)."""
    found = []
    begin = len(text) - len(text.lstrip())
    for match in END.finditer(text, begin):
        end = match.start(2)
        if match.end() == end and not _ends_without_space(text, match):
            continue
        if match.end() < len(text) and ends_sentence(text[begin:end], text[match.end() : match.end() + 1]):
            found.append((begin, end, match.end()))
            begin = match.end()
    if text[begin:].strip():
        found.append((begin, len(text.rstrip()), len(text)))
    return found


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """The sentences of ``text``; with ``keep_newlines``, including trailing white space."""
    return [text[begin : (wide if keep_newlines else end)] for begin, end, wide in spans(text)]


def split_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``split-sentences``."""
    return map_phases(manifest, "tokenization.sentences:split_slice")


def split_slice(task: Task) -> None:
    """Task function: the documents of one slice with one sentence per line."""
    settings: SplitSentencesSettings = task.job.settings
    writer = MapWriter(task)
    for row, text in task.documents(settings.json_key):
        lines = (" ".join(sentence.split()) for sentence in split_sentences(text))
        writer.write(row, settings.json_key, text, "\n".join(lines))
